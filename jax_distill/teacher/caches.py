"""Both caches of a configuration: which ones are wanted, and whether they are there already."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jax_distill import data, hf, processes, sharding
from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import find_path
from jax_distill.base.versions import git_revision, versions
from jax_distill.cache import (
    Cache,
    Location,
    Manifest,
    read_manifest,
    refuse_other_cache,
    resume_point,
    teacher_fingerprint,
    vocabulary_conflict,
)
from jax_distill.config import Config, Source
from jax_distill.hidden_layers import cached_layers, hidden_arrays
from jax_distill.teacher.files import TeacherFiles, find_teacher, load_teacher
from jax_distill.teacher.rows import TextRows
from jax_distill.teacher.writing import format_bytes, write_cache


class Plan(NamedTuple):
    """What decides both caches; quick to gather, so that a second run is."""

    tokenizer: data.Tokenizer
    teacher: TeacherFiles | None
    data_path: str | list[Source]
    stamps: dict[str, tuple[int, int]]
    manifests: dict[data.Split, Manifest]


def tokenizer_folder(config: Config, teacher_folder: Path | None) -> Path:
    """`data.tokenizer`; else the teacher's; else the student's. `bpe:N` is trained on the training
    text once, into `<cache.path>/tokenizer_bpe_N`.

    Raises:
        UserError: none of them has a tokenizer.json; N is no number.
    """
    name = config.data.tokenizer
    if not name.startswith("bpe:"):
        if name:
            path = Path(find_path(name))
            is_folder = path.exists() and path.suffix != ".gguf"
            return path if is_folder else hf.local_folder(path)
        if teacher_folder is not None:
            return teacher_folder
        return hf.local_folder(find_path(config.student.path))
    size = name.removeprefix("bpe:")
    if not size.isdecimal():
        raise UserError(f"expected data.tokenizer bpe:N with a number, got {name}; write bpe:2048")
    location = Location(config.cache.path)
    folder = location.local_path(f"tokenizer_bpe_{size}")
    if not folder.is_dir():
        location.check_writable()
        say(f"training a tokenizer of {size} tokens on the text: {folder}")
        texts = data.read_texts(
            data_path(config),
            format=config.data.format,
            heldout_fraction=config.data.heldout_fraction,
        )
        half_made = folder.with_name(f".{folder.name}.tmp")
        data.train_tokenizer(texts, int(size), half_made)
        half_made.rename(folder)
    return folder


def data_path(config: Config) -> str | list[Source]:
    """`data.path` as files and folders, wherever the configuration found them."""
    path = config.data.path
    if isinstance(path, str):
        return find_path(path)
    return [replace(source, path=find_path(source.path)) for source in path]


def make_plan(config: Config) -> Plan:
    teacher = find_teacher(config.teacher.path) if config.teacher.path else None
    if teacher and teacher.folder is None and not config.teacher.is_live:
        teacher.require_caches(config)  # before the tokenizer of another folder is asked for
    teacher_folder = teacher.folder if teacher else None
    folder = tokenizer_folder(config, teacher_folder)
    tokenizer = data.Tokenizer.load(folder)
    if teacher_folder is not None and folder != teacher_folder:
        _check_tokenizers(tokenizer, teacher_folder)
    path = data_path(config)
    stamps = data.file_stamps(path, format=config.data.format)
    fingerprint = teacher_fingerprint(teacher.source) if teacher and teacher.source else None
    manifests = split_manifests(
        config,
        path,
        tokenizer,
        lambda split: _of_teacher(config, teacher, fingerprint, split, tokenizer.length),
    )
    return Plan(tokenizer, teacher, path, stamps, manifests)


def split_manifests(
    config: Config,
    path: str | list[Source],
    tokenizer: data.Tokenizer,
    of_teacher: Callable[[data.Split], dict[str, Any]],
) -> dict[data.Split, Manifest]:
    """What the caches of both parts are. path: of the text, as found; of_teacher: the fields that
    the teacher decides."""
    text = config.data
    # The settings stand in the manifest by name, so that a difference is named; here, the text.
    data_fingerprint = data.fingerprint(path, format=text.format, tokenizer=tokenizer, settings={})
    max_rows = dict(zip(data.SPLITS, (text.max_rows, text.max_heldout_rows), strict=True))
    return {
        split: Manifest(
            sequence_length=text.sequence_length,
            shard_rows=config.cache.shard_rows,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocabulary=tokenizer.vocab,
            data={"split": split, **text.row_settings(), "max_rows": max_rows[split]},
            data_fingerprint=data_fingerprint,
            versions=versions(),
            git_revision=git_revision() or "",
            **of_teacher(split),
        )
        for split in data.SPLITS
    }


def _of_teacher(
    config: Config,
    teacher: TeacherFiles | None,
    fingerprint: str | None,
    split: str,
    length: int,
) -> dict[str, Any]:
    """The manifest's fields that the teacher decides; `length` is the tokenizer's.

    Where the teacher cannot be read, what the cache says of it counts: the size of its head where
    the decoder does not know its architecture, its fingerprint where it is not here.
    """
    if teacher is None:
        return {"vocab_size": length}
    if config.teacher.is_live:  # rows alone
        return {"vocab_size": min(length, teacher.require_model(other="train")[1].vocab_size)}
    stored = read_manifest(f"{config.cache.path}/{split}")
    head_size = stored.vocab_size if stored else length
    if teacher.model is not None:
        head_size = teacher.model.vocab_size
    if fingerprint is None:
        fingerprint = stored.teacher_fingerprint if stored else ""
    targets = config.cache.stored_targets(config.data.sequence_length)
    return targets | {
        "vocab_size": min(length, head_size),
        "teacher_fingerprint": fingerprint,
        "teacher_dtype": config.teacher.dtype,
        "optional": targets["optional"] | _hidden_arrays(config, teacher, stored),
    }


def _hidden_arrays(
    config: Config, teacher: TeacherFiles, stored: Manifest | None
) -> dict[str, list[int]]:
    """The hidden states that the cache keeps; those of the cache where the decoder cannot run the
    teacher."""
    wanted = config.cache.hidden_layers
    if not wanted:
        return {}
    if teacher.model is None:
        return stored.optional if stored else {}
    layers = cached_layers(wanted, teacher.model.num_hidden_layers)
    return hidden_arrays(layers, config.data.sequence_length, teacher.model.hidden_size)


def _check_tokenizers(tokenizer: data.Tokenizer, teacher_folder: Path) -> None:
    """Refuse a tokenizer other than the teacher's own: its targets would mean other tokens."""
    if not (teacher_folder / "tokenizer.json").is_file():
        return
    own = data.Tokenizer.load(teacher_folder)
    conflict = vocabulary_conflict(own.vocab, tokenizer.vocab)
    if conflict:
        first, teachers, given = conflict
        raise UserError(
            f"expected data.tokenizer to give id {first} to {teachers!r} as the teacher's own "
            f"does, got {given!r}; leave data.tokenizer empty to use the teacher's"
        )


