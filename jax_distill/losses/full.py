"""Two heads over the whole vocabulary: the KL that no top-K loses, chunk by chunk.

Letters: B rows, T positions, C positions of each row in one chunk, D hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.losses.chunks import map_chunks
from jax_distill.losses.head import Head, head_matmul, zero_masked
from jax_distill.objective import Execution


class FullTokenValues(NamedTuple):
    """fp32 [B,T], one number per token, 0 where masked.

    Attributes:
        kl: KL(teacher ‖ student) over the whole vocabulary at τ, nats, without τ².
        cross_entropy: the student's against the label, nats, at τ = 1.
        teacher_cross_entropy: the teacher's.
        top1_agreement: 1 where both have the same most likely token (of equals the lowest id).
        confidence: q of the student's most likely token, at τ = 1.
        correct: 1 where that token is the label.
        teacher_confidence, teacher_correct: the teacher's.
        acceptance_rate: Σ min(p, q) over the vocabulary at τ = 1, the probability that speculative
            sampling keeps a token which the student drafts (Leviathan et al. 2023, arXiv
            2211.17192, theorem 3.5).
    """

    kl: jax.Array
    cross_entropy: jax.Array
    teacher_cross_entropy: jax.Array
    top1_agreement: jax.Array
    confidence: jax.Array
    correct: jax.Array
    teacher_confidence: jax.Array
    teacher_correct: jax.Array
    acceptance_rate: jax.Array


@jax.named_scope("loss")
def full_token_values(
    teacher_hidden: jax.Array,
    teacher_head: Head,
    students: Mapping[str, tuple[jax.Array, Head]],
    labels: jax.Array,
    mask: jax.Array,
    *,
    temperature: float = 1.0,
    execution: Execution = Execution(),
) -> dict[str, FullTokenValues]:
    """Every token's divergence of students from one teacher, over the whole vocabulary.

    Logits are fp32, of one chunk at a time: [C,V] per device for the teacher, which is projected
    once, and for each student. Forward only; `loss` with `Batch.teacher` trains.

    Args:
        teacher_hidden: [B,T,D], after the final norm.
        students: hidden [B,T,D'] and head by name; D' need not be D.
        labels: int32 [B,T]. mask: bool [B,T]; a masked cell may hold anything.
        temperature: τ of the KL.
        execution: chunk_size, and row_shards or layout, count; all implementations are this one.

    Raises:
        ValueError: heads of different vocabularies, a temperature not above 0.
    """
    heads = {"the teacher": teacher_head} | {name: head for name, (_, head) in students.items()}
    vocab_size = teacher_head.real_vocab_size
    for name, head in heads.items():
        if head.real_vocab_size != vocab_size:
            raise ValueError(
                f"expected the teacher's vocab_size {vocab_size} in the head of {name}, got "
                f"{head.real_vocab_size}; pass heads cut to one tokenizer"
            )
    if not temperature > 0.0:
        raise ValueError(f"expected a temperature above 0, got {temperature}; pass 1.0")

    def values(chunk):
        teacher_hidden, hidden, labels, mask = chunk
        teacher = _score(teacher_hidden, teacher_head, labels, mask, temperature)
        found = {}
        for name, (_, head) in students.items():
            student = _score(hidden[name], head, labels, mask, temperature)
            found[name] = jax.tree.map(
                lambda x: jnp.where(mask, x.astype(jnp.float32), 0.0), _compare(teacher, student)
            )
        return found

    hidden = {name: hidden for name, (hidden, _) in students.items()}
    inputs = (teacher_hidden, hidden, labels, mask.astype(bool))
    return map_chunks(values, inputs, execution.positions_per_chunk(*labels.shape))


class _Scores(NamedTuple):
    """One model's log-probabilities [B,C,V] at τ and at 1; and [B,C], at 1, as `FullTokenValues`
    has them."""

    at_temperature: jax.Array
    at_one: jax.Array
    cross_entropy: jax.Array
    confidence: jax.Array
    correct: jax.Array


def _score(
    hidden: jax.Array, head: Head, labels: jax.Array, mask: jax.Array, temperature: float
) -> _Scores:
    vocab_size = head.real_vocab_size
    z = head.transform(head_matmul(zero_masked(hidden, mask), head.weight))[..., :vocab_size]
    log_q = jax.nn.log_softmax(z)
    known = (labels >= 0) & (labels < vocab_size)
    of_label = jnp.take_along_axis(log_q, jnp.where(known, labels, 0)[..., None], axis=-1)[..., 0]
    return _Scores(
        at_temperature=jax.nn.log_softmax(z / temperature),
        at_one=log_q,
        cross_entropy=jnp.where(known, -of_label, jnp.inf),
        confidence=jnp.exp(jnp.max(log_q, axis=-1)),
        correct=jnp.argmax(log_q, axis=-1) == labels,
    )


def _compare(teacher: _Scores, student: _Scores) -> FullTokenValues:
    log_p, log_q = teacher.at_temperature, student.at_temperature
    both_at_least = jnp.exp(jnp.minimum(teacher.at_one, student.at_one))
    return FullTokenValues(
        kl=jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1),
        cross_entropy=student.cross_entropy,
        teacher_cross_entropy=teacher.cross_entropy,
        top1_agreement=jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1),
        confidence=student.confidence,
        correct=student.correct,
        teacher_confidence=teacher.confidence,
        teacher_correct=teacher.correct,
        acceptance_rate=jnp.sum(both_at_least, axis=-1),
    )
