"""What is summed per token, in terms of a few gathered logits: every objective, nothing V wide.

Letters: B sequences, T positions, V vocabulary, K stored tokens, G = K + 1 gathered columns (the
K and the label). Leading axes are written `..` where a function takes any.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.config import Refusal

TAILS = ("bucket", "renormalize", "truncate", "ignore")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
LOG_FLOOR = -100.0
"""log p of an outcome that the teacher gives no probability, where log p itself is needed (reverse
KL). e^−100 is below fp32's smallest normal number: what lies lower is a zero in fp32."""


@dataclass(frozen=True)
class Objective:
    """What a token costs: kl_weight·τ²·divergence + ce_weight·CE + z_loss_weight·lse(z)².

    Attributes:
        tail: what stands for the probability outside the K (LOSS.md's four):
            `bucket` Σ p_k log(p_k/q_k) + p_t log(p_t/q_t), 0 only at agreement;
            `renormalize` KL(p/P ‖ q) with P = Σ p_k;
            `truncate` Σ p_k log(p_k/q_k), which can be negative and is not clamped;
            `ignore` both sides renormalised over the K: blind outside K, identically 0 at K = 1.
            It needs no logit but the K; the others are made all the same, since cross_entropy,
            student_mass and top1_agreement are reported with every loss.
        divergence: over the K outcomes and the tail. `forward_kl` Σ p log(p/q); `reverse_kl`
            Σ q log(q/p) with log p floored at LOG_FLOOR; `jsd` β Σ p log(p/m) + (1−β) Σ q log(q/m)
            with m = β p + (1−β) q.
        jsd_beta: β, the teacher's weight in the mixture, in (0, 1).
        temperature: τ of both sides of the divergence. The cross-entropy and z-loss are at τ = 1.
        kl_weight: of the divergence.
        ce_weight: of the cross-entropy against the labels.
        z_loss_weight: of the squared log-normaliser.
    """

    tail: str = "bucket"
    divergence: str = "forward_kl"
    jsd_beta: float = 0.5
    temperature: float = 1.0
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    z_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        """Raises Refusal for a name or a number that means nothing."""
        if self.tail not in TAILS:
            raise Refusal(f"expected tail in {TAILS}, got {self.tail!r}; choose one of them")
        if self.divergence not in DIVERGENCES:
            raise Refusal(
                f"expected divergence in {DIVERGENCES}, got {self.divergence!r}; choose one of them"
            )
        if not 0.0 < self.jsd_beta < 1.0:
            raise Refusal(
                f"expected 0 < jsd_beta < 1, got {self.jsd_beta}; "
                "use divergence forward_kl or reverse_kl for the ends"
            )
        if not self.temperature > 0.0:
            raise Refusal(f"expected temperature > 0, got {self.temperature}; 1.0 changes nothing")


class Teacher(NamedTuple):
    """A store's top K at each position.

    indices [.., K] int32, logprobs [.., K] fp32 (log p_k at τ over the teacher's whole vocabulary),
    log_tail [..] fp32 (log p_t), entries [..] int32 (how many of the K are real).
    """

    indices: jax.Array
    logprobs: jax.Array
    log_tail: jax.Array
    entries: jax.Array


class Targets(NamedTuple):
    """What the student is held against: labels [..] int32, mask [..] bool, perhaps a teacher."""

    labels: jax.Array
    mask: jax.Array
    teacher: Teacher | None

    def stored(self) -> jax.Array:
        """bool [.., K]: the teacher's real entries at valid positions; K = 0 without a teacher."""
        if self.teacher is None:
            return jnp.zeros((*self.mask.shape, 0), bool)
        entry = jax.lax.broadcasted_iota(
            jnp.int32, self.teacher.indices.shape, self.teacher.indices.ndim - 1
        )
        return self.mask[..., None] & (entry < self.teacher.entries.astype(jnp.int32)[..., None])