def _finished(path: str, manifest: Manifest) -> Cache | None:
    """The cache at `path` if it is finished; UserError if it is another one than is wanted."""
    stored = read_manifest(path)
    if stored is None:
        return None
    refuse_other_cache(path, stored, manifest)
    try:
        cache = Cache.open(path)
    except RunError:  # its writer was killed early, or a file is damaged: `create` knows what to do
        return None
    return cache if cache.complete else None


def text_rows(
    config: Config,
    plan: Plan,
    corpus: data.Corpus,
    split: data.Split,
    manifest: Manifest,
    start: dict[str, Any] | None,
) -> TextRows:
    """The rows of one part, from `start` on (a commit's `resume`), the first shard of them made:
    what is wrong with the text is said before a model is there."""
    text = config.data
    rows = TextRows(
        corpus,
        split,
        manifest,
        options={"packing": text.packing, "separate_documents": text.separate_documents},
        start=start,
        contexts=contexts(config, plan),
        refuse_teacher=config.teacher.beyond_context == "refuse",
        has_table=plan.teacher is not None,
        stamps=plan.stamps,
    )
    rows.begin()
    return rows


def contexts(config: Config, plan: Plan) -> dict[str, int]:
    """`teacher`, `student` → their max_position_embeddings, where rows may be longer."""
    teacher = plan.teacher.model if plan.teacher else None
    cut = config.student.from_teacher is not None
    student = None if cut else find_teacher(config.student.path, key="student.path").model
    limits = {
        name: model.max_position_embeddings or config.data.sequence_length
        for name, model in (("teacher", teacher), ("student", student))
        if model is not None
    }
    return {name: limit for name, limit in limits.items() if limit < config.data.sequence_length}


