"""One store: the teacher over the rows it lacks, shard by shard."""

import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_distill import sharding
from jax_distill.cache import Manifest, Store, Writer, create
from jax_distill.config import Failure, Refusal
from jax_distill.model import Decoder
from jax_distill.run import StepProgress, say
from jax_distill.teacher.capture import capture


def expected_bytes(manifest: Manifest, rows: int) -> int:
    """What a store of that many rows will take on disk, a little from above.

    Measured after compression: an id takes less than log2(V) bits, a gap a byte, a temperature 7
    bytes, the rest of a position 3 to 16 bytes; each compressed piece of a row has its overhead.
    """
    length = manifest.sequence_length
    per_entry = math.log2(max(manifest.vocab_size, 2)) / 8 + 1.0
    per_token = manifest.top_k * per_entry + 8 * len(manifest.temperatures) + 16
    return int(rows * (length * per_token + 400))


def write_store(
    path: str,
    manifest: Manifest,
    rows: dict[str, np.ndarray],
    *,
    model: Decoder | None,
    mesh: Mesh,
    batch_size: int,
    chunk_size: int,
) -> Store:
    """Run the teacher over the rows that the store at `path` lacks, and commit them shard by shard.

    A shard is written in the background while the teacher reads the next. Without a model the store
    holds the rows alone.

    Args:
        rows: tokens, segment_ids, positions int32 and loss_mask uint8 [N,T].
        batch_size: rows per teacher step; a shard begins a new one.
        chunk_size: positions whose logits are in memory at a time.

    Raises:
        Refusal: the store there is another's (`cache.create`), or the disk is too small.
        Failure: a row has logits that are not finite (its number is named), or the disk is full.
    """
    with create(path, manifest, len(rows["tokens"])) as writer:
        missing = writer.missing_shards()
        todo = sum(last + 1 - first for _, first, last in missing)
        if missing:
            _announce(path, manifest, todo)
        if model is None:
            for shard, first, last in missing:
                writer.write(shard, _slice(rows, first, last))
        elif missing:
            _run_teacher(writer, missing, rows, model, mesh, batch_size, chunk_size)
    return Store.open(path)


def _announce(path: str, manifest: Manifest, todo: int) -> None:
    """One line before the work; Refusal where its result cannot fit."""
    size, free = expected_bytes(manifest, todo), shutil.disk_usage(path).free
    tokens = todo * manifest.sequence_length
    say(
        f"{path}: {todo:,} rows of {manifest.sequence_length:,} = {tokens:,} tokens to write, "
        f"about {format_bytes(size)} on disk, {format_bytes(free)} free"
    )
    if size > free:
        raise Refusal(
            f"expected {format_bytes(size)} free for {path}, got {format_bytes(free)}; make room, "
            "set another cache.path, or lower cache.top_k or data.max_rows"
        )


def _run_teacher(
    writer: Writer,
    missing: list[tuple[int, int, int]],
    rows: dict[str, np.ndarray],
    model: Decoder,
    mesh: Mesh,
    batch_size: int,
    chunk_size: int,
) -> None:
    manifest = writer.manifest
    knobs: dict[str, Any] = dict(
        mesh=mesh,
        vocab_size=manifest.vocab_size,
        top_k=manifest.top_k,
        temperatures=manifest.temperatures,
        chunk_size=chunk_size,
    )
    total = sum(-(-(last + 1 - first) // batch_size) for _, first, last in missing)
    tokens = batch_size * manifest.sequence_length
    done, clock = 0, time.monotonic()
    bar = StepProgress(Path(writer.path).name, total=total, done=0, tokens_per_step=tokens)
    with bar, ThreadPoolExecutor(1, thread_name_prefix="store") as background:
        written: Future | None = None
        for shard, first, last in missing:
            # The device works ahead through the shard while the host fetches.
            batches = _batches(rows, first, last, batch_size, mesh)
            outputs = [capture(model, batch, **knobs) for batch in batches]
            parts = []
            for output in outputs:
                parts.append(jax.device_get(output))
                done += 1
                if done == 2 < total:  # the first one also waited for the compiler
                    _estimate((time.monotonic() - clock) * (total - 2), (total - 2) * tokens)
                clock = time.monotonic()
                bar.update(done, None)
            arrays = _shard_arrays(parts, manifest, writer.path, first, last)
            if written is not None:
                written.result()
            written = background.submit(writer.write, shard, arrays | _slice(rows, first, last))
        if written is not None:
            written.result()


def _estimate(seconds: float, tokens: int) -> None:
    """How long the rest takes, and what the device's memory has held at most (a GPU says that)."""
    memory = jax.local_devices()[0].memory_stats() or {}
    peak = memory.get("peak_bytes_in_use")
    say(
        f"{tokens:,} more tokens take about {seconds:,.0f} s"
        + (f"; device memory so far {format_bytes(peak)}" if peak else "")
    )


def format_bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _slice(rows: dict[str, np.ndarray], first: int, last: int) -> dict[str, np.ndarray]:
    return {name: array[first : last + 1] for name, array in rows.items()}


def _batches(
    rows: dict[str, np.ndarray], first: int, last: int, batch_size: int, mesh: Mesh
) -> Iterator[dict[str, jax.Array]]:
    """Rows from first to last on the devices, batch_size at a time. The last batch may run over
    into the next shard, whose turn comes again; beyond the last row there is padding.
    """
    for start in range(first, last + 1, batch_size):
        batch = {}
        for name in ("tokens", "segment_ids", "positions"):
            part = rows[name][start : start + batch_size]
            batch[name] = np.pad(part, ((0, batch_size - len(part)), (0, 0)))
        yield sharding.place_batch(mesh, batch)


def _shard_arrays(
    parts: list[dict[str, np.ndarray]], manifest: Manifest, path: str, first: int, last: int
) -> dict[str, np.ndarray]:
    """The batches' outputs joined, their padding cut off; Failure where a row is not finite."""
    count = last + 1 - first
    arrays = {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]}
    bad = first + np.flatnonzero(~arrays.pop("finite"))
    if len(bad):
        shown = ", ".join(map(str, bad[:8])) + (" …" if len(bad) > 8 else "")
        raise Failure(
            f"expected finite teacher logits, got NaN or infinity in {len(bad)} rows of {path}: "
            f"{shown}; look at the teacher's weights, or set teacher.dtype float32"
        )
    dtype, _ = manifest.array_shapes()["teacher_indices"]
    arrays["teacher_indices"] = arrays["teacher_indices"].astype(dtype)
    return arrays
