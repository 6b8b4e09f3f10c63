"""Writing a cache: whole shards, each flushed, then committed; one writer at a time, which may be
several processes with shards of their own."""

import math
from typing import Any

import numpy as np
import tensorstore as ts

from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.json_object import one_line
from jax_distill.batch import EncodedTopK
from jax_distill.cache import coding
from jax_distill.cache.arrays import LEVEL, metadata_key, open_array, resize, shard_file
from jax_distill.cache.documents import (
    MANIFEST,
    RERUN,
    Commit,
    Commits,
    Head,
    commit_key,
    growth_leftovers,
    head_key,
    read_commits,
    read_state,
)
from jax_distill.cache.location import Location, WriterLock, sha256_hex
from jax_distill.cache.manifest import LARGEST_TOP_K, Manifest, refuse_other_cache

LARGEST_GAP = 65504.0  # float16's largest; larger ones are clamped to it
CODING_ERROR = 1e-6  # nats of KL a position: what gaps in float16 may cost, docs/CACHE.md


class Writer:
    """Writes whole shards of one cache. Made by `create`; a `with` block releases the lock.

    The last shard's commit also writes the head that says `finished`; where several processes
    write, or how many rows come is not known, `finish` does. Without a lock this is one of the
    others of them.
    """

    def __init__(
        self,
        location: Location,
        rows: int | None,
        lock: WriterLock | None,
        level: int = LEVEL,
        growth: str | None = None,
    ):
        state = read_state(location)
        assert state is not None  # `create` has just put it there
        self._head, self._number, self._growth = state.head, state.number, growth
        if rows is None and state.head is not None and not growth:
            rows = state.head.rows or None
        self.path, self.manifest, self.rows = str(location), state.manifest, rows
        self._location, self._lock = location, lock
        self._arrays = {name: self._open(name, level) for name in state.manifest.stored_shapes()}
        self._commits = self._read_commits()
        for key, problem in self._commits.damaged.items():
            say(f"{location}: {key} is damaged ({problem}): its shard is written again")
        if lock is None:
            return
        self._remove_leftovers()
        if self._head is None:
            self._write_head(Head.of(rows or 0, self._metadata(), {}, finished=False))
        self._finish()

    def _read_commits(self) -> Commits:
        is_growing = self._growth is not None
        found = read_commits(
            self._location, self.manifest, self.rows, self._head, growing=is_growing
        )
        if is_growing:
            for shard in self._given_up(found):
                del found.whole[shard], found.sha256[commit_key(shard)]
        return found

    def _given_up(self, commits: Commits) -> list[int]:
        """Shards of the growth with another text, which was given up."""
        assert self._head is not None
        begin = -(-self._head.rows // self.manifest.shard_rows)
        return [
            shard
            for shard, commit in commits.whole.items()
            if shard >= begin and (commit.resume or {}).get("growth") != self._growth
        ]

    def _open(self, name: str, level: int) -> ts.TensorStore:
        growing = self._growth is not None
        try:
            return open_array(
                self._location, name, self.manifest, rows=self.rows, level=level, growing=growing
            )
        except ValueError as error:
            key = metadata_key(name)
            if self._location.read(key) is None:
                raise  # the disk, not the file
            raise RunError(
                f"expected {key} in the cache at {self.path} to fit the manifest, got: "
                f"{one_line(error)}; delete that file and {RERUN}"
            ) from error

    def _metadata(self) -> dict[str, str]:
        """Key → sha256 of the manifest and each zarr.json."""
        keys = [MANIFEST, *(metadata_key(name) for name in self._arrays)]
        return {key: sha256_hex(self._location.read(key) or b"") for key in keys}

    def _write_head(self, head: Head) -> None:
        if head != self._head:
            self._number += 1
            self._location.write(head_key(self._number), head.to_json())
            self._head = head

    def _finish(self) -> None:
        """Write the finished head, where every shard is committed and it is not there."""
        if self._lock is not None and self.rows is not None and not self.missing_shards():
            metadata = self._metadata() | self._commits.sha256
            growth = self._head.growth if self._head else ()
            if self._growth:
                assert self._head is not None
                growth += ({"rows": self._head.rows, "data_fingerprint": self._growth},)
                self._growth = None
            self._write_head(
                Head.of(self.rows, metadata, self._commits.whole, finished=True, growth=growth)
            )

    def finish(self, rows: int) -> None:
        """Count what all processes have committed, once they are done, and that these are N `rows`
        in all.

        Raises:
            UserError: another number than when the cache was finished before.
            RunError: the disk does not take it.
        """
        if self.rows is not None:
            _check_rows(self._location, self._head, rows)
        self._commits = self._read_commits()
        if self.rows is None:
            self.rows = rows
            with self._location.writing():
                for name in self._arrays:
                    resize(self._location, name, rows)
        self._finish()

    def _remove_leftovers(self) -> None:
        """Delete shards without a commit, and files that a killed writer had not yet renamed:
        TensorStore reads a partial last shard before it writes it."""
        self._location.delete_temporary()
        for key in growth_leftovers(self._location, self.manifest, self._head):
            if key not in self._commits.sha256:
                self._location.delete(key)
        for name in self._arrays:
            keep = {shard_file(self.manifest, name, shard) for shard in self._commits.whole}
            for key in self._location.keys(f"{name}/c"):
                if key not in keep:
                    self._location.delete(key)

    def committed(self) -> list[int]:
        """The numbers of the shards that are there."""
        return sorted(self._commits.whole)

    def missing_shards(self) -> list[tuple[int, int, int]]:
        """(shard, its first row, its last row) of each shard without a commit; both inclusive."""
        assert self.rows is not None, "how many rows come is not known"
        size = self.manifest.shard_rows
        shards = range(-(-self.rows // size))
        short = self._head.layout(size).short if self._head else {}
        every = [
            (shard, shard * size, min(shard * size + short.get(shard, size), self.rows) - 1)
            for shard in shards
        ]
        return [each for each in every if each[0] not in self._commits.whole]

    def write(
        self, shard: int, arrays: dict[str, np.ndarray], resume: dict[str, Any] | None = None
    ) -> Commit:
        """Write a shard's rows to every array, flush, then commit it, `resume` in the commit.

        Raises:
            RunError: the disk does not take it, or clamped gaps would change the distribution; the
                shard then does not count.
            ValueError: arrays that are not this cache's.
        """
        first = shard * self.manifest.shard_rows
        count = len(arrays["tokens"])
        if self.rows is not None:
            size = self.manifest.shard_rows
            short = self._head.layout(size).short if self._head else {}
            count = min(short.get(shard, size), self.rows - first)
        last = first + count - 1
        self._check(arrays, count)
        clamped = self._count_clamped(arrays, first) if self.manifest.top_k else 0
        if self.manifest.is_coded:
            arrays = coding.encode(arrays, self.manifest.vocab_size)
        with self._location.writing():
            writes = [
                self._arrays[name][first : last + 1].write(arrays[name]) for name in self._arrays
            ]
            for each in writes:  # the file driver calls fsync before a write counts as done
                each.result()
            commit = Commit(
                shard=shard,
                first_row=first,
                last_row=last,
                tokens=int(np.count_nonzero(arrays["segment_ids"])),
                targets=int(np.count_nonzero(arrays["loss_mask"])),
                smallest_token=int(arrays["tokens"].min()),
                largest_token=int(arrays["tokens"].max()),
                clamped_gaps=clamped,
                files={name: self._describe_file(name, shard) for name in self._arrays},
                resume=resume,
            )
            content = commit.to_json()
            self._location.write(commit_key(shard), content)
            self._commits.whole[shard] = commit
            self._commits.sha256[commit_key(shard)] = sha256_hex(content)
            self._finish()
        return commit

    def _describe_file(self, name: str, shard: int) -> dict[str, Any]:
        key = shard_file(self.manifest, name, shard)
        data = self._location.read(key)
        if data is None:
            raise OSError(f"{key} is not there after it was written")
        return {"sha256": sha256_hex(data), "bytes": len(data)}

    def _count_clamped(self, arrays: dict[str, np.ndarray], first: int) -> int:
        """How many real entries are stored at float16's largest gap, whatever theirs was.

        What a position's n of them get instead of (nearly) nothing is n·exp(−65504/τ − log_z), and
        that is the KL that they cost: nothing at any usual temperature.

        Raises:
            RunError: more than CODING_ERROR at one of the stored temperatures.
        """
        encoded = EncodedTopK.from_arrays(arrays, self.manifest.temperatures)
        real = np.arange(self.manifest.top_k) < encoded.count[..., None]
        clamped = ((encoded.gaps == LARGEST_GAP) & real).sum(axis=-1)
        rows, positions = np.nonzero(clamped)
        for which, temperature in enumerate(self.manifest.temperatures):
            log_p = -LARGEST_GAP / temperature - encoded.log_z[rows, positions, which]
            mass = clamped[rows, positions] * np.exp(log_p.astype(np.float64))
            if mass.size and mass.max() > CODING_ERROR:
                worst = int(mass.argmax())
                raise RunError(
                    f"expected logit gaps up to {LARGEST_GAP:g} at temperature {temperature:g}, "
                    f"got larger ones at row {first + rows[worst]}, position {positions[worst]} of "
                    f"{self.path}, worth {mass[worst]:.2g} of the probability; leave that "
                    "temperature out of cache.temperatures"
                )
        return int(clamped.sum())

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
        ids = {"tokens": arrays["tokens"]}
        if self.manifest.top_k:
            encoded = EncodedTopK.from_arrays(arrays, self.manifest.temperatures)
            ids["teacher's ids"] = encoded.indices
            if not np.isfinite(encoded.gaps).all() or (encoded.gaps < 0).any():
                raise ValueError(f"gaps: expected 0 to {LARGEST_GAP:g}, got others")
        for name, array in ids.items():
            if array.min() < 0 or array.max() >= self.manifest.vocab_size:
                raise ValueError(
                    f"{name}: expected ids from 0 to {self.manifest.vocab_size - 1}, got "
                    f"{array.min()} to {array.max()}"
                )

    def close(self) -> None:
        """Let another writer in."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(
    path: str,
    manifest: Manifest,
    rows: int | None,
    *,
    level: int = LEVEL,
    is_first: bool = True,
    growth: str | None = None,
) -> Writer:
    """Start a cache of `rows` rows at `path`, or resume the one that an earlier run left there.

    rows: None where that is known only once the last has come; see `Writer.finish`.
    level: of zstd, for a cache that is not there yet; one that is keeps its own.
    is_first: of several processes that write shards of their own the first one, which has the lock;
        the others call this once it has returned there.

    growth: the data fingerprint of the text by which a finished cache grows: shards are added, and
        count once `Writer.finish` was called; until then the cache is what it was.

    Raises:
        UserError: not a folder that can be written; another process writes it; K or the
            temperatures make no sense; the cache that is there has another manifest (what differs
            is named) or row count.
        RunError: the disk is full, or turns read-only; what is there is damaged.
    """
    if not 0 <= manifest.top_k <= min(manifest.vocab_size, LARGEST_TOP_K):
        limit = min(manifest.vocab_size, LARGEST_TOP_K)
        raise UserError(
            f"expected cache.top_k from 0 to {limit} (vocabulary {manifest.vocab_size}), got "
            f"{manifest.top_k}; choose a smaller one"
        )
    usable = [0 < temperature < math.inf for temperature in manifest.temperatures]
    if manifest.top_k and not (usable and all(usable)):
        raise UserError(
            f"expected temperatures above 0, got {list(manifest.temperatures)}; set "
            "cache.temperatures"
        )
    if manifest.shard_rows < 1 or (rows is not None and rows < 1):
        raise UserError(
            f"expected rows to cache, got {rows} in shards of {manifest.shard_rows}; add data"
        )
    location = Location(path)
    if not is_first:
        return Writer(location, rows, None, level)
    location.check_writable()
    with location.writing():
        lock = location.lock()
        try:
            _claim(location, manifest, rows)
            return Writer(location, rows, lock, level, growth)
        except BaseException:
            lock.release()
            raise


def _claim(location: Location, manifest: Manifest, rows: int | None) -> None:
    """Put the manifest where there is none; else it and the row count must be the same."""
    state = read_state(location)
    if state is None:
        location.write(MANIFEST, manifest.to_json())
        return
    refuse_other_cache(str(location), state.manifest, manifest)
    _check_rows(location, state.head, rows)


def _check_rows(location: Location, head: Head | None, rows: int | None) -> None:
    """Refuse other rows than those of the cache that is there, or of it before it has grown."""
    stored = {head.rows, *(each["rows"] for each in head.growth)} if head and head.rows else set()
    if stored and rows and rows not in stored:
        raise UserError(
            f"expected {max(stored)} rows as in the cache at {location}, got {rows}; choose "
            "another cache.path"
        )
