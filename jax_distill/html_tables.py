"""Tables of report.html."""

import html
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from jax_distill.model_folder import model_name


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "") -> str:
    """A table of cells as text, which scrolls where it is too wide; `kind` is its class."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{named}><tr>{cells}</tr>{body}</table></div>'


def as_text(value: Any) -> str:
    """A value as people read it: four decimals of a fraction, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


TEST_TABLE = {
    "kl": "KL to teacher",
    "cross_entropy": "cross-entropy",
    "perplexity": "perplexity",
    "top1_agreement": "top-1 agreement",
    "acceptance_rate": "acceptance rate",
    "calibration_error": "calibration error",
}
MACHINE = {
    "planned_peak_bytes": "device memory of a step, planned by the compiler",
    "peak_bytes_in_use": "device memory, largest in use",
    "peak_host_bytes": "host memory, largest",
}


def test_table_html(table: Mapping[str, Mapping[str, float]], words: str) -> str:
    """The test table, and what its KL is in words; nothing where there is none."""
    if not table:
        return ""
    rows = [[model_name(name), *_numbers(row)] for name, row in table.items()]
    return f"{table_html(['test table', *TEST_TABLE.values()], rows)}<p>{html.escape(words)}</p>"


def by_source_html(tables: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The test tables of a mixture's sources, as one; nothing where there are none."""
    rows = [
        [source, model_name(name), *_numbers(row)]
        for source, table in tables.items()
        for name, row in table.items()
    ]
    head = ["held out of", "model", *TEST_TABLE.values()]
    return f"<h2>By source</h2>{table_html(head, rows)}" if rows else ""


def _numbers(row: Mapping[str, float]) -> list[str]:
    return [as_text(row.get(key)) for key in TEST_TABLE]


def machine_html(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Throughput, memory and retained mass of a run; nothing where none of it is known.

    records: of metrics.jsonl.
    """

    def logged(key: str) -> list[float]:
        found = (record.get(key) for record in records)
        return [value for value in found if isinstance(value, int | float)]

    rows = []
    if speed := logged("tokens_per_second"):
        rows.append(["throughput, median of the logged steps", f"{median(speed):,.0f} tokens/s"])
    for key, words in MACHINE.items():
        if isinstance(summary.get(key), int | float):
            rows.append([words, f"{summary[key] / 1e9:,.2f} GB"])
    if isinstance(summary.get("compile_seconds"), int | float):
        rows.append(["compiling the step", f"{summary['compile_seconds']:,.1f} s"])
    if mass := logged("teacher_mass"):
        words = "retained mass: the teacher's probability of the tokens kept, mean of these steps"
        rows.append([words, f"{fmean(mass):.4f}"])
    return table_html(["speed, memory, targets", ""], rows, kind="machine") if rows else ""


def samples_html(samples: Sequence[Mapping[str, Any]]) -> str:
    """What each model wrote after the same prompts, side by side; nothing where there are none."""
    if not samples:
        return ""
    names = list(dict.fromkeys(name for each in samples for name in each["continuations"]))
    rows = [
        [each["prompt"], *(each["continuations"].get(name, "–") for name in names)]
        for each in samples
    ]
    head = ["prompt", *map(model_name, names)]
    table = table_html(head, rows, kind="text")
    return f"<h2>Samples</h2>{table}<p>Greedy, from held-out text.</p>"


def disagreements_html(entries: Sequence[Mapping[str, Any]]) -> str:
    """Where the student is furthest from the teacher; nothing where that is not known."""
    if not entries:
        return ""
    head = ["the text up to there", "its next token", "teacher", "student", "KL"]
    rows = [
        [
            each["context"],
            repr(each["next"]),
            *("\n".join(tokens_as_text(each[key])) for key in ("teacher", "student")),
            as_text(each["kl"]),
        ]
        for each in entries
    ]
    table = table_html(head, rows, kind="text")
    words = "The positions of the test table with the largest KL(teacher ‖ student), nats, and the "
    words += "most likely tokens there."
    return f"<h2>Largest disagreements</h2>{table}<p>{words}</p>"


def tokens_as_text(tokens: Sequence[Sequence[Any]]) -> list[str]:
    """`' a' 0.91`, `' the' 0.03`, …: in quotes, so that spaces show."""
    return [f"{text!r} {p:.2f}" for text, p in tokens]
