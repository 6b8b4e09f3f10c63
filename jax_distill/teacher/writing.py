"""One cache: the teacher over the rows it lacks, shard by shard."""

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jax_distill import processes, sharding
from jax_distill.base.console import StepProgress, say
from jax_distill.base.errors import RunError, UserError
from jax_distill.batch import DRAWS, EncodedTopK
from jax_distill.cache import Cache, Location, Manifest, Writer, create, row_uniforms
from jax_distill.model import Decoder
from jax_distill.targets import capture
from jax_distill.teacher.rows import KnownRows, RowSource, Shard

AHEAD = 2
"""Batches that the devices have been given beside the one whose result is fetched: enough to work
on while the host hands a shard to the writer."""
T = TypeVar("T")


def expected_bytes(manifest: Manifest, rows: int) -> int:
    """What a cache of that many rows will take on disk, a little from above.

    An upper bound where a position has fewer than K: a random sample, top_p.
    Fitted to real logits at K = 100, V of 2k to 201k and T of 256 to 8,192, 0 to 6 % above them
    (docs/CACHE.md, "Size"): an id takes 0.375·log2(V) + 6.4 bits, a gap 0.74 bytes, a temperature
    7, the rest of a position 3; each piece of a row that is compressed alone 25 bytes an entry more
    and 900. No entry takes more than it has uncompressed. In format 2 the first three and the 25
    are 0.78, 2.5, 1.05 and 40.
    """
    length = manifest.sequence_length
    piece = min(length, 2048)  # positions: cache.arrays.INNER_CHUNK
    fitted = (0.375, 6.4, 0.74, 25) if manifest.is_coded else (0.78, 2.5, 1.05, 40)
    slope, bits, gap, of_piece = fitted
    id_bits = slope * math.log2(max(manifest.vocab_size, 2)) + bits
    per_entry = id_bits / 8 + gap + of_piece / piece
    per_entry = min(per_entry, 4.0 if manifest.vocab_size <= 65536 else 6.0)
    per_entry += 0.3 if DRAWS in manifest.optional else 0
    per_token = manifest.top_k * per_entry + 7 * len(manifest.temperatures) + 3 + 900 / piece
    per_token += sum(2 * shape[-1] for shape in manifest.hidden_shapes().values())  # bf16
    return int(rows * length * per_token)


