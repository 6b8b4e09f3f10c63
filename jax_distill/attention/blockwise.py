"""Attention in linear memory: online softmax over blocks of keys, a backward that recomputes.

Forward: for each block of queries the running maximum, sum and output over the blocks of keys that
it can see (Rabe and Staats, arXiv 2112.05682). What is kept for the backward is the output and the
logsumexp of every query; weights are recomputed block by block from the latter (FlashAttention-2,
arXiv 2307.08691). Blocks that causality or the window empties are never visited; pairs of blocks
without a document in common are skipped.

A sink is a logit of its own in each head's softmax, whose value is 0 (gpt-oss): it only joins the
logsumexp. With lse′ = logaddexp(lse, sink) the output is O′ = O·exp(lse − lse′), the usual backward
fed with O′ and lse′ gives exact dQ, dK and dV, and dsink = −Σ exp(sink − lse′)·rowsum(dO∘O′).

Letters: B rows, T positions, H query heads, G key/value heads, R = H/G, Q head width, n blocks of
C positions.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.attention.mask import Mask

BLOCK = 1024  # positions; smaller where a row is shorter


class _Keys(NamedTuple):
    """What a block of keys brings: k, v [n,B,G,C,Q]; segment ids [n,B,C]."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """`reference_attention` in linear memory: [B,T,H,Q], [B,T,G,Q] twice → [B,T,H,Q].

    Softmax and sums are fp32 (float64 for float64 inputs), matmuls take the inputs' dtype and
    accumulate in fp32.

    Args:
        sinks: [H], a logit per head that takes part in the softmax and adds nothing.
        block: C, positions of a block of queries and of keys.
    """
    block = min(block, query.shape[1])
    return _attend(query, key, value, mask.segment_ids, sinks, mask.window, block)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(query, key, value, segment_ids, sinks, window, block):
    return _forward(query, key, value, segment_ids, sinks, window, block)[0]


def _forward(query, key, value, segment_ids, sinks, window, block):
    queries, keys = _split(query, key, value, segment_ids, block)
    count, rows, groups, ratio, size, width = queries.shape
    wide = _accumulator(query.dtype)
    extent = _extent(keys.segments)

    def attend(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, part = inputs

        def visit(other: jax.Array, state: tuple) -> tuple:
            largest, total, mixed = state
            logits = _logits(part, keys, index, other, window)
            new = jnp.maximum(largest, logits.max(axis=-1))
            weights = jnp.exp(logits - new[..., None])
            shrink = jnp.exp(largest - new)
            add = _matmul("bgrcs,bgsq->bgrcq", weights, keys.value[other], wide)
            return (
                new,
                total * shrink + weights.sum(axis=-1),
                mixed * shrink[..., None] + add,
            )

        shape = (rows, groups, ratio, size)
        # The lowest finite number, not −inf: a block may hold nothing that a query sees.
        lowest = jnp.full(shape, jnp.finfo(wide).min / 2, wide)
        start = (lowest, jnp.zeros(shape, wide), jnp.zeros((*shape, width), wide))
        step = _skipping(visit, index, extent)
        first = _first_block(index, size, window)
        largest, total, mixed = jax.lax.fori_loop(first, index + 1, step, start)
        return mixed / total[..., None], largest + jnp.log(total)

    mixed, lse = jax.lax.map(attend, (jnp.arange(count, dtype=jnp.int32), queries))
    if sinks is not None:
        sink = sinks.astype(wide).reshape(1, 1, groups, ratio, 1)
        with_sink = jnp.logaddexp(lse, sink)
        mixed, lse = mixed * jnp.exp(lse - with_sink)[..., None], with_sink
    output = _join(mixed.astype(query.dtype), query.shape)
    return output, (query, key, value, segment_ids, sinks, output, lse)


def _backward(window, block, saved, d_output):
    query, key, value, segment_ids, sinks, output, lse = saved
    queries, keys = _split(query, key, value, segment_ids, block)
    count, rows, groups, ratio, size, width = queries.shape
    wide = lse.dtype
    extent = _extent(keys.segments)
    d_outputs = _split_queries(d_output, groups, block)
    outputs = _split_queries(output, groups, block)
    delta = jnp.sum(d_outputs.astype(wide) * outputs.astype(wide), axis=-1)

    def visit_keys(d_queries: jax.Array, other: jax.Array) -> tuple:
        k, v = keys.key[other], keys.value[other]

        def visit(index: jax.Array, state: tuple) -> tuple:
            d_queries, d_key, d_value = state
            part, d_out = queries[index], d_outputs[index]
            logits = _logits(part, keys, index, other, window)
            weights = jnp.exp(logits - lse[index][..., None])
            d_weights = _matmul("bgrcq,bgsq->bgrcs", d_out, v, wide)
            d_logits = weights * (d_weights - delta[index][..., None]) / math.sqrt(width)
            d_value += _matmul("bgrcs,bgrcq->bgsq", weights, d_out, wide)
            d_key += _matmul("bgrcs,bgrcq->bgsq", d_logits, part, wide)
            d_part = d_queries[index] + _matmul("bgrcs,bgsq->bgrcq", d_logits, k, wide)
            return jax.lax.dynamic_update_index_in_dim(d_queries, d_part, index, 0), d_key, d_value

        zeros = jnp.zeros(k.shape, wide)
        step = _skipping(visit, other, extent)
        last = _last_block(other, size, count, window)
        state = jax.lax.fori_loop(other, last + 1, step, (d_queries, zeros, zeros))
        return state[0], (state[1].astype(key.dtype), state[2].astype(value.dtype))

    start = jnp.zeros(queries.shape, wide)
    blocks = jnp.arange(count, dtype=jnp.int32)
    d_queries, (d_keys, d_values) = jax.lax.scan(visit_keys, start, blocks)
    d_sinks = None
    if sinks is not None:
        sink = sinks.astype(wide).reshape(1, 1, groups, ratio, 1)
        d_sinks = -jnp.sum(jnp.exp(sink - lse) * delta, axis=(0, 1, 4))
        d_sinks = d_sinks.reshape(sinks.shape).astype(sinks.dtype)
    return (
        _join(d_queries.astype(query.dtype), query.shape),
        _join(d_keys[:, :, :, None], key.shape),
        _join(d_values[:, :, :, None], value.shape),
        None,
        d_sinks,
    )


_attend.defvjp(_forward, _backward)


def _accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums and of the softmax."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _matmul(equation: str, left: jax.Array, right: jax.Array, wide: jnp.dtype) -> jax.Array:
    """Operands in the dtype of `right`, the model's; accumulation in `wide`."""
    return jnp.einsum(equation, left.astype(right.dtype), right, preferred_element_type=wide)


