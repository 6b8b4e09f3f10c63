"""Many plans of one configuration: a grid, and the longest context."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from jax_distill.config import Config, Failure, Refusal, load
from jax_distill.plan.planning import Plan, gb, make_plan
from jax_distill.plan.target import Target, find_target
from jax_distill.run import console, say

LONGEST = 2**24
"""Where `longest` stops asking."""


@dataclass(frozen=True)
class Question:
    """What all plans of a search have in common.

    arguments: the configuration's command line; device, devices, step, reserve: `make_plan`'s;
    fraction: `find_target`'s.
    """

    arguments: tuple[str, ...]
    device: str
    devices: int
    step: str
    reserve: float
    fraction: float | None = None

    def config(self, *more: str) -> Config:
        return load([*self.arguments, *more], "jax_distill.plan")

    def target(self, *, devices: int | None = None, fraction: float | None = None) -> Target:
        return find_target(self.device, devices or self.devices, fraction=fraction or self.fraction)

    def plan(self, *more: str, devices: int | None = None, fraction: float | None = None) -> Plan:
        """The plan with more options on the command line. Raises as `make_plan` does."""
        target = self.target(devices=devices, fraction=fraction)
        with console.status(
            f"compiling {' '.join(more)} for {len(target.devices)} × {target.name}"
        ):
            return make_plan(self.config(*more), target, step=self.step, reserve=self.reserve)


def tried(make: Callable[[], Plan]) -> Plan | str:
    """The plan, or in one line why there is none."""
    try:
        return make()
    except (Refusal, Failure) as reason:
        return str(reason)


def outcome(plan: Plan | str) -> str:
    """A plan in half a line."""
    if isinstance(plan, str):
        return f"not possible: {plan}"
    word = "fits" if plan.fits else "does not fit"
    return f"{gb(plan.peak_bytes)} GB, {word}, {plan.compile_seconds:.0f} s"


def read_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """`key=a,b key2=c` → {key: [a, b], key2: [c]}, values as YAML reads them.

    Raises:
        Refusal: a word without `=`, a key twice.
    """
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not values or key in grid:
            raise Refusal(f"--sweep: expected key=a,b with each key once, got {word!r}")
        grid[key] = [yaml.safe_load(value) for value in values.split(",")]
    return grid


Rows = list[tuple[dict[str, Any], Plan | str]]
"""Values by key, and the plan that they gave, or in one line why there is none."""


def sweep(question: Question, grid: dict[str, list[Any]]) -> Rows:
    """Every combination of the grid's values.

    Raises:
        Refusal: the configuration takes none of them (what is wrong with the first is said).
    """
    rows = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        more = [f"--{key}={value}" for key, value in point.items()]
        question.config(*more)  # a key or value that cannot be meant ends here, with exit code 2
        plan = tried(lambda more=more: question.plan(*more))  # type: ignore[misc]
        say(f"{' '.join(more)}: {outcome(plan)}")
        rows.append((point, plan))
    return rows


def longest(question: Question, config: Config, *, granularity: int) -> tuple[int, Rows]:
    """(the longest row that fits, 0 where none does; every plan on the way).

    Doubles or halves the configured length until it fits on one side only, then halves the gap
    until it is `granularity` tokens.
    """
    rows: Rows = []

    def fits(length: int) -> bool:
        plan = tried(lambda: question.plan(f"--data.sequence_length={length}"))
        say(f"{length:,} tokens: {outcome(plan)}")
        rows.append(({"data.sequence_length": length}, plan))
        return isinstance(plan, Plan) and plan.fits

    length = -(-config.data.sequence_length // granularity) * granularity
    low, high = 0, 0
    if fits(length):
        low = length
        while low < LONGEST and fits(2 * low):
            low *= 2
        high = 2 * low
    else:
        high = length
        while high > granularity:
            lower = max(high // 2 // granularity, 1) * granularity
            if fits(lower):
                low = lower
                break
            high = lower
    while low and high - low > granularity:
        middle = (low + high) // 2 // granularity * granularity
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, rows