class Columns(NamedTuple):
    """Targets made safe: which G columns are gathered, and the teacher's outcomes.

    ids [.., G] int32: the K ids, then the label; vocab_size where a column takes no part.
    real [.., K]: entries that count. label_slot [.., G]: the one column that holds the label (none,
    where the label is no column of the head). top_slot [.., K]: the teacher's most likely token
    (each, where several are), if the student has it. log_p [.., K] and log_tail [..]: −inf where
    there is no probability. mask [..].
    """

    ids: jax.Array
    real: jax.Array
    label_slot: jax.Array
    top_slot: jax.Array
    log_p: jax.Array
    log_tail: jax.Array
    mask: jax.Array


class Terms(NamedTuple):
    """fp32 [..], one number per token, 0 where masked. `loss` is weighted, the others are not."""

    loss: jax.Array
    kl: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    teacher_mass: jax.Array
    student_mass: jax.Array
    top1_agreement: jax.Array


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


def clean(targets: Targets, *, vocab_size: int) -> Columns:
    """Select before use: nothing of a masked cell, or of an entry beyond `count`, gets through.

    Teacher ids that the student lacks (≥ vocab_size) fold into the tail. A label among the K is
    not gathered twice. Duplicate ids of one row are for the store to merge: here each would count
    by itself, and q would count that column twice.
    """
    mask = targets.mask
    known = mask & (targets.labels >= 0) & (targets.labels < vocab_size)
    labels = jnp.where(known, targets.labels, vocab_size)
    ids, real, top_slot, log_p, log_tail = clean_teacher(targets, vocab_size)
    same = real & (ids == labels[..., None])
    extra = known & ~jnp.any(same, axis=-1)
    return Columns(
        ids=jnp.concatenate([ids, jnp.where(extra, labels, vocab_size)[..., None]], axis=-1),
        real=real,
        label_slot=jnp.concatenate([same, extra[..., None]], axis=-1),
        top_slot=top_slot,
        log_p=log_p,
        log_tail=log_tail,
        mask=mask,
    )


def clean_teacher(targets: Targets, vocab_size: int) -> tuple[jax.Array, ...]:
    """ids, real, top_slot, log_p [.., K] and log_tail [..] of `clean`; K = 0 without a teacher."""
    mask, teacher, stored = targets.mask, targets.teacher, targets.stored()
    if teacher is None:
        log_p = jnp.zeros(stored.shape, jnp.float32)
        log_tail = jnp.full(mask.shape, -jnp.inf, jnp.float32)
        return stored.astype(jnp.int32), stored, stored, log_p, log_tail
    real = stored & (teacher.indices >= 0) & (teacher.indices < vocab_size)
    logprobs = jnp.where(stored, teacher.logprobs.astype(jnp.float32), -jnp.inf)
    top_slot = real & (logprobs == jnp.max(logprobs, axis=-1, keepdims=True))
    log_p = jnp.where(real, logprobs, -jnp.inf)
    lacking = jnp.sum(jnp.where(real, 0.0, jnp.exp(logprobs)), axis=-1)
    log_tail = jnp.where(mask, teacher.log_tail.astype(jnp.float32), -jnp.inf)
    log_tail = log_add(log_tail, jnp.log(lacking))
    return jnp.where(real, teacher.indices, vocab_size), real, top_slot, log_p, log_tail


def forward_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """p log(p/q) of one outcome; 0 where p is."""
    return jnp.exp(log_p) * (jnp.maximum(log_p, jnp.finfo(jnp.float32).min) - log_q)


def reverse_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """q log(q/p) of one outcome, log p floored at LOG_FLOOR."""
    return jnp.exp(log_q) * (log_q - jnp.maximum(log_p, LOG_FLOOR))


