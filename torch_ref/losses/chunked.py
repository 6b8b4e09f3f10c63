"""The three chunked implementations: one autograd function around one chunk of positions.

Letters: B rows, T positions, D hidden, V vocabulary, K stored tokens, C positions of each row in a
chunk; N = B·C flattened.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from jax_distill.batch import Batch
from jax_distill.objective import LossSums, Objective, TokenValues
from torch_ref.losses.head import Head, matmul
from torch_ref.losses.objectives import (
    Targets,
    label_logit,
    read_targets,
    sum_values,
    values_of,
)

HEAD_ROWS = 16384  # rows of the head's gradient made at once, so that its temporary stays small
Saved = Literal["logits", "nothing", "gradients"]


def chunk_bounds(batch: Batch, size: int) -> list[slice]:
    """The positions of each chunk of `size` positions of every row; the last may have fewer."""
    length = batch.mask.shape[1]
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def positions_of(batch: Batch, chunk: slice) -> Batch:
    """The batch at the positions of `chunk` alone."""
    return batch.map(lambda x: x[:, chunk])


def _chunk(
    logits: Tensor, targets: Targets, objective: Objective, head: Head, with_gradient: bool
) -> tuple[LossSums, Tensor | None]:
    """Sums of one chunk and ∂loss/∂(hidden·weightᵀ) [N,V], or None; overwrites `logits` [N,V].

    All of the loss depends on z through the K logits z_K, the label's, and the logsumexp of the
    rest at τ and at 1. So autograd runs on those few numbers and gives g_K and a = ∂loss/∂lse;
    outside K, dz = a·exp(z/τ − lse)/τ, and inside, where z was set to −inf, g_K is written.
    """
    tau = targets.temperature
    cap_gradient = None if head.soft_cap is None else 1 - (logits / head.soft_cap).square()
    student_top1 = logits.argmax(-1)
    z_label = label_logit(logits, targets.labels)
    z_ids = logits.gather(1, targets.ids)
    logits.scatter_add_(1, targets.ids, torch.where(targets.real, -math.inf, 0.0).to(logits.dtype))
    rest = (logits / tau).logsumexp(-1) if tau != 1 else logits.logsumexp(-1)
    rest_1 = logits.logsumexp(-1) if tau != 1 else rest
    parts = [x.requires_grad_(with_gradient) for x in (z_ids, z_label, rest, rest_1)]
    with torch.set_grad_enabled(with_gradient):
        values = _values_of_parts(targets, objective, student_top1, *parts)
        sums = sum_values(values, targets.mask)
    if not with_gradient:
        return sums, None
    g_ids, g_label, a, a_1 = torch.autograd.grad(sums.loss, parts, materialize_grads=True)
    if tau == 1:  # rest and rest_1 are one tensor, and both gradients are the whole of it
        d_logits = _tail_gradient(logits, rest, a)
    else:
        d_logits = _tail_gradient(logits / tau, rest, a / tau)
        d_logits += _tail_gradient(logits, rest_1, a_1)
    d_logits.scatter_add_(1, targets.ids, torch.where(targets.real, g_ids, 0.0))
    label = targets.labels.clamp(0, logits.shape[1] - 1)  # outside: g is 0
    d_logits.scatter_add_(1, label[:, None], g_label[:, None])
    if cap_gradient is not None:
        d_logits *= cap_gradient
    if head.logit_scale is not None:
        d_logits *= head.logit_scale
    return sums._replace(loss=sums.loss.detach()), d_logits


def _values_of_parts(
    targets: Targets,
    objective: Objective,
    student_top1: Tensor,
    z_ids: Tensor,
    z_label: Tensor,
    rest: Tensor,
    rest_1: Tensor,
) -> TokenValues:
    """`values_of` from z_K [N,K], z_label [N], and the logsumexp of the rest at τ and at 1 [N]."""
    z_ids = torch.where(targets.real, z_ids, -math.inf)
    scaled = z_ids / targets.temperature
    log_z_tau = torch.cat([scaled, rest[:, None]], -1).logsumexp(-1)
    return values_of(
        targets,
        objective,
        log_q=torch.where(targets.real, scaled - log_z_tau[:, None], -math.inf),
        log_q_tail=rest - log_z_tau,
        log_z=torch.cat([z_ids, rest_1[:, None]], -1).logsumexp(-1),
        z_label=z_label,
        student_top1=student_top1,
    )


def _tail_gradient(z: Tensor, lse: Tensor, a: Tensor) -> Tensor:
    """a·exp(z − lse) [N,V], written over z; 0 where z is −inf, also when that is everywhere (lse =
    −inf)."""
    lse = torch.where(lse == -math.inf, 0.0, lse)
    return z.sub_(lse[:, None]).exp_().mul_(a[:, None])


class _Gradients:
    """d_hidden [B,T,D] in hidden's dtype, d_weight [V,D] and d_bias [V] summed in float32; each
    None where it is not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = None
        if bias is not None and needed[2]:
            self.bias = torch.zeros_like(bias, dtype=dtype)

    def add(self, d_logits: Tensor, hidden: Tensor, weight: Tensor, chunk: slice) -> None:
        """One chunk's share: hidden [N,D], weight in hidden's dtype."""
        if self.bias is not None:
            self.bias += d_logits.sum(0)
        d_logits = d_logits.to(hidden.dtype)
        if self.hidden is not None:
            d_hidden = matmul(d_logits, weight).to(hidden.dtype)
            self.hidden[:, chunk] = d_hidden.unflatten(0, (self.hidden.shape[0], -1))
        if self.weight is not None:
            for first in range(0, len(weight), HEAD_ROWS):
                rows = slice(first, first + HEAD_ROWS)
                self.weight[rows] += matmul(d_logits[:, rows].T, hidden)


