"""Other people's losses, and torch_ref's, as contestants of `python -m jax_distill.bench peers`.

Each takes the same arrays: hidden [T,D], lm_head [V,D], labels [T], the teacher's top K [T,K] with
log tail [T], and the teacher's own hidden and head, for a loss that wants all of its logits.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from jax_distill.bench.process import Outcome, run_contestant
from torch_ref.losses import IMPLEMENTATIONS


def differentiated(
    loss: Callable[[Tensor, Tensor], Tensor], hidden: np.ndarray, lm_head: np.ndarray
) -> Callable[[], Outcome]:
    """loss(hidden, lm_head) → its value and both gradients."""
    leaves = [torch.tensor(x, requires_grad=True) for x in (hidden, lm_head)]

    def call() -> Outcome:
        value = loss(*leaves)
        d_hidden, d_lm_head = torch.autograd.grad(value, leaves)
        return Outcome(value.item(), d_hidden.numpy(), d_lm_head.numpy())

    return call


def ours(
    implementation: str,
    *,
    hidden: np.ndarray,
    lm_head: np.ndarray,
    labels: np.ndarray,
    teacher_indices: np.ndarray,
    teacher_logprobs: np.ndarray,
    teacher_log_tail: np.ndarray,
    chunk_size: np.ndarray,
    **_: np.ndarray,
) -> Callable[[], Outcome]:
    """torch_ref's implementations, `bucket`."""
    targets = [torch.tensor(x)[None] for x in (labels, np.ones(labels.shape, bool))]
    targets += [
        torch.tensor(x)[None] for x in (teacher_indices, teacher_logprobs, teacher_log_tail)
    ]
    targets.append(torch.full((1, *labels.shape), teacher_indices.shape[-1]))

    def loss(hidden: Tensor, lm_head: Tensor) -> Tensor:
        sums = IMPLEMENTATIONS[implementation](
            hidden[None], lm_head, *targets, chunk_size=int(chunk_size)
        )
        return sums.loss

    return differentiated(loss, hidden, lm_head)


def torch_dense(
    *,
    hidden: np.ndarray,
    lm_head: np.ndarray,
    teacher_indices: np.ndarray,
    teacher_logprobs: np.ndarray,
    teacher_log_tail: np.ndarray,
    **_: np.ndarray,
) -> Callable[[], Outcome]:
    """What one writes first: log_softmax of all logits, gather, and 1 − Σ for the tail."""
    ids = torch.tensor(teacher_indices).long()
    log_p = torch.tensor(np.concatenate([teacher_logprobs, teacher_log_tail[:, None]], axis=1))

    def loss(hidden: Tensor, lm_head: Tensor) -> Tensor:
        log_q = F.log_softmax(hidden @ lm_head.T, dim=-1).gather(-1, ids)
        tail = torch.log1p(-log_q.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-7))
        return F.kl_div(torch.cat([log_q, tail], -1), log_p, reduction="sum", log_target=True)

    return differentiated(loss, hidden, lm_head)


def liger(
    *,
    hidden: np.ndarray,
    lm_head: np.ndarray,
    labels: np.ndarray,
    teacher_hidden: np.ndarray,
    teacher_head: np.ndarray,
    chunk_size: np.ndarray,
    **_: np.ndarray,
) -> Callable[[], Outcome]:
    """liger-kernel's chunked distillation loss in pure torch: KL over all of V, both heads."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    chunked = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=0.0,
        compiled=False,
        chunk_size=int(chunk_size),
    )
    teacher = torch.tensor(teacher_hidden), torch.tensor(teacher_head)
    target = torch.tensor(labels).long()

    def loss(hidden: Tensor, lm_head: Tensor) -> Tensor:
        return chunked(hidden, lm_head, *teacher, target) * len(labels)  # a mean over tokens

    return differentiated(loss, hidden, lm_head)


def trl(
    *,
    hidden: np.ndarray,
    lm_head: np.ndarray,
    teacher_indices: np.ndarray,
    teacher_logprobs: np.ndarray,
    chunk_size: np.ndarray,
    **_: np.ndarray,
) -> Callable[[], Outcome]:
    """TRL's chunked sparse loss, with its tail bucket, as its asynchronous trainer calls it."""
    from trl.experimental.async_distillation.async_distillation_trainer import _chunked_jsd_loss

    ids, logprobs = torch.tensor(teacher_indices).long(), torch.tensor(teacher_logprobs)
    knobs = {
        "lm_head_bias": None,
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "valid_candidate_mask": torch.ones(ids.shape, dtype=torch.bool),
        "beta": 0.0,
        "temperature": 1.0,
        "add_tail_bucket": True,
        "teacher_id_idx": None,
        "num_teachers": 1,
        "chunk_size": int(chunk_size),
    }

    def loss(hidden: Tensor, lm_head: Tensor) -> Tensor:
        return _chunked_jsd_loss(
            hidden, lm_head, target_ids=ids, teacher_target_logps=logprobs, **knobs
        )[0]

    return differentiated(loss, hidden, lm_head)


if __name__ == "__main__":
    run_contestant(
        {name: partial(ours, name) for name in IMPLEMENTATIONS}
        | {"torch": torch_dense, "liger": liger, "trl": trl}
    )
