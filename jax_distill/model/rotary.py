"""Rotary position embeddings: every rope type of HF's Llama but longrope, which is refused.

Letters: B rows, T positions, H heads, Q head dim.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.model.configuration import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, fp32 [Q/2], for a document within the context.

    default: theta^(-2i/Q). The intermediate roundings to fp32 are those of transformers
    (modeling_rope_utils), because a last-bit difference grows with the position. The dynamic type
    equals the default until a document outgrows the context: see `rotary_angles`.
    Sources: YaRN, arXiv 2309.00071 §3; Llama 3.1's released configuration.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wave = np.power(rope.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / wave
    if rope.rope_type in ("default", "dynamic"):
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, wave, head_dim)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    raise UserError(
        f"expected rope_type default, linear, dynamic, yarn or llama3, got {rope.rope_type!r}; "
        "use a model with one of these"
    )


def _yarn_frequencies(rope: RopeConfig, wave: np.ndarray, head_dim: int) -> np.ndarray:
    """Pairs that turn more than beta_fast times in the original context keep their frequency,
    those that turn less than beta_slow times are divided by factor, a linear ramp lies between."""

    def pair_with_rotations(rotations: float) -> float:
        context = rope.original_max_position_embeddings
        return (
            head_dim
            * math.log(context / (rotations * 2 * math.pi))
            / (2 * math.log(rope.rope_theta))
        )

    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    kept = np.float32(1.0) - ramp.astype(np.float32)
    stretched = np.float32(1.0) / (np.float32(rope.factor) * wave)
    return stretched * (np.float32(1.0) - kept) + (np.float32(1.0) / wave) * kept


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Wavelengths above context/low_freq_factor are stretched by factor, those below
    context/high_freq_factor are kept, between them the two are blended."""
    context = rope.original_max_position_embeddings
    wavelengths = np.float32(2 * math.pi) / frequencies
    stretched = frequencies / np.float32(rope.factor)
    smooth = (np.float32(context) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (np.float32(1.0) - smooth) * stretched + smooth * frequencies
    result = np.where(wavelengths > context / rope.low_freq_factor, stretched, blended)
    return np.where(wavelengths < context / rope.high_freq_factor, frequencies, result)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's factor on cos and sin: 0.1·m·ln(factor) + 1 with m = 1; with both mscales given
    (DeepSeek's form) the quotient of that at m = mscale and at m = mscale_all_dim."""

    def at(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    return at(mscale) / at(mscale_all_dim) if mscale and mscale_all_dim else at(1.0)


def rotary_angles(
    rope: RopeConfig,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    head_dim: int,
    max_position_embeddings: int,
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · frequency, times attention_factor: two fp32 arrays [B,T,Q/2].

    dynamic (NTK): with n the length of the token's own document (largest position + 1) and m the
    context, theta becomes theta · (factor·n/m − factor + 1)^(Q/(Q−2)) once n > m. transformers
    takes the longest row of the batch for n; the document's own n is the same for a document
    alone and keeps documents apart in a packed row.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies
    if rope.rope_type == "dynamic":
        context = max_position_embeddings
        length = jnp.maximum(_document_lengths(positions, segment_ids), context)
        growth = length.astype(jnp.float32) * (rope.factor / context) - (rope.factor - 1.0)
        theta = rope.rope_theta * growth ** (head_dim / (head_dim - 2))
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        angles = positions.astype(jnp.float32)[:, :, None] / (
            theta[:, :, None] ** exponents[None, None, :]
        )
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def _document_lengths(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[B,T] → [B,T]: one more than the largest position in each token's segment."""

    def row(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        _, dense = jnp.unique(segment_ids, size=segment_ids.shape[0], return_inverse=True)
        last = jax.ops.segment_max(positions, dense, num_segments=segment_ids.shape[0])
        return last[dense] + 1

    return jax.vmap(row)(positions, segment_ids)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x_i, x_{i+Q/2}) of x [B,T,H,Q] by the angles [B,T,Q/2]; fp32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
