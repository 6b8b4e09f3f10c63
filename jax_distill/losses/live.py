"""A live teacher: divergences over the whole vocabulary, both heads projected chunk by chunk.

Beside `outcomes.py` and `gradient.py`, which are of K stored tokens, this is the other kind of
targets. The gradient is autodiff's, of one chunk: XLA keeps the two fp32 logits of the chunk and
makes the rest on the way.

Letters: B rows, C positions of a chunk, D' the teacher's hidden width, V vocabulary.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_distill.batch import Batch, LiveTeacher
from jax_distill.losses.divergences import DIVERGENCES
from jax_distill.losses.head import Head, head_matmul, zero_masked
from jax_distill.objective import Objective, TokenValues


def detach_head(batch: Batch) -> tuple[Batch, Head | None]:
    """The batch with arrays [B,T,..] alone, to be cut into chunks, and a live teacher's head."""
    teacher = batch.teacher
    if teacher is None:
        return batch, None
    return replace(batch, teacher=replace(teacher, head=None)), teacher.head


def attach_head(batch: Batch, head: Head | None) -> Batch:
    """The inverse of `detach_head`, of a chunk."""
    teacher = batch.teacher
    return batch if teacher is None else replace(batch, teacher=replace(teacher, head=head))


def live_values(
    z: jax.Array, batch: Batch, teacher: LiveTeacher, objective: Objective, vocab_size: int
) -> TokenValues:
    """Values [B,C] of the student's logits z fp32 [B,C,V or more] against a live teacher.

    The divergence is Σ_v over all `vocab_size` tokens; `objective.tail` has nothing to say. Both
    masses are 1. What the teacher is made of has no gradient.
    """
    mask = batch.mask
    hidden = zero_masked(teacher.hidden, mask)
    teacher_z = teacher.head.transform(head_matmul(hidden, teacher.head.weight))
    teacher_z = jax.lax.stop_gradient(teacher_z)[..., :vocab_size]
    z = z[..., :vocab_size]
    tau = teacher.temperature
    log_p, log_q = (jax.nn.log_softmax(x / tau, axis=-1) for x in (teacher_z, z))
    kl = jnp.sum(DIVERGENCES[objective.divergence](log_p, log_q, objective), axis=-1)
    log_normalizer = jax.nn.logsumexp(z, axis=-1)
    known = mask & (batch.labels >= 0) & (batch.labels < vocab_size)
    labels = jnp.where(known, batch.labels, 0)[..., None]
    label_z = jnp.take_along_axis(z, labels, axis=-1)[..., 0]
    cross_entropy = jnp.where(known, log_normalizer - label_z, jnp.inf)
    z_loss = jnp.square(log_normalizer)
    loss = jnp.zeros_like(kl)
    if objective.kl_weight:
        loss += (objective.kl_weight * tau**2) * kl
    if objective.ce_weight:
        loss += objective.ce_weight * cross_entropy
    if objective.z_loss_weight:
        loss += objective.z_loss_weight * z_loss
    agrees = jnp.argmax(teacher_z, axis=-1) == jnp.argmax(z, axis=-1)
    one = jnp.ones_like(kl)
    values = TokenValues(loss, kl, cross_entropy, z_loss, one, one, agrees.astype(jnp.float32))
    return TokenValues(*[jnp.where(mask, value, 0.0) for value in values])
