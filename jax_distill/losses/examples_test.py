"""The scripts of docs/LOSS_IN_YOUR_MODEL.md, run as they stand on a small cache of packed rows."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_distill.cache import Manifest
from jax_distill.cache_test import cache_of, captured, random_rows

DOCS = Path(__file__).parents[2] / "docs"
ROWS, LENGTH, VOCAB = 4, 16, 50
BORDER = 6  # where the second document of every row begins; padding begins 2 before the row's end


def example(page: str, word: str) -> str:
    """The one fenced Python script of docs/`page` that holds `word`."""
    scripts = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.M | re.S)
    (found,) = [script for script in scripts if word in script]
    return found


def write_packed_cache(path: Path) -> None:
    """ROWS rows of two documents and padding, with the top 5 of a teacher's VOCAB logits."""
    arrays = random_rows(ROWS, LENGTH, VOCAB)
    position = np.arange(LENGTH, dtype=np.int32)
    segment_ids = np.select([position < BORDER, position < LENGTH - 2], [1, 2], 0)
    arrays["segment_ids"][:] = segment_ids
    arrays["positions"][:] = np.where(position < BORDER, position, position - BORDER)
    # Rows with different numbers of targets: a mean of means is not the mean.
    arrays["loss_mask"][:] = (segment_ids > 0) & (position >= 3 * np.arange(ROWS)[:, None])
    logits = np.random.default_rng(1).normal(0, 4, (ROWS, LENGTH, VOCAB)).astype(np.float32)
    manifest = Manifest(
        sequence_length=LENGTH,
        shard_rows=ROWS,
        vocab_size=VOCAB,
        top_k=5,
        temperatures=(1.0, 2.0),
        teacher_fingerprint="teacher",
    )
    cache_of(path, manifest, arrays | captured(logits, 5))


def runs(script: str, folder: Path) -> dict[str, Any]:
    """Its names, once it has run in `folder`, which holds the quickstart's cache."""
    write_packed_cache(folder / "runs/quickstart/cache/train")
    names: dict[str, Any] = {}
    exec(compile(script, "example", "exec"), names)
    return names


def assert_documents_apart(hidden_of: Any, tokens: np.ndarray) -> None:
    """Another first token changes its own document, later and not earlier, and no other one."""
    changed = tokens.copy()
    changed[:, 2] = (changed[:, 2] + 1) % VOCAB
    moved = np.abs(np.asarray(hidden_of(tokens)) - np.asarray(hidden_of(changed))).max((0, 2)) > 0
    assert moved[2:BORDER].all() and not moved[:2].any() and not moved[BORDER:].any()


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_the_example_trains_and_keeps_packed_documents_apart(
    library, tmp_path, monkeypatch, capsys
):
    # Equinox is in the test extra alone, which no minimal installation has.
    pytest.importorskip(library, reason=f"{library} is not installed (the test extra has it)")
    monkeypatch.chdir(tmp_path)
    # A user's own program: JAX as it comes, not as strict as our tests are.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names = runs(example("LOSS_IN_YOUR_MODEL.md", f"{library} "), tmp_path)
        values = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
        # The four rows are every step's batch: what a gradient step is for.
        assert len(values) == 20 and values[-1] < values[0]
        model, batch = names["model"], names["batch"]
        hidden = model.hidden if library == "flax" else jax.vmap(model.hidden)
        where = np.asarray(batch.segment_ids), np.asarray(batch.positions)
        assert_documents_apart(lambda tokens: hidden(tokens, *where), batch.tokens)
