"""What the fused loop carries from chunk to chunk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.losses.sums import LossSums


class Wanted(NamedTuple):
    """Which gradients the loop makes; what is not wanted costs nothing.

    packed: d_hidden of bf16 rows is left in fp16 with a scale per row, for a backward that still
    has to multiply it. Rounded to bf16 here and once more there, it would lose a digit's half:
    error 3.0e-3 where 2.4e-3 is what bf16 dlogits and one bf16 result cost.
    """

    hidden: bool
    lm_head: bool
    bias: bool
    packed: bool = False


class Carry(NamedTuple):
    """The loop's state. rows [B,T,D] turns chunk by chunk from hidden into d_hidden, where that is
    wanted; packed, it is both as uint16 bits, and row_scale fp32 [B,T] stands beside it."""

    sums: LossSums
    rows: jax.Array
    row_scale: jax.Array | None
    d_lm_head: jax.Array | None
    d_bias: jax.Array | None


def pack_rows(d_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """fp32 [..,D] → the bits of fp16 [..,D] between −1 and 1, and the scale [..] of each row."""
    largest = jnp.max(jnp.abs(d_rows), axis=-1)
    scale = jnp.where(largest == 0.0, 1.0, largest)
    halves = (d_rows / scale[..., None]).astype(jnp.float16)
    return jax.lax.bitcast_convert_type(halves, jnp.uint16), scale


def unpack_rows(bits: jax.Array, scale: jax.Array) -> jax.Array:
    """fp32 [..,D], what pack_rows was given to 11 bits."""
    halves = jax.lax.bitcast_convert_type(bits, jnp.float16)
    return halves.astype(jnp.float32) * scale[..., None]
