"""From a teacher to a distilled student: `distil` is the whole job, a function a stage, `fit.fit`
the loop, and `python -m jax_distill.train` the command."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_distill import (
    by_source,
    doctor,
    evaluate,
    export,
    hf,
    loop,
    processes,
    samples,
    sharding,
    student,
    teacher,
    verify,
)
from jax_distill.attention import default_attention
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import user_cache_folder
from jax_distill.cache import Cache
from jax_distill.config import Config, as_dict, without_teacher
from jax_distill.disagreements import Disagreements
from jax_distill.fit import fit
from jax_distill.hidden_layers import with_pairs
from jax_distill.model import Decoder, ModelConfig, count_parameters
from jax_distill.model_folder import model_card
from jax_distill.run import Run
from jax_distill.teacher import load_teacher


def load_on_mesh(folder: Path, config: Config, mesh: Mesh) -> Decoder:
    """The student's first weights, each leaf straight to its shards."""
    return hf.load_model(
        folder,
        param_dtype=jnp.dtype(config.train.param_dtype),
        compute_dtype=jnp.dtype(config.train.compute_dtype),
        remat=config.train.remat,
        attention=config.train.attention_implementation,
        experts=config.train.experts,
        shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
        row_sharding=sharding.batch_sharding(mesh),
        seed=config.seed,
    )


def live_teacher(
    config: Config, folder: Path | None, vocab_size: int, cache: Cache, mesh: Mesh
) -> Decoder:
    """The teacher to run beside the student.

    Raises:
        UserError: it is not here, or has tokens that the student lacks.
    """
    if folder is None:
        raise UserError(
            f"expected a teacher that the decoder can run for teacher.mode {config.teacher.mode}, "
            f"got {config.teacher.path}; use teacher.mode offline"
        )
    if config.teacher.mode == "online_top_k":
        if config.cache.top_k > cache.manifest.vocab_size:
            raise UserError(
                f"expected cache.top_k up to the vocabulary, {cache.manifest.vocab_size}, got "
                f"{config.cache.top_k}; lower it"
            )
    elif vocab_size != cache.manifest.vocab_size:
        raise UserError(
            f"expected a student with the teacher's {cache.manifest.vocab_size} tokens for "
            f"teacher.mode online, got {vocab_size}; use teacher.mode online_top_k or offline, "
            "where the others fold into the tail"
        )
    say(f"teacher: loading {folder}, to run beside the student")
    return load_teacher(folder, config, mesh)


def check_train_cache(config: Config, teacher_folder: Path, cache: Cache, mesh: Mesh) -> None:
    """Before step 1: does this cache hold this teacher's targets, each at its own position?"""
    verdict = verify.check_cache(
        load_teacher(teacher_folder, config, mesh),
        cache,
        rows=config.teacher.batch_size,
        temperature=config.loss.temperature,
        mesh=mesh,
    )
    verify.require_match(verdict, cache)
    say(verdict.warning or verdict.line)


def final_evaluation(
    config: Config,
    teacher_folder: Path,
    start: Path,
    models: dict[str, Decoder],
    cache: Cache,
    mesh: Mesh,
    words: samples.Words,
) -> dict[str, Any]:
    """Teacher, student before, student and baseline on the rows nothing else looks at: the test
    table, samples and the positions of largest KL, as `loop.summary_of` takes them."""
    teacher_model = load_teacher(teacher_folder, config, mesh)
    students = {"student_before": load_on_mesh(start, config, mesh), **models}
    rows = evaluate.table_rows(cache)
    disagreements = Disagreements(words, cache)
    table = evaluate.test_table(
        teacher_model,
        students,
        cache,
        rows,
        batch_size=config.teacher.batch_size,
        chunk_size=config.loss.chunk_size,
        mesh=mesh,
        disagreements=disagreements,
    )
    evaluate.print_table(table)
    apart = {}
    for source, own in by_source.source_caches(config, teacher_folder).items():
        apart[source] = evaluate.test_table(
            teacher_model,
            students,
            own,
            np.arange(own.rows),
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
            mesh=mesh,
        )
        evaluate.print_table(apart[source], f"held out of {source}")
    written = samples.continuations(
        {"teacher": teacher_model, **students},
        cache,
        rows,
        words,
        count=config.evaluate.samples,
        new_tokens=config.evaluate.sample_tokens,
    )
    samples.print_samples(written)
    furthest = disagreements.found()
    shown = {"samples": written, "disagreements": furthest}
    return {"table": table, "shown": shown | ({"test_by_source": apart} if apart else {})}


class Job(NamedTuple):
    """What the stages after the first one work with.

    config: with hidden-state losses as pairs of layers. teacher_folder: None where the decoder
    cannot run it. start, folder: the student's first weights, and its own files.
    """

    config: Config
    teacher_folder: Path | None
    start: Path
    folder: Path
    architecture: ModelConfig
    train_cache: Cache
    heldout_cache: Cache


