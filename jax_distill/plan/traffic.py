"""Bytes that a compiled program moves: through the device's own memory, over PCIe, over links.

Read out of XLA's text. A kernel reads each of its operands once and writes its results once, but
for what it touches in part: of an array that it slices or gathers from, what comes out; of one that
it writes into (dynamic-update-slice, scatter), what goes in. Caches make the true number smaller
for what is read twice; a matmul whose tiles do not fit reads its operands more than once.
"""

from collections.abc import Callable

from jax_distill.plan.hlo import (
    CONTRACTED,
    Counter,
    Hlo,
    Instruction,
    arrays,
    collective_bytes,
    size_of,
)

HOST_SPACE = "S(5)"
"""XLA's mark of an array in the host's memory."""
FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast while conditional call iota
    optimization-barrier after-all partition-id replica-id fusion-start fusion-done async-start
    async-done copy-done""".split()
)
"""What is no kernel, or counts elsewhere."""
READ_IN_PART = ("dynamic-slice", "slice", "gather")
WRITE_IN_PART = {"dynamic-update-slice": 1, "scatter": 2}
"""opcode → which operand goes in."""
Users = dict[str, list[tuple[Instruction, int]]]


def memory_traffic(hlo: Hlo, part_of: Callable[[Instruction], str]) -> Counter:
    """A `Counter` of the bytes that kernels read and write, under three names of the part that an
    instruction belongs to: `PART matmul`, operands and results of matmuls; `PART sum`, of these
    what is added to and written again in fp32; `PART other`, all other kernels."""
    inside = {
        id(hlo.computations.get(name))
        for instructions in hlo.computations.values()
        for instruction in instructions.values()
        if instruction.opcode not in ("while", "conditional", "call")
        for name in instruction.callees
    }

    def count(instruction: Instruction, around: dict[str, Instruction]) -> dict[str, float]:
        if id(around) in inside or instruction.opcode in FREE:
            return {}
        body = [hlo.computations.get(name, {}) for name in instruction.callees]
        read, written = _kernel_bytes(instruction, around, body[0] if body else {})
        part = part_of(instruction)
        if not _is_matmul(instruction, body):
            return {f"{part} other": read + written}
        result = arrays(instruction.shape)[0]
        summed = sum(
            2.0 * size_of(around[operand].shape)
            for operand in instruction.operands
            if result[0] == "f32" and arrays(around[operand].shape) == [result]
        )
        return {f"{part} matmul": read + written - summed, f"{part} sum": summed}

    return count


def _is_matmul(instruction: Instruction, body: list[dict[str, Instruction]]) -> bool:
    called = [each for instructions in body for each in instructions.values()]
    return any(
        each.opcode == "dot" or (each.opcode == "custom-call" and CONTRACTED.search(each.rest))
        for each in (instruction, *called)
    )


def _kernel_bytes(
    instruction: Instruction, around: dict[str, Instruction], body: dict[str, Instruction]
) -> tuple[float, float]:
    """Read and written by one kernel; body: of a fusion."""
    if instruction.opcode != "fusion" or not body:
        alone = {name: around[name] for name in instruction.operands}
        users: Users = {}
        for position, name in enumerate(instruction.operands):
            users.setdefault(name, []).append((instruction, position))
        read = sum(_read(alone[name], users) for name in users)
        return read, _written(instruction, around)
    users = {}
    for each in body.values():
        for position, name in enumerate(each.operands):
            users.setdefault(name, []).append((each, position))
    parameters = [each for each in body.values() if each.opcode == "parameter"]
    root = list(body.values())[-1]
    return sum(_read(each, users) for each in parameters), _written(root, body)


def _read(array: Instruction, users: Users) -> float:
    """Bytes that are read of `array`: the whole, unless all its users take parts of it."""
    total = 0.0
    for user, position in users.get(array.name, []):
        if user.opcode == "bitcast":
            total += _read(user, users)
        elif position == 0 and user.opcode in READ_IN_PART:
            total += size_of(user.shape)
        elif position or user.opcode not in WRITE_IN_PART:
            return float(size_of(array.shape))
    return min(total, float(size_of(array.shape)))


def _written(root: Instruction, body: dict[str, Instruction]) -> float:
    """Bytes that a kernel writes whose last instruction is `root`."""
    if root.opcode == "tuple":
        return sum(_written(body[name], body) for name in root.operands)
    if root.opcode == "bitcast" and root.operands[0] in body:
        return _written(body[root.operands[0]], body)
    if root.opcode in WRITE_IN_PART:
        return float(size_of(body[root.operands[WRITE_IN_PART[root.opcode]]].shape))
    if root.opcode == "copy-start":
        return size_of(root.shape) / 2
    return float(size_of(root.shape))


def host_bytes(instruction: Instruction, around: dict[str, Instruction]) -> dict[str, float]:
    """`to host` and `to device`, bytes that an instruction copies between the two memories."""
    shape, opcode = instruction.shape, instruction.opcode
    if opcode == "dynamic-update-slice" and HOST_SPACE in shape:
        update = around[instruction.operands[1]].shape
        return {} if HOST_SPACE in update else {"to host": float(size_of(update))}
    if opcode not in ("dynamic-slice", "slice", "copy", "copy-start"):
        return {}
    given = around[instruction.operands[0]].shape
    if opcode == "copy-start":  # (what comes out, what goes in, …)
        given, shape = shape.split(", ", 1)[1], shape[: shape.index("}") + 1]
    if (HOST_SPACE in given) == (HOST_SPACE in shape):
        return {}
    return {"to host" if HOST_SPACE in shape else "to device": float(size_of(shape))}


def link_bytes(devices: int) -> Counter:
    """A `Counter` of `links`, the bytes that each of n devices in a ring sends for a collective:
    (n − 1)/n of what is gathered, scattered or exchanged, twice that where all get a sum."""

    def count(instruction: Instruction, around: dict[str, Instruction]) -> dict[str, float]:
        found = collective_bytes(instruction, around)
        if not found:
            return {}
        size = sum(value for name, value in found.items() if name.endswith(" bytes"))
        passes = 2 if "all-reduce" in found else 1
        return {"links": passes * size * (devices - 1) / devices}

    return count
