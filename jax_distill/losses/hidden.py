"""The distance between layers' outputs of student and teacher: docs/LOSS.md "Hidden states".

Letters: B rows, T positions, D the student's width, D' the teacher's, P pairs of layers.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_distill.losses.head import zero_masked

SMALLEST = 1e-30
"""Up to it, |a|²·|b|² is 0: a state of zeros has cosine 0, and gradient 0."""


def cosine_distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """1 − a·b/(|a||b|) of fp32 [..,D'] → [..]."""
    sizes = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
    some = sizes > SMALLEST
    cosine = jnp.sum(a * b, axis=-1) * jax.lax.rsqrt(jnp.where(some, sizes, 1.0))
    return 1.0 - jnp.where(some, cosine, 0.0)


def mean_square(a: jax.Array, b: jax.Array) -> jax.Array:
    """The mean of (a − b)² over D', of fp32 [..,D'] → [..]."""
    return jnp.mean(jnp.square(a - b), axis=-1)


DISTANCES = {"cosine": cosine_distance, "mse": mean_square}


@jax.named_scope("loss")
def hidden_sum(
    student: jax.Array,
    teacher: jax.Array,
    mask: jax.Array,
    projection: jax.Array | None = None,
    *,
    kind: str = "cosine",
) -> jax.Array:
    """The hidden-state distance summed over valid tokens, fp32, without its weight:

        Σ_valid (1/P) Σ_i d(W_i·h_i, h'_i)

    One pair's fp32 states are in memory at a time; the backward recomputes them.

    Args:
        student: [P,B,T,D], the outputs of its layers; differentiable. teacher: [B,T,P,D'],
            constant. fp32 or bf16.
        mask: bool [B,T], whether predicting the next token counts, as for every other term. What a
            masked cell holds (NaN too) adds exactly 0 to value and gradients.
        projection: W [P,D',D], differentiable; None where D' = D. Its operands are cast to the
            student's dtype, and accumulated in fp32.
        kind: `cosine` or `mse`.

    Raises:
        ValueError: shapes that do not fit.
    """
    pairs, rows, length, width = student.shape
    wanted = (rows, length, pairs, width if projection is None else projection.shape[1])
    if teacher.shape != wanted or (
        projection is not None and projection.shape != (pairs, wanted[-1], width)
    ):
        shape = None if projection is None else projection.shape
        raise ValueError(
            f"expected the teacher's hidden states {wanted} beside the student's {student.shape}, "
            f"got {teacher.shape}, projection {shape}; pass a projection [P,D',D] where widths "
            "differ"
        )
    distance = DISTANCES[kind]

    @partial(jax.checkpoint, prevent_cse=False)
    def of_pair(hidden: jax.Array, constant: jax.Array, weight: jax.Array | None) -> jax.Array:
        hidden, constant = zero_masked(hidden, mask), zero_masked(constant, mask)
        if weight is not None:
            hidden = jnp.einsum(
                "btd,ed->bte",
                hidden,
                weight.astype(hidden.dtype),
                preferred_element_type=jnp.float32,
            )
        found = distance(hidden.astype(jnp.float32), constant.astype(jnp.float32))
        return jnp.sum(jnp.where(mask, found, 0.0))

    def step(total: jax.Array, pair: tuple) -> tuple[jax.Array, None]:
        return total + of_pair(*pair), None

    teacher = jnp.moveaxis(jax.lax.stop_gradient(teacher), 2, 0)
    total, _ = jax.lax.scan(step, jnp.float32(0), (student, teacher, projection))
    return total / pairs
