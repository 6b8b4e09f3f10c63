"""Causal attention that keeps documents apart, behind one function."""

import math
import re
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

Implementation = Literal["cudnn", "xla", "products"]
ATTENTION_IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal softmax attention inside each segment: [B,T,H,Q], [B,T,G,Q] twice, [B,T] → [B,T,H,Q].

    Token t sees token s iff s ≤ t and both have the same segment id; so padding (id 0) sees padding
    and itself, and no row of the softmax is empty. Scale 1/sqrt(Q); softmax in fp32.
    `implementation` is one of ATTENTION_IMPLEMENTATIONS; None takes `fast_attention`'s choice.
    "cudnn" and "xla" are `jax.nn.dot_product_attention`'s, "products" is `attention_products`.
    """
    implementation = implementation or fast_attention(query.dtype, *query.shape[1::2])
    if implementation == "products":
        return attention_products(query, key, value, segment_ids)
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=implementation
    )


def fast_attention(
    dtype: jnp.dtype, length: int, head_dim: int, device: Any = None
) -> Implementation:
    """The implementation for a device (None: the first local one): "products" on a CPU; "cudnn" on
    an NVIDIA GPU of the Ampere generation or later where cuDNN's kernel takes the input (bf16 or
    fp16, an even length, a head width of at most 128 that 8 divides); "xla" elsewhere."""
    device = jax.local_devices()[0] if device is None else device
    if device.platform == "cpu":
        return "products"
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; "gfx942" is AMD's
    nvidia = device.platform == "gpu" and re.fullmatch(r"([89]|\d\d)\.\d", capability)
    half = dtype in (jnp.bfloat16, jnp.float16)
    fits = half and length % 2 == 0 and head_dim <= 128 and head_dim % 8 == 0
    return "cudnn" if nvidia and fits else "xla"


def attention_products(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """`attention` as two batched products over [B,G], the H/G query heads of a group side by side.

    Softmax is divided by its sum after the product with `value`, on [T,Q] instead of [T,T].
    On two CPU cores a step (forward and backward, remat "layer") of 6 layers of width 192 with 6/2
    heads on 16 rows of 256 takes 720 ms with it, 894 ms with jax.nn's XLA path; attention alone
    53 against 83 ms. A backward of its own that recomputes the weights from their logsumexp gave
    800 ms and was not kept: what costs time is what a layer stores, see `Decoder`.
    """
    batch, length, heads, width = query.shape
    groups = key.shape[2]
    grouped = (batch, groups, heads // groups * length, width)
    query = query.transpose(0, 2, 1, 3).reshape(grouped)
    key, value = key.transpose(0, 2, 3, 1), value.transpose(0, 2, 1, 3)
    logits = jnp.matmul(query, key, preferred_element_type=jnp.float32) * (1 / math.sqrt(width))
    logits = logits.reshape(batch, groups, -1, length, length)
    seen = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen &= jnp.tril(jnp.ones((length, length), bool))[None, :, :]
    # Added, not selected: one pass over [T,T] fewer, and no logit comes near 1e30.
    logits += jnp.where(seen, 0.0, -1e30)[:, None, None, :, :]
    largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - largest).reshape(*grouped[:3], length)
    total = weights.sum(axis=-1, keepdims=True)
    mixed = jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    mixed = (mixed / total).astype(value.dtype)
    return mixed.reshape(batch, heads, length, width).transpose(0, 2, 1, 3)
