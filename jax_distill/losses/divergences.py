"""Every objective as a function of a token's few log-probabilities; nothing here is V wide.

Letters: V vocabulary, K stored tokens. Leading axes are written `..`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_distill.losses.outcomes import Outcomes, masked_logsumexp
from jax_distill.objective import LOG_FLOOR, Objective, TokenValues


def forward_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """p log(p/q) of one outcome; 0 where p is."""
    return jnp.exp(log_p) * (jnp.maximum(log_p, jnp.finfo(jnp.float32).min) - log_q)


def reverse_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """q log(q/p) of one outcome, log p floored at LOG_FLOOR."""
    return jnp.exp(log_q) * (log_q - jnp.maximum(log_p, LOG_FLOOR))


def jsd(log_p: jax.Array, log_q: jax.Array, *, beta: float) -> jax.Array:
    """β p log(p/m) + (1−β) q log(q/m) of one outcome, m = β p + (1−β) q (arXiv 2306.13649)."""
    log_m = jnp.logaddexp(log_p + math.log(beta), log_q + math.log(1.0 - beta))
    return beta * forward_kl(log_p, log_m) + (1.0 - beta) * jnp.exp(log_q) * (log_q - log_m)


DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array, Objective], jax.Array]] = {
    "forward_kl": lambda log_p, log_q, objective: forward_kl(log_p, log_q),
    "reverse_kl": lambda log_p, log_q, objective: reverse_kl(log_p, log_q),
    "jsd": lambda log_p, log_q, objective: jsd(log_p, log_q, beta=objective.jsd_beta),
}
"""The part of one outcome, by `Objective.divergence`. A new divergence is one entry here."""


def divergence(
    outcomes: Outcomes, log_q: jax.Array, log_q_tail: jax.Array, objective: Objective
) -> jax.Array:
    """[..] nats per token, without τ²: `objective.divergence` over the outcomes of its `tail`.

    log_q [..,K] and log_q_tail [..] are the student's log-probabilities at τ. A student that has
    no token outside the K (log_q_tail −inf) is given LOG_FLOOR there: large, finite, no gradient.

    Of a random sample it is the mean of log(p/q) over the draws, whose expectation is the forward
    KL over the whole vocabulary, and its gradient's that one's (arXiv 2503.16870).
    """
    log_p, log_tail = outcomes.log_p, outcomes.log_tail
    log_q = jnp.where(outcomes.real, log_q, 0.0)
    if outcomes.share is not None:
        log_ratio = jnp.where(outcomes.real, log_p, 0.0) - log_q
        return jnp.sum(outcomes.share * log_ratio, axis=-1)
    if objective.tail in ("renormalize", "ignore"):
        mass = masked_logsumexp(log_p, outcomes.real)
        log_p = log_p - jnp.where(mass > -jnp.inf, mass, 0.0)[..., None]
        log_tail = jnp.full_like(log_tail, -jnp.inf)
    if objective.tail == "ignore":
        mass = masked_logsumexp(log_q, outcomes.real)
        log_q = log_q - jnp.where(mass > -jnp.inf, mass, 0.0)[..., None]
    real = outcomes.real
    if objective.tail in ("bucket", "renormalize"):
        possible = log_q_tail > -jnp.inf
        log_q_tail = jnp.where(possible, log_q_tail, LOG_FLOOR)
        log_p = jnp.concatenate([log_p, log_tail[..., None]], axis=-1)
        log_q = jnp.concatenate([log_q, log_q_tail[..., None]], axis=-1)
        real = jnp.concatenate([real, outcomes.mask[..., None]], axis=-1)
    parts = DIVERGENCES[objective.divergence](log_p, log_q, objective)
    return jnp.sum(jnp.where(real, parts, 0.0), axis=-1)


def values_from_logprobs(
    outcomes: Outcomes,
    *,
    log_q: jax.Array,
    log_q_tail: jax.Array,
    cross_entropy: jax.Array,
    log_normalizer: jax.Array,
    top1_agrees: jax.Array,
    objective: Objective,
) -> TokenValues:
    """Everything a token reports, and its weighted loss. All [..] but log_q [..,K].

    log_q and log_q_tail are at τ; cross_entropy and log_normalizer, lse(z), at τ = 1. What needs a
    teacher is NaN without one.
    """
    z_loss = jnp.square(log_normalizer)
    loss = jnp.zeros_like(z_loss)
    if objective.ce_weight:
        loss += objective.ce_weight * cross_entropy
    if objective.z_loss_weight:
        loss += objective.z_loss_weight * z_loss
    unknown = jnp.full_like(z_loss, jnp.nan)
    kl, teacher_mass, student_mass, top1 = unknown, unknown, unknown, unknown
    if outcomes.real.shape[-1]:
        kl = divergence(outcomes, log_q, log_q_tail, objective)
        teacher_mass = jnp.sum(jnp.exp(outcomes.log_p), axis=-1)
        q = jnp.exp(jnp.where(outcomes.real, log_q, -jnp.inf))
        student_mass = jnp.sum(jax.lax.stop_gradient(q), axis=-1)
        top1 = top1_agrees.astype(jnp.float32)
    if objective.kl_weight:
        loss += (objective.kl_weight * outcomes.temperature**2) * kl
    values = TokenValues(loss, kl, cross_entropy, z_loss, teacher_mass, student_mass, top1)
    return TokenValues(*[jnp.where(outcomes.mask, value, 0.0) for value in values])
