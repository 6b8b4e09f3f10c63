"""The two loops that JAX differentiates: keep the logits of each chunk, or make them again."""

from functools import partial

import jax
import jax.numpy as jnp

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
    recompute: bool,
) -> LossSums:
    """`lax.scan` over chunks of C positions, B whole; `recompute` wraps a chunk in checkpoint.

    Without it the scan stacks what the backward needs: the fp32 logits, [B,T,V] in all. The last
    chunk is filled up with masked positions.
    """
    # The head's gradient is summed over the chunks in fp32: see `project`.
    wide = lm_head.astype(jnp.float32)
    lm_head = jax.lax.stop_gradient(lm_head).astype(hidden.dtype)

    def chunk(hidden, wide, targets):
        columns = clean(targets, vocab_size=head.vocab_size)
        hidden = jnp.where(columns.mask[..., None], hidden, jnp.zeros((), hidden.dtype))
        z = head.finish(project(hidden, lm_head, wide), bias)
        terms = chunk_terms(z, columns, head.vocab_size, objective)
        return sum_terms(terms, columns.mask)

    if recompute:
        chunk = jax.checkpoint(chunk, prevent_cse=False)

    def step(sums, inputs):
        return add_sums(sums, chunk(inputs[0], wide, inputs[1])), None

    split = partial(split_chunks, chunk_size=min(chunk_size, hidden.shape[1]))
    chunks = (split(hidden), jax.tree.map(split, targets))
    return jax.lax.scan(step, zero_sums(), chunks)[0]


def split_chunks(x: jax.Array, *, chunk_size: int) -> jax.Array:
    """[B,T,..] → [n,B,C,..], zeros (mask False) after the end."""
    rows, positions, *shape = x.shape
    missing = -positions % chunk_size
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(shape))
    return jnp.moveaxis(x.reshape(rows, -1, chunk_size, *shape), 1, 0)
