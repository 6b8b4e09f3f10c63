"""The loop of optimizer steps: from the newest checkpoint to the last step.

A step is dispatched before the numbers of the one before are read, so that the devices never wait
for the host. Where something is done with the state after a step (evaluate, save, stop), that
step's own numbers are read first: what is saved has been found finite.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_distill import evaluate, loop, processes, sharding
from jax_distill.base.console import StepProgress, StopSignal, say
from jax_distill.base.process import peak_host_bytes
from jax_distill.batch import Batch
from jax_distill.cache import Cache, Manifest
from jax_distill.config import Config
from jax_distill.data import reader_options
from jax_distill.devices import memory_of, peak_bf16_flops
from jax_distill.hidden_layers import teacher_width
from jax_distill.model import Decoder
from jax_distill.run import Metrics
from jax_distill.training.checkpoint import Checkpoints
from jax_distill.training.inputs import READ_AHEAD, batches
from jax_distill.training.offload import check_host_memory
from jax_distill.training.program import Programs, make_programs, step_flops_per_token
from jax_distill.training.projection import add_projection, without_projection
from jax_distill.training.state import TrainState, make_state
from jax_distill.wandb_log import open_wandb

REQUIRED = ("loss", "gradient_norm")  # NaN elsewhere means: not computed without a teacher


def validation_means(
    programs: Programs, params: Any, cache: Cache, config: Config, mesh: Mesh
) -> dict[str, float]:
    """The training objective on the validation rows, per valid token."""
    total = None
    rows, size = evaluate.validation_rows(cache), config.train.rows_per_micro_batch
    for batch in evaluate.padded_batches(cache, rows, size, mesh=mesh, **reader_options(config)):
        sums = programs.eval_step(params, sharding.shard_batch(mesh, batch), programs.teacher)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    values = to_host(total.metrics()) if total else {}
    return {f"val_{k}": v for k, v in values.items()} if values.get("valid_tokens") else {}


def to_host(on_device: Any) -> dict[str, float]:
    """A step's numbers, without those that are not computed where there is no teacher."""
    values = {k: float(v) for k, v in jax.device_get(on_device).items()}
    return {k: v for k, v in values.items() if not np.isnan(v) or k in REQUIRED}


