"""`dense`, the definition: every logit at once, line by line docs/LOSS.md; the others follow it.

Letters: B rows, T positions, D hidden, V vocabulary, K stored tokens, G = K + 1 gathered tokens.
"""

import jax
import jax.numpy as jnp

from jax_distill.batch import Batch
from jax_distill.losses.divergences import values_from_logprobs
from jax_distill.losses.head import Head, head_matmul, zero_masked
from jax_distill.losses.live import live_values
from jax_distill.losses.outcomes import masked_logsumexp, select_outcomes
from jax_distill.objective import Objective, TokenValues


def dense_values(hidden: jax.Array, head: Head, batch: Batch, objective: Objective) -> TokenValues:
    """Values [B,T] from the whole [B,T,V] of fp32 logits, differentiated by JAX alone."""
    vocab_size = head.real_vocab_size
    if batch.teacher is not None:
        z = head.transform(head_matmul(zero_masked(hidden, batch.mask), head.weight))
        return live_values(z, batch, batch.teacher, objective, vocab_size)
    outcomes = select_outcomes(batch, vocab_size)
    hidden = zero_masked(hidden, outcomes.mask)
    z = head.transform(head_matmul(hidden, head.weight))[..., :vocab_size]

    log_q = jax.nn.log_softmax(z / outcomes.temperature, axis=-1)
    log_q_one = jax.nn.log_softmax(z, axis=-1)
    ids = jnp.minimum(outcomes.ids, vocab_size - 1)
    log_q_k = jnp.take_along_axis(log_q, ids[..., :-1], axis=-1)
    among_k = _token_mask(ids[..., :-1], outcomes.real, vocab_size)
    log_q_tail = masked_logsumexp(log_q, ~among_k)
    cross_entropy = -jnp.sum(
        jnp.where(outcomes.is_label, jnp.take_along_axis(log_q_one, ids, axis=-1), 0.0), axis=-1
    )
    has_label = jnp.any(outcomes.is_label, axis=-1)
    top = _token_mask(ids[..., :-1], outcomes.is_teacher_top, vocab_size)
    largest_other = jnp.max(jnp.where(top, -jnp.inf, z), axis=-1)
    top1_agrees = jnp.any(top, axis=-1) & (jnp.max(z, axis=-1) > largest_other)
    return values_from_logprobs(
        outcomes,
        log_q=log_q_k,
        log_q_tail=log_q_tail,
        cross_entropy=jnp.where(has_label, cross_entropy, jnp.inf),
        log_normalizer=jax.nn.logsumexp(z, axis=-1),
        top1_agrees=top1_agrees,
        objective=objective,
    )


def _token_mask(ids: jax.Array, chosen: jax.Array, vocab_size: int) -> jax.Array:
    """bool [B,T,V]: the tokens named by the `chosen` of ids [B,T,K]."""
    rows, length = ids.shape[:2]
    row = jnp.arange(rows)[:, None, None]
    position = jnp.arange(length)[None, :, None]
    found = jnp.where(chosen, ids, vocab_size)
    empty = jnp.zeros((rows, length, vocab_size), bool)
    return empty.at[row, position, found].set(True, mode="drop")
