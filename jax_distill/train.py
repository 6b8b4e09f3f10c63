"""`python -m jax_distill.train --config configs/x.yaml`: from a teacher to a distilled student.

What is missing is made, in order: the store (the teacher runs once), the student's first weights.
Then the gate, the loop, the held-out table, the export and the report. The same command resumes.
"""

import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_distill import evaluate, export, hf, report, sharding, student, teacher
from jax_distill.cache import Store
from jax_distill.checkpoint import Checkpoints
from jax_distill.config import Config, Failure, Refusal, load, run_command
from jax_distill.data import row_indices
from jax_distill.model import Decoder, train_flops_per_token
from jax_distill.optimizer import learning_rate_schedule, make_optimizer
from jax_distill.run import Metrics, Run, StepProgress, say, write_json
from jax_distill.step import make_eval_step, make_state, make_train_step, means


class Stopped(Exception):
    """The loop saved its state and ends early because it was told to."""


class StopSignal:
    """SIGTERM and SIGINT ask the loop to save and stop after the step at hand."""

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._before[number])  # a second one ends at once

    def __exit__(self, *_: Any) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)


def reader_knobs(config: Config) -> dict[str, Any]:
    """What `Store.read` needs to know; without a KL term the teacher's columns stay on disk."""
    if not config.loss.kl_weight:
        return {"targets": False}
    return {"temperature": config.loss.temperature, "top_k": config.cache.read_top_k}


def micro_batch_size(config: Config) -> int:
    """Rows per gradient pass."""
    return config.train.micro_batch_size or config.train.batch_size


def batches(
    store: Store, config: Config, mesh: Mesh, *, first: int, steps: int
) -> Iterator[tuple[int, np.ndarray, dict[str, Any]]]:
    """(step, rows, batch [A,B,T] on the devices) for steps first…steps−1, read two steps ahead."""
    batch_size = config.train.batch_size

    def read(step: int) -> tuple[int, np.ndarray, dict[str, Any]]:
        rows = row_indices(step, batch_size=batch_size, num_rows=store.rows, seed=config.seed)
        batch = store.read(rows, **reader_knobs(config))
        split = {k: v.reshape(-1, micro_batch_size(config), *v.shape[1:]) for k, v in batch.items()}
        return step, rows, sharding.place_batch(mesh, split, leading=1)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        ahead = deque(pool.submit(read, step) for step in range(first, min(first + 2, steps)))
        for step in range(first, steps):
            ready = ahead.popleft().result()
            if step + 2 < steps:
                ahead.append(pool.submit(read, step + 2))
            yield ready


def heldout_means(
    eval_step: Any, params: Any, store: Store, config: Config, mesh: Mesh
) -> dict[str, float]:
    """The training objective on the validation rows, from stored targets, per valid token."""
    total = None
    for batch in evaluate.padded_batches(
        store, evaluate.validation_rows(store), micro_batch_size(config), **reader_knobs(config)
    ):
        sums = eval_step(params, sharding.place_batch(mesh, batch))
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return {f"heldout_{k}": float(v) for k, v in jax.device_get(means(total)).items()}


def fit(
    config: Config,
    folder: Path,
    model: Decoder,
    stores: tuple[Store, Store],
    mesh: Mesh,
    *,
    steps: int,
    what: str,
) -> Decoder:
    """Train `model` for `steps` optimizer steps, from the newest checkpoint in `folder` on.

    metrics.jsonl and checkpoints/ lie in `folder`. The model given is used up: its weights are
    donated to the first step.

    Raises:
        Failure: the loss is not finite; names the step and the rows. Nothing of it is saved.
        Stopped: after SIGTERM or SIGINT, the state being saved.
    """
    train, (train_store, heldout_store) = config.train, stores
    schedule = learning_rate_schedule(
        config.optimizer.schedule,
        learning_rate=config.optimizer.learning_rate,
        final=config.optimizer.final_learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        steps=steps,
    )
    optimizer = make_optimizer(
        config.optimizer.name,
        schedule,
        b1=config.optimizer.b1,
        b2=config.optimizer.b2,
        weight_decay=config.optimizer.weight_decay,
        clip_norm=config.optimizer.clip_norm,
    )
    tokens_per_step = train.batch_size * train_store.sequence_length
    flops = tokens_per_step * train_flops_per_token(model.config, train_store.sequence_length)
    vocab_size = min(model.config.vocab_size, train_store.manifest.vocab_size)
    graphdef, state = make_state(model, optimizer, mesh)
    del model
    train_step = make_train_step(
        graphdef, optimizer, schedule, loss=config.loss, vocab_size=vocab_size
    )
    eval_step = make_eval_step(graphdef, loss=config.loss, vocab_size=vocab_size)

    checkpoints = Checkpoints(folder / "checkpoints", keep=train.keep, seed=config.seed)
    first = checkpoints.latest_step() or 0
    if first:
        state = checkpoints.restore(first, state)
        say(f"{what}: resumed at step {first} of {steps}")
    metrics = Metrics(folder, resume_step=first)
    progress = StepProgress(what, total=steps, done=first, tokens_per_step=tokens_per_step)
    profile = train.profile_steps or [-1, -1]
    clock = time.perf_counter()
    with StopSignal() as stop, metrics, progress, checkpoints:
        for index, rows, batch in batches(
            train_store, config, mesh, first=first, steps=steps
        ):
            if index == profile[0]:
                jax.profiler.start_trace(str(folder / "profile"))
            state, on_device = train_step(state, batch)
            values = {k: float(v) for k, v in jax.device_get(on_device).items()}
            step = index + 1
            if step == profile[1]:
                jax.profiler.stop_trace()

            if not np.isfinite(values["loss"] + values["gradient_norm"]):
                raise Failure(
                    f"step {step}: loss {values['loss']}, gradient norm {values['gradient_norm']}, "
                    f"rows {rows.tolist()}; last checkpoint: step {checkpoints.latest_step() or 0}; "
                    "lower optimizer.learning_rate, or look at these rows"
                )
            if not values["valid_tokens"]:
                say(f"step {step}: no valid token in rows {rows.tolist()}: nothing was learned")
            now = time.perf_counter()
            values["tokens_per_second"] = tokens_per_step / (now - clock)
            values["tflops_per_second"] = flops / (now - clock) / 1e12
            clock = now

            at_eval = step == steps or bool(train.eval_every and step % train.eval_every == 0)
            at_save = step == steps or bool(train.save_every and step % train.save_every == 0)
            if at_eval:
                values |= heldout_means(eval_step, state.params, heldout_store, config, mesh)
            if at_eval or step % train.log_every == 0 or step == 1:
                metrics.log(step, values)
            if at_save or stop.received:
                checkpoints.save(step, state, heldout_loss=values.get("heldout_loss"))
            progress.update(step, values["loss"])
            if stop.received and step < steps:
                raise Stopped(f"{what}: {stop.received} at step {step} of {steps}, state saved")
            if at_eval or at_save:
                clock = time.perf_counter()
    return nnx.merge(graphdef, state.params)
