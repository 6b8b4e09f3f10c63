"""The gradient of the head's matmul, dlogits: of one chunk, and of several whose logits are not in
memory together.

Letters: B rows, C positions of each row in one chunk, M in a group of chunks, V vocabulary, D
hidden, G gathered logits of a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.batch import Batch, LiveTeacher
from jax_distill.losses.chunks import Chunk
from jax_distill.losses.gradient import (
    LogitSummary,
    TokenGradients,
    rest_gradient,
    summarize_logits,
    values_and_gradients,
)
from jax_distill.losses.head import Head, head_matmul
from jax_distill.losses.live import live_values
from jax_distill.losses.outcomes import select_outcomes
from jax_distill.losses.values import add_sums, sum_values, zero_sums
from jax_distill.objective import LossSums, Objective, TokenValues


class ChunkGradient(NamedTuple):
    """[B,C,V] of the head's matmul, but for the entries ids [B,C,G], which are `gathered`."""

    dlogits: jax.Array
    ids: jax.Array
    gathered: jax.Array


def chunk_dlogits(
    summary: LogitSummary,
    gradients: TokenGradients,
    dtype: jnp.dtype,
    *,
    head: Head,
    objective: Objective,
) -> ChunkGradient:
    """The gradient of the head's matmul in `dtype`; the only write of that size."""
    dz = rest_gradient(summary, gradients, objective)
    gathered = gradients.z_gathered
    if not head.shifts_only:
        rest = summary.rest
        dz = jnp.where(rest > -jnp.inf, dz * head.transform_derivative(rest), 0.0)
        gathered = gathered * head.transform_derivative(summary.z_gathered)
    return ChunkGradient(dz.astype(dtype), summary.local_ids, gathered.astype(dtype))


def live_chunk(
    product: jax.Array,
    batch: Batch,
    teacher: LiveTeacher,
    dtype: jnp.dtype,
    head: Head,
    objective: Objective,
) -> tuple[TokenValues, ChunkGradient]:
    """A live teacher's values [B,C], and the gradient in `dtype` of the head's matmul fp32
    [B,C,V]."""

    def total(product: jax.Array) -> tuple[jax.Array, TokenValues]:
        values = live_values(
            head.transform(product), batch, teacher, objective, head.real_vocab_size
        )
        return jnp.sum(values.loss), values

    dlogits, values = jax.grad(total, has_aux=True)(product)
    none = jnp.zeros((*product.shape[:2], 0), jnp.int32)
    return values, ChunkGradient(dlogits.astype(dtype), none, none.astype(dtype))


def chunk_gradient(
    rows: jax.Array,
    part: Batch,
    *,
    head: Head,
    weight: jax.Array,
    objective: Objective,
    axis: str | None,
) -> tuple[TokenValues, ChunkGradient]:
    """Values [B,C] and gradient of the positions `part` [B,C], whose hidden states are `rows`."""
    product = head_matmul(rows, weight)
    if part.teacher is not None:
        return live_chunk(product, part, part.teacher, rows.dtype, head, objective)
    outcomes = select_outcomes(part, head.real_vocab_size)
    summary = summarize_logits(head.transform(product), outcomes, axis)
    values, gradients = values_and_gradients(summary, outcomes, objective)
    return values, chunk_dlogits(summary, gradients, rows.dtype, head=head, objective=objective)


def group_gradient(
    rows_of: Callable[[], jax.Array],
    part: Batch,
    chunk: int,
    gradient_of: Callable[[jax.Array, Batch], tuple[TokenValues, ChunkGradient]],
    *,
    buffer: jax.Array,
) -> tuple[LossSums, ChunkGradient]:
    """Sums and gradient of the group `part` [B,M], C = `chunk` positions at a time.

    rows_of: makes its hidden states [B,M,D]; each chunk makes its own part of them again, so that
    the whole is not in memory beside the logits. gradient_of: of a chunk, as `chunk_gradient`.
    buffer: [B,M,V], the memory of the dlogits; what it holds is overwritten.
    """
    length = buffer.shape[1]

    def step(index, carry: tuple[LossSums, ChunkGradient]) -> tuple[LossSums, ChunkGradient]:
        sums, group = carry
        here = Chunk(jnp.asarray(index, jnp.int32), chunk, length, None)
        piece = part.map(here.read)
        values, made = gradient_of(here.read(rows_of()), piece)
        # The last chunk may have positions that an earlier one had: they count once, and their
        # gradients, written again, are the same.
        new_ones = piece.mask & here.is_new[None, :]
        values = TokenValues(*[jnp.where(new_ones, value, 0.0) for value in values])
        sums = add_sums(sums, sum_values(values, new_ones))
        return sums, jax.tree.map(here.put, group, made)

    one = jax.eval_shape(lambda: gradient_of(rows_of(), part))[1]
    empty = [jnp.zeros(x.shape, x.dtype) for x in one[1:]]
    start = (zero_sums(), ChunkGradient(buffer, *empty))
    return jax.lax.fori_loop(0, -(-length // chunk), step, start)
