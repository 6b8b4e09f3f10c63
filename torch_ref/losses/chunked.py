"""The three chunked implementations: one autograd function around one chunk of positions.

Shapes: B sequences, T positions, D hidden, V vocabulary, K stored tokens, C positions per chunk;
N = B·C flattened.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_ref.losses.dense import finish, operand, product
from torch_ref.losses.objective import Knobs, Targets, label_logit, sums_of

HEAD_ROWS = 16384  # rows of the head's gradient made at once, so that its temporary stays small


def _chunk(
    logits: Tensor, targets: Targets, knobs: Knobs, want_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Sums of one chunk and, if wanted, ∂loss/∂(hidden·lm_headᵀ) [N,V]; overwrites `logits`.

    All of the loss depends on z through the K logits z_K, the label's, and the logsumexp of the
    rest at τ and at 1. So autograd runs on those few columns and gives g_K and a = ∂loss/∂lse;
    outside K, dz = a·exp(z/τ − lse)/τ, and inside, where z was set to −inf, g_K is written.
    """
    tau = knobs.temperature
    slope = None if knobs.soft_cap is None else 1 - (logits / knobs.soft_cap).square()
    student_top1 = logits.argmax(-1)
    at_label = label_logit(logits, targets.labels)
    at_ids = logits.gather(1, targets.ids)
    logits.scatter_add_(1, targets.ids, torch.where(targets.real, -math.inf, 0.0).to(logits.dtype))
    rest = (logits / tau).logsumexp(-1) if tau != 1 else logits.logsumexp(-1)
    rest_1 = logits.logsumexp(-1) if tau != 1 else rest
    parts = [x.requires_grad_(want_gradient) for x in (at_ids, at_label, rest, rest_1)]
    with torch.set_grad_enabled(want_gradient):
        sums = _sums_of_parts(targets, knobs, student_top1, *parts)
        loss = sums[0]
    if not want_gradient:
        return sums, None
    g_ids, g_label, a, a_1 = torch.autograd.grad(loss, parts, materialize_grads=True)
    if tau == 1:  # rest and rest_1 are one tensor, and both gradients are the whole of it
        d_logits = _tail_gradient(logits, rest, a)
    else:
        d_logits = _tail_gradient(logits / tau, rest, a / tau)
        d_logits += _tail_gradient(logits, rest_1, a_1)
    d_logits.scatter_add_(1, targets.ids, torch.where(targets.real, g_ids, 0.0))
    label = targets.labels.clamp(0, logits.shape[1] - 1)  # outside: g is 0
    d_logits.scatter_add_(1, label[:, None], g_label[:, None])
    if slope is not None:
        d_logits *= slope
    if knobs.logit_scale is not None:
        d_logits *= knobs.logit_scale
    return sums.detach(), d_logits


def _sums_of_parts(
    targets: Targets,
    knobs: Knobs,
    student_top1: Tensor,
    at_ids: Tensor,
    at_label: Tensor,
    rest: Tensor,
    rest_1: Tensor,
) -> Tensor:
    """`sums_of` from z_K [N,K], z_label [N], and the logsumexp of the rest at τ and at 1 [N]."""
    at_ids = torch.where(targets.real, at_ids, -math.inf)
    scaled = at_ids / knobs.temperature
    log_z_tau = torch.cat([scaled, rest[:, None]], -1).logsumexp(-1)
    log_z = torch.cat([at_ids, rest_1[:, None]], -1).logsumexp(-1)
    log_q = torch.where(targets.real, scaled - log_z_tau[:, None], -math.inf)
    return sums_of(targets, log_q, rest - log_z_tau, log_z, at_label, student_top1, knobs)


def _tail_gradient(z: Tensor, lse: Tensor, a: Tensor) -> Tensor:
    """a·exp(z − lse) [N,V], written over z; 0 where z is −inf, also when that is everywhere (lse =
    −inf)."""
    lse = torch.where(lse == -math.inf, 0.0, lse)
    return z.sub_(lse[:, None]).exp_().mul_(a[:, None])


