"""What is in a program's temporary memory, and when: XLA's buffer assignment, read back.

XLA gives all temporaries one allocation and packs them into it by their lifetimes. With
`xla_dump_to` it writes the packing down: `*buffer-assignment.txt` has size and offset of every
value, `*live-range.txt` the instructions in order and from which to which each value lives.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

ALLOCATION = re.compile(r"allocation (\d+): size (\d+), (.*)")
VALUE = re.compile(
    r" value: <\d+ (?P<name>\S+?)(?P<element>\{[\d,]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)"
)
STEP = re.compile(r"    (\d+):(\S+)$")
RANGE = re.compile(r"    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


class Value(NamedTuple):
    """One value in the temporary memory.

    name: of the instruction that makes it. start, size: bytes, from the beginning of the
    allocations in their order. first, last: the instructions between which it lives, by their
    numbers in the schedule. shape: HLO text, `f32[28,8192,3072]{2,1,0}`.
    """

    name: str
    start: int
    size: int
    first: int
    last: int
    shape: str


class Temporaries(NamedTuple):
    """values: what lies there; values at the same bytes are one buffer used in place.
    schedule: the instructions' names in the order they run, loop bodies inside their loops."""

    values: list[Value]
    schedule: list[str]


def read_temporaries(folder: Path) -> Temporaries | None:
    """What XLA wrote into `folder` while it compiled one program; None where it wrote none of it,
    or in a format other than this."""
    assigned = sorted(folder.glob("*buffer-assignment.txt"))
    lived = sorted(folder.glob("*live-range.txt"))
    if len(assigned) != 1 or len(lived) != 1:
        return None
    text = lived[0].read_text("utf-8").splitlines()
    schedule = [match[2] for line in text if (match := STEP.match(line))]
    found = (match for line in text if (match := RANGE.match(line)))
    ranges = {match[1] + match[2]: (int(match[3]), int(match[4])) for match in found}
    values: list[Value] = []
    base, size, inside = 0, 0, False
    for line in assigned[0].read_text("utf-8").splitlines():
        if match := ALLOCATION.match(line):
            base += size
            inside = "preallocated-temp" in match[3]
            size = int(match[2]) if inside else 0
        elif inside and (match := VALUE.match(line)):
            lifetime = ranges.get(match["name"] + (match["element"] or "{}"))
            if lifetime is None:
                return None
            start = base + int(match["offset"])
            values.append(
                Value(match["name"], start, int(match["size"]), *lifetime, match["shape"])
            )
    return Temporaries(values, schedule) if schedule else None


def live_bytes(
    temporaries: Temporaries, kinds: list[str], order: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """kind → bytes [S] that values of that kind hold at each of the schedule's S instructions.

    A byte is counted once: where values share it, for the kind that stands first in `order`.
    kinds: of each value.
    """
    values, length = temporaries.values, len(temporaries.schedule)
    edges = np.unique([0] + [edge for v in values for edge in (v.start, v.start + v.size)])
    widths = np.diff(edges)
    taken = np.zeros((len(widths), length), bool)
    found = {}
    for kind in order:
        mine = np.zeros_like(taken)
        for value, of in zip(values, kinds, strict=True):
            if of == kind:
                low, high = np.searchsorted(edges, (value.start, value.start + value.size))
                mine[low:high, value.first : value.last + 1] = True
        mine &= ~taken
        taken |= mine
        found[kind] = widths @ mine
    return found
