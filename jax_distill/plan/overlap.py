"""How much of the collectives' time a compiled program's schedule leaves beside other kernels.

XLA writes an asynchronous collective as a pair, `all-gather-start` and `all-gather-done`, and the
text of a scheduled program stands in the order in which it runs. The rule: a kernel that stands
between the two runs beside the collective, for as long as it takes at the roofline's rates (the
longer one of its FLOPs and its bytes); of several collectives on their way the oldest goes first,
since they share the links. A pair with nothing between, and a collective that is no pair, overlaps
with nothing. Computed from the schedule, not measured: a collective slows the kernels beside it.
"""

from typing import NamedTuple

from jax_distill.plan.hlo import COLLECTIVES, Counter, Hlo, Instruction, matmul_flops, totals
from jax_distill.plan.traffic import link_bytes, memory_traffic

CALLS = ("while", "conditional", "call")
"""What is no kernel, but runs a computation's."""


class Overlap(NamedTuple):
    """Seconds of one step: of all collectives, how much of that overlaps, of all other kernels."""

    links: float = 0.0
    hidden: float = 0.0
    kernels: float = 0.0

    def times(self, turns: int) -> "Overlap":
        return Overlap(self.links * turns, self.hidden * turns, self.kernels * turns)

    def plus(self, other: "Overlap") -> "Overlap":
        return Overlap(*(a + b for a, b in zip(self, other, strict=True)))


def find_overlap(hlo: Hlo, *, devices: int, flops: float, memory: float, links: float) -> Overlap:
    """Of a scheduled program on each of `devices`. flops, memory, links: what a device does in a
    second, FLOPs and bytes (`roofline.Rates`)."""
    sent, traffic = link_bytes(devices), memory_traffic(hlo, lambda _: "")
    known: dict[str, Overlap] = {}

    def inside(instruction: Instruction, count: Counter) -> float:
        """Σ of what `count` says of it and of what it calls."""
        found = 0.0
        for name in instruction.callees:
            found += sum(totals(Hlo(hlo.computations, name), count).values())
        return found

    def kernel_seconds(instruction: Instruction, around: dict[str, Instruction]) -> float:
        work = sum(matmul_flops(instruction, around).values()) + inside(instruction, matmul_flops)
        return max(work / flops, sum(traffic(instruction, around).values()) / memory)

    def called(instruction: Instruction) -> Overlap:
        parts = [of(name) for name in instruction.callees]
        if instruction.opcode == "conditional":
            return max(parts, key=lambda part: part.kernels + part.links, default=Overlap())
        total = Overlap()
        for part in parts:
            total = total.plus(part)
        return total.times(instruction.turns)

    def of(name: str) -> Overlap:
        if name in known:
            return known[name]
        known[name] = total = Overlap()
        instructions = hlo.computations.get(name, {})
        waiting: dict[str, float] = {}  # by the start's name: seconds that are left
        for each in instructions.values():
            if each.opcode in CALLS:
                part = called(each)
                total, beside = total.plus(part), part.kernels
            elif each.opcode.endswith("-done") and each.operands[0] in waiting:
                del waiting[each.operands[0]]
                continue
            elif is_collective(each, hlo):
                size = sum(sent(each, instructions).values()) + inside(each, sent)
                total = total.plus(Overlap(links=size / links))
                if each.opcode.endswith("-start"):
                    waiting[each.name] = size / links
                continue
            else:
                beside = kernel_seconds(each, instructions)
                total = total.plus(Overlap(kernels=beside))
            for start, left in waiting.items():
                used = min(beside, left)
                waiting[start], beside = left - used, beside - used
                total = total.plus(Overlap(hidden=used))
        known[name] = total
        return total

    return of(hlo.entry)


def is_collective(instruction: Instruction, hlo: Hlo) -> bool:
    """Whether it begins a collective, by its own name or as `async-start` of one."""
    if instruction.opcode == "async-start":
        return any(
            is_collective(each, hlo)
            for name in instruction.callees
            for each in hlo.computations.get(name, {}).values()
        )
    return instruction.opcode.removesuffix("-start") in COLLECTIVES
