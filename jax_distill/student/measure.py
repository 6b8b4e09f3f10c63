"""What of the teacher stays in its student: chosen by importance, measured over rows of a cache."""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_distill import hf
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache
from jax_distill.config import FromTeacher
from jax_distill.data import vocabulary_of
from jax_distill.importance import (
    Widths,
    layer_importance,
    most_important,
    width_importance,
)
from jax_distill.model import Decoder, ModelConfig

CALIBRATION_ROWS = 16
WORDS = {
    "cosine": "mean of 1 - cosine of input and output",
    "kl": "rise of the KL without it, nats",
}


class Kept(NamedTuple):
    """What of the teacher stays, each list rising.

    Attributes:
        layers: L' of its layers.
        neurons: int64 [L',F'], of each of these; None: all.
        kv_groups: int64 [L',G'], key/value heads with the query heads that read them; None: all.
        hidden: int64 [D'], dimensions of the hidden states, the same everywhere; None: all.
    """

    layers: list[int]
    neurons: np.ndarray | None = None
    kv_groups: np.ndarray | None = None
    hidden: np.ndarray | None = None


def choose(
    teacher: Path,
    narrowed: ModelConfig,
    layers: list[int],
    cut: FromTeacher,
    *,
    cache: Cache | None,
    dtype: Any = jnp.float32,
) -> Kept:
    """The parts that stay, as many as `student_shape` says, of largest importance over the first
    `calibration_rows` of the cache; lines say what. The teacher runs on one device.

    Raises:
        UserError: no cache for what has to be measured; one of another tokenizer; see
            `layer_importance`.
    """
    if not cut.reads_rows:
        return Kept(layers)
    if cache is None:
        raise UserError(
            "expected a cache whose rows show what is important, got none; name one with "
            "--importance CACHE"
        )
    whole = hf.model_config(hf.read_config(teacher))
    cache.require_complete()
    cache.student_length(whole.vocab_size, vocabulary_of(teacher), str(teacher))
    rows = np.arange(min(cut.calibration_rows or CALIBRATION_ROWS, cache.rows))
    model = hf.load_model(teacher, param_dtype=dtype, compute_dtype=dtype, remat="none")
    if cut.importance_by:
        layers = _important_layers(model, cache, rows, count=len(layers), by=cut.importance_by)
    if narrowed.with_layers(layers) == whole.with_layers(layers):
        return Kept(layers)
    return _important_widths(width_importance(model, cache, rows), narrowed, layers)


def _important_layers(
    model: Decoder, cache: Cache, rows: np.ndarray, *, count: int, by: str
) -> list[int]:
    importance = layer_importance(model, cache, rows, by=by)
    shown = ", ".join(f"{layer}: {value:.3f}" for layer, value in enumerate(importance))
    say(f"importance of layers ({WORDS[by]}): {shown}")
    kept = most_important(importance, count)
    say(f"kept: --student.from_teacher.layers '{kept}'")
    return kept


def _important_widths(found: Widths, narrowed: ModelConfig, layers: list[int]) -> Kept:
    # Two norms a layer, and the final one; a dimension's sum over those that the student has.
    norms = [norm for layer in layers for norm in (2 * layer, 2 * layer + 1)]
    hidden = found.hidden[[*norms, -1]].sum(axis=0, keepdims=True)
    of_hidden = _largest("hidden dimensions", hidden, narrowed.hidden_size)
    neurons = None
    if found.neurons is not None:
        neurons = _largest("MLP neurons", found.neurons[layers], narrowed.intermediate_size)
    groups = _largest(
        "key/value heads with their query heads",
        found.kv_groups[layers],
        narrowed.num_key_value_heads,
    )
    return Kept(layers, neurons, groups, None if of_hidden is None else of_hidden[0])


def _largest(what: str, importance: np.ndarray, count: int) -> np.ndarray | None:
    """int64 [.., count] of importance [.., n]; None where that is all."""
    whole = importance.shape[-1]
    if count == whole:
        return None
    kept = np.array([most_important(row, count) for row in importance])
    share = np.take_along_axis(importance, kept, -1).sum() / importance.sum()
    say(f"kept: {count:,} of {whole:,} {what}, {100 * share:.1f} % of the sum of their importance")
    return kept
