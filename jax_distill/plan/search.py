"""Many plans of one configuration: a grid, and the longest context."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from jax_distill.base.console import console, say
from jax_distill.base.errors import RunError, UserError
from jax_distill.config import Config, load
from jax_distill.plan.planning import Plan, gb, make_plan
from jax_distill.plan.target import Target, find_target

LONGEST = 2**24
"""Where `longest` stops doubling."""
Outcome = Plan | str
"""A plan, or in one line why there is none."""
Rows = list[tuple[dict[str, Any], Outcome]]
"""Values by key, and the plan with these."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What all plans of a search have in common.

    arguments: the configuration's command line; device, devices, fraction: `find_target`'s; step,
    reserve: `make_plan`'s.
    """

    arguments: tuple[str, ...]
    device: str
    devices: int
    step: str
    reserve: float
    fraction: float | None = None

    def config(self) -> Config:
        return load(self.arguments, "jax_distill.plan")

    def target(self) -> Target:
        return find_target(self.device, self.devices, fraction=self.fraction)

    def plan(self) -> Plan:
        """Raises as `make_plan` does."""
        config, target = self.config(), self.target()
        with console.status(f"compiling for {self.devices} × {target.name}"):
            return make_plan(config, target, step=self.step, reserve=self.reserve)

    def changed(self, *options: str, **fields: Any) -> "Request":
        """With more options on the command line, which win, and other fields."""
        return dataclasses.replace(self, arguments=(*self.arguments, *options), **fields)

    def outcome(self, label: str) -> Outcome:
        """The plan, or why there is none; one line about it is printed after `label`."""
        plan: Outcome
        try:
            plan = self.plan()
            fits = "fits" if plan.fits else "does not fit"
            say(f"{label}: {gb(plan.peak_bytes)} GB, {fits}, {plan.compile_seconds:.0f} s")
        except (UserError, RunError) as error:
            plan = str(error)
            say(f"{label}: not possible: {plan}")
        return plan


def fits(plan: Outcome) -> bool:
    return isinstance(plan, Plan) and plan.fits


def sweep(request: Request, grid: Mapping[str, Sequence[str]]) -> Rows:
    """Every combination of the grid's values, which stand there as YAML reads them.

    Raises:
        UserError: a key or value that the configuration does not have.
    """
    rows: Rows = []
    for values in itertools.product(*([yaml.safe_load(v) for v in vs] for vs in grid.values())):
        point = dict(zip(grid, values, strict=True))
        options = [f"--{key}={value}" for key, value in point.items()]
        changed = request.changed(*options)
        changed.config()  # what is no configuration at all ends here, with exit code 2
        rows.append((point, changed.outcome(" ".join(options))))
    return rows


def longest(request: Request, *, granularity: int) -> tuple[int, Rows]:
    """(the longest row that fits, 0 where none does; every plan on the way).

    Doubles or halves the configured length until one fits and the next does not, then bisects down
    to `granularity` tokens.
    """
    rows: Rows = []

    def has_room(units: int) -> bool:
        length = units * granularity
        changed = request.changed(f"--data.sequence_length={length}")
        rows.append(({"data.sequence_length": length}, changed.outcome(f"{length:,} tokens")))
        return fits(rows[-1][1])

    low, high = 0, -(-request.config().data.sequence_length // granularity)
    while high * granularity <= LONGEST and has_room(high):
        low, high = high, 2 * high
    while not low and high > 1:
        if has_room(high // 2):
            low = high // 2
        else:
            high //= 2
    while low and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return low * granularity, rows
