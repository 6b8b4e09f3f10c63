"""One optimizer step: the gradients of a batch, in micro-batches, and the numbers beside them.

Shapes: B rows of an optimizer step, T positions.
"""

import contextlib

import numpy as np
import torch
from torch import Tensor

from jax_distill.config import LossConfig
from torch_ref.losses import IMPLEMENTATIONS, LossSums
from torch_ref.model import Model, head, hidden_states

Batch = dict[str, np.ndarray]


def loss_sums(
    model: Model, batch: Batch, *, loss: LossConfig, vocab_size: int, compute_dtype: torch.dtype
) -> LossSums:
    """Summed loss of rows [B,T] of a store, and the sums it is made of.

    Parameters wider than `compute_dtype` are cast where they are multiplied (autocast); norms and
    softmax keep float32. vocab_size: the columns of the head that are real.
    """
    device = model.device
    arrays = {name: torch.from_numpy(value).to(device) for name, value in batch.items()}
    mixed = compute_dtype != model.dtype
    with torch.autocast(device.type, compute_dtype) if mixed else contextlib.nullcontext():
        hidden = hidden_states(model, arrays["tokens"], arrays["segment_ids"], arrays["positions"])
    full = head(model)
    return IMPLEMENTATIONS[loss.implementation](
        hidden.to(compute_dtype),
        full.weight,
        arrays["labels"],
        arrays["mask"],
        arrays.get("teacher_indices"),
        arrays.get("teacher_logprobs"),
        arrays.get("teacher_log_tail"),
        arrays.get("teacher_count"),
        vocab_size=vocab_size,
        tail=loss.tail,
        divergence=loss.divergence,
        jsd_beta=loss.jsd_beta,
        temperature=loss.temperature,
        chunk_size=loss.chunk_size,
        kl_weight=loss.kl_weight,
        ce_weight=loss.ce_weight,
        z_loss_weight=loss.z_loss_weight,
        bias=full.bias,
        soft_cap=full.soft_cap,
        logit_scale=full.logit_scale,
    )


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """The rows of a batch, `size` at a time."""
    rows = len(batch["tokens"])
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, rows, size)]


def add(total: LossSums | None, sums: LossSums) -> LossSums:
    """Field by field, without gradients."""
    values = [x.detach() for x in sums]
    if total is not None:
        values = [a + b for a, b in zip(total, values, strict=True)]
    return LossSums(*values)


def means(sums: LossSums) -> dict[str, float]:
    """Sums over tokens → means per valid token (0 where there is none), and the count itself.

    What was not computed (NaN without a teacher) is left out.
    """
    count = max(sums.count.item(), 1.0)
    found = {k: v.item() / count for k, v in sums._asdict().items() if k != "count"}
    named = {k: v for k, v in found.items() if not np.isnan(v) or k == "loss"}
    return {**named, "valid_tokens": sums.count.item()}


def batch_gradients(
    model: Model,
    batch: Batch,
    *,
    micro_batch_size: int,
    loss: LossConfig,
    vocab_size: int,
    compute_dtype: torch.dtype,
) -> tuple[dict[str, Tensor], LossSums]:
    """Gradients by parameter name of the mean loss over the batch's valid tokens, and the sums.

    One denominator: the valid tokens of the whole batch, whatever the micro-batches. The gradients
    of several micro-batches are summed in float32 and end in the parameters' dtype.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    count = max(int(batch["mask"].sum()), 1)
    micros = micro_batches(batch, micro_batch_size)
    total: dict[str, Tensor] = {}
    sums: LossSums | None = None
    for micro in micros:
        found = loss_sums(
            model, micro, loss=loss, vocab_size=vocab_size, compute_dtype=compute_dtype
        )
        gradients = torch.autograd.grad(
            found.loss / count, list(parameters.values()), materialize_grads=True
        )
        sums = add(sums, found)
        for name, g in zip(parameters, gradients, strict=True):
            if len(micros) > 1:
                g = g.float()
            total[name] = total[name].add_(g) if name in total else g
    assert sums is not None
    return {name: g.to(parameters[name].dtype) for name, g in total.items()}, sums
