"""`python -m torch_ref.train --config configs/x.yaml [--device cuda] [--compile]`: the same run.

The same configuration, cache, row order, loss, optimizer and run folder as `jax_distill.train`,
with transformers' own models. The caches must be there, made as configured (`python -m
jax_distill.teacher`, or `python -m torch_ref.teacher`); give this run its own --output_dir, and
--cache.path that of the caches. Re-run the same command to resume. What it cannot do as configured
is refused by name.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_distill import loop
from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.batch import DRAWS
from jax_distill.cache import Cache, refuse_other_cache, table_rows, teacher_fingerprint
from jax_distill.config import Config, as_dict, flatten, load, without_teacher
from jax_distill.data import vocabulary_of
from jax_distill.hidden_layers import with_pairs
from jax_distill.model_folder import model_card
from jax_distill.run import Run
from jax_distill.sweep import sweep
from torch_ref.evaluate import test_table
from torch_ref.fit import fit
from torch_ref.model import Model, device_named, load_config, load_model, local_path
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
train.resume_step train.ce_baseline train.ce_baseline_learning_rate train.wandb
student.from_teacher.calibration_rows
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
    train, cut = config.train, config.student.from_teacher
    if cut and cut.reads_rows:
        raise UserError(
            "expected student.from_teacher.layers or .parameters alone in torch_ref, which has no "
            "importance, got a cut by importance; use python -m jax_distill.train"
        )
    if train.remat == "dots":
        raise UserError(
            "expected train.remat none or layer in torch_ref, got dots; set one of them"
        )
    if train.param_dtype == "bfloat16":
        raise UserError(
            "expected train.param_dtype float32 in torch_ref, which has no stochastic rounding, "
            "got bfloat16; leave it, or use python -m jax_distill.train"
        )


def layer_count(config: Any) -> int:
    """Of a model's configuration."""
    return int(config.get_text_config().num_hidden_layers)


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


def load_beside(config: Config, path: str | None, missing: str, device: str) -> Model | None:
    """The teacher that runs beside the student, where the mode is one that wants it.

    Raises:
        UserError: it is not here, for the reason `missing`.
    """
    if missing:
        say(
            "training from the cache alone, without the test table, which needs the live teacher: "
            + missing
        )
    if not config.teacher.is_live:
        return None
    if missing:
        mode = config.teacher.mode
        raise UserError(f"{missing}; it runs beside the student with teacher.mode {mode}")
    assert path
    model = load_model(path, dtype=config.teacher.dtype, device=device)
    say(f"teacher: {path}, beside the student")
    return model


def final_table(
    config: Config, models: dict[str, Model], cache: Cache
) -> dict[str, dict[str, float]]:
    """Teacher, student before, student and baseline on the rows nothing else looks at."""
    table = test_table(
        models,
        cache,
        table_rows(cache),
        batch_size=config.teacher.batch_size,
        chunk_size=config.loss.chunk_size,
    )
    for name, row in table.items():
        shown = ", ".join(f"{key} {value:.4f}" for key, value in row.items())
        say(f"test table, {name}: {shown}")
    return table


def distil(config: Config, run: Run, *, device: str, compiled: bool) -> None:
    """The whole job in order."""
    # 1. The caches, and the models' files.
    caches = open_caches(config)
    train_cache, heldout_cache = caches
    run.use_cache(train_cache.fingerprint)
    teacher_path, missing = live_teacher(config, train_cache)
    start, folder = prepare_student(config, run.path, teacher_path, trained=run.trained)

    def student() -> Model:
        model = load_model(start, dtype=config.train.param_dtype, device=device)
        if compiled:
            model.base_model.compile()
        return model

    model = student()
    depth = None if teacher_path is None else layer_count(load_config(teacher_path))
    config = with_pairs(config, student=layer_count(model.config), teacher=depth)

    # 2. Training, and the same without the teacher.
    steps = config.train.total_steps(train_cache.rows)
    vocab_size = student_vocabulary(model, folder, train_cache)
    shared: dict[str, Any] = {"caches": caches, "steps": steps, "vocab_size": vocab_size}
    live, step = load_beside(config, teacher_path, missing, device), config.train.resume_step
    fit(config, run.path, model, what="student", teacher=live, resume_step=step, **shared)
    models = {"student_before": student(), "student": model}
    if config.train.ce_baseline:
        baseline = models["ce_baseline"] = student()
        baseline_folder = run.path / "ce_baseline"
        fit(without_teacher(config), baseline_folder, baseline, what="CE-only student", **shared)

    # 3. The test table, the exported folder, summary and report.
    table, teacher_parameters = {}, None
    if teacher_path:
        teacher = load_model(teacher_path, dtype=config.teacher.dtype, device=device)
        table = final_table(config, {"teacher": teacher, **models}, heldout_cache)
        teacher_parameters = count_parameters(teacher)
    summary = loop.summary_of(
        run,
        config,
        train_cache,
        steps=steps,
        table=table,
        student_parameters=count_parameters(model),
        teacher_parameters=teacher_parameters,
    )
    fingerprint, program = train_cache.fingerprint, "jax_distill's torch_ref"
    card = model_card(summary=summary, config=as_dict(config), cache=fingerprint, program=program)
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
