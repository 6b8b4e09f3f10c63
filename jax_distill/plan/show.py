"""Plans as tables and figures. GB are 1e9 bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_distill.base.charts import Limit, draw_bars, draw_lines
from jax_distill.base.console import console, say
from jax_distill.plan.planning import GB, PARTS, Plan, gb
from jax_distill.plan.roofline import Roofline
from jax_distill.plan.search import Rows
from jax_distill.plan.target import Target

WIDTH = 124
"""Characters of a table where no terminal says how wide it is."""
HEADS = ("params", "teacher", "optimizer", "gradients", "activations", "batch", "loss", "cuDNN")
"""PARTS, short."""
TITLE_KEYS = {
    "train": "loss.implementation data.sequence_length train.batch_size train.micro_batch_size",
    "teacher": "teacher.path data.sequence_length teacher.batch_size",
}


def name_of(part: str) -> str:
    """Of PARTS, as it is shown."""
    return part.replace("_", " ").replace("cudnn", "cuDNN")


def title_of(plan: Plan) -> str:
    """What was planned, for which devices, in one line."""
    values = {key: plan.config[key] for key in TITLE_KEYS[plan.step].split()}
    if values.get("train.micro_batch_size", 1) is None:
        values["train.micro_batch_size"] = plan.config["train.batch_size"]
    shown = ", ".join(f"{key.split('.')[1]} {value}" for key, value in values.items())
    return f"{plan.step} step on {plan.devices} × {plan.device}: {shown}"


def print_plan(plan: Plan, target: Target) -> None:
    """The whole of one plan."""
    table = Table(title=title_of(plan), title_justify="left", min_width=60)
    table.add_column("of one device, at the peak")
    table.add_column("GB", justify="right")
    table.add_column("share", justify="right")
    for part, size in plan.parts.items():
        table.add_row(name_of(part), gb(size), f"{size / plan.peak_bytes:.1%}")
    table.add_section()
    table.add_row("peak", gb(plan.peak_bytes), "")
    table.add_row("kept free (reserve)", gb(plan.reserve_bytes), "")
    table.add_row("what a process gets", gb(plan.pool_bytes), "")
    table.add_row("memory of the device", gb(plan.device_bytes), "")
    console.print(table)
    if plan.roofline:
        console.print(roofline_table(plan, plan.roofline))
    for line in remarks(plan, target):
        say(line)


def roofline_table(plan: Plan, of: Roofline) -> Table:
    """What the program asks of each resource, and the time that takes."""
    rates, loss = of.rates, "loss" if plan.step == "train" else "top K"
    title = (
        f"roofline of one device, computed, not measured: {rates.flops / 1e12:.0f} TFLOP/s bf16, "
        f"memory {rates.memory / 1e12:.3g} TB/s, links {gb(rates.links)} GB/s and PCIe "
        f"{gb(rates.pcie)} GB/s each way"
    )
    table = Table(title=title, title_justify="left", min_width=60)
    for name in ("of one step", "amount", "seconds"):
        table.add_column(name, justify="left" if name == "of one step" else "right")

    def row(name: str, amount: float, rate: float, unit: str = "GB") -> None:
        shown = f"{amount / 1e12:,.4g}" if unit == "TFLOP" else gb(amount)
        table.add_row(name, f"{shown} {unit}", f"{amount / rate:.3f}")

    row("matmuls", of.flops, rates.flops, "TFLOP")
    row("memory, all kernels", of.memory_bytes, rates.memory)
    row("links to other devices", of.link_bytes, rates.links)
    row("of these beside other kernels", of.overlapped_link_bytes, rates.links)
    row("PCIe, the busier way", max(of.to_host_bytes, of.to_device_bytes), rates.pcie)
    table.add_section()
    row(f"{loss}: matmuls", of.loss_flops, rates.flops, "TFLOP")
    row(f"{loss}: memory, other kernels", of.loss_bytes, rates.memory)
    row(f"{loss}: memory, fp32 sums of matmuls", of.loss_sum_bytes, rates.memory)
    row(f"{loss}: memory, matmuls' other arrays", of.loss_matmul_bytes, rates.memory)
    return table


def remarks(plan: Plan, target: Target) -> list[str]:
    """Everything that is not in the table."""
    phases = (
        f"XLA of jax {plan.jax} does not write its buffers down: gradients and loss chunk are "
        "counted among the activations and temps"
    )
    if plan.phases:
        peaks = ", ".join(f"{phase} {gb(size)}" for phase, size in plan.phases.items())
        phases = f"peak by phase: {peaks} GB; the highest is in the {plan.peak_phase}"
    counted = "recomputation included"
    if plan.attention == "blockwise":
        counted += "; of attention's inner loops, whose length depends on the block, one turn"
    return [
        verdict(plan, target),
        phases,
        f"tokens a step: {plan.tokens_per_step:,}; TFLOP a step: {plan.flops_per_step / 1e12:,.4g} "
        f"by the model's formula, {plan.xla_flops_per_step / 1e12:,.4g} in XLA's program "
        f"({counted})",
        *host_line(plan),
        *roofline_line(plan),
        *(
            f"{name}: {of['count']:,.0f} a step, {gb(of['bytes'])} GB through each device"
            for name, of in (plan.collectives or {"collectives": {"count": 0, "bytes": 0}}).items()
        ),
        f"attention: {plan.attention}; compiled in {plan.compile_seconds:.1f} s, jax {plan.jax}",
    ]


def roofline_line(plan: Plan) -> list[str]:
    """Between which times a step is, at the roofline's rates."""
    if not plan.roofline:
        return []
    seconds, ratio = plan.roofline.seconds, plan.roofline.loss_ratio
    longest = max(seconds, key=lambda name: seconds[name])
    line = (
        f"computed: a step takes at least {seconds[longest]:.3f} s ({longest}), and "
        f"{sum(seconds.values()):.3f} s where none overlaps another"
    )
    if sent := plan.roofline.link_bytes:
        share = plan.roofline.overlapped_link_bytes / sent
        line += f"; XLA's schedule runs {share:.0%} of the collectives' time beside other kernels"
    if plan.step == "train":
        line += f"; the loss {ratio:.2f} × its matmuls where only their own traffic overlaps"
    return [line]


