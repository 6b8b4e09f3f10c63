"""cuDNN's flash attention, its backward asked for no gradient of the mask.

`jax.nn.dot_product_attention` gives a mask to cuDNN as a bias and exports the bias's gradient, for
which cuDNN takes an algorithm whose workspace grows with T²: 3.3 GB at 8K and 52 GB at 32K for the
heads of a 3.2B Llama, where 0.2 and 0.8 are needed without (asked of cuDNN 9.28 with an H200's
properties). So the primitives of `jax._src.cudnn` are bound here directly. They are private:
`TRIED` lists the JAX releases that this file was compiled with, others run blockwise.

Letters: B rows, T positions, H query heads, G key/value heads, Q head dim.
"""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_distill.attention.mask import Mask

fa: Any
try:
    from jax._src.cudnn import fused_attention_stablehlo as fa
except ImportError:  # a release that has moved it: not among those that were tried
    fa = None

TRIED = ("0.10.", "0.11.", "0.12.")
LONGEST = 32768
"""With documents to keep apart the bias is 2·T² bytes a row: 2.1 GB at this length."""


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`reference_attention` on the GPU's own kernel; bf16 or fp16.

    Documents are kept apart by a bias [B,1,T,T], the window is the kernel's own. A sink joins the
    softmax after the kernel, see `blockwise`: O′ = O·exp(lse − lse′), lse′ = logaddexp(lse, sink),
    and the kernel's backward is given O′ and lse′.
    """
    lowest = fa.get_large_negative_number(query.dtype)  # cuDNN cannot subtract two of finfo.min
    bias = jnp.where(mask.same_segment()[:, None], jnp.zeros((), query.dtype), lowest)
    return _attend(query, key, value, bias, sinks, mask.window)


def cudnn_takes(dtype: jnp.dtype, length: int, head_dim: int, device: jax.Device) -> bool:
    """Whether the kernel takes the input: bf16 or fp16, an even length up to LONGEST, a head dim
    that 8 divides, of at most 256 on Hopper and later and 128 on Ampere and Ada, an NVIDIA GPU."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; "gfx942" is AMD's
    nvidia = device.platform == "gpu" and re.fullmatch(r"([89]|\d\d)\.\d", capability)
    if not nvidia or fa is None or not jax.__version__.startswith(TRIED):
        return False
    widest = 256 if float(capability) >= 9 else 128
    half = dtype in (jnp.bfloat16, jnp.float16)
    return (
        half and length % 2 == 0 and length <= LONGEST and head_dim <= widest and head_dim % 8 == 0
    )


def backward_workspace(rows: int, length: int, heads: int, head_dim: int) -> int:
    """Bytes that cuDNN's backward takes beside XLA's buffers, B·H·T·(8Q + 4); its forward takes
    none. XLA's plan for a GPU that is not there shows them as 0."""
    return rows * heads * length * (8 * head_dim + 4)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(query, key, value, bias, sinks, window):
    return _forward(query, key, value, bias, sinks, window)[0]


def _forward(query, key, value, bias, sinks, window):
    output, lse = fa._dot_product_attention_fwd_p_wrapper.bind(
        *_operands(query, key, value, bias), is_training=True, **_options(query, window)
    )
    if sinks is not None:
        with_sink = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, :, None])
        shrink = jnp.exp(lse - with_sink).transpose(0, 2, 1)[..., None]
        output, lse = (output.astype(jnp.float32) * shrink).astype(output.dtype), with_sink
    return output, (query, key, value, bias, sinks, output, lse)


def _backward(window, saved, d_output):
    query, key, value, bias, sinks, output, lse = saved
    d_query, d_key, d_value = fa._dot_product_attention_bwd_p_wrapper.bind(
        *_operands(query, key, value, bias), lse, output, d_output, **_options(query, window)
    )
    d_sinks = None
    if sinks is not None:
        delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
        share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
        d_sinks = -jnp.sum(share * delta.transpose(0, 2, 1), axis=(0, 2)).astype(sinks.dtype)
    return d_query, d_key, d_value, None, d_sinks


_attend.defvjp(_forward, _backward)


def _operands(query, key, value, bias):
    """q, k, v, bias; lengths, offsets and page tables are not used."""
    unused = jnp.zeros(0, query.dtype)
    return query, key, value, bias, *[unused] * 6


def _options(query, window):
    return {
        "scale": 1 / math.sqrt(query.shape[-1]),
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (True, False),  # there is a bias; its gradient is not wanted
        "mask_type": fa.MaskType.CAUSAL,
        "layout": fa.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
