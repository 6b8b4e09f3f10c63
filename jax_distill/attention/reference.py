"""The definition of attention: the whole [T,S] matrix of weights, in the plainest form.

Letters: B rows, T query positions, S key positions, H query heads, G key/value heads, Q head dim.
"""

import math

import jax
import jax.numpy as jnp

from jax_distill.attention.mask import Mask


def reference_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`attend_to` of the keys that `mask` allows: [B,T,H,Q], [B,T,G,Q] twice → [B,T,H,Q]."""
    return attend_to(query, key, value, mask.allowed(), sinks=sinks)


def attend_to(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    allowed: jax.Array,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """softmax(query·keyᵀ/√Q over the keys in `allowed` bool [B,T,S], one at least)·value:
    [B,T,H,Q], [B,S,G,Q] twice → [B,T,H,Q].

    Query heads h·H/G … (h+1)·H/G − 1 share key/value head h. Logits and softmax are fp32, weights
    are cast to value's dtype, the result to query's. sinks [H]: a logit per head that takes part in
    the softmax and adds nothing (gpt-oss).
    """
    per_group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, per_group, axis=2) for x in (key, value))
    logits = jnp.einsum("bthq,bshq->bhts", query, key, preferred_element_type=jnp.float32)
    logits = logits * (1 / math.sqrt(query.shape[-1]))
    logits = jnp.where(allowed[:, None], logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(
            sinks.astype(jnp.float32)[None, :, None, None], (*logits.shape[:3], 1)
        )
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]]
    mixed = jnp.einsum(
        "bhts,bshq->bthq", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return mixed.astype(query.dtype)
