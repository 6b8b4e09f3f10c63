"""The one signature, checked, and the implementations behind it."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_distill.config import Refusal
from jax_distill.losses.chunked import chunked_sums
from jax_distill.losses.definition import dense_terms
from jax_distill.losses.fused_loop import fused_sums
from jax_distill.losses.logits import Head
from jax_distill.losses.objectives import Objective, Targets
from jax_distill.losses.sums import LossSums, sum_terms


def loss_sums(
    hidden: jax.Array,
    lm_head: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    teacher_indices: jax.Array | None,
    teacher_logprobs: jax.Array | None,
    teacher_log_tail: jax.Array | None,
    teacher_count: jax.Array | None,
    *,
    implementation: str = "fused",
    vocab_size: int | None = None,
    tail: str = "bucket",
    divergence: str = "forward_kl",
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    z_loss_weight: float = 0.0,
    chunk_size: int = 1024,
    bias: jax.Array | None = None,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
    valid_first: bool = False,
) -> LossSums:
    """The loss of a batch, as sums."""
    objective = Objective(
        tail, divergence, jsd_beta, temperature, kl_weight, ce_weight, z_loss_weight
    )
    teacher = (teacher_indices, teacher_logprobs, teacher_log_tail, teacher_count)
    head = Head(lm_head.shape[0] if vocab_size is None else vocab_size, soft_cap, logit_scale)
    if kl_weight and any(x is None for x in teacher):
        raise Refusal("expected teacher_* arrays, got None; pass them, or kl_weight=0")
    targets = Targets(labels, mask.astype(bool), *teacher)
    if implementation == "dense":
        terms = dense_terms(hidden, lm_head, bias, targets, head=head, objective=objective)
        return sum_terms(terms, targets.mask)
    if implementation == "fused":
        return fused_sums(hidden, lm_head, bias, targets, head, objective, chunk_size, valid_first)
    return chunked_sums(
        hidden,
        lm_head,
        bias,
        targets,
        head=head,
        objective=objective,
        chunk_size=chunk_size,
        recompute=implementation == "fused_chunked",
    )


NAMES = ("dense", "forward_chunked", "fused_chunked", "fused")
IMPLEMENTATIONS = {name: partial(loss_sums, implementation=name) for name in NAMES}
dense, forward_chunked, fused_chunked, fused = IMPLEMENTATIONS.values()
