"""`bench cache`: what a cache takes and how quickly it is written and read.

    python -m jax_distill.bench cache runs/quickstart/cache/train --level 1,5,8
    python -m jax_distill.bench cache CACHE/train --inner_chunk 64,256 --shard_rows 8,64

The first rows of a cache are written again at each setting and read back, as training reads them
(`Cache.read`, one batch ahead in a thread of its own, decoded): rows at random, and in order. Cold:
after the system was asked to forget the files; rows at random again then come from its memory.
With more --rows than the cache has they begin again at its first, however often: each is compressed
by itself, so that their size and rates are those of as many different ones.
Rates count padding as tokens. Beside each array's bytes stands the order-0 entropy of its numbers,
what a coder without a memory would need at least.
"""

import argparse
import contextlib
import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jax_distill.audit import array_bytes
from jax_distill.base.command import CommandLine, above_zero, positive_numbers
from jax_distill.base.console import console, say
from jax_distill.base.errors import UserError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.cache import Cache, arrays, coding, create
from jax_distill.cache.arrays import INNER_CHUNK, LEVEL
from jax_distill.cache.manifest import FORMAT_VERSION

CODECS = [
    f"{cname}:{shuffle}"
    for cname in ("zstd", "zlib", "lz4", "lz4hc", "blosclz")
    for shuffle in ("shuffle", "bitshuffle", "noshuffle")
]
"""Of blosc: a compressor, and how it puts a chunk's bytes in order. The first is the format's."""
READS = ("cold", "", "sequential")  # after read_tokens_per_second_


def entropy_bytes(array: np.ndarray) -> float:
    """Order-0 entropy of an array's numbers, Σ −p log₂ p over their values, in bytes a row's
    position: [N,T,…] → of the T positions each."""
    if array.dtype.kind not in "iu":
        array = array.view(f"u{array.dtype.itemsize}")
    _, counts = np.unique(array, return_counts=True)
    p = counts / array.size
    return float(-(p * np.log2(p)).sum() / 8 * array.size / (array.shape[0] * array.shape[1]))


def read_ahead(cache: Cache, batches: Iterator[np.ndarray]) -> int:
    """Reads the rows of each batch, one batch ahead; how many tokens they had."""
    tokens = 0
    with ThreadPoolExecutor(1) as pool:
        waiting = deque([pool.submit(cache.read, next(batches))])
        for rows in batches:
            waiting.append(pool.submit(cache.read, rows))
            tokens += waiting.popleft().result().labels.size
        return tokens + waiting.popleft().result().labels.size


def forget(folder: str) -> None:
    """Ask the system to drop the files of a folder from its memory."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


@contextlib.contextmanager
def made_otherwise(positions: int, codec: str) -> Iterator[None]:
    """Caches with other inner chunks and another codec than the format's, written and read inside
    of this alone."""
    format_blosc = arrays.BLOSC
    cname, shuffle = codec.split(":")
    arrays.INNER_CHUNK = positions
    arrays.BLOSC = {**format_blosc, "cname": cname, "shuffle": shuffle}
    try:
        yield
    finally:
        arrays.INNER_CHUNK, arrays.BLOSC = INNER_CHUNK, format_blosc


def codecs(text: str) -> list[str]:
    """`zstd:shuffle,lz4:bitshuffle`, as argparse's `type`."""
    found = text.split(",")
    if wrong := [codec for codec in found if codec not in CODECS]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(CODECS)}, got {wrong[0][:40]!r}")
    return found


