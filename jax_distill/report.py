"""Curves for people who look rather than read: report.html of a run, or several runs in one figure.

`python -m jax_distill.report RUN [RUN …] [--out FILE.png] [--parity]`
"""

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import console, say
from jax_distill.base.errors import UserError
from jax_distill.base.files import FIGURES, check_new_file
from jax_distill.cache.manifest import differences as changed_values
from jax_distill.config import read_mapping
from jax_distill.html_tables import (
    MACHINE,
    as_text,
    by_source_html,
    disagreements_html,
    machine_html,
    samples_html,
    table_html,
    test_table_html,
)
from jax_distill.model_folder import CE_ONLY
from jax_distill.run import read_metrics, read_run_manifest, read_summary

CURVES = {
    "loss": "training loss, nats per token",
    "kl": "KL to the teacher over top K and tail, nats per token",
    "cross_entropy": "cross-entropy, nats per token",
    "top1_agreement": "top-1 agreement with the teacher",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "teacher_mass": "retained mass: the teacher's probability of its top K",
    "student_mass": "the student's probability of the same tokens",
}

COMPARED = ("loss", "kl", "cross_entropy", "top1_agreement", "gradient_norm", "learning_rate")
EPSILON = 2.0**-23  # of fp32: the smallest relative difference there is

CONFIGURATION = "the configuration of the run"  # what messages call config.yaml

Records = list[dict[str, Any]]


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have `key` as a number."""
    points = [(r["step"], r[key]) for r in records if isinstance(r.get(key), int | float)]
    return [step for step, _ in points], [value for _, value in points]


def draw(runs: Mapping[str, Records]) -> Figure:
    """One panel a quantity, one colour a run: training as a line, held-out as dots."""
    names = [key for key in CURVES if any(series(records, key)[0] for records in runs.values())]
    columns = 2
    rows = max(math.ceil(len(names) / columns), 1)
    figure = Figure(figsize=(11, 3.2 * rows), layout="constrained")
    for index, key in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, (name, records) in enumerate(runs.items()):
            colour = f"C{number}"
            axes.plot(*series(records, key), color=colour, label=name, linewidth=1)
            heldout = series(records, f"val_{key}")
            if heldout[0]:
                axes.plot(*heldout, "o", color=colour, markersize=4, label=f"{name}, validation")
        axes.set_title(CURVES[key], fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def differences(first: Records, second: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Common steps [n], and |second − first| / |first| of `key` there [n]; 0 where both are 0."""
    other = dict(zip(*series(second, key), strict=True))
    points = [(s, v, other[s]) for s, v in zip(*series(first, key), strict=True) if s in other]
    steps, ours, theirs = np.array(points, float).reshape(-1, 3).T
    return steps, np.abs(theirs - ours) / np.maximum(np.abs(ours), 1e-12)


def largest_difference(first: Records, second: Records) -> tuple[str, int, float] | None:
    """(quantity, step, difference relative to the first run) where two runs differ most, among the
    numbers that do not depend on the machine; None without a common step."""
    keys = dict.fromkeys(key for record in first for key in record)
    worst: tuple[str, int, float] | None = None
    for key in keys:
        if key in ("step", "mfu") or any(word in key for word in ("second", "bytes")):
            continue
        steps, gaps = differences(first, second, key)
        if len(gaps) and (worst is None or gaps.max() > worst[2]):
            worst = (key, int(steps[gaps.argmax()]), float(gaps.max()))
    return worst


