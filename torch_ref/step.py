"""One optimizer step: the gradients of a batch, in micro-batches, and the numbers beside them.

Letters: B rows of an optimizer step, T positions.
"""

import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jax_distill.batch import Batch, EncodedTopK, LiveTeacher, TopK
from jax_distill.objective import Execution, HiddenObjective, Objective
from torch_ref.losses import LossSums, hidden_sum, logits, loss
from torch_ref.model import Model, head, hidden_states, layer_outputs
from torch_ref.routers import Routers
from torch_ref.teacher import targets_of


class Live(NamedTuple):
    """A teacher that runs beside the student; temperature: τ of its divergence. top_k: how many of
    its largest logits the loss reads, out of `vocab_size` real ones; None: the whole vocabulary,
    which then is the student's."""

    model: Model
    temperature: float
    top_k: int | None = None
    vocab_size: int = 0


class LossTask(NamedTuple):
    """What every step of a run scores its hidden states with.

    vocab_size: rows of the head that are real; the rest is padding. compute_dtype: of the matmuls.
    hidden: the hidden-state term, and its projections [P,D',D], or None where widths are equal.
    routers: of the student.
    """

    objective: Objective
    execution: Execution
    vocab_size: int
    compute_dtype: torch.dtype = torch.float32
    teacher: Live | None = None
    hidden: HiddenObjective | None = None
    projection: Tensor | None = None
    routers: Routers | None = None


class StepSums(NamedTuple):
    """The loss's sums, and that of the hidden-state distance without its weight; None: there is
    no such term."""

    loss: LossSums
    hidden: Tensor | None = None


@torch.no_grad()
def with_teacher(batch: Batch, task: LossTask) -> Batch:
    """The batch of tensors [B,T] with the live teacher's outputs for it."""
    live, inputs = task.teacher, (batch.tokens, batch.segment_ids, batch.positions)
    assert live is not None
    layers = task.hidden.teacher_layers if task.hidden else ()
    with layer_outputs(live.model, layers) as outputs:
        hidden = hidden_states(live.model, *inputs)
    if layers:
        batch = replace(batch, teacher_layers=torch.stack(outputs, dim=2))
    if live.top_k is None:
        real_head = head(live.model)._replace(vocab_size=task.vocab_size)
        teacher = LiveTeacher(hidden, real_head, live.temperature)
        return replace(batch, targets=None, teacher=teacher)
    return replace(batch, targets=live_top_k(hidden, live, task.execution.chunk_size))


def live_top_k(hidden: Tensor, live: Live, chunk_size: int) -> TopK:
    """The targets that a cache of the live teacher's hidden states [B,T,D] would give."""
    real_head = head(live.model)._replace(vocab_size=live.vocab_size)
    options: dict[str, Any] = {"top_k": live.top_k, "temperatures": (live.temperature,)}
    parts = [
        targets_of(logits(part, real_head), **options)[0].arrays()
        for part in hidden.flatten(0, 1).split(chunk_size)
    ]
    arrays = {
        name: torch.cat([part[name] for part in parts]).unflatten(0, hidden.shape[:2]).cpu().numpy()
        for name in parts[0]
    }
    found = EncodedTopK.from_arrays(arrays, (live.temperature,)).decode(live.temperature)
    return found.map(lambda x: torch.from_numpy(x).to(hidden.device))


def as_tensor(x: np.ndarray, device: torch.device) -> Tensor:
    """A numpy array on the device; numpy's bfloat16 is another package's, so its bits go over."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def loss_sums(model: Model, batch: Batch, task: LossTask) -> StepSums:
    """Summed loss of numpy rows [B,T], and the sums it is made of. The load-balancing term counts
    once for each valid token of the rows.

    Parameters wider than the compute dtype are cast where they are multiplied (autocast); norms
    and softmax keep float32.
    """
    device = model.device
    batch = batch.map(lambda x: as_tensor(x, device))
    if task.teacher is not None:
        batch = with_teacher(batch, task)
    if task.routers is not None:
        task.routers.begin()
    mixed = task.compute_dtype != model.dtype
    cast = torch.autocast(device.type, task.compute_dtype) if mixed else contextlib.nullcontext()
    layers = task.hidden.student_layers if task.hidden else ()
    with cast, layer_outputs(model, layers) as outputs:
        hidden = hidden_states(model, batch.tokens, batch.segment_ids, batch.positions)
    real_head = head(model)._replace(vocab_size=task.vocab_size)
    hidden = hidden.to(task.compute_dtype)
    sums = loss(hidden, real_head, batch, task.objective, task.execution)
    load = None if task.routers is None else task.routers.load(batch.segment_ids > 0)
    if task.routers is not None and load is not None and task.routers.weight:
        term = task.routers.weight * load.balance()
        sums = sums._replace(loss=sums.loss + sums.count * term)
    if task.hidden is None:
        return StepSums(sums)
    states = [x.to(task.compute_dtype) for x in outputs]
    distance = hidden_sum(states, batch.teacher_layers, batch.mask, task.projection, task.hidden)
    return StepSums(sums._replace(loss=sums.loss + task.hidden.weight * distance), distance)


def micro_batches(batch: Batch, size: int) -> list[Batch]:
    """The rows of a batch, `size` at a time; the last may have fewer."""

    def rows_from(first: int) -> Batch:
        return batch.map(lambda x: x[first : first + size])

    return [rows_from(first) for first in range(0, len(batch.mask), size)]


def add(total: StepSums | None, sums: StepSums) -> StepSums:
    """Field by field, without gradients."""
    of_loss = LossSums(*(x.detach() for x in sums.loss))
    hidden = None if sums.hidden is None else sums.hidden.detach()
    if total is None:
        return StepSums(of_loss, hidden)
    if hidden is not None and total.hidden is not None:
        hidden = hidden + total.hidden
    return StepSums(LossSums(*map(torch.add, total.loss, of_loss)), hidden)


def means(step: StepSums) -> dict[str, float]:
    """Sums over tokens → means per valid token (0 where there is none), and the count itself.

    What was not computed (NaN without a teacher) is left out.
    """
    sums = step.loss
    count = max(sums.count.item(), 1.0)
    found = {k: v.item() / count for k, v in sums._asdict().items() if k != "count"}
    if step.hidden is not None:
        found["hidden_loss"] = step.hidden.item() / count
    named = {k: v for k, v in found.items() if not math.isnan(v) or k == "loss"}
    return {**named, "valid_tokens": sums.count.item()}


def backward(model: Model, batch: Batch, task: LossTask, *, micro_batch_size: int) -> StepSums:
    """Set every parameter's `.grad` to the gradient of the mean loss over the batch's valid
    tokens, summed over micro-batches; returns the sums.

    One denominator: the valid tokens of the whole batch, whatever the micro-batches.
    """
    model.zero_grad()
    if task.projection is not None:
        task.projection.grad = None
    if task.routers is not None:
        task.routers.clear()
    count = max(int(batch.mask.sum()), 1)
    total: StepSums | None = None
    for micro in micro_batches(batch, micro_batch_size):
        sums = loss_sums(model, micro, task)
        (sums.loss.loss / count).backward()
        total = add(total, sums)
    assert total is not None
    return total
