"""Figures of peak memory: lines over a number, stacked bars. matplotlib is imported where one is
drawn: who measures on a machine without it needs none."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MARKERS = "osD^vP*X"


class Limit(NamedTuple):
    """A line across the figure: what there is room for. style: matplotlib's."""

    value: float
    label: str
    style: str = "-"


class Mark(NamedTuple):
    """A figure from elsewhere."""

    x: float
    y: float
    label: str


def draw_lines(
    path: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    labels: tuple[str, str],
    limits: Sequence[Limit] = (),
    marks: Sequence[Mark] = (),
) -> None:
    """label → (x, y) points, both axes by doubling; labels: of the axes."""
    figure, axes = _axes(title, limits)
    for number, (label, points) in enumerate(lines.items()):
        # Smaller from line to line: of lines that lie on each other all can be seen.
        style: dict[str, Any] = {"marker": MARKERS[number % 8], "markersize": 9 - number % 4 * 2}
        axes.plot(*zip(*sorted(points), strict=True), label=label, **style)
    for x, y, text in marks:
        axes.plot(x, y, "D", markersize=8, mfc="white", mec="black")
        axes.annotate(text, (x, y), xytext=(-9, 5), textcoords="offset points", ha="right")
    axes.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1])
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    heights = [y for points in lines.values() for _, y in points] + [each.value for each in limits]
    low, high = 0.8 * min(heights), 1.25 * max(heights)
    steps = [m * 10.0**e for e in range(-6, 6) for m in (1, 2, 5)]
    axes.set_ylim(low, high)
    axes.set_yticks([step for step in steps if low <= step <= high])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    _save(figure, axes, path)


def draw_bars(
    path: Path,
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    label: str,
    limits: Sequence[Limit] = (),
) -> None:
    """name → part → size, stacked; label: of the height. A single bar has its sizes written out."""
    figure, axes = _axes(title, limits)
    bottom = [0.0] * len(bars)
    for part in next(iter(bars.values())):
        sizes = [bar[part] for bar in bars.values()]
        named = part if len(bars) > 1 else f"{part}  {sizes[0]:.3g}"
        axes.bar(range(len(bars)), sizes, bottom=bottom, label=named, width=0.6)
        bottom = [b + s for b, s in zip(bottom, sizes, strict=True)]
    for x, height in enumerate(bottom):
        axes.text(x, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(bars)), labels=list(bars), fontsize=8)
    axes.set_ylabel(label)
    _save(figure, axes, path)


def _axes(title: str, limits: Sequence[Limit]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    for value, label, style in limits:
        axes.axhline(value, color="black", linestyle=style, linewidth=1, label=label)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    figure.savefig(path, dpi=150)
