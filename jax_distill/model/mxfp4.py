"""Matrices that stay MXFP4 until they are used (OCP Microscaling Formats 1.0, §5.3.4)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SIZE = 32  # numbers that share a scale


class Packed(NamedTuple):
    """[..,in,out] as gpt-oss's files have it, 4.25 bits a number: `blocks` uint8 [..,out,in/32,16],
    two FP4 codes a byte, the lower four bits first; `scales` uint8 [..,out,in/32], exponents."""

    blocks: jax.Array
    scales: jax.Array


def packed_shapes(rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the blocks and the scales of a matrix [rows,columns]."""
    return (columns, rows // SIZE, SIZE // 2), (columns, rows // SIZE)


def decode(packed: Packed) -> jax.Array:
    """The matrix transposed, [..,out,in], in bf16, exactly: FP4 · 2^(scale − 127), built of its
    bits, so that no device flushes the smallest. Scales of at most 252, which the loader sees to:
    larger ones overflow.

    A code is sign, two bits of exponent e, one of mantissa m: ±(1 + m/2) · 2^(e−1), and ±m/2 where
    e = 0.
    """
    blocks, scales = packed
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, SIZE)
    codes = codes.astype(jnp.int32)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    power = scales.astype(jnp.int32)[..., None] + exponent - 1
    significand = jnp.where(exponent > 0, 128 + 64 * mantissa, 128 * mantissa)
    normal = jnp.where(significand > 0, (power << 7) + (significand & 127), 0)
    bits = jnp.where(power > 0, normal, significand >> jnp.maximum(1 - power, 0))
    bits = (bits + (sign << 15)).astype(jnp.uint16).reshape(*scales.shape[:-1], -1)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
