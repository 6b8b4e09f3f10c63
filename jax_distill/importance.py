"""How much each layer of a model changes what runs through it: which ones a student keeps.

Letters: B rows, T positions, N = B·T, D hidden, L layers.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill.base.console import progress
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache
from jax_distill.model import Decoder


def _turned(before: jax.Array, after: jax.Array, real: jax.Array) -> jax.Array:
    """Σ over the real tokens of 1 − cos(before, after): [B,T,D] twice, bool [B,T] → fp32."""
    before, after = before.astype(jnp.float32), after.astype(jnp.float32)
    norms = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
    cosine = jnp.sum(before * after, axis=-1) / jnp.maximum(norms, 1e-30)
    return jnp.sum(jnp.where(real, 1.0 - cosine, 0.0))


@jax.jit
def _sums(
    model: Decoder, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
) -> jax.Array:
    """fp32 [L]: `_turned` of each layer's input and output."""
    every = tuple(range(model.config.num_hidden_layers))
    after = model.apply(tokens, segment_ids, positions, hidden_layers=every).layers
    before = jnp.concatenate([model.embed(tokens).reshape(1, *after.shape[1:]), after[:-1]])
    return jax.vmap(partial(_turned, real=segment_ids > 0))(before, after)


def layer_importance(model: Decoder, cache: Cache, rows: np.ndarray) -> np.ndarray:
    """float64 [L]: of each layer, the mean over all tokens of `rows` of 1 − cos(input, output), the
    Block Influence of ShortGPT (Men et al. 2024, arXiv 2403.03853, eq. 1). 0: the layer leaves the
    direction as it is.

    One row at a time; it takes L·T·D numbers twice.

    Raises:
        UserError: the rows hold no token; the model has not all of their ids.
    """
    if cache.largest_token >= model.config.vocab_size:
        raise UserError(
            f"expected ids below {model.config.vocab_size}, the teacher's, in the cache at "
            f"{cache.path}, got {cache.largest_token}; name a cache of this teacher's tokenizer"
        )
    total, tokens = np.zeros(model.config.num_hidden_layers), 0
    for row in progress(rows, "importance of layers", total=len(rows)):
        batch = cache.read([row], targets=False)
        tokens += int((batch.segment_ids > 0).sum())
        total += np.asarray(_sums(model, batch.tokens, batch.segment_ids, batch.positions))
    if not tokens:
        raise UserError(
            f"expected text in the first {len(rows)} rows of {cache.path}, got padding; "
            "name another cache"
        )
    return total / tokens


def most_important(importance: np.ndarray, count: int) -> list[int]:
    """The `count` layers of largest importance (of equals the first), rising."""
    return sorted(np.argsort(-importance, kind="stable")[:count].tolist())
