"""From values per token to their sums over a batch."""

import jax
import jax.numpy as jnp

from jax_distill.objective import LossSums, TokenValues


def sum_values(values: TokenValues, mask: jax.Array) -> LossSums:
    """Values [B,C] → their sums and the count; metrics lose their gradient here."""
    loss, *metrics = values
    stacked = jnp.stack([*metrics, mask.astype(jnp.float32)])
    sums = jnp.sum(jax.lax.stop_gradient(stacked), axis=(1, 2))  # one small kernel, not seven
    return LossSums(jnp.sum(loss), *[sums[i] for i in range(len(stacked))])


def zero_sums() -> LossSums:
    """The start of a running sum."""
    return LossSums(*[jnp.zeros((), jnp.float32)] * len(LossSums._fields))


def add_sums(left: LossSums, right: LossSums) -> LossSums:
    """Field by field."""
    return LossSums(*[a + b for a, b in zip(left, right, strict=True)])