def write_caches(config: Config) -> tuple[Cache, Cache]:
    """`<cache.path>/train` and `<cache.path>/heldout`, made as far as they are missing.

    Finished caches are known by their manifests, and checked (`Cache.require_complete`): no text is
    tokenised, no weight loaded, and their teacher may be gone, or one that only `torch_ref.teacher`
    can run. Without `teacher.path` they hold rows alone, for training with the cross-entropy.

    Raises:
        UserError: a cache made with another teacher, tokenizer, text or setting lies there (what
            differs is named); a cache is missing and the decoder cannot run the teacher; see also
            `write_cache`.
        RunError: a cache is damaged.
    """
    plan = processes.primary_first(lambda: make_plan(config))
    paths = {split: f"{config.cache.path}/{split}" for split in data.SPLITS}
    finished = processes.primary_first(
        lambda: {split: _finished(paths[split], plan.manifests[split]) for split in data.SPLITS}
    )
    processes.wait_for_all()
    train, heldout = finished.values()
    if train and heldout:
        for cache in (train, heldout):
            processes.from_primary(cache.require_complete)
        say(f"cache: {config.cache.path} is there, {train.tokens:,} tokens to train on")
        return train, heldout
    Location(config.cache.path).check_writable()
    teacher_folder = plan.teacher and plan.teacher.require_model(other="teacher")[0]
    mesh = sharding.make_mesh(**config.mesh.axes)
    sharding.check_rows(mesh, config.teacher.batch_size, "teacher.batch_size")
    missing = {split: paths[split] for split in data.SPLITS[::-1] if not finished[split]}
    finished |= _write_missing(config, plan, missing, mesh, teacher_folder)
    train, heldout = finished["train"], finished["heldout"]
    assert train and heldout
    return train, heldout


def _write_missing(
    config: Config,
    plan: Plan,
    missing: dict[data.Split, str],
    mesh: Mesh,
    teacher_folder: Path | None,
) -> dict[data.Split, Cache]:
    """The caches at these paths, in this order."""
    corpus = data.Corpus(
        plan.data_path,
        format=config.data.format,
        tokenizer=plan.tokenizer,
        heldout_fraction=config.data.heldout_fraction,
    )
    rows = {
        split: text_rows(
            config,
            plan,
            corpus,
            split,
            plan.manifests[split],
            processes.from_primary(partial(resume_point, path)),
        )
        for split, path in missing.items()
    }
    model = None
    if teacher_folder is not None and not config.teacher.is_live:
        model = load_teacher(teacher_folder, config, mesh)
    made: dict[data.Split, Cache] = {}
    for split, path in missing.items():
        cache = made[split] = write_cache(
            path,
            plan.manifests[split],
            rows[split],
            model=model,
            mesh=mesh,
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
        )
        processes.from_primary(cache.require_complete)
        say(
            f"cache: {cache.path} holds {cache.tokens:,} tokens in {format_bytes(cache.nbytes)}, "
            f"{cache.nbytes / max(cache.tokens, 1):.1f} bytes a token"
        )
    say(f"text: {corpus.counts}")
    for name, limit in contexts(config, plan).items():
        data.check_context(sum(each.beyond[name] for each in rows.values()), limit, name)
    return made


def main(config: Config) -> None:
    """Write the caches of a configuration; `python -m jax_distill.teacher` is this."""
    with processes.started(**config.mesh.processes):
        write_caches(config)
