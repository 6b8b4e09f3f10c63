"""What every implementation returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.losses.objectives import Terms


class LossSums(NamedTuple):
    """fp32 scalars, SUMS over valid tokens, in nats: divide by the count of the whole step.

    loss is differentiable and weighted (kl_weight·τ²·kl + ce_weight·cross_entropy +
    z_loss_weight·z_loss); the others are metrics without gradient: kl (without τ²),
    cross_entropy, z_loss (lse²), teacher_mass and student_mass (probability of the K, at τ),
    top1_agreement (tokens where the teacher's most likely token is strictly the student's), count.
    A metric that was not computed (kl and the three after it, where there is no teacher) is NaN,
    never 0.
    """

    loss: jax.Array
    kl: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    teacher_mass: jax.Array
    student_mass: jax.Array
    top1_agreement: jax.Array
    count: jax.Array  # type: ignore[assignment]


def sum_terms(terms: Terms, mask: jax.Array) -> LossSums:
    """Terms [B,C] → their sums and the count; metrics lose their gradient here."""
    loss, *metrics = terms
    stacked = jnp.stack([*metrics, mask.astype(jnp.float32)])
    rest = jnp.sum(jax.lax.stop_gradient(stacked), axis=(1, 2))  # one small kernel, not seven
    return LossSums(jnp.sum(loss), *[rest[i] for i in range(len(stacked))])


def zero_sums() -> LossSums:
    """The start of a running sum."""
    return LossSums(*[jnp.zeros((), jnp.float32)] * len(LossSums._fields))


def add_sums(left: LossSums, right: LossSums) -> LossSums:
    """Field by field."""
    return LossSums(*[a + b for a, b in zip(left, right, strict=True)])
