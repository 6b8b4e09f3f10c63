"""The command line of the planner."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_distill.base.command import CommandLine, positive_numbers
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import FIGURES, check_new_file, write_json
from jax_distill.config import Config, read_grid
from jax_distill.devices import GPUS
from jax_distill.plan import search, show
from jax_distill.plan.caches import plan_caches, print_caches
from jax_distill.plan.planning import Plan, make_plan
from jax_distill.plan.search import Outcome, Request, Rows
from jax_distill.plan.suggest import suggest
from jax_distill.plan.target import RESERVE, find_target


def main(config: Config, *, device: str = "h200", devices: int = 1, step: str = "train") -> Plan:
    """The plan of a configuration. Raises as `make_plan` does."""
    return make_plan(config, find_target(device, devices), step=step)


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The planner's own options, and the rest, which is the configuration's."""
    parser = CommandLine(
        "jax_distill.plan",
        description="What a step needs of each device, as XLA plans it.",
        epilog="Every key of the configuration is an option too, as for jax_distill.train.",
    )
    known = ", ".join(GPUS)
    parser.add_argument("--device", default="h200", help=f"{known}; cpu; local: the GPU here")
    parser.add_argument("--devices", type=int, default=1, help="how many of them")
    parser.add_argument("--step", default="train", choices=["train", "teacher"])
    parser.add_argument("--memory_fraction", type=float, help="of a device that a process gets")
    parser.add_argument(
        "--margin", type=float, default=RESERVE, help="share of that to keep free (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the plan here")
    parser.add_argument("--plot", type=Path, help=f"draw it here ({', '.join(FIGURES)})")
    search = parser.add_mutually_exclusive_group()
    search.add_argument("--suggest", action="store_true", help="which changes would make it fit")
    search.add_argument("--sweep", nargs="+", metavar="KEY=A,B", help="plan every combination")
    search.add_argument("--longest", action="store_true", help="the longest row that fits")
    search.add_argument(
        "--cache_tokens",
        type=positive_numbers,
        metavar="N,N",
        help="what caches of so many tokens take; nothing is compiled",
    )
    parser.add_argument(
        "--granularity", type=int, default=1024, help="of --longest, tokens (%(default)s)"
    )
    options, rest = parser.parse_known_args(argv)
    if not 0 <= options.margin < 1:
        raise UserError(f"expected --margin in [0, 1), a share, got {options.margin}")
    if options.granularity < 1:
        raise UserError(f"expected --granularity of at least 1 token, got {options.granularity}")
    if options.cache_tokens and options.plot:
        raise UserError("expected no --plot with --cache_tokens, which draws none; leave it out")
    check_new_file(options.json, "--json")
    check_new_file(options.plot, "--plot", FIGURES)
    return options, rest


def command(argv: Sequence[str]) -> int:
    """0: it fits (a sweep: it was made); 1: it does not."""
    options, rest = read_options(argv)
    request = Request(
        arguments=tuple(rest),
        device=options.device,
        devices=options.devices,
        step=options.step,
        reserve=options.margin,
        fraction=options.memory_fraction,
    )
    if options.cache_tokens:
        return _cache_tokens(request, options)
    if options.sweep:
        rows, code = search.sweep(request, read_grid(options.sweep)), 0
        title = f"{request.step} step on {request.devices} × {request.target().name}, planned"
        show.print_rows(rows, title)
        written: Any = _as_list(rows)
    elif options.longest:
        length, rows = search.longest(request, granularity=options.granularity)
        show.print_rows(sorted(rows, key=lambda row: row[0]["data.sequence_length"]), "by length")
        to = f"(to {options.granularity:,})"
        found = f"the longest row that fits: {length:,} tokens {to}"
        say(found if length else "no row fits; --suggest says what would help")
        written, code = {"longest": length, "plans": _as_list(rows)}, 0 if length else 1
    else:
        plan = request.plan()
        show.print_plan(plan, request.target())
        rows, code = [({"step": plan.step}, plan)], 0 if plan.fits else 1
        written = dataclasses.asdict(plan)
        if options.suggest:
            written["suggestions"] = _suggest(request, plan)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        say(f"wrote {options.json}")
    plans = [(values, of) for values, of in rows if isinstance(of, Plan)]
    if options.plot and plans:
        show.draw(plans, options.plot)
        say(f"wrote {options.plot}")
    return code


def _cache_tokens(request: Request, options: argparse.Namespace) -> int:
    """The table of caches of so many tokens."""
    device, devices = request.device, request.devices
    found = plan_caches(request.config(), options.cache_tokens, device=device, devices=devices)
    print_caches(found, device=device, devices=devices)
    if options.json:
        write_json(options.json, [dataclasses.asdict(each) for each in found])
        say(f"wrote {options.json}")
    return 0


def _suggest(request: Request, plan: Plan) -> list[dict[str, Any]]:
    if plan.fits:
        say("it fits as it is: nothing to suggest")
        return []
    found = suggest(request, plan)
    rows: Rows = [({"change": change.command, "cost": change.cost}, of) for change, of in found]
    show.print_rows(rows, "changes that save memory, planned, the best first", parts=False)
    return [{**values, "plan": None, "reason": None, **_as_dict(of, "plan")} for values, of in rows]


def _as_dict(of: Outcome, name: str = "") -> dict[str, Any]:
    if isinstance(of, str):
        return {"reason": of}
    return {name: dataclasses.asdict(of)} if name else dataclasses.asdict(of)


def _as_list(rows: Rows) -> list[dict[str, Any]]:
    return [{"at": values, **_as_dict(of)} for values, of in rows]
