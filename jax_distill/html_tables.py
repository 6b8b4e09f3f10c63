"""Tables of report.html."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from jax_distill.model_folder import model_name


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], *, kind: str = "") -> str:
    """A table of cells as text; `kind` is its class."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f' class="{kind}"' if kind else ""
    return f"<table{named}><tr>{cells}</tr>{body}</table>"


def as_text(value: Any) -> str:
    """A value as people read it: four decimals of a fraction, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


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
    return f'<h2>Samples</h2><div class="wide">{table}</div><p>Greedy, from held-out text.</p>'