def measure(
    stored: dict[str, np.ndarray],
    of: Cache,
    *,
    rows: int,
    codec: str,
    level: int,
    inner_chunk: int,
    shard_rows: int,
    batch_size: int,
) -> dict[str, Any]:
    """One row of the table: N `rows` of the arrays [n,…] written at a setting, and read.
    inner_chunk: positions at most that are compressed together."""
    manifest = replace(of.manifest, shard_rows=min(shard_rows, rows), format_version=FORMAT_VERSION)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, made_otherwise(inner_chunk, codec):
        begin = time.perf_counter()
        with create(folder, manifest, rows, level=level) as writer:
            for shard, first, last in writer.missing_shards():
                which = np.arange(first, last + 1) % len(stored["tokens"])
                writer.write(shard, {name: array[which] for name, array in stored.items()})
        seconds = time.perf_counter() - begin
        cache = Cache.open(folder)
        found = {
            "codec": codec,
            "level": level,
            "inner_chunk": arrays.inner_length(manifest.sequence_length),
            "shard_rows": manifest.shard_rows,
            "bytes": cache.nbytes,
            "bytes_per_token": cache.nbytes / cache.tokens,
            "write_tokens_per_second": rows * manifest.sequence_length / seconds,
        }
        for kind in READS:
            order = np.arange(rows) if kind == "sequential" else rng.permutation(rows)
            if kind != "":
                forget(folder)
            begin = time.perf_counter()
            parts = iter(np.array_split(order, -(-rows // batch_size)))
            tokens = read_ahead(cache, parts)
            name = f"read_tokens_per_second{kind and '_'}{kind}"
            found[name] = tokens / (time.perf_counter() - begin)
    return found


def print_bytes(cache: Cache, stored: dict[str, np.ndarray]) -> None:
    """Where the bytes of the cache as it is go, beside what a coder without a memory needs."""
    table = Table("array", "bytes a token", "order-0 entropy")
    if cache.manifest.is_coded:
        stored = coding.encode(stored, cache.manifest.vocab_size)
    for name, size in array_bytes(cache).items():
        table.add_row(name, f"{size / cache.tokens:.2f}", f"{entropy_bytes(stored[name]):.2f}")
    console.print(table)


def print_rates(rows: list[dict[str, Any]]) -> None:
    """The settings beside each other, rates in thousands of tokens a second."""
    titles = ("codec", "level", "chunk", "shard", "GB", "bytes", "write", "random, cold", "random")
    table = Table(*titles, "in order, cold")
    table.title = "positions a chunk, rows a shard, bytes a token, thousands of tokens a second"
    for *setting, total, size, write, cold, warm, in_order in (row.values() for row in rows):
        rates = [f"{x / 1e3:,.0f}" for x in (write, cold, warm, in_order)]
        table.add_row(*map(str, setting), f"{total / 1e9:.3f}", f"{size:.1f}", *rates)
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line above."""
    parser = CommandLine("jax_distill.bench cache", description=__doc__)
    parser.add_argument("cache", help="a finished cache with a teacher, e.g. cache/train")
    parser.add_argument("--codec", type=codecs, default=CODECS[:1], help=", ".join(CODECS))
    parser.add_argument("--level", type=positive_numbers, default=[LEVEL], help="levels, 1 to 9")
    parser.add_argument("--shard_rows", type=positive_numbers, help="default: the cache's own")
    parser.add_argument(
        "--inner_chunk", type=positive_numbers, default=[INNER_CHUNK], help="positions at most"
    )
    parser.add_argument("--rows", type=above_zero, help="default: the first 512, or all of fewer")
    parser.add_argument("--batch_size", type=above_zero, default=8, help="rows of a read")
    parser.add_argument("--json", help="write the table here")
    options = parser.parse_args(argv)
    if max(options.level) > 9:
        raise UserError(f"expected --level from 1 to 9, got {max(options.level)}; lower it")
    check_new_file(options.json, "--json")
    return options


def main(argv: Sequence[str]) -> int:
    """Prints both tables; 0."""
    options = parse(argv)
    cache = Cache.open(options.cache)
    cache.require_complete()
    if not cache.manifest.top_k:
        raise UserError(
            f"expected a cache with a teacher, got rows alone at {cache.path}; name another"
        )
    rows = options.rows or min(512, cache.rows)
    stored = cache.read_arrays(np.arange(min(rows, cache.rows)))
    say(
        f"{rows:,} rows of {cache.sequence_length:,} tokens, K = {cache.manifest.top_k}, "
        f"{os.cpu_count()} processors"
        + (f"; the {cache.rows:,} of the cache again and again" if rows > cache.rows else "")
    )
    print_bytes(cache, stored)
    shards = options.shard_rows or [cache.manifest.shard_rows]
    found = [
        measure(
            stored,
            cache,
            rows=rows,
            codec=codec,
            level=level,
            inner_chunk=inner_chunk,
            shard_rows=shard,
            batch_size=options.batch_size,
        )
        for codec, level, inner_chunk, shard in itertools.product(
            options.codec, options.level, options.inner_chunk, shards
        )
    ]
    print_rates(found)
    if options.json:
        write_json(Path(options.json), found)
    return 0