def host_line(plan: Plan) -> list[str]:
    """What the host's memory must hold, where something is offloaded to it."""
    if not plan.host_bytes:
        return []
    parts = ", ".join(f"{name} {gb(size)}" for name, size in plan.host_bytes.items())
    return [f"host memory: {gb(sum(plan.host_bytes.values()))} GB free ({parts})"]


def verdict(plan: Plan, target: Target) -> str:
    """Whether it fits, and how a process gets more of the device."""
    word, left = ("fits", "left") if plan.fits else ("does not fit", "too much")
    line = (
        f"{word}: {gb(abs(plan.margin_bytes))} GB {left} of {gb(plan.pool_bytes)} "
        f"({plan.pool_note}) after a reserve of {gb(plan.reserve_bytes)} for {target.unseen}"
    )
    if target.on_gpu and plan.pool_bytes < 0.9 * plan.device_bytes:
        line += "; XLA_CLIENT_MEM_FRACTION=.95 before the command gives it "
        line += f"{gb(0.95 * plan.device_bytes)} GB"
    return line


def print_rows(rows: Rows, title: str, *, parts: bool = True) -> None:
    """Several plans, one a row, with or without their parts; where there is none, the reason
    below."""
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


def draw(rows: Sequence[tuple[dict[str, Any], Plan]], path: Path) -> None:
    """Peak memory over the key with most numbers, one line for each combination of the others; its
    parts as bars where no key has two numbers."""
    first = rows[0][1]
    numeric = {
        key: len({values[key] for values, _ in rows})
        for key in rows[0][0]
        if all(isinstance(values[key], int | float) for values, _ in rows)
    }
    axis = max(numeric, key=lambda key: numeric[key], default="")
    limits = [Limit(first.device_bytes / GB, "memory of the device")]
    if first.pool_bytes < first.device_bytes:
        limits.append(Limit(first.pool_bytes / GB, "what a process gets", "--"))
    limits.append(Limit((first.pool_bytes - first.reserve_bytes) / GB, "less the reserve", ":"))
    what = f"{first.step} step on {first.devices} × {first.device}"
    title = f"{title_of(first) if len(rows) == 1 else what}\nplanned by XLA"
    attention = ", ".join(dict.fromkeys(plan.attention for _, plan in rows))
    title, label = f"{title}, attention {attention}", "peak GB of one device (1e9 bytes)"
    if numeric.get(axis, 0) > 1:
        lines: dict[str, list[tuple[float, float]]] = {}
        for values, plan in rows:
            name = ", ".join(str(value) for key, value in values.items() if key != axis)
            lines.setdefault(name or "peak", []).append((values[axis], plan.peak_bytes / GB))
        draw_lines(path, lines, title=title, labels=(axis, label), limits=limits)
        return
    bars = {
        " ".join(map(str, values.values())): {
            name_of(part): plan.parts[part] / GB for part in PARTS
        }
        for values, plan in rows
    }
    draw_bars(path, bars, title=title, label=label, limits=limits)
