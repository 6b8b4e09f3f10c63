"""Plans as tables and pictures. GB are 1e9 bytes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jax_distill.plan.planning import GB, PARTS, Plan, gb
from jax_distill.plan.search import Rows
from jax_distill.plan.target import Target
from jax_distill.run import console, say

WIDTH = 124
"""Columns of a table where no terminal says how wide it is."""
NAMES = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "activations_and_temps": "activations and temps",
    "store_batch": "store batch",
    "loss_chunk": "loss chunk",
}
HEADS = ("params", "optimizer", "gradients", "activations", "batch", "loss")
COLOURS = dict(zip(PARTS, ("C0", "C1", "C2", "C3", "C4", "C5"), strict=True))
TITLE_KEYS = {
    "train": (
        "loss.implementation",
        "data.sequence_length",
        "train.batch_size",
        "train.micro_batch_size",
    ),
    "teacher": ("teacher.path", "data.sequence_length", "teacher.batch_size"),
}


def title_of(plan: Plan) -> str:
    """What was planned, for whom, in one line."""
    values = {key: plan.config[key] for key in TITLE_KEYS[plan.step]}
    if values.get("train.micro_batch_size", 1) is None:
        values["train.micro_batch_size"] = plan.config["train.batch_size"]
    said = ", ".join(f"{key.split('.')[1]} {value}" for key, value in values.items())
    return f"{plan.step} step on {plan.devices} × {plan.device}: {said}"


def print_plan(plan: Plan, target: Target) -> None:
    """The whole of one plan."""
    table = Table(title=title_of(plan), title_justify="left", min_width=60)
    table.add_column("of one device, at the peak")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for part, size in plan.parts.items():
        table.add_row(NAMES[part], gb(size), f"{size / plan.peak_bytes:.1%}")
    table.add_section()
    table.add_row("peak", gb(plan.peak_bytes), "")
    table.add_row("kept free (reserve)", gb(plan.reserve_bytes), "")
    table.add_row("what a process gets", gb(plan.pool_bytes), "")
    table.add_row("memory of the device", gb(plan.device_bytes), "")
    console.print(table)
    for line in remarks(plan, target):
        say(line)


def remarks(plan: Plan, target: Target) -> list[str]:
    """Everything that is not in the table."""
    lines = [verdict(plan, target)]
    if plan.phases:
        heights = ", ".join(f"{phase} {gb(size)}" for phase, size in plan.phases.items())
        lines.append(f"highest by phase: {heights} GB; the peak is in the {plan.peak_phase}")
    else:
        lines.append(
            f"XLA of jax {plan.jax} does not tell its buffers: gradients and loss chunk are inside "
            "the activations and temps"
        )
    lines.append(
        f"tokens a step: {plan.tokens_per_step:,}; operations a step: "
        f"{plan.flops_per_step / 1e12:,.4g} TFLOP by the model's formula, "
        f"{plan.xla_flops_per_step / 1e12:,.4g} in XLA's program (recomputation included; loops by "
        "their turns)"
    )
    for name, of in plan.collectives.items():
        lines.append(f"{name}: {of['count']:,.0f} a step, {gb(of['bytes'])} GB through each device")
    if not plan.collectives:
        lines.append("collectives: none")
    lines.append(
        f"attention: {plan.attention}; compiled in {plan.compile_seconds:.1f} s with jax {plan.jax}"
    )
    return lines


def verdict(plan: Plan, target: Target) -> str:
    """Whether it fits, and how a process gets more of the device."""
    word = "fits" if plan.fits else "does not fit"
    left = "left" if plan.fits else "too much"
    line = (
        f"{word}: {gb(abs(plan.margin_bytes))} GB {left} of {gb(plan.pool_bytes)} "
        f"({plan.pool_note}) after a reserve of {gb(plan.reserve_bytes)} for {target.unseen}"
    )
    if target.on_gpu and plan.pool_bytes < 0.9 * plan.device_bytes:
        line += "; XLA_CLIENT_MEM_FRACTION=.95 before the command gives it "
        line += f"{gb(0.95 * plan.device_bytes)} GB"
    return line


def print_rows(rows: Rows, title: str, *, parts: bool = True) -> None:
    """Several plans, one a row, with or without their parts; of one that came to nothing the
    reason below."""
    table = Table(title=f"{title}; GB of one device", title_justify="left")
    for key in rows[0][0]:
        head = key.split(".")[-1]
        widest = max(len(head), *(len(str(values[key])) for values, _ in rows))
        table.add_column(head, overflow="fold", min_width=min(widest, 30))
    for head in ("peak", *(HEADS if parts else ()), "left", "fits"):
        table.add_column(head, justify="right", no_wrap=True)
    reasons = []
    for values, plan in rows:
        first = [str(value) for value in values.values()]
        if isinstance(plan, str):
            table.add_row(*first, "none")
            reasons.append(f"{' '.join(first)}: {plan}")
            continue
        sizes = [plan.peak_bytes, *(plan.parts.values() if parts else ()), plan.margin_bytes]
        table.add_row(*first, *map(gb, sizes), "yes" if plan.fits else "no")
    wide = console if console.is_terminal else Console(width=WIDTH)
    wide.print(table)
    for reason in reasons:
        say(reason)


def draw_plan(plan: Plan, path: Path) -> None:
    """The peak as one bar of its parts, each part below it, and what there is room for."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for place, (part, size) in enumerate(plan.parts.items(), 1):
        axes.barh([0, place], [size / GB] * 2, left=[left, 0], color=COLOURS[part])
        axes.text(size / GB, place, f"  {gb(size)}", va="center")
        left += size / GB
    axes.text(left, 0, f"  {left:.2f}", va="center", fontweight="bold")
    _draw_limits(axes.axvline, plan)
    axes.set_yticks(
        range(len(plan.parts) + 1), labels=["peak", *(NAMES[part] for part in plan.parts)]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(left, plan.device_bytes / GB))
    axes.set_xlabel("GB of one device (1e9 bytes)")
    axes.set_title(f"{title_of(plan)}\nplanned by XLA, attention {plan.attention}", fontsize=10)
    axes.legend(loc="lower center", fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_limits(line: Callable[..., Any], plan: Plan) -> None:
    limits = [(plan.device_bytes, "memory of the device", "-")]
    if plan.pool_bytes < plan.device_bytes:
        limits.append((plan.pool_bytes, "what a process gets", "--"))
    limits.append((plan.pool_bytes - plan.reserve_bytes, "less the reserve", ":"))
    for size, label, style in limits:
        line(size / GB, color="black", linestyle=style, linewidth=1, label=label)


def draw_rows(rows: Sequence[tuple[dict[str, Any], Plan]], path: Path) -> None:
    """Peak memory of several plans: over the key with most numbers, one line for each combination
    of the others; bars where no key has two numbers."""
    numeric = {
        key: len({values[key] for values, _ in rows})
        for key in rows[0][0]
        if all(isinstance(values[key], int | float) for values, _ in rows)
    }
    axis = max(numeric, key=lambda key: numeric[key], default="")
    figure = Figure(figsize=(9.5, 5), layout="constrained")
    axes = figure.add_subplot()
    if axis and numeric[axis] > 1:
        _draw_lines(axes, rows, axis)
    else:
        _draw_bars(axes, rows)
    _draw_limits(axes.axhline, rows[0][1])
    axes.set_ylabel("peak GB of one device (1e9 bytes)")
    first = rows[0][1]
    what = f"{first.step} step on {first.devices} × {first.device}, planned by XLA"
    axes.set_title(f"{what}, attention {first.attention}", fontsize=10)
    axes.grid(True, which="both", axis="y", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_lines(axes: Any, rows: Sequence[tuple[dict[str, Any], Plan]], axis: str) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for values, plan in rows:
        name = ", ".join(str(value) for key, value in values.items() if key != axis)
        lines.setdefault(name or "peak", []).append((values[axis], plan.peak_bytes / GB))
    markers = "osD^vP*X"
    for number, (name, points) in enumerate(lines.items()):
        style = dict(marker=markers[number % len(markers)], markersize=9 - number % 4 * 2)
        axes.plot(*zip(*sorted(points), strict=True), label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel=axis)
    ticks = sorted({values[axis] for values, _ in rows})
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    heights = [plan.peak_bytes / GB for _, plan in rows] + [rows[0][1].device_bytes / GB]
    steps = [m * 10.0**e for e in range(-6, 6) for m in (1, 2, 5)]
    low, high = 0.8 * min(heights), 1.25 * max(heights)
    axes.set_ylim(low, high)
    axes.set_yticks([step for step in steps if low <= step <= high])


def _draw_bars(axes: Any, rows: Sequence[tuple[dict[str, Any], Plan]]) -> None:
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for part in PARTS:
        sizes = [plan.parts[part] / GB for _, plan in rows]
        axes.bar(places, sizes, bottom=bottom, color=COLOURS[part], label=NAMES[part], width=0.6)
        bottom = [b + s for b, s in zip(bottom, sizes, strict=True)]
    for place, height in zip(places, bottom, strict=True):
        axes.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
    names = [" ".join(str(value) for value in values.values()) for values, _ in rows]
    axes.set_xticks(list(places), labels=names, fontsize=8)
