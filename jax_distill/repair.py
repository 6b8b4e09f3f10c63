"""Damaged shards of a cache, written again by its teacher: `python -m jax_distill.audit CACHE
--repair --teacher DIR`."""

from collections.abc import Collection

from jax_distill import sharding
from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.batch import ROW_ARRAYS
from jax_distill.cache import Cache, commit_key, teacher_fingerprint
from jax_distill.config import Config, TeacherConfig
from jax_distill.teacher import KnownRows, Shard, find_teacher, load_teacher, write_cache


def damaged_shards(cache: Cache) -> Collection[int]:
    """The shards whose targets are damaged and whose rows are whole.

    Raises:
        RunError: damage that the teacher alone cannot make good: of the metadata, of the rows, or a
            cache that was never finished. The command that wrote it has the text.
    """
    beyond = [f"{key}: {problem}" for key, problem in cache.metadata_problems().items()]
    beyond += [] if cache.complete else [f"{len(cache.commits)} of {cache.shards} shards committed"]
    found = cache.shard_problems()
    beyond += [f"{key}: {problem}" for key, (_, problem) in found.items() if _is_of_rows(key)]
    if beyond:
        raise RunError(
            f"expected damage to the teacher's arrays of {cache.path} alone for --repair, got "
            f"{beyond[0]}; restore that from a copy, or do as --verify says and re-run the command "
            "that wrote the cache, which has the text"
        )
    return {shard for shard, _ in found.values()}


def _is_of_rows(key: str) -> bool:
    return key.split("/")[0] in ROW_ARRAYS


def repair(cache: Cache, teacher: str) -> Cache:
    """The cache whole: its damaged shards are written again, and nothing else is touched.

    A kill on the way leaves shards missing, which the command that wrote the cache writes.

    Raises:
        UserError: another teacher than the cache's. RunError: see `damaged_shards`.
    """
    shards = damaged_shards(cache)
    if not shards:
        say(f"{cache.path}: nothing to repair")
        return cache
    manifest = cache.manifest
    found = find_teacher(teacher, key="--teacher")
    folder, _ = found.require_model(other="audit")
    if teacher_fingerprint(found.source or folder) != manifest.teacher_fingerprint:
        raise UserError(
            f"expected the teacher that the cache at {cache.path} was made with, got {teacher}, "
            "which is another by its fingerprint; name that one"
        )
    rows = KnownRows(cache.layout.extent, [_rows_of(cache, shard) for shard in sorted(shards)])
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    is_bf16 = manifest.teacher_dtype == "bfloat16"
    config = Config(teacher=TeacherConfig(dtype="bfloat16" if is_bf16 else "float32"))
    say(f"{cache.path}: writing {len(shards)} of {cache.shards} shards again")
    for shard in shards:
        cache.location.delete(commit_key(shard))
    return write_cache(
        cache.path,
        manifest,
        rows,
        model=load_teacher(folder, config, mesh),
        mesh=mesh,
        batch_size=sharding.row_shards(mesh),
        chunk_size=config.loss.chunk_size,
    )


def _rows_of(cache: Cache, number: int) -> Shard:
    """A shard's rows, before its files are deleted."""
    commit = cache.commits[number]
    arrays = cache.read_arrays(cache.rows_of(number), ROW_ARRAYS)
    return Shard(number, commit.first_row, arrays, commit.resume)
