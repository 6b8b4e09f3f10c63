"""`python -m torch_ref.train --config configs/x.yaml [--device cuda] [--compile]`: the same run.

The same configuration, cache, row order, loss, optimizer and run folder as `jax_distill.train`,
with transformers' own models. The caches must be there, made as configured (`python -m
jax_distill.teacher`, or `python -m torch_ref.teacher`); give this run its own --output_dir, and
--cache.path that of the caches. Re-run the same command to resume. What it cannot do as configured
is refused by name.

B rows of an optimizer step, T positions.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jax_distill import loop
from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import StepProgress, StopSignal, say
from jax_distill.base.errors import UserError
from jax_distill.batch import DRAWS, Batch
from jax_distill.cache import (
    Cache,
    refuse_other_cache,
    table_rows,
    teacher_fingerprint,
    validation_rows,
)
from jax_distill.config import Config, as_dict, flatten, load, without_teacher
from jax_distill.data import row_indices, vocabulary_of
from jax_distill.hidden_layers import PROJECTION, start_projection, teacher_width, with_pairs
from jax_distill.model_folder import model_card
from jax_distill.run import Metrics, Run
from jax_distill.sweep import sweep
from torch_ref.checkpoint import Checkpoints
from torch_ref.evaluate import test_table
from torch_ref.model import (
    Model,
    device_named,
    load_config,
    load_model,
    local_path,
    recompute_layers,
)
from torch_ref.optimizer import (
    clip_gradients,
    learning_rate_schedule,
    make_optimizer,
    set_learning_rate,
)
from torch_ref.routers import Routers
from torch_ref.step import Live, LossTask, StepSums, add, backward, loss_sums, means
from torch_ref.student import count_parameters, export, prepare_student
from torch_ref.teacher import default_device

# Fields that this program reads, that only the making of caches reads, or that change no number.
KNOWN = """
output_dir seed teacher.mode teacher.path teacher.dtype teacher.batch_size teacher.beyond_context
student.path student.from_teacher student.from_teacher.layers student.from_teacher.parameters
data.path data.format data.tokenizer data.sequence_length data.packing data.separate_documents
data.heldout_fraction data.max_rows data.max_heldout_rows cache.path cache.top_k cache.top_p
cache.read_top_k cache.sampling cache.samples cache.temperatures cache.shard_rows
loss.implementation loss.tail loss.divergence loss.jsd_beta loss.temperature loss.chunk_size
loss.kl_weight loss.ce_weight loss.z_loss_weight loss.router_weight loss.valid_first
loss.hidden_weight loss.hidden_kind loss.hidden_layers cache.hidden_layers optimizer.name
optimizer.learning_rate optimizer.schedule optimizer.warmup_steps optimizer.final_learning_rate
optimizer.weight_decay optimizer.b1 optimizer.b2 optimizer.clip_norm optimizer.offload
train.steps train.epochs train.batch_size train.micro_batch_size train.param_dtype
train.compute_dtype train.remat train.log_every train.eval_every train.save_every train.keep
train.resume_step train.ce_baseline train.ce_baseline_learning_rate
""".split()


def refuse_unknown(config: Config) -> None:
    """UserError naming the first field that is set to what torch_ref does not do."""
    values, defaults = flatten(as_dict(config)), flatten(as_dict(Config()))
    for key, value in values.items():
        if key not in KNOWN and value != defaults.get(key):
            raise UserError(
                f"expected {key} {defaults.get(key)} in torch_ref, got {value}; leave it, or use "
                "python -m jax_distill.train"
            )
    train = config.train
    if train.remat == "dots":
        raise UserError(
            "expected train.remat none or layer in torch_ref, got dots; set one of them"
        )
    if train.param_dtype == "bfloat16":
        raise UserError(
            "expected train.param_dtype float32 in torch_ref, which has no stochastic rounding, "
            "got bfloat16; leave it, or use python -m jax_distill.train"
        )


def loss_task(
    config: Config,
    vocab_size: int,
    cache: Cache,
    *,
    routers: Routers,
    teacher: Model | None = None,
    projection: torch.Tensor | None = None,
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
        projection,
        routers,
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


def layer_count(config: Any) -> int:
    """Of a model's configuration."""
    return int(config.get_text_config().num_hidden_layers)


def read_batch(cache: Cache, rows: np.ndarray, config: Config) -> Batch:
    """Rows of a cache with the targets as configured."""
    if config.teacher.is_live:
        return cache.read(rows, targets=False)
    hidden = config.loss.hidden_objective()
    return cache.read(
        rows,
        temperature=config.loss.temperature,
        top_k=config.cache.read_top_k,
        hidden_layers=hidden.teacher_layers if hidden else (),
    )


