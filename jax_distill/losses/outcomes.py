"""The outcomes that an objective tells apart at each token, made safe to compute with.

Letters: V vocabulary, K stored tokens, G = K + 1 gathered tokens (the K and the label). Leading
axes are written `..`.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_distill.batch import Batch


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "real", "is_label", "is_teacher_top", "log_p", "log_tail", "mask", "share"],
    meta_fields=["vocab_size", "temperature"],
)
@dataclass(frozen=True)
class Outcomes:
    """Which logits are gathered, and the teacher's probabilities.

    Attributes:
        ids: int32 [..,G], the K ids, then the label; vocab_size where an entry takes no part.
        real: bool [..,K], the stored tokens that count and that the student has.
        is_label: bool [..,G], the one entry that is the label (none where the student lacks it).
        is_teacher_top: bool [..,K], the teacher's most likely token (each, where several are), if
            the student has it.
        log_p: fp32 [..,K], at τ; −inf where not real.
        log_tail: fp32 [..], at τ, of everything outside the real K; −inf where that is nothing.
        mask: bool [..].
        share: fp32 [..,K], of a random sample's draws those of each id, 0 where not real; None
            where the K are the most likely.
        vocab_size: how many of the head's rows are tokens.
        temperature: τ of the targets; 1 without a teacher.
    """

    ids: jax.Array
    real: jax.Array
    is_label: jax.Array
    is_teacher_top: jax.Array
    log_p: jax.Array
    log_tail: jax.Array
    mask: jax.Array
    share: jax.Array | None
    vocab_size: int
    temperature: float


def select_outcomes(batch: Batch, vocab_size: int) -> Outcomes:
    """Select before use: nothing of a masked cell, or of an entry beyond `count`, gets through.

    Teacher ids that the student lacks (≥ vocab_size) fold into the tail. A label among the K is
    not gathered twice. Duplicate ids of one token are for the cache to merge: here each would
    count by itself, and q would count that token twice.
    """
    mask = batch.mask
    known = mask & (batch.labels >= 0) & (batch.labels < vocab_size)
    labels = jnp.where(known, batch.labels, vocab_size)
    ids, real, is_top, log_p, log_tail = _teacher_outcomes(batch, vocab_size)
    same = real & (ids == labels[..., None])
    extra = known & ~jnp.any(same, axis=-1)
    return Outcomes(
        ids=jnp.concatenate([ids, jnp.where(extra, labels, vocab_size)[..., None]], axis=-1),
        real=real,
        is_label=jnp.concatenate([same, extra[..., None]], axis=-1),
        is_teacher_top=is_top,
        log_p=log_p,
        log_tail=log_tail,
        mask=mask,
        share=_share_of_draws(batch, real),
        vocab_size=vocab_size,
        temperature=1.0 if batch.targets is None else batch.targets.temperature,
    )


def _teacher_outcomes(batch: Batch, vocab_size: int) -> tuple[jax.Array, ...]:
    """ids, real, is_teacher_top, log_p [..,K] and log_tail [..]; K = 0 without a teacher."""
    mask, targets = batch.mask, batch.targets
    if targets is None:
        nothing = jnp.zeros((*mask.shape, 0), bool)
        log_p = jnp.zeros(nothing.shape, jnp.float32)
        log_tail = jnp.full(mask.shape, -jnp.inf, jnp.float32)
        return nothing.astype(jnp.int32), nothing, nothing, log_p, log_tail
    entry = jax.lax.broadcasted_iota(jnp.int32, targets.indices.shape, targets.indices.ndim - 1)
    stored = mask[..., None] & (entry < targets.count.astype(jnp.int32)[..., None])
    real = stored & (targets.indices >= 0) & (targets.indices < vocab_size)
    logprobs = jnp.where(stored, targets.logprobs.astype(jnp.float32), -jnp.inf)
    is_top = real & (logprobs == jnp.max(logprobs, axis=-1, keepdims=True))
    log_p = jnp.where(real, logprobs, -jnp.inf)
    lacking = jnp.sum(jnp.where(real, 0.0, jnp.exp(logprobs)), axis=-1)
    log_tail = jnp.where(mask, targets.log_tail.astype(jnp.float32), -jnp.inf)
    log_tail = log_add(log_tail, jnp.log(lacking))
    return jnp.where(real, targets.indices, vocab_size), real, is_top, log_p, log_tail


def _share_of_draws(batch: Batch, real: jax.Array) -> jax.Array | None:
    """draws / Σ draws [..,K]. Ids that the student lacks count in the sum alone."""
    if batch.targets is None or batch.targets.draws is None:
        return None
    entry = jax.lax.broadcasted_iota(jnp.int32, real.shape, real.ndim - 1)
    stored = batch.mask[..., None] & (entry < batch.targets.count.astype(jnp.int32)[..., None])
    draws = jnp.where(stored, batch.targets.draws, 0).astype(jnp.float32)
    total = jnp.maximum(jnp.sum(draws, axis=-1, keepdims=True), 1.0)
    return jnp.where(real, draws / total, 0.0)


def masked_logsumexp(x: jax.Array, active: jax.Array) -> jax.Array:
    """log Σ exp(x) over the last axis where `active`; −inf, with gradient 0, where none is."""
    x = jnp.where(active, x, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    some = largest > -jnp.inf
    largest = jnp.where(some, largest, 0.0)
    total = jnp.sum(jnp.exp(jnp.where(active, x, -jnp.inf) - largest), axis=-1)
    some, largest = some[..., 0], largest[..., 0]
    return jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + largest, -jnp.inf)


def log_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """log(exp a + exp b); −inf, with gradient 0, where both are."""
    largest = jax.lax.stop_gradient(jnp.maximum(a, b))
    some = largest > -jnp.inf
    largest = jnp.where(some, largest, 0.0)
    total = jnp.exp(a - largest) + jnp.exp(b - largest)
    return jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + largest, -jnp.inf)
