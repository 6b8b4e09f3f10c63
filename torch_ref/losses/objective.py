"""What is computed, per position: the targets, the four tails, the three divergences, the sums.

Shapes: N positions, K stored tokens, V vocabulary. Everything is in log space and in nats.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = -100.0  # log of a probability that a divergence divides by and that is 0

TAILS = ("bucket", "renormalize", "truncate", "ignore")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


class LossSums(NamedTuple):
    """Sums over the valid tokens; the caller divides by the count of the whole optimizer step.

    `loss` is weighted and carries the gradient; the rest are metrics without one. `kl` is the
    divergence in nats before kl_weight and τ²; `teacher_mass` Σ_k p_k, `student_mass` Σ_k q_k;
    `top1_agreement` counts positions where both have the same most likely token. Without a
    teacher these four are NaN: not computed, never 0.
    """

    loss: Tensor
    kl: Tensor
    cross_entropy: Tensor
    z_loss: Tensor
    teacher_mass: Tensor
    student_mass: Tensor
    top1_agreement: Tensor
    count: Tensor  # type: ignore[assignment]


@dataclass(frozen=True)
class Knobs:
    """What every implementation is told besides its tensors.

    `operand_dtype`: the head is rounded to it before the product, whatever its own dtype is.
    """

    tail: str
    divergence: str
    jsd_beta: float
    temperature: float
    kl_weight: float
    ce_weight: float
    z_loss_weight: float
    chunk_size: int
    operand_dtype: torch.dtype
    soft_cap: float | None
    logit_scale: float | None


class Targets(NamedTuple):
    """What is learnt at N positions; nothing in it depends on what masked cells hold.

    labels [N], mask [N], ids [N,K] (0 where not real), real [N,K] (counted, and in the student's
    vocabulary), log_p [N,K] (−inf where not real), log_tail [N], top [N,K] (the teacher's
    most likely token; each, where several are).
    """

    labels: Tensor
    mask: Tensor
    ids: Tensor
    real: Tensor
    log_p: Tensor
    log_tail: Tensor
    top: Tensor

    def chunk(self, first: int, last: int) -> "Targets":
        """Positions [first, last) of every row of [B,T,…] targets, flattened to N = B·C."""
        return Targets(*(x[:, first:last].flatten(0, 1) for x in self))


def read_targets(
    labels: Tensor,
    mask: Tensor,
    teacher: tuple[Tensor | None, ...],
    vocab_size: int,
    dtype: torch.dtype,
) -> Targets:
    """Read the store's arrays: drop what is not counted, fold ids the student lacks into the tail.

    Without a teacher K is 0 and everything lies in the tail on both sides.
    """
    mask = mask.bool()
    labels = torch.where(mask, labels, 0).long()
    indices, logprobs, log_tail, count = teacher
    if indices is None or logprobs is None or log_tail is None or count is None:
        empty = labels.new_empty((*labels.shape, 0))
        none = torch.zeros(labels.shape, dtype=dtype, device=labels.device)
        return Targets(labels, mask, empty, empty.bool(), empty.to(dtype), none, empty.bool())
    indices = indices.long()
    place = torch.arange(indices.shape[-1], device=indices.device)
    counted = (place < count.long()[..., None]) & mask[..., None]
    known = (indices >= 0) & (indices < vocab_size)
    log_p = torch.where(counted, logprobs.to(dtype), -math.inf)
    unknown = torch.where(known, -math.inf, log_p).logsumexp(-1)
    log_tail = torch.logaddexp(torch.where(mask, log_tail.to(dtype), 0.0), unknown)
    real = counted & known
    return Targets(
        labels,
        mask,
        torch.where(real, indices, 0),
        real,
        torch.where(real, log_p, -math.inf),
        log_tail,
        real & (log_p == log_p.amax(-1, keepdim=True)),
    )


def _expected_log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ a·(log a − log b) over the last axis, in log space; an outcome with a = 0 adds 0.

    Where b is 0 and a is not, log b counts as FLOOR.
    """
    possible = log_a != -math.inf  # not `>`: a NaN must stay one
    log_a = torch.where(possible, log_a, 0.0)
    log_b = torch.where(possible & (log_b != -math.inf), log_b, FLOOR)
    return torch.where(possible, log_a.exp() * (log_a - log_b), 0.0).sum(-1)


