"""The definition: all N = B·T positions at once, differentiated by autograd."""

import math
from typing import Any

import torch
from torch import Tensor

from torch_ref.losses.objective import Knobs, Targets, label_logit, sums_of


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [N,M]·b [M,P] with a result of at least float32; low precision only comes here on CUDA."""
    if a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def operand(lm_head: Tensor, hidden: Tensor, knobs: Knobs) -> Tensor:
    """The head as the products see it: rounded as hidden was, in the dtype hidden is in now."""
    return lm_head.to(knobs.operand_dtype).to(hidden.dtype)


class _Project(torch.autograd.Function):
    """hidden [N,D], lm_head [V,D] → hidden·lm_headᵀ [N,V], at least float32; the backward products
    take operands of the same precision."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, lm_head: Tensor, knobs: Knobs) -> Tensor:
        ctx.save_for_backward(hidden, lm_head)
        ctx.knobs = knobs
        return product(hidden, operand(lm_head, hidden, knobs).T)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple:  # type: ignore[override]
        hidden, lm_head = ctx.saved_tensors
        d_logits = d_logits.to(hidden.dtype)
        d_hidden = d_head = None
        if ctx.needs_input_grad[0]:
            d_hidden = d_logits @ operand(lm_head, hidden, ctx.knobs)
        if ctx.needs_input_grad[1]:
            d_head = product(d_logits.T, hidden).to(lm_head.dtype)
        return d_hidden, d_head, None


def finish(logits: Tensor, bias: Tensor | None, knobs: Knobs) -> Tensor:
    """Bias, then scale, then soft-cap."""
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if knobs.logit_scale is not None:
        logits = logits * knobs.logit_scale
    if knobs.soft_cap is not None:
        logits = knobs.soft_cap * torch.tanh(logits / knobs.soft_cap)
    return logits


def dense_sums(
    hidden: Tensor, lm_head: Tensor, bias: Tensor | None, targets: Targets, knobs: Knobs
) -> Tensor:
    """The definition over all N = B·T positions at once; autograd differentiates it."""
    targets = targets.chunk(0, hidden.shape[1])
    hidden = torch.where(targets.mask[:, None], hidden.flatten(0, 1), 0.0)
    logits = finish(_Project.apply(hidden, lm_head, knobs), bias, knobs)
    log_q = torch.log_softmax(logits / knobs.temperature, -1)
    hits = torch.zeros(logits.shape, dtype=torch.int8, device=logits.device)
    inside = hits.scatter_add_(1, targets.ids, targets.real.to(torch.int8)) > 0
    return sums_of(
        targets,
        torch.where(targets.real, log_q.gather(1, targets.ids), -math.inf),
        log_q.masked_fill(inside, -math.inf).logsumexp(-1),
        logits.logsumexp(-1),
        label_logit(logits, targets.labels),
        logits.argmax(-1),
        knobs,
    )