def jsd(log_p: jax.Array, log_q: jax.Array, *, beta: float) -> jax.Array:
    """β p log(p/m) + (1−β) q log(q/m) of one outcome, m = β p + (1−β) q."""
    log_m = jnp.logaddexp(log_p + math.log(beta), log_q + math.log(1.0 - beta))
    return beta * forward_kl(log_p, log_m) + (1.0 - beta) * jnp.exp(log_q) * (log_q - log_m)


def divergence_of(
    columns: Columns, log_q: jax.Array, log_q_tail: jax.Array, objective: Objective
) -> jax.Array:
    """[..] nats per token, without τ²: `objective.divergence` over the outcomes of its `tail`.

    log_q [.., K] and log_q_tail [..] are the student's log-probabilities at τ. A student that has
    no column outside the K (log_q_tail −inf) is given LOG_FLOOR there: large, finite, no gradient.
    """
    log_p, log_tail = columns.log_p, columns.log_tail
    log_q = jnp.where(columns.real, log_q, 0.0)
    if objective.tail in ("renormalize", "ignore"):
        mass = masked_logsumexp(log_p, columns.real)
        log_p = log_p - jnp.where(mass > -jnp.inf, mass, 0.0)[..., None]
        log_tail = jnp.full_like(log_tail, -jnp.inf)
    if objective.tail == "ignore":
        mass = masked_logsumexp(log_q, columns.real)
        log_q = log_q - jnp.where(mass > -jnp.inf, mass, 0.0)[..., None]
    real = columns.real
    if objective.tail in ("bucket", "renormalize"):
        possible = log_q_tail > -jnp.inf
        log_q_tail = jnp.where(possible, log_q_tail, LOG_FLOOR)
        log_p = jnp.concatenate([log_p, log_tail[..., None]], axis=-1)
        log_q = jnp.concatenate([log_q, log_q_tail[..., None]], axis=-1)
        real = jnp.concatenate([real, columns.mask[..., None]], axis=-1)
    if objective.divergence == "forward_kl":
        terms = forward_kl(log_p, log_q)
    elif objective.divergence == "reverse_kl":
        terms = reverse_kl(log_p, log_q)
    else:
        terms = jsd(log_p, log_q, beta=objective.jsd_beta)
    return jnp.sum(jnp.where(real, terms, 0.0), axis=-1)


def terms_of(
    columns: Columns,
    *,
    log_q: jax.Array,
    log_q_tail: jax.Array,
    cross_entropy: jax.Array,
    log_normaliser: jax.Array,
    agrees: jax.Array,
    objective: Objective,
) -> Terms:
    """Everything a token reports, and its weighted loss. All [..] but log_q [.., K].

    log_q, log_q_tail are at τ; cross_entropy and log_normaliser (lse(z)) at τ = 1; agrees: the
    teacher's most likely token is strictly the student's. What needs a teacher is NaN without one.
    """
    z_loss = jnp.square(log_normaliser)
    loss = jnp.zeros_like(z_loss)
    if objective.ce_weight:
        loss += objective.ce_weight * cross_entropy
    if objective.z_loss_weight:
        loss += objective.z_loss_weight * z_loss
    unknown = jnp.full_like(z_loss, jnp.nan)
    kl, teacher_mass, student_mass, top1 = unknown, unknown, unknown, unknown
    if columns.real.shape[-1]:
        kl = divergence_of(columns, log_q, log_q_tail, objective)
        teacher_mass = jnp.sum(jnp.exp(columns.log_p), axis=-1)
        q = jnp.exp(jnp.where(columns.real, log_q, -jnp.inf))
        student_mass = jnp.sum(jax.lax.stop_gradient(q), axis=-1)
        top1 = agrees.astype(jnp.float32)
    if objective.kl_weight:
        loss += (objective.kl_weight * objective.temperature**2) * kl
    terms = Terms(loss, kl, cross_entropy, z_loss, teacher_mass, student_mass, top1)
    return Terms(*[jnp.where(columns.mask, term, 0.0) for term in terms])
