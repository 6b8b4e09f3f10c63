"""`python -m torch_ref.train --config configs/x.yaml [--device cuda] [--compile]`: the same run.

The same configuration, store, row order, loss, optimizer and run folder as `jax_distill.train`,
with transformers' own models. The stores must be there, made as configured (`python -m
jax_distill.teacher`, or `python -m torch_ref.teacher`); give this run its own --output_dir, and
--cache.path that of the stores. The same command resumes. What it cannot do as configured is
refused by name.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jax_distill import report
from jax_distill.cache import Store, teacher_fingerprint
from jax_distill.card import model_card
from jax_distill.config import (
    CommandLine,
    Config,
    Refusal,
    as_dict,
    load,
    run_command,
    without_teacher,
)
from jax_distill.data import row_indices, vocabulary_of
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
from torch_ref.checkpoint import Checkpoints
from torch_ref.evaluate import heldout_table, table_rows, validation_rows
from torch_ref.losses import LossSums
from torch_ref.model import Model, device_named, load_model, place_of, recompute_layers
from torch_ref.optimizer import Optimizer, global_norm, learning_rate_schedule
from torch_ref.step import add, batch_gradients, loss_sums, means
from torch_ref.student import count_parameters, export, prepare_student
from torch_ref.teacher import default_device

# Fields that this program reads, that only the making of stores reads, or that change no number.
KNOWN = """
output_dir seed teacher.path teacher.dtype teacher.batch_size student.path student.from_teacher
student.from_teacher.layers student.from_teacher.parameters data.path data.format data.tokenizer
data.sequence_length data.packing data.heldout_fraction data.max_rows data.max_heldout_rows
cache.path cache.top_k cache.read_top_k cache.temperatures cache.shard_rows loss.implementation
loss.tail loss.divergence loss.jsd_beta loss.temperature loss.chunk_size loss.kl_weight
loss.ce_weight loss.z_loss_weight loss.valid_first optimizer.name optimizer.learning_rate
optimizer.schedule optimizer.warmup_steps optimizer.final_learning_rate optimizer.weight_decay
optimizer.b1 optimizer.b2 optimizer.clip_norm train.steps train.batch_size train.micro_batch_size
train.param_dtype train.compute_dtype train.remat train.log_every train.eval_every train.save_every
train.keep train.ce_baseline train.ce_baseline_learning_rate
""".split()


def refuse_unknown(config: Config) -> None:
    """Refusal naming the first field that is set to what torch_ref does not do."""
    values, defaults = _flat(as_dict(config)), _flat(as_dict(Config()))
    for key, value in values.items():
        if key not in KNOWN and value != defaults.get(key):
            raise Refusal(
                f"expected {key} {defaults.get(key)} in torch_ref, got {value}; leave it, or use "
                "python -m jax_distill.train"
            )
    train = config.train
    if train.remat == "dots":
        raise Refusal("expected train.remat none or layer in torch_ref, got dots; set one of them")
    if train.param_dtype == "bfloat16":
        raise Refusal(
            "expected train.param_dtype float32 in torch_ref, which cannot round updates by "
            "chance, got bfloat16; leave it, or use python -m jax_distill.train"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def reader_knobs(config: Config) -> dict[str, Any]:
    """What `Store.read` needs to know of the configuration."""
    return {"temperature": config.loss.temperature, "top_k": config.cache.read_top_k}


def step_knobs(config: Config, vocab_size: int) -> dict[str, Any]:
    """What the step functions need to know of the configuration."""
    compute_dtype = getattr(torch, config.train.compute_dtype)
    return {"loss": config.loss, "vocab_size": vocab_size, "compute_dtype": compute_dtype}


@torch.no_grad()
def heldout_means(model: Model, store: Store, config: Config, vocab_size: int) -> dict[str, float]:
    """The training objective on the validation rows, from stored targets, per valid token."""
    rows = validation_rows(store)
    size = config.train.micro_batch_size or config.train.batch_size
    total: LossSums | None = None
    for first in range(0, len(rows), size):
        batch = store.read(rows[first : first + size], **reader_knobs(config))
        total = add(total, loss_sums(model, batch, **step_knobs(config, vocab_size)))
    values = means(total) if total else {}
    return {f"heldout_{k}": v for k, v in values.items()} if values.get("valid_tokens") else {}


def fit(
    config: Config,
    folder: Path,
    model: Model,
    *,
    stores: tuple[Store, Store],
    steps: int,
    vocab_size: int,
    what: str,
) -> None:
    """Train `model` in place for `steps` optimizer steps, from the newest checkpoint in `folder`.

    Raises:
        Failure: the loss, or the held-out one, is not finite; names the step and the rows. Nothing
            of it is saved.
        Stopped: after SIGTERM or SIGINT, the state being saved.
    """
    train, wanted, (train_store, heldout_store) = config.train, config.optimizer, stores
    schedule = learning_rate_schedule(
        wanted.schedule,
        learning_rate=wanted.learning_rate,
        final=wanted.final_learning_rate,
        warmup_steps=wanted.warmup_steps,
        steps=steps,
    )
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    optimizer = Optimizer(
        wanted.name,
        parameters,
        b1=wanted.b1,
        b2=wanted.b2,
        weight_decay=wanted.weight_decay,
        clip_norm=wanted.clip_norm,
    )
    if train.remat == "layer":
        recompute_layers(model)
    checkpoints = Checkpoints(folder / "checkpoints", keep=train.keep, seed=config.seed)
    first = checkpoints.latest_step() or 0
    if first > steps:
        raise Refusal(
            f"expected train.steps of at least {first}, which are done, got {steps}; "
            "set another --output_dir for a shorter run"
        )
    if first:
        checkpoints.restore(first, parameters, optimizer)
        say(f"{what}: resumed at step {first} of {steps}")
    tokens = train.batch_size * train_store.manifest.sequence_length
    progress = StepProgress(what, total=steps, done=first, tokens_per_step=tokens)
    with StopSignal() as stop, Metrics(folder, resume_step=first) as metrics, progress:
        for index in range(first, steps):
            begin = time.perf_counter()
            rows = row_indices(
                index,
                batch_size=train.batch_size,
                num_rows=train_store.rows,
                seed=config.seed,
            )
            batch = train_store.read(rows, **reader_knobs(config))
            gradients, sums = batch_gradients(
                model,
                batch,
                micro_batch_size=train.micro_batch_size or train.batch_size,
                **step_knobs(config, vocab_size),
            )
            values = means(sums)
            values["gradient_norm"] = global_norm(gradients).item()
            values["learning_rate"] = schedule(index)
            step = index + 1
            if not np.isfinite(values["loss"] + values["gradient_norm"]):
                broken = f"loss {values['loss']}, gradient norm {values['gradient_norm']}"
                raise not_finite(step, broken, rows, checkpoints.latest_step())
            if not values["valid_tokens"]:
                say(f"step {step}: no valid token in rows {rows.tolist()}: nothing was learned")
            optimizer.step(gradients, values["learning_rate"])
            del gradients
            values["tokens_per_second"] = tokens / (time.perf_counter() - begin)
            at_eval = step == steps or bool(train.eval_every and step % train.eval_every == 0)
            at_save = at_eval or bool(train.save_every and step % train.save_every == 0)
            if at_eval:
                values |= heldout_means(model, heldout_store, config, vocab_size)
                if not np.isfinite(values.get("heldout_loss", 0.0)):
                    broken = f"held-out loss {values['heldout_loss']} after it"
                    raise not_finite(step, broken, rows, checkpoints.latest_step())
            if at_eval or step % train.log_every == 0 or step == 1:
                metrics.log(step, values)
            stopping = stop.received  # read once: it may come between the save and the stop
            if at_save or stopping:
                heldout = values.get("heldout_kl", values.get("heldout_loss"))
                checkpoints.save(step, parameters, optimizer, heldout=heldout)
            progress.update(step, values["loss"])
            if stopping:
                raise Stopped(f"{what}: {stopping} at step {step} of {steps}, state saved")
        if stop.received:  # since the last step was saved
            raise Stopped(f"{what}: {stop.received} after step {steps} of {steps}, state saved")
    model.eval()


def student_vocabulary(model: Model, folder: Path, store: Store) -> int:
    """Real columns of the student's head; raises as `Store.student_length` does."""
    embedding: Any = model.get_input_embeddings()
    columns = embedding.num_embeddings
    return min(store.student_length(columns, vocabulary_of(folder), str(folder)), columns)