def write_cache(
    path: str,
    manifest: Manifest,
    rows: RowSource,
    *,
    model: Decoder | None,
    mesh: Mesh,
    batch_size: int,
    chunk_size: int,
    growth: str | None = None,
) -> Cache:
    """Run the teacher over the rows that the cache at `path` lacks, and commit them shard by shard.

    A shard is made and one is written in the background while the teacher reads another; where the
    teacher has to wait for the writer, a line says so. Without a model the cache holds the rows
    alone. Of several processes, all of which call this, each reads and writes every n-th missing
    shard.

    Args:
        batch_size: rows per teacher step; a shard begins a new one.
        chunk_size: tokens per device whose logits are in memory at a time.
        growth: see `cache.create`.

    Raises:
        UserError: the cache there is another one (`cache.create`), or the disk is too small; what
            is wrong with the rows.
        RunError: a row has logits that are not finite (its number is named), or the disk is full.
    """
    share, is_first = sharding.row_share(mesh), processes.is_primary_process()
    # Of text not even where it is short: what a cache's first head says must not depend on that.
    known = rows.count if isinstance(rows, KnownRows) else None
    with processes.primary_first(
        lambda: create(path, manifest, known, is_first=is_first, growth=growth)
    ) as writer:
        committed = frozenset(processes.from_primary(writer.committed))
        work = Work(rows, committed, share, manifest.shard_rows, batch_size // share.parts)
        if model is not None:
            _run_teacher(writer, work, model, mesh, batch_size, chunk_size)
        else:
            for shard, _ in work.own_shards():
                if shard is not None and share.is_first:
                    writer.write(shard.number, shard.arrays, shard.resume)
        processes.wait_for_all()
        processes.from_primary(lambda: writer.finish(rows.expected))
    return Cache.open(path)


class Work(NamedTuple):
    """The rows that a cache lacks, and which of them are this process's.

    Attributes:
        rows: all of them. committed: the shards that are there.
        share: this process's. shard_rows: of a shard. batch_size: own rows of a batch.
    """

    rows: RowSource
    committed: Collection[int]
    share: sharding.RowShare
    shard_rows: int
    batch_size: int

    def own_shards(self) -> Iterator[tuple[Shard | None, int]]:
        """Every n-th missing shard, and how many batches every process runs meanwhile: one whose
        shard has fewer rows, or that has none left (None), takes part in the others' with padding.
        """
        every = prefetched(self.rows.shards())
        missing = (shard for shard in every if shard.number not in self.committed)
        while turn := list(itertools.islice(missing, self.share.parts)):
            count = max(-(-shard.rows // self.batch_size) for shard in turn)
            yield turn[self.share.number] if self.share.number < len(turn) else None, count

    @property
    def expected_rows(self) -> int:
        """That are missing, as far as is known."""
        return max(self.rows.expected - len(self.committed) * self.shard_rows, 1)

    @property
    def expected_batches(self) -> int:
        """Of every process, as far as is known: a turn is as long as its longest shard."""
        turn = self.shard_rows * self.share.parts
        turns, rest = divmod(self.expected_rows, turn)
        longest = min(rest, self.shard_rows)
        return turns * -(-self.shard_rows // self.batch_size) + -(-longest // self.batch_size)


def prefetched(values: Iterator[T]) -> Iterator[T]:
    """The same, one ahead, made in a thread of their own."""
    with ThreadPoolExecutor(1, thread_name_prefix="rows") as pool:
        made = pool.submit(next, values, None)
        while (value := made.result()) is not None:
            made = pool.submit(next, values, None)
            yield value


def _announce(path: str, manifest: Manifest, todo: int) -> None:
    """One line before the work; UserError where its result cannot fit."""
    size, free = expected_bytes(manifest, todo), Location(path).free_bytes()
    tokens = todo * manifest.sequence_length
    say(
        f"{path}: {todo:,} rows of {manifest.sequence_length:,} = {tokens:,} tokens to write, "
        f"about {format_bytes(size)} on disk"
        + _hidden_share(manifest, todo)
        + ("" if free is None else f", {format_bytes(free)} free")
    )
    if free is not None and size > free:
        raise UserError(
            f"expected {format_bytes(size)} free for {path}, got {format_bytes(free)}; make room, "
            "set another cache.path, or lower cache.top_k or data.max_rows"
        )


def _hidden_share(manifest: Manifest, rows: int) -> str:
    """What of the announced size hidden states take."""
    shapes = manifest.hidden_shapes()
    size = rows * sum(2 * length * width for length, width in shapes.values())
    layers = ", ".join(map(str, shapes))
    return f" ({format_bytes(size)} of it hidden states of layers {layers})" if shapes else ""


class _Background:
    """Writes shards beside the teacher, one at a time, and measures how long it holds it up.

    What a shard is made of is put together there too; TensorStore compresses in as many threads
    as there are processors.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._pool = writer, ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._pending: Future | None = None
        self._waited, self._begin, self._said = 0.0, time.monotonic(), False

    def write(self, shard: Shard, arrays: Callable[[], dict[str, np.ndarray]]) -> None:
        """Begin to write a shard, once the one before is there; raises what went wrong with it."""
        before = time.monotonic()
        self.finish()
        now = time.monotonic()
        self._waited += now - before
        if not self._said and (line := bottleneck(self._waited, now - self._begin)):
            self._said = True
            say(line)
        self._pending = self._pool.submit(
            lambda: self._writer.write(shard.number, arrays(), shard.resume)
        )

    def finish(self) -> None:
        """Wait for the last shard."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown()


def bottleneck(waited: float, seconds: float) -> str:
    """One line where the teacher has waited for the writer for more than a tenth of the time."""
    if waited <= seconds / 10:
        return ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"the cache's writer is the bottleneck: the teacher has waited {waited:,.1f} of "
        f"{seconds:,.1f} s for it; give this process more than {cores} processors, or a faster disk"
    )


def _run_teacher(
    writer: Writer, work: Work, model: Decoder, mesh: Mesh, batch_size: int, chunk_size: int
) -> None:
    manifest = writer.manifest
    options: dict[str, Any] = dict(
        mesh=mesh,
        vocab_size=manifest.vocab_size,
        top_k=manifest.top_k,
        temperatures=manifest.temperatures,
        chunk_size=chunk_size,
        top_p=manifest.top_p,
        hidden_layers=manifest.hidden_layers,
    )
    own = work.own_shards()
    first = next(own, None)
    if first is None:
        return
    processes.from_primary(lambda: _announce(writer.path, writer.manifest, work.expected_rows))
    outputs = _ahead(
        (shard, capture(model, batch, **options))
        for shard, count in itertools.chain([first], own)
        for batch in _batches(shard, count, work.batch_size, mesh, manifest)
    )
    tokens, done, clock = batch_size * manifest.sequence_length, 0, time.monotonic()
    bar = StepProgress(
        Location(writer.path).name, total=work.expected_batches, done=0, tokens_per_step=tokens
    )
    with bar, _Background(writer) as background:
        for shard, group in itertools.groupby(outputs, key=lambda each: each[0]):
            parts = []
            for _, output in group:
                parts.append(sharding.own_part(output))
                done += 1
                total = bar.expect(max(work.expected_batches, done))
                if done == 2 < total:  # the first one also waited for the compiler
                    _estimate((time.monotonic() - clock) * (total - 2), (total - 2) * tokens)
                clock = time.monotonic()
                bar.update(done, None)
            if shard is not None and work.share.is_first:
                background.write(shard, partial(_shard_arrays, parts, shard, manifest, writer.path))
        background.finish()


def _ahead(values: Iterator[T]) -> Iterator[T]:
    """The same, AHEAD of them made before they are asked for."""
    made = deque(itertools.islice(values, AHEAD))
    while made:
        made.extend(itertools.islice(values, 1))
        yield made.popleft()


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


def _batches(
    shard: Shard | None, count: int, batch_size: int, mesh: Mesh, manifest: Manifest
) -> Iterator[dict[str, jax.Array]]:
    """A shard's rows on the devices, `count` batches of `batch_size`; beyond its last row there is
    padding. Of a random sample, the numbers that decide the draws are there too.
    """
    length = manifest.sequence_length
    for start in range(0, count * batch_size, batch_size):
        batch = {}
        for name in ("tokens", "segment_ids", "positions"):
            part = np.zeros((0, length), np.int32)
            if shard is not None:
                part = shard.arrays[name][start : start + batch_size]
            batch[name] = np.pad(part, ((0, batch_size - len(part)), (0, 0)))
        if manifest.sampling == "random":
            begin = start + (shard.first_row if shard is not None else 0)
            numbers = range(begin, begin + batch_size)
            batch["uniforms"] = row_uniforms(numbers, length, manifest.top_k)
        yield sharding.shard_rows(mesh, batch)


def _shard_arrays(
    parts: list[tuple[EncodedTopK, np.ndarray, dict[str, np.ndarray]]],
    shard: Shard,
    manifest: Manifest,
    path: str,
) -> dict[str, np.ndarray]:
    """A shard's rows, and beside them the batches' outputs joined, their padding cut off; RunError
    where a row is not finite."""
    count = shard.rows
    bad = shard.first_row + np.flatnonzero(
        ~np.concatenate([finite for _, finite, _ in parts])[:count]
    )
    if len(bad):
        shown = ", ".join(map(str, bad[:8])) + (" …" if len(bad) > 8 else "")
        raise RunError(
            f"expected finite teacher logits, got NaN or infinity in {len(bad)} rows of {path}: "
            f"{shown}; look at the teacher's weights, or set teacher.dtype float32"
        )
    each = [encoded.arrays() | hidden for encoded, _, hidden in parts]
    arrays = {name: np.concatenate([part[name] for part in each])[:count] for name in each[0]}
    dtypes = manifest.array_shapes()
    arrays = {name: array.astype(dtypes[name][0], copy=False) for name, array in arrays.items()}
    return arrays | shard.arrays
