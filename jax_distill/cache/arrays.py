"""The arrays of a cache: their zarr3 metadata and the files of their shards."""

from typing import Any

import tensorstore as ts

from jax_distill.cache.coding import FREQUENT
from jax_distill.cache.documents import OPEN_ROWS
from jax_distill.cache.location import Location
from jax_distill.cache.manifest import Manifest

INNER_CHUNK = 2048  # positions of one row that are compressed together
BLOSC = {"cname": "zstd", "shuffle": "shuffle", "blocksize": 1 << 18}
LEVEL = 1  # of zstd, 1 to 9; docs/CACHE.md, "Size", has what each costs


def open_array(
    location: Location,
    name: str,
    manifest: Manifest,
    *,
    rows: int | None,
    level: int | None = None,
    growing: bool = False,
) -> ts.TensorStore:
    """The array `name` of N `rows`, or of as many as come (None: it is made for OPEN_ROWS); made
    where it is not there, if `level` says how to compress it. An array that is there keeps its
    level. growing: for rows beyond those that its zarr.json has, which is left as it is.

    Raises:
        ValueError: its zarr.json says anything else than the manifest does: shape, dtype, chunks,
            codecs.
    """
    create = level is not None
    dtype, shape = manifest.stored_shapes()[name]
    chunk = shape[0] if name == FREQUENT else inner_length(manifest.sequence_length)
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    settings: dict[str, Any] = dict(BLOSC)
    if create and location.read(metadata_key(name)) is None:
        settings["clevel"] = level
    blosc = {"name": "blosc", "configuration": settings}
    # crc32c stands outside blosc: TensorStore rejects it inside.
    sharding = {
        "chunk_shape": [1, chunk, *shape[1:]],
        "codecs": [little_endian, blosc, {"name": "crc32c"}],
        "index_codecs": [little_endian, {"name": "crc32c"}],
    }
    grid = {"chunk_shape": [manifest.shard_rows, *shape]}
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": location.spec(name),
        "fill_missing_data_reads": False,  # a missing shard is an error, never zeros
        "store_data_equal_to_fill_value": True,  # else a shard of zeros would look missing
        "metadata": {
            "shape": [OPEN_ROWS if rows is None else rows, *shape],
            "data_type": dtype,
            "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": grid},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
    }
    if growing:
        settings["clevel"] = LEVEL  # what is there reads alike
        return ts.open(spec, open=True, assume_metadata=True, context=location.context).result()
    if create and rows is None and "clevel" not in settings:
        del spec["metadata"]["shape"]  # as it began, or as a writer that was killed has left it
        array = ts.open(spec, open=True, context=location.context).result()
        return array.resize(exclusive_max=[OPEN_ROWS, *shape], resize_metadata_only=True).result()
    if create:
        return ts.open(spec, open=True, create=True, context=location.context).result()
    return ts.open(spec, open=True, read=True, context=location.context).result()


def resize(location: Location, name: str, rows: int) -> None:
    """Let the array `name`, which is there, have so many rows. No shard is touched."""
    spec = {"driver": "zarr3", "kvstore": location.spec(name)}
    array = ts.open(spec, open=True, context=location.context).result()
    array.resize(exclusive_max=[rows, *array.shape[1:]], resize_metadata_only=True).result()


def inner_length(sequence_length: int) -> int:
    """The largest divisor of T up to INNER_CHUNK; T itself where all of them are small."""
    divisors = (n for n in range(INNER_CHUNK, INNER_CHUNK // 8, -1) if sequence_length % n == 0)
    return next(divisors, sequence_length)


def metadata_key(name: str) -> str:
    """The key of an array's zarr3 metadata."""
    return f"{name}/zarr.json"


def shard_file(manifest: Manifest, name: str, shard: int) -> str:
    """The key of one shard in one array (zarr3's default chunk keys)."""
    return "/".join([name, "c", str(shard), *["0"] * len(manifest.stored_shapes()[name][1])])