class Trace:
    """jax.profiler's trace of the steps after `steps[0]` up to `steps[1]`: of those of them that
    this process takes. It ends with the loop at the latest."""

    def __init__(self, folder: Path, steps: list[int] | None) -> None:
        self._folder, (self._first, self._last) = folder, steps or (0, 0)
        self._running = False

    def before(self, index: int) -> None:
        """`index` steps are done, the next one begins."""
        mine = self._first <= index < self._last and processes.is_primary_process()
        if mine and not self._running:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int) -> None:
        """`step` steps are done."""
        if self._running and step >= self._last:
            self._running = False
            jax.profiler.stop_trace()

    def edge(self, step: int) -> bool:
        """Whether the trace begins or ends after `step` steps: none may be under way then."""
        return step in (self._first, self._last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.after(self._last)


def begin(
    config: Config,
    programs: Programs,
    model: Decoder,
    saved: Checkpoints,
    mesh: Mesh,
    *,
    steps: int,
    what: str,
    resume_step: int | None,
    runs: int,
) -> tuple[int, TrainState]:
    """How many steps are done, and the state after them: of the newest checkpoint or of
    `resume_step`, the weights of `model` being freed; after none, of `model`."""

    def first_step() -> int:
        first = loop.first_step(saved, steps=steps, resume_step=resume_step)
        saves = loop.saves(config.train, first=first, steps=steps)
        saved.check_room(programs.state_bytes(), saves, runs=runs)
        return first

    first = processes.from_primary(first_step)
    if not first:
        offload = config.optimizer.offload
        return 0, make_state(model, programs.optimizer, mesh, offload=offload)[1]
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        leaf.delete()  # two states at once may not fit
    shapes = programs.shapes
    check_host_memory(shapes.params, shapes.opt_state)
    found = saved.restore(first, params=shapes.params, opt_state=shapes.opt_state)
    if resume_step is not None:
        saved.set_aside_after(first)
    say(f"{what}: resumed at step {first} of {steps}")
    step = jax.device_put(np.int32(first), shapes.step.sharding)
    return first, TrainState(step=step, **found)


class Dispatched(NamedTuple):
    """A step that the devices have been given: its rows, and its numbers once they are there."""

    step: int
    rows: np.ndarray
    numbers: Any


class Steps:
    """Dispatches steps, reads and logs what they came to.

    `mfu` (on a GPU that `peak_bf16_flops` knows) is the step's counted FLOPs, see
    `train_flops_per_token`, / (its seconds · devices · the GPU's peak). Memory: `peak_bytes_in_use`
    of the first device, where its runtime says, beside `planned_peak_bytes`, XLA's plan of the step
    and the batches read ahead; `peak_host_bytes` of this process.
    """

    def __init__(self, programs: Programs, mesh: Mesh, *, tokens: int, flops: float) -> None:
        self._train_step, self._teacher = programs.train_step, programs.teacher
        self._program: Any = None
        self._tokens, self._flops = tokens, flops
        self._device, self._devices = mesh.local_devices[0], mesh.size
        self._peak_flops = peak_bf16_flops(self._device.device_kind)
        self._once: dict[str, float] = {}
        self._planned, self._clock = 0, time.perf_counter()

    def dispatch(self, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """The state after a step and its numbers, both on their way. The first call compiles, and
        a GPU's kernels are chosen then."""
        if self._program is None:
            self.restart_clock()
            self._program = self._train_step.lower(state, batch, self._teacher).compile()
            seconds = time.perf_counter() - self._clock
            say(f"the step is compiled, in {seconds:,.1f} s, autotuning included")
            ahead = sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // self._devices
            self._planned = memory_of(self._program).peak + READ_AHEAD * ahead
            self._once = {"compile_seconds": seconds}
            self.restart_clock()
        return self._program(state, batch, self._teacher)

    def read(self, done: Dispatched, saved: Checkpoints) -> dict[str, float]:
        """Wait for a step and read its numbers.

        Raises:
            RunError: loss or gradient norm are not finite; names the step and the rows.
        """
        values = to_host(done.numbers)
        loop.check_step(values, done.step, done.rows, saved)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        values["tokens_per_second"] = self._tokens / seconds
        values["tflops_per_second"] = self._flops / seconds / 1e12
        if self._peak_flops:
            values["mfu"] = self._flops / seconds / (self._peak_flops * self._devices)
        values |= {"planned_peak_bytes": self._planned, "peak_host_bytes": peak_host_bytes()}
        memory = self._device.memory_stats() or {}
        values |= {key: memory[key] for key in ("peak_bytes_in_use",) if key in memory}
        values, self._once = values | self._once, {}
        return values

    def restart_clock(self) -> None:
        """What was done since the last step was read is not the next one's."""
        self._clock = time.perf_counter()


def _programs(
    config: Config,
    model: Decoder,
    cache: Manifest,
    mesh: Mesh,
    steps: int,
    vocab_size: int,
    teacher: Decoder | None,
) -> Programs:
    """What `fit` runs; a hidden-state loss gives `model` its projections here."""
    if hidden := config.loss.hidden_objective():
        live_width = teacher.config.hidden_size if teacher else None
        width, pairs = teacher_width(config, cache, live_width), len(hidden.pairs)
        add_projection(model, pairs=pairs, teacher_width=width, mesh=mesh, seed=config.seed)
    return make_programs(
        config,
        model,
        mesh,
        steps=steps,
        vocab_size=vocab_size,
        teacher=teacher,
        teacher_vocab_size=cache.vocab_size,
    )


def fit(
    config: Config,
    folder: Path,
    model: Decoder,
    *,
    caches: tuple[Cache, Cache],
    mesh: Mesh,
    steps: int,
    vocab_size: int,
    what: str,
    teacher: Decoder | None = None,
    resume_step: int | None = None,
    runs: int = 1,
) -> Decoder:
    """Train `model` for `steps` optimizer steps, from the newest checkpoint in `folder` on.
    `config.loss.hidden_layers` are pairs (`hidden_layers.with_pairs`); projections come and go
    here.

    metrics.jsonl and checkpoints/ are in `folder`. The model given is used up: its weights are
    donated to the first step. teacher: a live one. runs: see `Checkpoints.check_room`.

    Raises:
        RunError: the loss, or the validation loss, is not finite: names the step and the rows, and
            saves nothing of it. The checkpoint to resume from is damaged.
        UserError: the disk has no room for the checkpoints.
        Stopped: after SIGTERM or SIGINT, the state being saved.
    """
    train, length = config.train, caches[0].sequence_length
    tokens = train.batch_size * length
    flops = tokens * step_flops_per_token(model.config, teacher.config if teacher else None, length)
    programs = _programs(config, model, caches[0].manifest, mesh, steps, vocab_size, teacher)
    saved = Checkpoints(folder / "checkpoints", keep=train.keep, seed=config.seed)
    options: dict[str, Any] = {"steps": steps, "what": what, "resume_step": resume_step}
    first, state = begin(config, programs, model, saved, mesh, runs=runs, **options)
    del model
    if not evaluate.validation_rows(caches[1]).size:
        say("no validation rows to choose by: the best checkpoint is the last")
    metrics = None
    if processes.is_primary_process():
        metrics = Metrics(folder, resume_step=first, wandb=open_wandb(config, folder))
    progress = StepProgress(what, total=steps, done=first, tokens_per_step=tokens)
    trace = Trace(folder / "profile", train.profile_steps)
    run = Steps(programs, mesh, tokens=tokens, flops=flops)

    def log(done: Dispatched, values: dict[str, float]) -> None:
        if metrics and loop.due(train, done.step, steps).log:
            metrics.log(done.step, values)
        progress.update(done.step, values["loss"])

    say(f"{what}: compiling the step")
    with StopSignal() as stop, metrics or nullcontext(), progress, saved, trace:
        before, votes = None, processes.StopVotes()
        for index, rows, batch in batches(caches[0], config, mesh, first=first, steps=steps):
            trace.before(index)
            state, numbers = run.dispatch(state, batch)
            if before:
                log(before, run.read(before, saved))
            before = now = Dispatched(index + 1, rows, numbers)
            due, stopping = loop.due(train, now.step, steps), votes.after_step(stop.received)
            if not (due.save or stopping or trace.edge(now.step) or index == first):
                continue

            before, values = None, run.read(now, saved)  # the state after it is needed
            trace.after(now.step)
            if due.evaluate:
                values |= validation_means(programs, state.params, caches[1], config, mesh)
                loop.check_validation(values, now.step, rows, saved)
            log(now, values)
            # Read once: it may come between the save and the stop.
            stopping = stopping if processes.is_several() else stop.received
            if due.save or stopping:
                best_by = loop.best_by(values)
                saved.save(now.step, state.params, state.opt_state, validation=best_by)
                run.restart_clock()
            if stopping:
                raise loop.stopped(stopping, what, now.step, steps)
        stop.received = votes.at_end(stop.received)
        loop.check_stop(stop, what, steps)
    return without_projection(nnx.merge(programs.graphdef, state.params))
