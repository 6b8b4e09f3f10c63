"""XLA's text of a compiled program: its matmuls' FLOPs and its collectives' bytes.

A loop's body is written once; what it does is counted as often as the loop turns
(`known_trip_count`; once where XLA does not know it).
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from jax_distill.attention import backward_workspace

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4}
BYTES |= {"u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
BYTES |= {"s4": 1, "u4": 1, "token": 0}

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)

ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
CALLEE = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s|ensions)"?[=:]\s*[\[{]([\d,"\s]*)[\]}]')
ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
SQUARE = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')


class Instruction(NamedTuple):
    """One line. shape: HLO text; operands: names; rest: attributes; source: JAX's name stack."""

    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str
    source: str

    @property
    def callees(self) -> list[str]:
        groups = (group.strip("{}").split(",") for group in CALLEE.findall(self.rest))
        return [name.strip(" %") for group in groups for name in group if name.strip(" %")]

    @property
    def turns(self) -> int:
        """How often what it calls is run."""
        match = TRIPS.search(self.rest)
        return int(match[1]) if self.opcode == "while" and match else 1


class Hlo(NamedTuple):
    """A module: the instructions of each computation by name, and which one is the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


def read_hlo(text: str) -> Hlo:
    """The text of a compiled module."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            current = computations.setdefault(match[2], {})
            entry = match[2] if match[1] else entry
        elif " = " in line and line.startswith("  "):
            instruction = _instruction(line.strip())
            current[instruction.name] = instruction
    return Hlo(computations, entry)


def _instruction(line: str) -> Instruction:
    name, _, right = line.removeprefix("ROOT ").partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, right = right[:end], right[end:].lstrip()
    opening = right.index("(")
    closing = _closing(right, opening)
    rest = right[closing + 1 :]
    source = re.search(r'op_name="([^"]*)"', rest)
    return Instruction(
        name=name.lstrip("%"),
        shape=shape,
        opcode=right[:opening],
        operands=re.findall(r"%([\w.\-]+)", right[opening:closing]),
        rest=rest,
        source=source[1] if source else "",
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index
    return len(text)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of every array in a shape's text, a tuple's in their order."""
    return [
        (kind, tuple(int(size) for size in sizes.split(",") if size))
        for kind, sizes in ARRAY.findall(shape)
    ]


def size_of(shape: str) -> int:
    """Bytes of a shape, a tuple's elements together."""
    return sum(
        math.prod(sizes) * BYTES.get(kind, 1)  # what is not listed is a float of 8 bits
        for kind, sizes in arrays(shape)
    )


def sources(hlo: Hlo) -> dict[str, str]:
    """Instruction → JAX's name stack; one without (a loop's parameter) has that of its caller."""
    callers: dict[str, tuple[str, Instruction]] = {}  # computation → where it is called, by what
    for home, instructions in hlo.computations.items():
        for instruction in instructions.values():
            for callee in instruction.callees:
                callers.setdefault(callee, (home, instruction))
    found: dict[str, str] = {}
    for home, instructions in hlo.computations.items():
        for name, instruction in instructions.items():
            at, source = home, instruction.source
            while not source and at in callers:
                at, caller = callers[at]
                source = caller.source
            found[name] = source
    return found


Counter = Callable[[Instruction, dict[str, Instruction]], dict[str, float]]
"""Of an instruction and those of its computation by name: numbers by name."""


def totals(hlo: Hlo, count: Counter) -> dict[str, float]:
    """What `count` says of each instruction, summed as often as it runs; of the branches of a
    conditional the one with most."""
    known: dict[str, dict[str, float]] = {}

    def of(name: str) -> dict[str, float]:
        if name in known:
            return known[name]
        total = known[name] = dict[str, float]()
        instructions = hlo.computations.get(name, {})
        for instruction in instructions.values():
            parts = [of(callee) for callee in instruction.callees]
            if instruction.opcode == "conditional":
                parts = [max(parts, key=lambda part: sum(part.values()), default={})]
            for times, part in [(1, count(instruction, instructions))] + [
                (instruction.turns, part) for part in parts
            ]:
                for key, value in part.items():
                    total[key] = total.get(key, 0) + value * times
        return total

    return of(hlo.entry)


def matmul_flops(instruction: Instruction, around: dict[str, Instruction]) -> dict[str, float]:
    """2·(elements that come out)·(terms summed for each) of a matmul; of cuDNN's attention two
    matmuls of [B,H,T,T] forward and five backward, half of each where it is causal."""
    if attention := ATTENTION.search(instruction.rest):
        square = _square(instruction)
        if square is None:
            return {}
        cells = math.prod(square)
        width = arrays(around[instruction.operands[0]].shape)[0][1][-1]
        matmuls = 5 if attention[1] else 2
        share = 0.5 if '"mask_type": "CAUSAL"' in instruction.rest else 1.0
        return {"flops": 2.0 * matmuls * share * cells * width}
    cublas = instruction.opcode == "custom-call" and "__cublas$" in instruction.rest
    contracted = CONTRACTED.search(instruction.rest)
    if not (cublas or instruction.opcode == "dot") or contracted is None:
        return {}
    left = arrays(around[instruction.operands[0]].shape)[0][1]
    summed = math.prod(left[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    out = arrays(instruction.shape)[0][1]
    return {"flops": 2.0 * math.prod(out) * summed}


def _square(instruction: Instruction) -> list[int] | None:
    """B, H, T, T of cuDNN's attention."""
    match = SQUARE.search(instruction.rest)
    return [int(size) for size in re.findall(r"\d+", match[1])] if match else None


def hidden_workspace(hlo: Hlo) -> int:
    """Bytes that cuDNN's attention takes beside XLA's buffers: the largest workspace of its
    backwards, one of which runs at a time. 0 where XLA asked cuDNN for it, which it can on a GPU
    that is there, and has counted it among the temporaries: the last, u8, of what a call gives."""
    largest = 0
    for instructions in hlo.computations.values():
        for instruction in instructions.values():
            attention = ATTENTION.search(instruction.rest)
            square = _square(instruction) if attention and attention[1] else None
            if square is None or arrays(instruction.shape)[-1] != ("u8", (0,)):
                continue
            rows, heads, length, _ = square
            width = arrays(instructions[instruction.operands[0]].shape)[0][1][-1]
            largest = max(largest, backward_workspace(rows, length, heads, width))
    return largest


def collective_bytes(instruction: Instruction, around: dict[str, Instruction]) -> dict[str, float]:
    """Of a collective: how often (`NAME`) and bytes (`NAME bytes`), the larger of what one device
    gives and what it gets."""
    name = instruction.opcode.removesuffix("-start")
    if name not in COLLECTIVES:
        return {}
    given = sum(size_of(around[operand].shape) for operand in instruction.operands)
    got = size_of(instruction.shape)
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("("):
        got -= given  # (what goes in, what comes out, …)
    return {name: 1, f"{name} bytes": float(max(given, got))}
