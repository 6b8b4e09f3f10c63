"""The two loops that JAX differentiates: keep the logits of each chunk, or make them again."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_distill.losses.chunks import split_chunks, take_rows, valid_first_order
from jax_distill.losses.logits import Head, project
from jax_distill.losses.objectives import Objective, Targets, clean
from jax_distill.losses.rule import chunk_terms
from jax_distill.losses.sums import LossSums, add_sums, sum_terms, zero_sums


def chunked_sums(
    hidden: jax.Array,
    lm_head: jax.Array,
    bias: jax.Array | None,
    targets: Targets,
    *,
    head: Head,
    objective: Objective,
    chunk_size: int,
    valid_first: bool,
    recompute: bool,
) -> LossSums:
    """`lax.scan` over chunks of C positions, B whole; `recompute` wraps a chunk in checkpoint.

    Without it the scan stacks what the backward needs: the fp32 logits, [B,T,V] in all. The last
    chunk is filled up with masked positions. `valid_first` sorts a copy of the inputs, and a chunk
    with nothing valid is skipped.
    """
    # The head's gradient is summed over the chunks in fp32: see `project`.
    wide = lm_head.astype(jnp.float32)
    lm_head = jax.lax.stop_gradient(lm_head).astype(hidden.dtype)

    def chunk(hidden, wide, targets):
        columns = clean(targets, vocab_size=head.vocab_size)
        z = head.finish(project(hidden, lm_head, wide, columns.mask), bias)
        terms = chunk_terms(z, columns, head.vocab_size, objective)
        return sum_terms(terms, columns.mask)

    if recompute:
        chunk = jax.checkpoint(chunk, prevent_cse=False)

    def skip(*_):
        return zero_sums()

    def step(sums, inputs):
        hidden, targets = inputs
        if not valid_first:
            return add_sums(sums, chunk(hidden, wide, targets)), None
        some = jnp.any(targets.mask)
        return add_sums(sums, jax.lax.cond(some, chunk, skip, hidden, wide, targets)), None

    inputs = (hidden, targets)
    if valid_first:
        order = valid_first_order(targets.mask)
        inputs = jax.tree.map(lambda x: take_rows(x, order), inputs)
    split = partial(split_chunks, chunk_size=min(chunk_size, hidden.shape[1]))
    chunks = jax.tree.map(split, inputs)
    return jax.lax.scan(step, zero_sums(), chunks)[0]
