"""The definition: every logit at once, each line a line of LOSS.md. The fast versions follow it."""

import jax
import jax.numpy as jnp

from jax_distill.losses.logits import Head, fp32_product, select_rows
from jax_distill.losses.objectives import (
    Objective,
    Targets,
    Terms,
    clean,
    masked_logsumexp,
    terms_of,
)


def dense_terms(
    hidden: jax.Array,
    lm_head: jax.Array,
    bias: jax.Array | None,
    targets: Targets,
    *,
    head: Head,
    objective: Objective,
) -> Terms:
    """Terms [B,T] from the whole [B,T,V] of fp32 logits, differentiated by JAX alone."""
    columns = clean(targets, vocab_size=head.vocab_size)
    hidden = select_rows(hidden, columns.mask)
    z = head.finish(fp32_product(hidden, lm_head), bias)[..., : head.vocab_size]

    log_q = jax.nn.log_softmax(z / objective.temperature, axis=-1)
    log_q_one = jax.nn.log_softmax(z, axis=-1)
    ids = jnp.minimum(columns.ids, head.vocab_size - 1)
    log_q_k = jnp.take_along_axis(log_q, ids[..., :-1], axis=-1)
    among_k = _column_mask(ids[..., :-1], columns.real, head.vocab_size)
    log_q_tail = masked_logsumexp(log_q, ~among_k)
    cross_entropy = -jnp.sum(
        jnp.where(columns.label_slot, jnp.take_along_axis(log_q_one, ids, axis=-1), 0.0), axis=-1
    )
    has_label = jnp.any(columns.label_slot, axis=-1)
    top = _column_mask(ids[..., :-1], columns.top_slot, head.vocab_size)
    largest_other = jnp.max(jnp.where(top, -jnp.inf, z), axis=-1)
    agrees = jnp.any(top, axis=-1) & (jnp.max(z, axis=-1) > largest_other)
    return terms_of(
        columns,
        log_q=log_q_k,
        log_q_tail=log_q_tail,
        cross_entropy=jnp.where(has_label, cross_entropy, jnp.inf),
        log_normaliser=jax.nn.logsumexp(z, axis=-1),
        agrees=agrees,
        objective=objective,
    )


def _column_mask(ids: jax.Array, chosen: jax.Array, size: int) -> jax.Array:
    """bool [B,T,V]: the columns named by the `chosen` of ids [B,T,K]."""
    rows, positions = ids.shape[:2]
    row = jnp.arange(rows)[:, None, None]
    position = jnp.arange(positions)[None, :, None]
    slots = jnp.where(chosen, ids, size)
    return jnp.zeros((rows, positions, size), bool).at[row, position, slots].set(True, mode="drop")
