"""What is computed, per position: the targets, the four tails, the three divergences.

Letters: B rows, T positions, N = B·T flattened, K stored tokens, V vocabulary. Everything is in log
space and in nats.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from jax_distill.batch import Batch
from jax_distill.objective import LOG_FLOOR, LossSums, Objective, TokenValues


def sum_values(values: TokenValues, mask: Tensor) -> LossSums:
    """Over all positions, of which `mask` tells the valid ones. The metrics are detached."""
    loss, *metrics = (x.sum() for x in values)
    return LossSums(*[loss, *(x.detach() for x in metrics), mask.sum().to(loss.dtype)])


class Targets(NamedTuple):
    """What is learned at N positions; nothing in it depends on what masked cells hold.

    labels [N], mask [N], ids [N,K] (0 where not real), real [N,K] (counted, and in the student's
    vocabulary), log_p [N,K] at temperature (−inf where not real), log_tail [N], top [N,K] (the
    teacher's most likely token; each, where several are), share [N,K] (of a random sample's draws;
    None where the K are the most likely). Without a teacher K is 0 and everything
    is in the tail on both sides.
    """

    labels: Tensor
    mask: Tensor
    ids: Tensor
    real: Tensor
    log_p: Tensor
    log_tail: Tensor
    top: Tensor
    temperature: float
    share: Tensor | None = None


def read_targets(batch: Batch, vocab_size: int, dtype: torch.dtype) -> Targets:
    """Of a batch [B,T], flattened to N: drops what is not counted, folds ids that the student
    lacks into the tail."""
    mask = batch.mask.bool().flatten()
    labels = torch.where(mask, batch.labels.flatten(), 0).long()
    if batch.targets is None:
        empty = labels.new_empty((len(labels), 0))
        log_tail = torch.zeros(labels.shape, dtype=dtype, device=labels.device)
        real = empty.bool()
        return Targets(labels, mask, empty, real, empty.to(dtype), log_tail, real, 1.0)
    teacher = batch.targets.map(lambda x: x.flatten(0, 1))
    indices, entry = teacher.indices.long(), torch.arange(teacher.top_k, device=labels.device)
    counted = (entry < teacher.count.long()[:, None]) & mask[:, None]
    known = (indices >= 0) & (indices < vocab_size)
    log_p = torch.where(counted, teacher.logprobs.to(dtype), -math.inf)
    unknown = torch.where(known, -math.inf, log_p).logsumexp(-1)
    real, share = counted & known, None
    if teacher.draws is not None:
        draws = torch.where(counted, teacher.draws, 0).to(dtype)
        share = torch.where(real, draws / draws.sum(-1, keepdim=True).clamp_min(1), 0)
    return Targets(
        labels,
        mask,
        ids=torch.where(real, indices, 0),
        real=real,
        log_p=torch.where(real, log_p, -math.inf),
        log_tail=torch.logaddexp(torch.where(mask, teacher.log_tail.to(dtype), 0.0), unknown),
        top=real & (log_p == log_p.amax(-1, keepdim=True)),
        temperature=teacher.temperature,
        share=share,
    )


def _expected_log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Σ a·(log a − log b) over the last axis; an outcome with a = 0 adds 0.

    Where b is 0 and a is not, log b counts as LOG_FLOOR.
    """
    possible = log_a != -math.inf  # not `>`: a NaN must stay one
    log_a = torch.where(possible, log_a, 0.0)
    log_b = torch.where(possible & (log_b != -math.inf), log_b, LOG_FLOOR)
    return torch.where(possible, log_a.exp() * (log_a - log_b), 0.0).sum(-1)