def _divergence(log_p: Tensor, log_q: Tensor, knobs: Knobs) -> Tensor:
    """D(p, q) in nats over the last axis, whose entries are outcomes (−inf: not one, or p = 0).

    forward_kl Σ p log(p/q); reverse_kl Σ q log(q/max(p, e^FLOOR));
    jsd β·KL(p‖m) + (1−β)·KL(q‖m) with m = β·p + (1−β)·q (GKD, arXiv 2306.13649).
    """
    if knobs.divergence == "forward_kl":
        return _expected_log_ratio(log_p, log_q)
    if knobs.divergence == "reverse_kl":
        return _expected_log_ratio(log_q, log_p.clamp_min(FLOOR))
    beta = knobs.jsd_beta
    neither = (log_p == -math.inf) & (log_q == -math.inf)
    log_m = torch.logaddexp(
        torch.where(neither, 0.0, log_p + math.log(beta)),
        torch.where(neither, 0.0, log_q + math.log1p(-beta)),
    )
    teacher_side = _expected_log_ratio(log_p, log_m)
    return beta * teacher_side + (1 - beta) * _expected_log_ratio(log_q, log_m)


def _kl(targets: Targets, log_q: Tensor, log_q_tail: Tensor, knobs: Knobs) -> Tensor:
    """[N]: the divergence of the outcomes that `tail` chooses, from log q_k [N,K] and log q_t [N].

    bucket: the K and the tail. truncate: the K alone, as they are (can be negative).
    renormalize: p/P over the K, so its tail is 0. ignore: p/P and q/Q over the K alone: blind
    outside K, identically 0 at K = 1. Where P = 0 there is nothing to divide, and p stays 0.
    """
    log_p, log_p_tail = targets.log_p, targets.log_tail
    if knobs.tail in ("renormalize", "ignore"):
        mass = log_p.logsumexp(-1)
        log_p = torch.where((mass != -math.inf)[:, None], log_p - mass[:, None], -math.inf)
        log_p_tail = torch.full_like(log_p_tail, -math.inf)
    if knobs.tail == "ignore":
        some = targets.real.any(-1, keepdim=True)
        log_q = torch.where(some, log_q - log_q.logsumexp(-1, keepdim=True), -math.inf)
    if knobs.tail in ("bucket", "renormalize"):
        log_p = torch.cat([log_p, log_p_tail[:, None]], -1)
        log_q = torch.cat([log_q, log_q_tail[:, None]], -1)
    return _divergence(log_p, log_q, knobs)


def sums_of(
    targets: Targets,
    log_q: Tensor,
    log_q_tail: Tensor,
    log_z: Tensor,
    label_logit: Tensor,
    student_top1: Tensor,
    knobs: Knobs,
) -> Tensor:
    """The eight fields of LossSums, stacked, from per-position values.

    log_q [N,K] = log q at the K ids (−inf where not real), log_q_tail [N] = log of what q has
    elsewhere, both at τ; log_z [N] = lse(z) at temperature 1, label_logit [N] = z_label.
    """
    kl = _kl(targets, log_q, log_q_tail, knobs)
    # What has no column has an infinite cross-entropy, and a constant has no gradient.
    lacking = label_logit == -math.inf
    cross_entropy = torch.where(lacking, math.inf, log_z - label_logit)
    z_loss = log_z.square()
    loss = torch.zeros_like(kl)
    for weight, value in (
        (knobs.kl_weight * knobs.temperature**2, kl),
        (knobs.ce_weight, cross_entropy),
        (knobs.z_loss_weight, z_loss),
    ):
        loss = loss + weight * value if weight else loss
    columns = [
        loss,
        kl,
        cross_entropy,
        z_loss,
        targets.log_p.exp().sum(-1),
        log_q.exp().sum(-1),
        ((targets.ids == student_top1[:, None]) & targets.top).any(-1).to(kl.dtype),
        torch.ones_like(kl),
    ]
    return torch.stack([torch.where(targets.mask, x, 0.0).sum() for x in columns])


def label_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """z_label [N]; −inf, so an infinite cross-entropy, for a label that the student lacks."""
    known = (labels >= 0) & (labels < logits.shape[1])
    picked = logits.gather(1, torch.where(known, labels, 0)[:, None])[:, 0]
    return torch.where(known, picked, -math.inf)
