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
        known = (labels >= 0) & (labels < vocab_size)

        def logits(hidden: jax.Array, head: Head) -> jax.Array:
            hidden = zero_masked(hidden, mask)
            return head.transform(head_matmul(hidden, head.weight))[..., :vocab_size]

        def cross_entropy(log_q: jax.Array) -> jax.Array:
            ids = jnp.where(known, labels, 0)[..., None]
            return jnp.where(known, -jnp.take_along_axis(log_q, ids, axis=-1)[..., 0], jnp.inf)

        def best(log_q: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.exp(jnp.max(log_q, axis=-1)), jnp.argmax(log_q, axis=-1) == labels

        teacher_z = logits(teacher_hidden, teacher_head)
        log_p = jax.nn.log_softmax(teacher_z / temperature)
        teacher_log_p = jax.nn.log_softmax(teacher_z)
        teacher_cross_entropy = cross_entropy(teacher_log_p)
        teacher_confidence, teacher_correct = best(teacher_log_p)
        found = {}
        for name, (_, head) in students.items():
            z = logits(hidden[name], head)
            log_q, log_q_one = jax.nn.log_softmax(z / temperature), jax.nn.log_softmax(z)
            confidence, correct = best(log_q_one)
            of_student = FullTokenValues(
                kl=jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1),
                cross_entropy=cross_entropy(log_q_one),
                teacher_cross_entropy=teacher_cross_entropy,
                top1_agreement=jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1),
                confidence=confidence,
                correct=correct,
                teacher_confidence=teacher_confidence,
                teacher_correct=teacher_correct,
                acceptance_rate=jnp.sum(jnp.exp(jnp.minimum(teacher_log_p, log_q_one)), axis=-1),
            )
            found[name] = jax.tree.map(
                lambda x: jnp.where(mask, x.astype(jnp.float32), 0.0), of_student
            )
        return found

    hidden = {name: hidden for name, (hidden, _) in students.items()}
    inputs = (teacher_hidden, hidden, labels, mask.astype(bool))
    return map_chunks(values, inputs, execution.positions_per_chunk(*labels.shape))
