"""Reading a cache: rows by index, logprobs from gaps, and the checks before training."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import tensorstore as ts

from jax_distill.base.errors import RunError, UserError
from jax_distill.base.json_object import one_line
from jax_distill.batch import DRAWS, ROW_ARRAYS, Batch, EncodedTopK
from jax_distill.cache import coding
from jax_distill.cache.arrays import metadata_key, open_array, shard_file
from jax_distill.cache.documents import (
    MANIFEST,
    RERUN,
    Commit,
    Commits,
    commit_key,
    head_key,
    read_commits,
    read_state,
)
from jax_distill.cache.fingerprint import vocabulary_conflict
from jax_distill.cache.integrity import longer_array, metadata_problems, shard_problems
from jax_distill.cache.location import Location, sha256_hex
from jax_distill.cache.manifest import (
    HIDDEN_PREFIX,
    SAMPLINGS,
    TEACHER_ARRAYS,
    Manifest,
    digest,
)


class Cache:
    """A cache opened for reading.

    Attributes:
        path: its folder.
        location: the same, for whoever reads files of it.
        manifest: what it is.
        head: its state as a whole.
        rows: N, committed or not; while it is not known, up to the last that is committed.
        layout: where they stand in the arrays.
        commits: shard -> its commit (row range, sha256 and size of its files, tokens, targets).
    """

    def __init__(self, location: Location):
        """See `open`."""
        state = read_state(location)
        if state is None:
            raise UserError(
                f"expected a cache at {location}, got no {MANIFEST} there; write one with "
                "python -m jax_distill.teacher --config X.yaml"
            )
        self.location, self.path = location, str(location)
        self.manifest = manifest = state.manifest
        _refuse_unread(self.path, manifest)
        if state.head is None:
            raise RunError(
                f"expected a whole cache at {location}, got no head: "
                f"{state.damaged or 'its writer was stopped before it had begun'}; "
                f"{self._what_to_do()}"
            )
        self.head, self._damaged_head = state.head, state.damaged
        self._head_key = head_key(state.number)
        known = state.head.rows or None
        self._commits: Commits = read_commits(location, manifest, known, self.head)
        committed = self._commits.whole.values()
        extent = known or max((commit.last_row + 1 for commit in committed), default=0)
        self.layout = replace(self.head, rows=extent).layout(manifest.shard_rows)
        self.rows = self.layout.rows
        self._arrays = {name: self._open(name) for name in manifest.stored_shapes()}

    @classmethod
    def open(cls, path: str) -> "Cache":
        """Open what is there, finished or not. Metadata is checked by type, range and against the
        manifest; see `require_complete` for all the rest.

        Raises:
            UserError: no cache at this path, one of another format, or with arrays that change
                what its targets mean and that nothing here reads yet.
            RunError: a damaged one, or one whose writer was killed at its very start.
        """
        return cls(Location(path))

    def _open(self, name: str) -> ts.TensorStore:
        key, rows = metadata_key(name), self.head.rows or None
        try:
            return open_array(self.location, name, self.manifest, rows=rows)
        except ValueError as error:
            content = longer_array(self.location.read(key) or b"", self.head.rows)
            if sha256_hex(content) == self.head.metadata.get(key):
                return open_array(self.location, name, self.manifest, rows=rows, growing=True)
            found = "that does not fit the manifest" if self.location.read(key) else "nothing there"
            raise RunError(
                f"expected a whole {key} in the cache at {self.path}, got one {found}: "
                f"{one_line(error)}; delete that file and {RERUN}"
            ) from error

    def _what_to_do(self) -> str:
        """For a cache that is not finished."""
        writer = self.location.active_writer()
        return f"a writer is active ({writer}): wait for it" if writer else RERUN

    @property
    def commits(self) -> dict[int, Commit]:
        return self._commits.whole

    @property
    def fingerprint(self) -> str:
        """One name for the rows and targets that are there now: the manifest's, and what the cache
        has grown by."""
        if not self.head.growth:
            return self.manifest.fingerprint
        return digest([self.manifest.fingerprint, *self.head.growth])

    def rows_of(self, shard: int) -> np.ndarray:
        """The rows of a committed shard."""
        commit = self.commits[shard]
        return self.layout.rows_between(commit.first_row, commit.last_row)

    @property
    def sequence_length(self) -> int:
        return self.manifest.sequence_length

    @property
    def shards(self) -> int:
        return -(-self.layout.extent // self.manifest.shard_rows)

    @property
    def shard_count(self) -> str:
        """How many shards there will be, for messages."""
        return f"{self.shards}" if self.head.rows else "not yet counted"

    @property
    def complete(self) -> bool:
        """Whether every shard is committed and the head says so."""
        return self.head.finished and len(self.commits) == self.shards

    @property
    def largest_token(self) -> int:
        """The largest id among the rows' tokens: a student's embedding must have it."""
        return max((commit.largest_token for commit in self.commits.values()), default=0)

    @property
    def tokens(self) -> int:
        """Tokens in the committed rows, padding left out."""
        return sum(commit.tokens for commit in self.commits.values())

    @property
    def targets(self) -> int:
        """Positions whose mask is 1 in the committed rows."""
        return sum(commit.targets for commit in self.commits.values())

    @property
    def clamped_gaps(self) -> int:
        """Entries of the committed rows stored at float16's largest gap."""
        return sum(commit.clamped_gaps for commit in self.commits.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the committed shards on disk."""
        files = (file for commit in self.commits.values() for file in commit.files.values())
        return sum(file["bytes"] for file in files)

    def metadata_problems(self) -> dict[str, str]:
        """Key → what is wrong with it, of the manifest, each zarr.json and each commit."""
        return metadata_problems(
            self.location, self.manifest, self._head_key, self.head, self._commits
        )

    def shard_problems(self, *, remember: bool = False) -> dict[str, tuple[int, str]]:
        """Key → (shard, what is wrong), of each committed shard's files; every byte is read.

        remember: not of files that were found right before and have not changed since.
        """
        return shard_problems(self.location, self.manifest, self._commits, remember=remember)

    def require_complete(self) -> None:
        """The checks before training: finished, and every file the one that was committed.

        Reads every byte the first time; afterwards only what changed (docs/CACHE.md "Checks").

        Raises:
            UserError: not finished.
            RunError: damaged; the first such file is named.
        """
        if not self.complete:
            damaged = "; ".join(
                [self._damaged_head] * bool(self._damaged_head)
                + [f"{key} does not read ({why})" for key, why in self._commits.damaged.items()]
            )
            raise UserError(
                f"expected a finished cache at {self.path}, got {len(self.commits)} of its "
                f"{self.shard_count} shards{damaged and f' ({damaged})'}; {self._what_to_do()}"
            )
        for key, problem in self.metadata_problems().items():
            raise RunError(
                f"expected a whole cache at {self.path}, got {key}: {problem}; delete {key} there "
                f"and {RERUN}"
            )
        for key, (shard, problem) in self.shard_problems(remember=True).items():
            commit = self.commits[shard]
            raise RunError(
                f"expected a whole cache at {self.path}, got {key} (rows {commit.first_row} to "
                f"{commit.last_row}): {problem}; delete {commit_key(shard)} there and {RERUN}"
            )

    def check_vocabulary(self, vocabulary: dict[str, int]) -> None:
        """Refuse a student's tokenizer that gives an id another token than the cache's does.

        Nothing is compared where one side has no tokenizer.
        """
        conflict = vocabulary_conflict(self.manifest.vocabulary, vocabulary)
        if conflict:
            first, stored, wanted = conflict
            raise UserError(
                f"expected the student's tokenizer to give id {first} to {stored!r} as the cache "
                f"at {self.path} does, got {wanted!r}; use the teacher's tokenizer"
            )

    def student_length(self, vocab_size: int, vocabulary: dict[str, int], name: str) -> int:
        """How many ids the student `name` knows: its tokenizer's, or the cache's where one of the
        two has no tokenizer. vocab_size: of its embedding; vocabulary: {} without a tokenizer.

        Raises:
            UserError: the tokenizers map an id to different tokens, or the embedding lacks ids that
                the cache holds; a random sample, of ids that the student lacks.
        """
        self.check_vocabulary(vocabulary)
        if self.largest_token >= vocab_size:
            raise UserError(
                f"expected a student vocabulary above the cache's largest id {self.largest_token}, "
                f"got {vocab_size} in {name}; use a student with the teacher's tokenizer"
            )
        length = 1 + max(vocabulary.values(), default=-1)
        if not vocabulary or not self.manifest.vocabulary:
            length = self.manifest.vocab_size
        if self.manifest.sampling == "random" and length < self.manifest.vocab_size:
            raise UserError(
                f"expected a student with the {self.manifest.vocab_size} tokens of the cache at "
                f"{self.path}, whose random samples have no tail for others to fold into, got "
                f"{length} in {name}; use a cache with cache.sampling top_k"
            )
        return length

    def read(
        self,
        rows: Iterable[int] | np.ndarray,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        targets: bool = True,
        hidden_layers: Sequence[int] = (),
    ) -> Batch:
        """Rows by index (any order, repeats allowed): a batch as the loss wants it.

        Args:
            temperature: τ, among the manifest's.
            top_k: use only the first of the stored K; the rest joins the tail.
            targets: False leaves the teacher's arrays on disk.
            hidden_layers: the teacher's layers whose outputs are read too, P of them, in this
                order: bf16 [B,T,P,D'].

        Returns:
            numpy arrays; its targets are None where the cache has no teacher.

        Raises:
            UserError: τ or hidden states not stored; top_k above the stored K, or of a random
                sample; rows not committed.
            RunError: a damaged shard; its file is named.
        """
        stored_k = self.manifest.top_k if targets else 0
        if stored_k:
            self._check_temperature(temperature)
        is_random = self.manifest.sampling == "random"
        if top_k is not None and stored_k and is_random:
            raise UserError(
                f"expected cache.read_top_k null with the random samples of the cache at "
                f"{self.path}, of which a part is no sample, got {top_k}; leave it out"
            )
        if top_k is not None and stored_k and not 1 <= top_k <= stored_k:
            raise UserError(
                f"expected cache.read_top_k from 1 to the stored {stored_k}, got {top_k}; choose a "
                f"smaller one, or another cache.path with cache.top_k {top_k}"
            )
        names = ROW_ARRAYS + TEACHER_ARRAYS if stored_k else ROW_ARRAYS
        if stored_k and is_random:
            names += (DRAWS,)
        lacking = sorted(set(hidden_layers) - set(self.manifest.hidden_layers))
        if lacking:
            raise UserError(
                f"expected hidden states of layers {lacking} in the cache at {self.path}, got "
                f"{list(self.manifest.hidden_layers) or 'none'}; set cache.hidden_layers and "
                "another cache.path"
            )
        hidden = [f"{HIDDEN_PREFIX}{layer}" for layer in hidden_layers]
        arrays = self._read_arrays(np.fromiter(rows, np.int64), (*names, *hidden))
        batch = self._decoded(arrays, temperature, top_k, stored_k)
        if not hidden:
            return batch
        return replace(batch, teacher_layers=np.stack([arrays[name] for name in hidden], axis=2))

    def _decoded(
        self, arrays: dict[str, np.ndarray], temperature: float, top_k: int | None, stored_k: int
    ) -> Batch:
        if not stored_k:
            return Batch.from_rows(arrays)
        encoded = EncodedTopK.from_arrays(arrays, self.manifest.temperatures)
        found = encoded.decode(temperature)
        if top_k is not None and top_k < stored_k:
            found = found.first(top_k)
        return Batch.from_rows(arrays, found)

    def _check_temperature(self, temperature: float) -> None:
        stored = self.manifest.temperatures
        if temperature not in stored:
            raise UserError(
                f"expected a temperature that the cache at {self.path} has ({list(stored)}), got "
                f"{temperature}; set loss.temperature to one of them, or choose another cache.path "
                f"with {temperature} in cache.temperatures"
            )

    def read_arrays(
        self, rows: np.ndarray, names: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """The arrays named, or all, at these rows, as `Writer.write` took them; raises as `read`
        does."""
        return self._read_arrays(rows, names or tuple(self.manifest.array_shapes()))

    def _read_arrays(self, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        if rows.size and not 0 <= rows.min() <= rows.max() < self.rows:
            raise IndexError(
                f"expected rows from 0 to {self.rows - 1}, got {rows.min()}..{rows.max()}"
            )
        rows = self.layout.positions(rows)
        for shard in np.unique(rows // self.manifest.shard_rows):
            if int(shard) not in self.commits:
                raise UserError(
                    f"expected a finished cache at {self.path}, got no commit of shard {shard}; "
                    f"{self._what_to_do()}"
                )
        is_coded = self.manifest.is_coded
        of = coding.CODED if is_coded else {}
        stored = [each for name in names for each in of.get(name, (name,))]
        try:
            reads = {name: self._arrays[name][rows].read() for name in stored}
            arrays = {name: read.result() for name, read in reads.items()}
        except ValueError as error:
            away = self.location.unreachable(error)
            raise RunError(away or self._name_damage(rows, str(error))) from error
        try:
            return coding.decode(arrays, self.manifest.vocab_size) if is_coded else arrays
        except (IndexError, ValueError) as error:  # whole chunks, of another array
            raise RunError(
                f"expected ids below {self.manifest.vocab_size} in the cache at {self.path}, got "
                f"others in rows {rows.min()} to {rows.max()}: {one_line(error)}; "
                f"python -m jax_distill.audit {self.path} --verify names the files"
            ) from error

    def _name_damage(self, rows: np.ndarray, reason: str) -> str:
        """Which shard file of those a failed read touched is the bad one, and what to do."""
        for row in np.unique(rows):
            shard = int(row) // self.manifest.shard_rows
            for name, array in self._arrays.items():
                file, error = shard_file(self.manifest, name, shard), _read_error(array, int(row))
                if error:
                    return (
                        f"expected a whole cache at {self.path}, got {file} damaged at row {row} "
                        f"({error}); delete {commit_key(shard)} there and {RERUN}"
                    )
        return f"expected to read the cache at {self.path}, got: {reason}; read it again"


def _read_error(array: ts.TensorStore, row: int) -> str | None:
    try:
        array[row].read().result()
    except ValueError as error:
        return one_line(error)
    return None


def _refuse_unread(path: str, manifest: Manifest) -> None:
    """Refuse optional arrays without which the targets or the loss mean something else. Hidden
    states are besides: whoever does not train on them loses nothing."""
    unread = [name for name in manifest.optional if not name.startswith((HIDDEN_PREFIX, DRAWS))]
    is_random = manifest.sampling == "random"
    if manifest.sampling not in SAMPLINGS or is_random != (DRAWS in manifest.optional):
        unread.append(f"sampling {manifest.sampling}")
    if unread:
        raise UserError(
            f"expected a cache of rows and top-K targets at {path}, got one with "
            f"{', '.join(unread)}, which this version does not use; install a newer jax_distill, "
            "or choose another cache.path"
        )