def live_teacher(config: Config, store: Store) -> tuple[str | None, str]:
    """(`teacher.path`, for what needs the live teacher, or None where the store alone teaches; why
    it is not here).

    Raises:
        Refusal: the store was made with another teacher.
    """
    if not config.teacher.path:
        return None, ""
    try:
        place = place_of(config.teacher.path)
    except Refusal as refusal:
        return None, str(refusal)
    found, stored = teacher_fingerprint(place), store.manifest.teacher_fingerprint
    if store.manifest.top_k and found != stored:
        raise Refusal(
            f"expected the teacher that the store at {store.path} was made with (fingerprint "
            f"{stored}), got {found} at {place}; give another cache.path, or that teacher"
        )
    return config.teacher.path, ""


def refuse_other_settings(store: Store, split: str, config: Config) -> None:
    """What a run says of itself, in config.yaml and on the model card, is what its store holds.

    Raises:
        Refusal: naming the first setting that the store was made otherwise with.
    """
    made, text, cache = store.manifest, config.data, config.cache
    settings: dict[str, tuple[Any, Any]] = {
        "data.sequence_length": (made.sequence_length, text.sequence_length)
    }
    for key in ("format", "packing", "heldout_fraction", "max_rows"):
        field = "max_heldout_rows" if (key, split) == ("max_rows", "heldout") else key
        if key in made.data:
            settings[f"data.{field}"] = made.data[key], getattr(text, field)
    if made.top_k:
        settings["cache.top_k"] = made.top_k, cache.top_k
        settings["cache.temperatures"] = list(made.temperatures), list(cache.temperatures)
        settings["teacher.dtype"] = made.teacher_dtype, config.teacher.dtype
    for name, (stored, wanted) in settings.items():
        if stored != wanted:
            raise Refusal(
                f"expected {name} {stored}, with which the store at {store.path} was made, got "
                f"{wanted}; set it so, or give the cache.path of a store made with {wanted}"
            )


