"""Other people's losses, and torch_ref's, as processes of `python -m jax_distill.bench peers`.

Each takes the same arrays, B = 1: hidden [B,T,D], weight [V,D], labels [B,T], the teacher's top K
[B,T,K] with log tail [B,T], and the teacher's own hidden and head, for a loss that wants all of its
logits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from jax_distill.base.process import Outcome, run_peer
from jax_distill.batch import Batch, TopK
from jax_distill.objective import IMPLEMENTATIONS, Execution, Objective
from torch_ref import losses

Loss = Callable[[Tensor, Tensor], Tensor]
"""(hidden, weight) → the sum over tokens."""


def ours(
    implementation: str,
    *,
    labels: Tensor,
    indices: Tensor,
    logprobs: Tensor,
    log_tail: Tensor,
    chunk_size: Tensor,
    **_: Tensor,
) -> Loss:
    """torch_ref's implementations, `bucket`."""
    targets = TopK(indices, logprobs, log_tail, torch.full(labels.shape, indices.shape[-1]))
    batch = Batch(labels, torch.ones(labels.shape, dtype=torch.bool), targets)
    execution = Execution(implementation, chunk_size=int(chunk_size))

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return losses.loss(hidden, losses.Head(weight), batch, Objective(), execution).loss

    return loss


def torch_dense(*, indices: Tensor, logprobs: Tensor, log_tail: Tensor, **_: Tensor) -> Loss:
    """What one writes first: log_softmax of all logits, gather, and 1 − Σ for the tail."""
    ids, log_p = indices.long(), torch.cat([logprobs, log_tail[..., None]], -1)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        log_q = F.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids)
        tail = torch.log1p(-log_q.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-7))
        return F.kl_div(torch.cat([log_q, tail], -1), log_p, reduction="sum", log_target=True)

    return loss


def liger(
    *,
    labels: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    chunk_size: Tensor,
    **_: Tensor,
) -> Loss:
    """liger-kernel's chunked distillation loss in pure torch: KL over all of V, both heads."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    chunked = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=0.0,
        compiled=False,
        chunk_size=int(chunk_size),
    )
    target = labels[0].long()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        mean = chunked(hidden[0], weight, teacher_hidden[0], teacher_weight, target)
        return mean * len(target)

    return loss


def trl(*, indices: Tensor, logprobs: Tensor, chunk_size: Tensor, **_: Tensor) -> Loss:
    """TRL's chunked sparse loss, with its tail bucket, as its asynchronous trainer calls it."""
    from trl.experimental.async_distillation.async_distillation_trainer import _chunked_jsd_loss

    options = {
        "target_ids": indices[0].long(),
        "teacher_target_logps": logprobs[0],
        "lm_head_bias": None,
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "valid_candidate_mask": torch.ones(indices[0].shape, dtype=torch.bool),
        "beta": 0.0,
        "temperature": 1.0,
        "add_tail_bucket": True,
        "teacher_id_idx": None,
        "num_teachers": 1,
        "chunk_size": int(chunk_size),
    }
    return lambda hidden, weight: _chunked_jsd_loss(hidden[0], weight, **options)[0]


def differentiated(
    make: Callable[..., Loss], *, hidden: np.ndarray, weight: np.ndarray, **arrays: Any
) -> Callable[[], Outcome]:
    """The loss's value and both gradients."""
    loss = make(**{name: torch.tensor(array) for name, array in arrays.items()})
    leaves = [torch.tensor(x, requires_grad=True) for x in (hidden, weight)]

    def call() -> Outcome:
        value = loss(*leaves)
        d_hidden, d_weight = torch.autograd.grad(value, leaves)
        return Outcome(value.item(), d_hidden[0].numpy(), d_weight.numpy())

    return call


if __name__ == "__main__":
    losses_by_name: dict[str, Callable[..., Loss]] = {
        **{name: partial(ours, name) for name in IMPLEMENTATIONS},
        "torch": torch_dense,
        "liger": liger,
        "trl": trl,
    }
    run_peer({name: partial(differentiated, make) for name, make in losses_by_name.items()})