class Chunked(torch.autograd.Function):
    """hidden [B,T,D], weight [V,D], bias [V] or None → (loss, the other seven sums [7]).

    `head` again holds weight and bias, and the scalars of the head. `size`: positions of each row
    in a chunk. `saves`, what the forward leaves for the backward: "logits" (three matmuls, [B,T,V]
    of memory), "nothing" (the projection again: four), "gradients" (made at once: three).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        batch: Batch,
        objective: Objective,
        size: int,
        saves: Saved,
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[:3]
        now = saves == "gradients" and any(needed)
        gradients = _Gradients(hidden, weight, bias, needed) if now else None
        operand = weight.to(hidden.dtype)
        kept, sums = [], []
        for chunk, targets, rows in _chunks(hidden, batch, size, len(weight)):
            logits = head.finish(matmul(rows, operand.T))
            if saves == "logits" and any(needed):
                kept.append(logits.clone())
            chunk_sums, d_logits = _chunk(logits, targets, objective, head, with_gradient=now)
            sums.append(torch.stack(chunk_sums))
            if gradients is not None and d_logits is not None:
                gradients.add(d_logits, rows, operand, chunk)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.task = head, batch, objective, size, kept, gradients
        total = torch.stack(sums).sum(0)
        loss, metrics = total[0].clone(), total[1:]
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple:  # type: ignore[override]
        hidden, weight, bias = ctx.saved_tensors
        head, batch, objective, size, kept, gradients = ctx.task
        if gradients is None:
            gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
            operand = weight.to(hidden.dtype)
            for chunk, targets, rows in _chunks(hidden, batch, size, len(weight)):
                logits = kept.pop(0) if kept else head.finish(matmul(rows, operand.T))
                d_logits = _chunk(logits, targets, objective, head, with_gradient=True)[1]
                assert d_logits is not None
                gradients.add(d_logits, rows, operand, chunk)
        parts = ((gradients.hidden, hidden), (gradients.weight, weight), (gradients.bias, bias))
        scaled = (
            # straight into the input's dtype, without a [V,D] float32 in between
            None if g is None else torch.mul(g, d_loss, out=torch.empty_like(x))
            for g, x in parts
        )
        return (*scaled, None, None, None, None, None)


def _chunks(
    hidden: Tensor, batch: Batch, size: int, vocab_size: int
) -> Iterator[tuple[slice, Targets, Tensor]]:
    """Positions, targets, and hidden [B·C,D] with 0 where masked, of each chunk."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    for chunk in chunk_bounds(batch, size):
        targets = read_targets(positions_of(batch, chunk), vocab_size, dtype)
        rows = hidden[:, chunk].flatten(0, 1)
        yield chunk, targets, torch.where(targets.mask[:, None], rows, 0.0)
