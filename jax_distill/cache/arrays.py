"""Where a store's bytes lie: folder, arrays, shard files, commits."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

from jax_distill.cache.manifest import Manifest
from jax_distill.config import Failure, Refusal

COMMIT_FIELDS = frozenset("shard first_row last_row tokens targets largest_token files".split())
INNER_CHUNK = 2048  # positions of one row that are compressed together


def location_of(path: str) -> dict[str, Any]:
    """TensorStore's kvstore spec of a store's folder. The one place that knows kinds of paths."""
    if "://" in path:
        raise Refusal(
            f"expected a local folder for the store, got {path}; give a path on this machine"
        )
    return {"driver": "file", "path": f"{Path(path).absolute()}/"}


def open_folder(path: str) -> ts.KvStore:
    return ts.KvStore.open(location_of(path)).result()


def read_manifest(path: str) -> Manifest | None:
    """The manifest of the store at `path`; None where no store is.

    Raises:
        Refusal: a store of another format.
        Failure: a manifest that is damaged.
    """
    text = read_key(open_folder(path), "manifest.json")
    if text is None:
        return None
    with damage(path, "manifest.json", "delete the store, which no other file can describe,"):
        return Manifest.from_json(text)


@contextlib.contextmanager
def damage(path: str, key: str, cure: str) -> Iterator[None]:
    """What a file of JSON that is cut short or another's raises, as a Failure that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Failure(
            f"expected a whole {key} in the store at {path}, got one that does not read "
            f"({type(error).__name__}: {reason}); {cure} and run the command that wrote it again"
        ) from error


def read_key(folder: ts.KvStore, key: str) -> bytes | None:
    found = folder.read(key).result()
    return found.value if found.state == "value" else None


def open_array(
    path: str, name: str, manifest: Manifest, *, rows: int, create: bool
) -> ts.TensorStore:
    dtype, shape = manifest.array_shapes()[name]
    location = location_of(path)
    location["path"] += f"{name}/"
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": location,
        "fill_missing_data_reads": False,  # a missing shard is an error, never zeros
        "store_data_equal_to_fill_value": True,  # else a shard of zeros would look missing
    }
    if not create:
        return ts.open(spec, open=True, read=True).result()
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    settings = {"cname": "zstd", "clevel": 8, "shuffle": "shuffle", "blocksize": 1 << 18}
    blosc = {"name": "blosc", "configuration": settings}
    # crc32c stands outside blosc: TensorStore rejects it inside.
    sharding = {
        "chunk_shape": [1, _inner_length(manifest.sequence_length), *shape[1:]],
        "codecs": [little_endian, blosc, {"name": "crc32c"}],
        "index_codecs": [little_endian, {"name": "crc32c"}],
    }
    grid = {"chunk_shape": [manifest.shard_rows, *shape]}
    spec["metadata"] = {
        "shape": [rows, *shape],
        "data_type": dtype,
        "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": grid},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return ts.open(spec, open=True, create=True).result()


def _inner_length(sequence_length: int) -> int:
    """The largest divisor of T up to INNER_CHUNK; T itself where all of them are small."""
    divisors = (n for n in range(INNER_CHUNK, INNER_CHUNK // 8, -1) if sequence_length % n == 0)
    return next(divisors, sequence_length)


def shard_file(manifest: Manifest, name: str, shard: int) -> str:
    """The file of one shard in one array, relative to the store's folder (zarr3's default keys)."""
    return "/".join([name, "c", str(shard), *["0"] * len(manifest.array_shapes()[name][1])])


def row_count(path: str) -> int | None:
    """N, from the array of tokens; None before it is there. Raises Failure where it is damaged."""
    text = read_key(open_folder(path), "tokens/zarr.json")
    if text is None:
        return None
    with damage(path, "tokens/zarr.json", "delete the store"):
        return int(json.loads(text)["shape"][0])


def commit_key(shard: int) -> str:
    return f"commits/{shard:06d}.json"


def read_commits(path: str) -> dict[int, dict[str, Any]]:
    """Shard → its commit. Raises Failure naming a commit that is damaged."""
    folder = open_folder(path)
    keys = sorted(
        key.decode() for key in folder.list(ts.KvStore.KeyRange("commits/", "commits0")).result()
    )
    texts = {key: folder.read(key) for key in keys if key.endswith(".json")}
    commits = {}
    for key, text in texts.items():
        with damage(path, key, "delete that file"):
            commit = json.loads(text.result().value)
            if key != commit_key(commit["shard"]) or not COMMIT_FIELDS <= commit.keys():
                raise ValueError(f"expected {', '.join(sorted(COMMIT_FIELDS))} of that shard")
            commits[commit["shard"]] = commit
    return commits
