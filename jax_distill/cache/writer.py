"""Writing a store: whole shards, each flushed, then committed; one writer at a time."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jax_distill.cache.arrays import (
    commit_key,
    open_array,
    open_folder,
    read_commits,
    read_key,
    read_manifest,
    row_count,
    shard_file,
)
from jax_distill.cache.manifest import Manifest, refuse_other_store
from jax_distill.config import DISK_FULL, Failure, Refusal, check_writable

LARGEST_TOP_K = 65535  # teacher_count is uint16


@contextlib.contextmanager
def _disk_failures(path: str) -> Iterator[None]:
    """A full or read-only disk is no bug of ours. TensorStore reports both as ValueError."""
    try:
        yield
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        full = any(f"os_error_code='{code}'" in reason for code in DISK_FULL)
        full = full or (isinstance(error, OSError) and error.errno in DISK_FULL)
        cure = "make room" if full else "see to that"
        raise Failure(
            f"expected to write the store at {path}, got: {reason}; what is committed stays good: "
            f"{cure} and run the same command again"
        ) from error


class _Lock:
    """One writer a store. The kernel lets go of it when the process ends, however that happens."""

    def __init__(self, path: str):
        self.file = Path(path) / "writer.lock"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self.handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(self.handle, 32).decode() or "unknown"
                os.close(self.handle)
                raise Refusal(
                    f"expected no other writer at {path}, got process {owner}; wait for its end"
                ) from None
            if os.fstat(self.handle).st_nlink:
                break
            os.close(self.handle)  # its last owner removed the file between our open and our lock
        os.ftruncate(self.handle, 0)
        os.write(self.handle, str(os.getpid()).encode())

    def release(self) -> None:
        if self.handle >= 0:
            self.file.unlink(missing_ok=True)
            os.close(self.handle)
            self.handle = -1


class Writer:
    """Writes whole shards of one store. Made by `create`; a `with` block lets go of the lock."""

    def __init__(self, path: str, manifest: Manifest, rows: int, lock: _Lock):
        self.path, self.manifest, self.rows = path, manifest, rows
        self._lock = lock
        self._folder = open_folder(path)
        self._arrays = {
            name: open_array(path, name, manifest, rows=rows, create=True)
            for name in manifest.array_shapes()
        }
        self._committed = set(read_commits(path))
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Delete shards without a commit, and files that a killed writer had not yet renamed:
        TensorStore reads a partial last shard before it writes it."""
        root = Path(self.path)
        keep = {
            root / shard_file(self.manifest, name, shard)
            for name in self._arrays
            for shard in self._committed
        }
        written = (file for name in self._arrays for file in (root / name / "c").rglob("*"))
        for file in [*written, *root.rglob("*.__lock")]:
            if file.is_file() and file not in keep:
                file.unlink(missing_ok=True)

    def missing_shards(self) -> list[tuple[int, int, int]]:
        """(shard, its first row, its last row) of each shard without a commit; both inclusive."""
        size = self.manifest.shard_rows
        shards = range(-(-self.rows // size))
        every = [(shard, shard * size, min((shard + 1) * size, self.rows) - 1) for shard in shards]
        return [each for each in every if each[0] not in self._committed]

    def write(self, shard: int, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Write a shard's rows to every array, flush, then commit it. Returns the commit.

        Raises:
            Failure: the disk does not take it; the shard then does not count.
        """
        first = shard * self.manifest.shard_rows
        last = min(first + self.manifest.shard_rows, self.rows) - 1
        self._check(arrays, last - first + 1)
        with _disk_failures(self.path):
            writes = [
                self._arrays[name][first : last + 1].write(arrays[name]) for name in self._arrays
            ]
            for each in writes:  # the file driver calls fsync before a write counts as done
                each.result()
            commit = {
                "shard": shard,
                "first_row": first,
                "last_row": last,
                "tokens": int(np.count_nonzero(arrays["segment_ids"])),
                "targets": int(np.count_nonzero(arrays["loss_mask"])),
                "largest_token": int(arrays["tokens"].max()),
                "files": {name: self._describe_file(name, shard) for name in self._arrays},
            }
            self._folder.write(commit_key(shard), json.dumps(commit, indent=1).encode()).result()
        self._committed.add(shard)
        return commit

    def _describe_file(self, name: str, shard: int) -> dict[str, Any]:
        file = shard_file(self.manifest, name, shard)
        data = read_key(self._folder, file)
        if data is None:
            raise OSError(f"{file} is not there after it was written")
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    def _check(self, arrays: dict[str, np.ndarray], rows: int) -> None:
        """Wrong arrays are our own bug, so these are plain errors."""
        expected = self.manifest.array_shapes()
        if set(arrays) != set(expected):
            raise ValueError(f"expected the arrays {sorted(expected)}, got {sorted(arrays)}")
        for name, (dtype, shape) in expected.items():
            got = arrays[name]
            if got.shape != (rows, *shape) or got.dtype != dtype:
                raise ValueError(
                    f"{name}: expected {dtype} {(rows, *shape)}, got {got.dtype} {got.shape}"
                )

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(path: str, manifest: Manifest, rows: int) -> Writer:
    """Start a store of `rows` rows at `path`, or go on with the one that an earlier run left there.

    Raises:
        Refusal: not a folder that can be written; another process writes it; K or the temperatures
            make no sense; the store that is there has another manifest (the first field that
            differs is named) or row count.
        Failure: the disk is full, or turns read-only; what is there is damaged.
    """
    if not 0 <= manifest.top_k <= min(manifest.vocab_size, LARGEST_TOP_K):
        limit = min(manifest.vocab_size, LARGEST_TOP_K)
        raise Refusal(
            f"expected cache.top_k from 0 to {limit} (vocabulary {manifest.vocab_size}), got "
            f"{manifest.top_k}; choose a smaller one"
        )
    if manifest.top_k and not (manifest.temperatures and min(manifest.temperatures) > 0):
        raise Refusal(
            f"expected temperatures above 0, got {list(manifest.temperatures)}; set "
            "cache.temperatures"
        )
    if rows < 1 or manifest.shard_rows < 1:
        raise Refusal(
            f"expected rows to store, got {rows} in shards of {manifest.shard_rows}; add data"
        )
    check_writable(path, "cache.path")
    folder = open_folder(path)
    with _disk_failures(path):
        lock = _Lock(path)
        try:
            _claim(folder, path, manifest, rows)
            return Writer(path, manifest, rows, lock)
        except BaseException:
            lock.release()
            raise


def _claim(folder: ts.KvStore, path: str, manifest: Manifest, rows: int) -> None:
    """Put the manifest where there is none; else it and the row count must be the same."""
    stored_manifest = read_manifest(path)
    if stored_manifest is None:
        folder.write("manifest.json", manifest.to_json()).result()
    else:
        refuse_other_store(path, stored_manifest, manifest)
    stored = row_count(path)
    if stored is not None and stored != rows:
        raise Refusal(
            f"expected {stored} rows as in the store at {path}, got {rows}; give another "
            "cache.path, or delete the old store"
        )