def draw_comparison(runs: Mapping[str, Records]) -> Figure:
    """Each quantity as curves that should lie on each other, the later ones thinner; under it how
    far each run is from the first, relative, on a log axis. The title names the largest difference,
    a ring marks it."""
    names = [key for key in COMPARED if any(series(records, key)[0] for records in runs.values())]
    columns = min(3, max(len(names), 1))
    bands = max(math.ceil(len(names) / columns), 1)
    figure = Figure(figsize=(3.9 * columns, 3.6 * bands + 0.6), layout="constrained")
    grid = figure.add_gridspec(2 * bands, columns, height_ratios=[5, 3] * bands)
    (first_name, first), *others = runs.items()
    worst = {name: largest_difference(first, records) for name, records in others}
    top = 8 * max([EPSILON, *(found[2] for found in worst.values() if found)])
    for index, key in enumerate(names):
        band, column = divmod(index, columns)
        curves = figure.add_subplot(grid[2 * band, column])
        gaps = figure.add_subplot(grid[2 * band + 1, column], sharex=curves)
        for number, (name, records) in enumerate(runs.items()):
            width = 4.5 if number == 0 else 1.3
            look: dict[str, Any] = {"color": f"C{number}", "alpha": 0.45 if number == 0 else 1.0}
            curves.plot(*series(records, key), linewidth=width, label=name, **look)
            heldout = series(records, f"val_{key}")
            size = 9 if number == 0 else 4
            curves.plot(*heldout, "o", markersize=size, **look)
        _prepare_gaps(gaps, top)
        for number, (name, records) in enumerate(others, 1):
            _draw_gaps(gaps, first, records, key, worst[name], color=f"C{number}")
        curves.set_title(CURVES[key], fontsize=10)
        curves.tick_params(labelbottom=False)
        gaps.set_xlabel("optimizer step", fontsize=8)
        gaps.xaxis.set_major_locator(MaxNLocator(integer=True))
        if column == 0:
            gaps.set_ylabel("relative\ndifference", fontsize=8)
            gaps.annotate(
                "one rounding of fp32",
                (0.01, EPSILON * 1.25),
                xycoords=("axes fraction", "data"),
                fontsize=7,
                color="grey",
            )
        for axes in (curves, gaps):
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=8)
    if figure.axes:
        figure.axes[0].legend(fontsize=8)
    lines = [compared(first_name, name, worst[name]) for name, _ in others]
    figure.suptitle("\n".join(lines), fontsize=11)
    return figure


FOOT = EPSILON / 20  # where a difference of 0 is drawn