class _Gradients:
    """d_hidden [B,T,D] in hidden's dtype, d_lm_head [V,D] and d_bias [V] summed in float32."""

    def __init__(self, hidden: Tensor, lm_head: Tensor, bias: Tensor | None, wanted: tuple):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.lm_head = torch.zeros_like(lm_head, dtype=wide) if wanted[1] else None
        self.bias = None
        if bias is not None and wanted[2]:
            self.bias = torch.zeros_like(bias, dtype=wide)

    def add(self, d_logits: Tensor, hidden: Tensor, head: Tensor, first: int, last: int) -> None:
        """One chunk's share: positions [first, last) of every row, hidden [N,D]."""
        if self.bias is not None:
            self.bias += d_logits.sum(0)
        d_logits = d_logits.to(head.dtype)
        if self.hidden is not None:
            rows = self.hidden.shape[0]
            self.hidden[:, first:last] = (d_logits @ head).unflatten(0, (rows, last - first))
        if self.lm_head is not None:
            for block in range(0, len(head), HEAD_ROWS):
                columns = d_logits[:, block : block + HEAD_ROWS]
                self.lm_head[block : block + HEAD_ROWS] += product(columns.T, hidden)


class Chunked(torch.autograd.Function):
    """hidden [B,T,D], lm_head [V,D], bias [V] or None → (loss, the other seven sums).

    `keeps`, what the forward leaves for the backward: "logits" (three products, [B,T,V] of
    memory), "nothing" (the projection again: four products), "gradients" (made at once: three).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        bias: Tensor | None,
        targets: Targets,
        knobs: Knobs,
        keeps: str,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:3]
        now = keeps == "gradients" and any(wanted)
        gradients = _Gradients(hidden, lm_head, bias, wanted) if now else None
        head = operand(lm_head, hidden, knobs)
        kept, sums = [], []
        for first, last, part, rows in _chunks(hidden, targets, knobs):
            logits = finish(product(rows, head.T), bias, knobs)
            if keeps == "logits" and any(wanted):
                kept.append(logits.clone())
            chunk_sums, d_logits = _chunk(logits, part, knobs, want_gradient=now)
            sums.append(chunk_sums)
            if gradients is not None and d_logits is not None:
                gradients.add(d_logits, rows, head, first, last)
        ctx.save_for_backward(hidden, lm_head, bias)
        ctx.task = targets, knobs, kept, gradients
        total = torch.stack(sums).sum(0)
        loss, metrics = total[0].clone(), total[1:]
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple:  # type: ignore[override]
        hidden, lm_head, bias = ctx.saved_tensors
        targets, knobs, kept, gradients = ctx.task
        if gradients is None:
            gradients = _Gradients(hidden, lm_head, bias, ctx.needs_input_grad[:3])
            head = operand(lm_head, hidden, knobs)
            for first, last, part, rows in _chunks(hidden, targets, knobs):
                logits = kept.pop(0) if kept else finish(product(rows, head.T), bias, knobs)
                d_logits = _chunk(logits, part, knobs, want_gradient=True)[1]
                assert d_logits is not None
                gradients.add(d_logits, rows, head, first, last)
        parts = ((gradients.hidden, hidden), (gradients.lm_head, lm_head), (gradients.bias, bias))
        scaled = (
            # straight into the primal's dtype, without a [V,D] float32 in between
            None if g is None else torch.mul(g, d_loss, out=torch.empty_like(x))
            for g, x in parts
        )
        return (*scaled, None, None, None)


def _chunks(
    hidden: Tensor, targets: Targets, knobs: Knobs
) -> Iterator[tuple[int, int, Targets, Tensor]]:
    """(first, last, targets, hidden [B·C,D] with 0 where masked) of each chunk of positions."""
    length = hidden.shape[1]
    for first in range(0, length, knobs.chunk_size):
        last = min(first + knobs.chunk_size, length)
        part = targets.chunk(first, last)
        rows = hidden[:, first:last].flatten(0, 1)
        yield first, last, part, torch.where(part.mask[:, None], rows, 0.0)