@torch.no_grad()
def validation_means(
    model: Model, cache: Cache, config: Config, task: LossTask
) -> dict[str, float]:
    """The training objective on the validation rows, per valid token."""
    rows = validation_rows(cache)
    size = config.train.micro_batch_size or config.train.batch_size
    total: StepSums | None = None
    for first in range(0, len(rows), size):
        batch = read_batch(cache, rows[first : first + size], config)
        total = add(total, loss_sums(model, batch, task))
    values = means(total) if total else {}
    return {f"val_{k}": v for k, v in values.items()} if values.get("valid_tokens") else {}


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
    train, options, (train_cache, heldout_cache) = config.train, config.optimizer, caches
    schedule = learning_rate_schedule(
        options.schedule,
        learning_rate=options.learning_rate,
        final=options.final_learning_rate,
        warmup_steps=options.warmup_steps,
        steps=steps,
    )
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    projection = make_projection(config, model, train_cache, teacher)
    if projection is not None:
        parameters[PROJECTION] = projection
    optimizer = make_optimizer(
        options.name,
        parameters,
        b1=options.b1,
        b2=options.b2,
        weight_decay=options.weight_decay,
    )
    if train.remat == "layer":
        recompute_layers(model)
    checkpoints = Checkpoints(folder / "checkpoints", keep=train.keep, seed=config.seed)
    first = loop.first_step(checkpoints, steps=steps, resume_step=resume_step)
    if first:
        checkpoints.restore(first, parameters, optimizer)
        if resume_step is not None:
            checkpoints.set_aside_after(first)
        say(f"{what}: resumed at step {first} of {steps}")
    routers = Routers(model, config.loss.router_weight)
    task = loss_task(
        config, vocab_size, train_cache, routers=routers, teacher=teacher, projection=projection
    )
    micro = train.micro_batch_size or train.batch_size
    tokens = train.batch_size * train_cache.manifest.sequence_length
    progress = StepProgress(what, total=steps, done=first, tokens_per_step=tokens)
    with StopSignal() as stop, Metrics(folder, resume_step=first) as metrics, progress:
        for index in range(first, steps):
            begin = time.perf_counter()
            rows = row_indices(
                index,
                batch_size=train.batch_size,
                num_rows=train_cache.rows,
                seed=config.seed,
            )
            batch = read_batch(train_cache, rows, config)
            sums = backward(model, batch, task, micro_batch_size=micro)
            norm = clip_gradients(parameters.values(), options.clip_norm)
            values = means(sums) | routers.metrics()
            values["gradient_norm"] = norm.item()
            values["learning_rate"] = schedule(index)
            step = index + 1
            loop.check_step(values, step, rows, checkpoints)
            set_learning_rate(optimizer, values["learning_rate"])
            optimizer.step()
            model.zero_grad()  # validation can use their memory
            values["tokens_per_second"] = tokens / (time.perf_counter() - begin)
            due = loop.due(train, step, steps)
            if due.evaluate:
                values |= validation_means(model, heldout_cache, config, task)
                loop.check_validation(values, step, rows, checkpoints)
            if due.log:
                metrics.log(step, values)
            stopping = stop.received  # read once: it may come between the save and the stop
            if due.save or stopping:
                checkpoints.save(step, parameters, optimizer, validation=loop.best_by(values))
            progress.update(step, values["loss"])
            if stopping:
                raise loop.stopped(stopping, what, step, steps)
        loop.check_stop(stop, what, steps)
    model.eval()


def student_vocabulary(model: Model, folder: Path, cache: Cache) -> int:
    """Real rows of the student's head; raises as `Cache.student_length` does."""
    embedding: Any = model.get_input_embeddings()
    size = embedding.num_embeddings
    return min(cache.student_length(size, vocabulary_of(folder), str(folder)), size)


def live_teacher(config: Config, cache: Cache) -> tuple[str | None, str]:
    """(`teacher.path`, for what needs the live teacher, or None where the cache alone teaches; why
    it is not here).

    Raises:
        UserError: the cache was made with another teacher.
    """
    if not config.teacher.path:
        return None, ""
    try:
        path = local_path(config.teacher.path)
    except UserError as error:
        return None, str(error)
    if cache.manifest.top_k:
        wanted = replace(cache.manifest, teacher_fingerprint=teacher_fingerprint(path))
        refuse_other_cache(cache.path, cache.manifest, wanted)
    return config.teacher.path, ""