def _prepare_gaps(axes: Axes, top: float) -> None:
    """A log axis from "0" to `top`, with a line at fp32's rounding."""
    axes.set_yscale("log")
    axes.axhline(EPSILON, color="grey", linestyle=":", linewidth=1)
    axes.set_ylim(FOOT / 1.8, top)
    powers = range(-7, math.floor(math.log10(top)) + 1)
    shown = powers[:: max(len(powers) // 3, 1)]
    labels = [f"$10^{{{power}}}$" for power in shown]
    axes.set_yticks([FOOT, *(10.0**power for power in shown)], ["0", *labels])
    axes.minorticks_off()


def _draw_gaps(
    axes: Axes,
    first: Records,
    second: Records,
    key: str,
    worst: tuple[str, int, float] | None,
    *,
    color: str,
) -> None:
    """The differences of one quantity: small dots, held-out ones large; a ring on the largest."""
    for name, size in ((key, 3.5), (f"val_{key}", 7)):
        steps, gaps = differences(first, second, name)
        axes.plot(steps, np.maximum(gaps, FOOT), "o", color=color, markersize=size)
        if worst is None or worst[0] != name:
            continue
        where, largest = worst[1], max(worst[2], FOOT)
        axes.plot([where], [largest], "o", markersize=13, mfc="none", color="crimson")
        right = where > (steps.min() + steps.max()) / 2
        axes.annotate(
            f"{worst[2]:.2g}",
            (where, largest),
            xytext=(-10 if right else 10, 0),
            textcoords="offset points",
            ha="right" if right else "left",
            va="center",
            fontsize=8,
            color="crimson",
        )


def compared(first: str, second: str, worst: tuple[str, int, float] | None) -> str:
    """One line: where two runs differ most."""
    if worst is None:
        return f"{first} and {second} have no step in common"
    key, step, gap = worst
    what = key.replace("_", " ").replace("heldout", "held-out").replace("kl", "KL")
    return f"{first} and {second}: largest relative difference {gap:.2g}, {what} at step {step}"


def what_was_compared(config: Mapping[str, Any]) -> dict[str, str]:
    """What the KL of the curves and of the test table is, in words: they are not the same number.

    config: of a run, as in its config.yaml."""
    divergence, tail, temperature = (
        _option(config, f"loss.{key}") for key in ("divergence", "tail", "temperature")
    )
    top_k = _option(config, "cache.read_top_k") or _option(config, "cache.top_k")
    return {
        "curves": f"Training and validation: {divergence} over the teacher's {top_k} most likely "
        f"tokens, what lies outside as tail {tail}, at temperature {temperature}; the validation "
        "rows are the first half of the held-out text.",
        "table": "Test table: KL(teacher ‖ model) over the whole vocabulary at temperature 1, on "
        "the second half of the held-out text, which nothing was chosen by.",
    }


def write_report(run: Path, summary: Mapping[str, Any]) -> Path:
    """`report.html` in the run folder: the test table, the curves, what was made with what, the
    configuration. One file without links to anything outside it.

    Raises:
        UserError: a damaged file of the run.
    """
    runs = {"student": read_metrics(run / "metrics.jsonl")}
    baseline = read_metrics(run / "ce_baseline" / "metrics.jsonl")
    if baseline:
        runs[CE_ONLY] = baseline
    config_file = run / "config.yaml"
    config, manifest = read_mapping(config_file, CONFIGURATION), read_run_manifest(run)
    image = io.BytesIO()
    draw(runs).savefig(image, format="png", dpi=110)
    picture = base64.b64encode(image.getvalue()).decode()
    words = {name: html.escape(text) for name, text in what_was_compared(config).items()}
    facts = _facts(summary, config, manifest)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(run.name)}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ border: 1px solid #8886; padding: .3rem .7rem; text-align: right }}
td:first-child, th:first-child {{ text-align: left }}
.text :is(td, th) {{ text-align: left; vertical-align: top }}
.text td {{ white-space: pre-wrap; min-width: 7rem }}
.facts :is(td, th):last-child {{ text-align: left; overflow-wrap: anywhere }}
.machine td:last-child {{ white-space: nowrap }}
.wide {{ overflow-x: auto }}
img {{ width: 100%; min-width: 40rem }}
@media (prefers-color-scheme: dark) {{ img {{ filter: invert(.9) hue-rotate(180deg) }} }}
pre {{ background: #8882; padding: 1rem; overflow-x: auto }}
</style></head><body>
<h1>{html.escape(run.name)}</h1>
{test_table_html(summary.get("test") or {}, words["table"])}
{by_source_html(summary.get("test_by_source") or {})}
<div class="wide"><img alt="curves" src="data:image/png;base64,{picture}"></div>
<p>{words["curves"]}</p>
{samples_html(summary.get("samples") or [])}
{machine_html(runs["student"], summary)}
{disagreements_html((summary.get("disagreements") or {}).get("student") or [])}
{table_html(["", "value"], [[k, as_text(v)] for k, v in facts.items()], kind="facts")}
<h2>Configuration</h2><pre>{html.escape(config_file.read_text("utf-8"))}</pre>
</body></html>
"""
    path = run / "report.html"
    path.write_text(page, "utf-8")
    return path


def _facts(
    summary: Mapping[str, Any], config: Mapping[str, Any], manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """What came out, on which cache, when and with which versions, by the words shown."""
    shown = {*MACHINE, "compile_seconds"}  # by `machine_html`
    facts = {k: v for k, v in summary.items() if not isinstance(v, dict | list) and k not in shown}
    cache = summary.get("cache")
    facts |= {f"cache {k}": v for k, v in cache.items()} if isinstance(cache, dict) else {}
    facts |= {f"cache {key}": _option(config, f"cache.{key}") for key in ("top_k", "read_top_k")}
    facts["cache fingerprint"] = manifest.get("cache")
    facts |= {key: manifest.get(key) for key in ("started", "backend", "host", "git_revision")}
    versions = manifest.get("versions")
    facts |= versions if isinstance(versions, dict) else {}
    return {key: value for key, value in facts.items() if value is not None}


def final_numbers(run: Path, records: Records) -> dict[str, Any]:
    """What a run ended with, by the words shown: the last training and validation values, the test
    table's row of the student, and the summary's counts."""
    found: dict[str, Any] = {"steps": records[-1]["step"]}
    for key in ("loss", "kl", "cross_entropy"):
        for name, words in ((key, "training"), (f"val_{key}", "validation")):
            values = series(records, name)[1]
            found |= {f"{words} {_words(key)}": values[-1]} if values else {}
    summary = read_summary(run)
    test = (summary.get("test") or {}).get("student") or {}
    found |= {f"test {_words(key)}": value for key, value in test.items()}
    for key in ("student_parameters", "tokens_trained", "seconds"):
        found |= {_words(key): summary[key]} if key in summary else {}
    return found


def _words(key: str) -> str:
    return key.replace("_", " ").replace("kl", "KL").replace("top1", "top-1")


def print_runs(paths: Mapping[str, Path], runs: Mapping[str, Records]) -> None:
    """Several runs beside each other: the final numbers, and the options that differ."""
    numbers = {name: final_numbers(paths[name], records) for name, records in runs.items()}
    table = Table("", *runs, title="final numbers")
    for key in dict.fromkeys(key for found in numbers.values() for key in found):
        table.add_row(key, *(as_text(found.get(key)) for found in numbers.values()))
    console.print(table)
    configs = [read_mapping(path / "config.yaml", CONFIGURATION) for path in paths.values()]
    options = Table("option", *runs, title="options that differ")
    changed = [changed_values(configs[0], other) for other in configs[1:]]
    for key in dict.fromkeys(key for found in changed for key, _, _ in found):
        values = (_option(config, key) for config in configs)
        options.add_row(key, *("–" if value is None else str(value) for value in values))
    console.print(options if options.row_count else "no option differs")
    for words in what_was_compared(configs[0]).values():
        say(words)


def _option(config: Any, key: str) -> Any:
    """The value under a dotted name; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def main(argv: Sequence[str]) -> None:
    """Command line: one figure of several runs, their final numbers and what they differ in."""
    parser = CommandLine("jax_distill.report")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="figure to write; default RUN/curves.png")
    parser.add_argument(
        "--parity",
        action="store_true",
        help="the runs should be the same: draw and name their largest relative difference",
    )
    options = parser.parse_args(argv)
    runs: dict[str, Records] = {}
    paths: dict[str, Path] = {}
    for path in options.runs:
        records = read_metrics(path / "metrics.jsonl")
        if not records:
            raise UserError(f"expected a run folder with metrics.jsonl, got {path}; check the path")
        backend = read_run_manifest(path).get("backend")
        name = f"{path.name} ({backend})" if backend else path.name
        name = name if name not in runs else str(path)
        runs[name], paths[name] = records, path
    out = options.out or options.runs[0] / "curves.png"
    check_new_file(out, "--out", FIGURES)
    if len(runs) > 1:
        print_runs(paths, runs)
    figure = draw_comparison(runs) if options.parity and len(runs) > 1 else draw(runs)
    figure.savefig(out, dpi=110)
    say(f"wrote {out}")
    if len(runs) == 1 and (options.runs[0] / "summary.json").exists():
        say(f"wrote {write_report(options.runs[0], read_summary(options.runs[0]))}")
    (first_name, first), *others = runs.items()
    for name, records in others if options.parity else ():
        say(compared(first_name, name, largest_difference(first, records)))


if __name__ == "__main__":
    run_command(main)
