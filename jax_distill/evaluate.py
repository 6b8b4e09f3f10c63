"""What a student is worth on held-out text: see `cache.heldout` for which rows."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from jax_distill import hf
from jax_distill.base.command import CommandLine, above_zero, at_least_zero, run_command
from jax_distill.base.console import console, progress, say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import check_new_file, find_path, write_json
from jax_distill.batch import Batch
from jax_distill.cache import (
    CALIBRATION_BINS,
    Cache,
    check_targets,
    table_of,
    table_rows,
    teacher_fingerprint,
    validation_rows,
    vocabulary_conflict,
)
from jax_distill.data import Tokenizer, vocabulary_of
from jax_distill.disagreements import Disagreements, furthest_positions, print_disagreements
from jax_distill.losses import Head, full_token_values
from jax_distill.model import Decoder
from jax_distill.model_folder import model_name
from jax_distill.objective import Execution
from jax_distill.samples import Words, continuations, print_samples
from jax_distill.sharding import own_rows, row_shards, shard_batch, to_host


def padded_batches(
    cache: Cache, rows: np.ndarray, batch_size: int, *, mesh: Mesh | None = None, **read: Any
) -> Iterator[Batch]:
    """The rows in batches of one shape; what the last lacks is repeated as padding, that routers do
    not count either. mesh: of each batch only this process's rows."""
    own = np.arange(batch_size) if mesh is None else own_rows(mesh, batch_size)
    for first in range(0, len(rows), batch_size):
        chosen = rows[first : first + batch_size]
        batch = cache.read(np.resize(chosen, batch_size)[own], **read)
        real = (own < len(chosen))[:, None]
        segment_ids = np.where(real, batch.segment_ids, 0)
        yield dataclasses.replace(batch, mask=batch.mask & real, segment_ids=segment_ids)


def miscalibration(confidence: jax.Array, correct: jax.Array, mask: jax.Array) -> jax.Array:
    """fp32 [CALIBRATION_BINS]: of the valid tokens of [B,T], in each bin of the confidence, the sum
    of (confidence − correct)."""
    which = jnp.minimum((confidence * CALIBRATION_BINS).astype(jnp.int32), CALIBRATION_BINS - 1)
    off = jnp.where(mask, confidence - correct, 0.0)
    in_bin = jax.nn.one_hot(which, CALIBRATION_BINS, dtype=jnp.float32)
    return jnp.sum(in_bin * off[..., None], axis=(0, 1))


@partial(jax.jit, static_argnames=("vocab_size", "execution", "positions"))
def compare(
    teacher: Decoder,
    students: Mapping[str, Decoder],
    batch: Batch,
    *,
    vocab_size: int,
    execution: Execution,
    positions: int = 0,
) -> dict[str, dict[str, Any]]:
    """Sums over the valid tokens of [B,T], per model: KL(teacher ‖ model) over the whole
    vocabulary, cross-entropy against the data (both nats), top-1 agreement with the teacher,
    acceptance_rate, `miscalibration`; and `finite` [B]: whether every valid position's logits are
    finite; of each student, where `positions` are asked for, the `furthest` ones.

    The teacher is among the models: its KL is 0, its cross-entropy is the bar.
    """

    def hidden_and_head(model: Decoder) -> tuple[jax.Array, Head]:
        hidden = model.hidden_states(batch.tokens, batch.segment_ids, batch.positions)
        return hidden, Head(model.lm_head_weight(), vocab_size=vocab_size)

    of_teacher = hidden_and_head(teacher)
    of_students = {name: hidden_and_head(model) for name, model in students.items()}
    values = full_token_values(
        *of_teacher, of_students, batch.labels, batch.mask, execution=execution
    )
    # A logit that is not finite makes the cross-entropy NaN, or, where it is −inf, the KL.
    any_student = next(iter(values.values()))
    bar = any_student.teacher_cross_entropy
    teacher_finite = jnp.isfinite(bar)
    tokens = jnp.sum(batch.mask).astype(jnp.float32)
    table: dict[str, dict[str, Any]] = {
        "teacher": {
            "kl": jnp.float32(0),
            "cross_entropy": jnp.sum(bar),
            "top1_agreement": tokens,
            "acceptance_rate": tokens,
            "miscalibration": miscalibration(
                any_student.teacher_confidence, any_student.teacher_correct, batch.mask
            ),
            "finite": jnp.all(teacher_finite, axis=1),
        },
    }
    for name, found in values.items():
        finite = jnp.isfinite(found.kl) & jnp.isfinite(found.cross_entropy)
        table[name] = {
            "kl": jnp.sum(found.kl),
            "cross_entropy": jnp.sum(found.cross_entropy),
            "top1_agreement": jnp.sum(found.top1_agreement),
            "acceptance_rate": jnp.sum(found.acceptance_rate),
            "miscalibration": miscalibration(found.confidence, found.correct, batch.mask),
            "finite": jnp.all(finite | ~teacher_finite, axis=1),
        }
        if positions:
            table[name]["furthest"] = furthest_positions(
                found.kl, of_teacher, of_students[name], count=positions
            )
    return table


