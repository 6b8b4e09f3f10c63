"""Attention as two batched matmuls, the H/G query heads of a group side by side.

Letters: B rows, T positions, H query heads, G key/value heads, Q head dim.
"""

import math

import jax
import jax.numpy as jnp

from jax_distill.attention.mask import Mask

LONGEST = 2048
"""The weights are [B,H,T,T] in fp32: 0.15 GB a row at this length for nine heads."""


def grouped_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`reference_attention` with [B,G] as the batch of the matmuls: [B,G,H/G·T,Q] by [B,G,Q,T].

    Softmax is divided by its sum after the matmul with `value`, on [T,Q] instead of [T,T].
    On two CPU cores a step (forward and backward, remat "layer") of 6 layers of width 192 with 6/2
    heads on 16 rows of 256 takes 720 ms with it, 894 ms with jax.nn's XLA path; attention alone
    53 against 83 ms. A custom backward that recomputes the weights from their logsumexp gave
    800 ms and was not kept: what costs time is what a layer stores, see `Decoder`.
    """
    batch, length, heads, width = query.shape
    groups = key.shape[2]
    grouped = (batch, groups, heads // groups * length, width)
    query = query.transpose(0, 2, 1, 3).reshape(grouped)
    key, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    logits = jnp.matmul(query, key, preferred_element_type=jnp.float32) * (1 / math.sqrt(width))
    logits = logits.reshape(batch, groups, -1, length, length)
    # Added, not selected: one pass over [T,T] fewer, and no logit comes near 1e30.
    logits += jnp.where(mask.allowed(), 0.0, -1e30)[:, None, None, :, :]
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
        largest = jax.lax.stop_gradient(jnp.maximum(largest, sink))
    weights = jnp.exp(logits - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - largest)
    weights, total = weights.reshape(*grouped[:3], length), total.reshape(*grouped[:3], 1)
    mixed = jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    mixed = (mixed / total).astype(value.dtype)
    return mixed.reshape(batch, heads, length, width).transpose(0, 2, 1, 3)
