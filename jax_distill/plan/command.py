"""The command line of the planner."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_distill.config import FIGURES, CommandLine, Config, Refusal, check_new_file
from jax_distill.devices import GPUS
from jax_distill.plan import search, show
from jax_distill.plan.planning import Plan, make_plan
from jax_distill.plan.search import Rows
from jax_distill.plan.suggest import suggest
from jax_distill.plan.target import RESERVE, find_target
from jax_distill.run import say


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
    parser.add_argument("--suggest", action="store_true", help="what would make it fit")
    parser.add_argument("--sweep", nargs="+", metavar="KEY=A,B", help="plan every combination")
    parser.add_argument("--longest", action="store_true", help="the longest row that fits")
    parser.add_argument(
        "--granularity", type=int, default=1024, help="of --longest, tokens (%(default)s)"
    )
    options, rest = parser.parse_known_args(argv)
    searches = [options.suggest, bool(options.sweep), options.longest]
    if sum(searches) > 1:
        raise Refusal("expected one of --suggest, --sweep and --longest, got several; ask in turn")
    if not 0 <= options.margin < 1:
        raise Refusal(f"expected --margin in [0, 1), a share, got {options.margin}")
    if options.granularity < 1:
        raise Refusal(f"expected --granularity of 1 token at least, got {options.granularity}")
    check_new_file(options.json, "--json")
    check_new_file(options.plot, "--plot", FIGURES)
    return options, rest


def command(argv: Sequence[str]) -> int:
    """0: it fits (a sweep: it was made); 1: it does not."""
    options, rest = read_options(argv)
    question = search.Question(
        arguments=tuple(rest),
        device=options.device,
        devices=options.devices,
        step=options.step,
        reserve=options.margin,
        fraction=options.memory_fraction,
    )
    if options.sweep:
        return _sweep(question, options)
    if options.longest:
        return _longest(question, options)
    return _one(question, options)


def _one(question: search.Question, options: argparse.Namespace) -> int:
    target = question.target()
    plan = question.plan()
    show.print_plan(plan, target)
    written = dataclasses.asdict(plan)
    if options.suggest:
        written["suggestions"] = _suggest(question, plan)
    _write(options.json, written)
    if options.plot:
        show.draw_plan(plan, options.plot)
        say(f"wrote {options.plot}")
    return 0 if plan.fits else 1


def _suggest(question: search.Question, plan: Plan) -> list[dict[str, Any]]:
    if plan.fits:
        say("it fits as it is: nothing to suggest")
        return []
    found = suggest(question, question.config(), question.target(), plan)
    rows: Rows = [({"change": knob.command, "cost": knob.cost}, of) for knob, of in found]
    show.print_rows(rows, "what would help, tried; the best first", parts=False)
    return [
        {
            "change": knob.command,
            "cost": knob.cost,
            "plan": dataclasses.asdict(of) if isinstance(of, Plan) else None,
            "reason": of if isinstance(of, str) else None,
        }
        for knob, of in found
    ]


def _sweep(question: search.Question, options: argparse.Namespace) -> int:
    rows = search.sweep(question, search.read_grid(options.sweep))
    target = question.target()
    show.print_rows(rows, f"{question.step} step on {question.devices} × {target.name}, planned")
    _write(options.json, _as_list(rows))
    _draw(rows, options.plot)
    return 0


def _longest(question: search.Question, options: argparse.Namespace) -> int:
    config = question.config()
    length, rows = search.longest(question, config, granularity=options.granularity)
    show.print_rows(sorted(rows, key=lambda row: row[0]["data.sequence_length"]), "tried")
    say(
        f"the longest row that fits: {length:,} tokens (to {options.granularity:,})"
        if length
        else "no row fits; --suggest says what would help"
    )
    _write(options.json, {"longest": length, "tried": _as_list(rows)})
    _draw(rows, options.plot)
    return 0 if length else 1


def _as_list(rows: Rows) -> list[dict[str, Any]]:
    return [
        {"at": values, **(dataclasses.asdict(of) if isinstance(of, Plan) else {"reason": of})}
        for values, of in rows
    ]


def _draw(rows: Rows, path: Path | None) -> None:
    plans = [(values, of) for values, of in rows if isinstance(of, Plan)]
    if path and plans:
        show.draw_rows(plans, path)
        say(f"wrote {path}")


def _write(path: Path | None, content: Any) -> None:
    if path:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        say(f"wrote {path}")
