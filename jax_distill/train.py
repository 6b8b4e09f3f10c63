"""`python -m jax_distill.train --config configs/x.yaml`: from a teacher to a distilled student.

What is missing is made, in order: the store (the teacher runs once), the student's first weights.
Then the gate, the loop, the held-out table, the export and the report. The same command resumes.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_distill import evaluate, export, hf, report, sharding, student, teacher
from jax_distill.cache import Store
from jax_distill.card import model_card
from jax_distill.checkpoint import Checkpoints
from jax_distill.config import (
    Config,
    Refusal,
    as_dict,
    cache_folder,
    load,
    run_command,
    without_teacher,
)
from jax_distill.data import row_indices
from jax_distill.devices import peak_bf16_flops
from jax_distill.model import Decoder
from jax_distill.optimizer import optimizer_of
from jax_distill.run import (
    Metrics,
    Run,
    StepProgress,
    Stopped,
    StopSignal,
    not_finite,
    read_metrics,
    say,
    write_json,
)
from jax_distill.step import (
    TrainState,
    make_eval_step,
    make_state,
    make_train_step,
    means,
    state_shapes,
    train_flops_per_token,
)

REQUIRED = ("loss", "gradient_norm")  # NaN elsewhere means: not computed without a teacher
READ_AHEAD = 2  # batches on the devices beside the one at work


def reader_knobs(config: Config) -> dict[str, Any]:
    """What `Store.read` needs to know of the configuration."""
    return {"temperature": config.loss.temperature, "top_k": config.cache.read_top_k}


def micro_batch_size(config: Config) -> int:
    """Rows per gradient pass."""
    return config.train.micro_batch_size or config.train.batch_size


def batches(
    store: Store, config: Config, mesh: Mesh, *, first: int, steps: int
) -> Iterator[tuple[int, np.ndarray, dict[str, Any]]]:
    """(step, rows, batch [A,B,T] on the devices) for steps first…steps−1, READ_AHEAD ahead."""
    batch_size = config.train.batch_size

    def read(step: int) -> tuple[int, np.ndarray, dict[str, Any]]:
        rows = row_indices(step, batch_size=batch_size, num_rows=store.rows, seed=config.seed)
        batch = store.read(rows, **reader_knobs(config))
        split = {k: v.reshape(-1, micro_batch_size(config), *v.shape[1:]) for k, v in batch.items()}
        return step, rows, sharding.place_batch(mesh, split, leading=1)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        soon = range(first, min(first + READ_AHEAD, steps))
        ahead = deque(pool.submit(read, step) for step in soon)
        for step in range(first, steps):
            ready = ahead.popleft().result()
            if step + READ_AHEAD < steps:
                ahead.append(pool.submit(read, step + READ_AHEAD))
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
    values = told(means(total)) if total else {}
    return {f"heldout_{k}": v for k, v in values.items()} if values.get("valid_tokens") else {}


def told(on_device: Any) -> dict[str, float]:
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
        if self._first <= index < self._last and not self._running:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int) -> None:
        """`step` steps are done."""
        if self._running and step >= self._last:
            self._running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.after(self._last)


def fit(
    config: Config,
    folder: Path,
    model: Decoder,
    *,
    stores: tuple[Store, Store],
    mesh: Mesh,
    steps: int,
    vocab_size: int,
    what: str,
) -> Decoder:
    """Train `model` for `steps` optimizer steps, from the newest checkpoint in `folder` on.

    metrics.jsonl and checkpoints/ lie in `folder`. The model given is used up: its weights are
    donated to the first step. `mfu` (on a card that `peak_bf16_flops` knows) is the step's counted
    operations, see `train_flops_per_token`, / (its seconds · devices · the card's peak).

    Raises:
        Failure: the loss, or the held-out one, is not finite; names the step and the rows. Nothing
            of it is saved.
        Stopped: after SIGTERM or SIGINT, the state being saved.
    """
    train, (train_store, heldout_store) = config.train, stores
    optimizer, schedule = optimizer_of(config.optimizer, steps=steps, seed=config.seed)
    tokens_per_step = train.batch_size * train_store.manifest.sequence_length
    flops = tokens_per_step * train_flops_per_token(
        model.config, train_store.manifest.sequence_length
    )
    graphdef, shapes = state_shapes(model, optimizer, mesh)
    train_step = make_train_step(
        graphdef,
        optimizer,
        schedule,
        loss=config.loss,
        vocab_size=vocab_size,
        places=jax.tree.map(lambda leaf: leaf.sharding, shapes),
        layerwise=config.optimizer.layerwise,
        seed=config.seed,
    )
    eval_step = make_eval_step(graphdef, loss=config.loss, vocab_size=vocab_size)

    checkpoints = Checkpoints(folder / "checkpoints", keep=train.keep, seed=config.seed)
    first = checkpoints.latest_step() or 0
    if first > steps:
        raise Refusal(
            f"expected train.steps of at least {first}, which are done, got {steps}; "
            "set another --output_dir for a shorter run"
        )
    if first:
        for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
            leaf.delete()  # two states at once may not fit
        found = checkpoints.restore(first, params=shapes.params, opt_state=shapes.opt_state)
        state = TrainState(step=jax.device_put(jnp.int32(first), shapes.step.sharding), **found)
        say(f"{what}: resumed at step {first} of {steps}")
    else:
        _, state = make_state(model, optimizer, mesh)
    del model
    if not evaluate.validation_rows(heldout_store).size:
        say("no held-out rows to choose by: the best checkpoint is the last")
    metrics = Metrics(folder, resume_step=first)
    progress = StepProgress(what, total=steps, done=first, tokens_per_step=tokens_per_step)
    trace = Trace(folder / "profile", train.profile_steps)
    peak = peak_bf16_flops(mesh.devices.flat[0].device_kind)
    clock = time.perf_counter()
    with StopSignal() as stop, metrics, progress, checkpoints, trace:
        for index, rows, batch in batches(train_store, config, mesh, first=first, steps=steps):
            trace.before(index)
            state, on_device = train_step(state, batch)
            values = told(on_device)
            step = index + 1
            trace.after(step)

            if not np.isfinite(values["loss"] + values["gradient_norm"]):
                broken = f"loss {values['loss']}, gradient norm {values['gradient_norm']}"
                raise not_finite(step, broken, rows, checkpoints.latest_step())
            if not values["valid_tokens"]:
                say(f"step {step}: no valid token in rows {rows.tolist()}: nothing was learned")
            now = time.perf_counter()
            values["tokens_per_second"] = tokens_per_step / (now - clock)
            values["tflops_per_second"] = flops / (now - clock) / 1e12
            if peak:
                values["mfu"] = flops / (now - clock) / (peak * mesh.size)
            clock = now

            at_eval = step == steps or bool(train.eval_every and step % train.eval_every == 0)
            at_save = at_eval or bool(train.save_every and step % train.save_every == 0)
            if at_eval:
                values |= heldout_means(eval_step, state.params, heldout_store, config, mesh)
                if not np.isfinite(values.get("heldout_loss", 0.0)):
                    broken = f"held-out loss {values['heldout_loss']} after it"
                    raise not_finite(step, broken, rows, checkpoints.latest_step())
            if at_eval or step % train.log_every == 0 or step == 1:
                metrics.log(step, values)
            stopping = stop.received  # read once: it may come between the save and the stop
            if at_save or stopping:
                checkpoints.save(
                    step,
                    state.params,
                    state.opt_state,
                    heldout=values.get("heldout_kl", values.get("heldout_loss")),
                )
            progress.update(step, values["loss"])
            if stopping:
                raise Stopped(f"{what}: {stopping} at step {step} of {steps}, state saved")
            if at_eval or at_save:
                clock = time.perf_counter()
        if stop.received:  # since the last step was saved
            raise Stopped(f"{what}: {stop.received} after step {steps} of {steps}, state saved")
    return nnx.merge(graphdef, state.params)


def load_on_mesh(folder: Path, config: Config, mesh: Mesh) -> Decoder:
    """The student's first weights, each leaf straight to its place."""
    return hf.load_model(
        folder,
        param_dtype=jnp.dtype(config.train.param_dtype),
        compute_dtype=jnp.dtype(config.train.compute_dtype),
        remat=config.train.remat,
        shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
        rows=sharding.batch_sharding(mesh),
        seed=config.seed,
    )


def load_teacher(folder: Path, config: Config, mesh: Mesh) -> Decoder:
    """The teacher in its own dtype, as the store was made with it."""
    dtype = jnp.dtype(config.teacher.dtype)
    return hf.load_model(
        folder,
        param_dtype=dtype,
        compute_dtype=dtype,
        shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
        rows=sharding.batch_sharding(mesh),
    )


def run_gate(config: Config, teacher_folder: Path, store: Store, mesh: Mesh) -> None:
    """Before step 1: does this store hold this teacher's targets, in their places?"""
    model = load_teacher(teacher_folder, config, mesh)
    # bf16 rounds differently in batches of another shape; fp32 leaves only the store's fp16 gaps.
    tolerance = 1e-3 if config.teacher.dtype == "float32" else 5e-2
    line = evaluate.identity_gate(
        model,
        store,
        rows=config.teacher.batch_size,
        temperature=config.loss.temperature,
        tolerance=tolerance,
        mesh=mesh,
    )
    say(line)


def final_table(
    config: Config,
    teacher_folder: Path,
    start: Path,
    models: dict[str, Decoder],
    store: Store,
    mesh: Mesh,
) -> dict[str, dict[str, float]]:
    """Teacher, student before, student and baseline on the rows nothing else looks at."""
    table = evaluate.heldout_table(
        load_teacher(teacher_folder, config, mesh),
        {"student_before": load_on_mesh(start, config, mesh), **models},
        store,
        evaluate.table_rows(store),
        batch_size=config.teacher.batch_size,
        chunk_size=config.loss.chunk_size,
        mesh=mesh,
    )
    evaluate.print_table(table)
    return table


def distil(config: Config, run: Run, mesh: Mesh) -> None:
    """The whole job in order, each line a fact on disk or a model in memory."""
    teacher_files, teacher_folder = teacher.teacher_folders(config)
    start, folder = student.prepare(config, run.path, teacher_files, trained=run.trained)
    train_store, heldout_store = teacher.write_stores(config)
    run.use_store(train_store.manifest.fingerprint)
    vocab_size = student.vocabulary_size(folder, train_store)
    export.check_folder(run.path / "export", folder)
    if teacher_folder:
        columns = hf.model_config(hf.read_config(folder)).vocab_size
        evaluate.check_columns(columns, "student", heldout_store)
        evaluate.check_targets(heldout_store, evaluate.table_rows(heldout_store))
    steps = config.train.steps or max(train_store.rows // config.train.batch_size, 1)
    if teacher_folder and config.loss.kl_weight and not run.trained:
        run_gate(config, teacher_folder, train_store, mesh)

    knobs: dict[str, Any] = {
        "stores": (train_store, heldout_store),
        "mesh": mesh,
        "steps": steps,
        "vocab_size": vocab_size,
    }
    model = fit(config, run.path, load_on_mesh(start, config, mesh), what="student", **knobs)
    models = {"student": model}
    if config.train.ce_baseline:
        models["ce_baseline"] = fit(
            without_teacher(config),
            run.path / "ce_baseline",
            load_on_mesh(start, config, mesh),
            what="CE-only student",
            **knobs,
        )
    table = {}
    if teacher_folder:
        table = final_table(config, teacher_folder, start, models, heldout_store, mesh)
    summary = {
        "heldout": table,
        "validation": last_heldout(run.path),
        "student_parameters": student.count_parameters(model.config),
        "teacher_parameters": teacher_folder
        and student.count_parameters(hf.model_config(hf.read_config(teacher_folder))),
        "steps": steps,
        "tokens_trained": steps * config.train.batch_size * train_store.manifest.sequence_length,
        "seconds": run.seconds,
        "cache": {
            "path": train_store.path,
            "tokens": train_store.tokens,
            "bytes_per_token": train_store.nbytes / max(train_store.tokens, 1),
        },
    }
    export.write_folder(
        run.path / "export",
        model,
        student=folder,
        dtype=config.train.param_dtype,
        card=model_card(
            summary=summary, config=as_dict(config), store=train_store.manifest.fingerprint
        ),
    )
    write_json(run.path / "summary.json", summary)
    report.write_report(run.path, summary)
    say(f"done in {summary['seconds']:,.0f} s: {run.path}/export, summary.json, report.html")


def last_heldout(folder: Path) -> dict[str, float]:
    """The last held-out means that training logged."""
    records = read_metrics(folder / "metrics.jsonl")
    last: dict[str, float] = next((r for r in reversed(records) if "heldout_loss" in r), {})
    return {key: value for key, value in last.items() if key.startswith("heldout_")}


def main(config: Config) -> None:
    """Train as configured; `python -m jax_distill.train` calls this with the command line's."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    mesh = sharding.make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp)
    sharding.check_rows(mesh, micro_batch_size(config), "train.micro_batch_size")
    sharding.check_rows(mesh, config.teacher.batch_size, "teacher.batch_size")
    with Run(config, backend="jax") as run:
        try:
            distil(config, run, mesh)
        except Stopped as stopped:
            say(f"{stopped}; the same command goes on from there")


if __name__ == "__main__":
    run_command(lambda argv: main(load(argv, "jax_distill.train")))