def _divergence(log_p: Tensor, log_q: Tensor, objective: Objective) -> Tensor:
    """D(p, q) over the last axis, whose entries are outcomes (−inf: not one, or p = 0)."""
    if objective.divergence == "forward_kl":
        return _expected_log_ratio(log_p, log_q)
    if objective.divergence == "reverse_kl":
        return _expected_log_ratio(log_q, log_p.clamp_min(LOG_FLOOR))
    beta = objective.jsd_beta
    neither = (log_p == -math.inf) & (log_q == -math.inf)
    log_m = torch.logaddexp(
        torch.where(neither, 0.0, log_p + math.log(beta)),
        torch.where(neither, 0.0, log_q + math.log1p(-beta)),
    )
    teacher_side = _expected_log_ratio(log_p, log_m)
    return beta * teacher_side + (1 - beta) * _expected_log_ratio(log_q, log_m)


def _kl(targets: Targets, log_q: Tensor, log_q_tail: Tensor, objective: Objective) -> Tensor:
    """[N]: the divergence over the outcomes that `tail` chooses, from log q_k [N,K] and log q_t
    [N]. Where P = 0 there is nothing to divide by, and p stays 0."""
    log_p, log_p_tail = targets.log_p, targets.log_tail
    if targets.share is not None:  # the mean of log(p/q) over the draws
        ratio = torch.where(targets.real, log_p, 0.0) - torch.where(targets.real, log_q, 0.0)
        return (targets.share * ratio).sum(-1)
    if objective.tail in ("renormalize", "ignore"):
        mass = log_p.logsumexp(-1)
        log_p = torch.where((mass != -math.inf)[:, None], log_p - mass[:, None], -math.inf)
        log_p_tail = torch.full_like(log_p_tail, -math.inf)
    if objective.tail == "ignore":
        some = targets.real.any(-1, keepdim=True)
        log_q = torch.where(some, log_q - log_q.logsumexp(-1, keepdim=True), -math.inf)
    if objective.tail in ("bucket", "renormalize"):
        log_p = torch.cat([log_p, log_p_tail[:, None]], -1)
        log_q = torch.cat([log_q, log_q_tail[:, None]], -1)
    return _divergence(log_p, log_q, objective)


def values_of(
    targets: Targets,
    objective: Objective,
    *,
    log_q: Tensor,
    log_q_tail: Tensor,
    log_z: Tensor,
    z_label: Tensor,
    student_top1: Tensor,
) -> TokenValues:
    """The values of N positions.

    log_q [N,K] = log q at the K ids (−inf where not real), log_q_tail [N] = log of what q has
    elsewhere, both at τ; log_z [N] = lse(z) and z_label [N] at temperature 1; student_top1 [N] ids.
    """
    unknown = torch.full_like(log_z, math.nan)
    kl = teacher_mass = student_mass = top1 = unknown
    if targets.ids.shape[1]:
        kl = _kl(targets, log_q, log_q_tail, objective)
        teacher_mass, student_mass = targets.log_p.exp().sum(-1), log_q.exp().sum(-1)
        top1 = ((targets.ids == student_top1[:, None]) & targets.top).any(-1).to(kl.dtype)
    # A label that the head lacks has an infinite cross-entropy, and a constant has no gradient.
    lacking = z_label == -math.inf
    cross_entropy = torch.where(lacking, math.inf, log_z - z_label)
    z_loss = log_z.square()
    loss = torch.zeros_like(log_z)
    for weight, value in (
        (objective.kl_weight * targets.temperature**2, kl),
        (objective.ce_weight, cross_entropy),
        (objective.z_loss_weight, z_loss),
    ):
        loss = loss + weight * value if weight else loss
    values = (loss, kl, cross_entropy, z_loss, teacher_mass, student_mass, top1)
    return TokenValues(*(torch.where(targets.mask, x, 0.0) for x in values))


def label_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """z_label [N]; −inf for a label that the head lacks."""
    known = (labels >= 0) & (labels < logits.shape[1])
    picked = logits.gather(1, torch.where(known, labels, 0)[:, None])[:, 0]
    return torch.where(known, picked, -math.inf)
