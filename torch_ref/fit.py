"""The loop of optimizer steps: from the newest checkpoint to the last step.

B rows of an optimizer step, P pairs of layers, D the student's width, D' the teacher's.
"""

import time
from pathlib import Path

import torch

from jax_distill import loop
from jax_distill.base.console import StepProgress, StopSignal, say
from jax_distill.batch import Batch
from jax_distill.cache import Cache, validation_rows
from jax_distill.config import Config
from jax_distill.data import reader_options, row_indices
from jax_distill.hidden_layers import PROJECTION, start_projection, teacher_width
from jax_distill.run import Metrics
from jax_distill.wandb_log import open_wandb
from torch_ref.checkpoint import Checkpoints
from torch_ref.model import Model, recompute_layers
from torch_ref.optimizer import clip_gradients, optimizer_of, set_learning_rate
from torch_ref.routers import Routers
from torch_ref.step import Live, LossTask, StepSums, add, backward, loss_sums, means


def loss_task(
    config: Config, model: Model, vocab_size: int, cache: Cache, teacher: Model | None
) -> LossTask:
    """The loss as configured, for a student with a head of `vocab_size` real rows, with a live
    teacher or not."""
    loss, compute_dtype = config.loss, getattr(torch, config.train.compute_dtype)
    live = None
    if teacher is not None:
        top_k = config.cache.top_k if config.teacher.mode == "online_top_k" else None
        live = Live(teacher, loss.temperature, top_k, cache.manifest.vocab_size)
    return LossTask(
        loss.objective(),
        loss.execution(),
        vocab_size,
        compute_dtype,
        live,
        loss.hidden_objective(),
        make_projection(config, model, cache, teacher),
        Routers(model, loss.router_weight),
    )


def make_projection(
    config: Config, model: Model, cache: Cache, teacher: Model | None
) -> torch.Tensor | None:
    """The projections [P,D',D] of the hidden-state loss as they start, or None where there is none
    or the widths are equal."""
    objective = config.loss.hidden_objective()
    if objective is None:
        return None
    live_width = None if teacher is None else teacher.config.get_text_config().hidden_size
    theirs = teacher_width(config, cache.manifest, live_width)
    ours = model.config.get_text_config().hidden_size
    if ours == theirs:
        return None
    pairs = len(objective.pairs)
    start = start_projection(pairs, width=ours, teacher=theirs, seed=config.seed)
    return torch.from_numpy(start).to(model.device, model.dtype).requires_grad_()


@torch.no_grad()
def validation_means(
    model: Model, cache: Cache, config: Config, task: LossTask
) -> dict[str, float]:
    """The training objective on the validation rows, per valid token."""
    rows = validation_rows(cache)
    size = config.train.rows_per_micro_batch
    total: StepSums | None = None
    for first in range(0, len(rows), size):
        batch = cache.read(rows[first : first + size], **reader_options(config))
        total = add(total, loss_sums(model, batch, task))
    values = means(total) if total else {}
    return {f"val_{k}": v for k, v in values.items()} if values.get("valid_tokens") else {}


def begin(
    saved: Checkpoints,
    parameters: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    what: str,
    resume_step: int | None,
) -> int:
    """How many steps are done, the parameters and moments being those after them."""
    first = loop.first_step(saved, steps=steps, resume_step=resume_step)
    if first:
        saved.restore(first, parameters, optimizer)
        if resume_step is not None:
            saved.set_aside_after(first)
        say(f"{what}: resumed at step {first} of {steps}")
    return first


def gradients(
    config: Config,
    model: Model,
    parameters: dict[str, torch.Tensor],
    batch: Batch,
    task: LossTask,
) -> dict[str, float]:
    """Set every parameter's `.grad`, clipped, to that of a batch [B,T]; returns its numbers."""
    sums = backward(model, batch, task, micro_batch_size=config.train.rows_per_micro_batch)
    norm = clip_gradients(parameters.values(), config.optimizer.clip_norm)
    routed = task.routers.metrics() if task.routers else {}
    return means(sums) | routed | {"gradient_norm": norm.item()}


def fit(
    config: Config,
    folder: Path,
    model: Model,
    *,
    caches: tuple[Cache, Cache],
    steps: int,
    vocab_size: int,
    what: str,
    teacher: Model | None = None,
    resume_step: int | None = None,
) -> None:
    """Train `model` in place for `steps` optimizer steps, from the newest checkpoint in `folder`,
    beside a live teacher if there is one. `config.loss.hidden_layers` are pairs.

    Raises:
        RunError: the loss, or the validation loss, is not finite; names the step and the rows.
            Nothing of it is saved. Or the checkpoint to resume from is damaged.
        Stopped: after SIGTERM or SIGINT, the state being saved.
    """
    train, (cache, heldout) = config.train, caches
    task = loss_task(config, model, vocab_size, cache, teacher)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    if task.projection is not None:
        parameters[PROJECTION] = task.projection
    optimizer, schedule = optimizer_of(config.optimizer, parameters, steps=steps)
    if train.remat == "layer":
        recompute_layers(model)
    saved = Checkpoints(folder / "checkpoints", keep=train.keep, seed=config.seed)
    first = begin(saved, parameters, optimizer, steps=steps, what=what, resume_step=resume_step)
    tokens = train.batch_size * cache.sequence_length
    progress = StepProgress(what, total=steps, done=first, tokens_per_step=tokens)
    written = Metrics(folder, resume_step=first, wandb=open_wandb(config, folder))
    with StopSignal() as stop, written as metrics, progress:
        for index in range(first, steps):
            start, step = time.perf_counter(), index + 1
            rows = row_indices(
                index, batch_size=train.batch_size, num_rows=cache.rows, seed=config.seed
            )
            batch = cache.read(rows, **reader_options(config))
            values = gradients(config, model, parameters, batch, task)
            values["learning_rate"] = schedule(index)
            loop.check_step(values, step, rows, saved)
            set_learning_rate(optimizer, values["learning_rate"])
            optimizer.step()
            model.zero_grad()  # validation can use their memory
            values["tokens_per_second"] = tokens / (time.perf_counter() - start)
            due = loop.due(train, step, steps)
            if due.evaluate:
                values |= validation_means(model, heldout, config, task)
                loop.check_validation(values, step, rows, saved)
            if due.log:
                metrics.log(step, values)
            stopping = stop.received  # read once: it may come between the save and the stop
            if due.save or stopping:
                saved.save(step, parameters, optimizer, validation=loop.best_by(values))
            progress.update(step, values["loss"])
            if stopping:
                raise loop.stopped(stopping, what, step, steps)
        loop.check_stop(stop, what, steps)
    model.eval()