def prepare(config: Config, run: Run) -> Job:
    """The models' files; does this machine compute right? Then the teacher runs, once."""
    teacher_files, teacher_folder = processes.primary_first(lambda: teacher.teacher_folders(config))

    def student_folders(cache: Cache | None = None) -> tuple[Path, Path]:
        def made() -> list[str]:
            options: dict[str, Any] = {"trained": run.trained, "cache": cache}
            return [*map(str, student.prepare(config, run.path, teacher_files, **options))]

        start, folder = map(Path, processes.from_primary(made))
        return start, folder

    cut = config.student.from_teacher
    by_rows = cut is not None and cut.reads_rows  # what stays is measured over the cache's rows
    if by_rows:
        architecture = student.planned_architecture(config).model
    else:
        start, folder = student_folders()
        architecture = hf.model_config(hf.read_config(folder))
    models_run = [(architecture, config.train.compute_dtype)]
    depth = None
    if teacher_folder:
        teacher_model = hf.model_config(hf.read_config(teacher_folder))
        models_run.append((teacher_model, config.teacher.dtype))
        depth = teacher_model.num_hidden_layers
    config = with_pairs(config, student=architecture.num_hidden_layers, teacher=depth)
    if hidden := config.loss.hidden_objective():
        shown = ", ".join(f"{ours} to {theirs}" for ours, theirs in hidden.pairs)
        say(f"hidden states: {hidden.kind} of the student's layers to the teacher's, {shown}")
    doctor.check(config, models_run)
    train_cache, heldout_cache = teacher.write_caches(config)
    if by_rows:
        start, folder = student_folders(train_cache)
    run.use_cache(train_cache.fingerprint)
    return Job(config, teacher_folder, start, folder, architecture, train_cache, heldout_cache)


def check_end(job: Job, run: Run) -> None:
    """What the end would refuse is refused before training."""
    export.check_folder(run.path / "export", job.folder)
    if job.teacher_folder:
        evaluate.check_vocab_size(job.architecture.vocab_size, "student", job.heldout_cache)
        evaluate.check_targets(job.heldout_cache, evaluate.table_rows(job.heldout_cache))


def train_students(job: Job, run: Run, mesh: Mesh, vocab_size: int) -> dict[str, Decoder]:
    """The student, and the same without the teacher where `train.ce_baseline` says so."""
    config, live = job.config, None
    if config.teacher.is_live:
        live = live_teacher(config, job.teacher_folder, vocab_size, job.train_cache, mesh)
    shared: dict[str, Any] = {
        "caches": (job.train_cache, job.heldout_cache),
        "mesh": mesh,
        "steps": config.train.total_steps(job.train_cache.rows),
        "vocab_size": vocab_size,
    }
    say(f"student: loading {job.start}")
    model = fit(
        config,
        run.path,
        load_on_mesh(job.start, config, mesh),
        what="student",
        teacher=live,
        resume_step=config.train.resume_step,
        runs=1 + config.train.ce_baseline,
        **shared,
    )
    del live
    if not config.train.ce_baseline:
        return {"student": model}
    baseline = fit(
        without_teacher(config),
        run.path / "ce_baseline",
        load_on_mesh(job.start, config, mesh),
        what="CE-only student",
        **shared,
    )
    return {"student": model, "ce_baseline": baseline}


def finish(job: Job, run: Run, mesh: Mesh, models: dict[str, Decoder]) -> None:
    """The test table, the exported folder, summary and report."""
    config, model = job.config, models["student"]
    found: dict[str, Any] = {"table": {}}
    teacher_parameters = None
    if job.teacher_folder:
        rows = len(evaluate.table_rows(job.heldout_cache))
        say(f"test table: {len(models) + 2} models over {rows:,} rows of {job.heldout_cache.path}")
        words = samples.Words(job.folder)
        found = final_evaluation(
            config, job.teacher_folder, job.start, models, job.heldout_cache, mesh, words
        )
        of_teacher = hf.model_config(hf.read_config(job.teacher_folder))
        teacher_parameters = count_parameters(of_teacher)
    if not processes.is_primary_process():
        hf.send_weights(model)
        processes.wait_for_all()
        return
    summary = loop.summary_of(
        run,
        config,
        job.train_cache,
        steps=config.train.total_steps(job.train_cache.rows),
        **found,
        student_parameters=count_parameters(model.config),
        teacher_parameters=teacher_parameters,
    )
    fingerprint = job.train_cache.fingerprint
    card = model_card(summary=summary, config=as_dict(config), cache=fingerprint)
    say(f"export: {run.path}/export")
    export.write_folder(
        run.path / "export", model, student=job.folder, dtype=config.train.param_dtype, card=card
    )
    loop.finish(run, summary)
    processes.wait_for_all()


def distil(config: Config, run: Run, mesh: Mesh) -> None:
    """The whole job in order; what is on disk already is not made again."""
    job = prepare(config, run)
    config, cache = job.config, job.train_cache
    vocab_size = student.vocabulary_size(job.folder, cache)
    check_end(job, run)
    length, dtype = cache.sequence_length, jnp.dtype(config.train.compute_dtype)
    chosen = config.train.attention_implementation or default_attention(
        dtype, length, job.architecture.head_dim
    )
    say(f"attention: {chosen}, {length:,} positions a row, {dtype.name}")

    is_read = config.loss.reads_teacher and not config.teacher.is_live
    if job.teacher_folder and is_read and not run.trained:
        say(f"cache check: {job.teacher_folder} over rows of {cache.path}")
        check_train_cache(config, job.teacher_folder, cache, mesh)
    finish(job, run, mesh, train_students(job, run, mesh, vocab_size))


def main(config: Config) -> None:
    """Train as configured."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(user_cache_folder() / "xla"))
    with processes.started(**config.mesh.processes):
        mesh = sharding.make_mesh(**config.mesh.axes)
        sharding.check_rows(mesh, config.train.rows_per_micro_batch, "train.micro_batch_size")
        sharding.check_rows(mesh, config.teacher.batch_size, "teacher.batch_size")
        own: dict[str, Any] = {"backend": "jax", "is_writer": processes.is_primary_process()}
        with processes.primary_first(lambda: Run(config, **own)) as run:
            distil(config, run, mesh)