def _logits(
    part: jax.Array, keys: _Keys, index: jax.Array, other: jax.Array, window: int | None
) -> jax.Array:
    """[B,G,R,C,C]: scaled q·k of query block `index` and key block `other`; the lowest finite
    number where the query does not see the key."""
    size, width = part.shape[-2:]
    wide = _accumulator(part.dtype)
    logits = _matmul("bgrcq,bgsq->bgrcs", part, keys.key[other], wide) / math.sqrt(width)
    place = jnp.arange(size, dtype=jnp.int32)
    distance = (index - other) * size + place[:, None] - place[None, :]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    same = keys.segments[index][:, :, None] == keys.segments[other][:, None, :]
    seen = (seen[None] & same)[:, None, None]
    return jnp.where(seen, logits, jnp.finfo(wide).min)


def _skipping(visit, fixed: jax.Array, extent: tuple[jax.Array, jax.Array]):
    """`visit` where the two blocks have a document in common, by their smallest and largest ids."""
    smallest, largest = extent

    def step(moving: jax.Array, state: tuple) -> tuple:
        overlap = (smallest[moving] <= largest[fixed]) & (smallest[fixed] <= largest[moving])
        return jax.lax.cond(jnp.any(overlap), visit, lambda _, state: state, moving, state)

    return step


def _extent(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest segment id of each block and row, [n,B]."""
    return segments.min(axis=-1), segments.max(axis=-1)


def _first_block(index: jax.Array, size: int, window: int | None) -> jax.Array:
    """The first block of keys that a query of block `index` can see."""
    if window is None:
        return jnp.zeros_like(index)
    return jnp.maximum(index * size - (window - 1), 0) // size


def _last_block(index: jax.Array, size: int, count: int, window: int | None) -> jax.Array:
    """The last block of queries that can see a key of block `index`."""
    if window is None:
        return jnp.full_like(index, count - 1)
    return jnp.minimum(((index + 1) * size - 1 + window - 1) // size, count - 1)


def _split(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, block: int
) -> tuple[jax.Array, _Keys]:
    """Queries [n,B,G,R,C,Q] and keys; positions past the end form a segment of their own."""
    groups = key.shape[2]
    split = partial(_split_queries, groups=groups, block=block)
    missing = -segment_ids.shape[1] % block
    segments = jnp.pad(segment_ids, ((0, 0), (0, missing)), constant_values=-1)
    segments = jnp.moveaxis(segments.reshape(segments.shape[0], -1, block), 1, 0)
    return split(query), _Keys(split(key)[:, :, :, 0], split(value)[:, :, :, 0], segments)


def _split_queries(x: jax.Array, groups: int, block: int) -> jax.Array:
    """[B,T,H,Q] → [n,B,G,R,C,Q], zeros past the end."""
    rows, length, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = x.reshape(rows, -1, block, groups, heads // groups, width)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _join(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[n,B,G,R,C,Q] → [B,T,H,Q]."""
    rows, length, heads, width = shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, width)[:, :length]
