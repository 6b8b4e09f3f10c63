"""Curves for people who look rather than read: report.html of a run, or several runs in one figure.

`python -m jax_distill.report RUN [RUN …] [--out FILE.png]`
"""

import argparse
import base64
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jax_distill.config import Refusal, run_command
from jax_distill.run import read_metrics, say

CURVES = {
    "loss": "training loss, nats per token",
    "kl": "KL to the teacher, nats per token",
    "cross_entropy": "cross-entropy, nats per token",
    "top1_agreement": "top-1 agreement with the teacher",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
}

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
    for place, key in enumerate(names):
        axes = figure.add_subplot(rows, columns, place + 1)
        for number, (name, records) in enumerate(runs.items()):
            colour = f"C{number}"
            axes.plot(*series(records, key), color=colour, label=name, linewidth=1)
            heldout = series(records, f"heldout_{key}")
            if heldout[0]:
                axes.plot(*heldout, "o", color=colour, markersize=4, label=f"{name}, held out")
        axes.set_title(CURVES[key], fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def largest_difference(first: Records, second: Records) -> tuple[str, int, float] | None:
    """(quantity, step, difference relative to the first run) where two runs differ most, among the
    numbers that do not depend on the machine; None without a common step."""
    other = {record["step"]: record for record in second}
    worst: tuple[str, int, float] | None = None
    for record in first:
        match = other.get(record["step"], {})
        for key, value in record.items():
            if key == "step" or "per_second" in key or not isinstance(value, int | float):
                continue
            if not isinstance(match.get(key), int | float):
                continue
            gap = abs(value - match[key]) / max(abs(value), 1e-12)
            if worst is None or gap > worst[2]:
                worst = (key, record["step"], gap)
    return worst


def write_report(run: Path, summary: Mapping[str, Any]) -> Path:
    """`report.html` in the run folder: the held-out table, the curves, the configuration. One file
    without links to anything outside it."""
    runs = {"student": read_metrics(run / "metrics.jsonl")}
    baseline = read_metrics(run / "ce_baseline" / "metrics.jsonl")
    if baseline:
        runs["CE-only student"] = baseline
    image = io.BytesIO()
    draw(runs).savefig(image, format="png", dpi=110)
    picture = base64.b64encode(image.getvalue()).decode()
    facts = {k: v for k, v in summary.items() if not isinstance(v, dict)}
    config = (run / "config.yaml").read_text("utf-8")
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(run.name)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ border: 1px solid #ccc; padding: .3rem .7rem; text-align: right }}
td:first-child, th:first-child {{ text-align: left }}
img {{ max-width: 100% }} pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto }}
</style></head><body>
<h1>{html.escape(run.name)}</h1>
{_heldout_html(summary.get("heldout") or {})}
<img alt="curves" src="data:image/png;base64,{picture}">
{_table_html(["", "value"], [[key, _number(value)] for key, value in facts.items()])}
<h2>Configuration</h2><pre>{html.escape(config)}</pre>
</body></html>
"""
    path = run / "report.html"
    path.write_text(page, "utf-8")
    return path


def _heldout_html(heldout: Mapping[str, Mapping[str, float]]) -> str:
    if not heldout:
        return ""
    keys = ("kl", "cross_entropy", "perplexity", "top1_agreement")
    head = ["held-out text", "KL to teacher", "cross-entropy", "perplexity", "top-1 agreement"]
    rows = [
        [name.replace("_", " "), *(_number(row[key]) for key in keys)]
        for name, row in heldout.items()
    ]
    return _table_html(head, rows)


def _table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main(argv: Sequence[str]) -> None:
    """Command line: one figure of several runs, and where they differ most."""
    parser = argparse.ArgumentParser(prog="python -m jax_distill.report", allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="figure to write; default RUN/curves.png")
    options = parser.parse_args(argv)
    runs: dict[str, Records] = {}
    for path in options.runs:
        records = read_metrics(path / "metrics.jsonl")
        if not records:
            raise Refusal(f"expected a run folder with metrics.jsonl, got {path}")
        name = path.name
        if (path / "manifest.json").exists():
            name += f" ({json.loads((path / 'manifest.json').read_text('utf-8'))['backend']})"
        runs[name if name not in runs else str(path)] = records
    out = options.out or options.runs[0] / "curves.png"
    draw(runs).savefig(out, dpi=110)
    say(f"wrote {out}")
    if len(runs) == 1 and (options.runs[0] / "summary.json").exists():
        summary = json.loads((options.runs[0] / "summary.json").read_text("utf-8"))
        say(f"wrote {write_report(options.runs[0], summary)}")
    (first_name, first), *others = runs.items()
    for name, records in others:
        worst = largest_difference(first, records)
        if worst is None:
            say(f"{first_name} and {name} have no step in common")
        else:
            key, step, gap = worst
            say(f"{first_name} and {name}: largest difference {gap:.3g} in {key} at step {step}")


if __name__ == "__main__":
    run_command(main)
