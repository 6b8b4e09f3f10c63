"""`python -m jax_distill.bench.cache_size CACHE`: what a cache's numbers take, measured beside the
estimate that the teacher's log prints (`teacher.expected_bytes`).

    python -m jax_distill.bench.cache_size a/train --length 512,8192 --vocab_size 128256

The rows of a cache are laid out again as rows of other lengths, one after the other, and written.
A larger vocabulary than the cache's own stands for a model that is not here: the gaps stay, and
each id becomes another one of the larger vocabulary, the same at all positions:

    spread    by a random increasing map: frequent ids stay small ones, as in any BPE
    permuted  by a random one: an id's bytes say nothing of how frequent it is

Real ids of that vocabulary should lie between: its small ids are the frequent ones, and its tokens
are spread over more ids than those of the smaller one.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jax_distill.audit import array_bytes
from jax_distill.base.command import CommandLine, positive_numbers, run_command
from jax_distill.base.console import console
from jax_distill.base.errors import UserError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.cache import Cache, Manifest, create
from jax_distill.cache.coding import CODES, FREQUENT, GAP_STEPS, INDICES
from jax_distill.cache.manifest import FORMAT_VERSION
from jax_distill.teacher import expected_bytes


def laid_out(arrays: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Arrays [N,T,…] as [N·T // length, length, …]; what is left over is left out."""
    shape = arrays["tokens"].shape
    rows = shape[0] * shape[1] // length
    return {
        name: array.reshape(-1, *array.shape[2:])[: rows * length].reshape(
            rows, length, *array.shape[2:]
        )
        for name, array in arrays.items()
    }


def id_map(kind: str, vocab_size: int, larger: int) -> np.ndarray:
    """[vocab_size] ids of the larger vocabulary, each once."""
    chosen = np.random.default_rng(0).permutation(larger)[:vocab_size]
    return np.sort(chosen) if kind == "spread" else chosen


def measure(arrays: dict[str, np.ndarray], manifest: Manifest) -> dict[str, Any]:
    """Bytes a position of rows [N,T,…] as written: ids, gaps, the rest, all; and the estimate."""
    rows, length = arrays["tokens"].shape
    dtypes = manifest.array_shapes()
    with tempfile.TemporaryDirectory() as folder:
        with create(folder, manifest, rows) as writer:
            for shard, first, last in writer.missing_shards():
                part = {
                    name: array[first : last + 1].astype(dtypes[name][0])
                    for name, array in arrays.items()
                }
                writer.write(shard, part)
        sizes = {
            name: size / rows / length for name, size in array_bytes(Cache.open(folder)).items()
        }
    found = {
        "ids": sizes[FREQUENT] + sizes[CODES],
        "gaps": sizes[GAP_STEPS],
        "all": sum(sizes.values()),
    }
    found["rest"] = found["all"] - found["ids"] - found["gaps"]
    return found | {"estimate": expected_bytes(manifest, rows) / rows / length}


def measurements(
    cache: Cache, lengths: Sequence[int], vocab_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """One for each length, and each vocabulary's maps. A row of the table."""
    arrays = cache.read_arrays(np.arange(cache.rows))
    own = cache.manifest.vocab_size
    found = []
    for length in lengths:
        rows = laid_out(arrays, length)
        if not len(rows["tokens"]):
            raise UserError(
                f"expected --length up to the cache's {arrays['tokens'].size:,} tokens, got "
                f"{length}; lower it"
            )
        manifest = replace(cache.manifest, sequence_length=length, format_version=FORMAT_VERSION)
        manifest = replace(manifest, shard_rows=max(1, min(65536 // length, len(rows["tokens"]))))
        found.append({"length": length, "vocab_size": own, "map": "", **measure(rows, manifest)})
        for larger in vocab_sizes:
            if larger <= own:
                raise UserError(f"expected --vocab_size above {own}, got {larger}; raise it")
            wide = replace(manifest, vocab_size=larger, vocabulary={}, tokenizer_fingerprint="")
            for kind in ("spread", "permuted"):
                mapped = rows | {INDICES: id_map(kind, own, larger)[rows[INDICES].astype(np.int64)]}
                found.append(
                    {"length": length, "vocab_size": larger, "map": kind, **measure(mapped, wide)}
                )
    return found


def main(argv: Sequence[str]) -> int:
    """Prints the table; 0."""
    parser = CommandLine(
        "jax_distill.bench.cache_size",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cache", help="a finished cache with a teacher, e.g. cache/train")
    parser.add_argument("--length", type=positive_numbers, help="of a row; default: the cache's")
    parser.add_argument("--vocab_size", type=positive_numbers, default=[], help="larger ones")
    parser.add_argument("--json", help="write the table here")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    cache = Cache.open(options.cache)
    cache.require_complete()
    if not cache.manifest.top_k or cache.manifest.optional:
        raise UserError(
            f"expected a cache of top K alone, got other arrays at {cache.path}; name another"
        )
    found = measurements(cache, options.length or [cache.sequence_length], options.vocab_size)
    table = Table(*found[0], title=f"bytes a position, K = {cache.manifest.top_k}")
    for row in found:
        table.add_row(*(f"{x:.1f}" if isinstance(x, float) else f"{x}" for x in row.values()))
    console.print(table)
    if options.json:
        write_json(Path(options.json), found)
    return 0


if __name__ == "__main__":
    run_command(main)
