"""Which ids of a position the cache keeps: the K most likely, as many as reach p, or a sample.

B rows, C positions of a chunk, V vocabulary, K stored tokens, M draws, n groups of GROUP ids.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.cache.draws import GROUP
from jax_distill.targets.topk import grouped_top_k


class Chosen(NamedTuple):
    """The ids kept, by logit descending, ties by id ascending; the real ones first.

    Attributes:
        indices: int32 [B,C,K]. values: fp32 [B,C,K], their logits; −inf where not real.
        real: bool [B,C,K].
        largest: fp32 [B,C], of all logits.
        draws: uint16 [B,C,K], of a sample: how often each was drawn; 0 where not real.
    """

    indices: jax.Array
    values: jax.Array
    real: jax.Array
    largest: jax.Array
    draws: jax.Array | None = None

    def scattered(self, vocab_size: int) -> jax.Array:
        """int32 [B,C,K], the ids; those that are not real lie beyond the vocabulary, apart."""
        entry = jax.lax.broadcasted_iota(jnp.int32, self.indices.shape, 2)
        return jnp.where(self.real, self.indices, vocab_size + entry)


def most_likely(z: jax.Array, top_k: int, top_p: float | None, temperature: float) -> Chosen:
    """The K largest of z fp32 [B,C,V]; with `top_p` the first of them whose probabilities at τ
    reach it together (all K where they do not), one at least."""
    values, indices = grouped_top_k(z, top_k)
    # Not values[:, :, :1]: a slice of top_k's result makes XLA on CPU sort all V, 75 × slower.
    largest = jnp.max(values, axis=-1)
    if top_p is None:
        return Chosen(indices, values, jnp.ones(indices.shape, bool), largest)
    total = jnp.sum(jnp.exp((z - largest[..., None]) / temperature), axis=-1, keepdims=True)
    p = jnp.exp((values - largest[..., None]) / temperature) / total
    real = jnp.cumsum(p, axis=-1) - p < top_p  # what stands before it does not reach it yet
    entry = jax.lax.broadcasted_iota(jnp.int32, real.shape, 2)
    # The first always: at τ where p rounds to 1 nothing else is < top_p.
    real = jnp.logical_and(entry < jnp.sum(real, axis=-1, keepdims=True), real) | (entry == 0)
    return Chosen(indices, jnp.where(real, values, -jnp.inf), real, largest)


def sampled(z: jax.Array, uniforms: jax.Array, temperature: float) -> Chosen:
    """M ids drawn with replacement from softmax(z/τ), z fp32 [B,C,V], by uniforms fp32 [B,C,M,2];
    the distinct ones, and how often each was drawn."""
    largest = jnp.max(z, axis=-1)
    ids = drawn_ids(jnp.exp((z - largest[..., None]) / temperature), uniforms)
    ids = jnp.sort(ids, axis=-1)
    before = jnp.pad(ids[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    first = ids != before
    draws = jnp.sum(ids[..., :, None] == ids[..., None, :], axis=-1, dtype=jnp.int32)
    values = jnp.where(first, jnp.take_along_axis(z, ids, axis=-1), -jnp.inf)
    order, indices, draws = jax.lax.sort((-values, ids, draws), dimension=-1, num_keys=2)
    real = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 2) < jnp.sum(
        first, axis=-1, keepdims=True
    )
    draws = jnp.where(real, draws, 0).astype(jnp.uint16)
    return Chosen(indices, jnp.where(real, -order, -jnp.inf), real, largest, draws)


def drawn_ids(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """int32 [..,M]: ids drawn with probabilities weights / Σ weights, fp32 [..,V] ≥ 0: a group by
    the first of each pair of `uniforms` [..,M,2], an id of it by the second (`cache.draws`)."""
    *leading, size = weights.shape
    groups = -(-size // GROUP)
    weights = jnp.pad(weights, [(0, 0)] * len(leading) + [(0, groups * GROUP - size)])
    grid = weights.reshape(*leading, groups, GROUP)
    group = _inverse(jnp.sum(grid, axis=-1)[..., None, :], uniforms[..., 0])
    within = jnp.take_along_axis(grid, group[..., None], axis=-2)
    return group * GROUP + _inverse(within, uniforms[..., 1])


def _inverse(weights: jax.Array, u: jax.Array) -> jax.Array:
    """int32 [..,M]: the first entry of weights [..,M or 1,n] whose cumulated sum exceeds u·Σ; never
    one of weight 0."""
    sums = jnp.cumsum(weights, axis=-1)
    total = sums[..., -1:]
    below = jnp.sum(sums <= u[..., None] * total, axis=-1, dtype=jnp.int32)
    return jnp.minimum(below, jnp.sum(sums < total, axis=-1, dtype=jnp.int32))