def check_vocab_size(vocab_size: int, name: str, cache: Cache) -> None:
    """Refuse a model that lacks some of the cache's ids: over all of them its KL is infinite."""
    if vocab_size < cache.manifest.vocab_size:
        raise UserError(
            f"expected a vocabulary of at least {cache.manifest.vocab_size} for {name}, the ids of "
            f"the cache at {cache.path}, got {vocab_size}; use models with the cache's tokenizer"
        )


def divisible(rows: int, mesh: Mesh | None) -> int:
    """`rows`, or the next number of which each device gets an equal part."""
    return rows if mesh is None else -(-rows // row_shards(mesh)) * row_shards(mesh)


def on_devices(batch: Batch, mesh: Mesh | None) -> Batch:
    """The batch, split over the mesh if there is one."""
    return batch if mesh is None else shard_batch(mesh, batch)


def test_table(
    teacher: Decoder,
    students: Mapping[str, Decoder],
    cache: Cache,
    rows: np.ndarray,
    *,
    batch_size: int,
    chunk_size: int,
    mesh: Mesh | None = None,
    disagreements: Disagreements | None = None,
) -> dict[str, dict[str, float]]:
    """Means per valid token over `rows`: kl, cross_entropy (nats), perplexity, top1_agreement,
    acceptance_rate (`FullTokenValues`); and the calibration_error (`cache.table_of`).

    students: one at least. mesh: that of the models; the rows are split over it, so many at a
    time that its devices get equal parts. disagreements: is given the positions of largest KL.

    Raises:
        UserError: the rows hold no valid token; a model has a smaller vocabulary than the cache.
        RunError: a model has logits that are not finite; it and the rows are named.
    """
    check_targets(cache, rows)
    for name, model in {"teacher": teacher, **students}.items():
        check_vocab_size(model.config.vocab_size, name, cache)
    shards = 1 if mesh is None else row_shards(mesh)
    execution = Execution(chunk_size=chunk_size, row_shards=shards)
    total: Any = None
    tokens = 0
    size = divisible(batch_size, mesh)
    batches = padded_batches(cache, rows, size, mesh=mesh, targets=False)
    shown = progress(batches, "test table", total=-(-len(rows) // size))
    for number, batch in enumerate(shown):
        chosen = rows[number * size :][:size]
        on_device = compare(
            teacher,
            dict(students),
            on_devices(batch, mesh),
            vocab_size=cache.manifest.vocab_size,
            execution=execution,
            positions=disagreements.count if disagreements else 0,
        )
        sums = to_host(on_device)
        tokens += int(sums["teacher"]["top1_agreement"])
        for name in ("teacher", *students):
            _check_finite(sums[name].pop("finite")[: len(chosen)], name, cache, chosen)
            if disagreements and name in students:
                disagreements.add(name, chosen, sums[name].pop("furthest"))
        sums = jax.tree.map(np.float64, sums)
        total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    # JAX sorts the keys of a dictionary; the order given is the order people read.
    in_order = {
        name: jax.tree.map(lambda x: x.tolist(), total[name]) for name in ("teacher", *students)
    }
    return table_of(in_order, tokens)


def _check_finite(finite: np.ndarray, name: str, cache: Cache, rows: np.ndarray) -> None:
    """finite: bool [n], of `rows` [n]."""
    bad = rows[~finite]
    if len(bad):
        shown = ", ".join(map(str, bad[:8])) + (" …" if len(bad) > 8 else "")
        raise RunError(
            f"expected finite logits of {model_name(name)}, got NaN or infinity in rows "
            f"{shown} of {cache.path}; look at its weights, or compute in float32"
        )


def print_table(table: Mapping[str, Mapping[str, float]], what: str = "test table") -> None:
    """The table as people read it."""
    shown = Table(title=f"{what}: KL over the whole vocabulary, temperature 1")
    shown.add_column("model")
    # In three lines each: 80 characters hold the table.
    heads = (
        *("KL to/teacher", "cross-/entropy", "per-/plexity", "top-1/agree-/ment"),
        *("accept-/ance/rate", "calibra-/tion/error"),
    )
    for head in (words.replace("/", "\n") for words in heads):
        shown.add_column(head, justify="right")
    for name, row in table.items():
        shown.add_row(
            model_name(name),
            f"{row['kl']:.4f}",
            f"{row['cross_entropy']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['top1_agreement']:.3f}",
            f"{row['acceptance_rate']:.3f}",
            f"{row['calibration_error']:.4f}",
        )
    console.print(shown)


def check_teacher(cache: Cache, path: str) -> None:
    """The cache's own teacher passes, and says nothing. Another one may be asked, and is named, if
    its tokenizer is the one that the rows were made with.

    Raises:
        UserError: it is not.
    """
    named = Path(find_path(path)).expanduser()
    folder = hf.local_folder(named, key="--teacher")
    stored = cache.manifest
    is_gguf = named.suffix == ".gguf" and named.is_file()
    found = teacher_fingerprint(named if is_gguf else folder)
    is_the_caches = found == stored.teacher_fingerprint
    if stored.tokenizer_fingerprint and (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
        # The cache's teacher may have more tokens than data.tokenizer, but no other ones.
        right = tokenizer.fingerprint == stored.tokenizer_fingerprint or (
            is_the_caches and not vocabulary_conflict(stored.vocabulary, tokenizer.vocab)
        )
        if not right:
            raise UserError(
                f"expected a teacher with the tokenizer of the cache at {cache.path} "
                f"({stored.vocab_size} ids), got {path} with another one ({tokenizer.length} ids); "
                "name the cache's teacher, or write a cache with this one"
            )
    if stored.teacher_fingerprint and not is_the_caches:
        say(f"{path} is not the teacher that the cache was made with, by its fingerprint")


def check_student(cache: Cache, path: str) -> None:
    """Refuse a student whose tokenizer gives the cache's ids to other tokens, or whose embedding
    lacks some of them."""
    folder = hf.local_folder(find_path(path), key="--student")
    vocab_size = hf.model_config(hf.read_config(folder)).vocab_size
    cache.student_length(vocab_size, vocabulary_of(folder), path)


def main(argv: Sequence[str]) -> None:
    """`python -m jax_distill.evaluate CACHE --teacher DIR --student DIR [--student DIR …]`"""
    parser = CommandLine("jax_distill.evaluate")
    parser.add_argument("cache", help="a held-out cache, e.g. cache/heldout")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--student", required=True, action="append", help="HF folder; repeatable")
    parser.add_argument("--rows", choices=("all", "validation", "table"), default="table")
    parser.add_argument("--batch_size", type=above_zero, default=8)
    parser.add_argument("--chunk_size", type=above_zero, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--samples", type=at_least_zero, default=2, help="documents to continue")
    parser.add_argument("--sample_tokens", type=above_zero, default=32)
    parser.add_argument("--json", help="write all of it here, too")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    dtype = jnp.dtype(options.dtype)
    cache = Cache.open(options.cache)
    cache.require_complete()
    check_teacher(cache, options.teacher)
    for path in options.student:
        check_student(cache, path)
    chosen = {"validation": validation_rows, "table": table_rows}.get(options.rows)
    rows = chosen(cache) if chosen else np.arange(cache.rows)

    def load(path: str) -> Decoder:
        folder = hf.local_folder(find_path(path))
        return hf.load_model(folder, param_dtype=dtype, compute_dtype=dtype, remat="none")

    names = [Path(path).name for path in options.student]
    if len({"teacher", *names}) <= len(names):  # two alike, or one like the teacher's line
        names = [f"student {path}" for path in options.student]
    students = {name: load(path) for name, path in zip(names, options.student, strict=True)}
    teacher = load(options.teacher)
    words = Words(hf.local_folder(find_path(options.teacher)))
    disagreements = Disagreements(words, cache)
    table = test_table(
        teacher,
        students,
        cache,
        rows,
        batch_size=options.batch_size,
        chunk_size=options.chunk_size,
        disagreements=disagreements,
    )
    print_table(table)
    written = continuations(
        {"teacher": teacher, **students},
        cache,
        rows,
        words,
        count=options.samples,
        new_tokens=options.sample_tokens,
    )
    print_samples(written)
    print_disagreements(disagreements.found())
    if options.json:
        found = {"samples": written, "disagreements": disagreements.found()}
        write_json(Path(options.json), {"test": table, **found})
        say(f"wrote {options.json}")


if __name__ == "__main__":
    run_command(main)