def refuse_other_settings(cache: Cache, split: str, config: Config) -> None:
    """What config.yaml and the model card of a run state is what its cache was made with.

    Raises:
        UserError: naming the settings that differ, with both values.
    """
    made, text = cache.manifest, config.data
    rows = text.max_heldout_rows if split == "heldout" else text.max_rows
    settings = text.row_settings() | {"max_rows": rows}
    optional = "separate_documents"  # in a manifest only where it is false
    data = {key: settings.get(key, value) for key, value in made.data.items()}
    data.pop(optional, None)
    data |= {key: value for key, value in settings.items() if key == optional}
    wanted = replace(made, sequence_length=text.sequence_length, data=data)
    if made.top_k:
        targets = config.cache.stored_targets(text.sequence_length)
        hidden = {key: shape for key, shape in made.optional.items() if key != DRAWS}
        targets["optional"] |= hidden
        wanted = replace(wanted, **targets, teacher_dtype=config.teacher.dtype)
    refuse_other_cache(cache.path, made, wanted)


def open_caches(config: Config) -> tuple[Cache, Cache]:
    """`<cache.path>/train` and `/heldout`, finished, made as configured, with a teacher if the loss
    needs one."""
    splits = ("train", "heldout")
    caches = tuple(Cache.open(f"{config.cache.path}/{split}") for split in splits)
    for split, cache in zip(splits, caches, strict=True):
        cache.require_complete()
        if config.loss.kl_weight and not (cache.manifest.top_k or config.teacher.is_live):
            raise UserError(
                f"expected a cache with a teacher at {cache.path}, got rows alone; run "
                "python -m torch_ref.teacher, or set loss.kl_weight 0 and loss.ce_weight 1"
            )
        refuse_other_settings(cache, split, config)
    return caches[0], caches[1]


def distil(config: Config, run: Run, *, device: str, compiled: bool) -> None:
    """The whole job in order."""
    caches = open_caches(config)
    train_cache, heldout_cache = caches
    run.use_cache(train_cache.manifest.fingerprint)
    teacher_path, missing = live_teacher(config, train_cache)
    start, folder = prepare_student(config, run.path, teacher_path, trained=run.trained)
    steps = config.train.total_steps(train_cache.rows)

    def student() -> Model:
        model = load_model(start, dtype=config.train.param_dtype, device=device)
        if compiled:
            model.base_model.compile()
        return model

    model = student()
    vocab_size = student_vocabulary(model, folder, train_cache)
    depth = None if teacher_path is None else layer_count(load_config(teacher_path))
    config = with_pairs(config, student=layer_count(model.config), teacher=depth)
    if missing:
        say(
            "training from the cache alone, without the test table, which needs the live teacher: "
            + missing
        )
    options: dict[str, Any] = {"caches": caches, "steps": steps, "vocab_size": vocab_size}
    live = None
    if config.teacher.is_live:
        if missing:
            mode = config.teacher.mode
            raise UserError(f"{missing}; it runs beside the student with teacher.mode {mode}")
        assert teacher_path
        live = load_model(teacher_path, dtype=config.teacher.dtype, device=device)
        say(f"teacher: {teacher_path}, beside the student")
    fit(
        config,
        run.path,
        model,
        what="student",
        teacher=live,
        resume_step=config.train.resume_step,
        **options,
    )
    models = {"student_before": student(), "student": model}
    if config.train.ce_baseline:
        baseline = models["ce_baseline"] = student()
        baseline_folder = run.path / "ce_baseline"
        fit(without_teacher(config), baseline_folder, baseline, what="CE-only student", **options)
    table: dict[str, dict[str, float]] = {}
    if teacher_path:
        teacher = load_model(teacher_path, dtype=config.teacher.dtype, device=device)
        table = test_table(
            {"teacher": teacher, **models},
            heldout_cache,
            table_rows(heldout_cache),
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
        )
        for name, row in table.items():
            shown = ", ".join(f"{key} {value:.4f}" for key, value in row.items())
            say(f"test table, {name}: {shown}")
    summary = loop.summary_of(
        run,
        config,
        train_cache,
        steps=steps,
        table=table,
        student_parameters=count_parameters(model),
        teacher_parameters=count_parameters(teacher) if teacher_path else None,
    )
    card = model_card(
        summary=summary,
        config=as_dict(config),
        cache=train_cache.manifest.fingerprint,
        program="jax_distill's torch_ref",
    )
    export(model, folder, run.path / "export", card=card)
    loop.finish(run, summary)


def main(argv: Sequence[str]) -> int | None:
    """Train as configured, with PyTorch."""
    parser = CommandLine("torch_ref.train", add_help=False)
    parser.add_argument("--device", type=device_named, default=default_device(), help="cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="compile the decoder")
    options, rest = parser.parse_known_args(argv)
    if "--help" in rest:
        parser.print_help()
    if "--sweep" in rest:
        own = ["--device", options.device, *["--compile"] * options.compile]
        return sweep("torch_ref.train", rest, own)
    config = load(rest, "torch_ref.train")
    refuse_unknown(config)
    with Run(config, backend="torch") as run:
        distil(config, run, device=options.device, compiled=options.compile)
    return None


if __name__ == "__main__":
    run_command(main)
