"""Both stores of a configuration: which ones are wanted, and whether they are there already."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_distill import data, hf, sharding
from jax_distill.cache import (
    Manifest,
    Store,
    read_manifest,
    refuse_other_store,
    teacher_fingerprint,
    vocabulary_conflict,
)
from jax_distill.config import Config, Failure, Refusal, Source, check_writable, find_path
from jax_distill.packing import Rows, pack
from jax_distill.run import git_revision, say, versions
from jax_distill.teacher.files import TeacherFiles, find_teacher
from jax_distill.teacher.writing import format_bytes, write_store

SPLITS = ("train", "heldout")


class _Plan(NamedTuple):
    """What decides both stores; quick to gather, so that a second run is."""

    tokenizer: data.Tokenizer
    teacher: TeacherFiles | None
    data_path: str | list[Source]
    manifests: dict[str, Manifest]


def tokenizer_folder(config: Config, teacher_folder: Path | None) -> Path:
    """`data.tokenizer`; else the teacher's; else the student's. `bpe:N` is trained on the training
    text once, into `<cache.path>/tokenizer_bpe_N`.

    Raises:
        Refusal: none of them has a tokenizer.json; N is no number.
    """
    name = config.data.tokenizer
    if not name.startswith("bpe:"):
        if name:
            place = Path(find_path(name))
            is_folder = place.exists() and place.suffix != ".gguf"
            return place if is_folder else hf.local_folder(place)
        if teacher_folder is not None:
            return teacher_folder
        return hf.local_folder(find_path(config.student.path))
    size = name.removeprefix("bpe:")
    if not size.isdecimal():
        raise Refusal(f"expected data.tokenizer bpe:N with a number, got {name}; write bpe:2048")
    folder = Path(config.cache.path) / f"tokenizer_bpe_{size}"
    if not folder.is_dir():
        check_writable(config.cache.path, "cache.path")
        say(f"training a tokenizer of {size} tokens on the text: {folder}")
        texts = data.read_texts(
            _data_path(config),
            format=config.data.format,
            heldout_fraction=config.data.heldout_fraction,
        )
        half_made = folder.with_name(f".{folder.name}.tmp")
        data.train_tokenizer(texts, int(size), half_made)
        half_made.rename(folder)
    return folder


def _data_path(config: Config) -> str | list[Source]:
    path = config.data.path
    if isinstance(path, str):
        return find_path(path)
    return [replace(source, path=find_path(source.path)) for source in path]


def _plan(config: Config) -> _Plan:
    teacher = find_teacher(config.teacher.path) if config.teacher.path else None
    teacher_folder = teacher.folder if teacher else None
    folder = tokenizer_folder(config, teacher_folder)
    tokenizer = data.Tokenizer.load(folder)
    if teacher_folder is not None and folder != teacher_folder:
        _check_tokenizers(tokenizer, teacher_folder)
    data_path = _data_path(config)
    text = config.data
    # The settings stand in the manifest by name, so that a difference is named; here, the text.
    data_fingerprint = data.fingerprint(
        data_path, format=text.format, tokenizer=tokenizer, settings={}
    )
    settings = dict(
        format=text.format, packing=text.packing, heldout_fraction=text.heldout_fraction
    )
    max_rows = dict(zip(SPLITS, (text.max_rows, text.max_heldout_rows), strict=True))
    fingerprint = teacher_fingerprint(teacher.place) if teacher and teacher.place else None
    manifests = {
        split: Manifest(
            sequence_length=text.sequence_length,
            shard_rows=config.cache.shard_rows,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocabulary=tokenizer.vocab,
            data={"split": split, **settings, "max_rows": max_rows[split]},
            data_fingerprint=data_fingerprint,
            versions=versions(),
            git_revision=git_revision() or "",
            **_of_teacher(config, teacher, fingerprint, split, tokenizer.length),
        )
        for split in SPLITS
    }
    return _Plan(tokenizer, teacher, data_path, manifests)


def _of_teacher(
    config: Config,
    teacher: TeacherFiles | None,
    fingerprint: str | None,
    split: str,
    length: int,
) -> dict[str, Any]:
    """The manifest's fields that the teacher decides; `length` is the tokenizer's.

    Where the teacher cannot be asked, what the store says of it counts: the width of its head where
    the decoder does not know its architecture, its fingerprint where it is not here.
    """
    if teacher is None:
        return {"vocab_size": length}
    stored = read_manifest(f"{config.cache.path}/{split}")
    columns = stored.vocab_size if stored else length
    if teacher.model is not None:
        columns = teacher.model.vocab_size
    if fingerprint is None:
        fingerprint = stored.teacher_fingerprint if stored else ""
    return {
        "vocab_size": min(length, columns),
        "top_k": config.cache.top_k,
        "temperatures": tuple(config.cache.temperatures),
        "teacher_fingerprint": fingerprint,
        "teacher_dtype": config.teacher.dtype,
    }


def _check_tokenizers(tokenizer: data.Tokenizer, teacher_folder: Path) -> None:
    """A teacher whose own tokenizer reads the ids differently would teach nonsense."""
    if not (teacher_folder / "tokenizer.json").is_file():
        return
    own = data.Tokenizer.load(teacher_folder)
    conflict = vocabulary_conflict(own.vocab, tokenizer.vocab)
    if conflict:
        first, teachers, given = conflict
        raise Refusal(
            f"expected data.tokenizer to give id {first} to {teachers!r} as the teacher's own "
            f"does, got {given!r}; leave data.tokenizer empty to use the teacher's"
        )


def _finished(path: str, manifest: Manifest) -> Store | None:
    """The store at `path` if it is whole; Refusal if it is another one than is wanted."""
    stored = read_manifest(path)
    if stored is None:
        return None
    refuse_other_store(path, stored, manifest)
    try:
        store = Store.open(path)
    except Failure:  # the first run was killed before its arrays were there
        return None
    return store if store.complete else None


def _pack_rows(config: Config, plan: _Plan) -> dict[str, Rows]:
    text = config.data
    corpus = data.read_documents(
        plan.data_path,
        format=text.format,
        tokenizer=plan.tokenizer,
        heldout_fraction=text.heldout_fraction,
    )
    say(f"text: {corpus.counts}")
    rows = {}
    for split, documents in zip(SPLITS, (corpus.train, corpus.heldout), strict=True):
        rows[split] = pack(
            documents,
            sequence_length=text.sequence_length,
            packing=text.packing,
            max_rows=plan.manifests[split].data["max_rows"],
        )
        say(f"{split}: {rows[split]}")
        if not len(rows[split]):
            raise Refusal(f"expected {split} text, got none; raise data.heldout_fraction, add text")
        largest, columns = int(rows[split].arrays["tokens"].max()), plan.manifests[split].vocab_size
        if largest >= columns:
            raise Refusal(
                f"expected ids below {columns}, the columns of the teacher's head, got {largest}; "
                "use the tokenizer that belongs to the teacher"
            )
    return rows


def write_stores(config: Config) -> tuple[Store, Store]:
    """`<cache.path>/train` and `<cache.path>/heldout`, made as far as they are missing.

    Finished stores are known by their manifests: no text is tokenised, no weight loaded, and their
    teacher may be gone, or one that only `torch_ref.teacher` can run. Without `teacher.path` they
    hold rows alone, for training with the cross-entropy.

    Raises:
        Refusal: a store made with another teacher, tokenizer, text or setting lies there (what
            differs is named); a store is missing and the decoder cannot run the teacher; see also
            `write_store`.
    """
    plan = _plan(config)
    paths = {split: f"{config.cache.path}/{split}" for split in SPLITS}
    finished = {split: _finished(paths[split], plan.manifests[split]) for split in SPLITS}
    train, heldout = finished.values()
    if train and heldout:
        say(f"store: {config.cache.path} is there, {train.tokens:,} tokens to train on")
        return train, heldout
    check_writable(config.cache.path, "cache.path")
    teacher_folder = plan.teacher and plan.teacher.require_model(other="teacher")[0]
    mesh = sharding.make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp)
    sharding.check_rows(mesh, config.teacher.batch_size, "teacher.batch_size")
    rows = _pack_rows(config, plan)
    model = None
    if teacher_folder is not None:
        dtype = jnp.dtype(config.teacher.dtype)
        model = hf.load_model(
            teacher_folder,
            param_dtype=dtype,
            compute_dtype=dtype,
            shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
            rows=sharding.batch_sharding(mesh),
        )
    stores = []
    for split in SPLITS:
        counts = {k: v for k, v in vars(rows[split]).items() if isinstance(v, int)}
        store = finished[split] or write_store(
            paths[split],
            replace(plan.manifests[split], counts=counts),
            rows[split].arrays,
            model=model,
            mesh=mesh,
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
        )
        say(
            f"store: {store.path} holds {store.tokens:,} tokens in {format_bytes(store.nbytes)}, "
            f"{store.nbytes / max(store.tokens, 1):.1f} bytes a token"
        )
        stores.append(store)
    return stores[0], stores[1]


def main(config: Config) -> None:
    """Write the stores of a configuration; `python -m jax_distill.teacher` is this."""
    write_stores(config)
