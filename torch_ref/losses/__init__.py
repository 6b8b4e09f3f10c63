"""The distillation losses again, in PyTorch, written from the formula: the oracle and the rivals.

`dense` is the definition, differentiated by autograd. `forward_chunked`, `fused_chunked` (the
paper's method, arXiv 2608.03796) and `fused` are one autograd function around one chunk of
positions; they differ in what the forward leaves for the backward: the logits, nothing (the
projection is computed again), or the finished gradients. One signature and the same sums as
`jax_distill.losses`, so the two packages can be held against each other.

Shapes: B sequences, T positions, D hidden, V vocabulary, K stored tokens, C positions per chunk;
N stands for B·T or B·C flattened. Logits are at least float32 whatever the inputs are.

    z = soft_cap·tanh((hidden·lm_headᵀ + bias)·logit_scale / soft_cap),    q = softmax(z/τ)
    loss = Σ_valid kl_weight·τ²·D(p, q) + ce_weight·(lse(z) − z_label) + z_loss_weight·lse(z)²
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from jax_distill.config import Refusal
from torch_ref.losses.chunked import Chunked
from torch_ref.losses.dense import dense_sums
from torch_ref.losses.objective import DIVERGENCES, TAILS, Knobs, LossSums, read_targets


def _check(knobs: Knobs, has_teacher: bool) -> None:
    if knobs.tail not in TAILS:
        raise Refusal(f"expected loss.tail in {TAILS}, got {knobs.tail!r}; choose one of them")
    if knobs.divergence not in DIVERGENCES:
        raise Refusal(
            f"expected loss.divergence in {DIVERGENCES}, got {knobs.divergence!r}; choose one"
        )
    if knobs.divergence == "jsd" and not 0 < knobs.jsd_beta < 1:
        raise Refusal(f"expected 0 < loss.jsd_beta < 1, got {knobs.jsd_beta}; 0.5 is symmetric")
    if not knobs.temperature > 0:
        raise Refusal(f"expected loss.temperature above 0, got {knobs.temperature}")
    if knobs.kl_weight and not has_teacher:
        raise Refusal("expected teacher targets, got none; give them, or set loss.kl_weight 0")


def top_k_loss(
    keeps: str | None,
    hidden: Tensor,
    lm_head: Tensor,
    labels: Tensor,
    mask: Tensor,
    teacher_indices: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    teacher_log_tail: Tensor | None = None,
    teacher_count: Tensor | None = None,
    *,
    vocab_size: int | None = None,
    tail: str = "bucket",
    divergence: str = "forward_kl",
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    z_loss_weight: float = 0.0,
    chunk_size: int = 1024,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
) -> LossSums:
    """Sums of the loss and its metrics over the valid tokens of a batch.

    Args:
        keeps: None for the dense definition, else what the forward keeps (see `Chunked`).
        hidden: [B,T,D], after the final norm; any float dtype.
        lm_head: [V,D]; rows beyond `vocab_size` are padding and take no part. The products see it
            in hidden's dtype; its gradient is summed in float32 and has its own.
        labels: [B,T] int, the next token; mask: [B,T], whether predicting it counts.
        teacher_indices: [B,T,K] int, unique among the counted ones of a position.
        teacher_logprobs: [B,T,K], log p_k at τ; teacher_log_tail: [B,T], log of the rest.
        teacher_count: [B,T] int, how many of the K are real.

    Raises:
        Refusal: an unknown tail or divergence, a value out of range, or a divergence asked for
            without teacher targets.
    """
    knobs = Knobs(
        tail,
        divergence,
        jsd_beta,
        temperature,
        kl_weight,
        ce_weight,
        z_loss_weight,
        chunk_size,
        hidden.dtype,
        soft_cap,
        logit_scale,
    )
    _check(knobs, teacher_indices is not None)
    vocab_size = min(vocab_size or len(lm_head), len(lm_head))
    lm_head = lm_head[:vocab_size]
    bias = None if bias is None else bias[:vocab_size]
    if hidden.device.type != "cuda" and hidden.dtype in (torch.bfloat16, torch.float16):
        hidden = hidden.float()  # only CUDA multiplies low precision into a float32 result
    teacher = (teacher_indices, teacher_logprobs, teacher_log_tail, teacher_count)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    targets = read_targets(labels, mask, teacher, vocab_size, wide)
    if keeps is None:
        loss, *metrics = dense_sums(hidden, lm_head, bias, targets, knobs)
    else:
        if not torch.is_grad_enabled():  # an autograd function cannot see that by itself
            hidden, lm_head = hidden.detach(), lm_head.detach()
            bias = None if bias is None else bias.detach()
        loss, metrics = Chunked.apply(hidden, lm_head, bias, targets, knobs, keeps)
    sums = LossSums(loss, *(x.detach() for x in metrics))
    return sums if teacher_indices is not None else _without_teacher(sums)


def _without_teacher(sums: LossSums) -> LossSums:
    nan = torch.full_like(sums.kl, math.nan)
    return sums._replace(kl=nan, teacher_mass=nan, student_mass=nan, top1_agreement=nan)


# All [B,T,V] logits at once, differentiated by autograd: the definition.
dense = functools.partial(top_k_loss, None)
# Chunk by chunk forward, all logits kept for the backward: the paper's middle variant.
forward_chunked = functools.partial(top_k_loss, "logits")
# Chunk by chunk both ways, the projection computed again in the backward: the paper's method.
fused_chunked = functools.partial(top_k_loss, "nothing")
# Chunk by chunk, loss and gradients together in the forward: nothing is computed again.
fused = functools.partial(top_k_loss, "gradients")

IMPLEMENTATIONS: dict[str, Callable[..., LossSums]] = {
    "dense": dense,
    "forward_chunked": forward_chunked,
    "fused_chunked": fused_chunked,
    "fused": fused,
}
