"""The rows of a held-out cache and what is measured on them, whichever backend measures.

The first half (`validation_rows`) is looked at while training and for choices (best checkpoint,
learning rates); the second half (`table_rows`) only by the final table.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.cache.reader import Cache


def validation_rows(cache: Cache) -> np.ndarray:
    """The rows of a held-out cache that choices are made on: its first half."""
    return np.arange(cache.rows // 2)


def table_rows(cache: Cache) -> np.ndarray:
    """The rows of a held-out cache that only the final table reads: its second half."""
    return np.arange(cache.rows // 2, cache.rows)


def check_targets(cache: Cache, rows: np.ndarray) -> None:
    """Refuse rows for a table that hold nothing to predict."""
    if not len(rows) or not cache.read(rows, targets=False).mask.any():
        raise UserError(
            "expected held-out text for the table, got no valid token; raise data.heldout_fraction"
        )


CALIBRATION_BINS = 15
"""Of equal width, of the probability that a model gives its most likely token."""


def table_of(sums: Mapping[str, Mapping[str, Any]], tokens: int) -> dict[str, dict[str, float]]:
    """Sums over `tokens` by model and name → means, and what follows from them.

    sums: `cross_entropy` among them, which gives the perplexity; `miscalibration`, [CALIBRATION_
    BINS] sums of (confidence − correct) over the tokens of a bin, gives the expected calibration
    error Σ_b |their sum| / tokens = Σ_b n_b/n · |accuracy of b − mean confidence of b|
    (Guo et al. 2017, arXiv 1706.04599).
    """
    table = {}
    for name, row in sums.items():
        off = np.asarray(row["miscalibration"], np.float64)
        means = {key: x / tokens for key, x in row.items() if key != "miscalibration"}
        means["perplexity"] = math.exp(min(means["cross_entropy"], 700.0))
        means["calibration_error"] = float(np.abs(off).sum()) / tokens
        table[name] = means
    return table