def open_stores(config: Config) -> tuple[Store, Store]:
    """`<cache.path>/train` and `/heldout`, finished, made as configured, with a teacher if the loss
    needs one."""
    splits = ("train", "heldout")
    stores = tuple(Store.open(f"{config.cache.path}/{split}") for split in splits)
    for split, store in zip(splits, stores, strict=True):
        store.require_complete()
        if config.loss.kl_weight and not store.manifest.top_k:
            raise Refusal(
                f"expected a store with a teacher at {store.path}, got rows alone; run "
                "python -m torch_ref.teacher, or set loss.kl_weight 0 and loss.ce_weight 1"
            )
        refuse_other_settings(store, split, config)
    return stores[0], stores[1]


def distil(config: Config, run: Run, *, device: str, compiled: bool) -> None:
    """The whole job in order."""
    stores = open_stores(config)
    train_store, heldout_store = stores
    run.use_store(train_store.manifest.fingerprint)
    teacher_path, missing = live_teacher(config, train_store)
    start, folder = prepare_student(config, run.path, teacher_path, trained=run.trained)
    steps = config.train.steps or max(train_store.rows // config.train.batch_size, 1)

    def student() -> Model:
        model = load_model(start, dtype=config.train.param_dtype, device=device)
        if compiled:
            model.base_model.compile()
        return model

    model = student()
    vocab_size = student_vocabulary(model, folder, train_store)
    if missing:
        say(
            "the store alone teaches, without held-out table, which needs the live teacher: "
            + missing
        )
    knobs: dict[str, Any] = {"stores": stores, "steps": steps, "vocab_size": vocab_size}
    fit(config, run.path, model, what="student", **knobs)
    models = {"student_before": student(), "student": model}
    if config.train.ce_baseline:
        baseline = models["ce_baseline"] = student()
        place = run.path / "ce_baseline"
        fit(without_teacher(config), place, baseline, what="CE-only student", **knobs)
    table: dict[str, dict[str, float]] = {}
    if teacher_path:
        teacher = load_model(teacher_path, dtype=config.teacher.dtype, device=device)
        table = heldout_table(
            {"teacher": teacher, **models},
            heldout_store,
            table_rows(heldout_store),
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
        )
        for name, row in table.items():
            shown = ", ".join(f"{key} {value:.4f}" for key, value in row.items())
            say(f"held-out text, {name}: {shown}")
    records = read_metrics(run.path / "metrics.jsonl")
    last: dict[str, Any] = next((r for r in reversed(records) if "heldout_loss" in r), {})
    summary = {
        "heldout": table,
        "validation": {k: v for k, v in last.items() if k.startswith("heldout_")},
        "student_parameters": count_parameters(model),
        "teacher_parameters": count_parameters(teacher) if teacher_path else None,
        "steps": steps,
        "tokens_trained": steps * config.train.batch_size * train_store.manifest.sequence_length,
        "seconds": run.seconds,
        "cache": {
            "path": train_store.path,
            "tokens": train_store.tokens,
            "bytes_per_token": train_store.nbytes / max(train_store.tokens, 1),
        },
    }
    card = model_card(
        summary=summary,
        config=as_dict(config),
        store=train_store.manifest.fingerprint,
        program="jax_distill's torch_ref",
    )
    export(model, folder, run.path / "export", card=card)
    write_json(run.path / "summary.json", summary)
    report.write_report(run.path, summary)
    say(f"done in {summary['seconds']:,.0f} s: {run.path}/export, summary.json, report.html")


def main(argv: Sequence[str]) -> None:
    """Train as configured, with PyTorch."""
    parser = CommandLine("torch_ref.train", add_help=False)
    parser.add_argument("--device", type=device_named, default=default_device(), help="cpu or cuda")
    parser.add_argument("--compile", action="store_true", help="compile the decoder")
    options, rest = parser.parse_known_args(argv)
    if "--help" in rest:
        parser.print_help()
    config = load(rest, "torch_ref.train")
    refuse_unknown(config)
    with Run(config, backend="torch") as run:
        try:
            distil(config, run, device=options.device, compiled=options.compile)
        except Stopped as stopped:
            say(f"{stopped}; the same command goes on from there")


if __name__ == "__main__":
    run_command(main)
