"""What a student is worth on held-out text, and the gate that a store must pass before training.

The held-out store's first half (`validation_rows`) is looked at while training and for choices
(best checkpoint, learning rates); the second half (`table_rows`) only by the final table.
"""

import math
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
from jax_distill.cache import Store, teacher_fingerprint, vocabulary_conflict
from jax_distill.config import (
    CommandLine,
    Failure,
    Refusal,
    above_zero,
    check_new_file,
    find_path,
    run_command,
)
from jax_distill.data import Tokenizer, vocabulary_of
from jax_distill.losses import dense
from jax_distill.model import Decoder
from jax_distill.run import console, say, write_json
from jax_distill.sharding import place_batch


def validation_rows(store: Store) -> np.ndarray:
    """The rows of a held-out store that choices are made on: its first half."""
    return np.arange(store.rows // 2)


def table_rows(store: Store) -> np.ndarray:
    """The rows of a held-out store that only the final table reads: its second half."""
    return np.arange(store.rows // 2, store.rows)


def padded_batches(
    store: Store, rows: np.ndarray, batch_size: int, **read: Any
) -> Iterator[dict[str, np.ndarray]]:
    """The rows in batches of one shape; what the last lacks is repeated with a mask of 0."""
    for first in range(0, len(rows), batch_size):
        chosen = rows[first : first + batch_size]
        batch = store.read(np.resize(chosen, batch_size), **read)
        batch["mask"] = batch["mask"] & (np.arange(batch_size) < len(chosen))[:, None]
        yield batch


@partial(jax.jit, static_argnames=("vocab_size", "chunk_size"))
def compare(
    teacher: Decoder,
    students: Mapping[str, Decoder],
    batch: Mapping[str, jax.Array],
    *,
    vocab_size: int,
    chunk_size: int,
) -> dict[str, dict[str, jax.Array]]:
    """Sums over the valid tokens of [B,T], per model: KL(teacher ‖ model) over the whole
    vocabulary, cross-entropy against the data (both nats), top-1 agreement with the teacher.

    Both heads are projected chunk by chunk of positions; logits are fp32. The teacher is among
    the models: its KL is 0, its cross-entropy is the bar.
    """
    models = {"teacher": teacher, **students}
    place = (batch["tokens"], batch["segment_ids"], batch["positions"])
    hidden = {name: model.hidden_states(*place) for name, model in models.items()}
    heads = {name: model.lm_head_weight()[:vocab_size] for name, model in models.items()}
    length = batch["tokens"].shape[1]
    chunk = min(chunk_size, length)
    pad = -length % chunk

    def chunks(x: jax.Array) -> jax.Array:
        """[B,T,…] → [T/C,B,C,…], padded with zeros."""
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def one(total: Any, xs: Any) -> tuple[Any, None]:
        hidden, labels, mask = xs
        logprobs = {
            name: jax.nn.log_softmax(
                jnp.einsum(
                    "BTD,VD->BTV",
                    hidden[name],
                    heads[name].astype(hidden[name].dtype),
                    preferred_element_type=jnp.float32,
                )
            )
            for name in models
        }
        goal = logprobs["teacher"]
        sums = {}
        for name, got in logprobs.items():
            kl = jnp.sum(jnp.exp(goal) * (goal - got), axis=-1)
            label = jnp.take_along_axis(got, labels[:, :, None], axis=-1)[:, :, 0]
            agree = jnp.argmax(goal, axis=-1) == jnp.argmax(got, axis=-1)
            sums[name] = {
                "kl": jnp.sum(jnp.where(mask, kl, 0.0)),
                "cross_entropy": -jnp.sum(jnp.where(mask, label, 0.0)),
                "top1_agreement": jnp.sum(mask & agree).astype(jnp.float32),
            }
        return jax.tree.map(jnp.add, total, sums), None

    zero = jnp.float32(0)
    names = ("kl", "cross_entropy", "top1_agreement")
    start = {name: dict.fromkeys(names, zero) for name in models}
    xs = ({k: chunks(v) for k, v in hidden.items()}, chunks(batch["labels"]), chunks(batch["mask"]))
    return jax.lax.scan(one, start, xs)[0]


def check_columns(columns: int, name: str, store: Store) -> None:
    """Refuse a head that lacks some of the store's ids: over all of them its KL is infinite."""
    if columns < store.manifest.vocab_size:
        raise Refusal(
            f"expected {store.manifest.vocab_size} columns in the head of {name}, the ids of "
            f"the store at {store.path}, got {columns}; use models with the tokenizer of the store"
        )


def check_targets(store: Store, rows: np.ndarray) -> None:
    """Refuse rows for a table that hold nothing to predict."""
    if not len(rows) or not store.read(rows, targets=False)["mask"].any():
        raise Refusal(
            "expected held-out text for the table, got no valid token; raise data.heldout_fraction"
        )


def shared(rows: int, mesh: Mesh | None) -> int:
    """`rows`, or the next number that the devices can share."""
    return rows if mesh is None else -(-rows // mesh.size) * mesh.size


def placed(batch: dict[str, np.ndarray], mesh: Mesh | None) -> dict[str, Any]:
    """The batch, split over the mesh if there is one."""
    return dict(batch) if mesh is None else place_batch(mesh, batch)


def heldout_table(
    teacher: Decoder,
    students: Mapping[str, Decoder],
    store: Store,
    rows: np.ndarray,
    *,
    batch_size: int,
    chunk_size: int,
    mesh: Mesh | None = None,
) -> dict[str, dict[str, float]]:
    """Means per valid token over `rows`: kl, cross_entropy (nats), perplexity, top1_agreement.

    mesh: where the models lie; the rows are split over it, so many at a time that its devices get
    equal parts.

    Raises:
        Refusal: the rows hold no valid token; a head has fewer columns than the store ids.
    """
    check_targets(store, rows)
    for name, model in {"teacher": teacher, **students}.items():
        check_columns(model.config.vocab_size, name, store)
    total: Any = None
    tokens = 0
    for batch in padded_batches(store, rows, shared(batch_size, mesh), targets=False):
        tokens += int(batch["mask"].sum())
        wanted = ("tokens", "labels", "segment_ids", "positions", "mask")
        sums = compare(
            teacher,
            dict(students),
            placed({key: batch[key] for key in wanted}, mesh),
            vocab_size=store.manifest.vocab_size,
            chunk_size=chunk_size,
        )
        sums = jax.tree.map(float, jax.device_get(sums))
        total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    # jit sorts the keys of a dictionary; the order given is the order people read.
    means = jax.tree.map(lambda value: value / tokens, total)
    table = {name: means[name] for name in ("teacher", *students)}
    for row in table.values():
        row["perplexity"] = math.exp(min(row["cross_entropy"], 700.0))
    return table


def print_table(table: Mapping[str, Mapping[str, float]]) -> None:
    """The held-out table as people read it."""
    shown = Table(title="held-out text")
    shown.add_column("model")
    heads = ("KL to teacher", "cross-entropy", "perplexity", "top-1 agreement")
    for head in heads:
        shown.add_column(head, justify="right")
    for name, row in table.items():
        shown.add_row(
            name.replace("_", " "),
            f"{row['kl']:.4f}",
            f"{row['cross_entropy']:.4f}",
            f"{row['perplexity']:.2f}",
            f"{row['top1_agreement']:.3f}",
        )
    console.print(shown)


@partial(jax.jit, static_argnames=("temperature", "vocab_size"))
def _kl_at_positions(
    model: Decoder, batch: Mapping[str, jax.Array], *, temperature: float, vocab_size: int
) -> jax.Array:
    """Bucket KL between the stored targets and the model, per row and position: [B,T], 0 masked."""
    place = (batch["tokens"], batch["segment_ids"], batch["positions"])
    hidden = model.hidden_states(*place)
    head = model.lm_head_weight().astype(hidden.dtype)

    def position(hidden: jax.Array, targets: Mapping[str, jax.Array]) -> jax.Array:
        cell = {key: value[None, None] for key, value in targets.items()}
        sums = dense(
            hidden[None, None],
            head,
            cell["labels"],
            cell["mask"],
            cell["teacher_indices"],
            cell["teacher_logprobs"],
            cell["teacher_log_tail"],
            cell["teacher_count"],
            vocab_size=vocab_size,
            temperature=temperature,
        )
        return sums.kl

    names = ("labels", "mask", "teacher_indices", "teacher_logprobs", "teacher_log_tail")
    targets = {key: batch[key] for key in (*names, "teacher_count")}
    per_row = partial(jax.lax.map, lambda xs: position(*xs), batch_size=64)
    return jax.lax.map(per_row, (hidden, targets))


def _first_rows_with_targets(store: Store, rows: int) -> np.ndarray:
    """Chat data may begin with rows whose every target was cut away."""
    for first in range(0, store.rows, rows):
        chosen = np.arange(first, min(first + rows, store.rows))
        if store.read(chosen, targets=False)["mask"].any():
            return chosen
    raise Failure(
        f"gate: expected a row with something to predict in {store.path}, got none; "
        "look at the loss mask of the data"
    )


def identity_gate(
    teacher: Decoder,
    store: Store,
    *,
    rows: int,
    temperature: float,
    tolerance: float,
    mesh: Mesh | None = None,
) -> str:
    """The teacher as its own student on the first rows of the store that have targets: KL ≈ 0 at
    every position, and large when shifted by one. Returns the line that says so.

    mesh: where the teacher lies; the rows are split over it.

    Raises:
        Failure: the store is not this teacher's, or is misaligned; names the worst position.
    """
    chosen = _first_rows_with_targets(store, rows)
    chosen = np.resize(chosen, shared(len(chosen), mesh))
    batch = store.read(chosen, temperature=temperature)
    knobs = dict(temperature=temperature, vocab_size=store.manifest.vocab_size)
    kl = np.asarray(_kl_at_positions(teacher, placed(batch, mesh), **knobs))
    shifted = dict(batch)
    for key in ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count"):
        shifted[key] = np.roll(batch[key], 1, axis=1)
    shifted_kl = np.asarray(_kl_at_positions(teacher, placed(shifted, mesh), **knobs))
    valid = batch["mask"]
    worst = np.unravel_index(np.argmax(np.where(valid, kl, -1.0)), kl.shape)
    mean, wrong = float(kl[valid].mean()), float(shifted_kl[valid].mean())
    if not (kl[worst] <= tolerance and wrong > 10 * max(mean, tolerance)):
        raise Failure(
            f"gate: expected the teacher to match its own store (KL ≤ {tolerance:g} at every "
            f"position, large when shifted by one), got {kl[worst]:.3g} at row {chosen[worst[0]]}, "
            f"position {worst[1]}, mean {mean:.3g}, shifted {wrong:.3g}; "
            "delete the store and let the teacher write it again"
        )
    return (
        f"gate: teacher as its own student: KL {mean:.2g} (worst position {kl[worst]:.2g}), "
        f"shifted by one {wrong:.2f}"
    )


def check_teacher(store: Store, path: str) -> None:
    """The store's own teacher passes, and says nothing. Another one may be asked, and is named, if
    its tokenizer is the one that the rows were made with.

    Raises:
        Refusal: it is not.
    """
    named = Path(find_path(path)).expanduser()
    folder = hf.local_folder(named)
    stored = store.manifest
    is_gguf = named.suffix == ".gguf" and named.is_file()
    found = teacher_fingerprint(named if is_gguf else folder)
    is_the_stores = found == stored.teacher_fingerprint
    if stored.tokenizer_fingerprint and (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
        # The store's teacher may have more tokens than data.tokenizer, but no other ones.
        right = tokenizer.fingerprint == stored.tokenizer_fingerprint or (
            is_the_stores and not vocabulary_conflict(stored.vocabulary, tokenizer.vocab)
        )
        if not right:
            raise Refusal(
                f"expected a teacher with the tokenizer of the store at {store.path} "
                f"({stored.vocab_size} ids), got {path} with another one ({tokenizer.length} ids); "
                "name the store's teacher, or write a store with this one"
            )
    if stored.teacher_fingerprint and not is_the_stores:
        say(f"{path} is not the teacher that the store was made with, by its fingerprint")


def check_student(store: Store, path: str) -> None:
    """Refuse a student whose tokenizer gives the store's ids to other tokens, or whose embedding
    lacks some of them."""
    folder = hf.local_folder(find_path(path))
    columns = hf.model_config(hf.read_config(folder)).vocab_size
    store.student_length(columns, vocabulary_of(folder), path)


def main(argv: Sequence[str]) -> None:
    """`python -m jax_distill.evaluate STORE --teacher DIR --student DIR [--student DIR …]`"""
    parser = CommandLine("jax_distill.evaluate")
    parser.add_argument("store", help="a held-out store, e.g. cache/heldout")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--student", required=True, action="append", help="HF folder; repeatable")
    parser.add_argument("--rows", choices=("all", "validation", "table"), default="table")
    parser.add_argument("--batch_size", type=above_zero, default=8)
    parser.add_argument("--chunk_size", type=above_zero, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", help="write the table here, too")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    dtype = jnp.dtype(options.dtype)
    store = Store.open(options.store)
    store.require_complete()
    check_teacher(store, options.teacher)
    for path in options.student:
        check_student(store, path)
    chosen = {"validation": validation_rows, "table": table_rows}.get(options.rows)
    rows = chosen(store) if chosen else np.arange(store.rows)

    def load(path: str) -> Decoder:
        folder = hf.local_folder(find_path(path))
        return hf.load_model(folder, param_dtype=dtype, compute_dtype=dtype, remat="none")

    names = [Path(path).name for path in options.student]
    if len({"teacher", *names}) <= len(names):  # two alike, or one like the teacher's line
        names = [f"student {path}" for path in options.student]
    students = {name: load(path) for name, path in zip(names, options.student, strict=True)}
    table = heldout_table(
        load(options.teacher),
        students,
        store,
        rows,
        batch_size=options.batch_size,
        chunk_size=options.chunk_size,
    )
    print_table(table)
    if options.json:
        write_json(Path(options.json), table)
        say(f"wrote {options.json}")


if __name__ == "__main__":
    run_command(main)
