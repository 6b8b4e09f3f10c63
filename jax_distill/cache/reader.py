"""Reading a store: rows by index, logprobs from gaps, and the checks before training."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from jax_distill.cache.arrays import (
    commit_key,
    open_array,
    read_commits,
    read_manifest,
    row_count,
    shard_file,
)
from jax_distill.cache.manifest import ROW_ARRAYS, TEACHER_ARRAYS, Manifest
from jax_distill.config import Failure, Refusal


def _log_sum(logprobs: np.ndarray) -> np.ndarray:
    """[..,K] -> [..] float64: logsumexp over K; -inf for none. Terms in fp32, their sum in
    float64."""
    top = logprobs.max(axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, np.float32(0))
    total = np.exp(logprobs - shift[..., None]).sum(axis=-1, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return shift + np.log(total)


def _log_one_minus_exp(x: np.ndarray) -> np.ndarray:
    """log(1 - e^x) for x <= 0, in float64, exact near both ends (Maechler 2012)."""
    x = np.minimum(x.astype(np.float64), 0.0)
    with np.errstate(divide="ignore"):
        near_zero, far = np.log(-np.expm1(np.maximum(x, -1.0))), np.log1p(-np.exp(x))
    return np.where(x > -np.log(2.0), near_zero, far)


def logprobs_from_gaps(
    gaps: np.ndarray, log_z: np.ndarray, log_tail: np.ndarray, count: np.ndarray, temperature: float
) -> np.ndarray:
    """log p_k = -gap/τ - log_z, then moved together so that the sum of p_k is 1 - p_tail.

    gaps [..,K] float16; log_z, log_tail [..] float32 at τ; count [..]. Returns float32 [..,K],
    nats, with -inf from `count` on. The move takes out what the gaps' fp16 did to the sum.
    """
    unnormalised = gaps.astype(np.float32) / np.float32(-temperature) - log_z[..., None]
    real = np.arange(gaps.shape[-1]) < count[..., None]
    logprobs = np.where(real, unnormalised, np.float32(-np.inf))
    total = _log_sum(logprobs)
    move = np.where(
        np.isfinite(total), _log_one_minus_exp(log_tail) - np.maximum(total, -1e30), 0.0
    )
    return logprobs + move.astype(np.float32)[..., None]


def keep_first(teacher: dict[str, np.ndarray], top_k: int) -> dict[str, np.ndarray]:
    """The first `top_k` of the K entries; what is dropped joins the tail."""
    dropped = _log_sum(teacher["teacher_logprobs"][..., top_k:])
    tail = np.logaddexp(teacher["teacher_log_tail"].astype(np.float64), dropped)
    return {
        "teacher_indices": teacher["teacher_indices"][..., :top_k],
        "teacher_logprobs": teacher["teacher_logprobs"][..., :top_k],
        "teacher_log_tail": tail.astype(np.float32),
        "teacher_count": np.minimum(teacher["teacher_count"], np.int32(top_k)),
    }


def vocabulary_conflict(ours: dict[str, int], other: dict[str, int]) -> tuple[int, str, str] | None:
    """(id, our token, the other's) of the smallest id that two tokenizers give to different tokens.

    Only ids that both have are compared: padded heads and tokens added at the end are no conflict.
    """
    mine = {i: token for token, i in ours.items()}
    theirs = {i: token for token, i in other.items()}
    conflicts = [i for i in mine.keys() & theirs.keys() if mine[i] != theirs[i]]
    return (min(conflicts), mine[min(conflicts)], theirs[min(conflicts)]) if conflicts else None


class Store:
    """A store opened for reading.

    Attributes:
        path: its folder.
        manifest: what it is.
        rows: N, committed or not.
        commits: shard -> its commit (row range, sha256 and size of its files, tokens, targets).
    """

    def __init__(
        self, path: str, manifest: Manifest, rows: int, commits: dict[int, dict[str, Any]]
    ):
        self.path, self.manifest, self.rows, self.commits = path, manifest, rows, commits
        self._arrays = {
            name: open_array(path, name, manifest, rows=rows, create=False)
            for name in manifest.array_shapes()
        }

    @classmethod
    def open(cls, path: str) -> "Store":
        """Open what is there, finished or not.

        Raises:
            Refusal: no store at this place.
            Failure: a damaged one, or one whose writer was killed at its very start.
        """
        manifest = read_manifest(path)
        if manifest is None:
            raise Refusal(
                f"expected a store at {path}, got no manifest.json there; write one with "
                "python -m jax_distill.teacher --config X.yaml"
            )
        try:
            return cls(path, manifest, row_count(path) or 0, read_commits(path))
        except ValueError as error:
            raise Failure(
                f"expected a whole store at {path}, got one that does not open: "
                f"{_one_line(error)}; run the command that wrote it again"
            ) from error

    @property
    def sequence_length(self) -> int:
        return self.manifest.sequence_length

    @property
    def shards(self) -> int:
        return -(-self.rows // self.manifest.shard_rows)

    @property
    def complete(self) -> bool:
        return len(self.commits) == self.shards

    @property
    def largest_token(self) -> int:
        """The largest id among the rows' tokens: a student's embedding must have it."""
        return max((commit["largest_token"] for commit in self.commits.values()), default=0)

    @property
    def tokens(self) -> int:
        """Tokens in the committed rows, padding left out."""
        return sum(commit["tokens"] for commit in self.commits.values())

    @property
    def targets(self) -> int:
        """Positions whose mask is 1 in the committed rows."""
        return sum(commit["targets"] for commit in self.commits.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the committed shards on disk."""
        files = (file for commit in self.commits.values() for file in commit["files"].values())
        return sum(file["bytes"] for file in files)

    def require_complete(self) -> None:
        if not self.complete:
            raise Refusal(
                f"expected a finished store at {self.path}, got {len(self.commits)} of its "
                f"{self.shards} shards; run the command that wrote it again"
            )

    def check_vocabulary(self, vocabulary: dict[str, int]) -> None:
        """Refuse a student's tokenizer that gives an id another token than the store's does.

        Nothing is compared where one side has no tokenizer.
        """
        conflict = vocabulary_conflict(self.manifest.vocabulary, vocabulary)
        if conflict:
            first, stored, wanted = conflict
            raise Refusal(
                f"expected the student's tokenizer to give id {first} to {stored!r} as the store "
                f"at {self.path} does, got {wanted!r}; use the teacher's tokenizer"
            )

    def student_length(self, columns: int, vocabulary: dict[str, int], name: str) -> int:
        """How many ids the student `name` knows: its tokenizer's, or the store's where one of the
        two has no tokenizer. columns: of its embedding; vocabulary: {} without a tokenizer.

        Raises:
            Refusal: the tokenizers map an id to different tokens, or the embedding lacks ids that
                the store holds.
        """
        self.check_vocabulary(vocabulary)
        if self.largest_token >= columns:
            raise Refusal(
                f"expected a student vocabulary above the store's largest id {self.largest_token}, "
                f"got {columns} in {name}; use a student with the teacher's tokenizer"
            )
        if not vocabulary or not self.manifest.vocabulary:
            return self.manifest.vocab_size
        return 1 + max(vocabulary.values())

    def read(
        self,
        rows: Iterable[int] | np.ndarray,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        targets: bool = True,
    ) -> dict[str, np.ndarray]:
        """Rows by index (any order, repeats allowed): a batch as the loss wants it.

        Args:
            temperature: τ, among the manifest's.
            top_k: use only the first of the stored K; the rest joins the tail.
            targets: False leaves the teacher's arrays on disk.

        Returns:
            tokens, labels, segment_ids, positions int32 [B,T]; mask bool [B,T]; and where the store
            has a teacher: teacher_indices int32 [B,T,K], teacher_logprobs float32 [B,T,K] and
            teacher_log_tail float32 [B,T] (nats, at τ, over the teacher's whole vocabulary),
            teacher_count int32 [B,T]. labels[t] = tokens[t+1]; in the last column label and mask
            are 0.

        Raises:
            Refusal: τ not stored; top_k above the stored K; rows not committed.
            Failure: a damaged shard; its file is named.
        """
        stored_k = self.manifest.top_k if targets else 0
        where = self._temperature_place(temperature) if stored_k else 0
        if top_k is not None and stored_k and not 1 <= top_k <= stored_k:
            raise Refusal(
                f"expected cache.read_top_k from 1 to the stored {stored_k}, got {top_k}; choose a "
                f"smaller one, or write a store with cache.top_k {top_k}"
            )
        names = ROW_ARRAYS + TEACHER_ARRAYS if stored_k else ROW_ARRAYS
        raw = self._read_arrays(np.fromiter(rows, np.int64), names)
        tokens = raw["tokens"]
        # The one place that shifts: position t predicts token t+1.
        labels = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
        mask = raw["loss_mask"] != 0
        mask[:, -1] = False
        batch = {
            "tokens": tokens,
            "labels": labels,
            "segment_ids": raw["segment_ids"],
            "positions": raw["positions"],
            "mask": mask,
        }
        if not stored_k:
            return batch
        count, log_tail = raw["teacher_count"], raw["teacher_log_tail"][..., where]
        teacher = {
            "teacher_indices": raw["teacher_indices"].astype(np.int32),
            "teacher_logprobs": logprobs_from_gaps(
                raw["teacher_gaps"], raw["teacher_log_z"][..., where], log_tail, count, temperature
            ),
            "teacher_log_tail": log_tail,
            "teacher_count": count.astype(np.int32),
        }
        if top_k is not None and top_k < stored_k:
            teacher = keep_first(teacher, top_k)
        return batch | teacher

    def _temperature_place(self, temperature: float) -> int:
        stored = self.manifest.temperatures
        if temperature in stored:
            return stored.index(temperature)
        raise Refusal(
            f"expected a temperature that the store at {self.path} has ({list(stored)}), got "
            f"{temperature}; set loss.temperature to one of them, or write a store with it in "
            "cache.temperatures"
        )

    def _read_arrays(self, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        if rows.size and not 0 <= rows.min() <= rows.max() < self.rows:
            raise IndexError(
                f"expected rows from 0 to {self.rows - 1}, got {rows.min()}..{rows.max()}"
            )
        for shard in np.unique(rows // self.manifest.shard_rows):
            if int(shard) not in self.commits:
                raise Refusal(
                    f"expected a finished store at {self.path}, got no commit of shard {shard}; "
                    "run the command that wrote it again"
                )
        try:
            reads = {name: self._arrays[name][rows].read() for name in names}
            return {name: read.result() for name, read in reads.items()}
        except ValueError as error:
            raise Failure(self._name_damage(rows, str(error))) from error

    def _name_damage(self, rows: np.ndarray, reason: str) -> str:
        """Which shard file of those a failed read touched is the bad one, and what to do."""
        for row in np.unique(rows):
            shard = int(row) // self.manifest.shard_rows
            for name, array in self._arrays.items():
                file, error = shard_file(self.manifest, name, shard), _read_error(array, int(row))
                if error:
                    return (
                        f"expected a whole store at {self.path}, got {file} damaged at row {row} "
                        f"({error}); delete {commit_key(shard)} there and run the command that "
                        "wrote it again"
                    )
        return f"expected to read the store at {self.path}, got: {reason}; read it again"


def _read_error(array: ts.TensorStore, row: int) -> str | None:
    try:
        array[row].read().result()
    except ValueError as error:
        return _one_line(error)
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
