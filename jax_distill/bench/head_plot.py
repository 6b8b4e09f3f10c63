"""The picture of `bench head`: peak memory against tokens, both by doubling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

INK, SOFT, FAINT, LIMIT = "#22272e", "#5b6570", "#9aa3ad", "#b3261e"
COLOURS = {
    "dense": "#7a8490",
    "forward_chunked": "#c77d0a",
    "fused_chunked": "#5b8fc9",
    "fused": "#1f5fa8",
    "kl_and_grads": "#0b8457",
}
SAME = 1.02
"""Lines whose last points are within this factor share a label."""
APART = 1.22
"""Labels at the right stand at least this factor apart."""


class Line(NamedTuple):
    """One implementation and chunk size: (tokens, GiB, does it fit) by tokens."""

    label: str
    colour: str
    points: list[tuple[int, float, bool]]


def lines_of(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """The chunk size is named where rows differ in it."""
    chunked = {row["chunk_size"] for row in rows if row["implementation"] != "dense"}
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        several = len(chunked) > 1 and row["implementation"] != "dense"
        label = row["implementation"] + (f", C = {row['chunk_size']:,}" if several else "")
        groups.setdefault(label, []).append(row)
    return [
        Line(
            label,
            COLOURS[group[0]["implementation"]],
            sorted({(row["tokens"], row["peak_gib"], row["fits"]) for row in group}),
        )
        for label, group in groups.items()
    ]


def labels_of(lines: Sequence[Line]) -> list[tuple[str, str, float, float]]:
    """(text, colour, GiB of the last point, GiB where the text stands), from the lowest up."""
    named: list[tuple[str, str, float, float]] = []
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        last = line.points[-1][1]
        if named and last < named[-1][2] * SAME:
            text, _, _, at = named.pop()
            named.append((f"{text}, {line.label}", line.colour, last, at))
            continue
        named.append(
            (line.label, line.colour, last, max(last, named[-1][3] * APART if named else 0))
        )
    return named


def draw(
    rows: Sequence[dict[str, Any]],
    paper: dict[tuple[str, int], float],
    path: Path,
    *,
    limit_gib: float | None,
) -> None:
    """Peak GiB of every row, what no implementation can do without, and the paper's figures.

    limit_gib: the device's memory; what does not fit is hollow and dashed.
    """
    # Only here: who measures without a picture need not have it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.4), facecolor="white")
    lines = lines_of(rows)
    for line in lines:
        _draw_line(axes, line)
    _draw_paper(axes, rows, paper)
    floors = sorted({(row["tokens"], row["floor_gib"]) for row in rows})
    lowest = dict(reversed(floors))
    axes.plot(*zip(*sorted(lowest.items()), strict=True), color=FAINT, lw=1, ls=":", zorder=1)
    tokens = sorted({row["tokens"] for row in rows})
    axes.annotate(
        "inputs and gradients alone",
        (tokens[0], lowest[tokens[0]]),
        xytext=(0, -5),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color=FAINT,
    )
    _label_right(axes, lines, tokens)
    _scale(axes, tokens, rows, limit_gib)
    first = rows[0]
    axes.set_title(
        "Peak memory of the loss alone, forward and backward",
        loc="left",
        fontsize=14,
        fontweight="bold",
        color=INK,
        pad=26,
    )
    chunks = sorted({row["chunk_size"] for row in rows})
    shape = f"D = {first['hidden']:,}, V = {first['vocab']:,}, K = {first['top_k']:,}"
    shape += f", C = {chunks[0]:,}" if len(chunks) == 1 else ""
    axes.text(
        0,
        1.025,
        f"{first['device']}.  {shape}, {first['dtype']}, fp32 sums",
        transform=axes.transAxes,
        fontsize=9.5,
        color=SOFT,
    )
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.2)
    pyplot.close(figure)


def _draw_line(axes: Any, line: Line) -> None:
    tokens, peaks, fits = (list(column) for column in zip(*line.points, strict=True))
    inside = [peak if fit else float("nan") for peak, fit in zip(peaks, fits, strict=True)]
    axes.plot(tokens, peaks, color=line.colour, lw=1.2, ls=(0, (3, 3)), zorder=2)
    axes.plot(tokens, inside, color=line.colour, lw=2.4, zorder=3, solid_capstyle="round")
    for token, peak, fit in line.points:
        face = line.colour if fit else "white"
        axes.plot(token, peak, "o", ms=6.5, mfc=face, mec=line.colour, mew=1.6, zorder=4)


def _draw_paper(axes: Any, rows: Sequence[dict[str, Any]], paper: dict[Any, float]) -> None:
    """A diamond for each figure of the paper whose shape and length these rows have."""
    if all(row["paper_gib"] is None for row in rows):
        return
    there = {row["tokens"] for row in rows}
    for (implementation, tokens), gib in paper.items():
        if tokens not in there:
            continue
        axes.plot(tokens, gib, "D", ms=8, mfc="white", mec=INK, mew=1.6, zorder=5)
        last = tokens == max(there)  # there it stands among the labels of the lines
        taken = any(
            row["tokens"] == tokens and 1 / APART < row["peak_gib"] / gib < APART for row in rows
        )
        axes.annotate(
            f"paper, {implementation}: {gib:g}",
            (tokens, gib),
            xytext=(12, -13 if taken else 0) if last else (-9, 5),
            textcoords="offset points",
            ha="left" if last else "right",
            va="center" if last else "bottom",
            fontsize=8.5,
            color=INK,
            annotation_clip=False,
        )


def _label_right(axes: Any, lines: Sequence[Line], tokens: Sequence[int]) -> None:
    for text, colour, last, at in labels_of(lines):
        axes.annotate(
            f"{text}  {last:,.3g}",
            (tokens[-1], at),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            fontweight="bold",
            color=colour,
            annotation_clip=False,
        )


def _scale(
    axes: Any, tokens: Sequence[int], rows: Sequence[dict[str, Any]], limit_gib: float | None
) -> None:
    """Ticks where rows are, powers of two in GiB, and the device's memory as a line."""
    peaks = [row["peak_gib"] for row in rows]
    lowest = min(row["floor_gib"] for row in rows) / 1.35
    highest = max(*peaks, *(row["paper_gib"] or 0 for row in rows)) * 1.3
    axes.set(xscale="log", yscale="log", ylim=(lowest, highest))
    axes.set_xlim(tokens[0] / 1.12, tokens[-1] * 1.06)
    ticks = [2.0**n for n in range(-12, 14) if lowest < 2.0**n < highest]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    step = 1024 if all(t % 1024 == 0 for t in tokens) else 1
    axes.set_xticks(tokens, [f"{t // step:,}{'K' if step > 1 else ''}" for t in tokens])
    axes.set_xlabel("tokens", color=SOFT)
    axes.set_ylabel("GiB", color=SOFT)
    axes.minorticks_off()
    axes.grid(True, axis="y", color="#e3e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if limit_gib and limit_gib < highest:
        axes.axhspan(limit_gib, highest, color=LIMIT, alpha=0.06, lw=0)
        axes.axhline(limit_gib, color=LIMIT, lw=1)
        axes.annotate(
            f"the card: {limit_gib:,.0f} GiB",
            (tokens[0], limit_gib),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=9,
            color=LIMIT,
        )
