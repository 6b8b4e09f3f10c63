"""The rows of a cache, shard by shard: made of text as they are asked for, or known before."""

import dataclasses
import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from jax_distill import data
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.cache import Manifest
from jax_distill.packing import Block, packed, pieces_of

FEW_TARGETS = 1000  # held out; a mean over n tokens has a relative error of about 1/√n


class Shard(NamedTuple):
    """The rows of one shard.

    Attributes:
        number: of the shard. first_row: of the cache.
        arrays: tokens, segment_ids, positions int32 and loss_mask uint8 [n,T].
        resume: where the rows after it can be made from, as JSON; None: from anywhere.
    """

    number: int
    first_row: int
    arrays: dict[str, np.ndarray]
    resume: dict[str, Any] | None

    @property
    def rows(self) -> int:
        return len(self.arrays["tokens"])


class RowSource(Protocol):
    """Where a cache's rows come from."""

    @property
    def count(self) -> int | None:
        """N, once it is known."""

    @property
    def expected(self) -> int:
        """N, or an estimate of it once a shard has come."""

    def shards(self) -> Iterator[Shard]:
        """In their order; those that are there already may be left out."""


class KnownRows:
    """Shards that are there, of N rows in all."""

    def __init__(self, count: int, shards: Iterable[Shard]):
        self.count = self.expected = count
        self._shards = shards

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], shard_rows: int) -> Self:
        """Of arrays [N,T]."""
        count = len(arrays["tokens"])
        shards = [
            Shard(number, a, {name: x[a : a + shard_rows] for name, x in arrays.items()}, None)
            for number, a in enumerate(range(0, count, shard_rows))
        ]
        return cls(count, shards)

    def shards(self) -> Iterator[Shard]:
        return iter(self._shards)


class AppendedRows:
    """The rows by which a cache grows, from a shard of their own on.

    Args:
        rows: the new ones, counted from 0.
        first_shard: the number of their first shard.
        growth: what the commits call this growth: its text's data fingerprint.
    """

    def __init__(self, rows: "TextRows", first_shard: int, shard_rows: int, growth: str):
        self._rows, self._growth = rows, growth
        self._shard, self._row = first_shard, first_shard * shard_rows

    @property
    def count(self) -> int | None:
        return None if self._rows.count is None else self._row + self._rows.count

    @property
    def expected(self) -> int:
        return self._row + self._rows.expected

    def shards(self) -> Iterator[Shard]:
        for shard in self._rows.shards():
            resume = {**(shard.resume or {}), "growth": self._growth}
            yield Shard(
                shard.number + self._shard, shard.first_row + self._row, shard.arrays, resume
            )


@dataclass(frozen=True)
class Mark:
    """Where rows can be made from: the beginning of a block of the packer.

    Attributes:
        row: the block's first row.
        documents, tokens: of each stream of the corpus, how many were used whole before it.
        piece: how many pieces of the next document were.
    """

    row: int
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    piece: int

    @classmethod
    def begin(cls, streams: int) -> Self:
        return cls(0, (0,) * streams, (0,) * streams, 0)

    @classmethod
    def parse(cls, values: dict[str, Any] | None, streams: int) -> Self:
        """What a commit says; the beginning where it says nothing that makes sense: what follows
        is the same from there, later."""
        match values:
            case {"row": int(row), "documents": [*documents], "tokens": [*tokens], "piece": piece}:
                numbers = [row, *documents, *tokens, piece]
                if len(documents) == len(tokens) == streams and all(
                    type(number) is int and number >= 0 for number in numbers
                ):
                    return cls(row, tuple(documents), tuple(tokens), piece)
        return cls.begin(streams)


class _Open(NamedTuple):
    """A document of which pieces may not be in a finished block yet."""

    stream: int
    tokens: int
    pieces: int


class _Packed:
    """Blocks of a corpus's rows from a mark on, and the mark after each."""

    def __init__(
        self,
        corpus: data.Corpus,
        split: data.Split,
        length: int,
        options: dict[str, bool],
        at: Mark,
    ):
        self.mark = at
        self._open: deque[_Open] = deque()
        documents = corpus.documents(split, data.Taken(at.documents, at.tokens))
        pieces = pieces_of(self._noting(documents, length), length)
        self._blocks = packed(itertools.islice(pieces, at.piece, None), length, **options)

    def _noting(
        self, documents: Iterator[tuple[int, data.Document]], length: int
    ) -> Iterator[data.Document]:
        for stream, document in documents:
            count = len(document.tokens)
            self._open.append(_Open(stream, count, -(-count // length)))
            yield document

    def __iter__(self) -> Iterator[Block]:
        for block in self._blocks:
            piece, documents, tokens = (
                self.mark.piece + block.pieces,
                list(self.mark.documents),
                list(self.mark.tokens),
            )
            while self._open and piece >= self._open[0].pieces:
                whole = self._open.popleft()
                piece -= whole.pieces
                documents[whole.stream] += 1
                tokens[whole.stream] += whole.tokens
            row = self.mark.row + len(block.arrays["tokens"])
            self.mark = Mark(row, tuple(documents), tuple(tokens), piece)
            yield block


class TextRows:
    """The rows of a part of a corpus. Bounded memory: a shard, the next one and a block.

    `str()` of it, once all have come, is one line of counts.
    """

    def __init__(
        self,
        corpus: data.Corpus,
        split: data.Split,
        manifest: Manifest,
        *,
        options: dict[str, bool],
        start: dict[str, Any] | None,
        contexts: dict[str, int],
        refuse_teacher: bool,
        has_table: bool,
        stamps: Mapping[str, tuple[int, int]],
    ):
        """
        Args:
            options: packing, separate_documents (`packing.packed`).
            start: a commit's `resume`: the rows before it are there.
            contexts: `teacher` and `student` → max_position_embeddings, where one is known.
            refuse_teacher: refuse segments beyond the teacher's, before it reads them.
            has_table: the held-out rows must have targets in their second half.
            stamps: `data.file_stamps` of the text when it was first looked at.
        """
        self._corpus, self._split, self._manifest = corpus, split, manifest
        self._start = Mark.parse(start, corpus.streams)
        self._max_rows: int | None = manifest.data["max_rows"]
        length = manifest.sequence_length
        self._packed = _Packed(corpus, split, length, options, self._start)
        self._contexts, self._refuse_teacher = contexts, refuse_teacher
        self._has_table, self._stamps = has_table, stamps
        self.count: int | None = None
        self._rows = self._start.row  # made so far
        self._tokens = 0
        self._targets = array("i")  # of each row
        self._beyond = dict.fromkeys(contexts, 0)
        self._checked = self._checks(self._shards())
        self._first: list[Shard] = []

    @property
    def expected(self) -> int:
        if self.count is not None:
            return self.count
        estimate = max(int(self._rows / self._corpus.share_read(self._split)), self._rows)
        return estimate if self._max_rows is None else min(estimate, self._max_rows)

    def begin(self) -> None:
        """Make the first shard, so that what is wrong with the text is said before a model is
        there. Raises as `shards` does."""
        self._first = list(itertools.islice(self._checked, 1))

    def shards(self) -> Iterator[Shard]:
        """
        Raises:
            RunError: a file of the text has changed meanwhile.
            UserError: what `data.Corpus` says; no rows; ids that the teacher's head lacks; segments
                beyond the teacher's context; nothing to predict.
        """
        yield from self._first
        self._first = []
        yield from self._checked

    def _shards(self) -> Iterator[Shard]:
        """Whole shards, and what is left at the end."""
        size, marks = self._manifest.shard_rows, [self._start]
        row = -(-self._start.row // size) * size  # of the next shard
        parts: list[dict[str, np.ndarray]] = []
        begin = self._start.row  # of the first part

        def shard(end: int) -> Shard:
            arrays = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
            mark = max((m for m in marks if m.row <= end), key=lambda m: m.row)
            arrays = {name: part[row - begin : end - begin] for name, part in arrays.items()}
            return Shard(row // size, row, arrays, dataclasses.asdict(mark))

        for block in self._packed:
            parts.append(block.arrays)
            marks.append(self._packed.mark)
            self._rows = self._packed.mark.row
            end = self._rows if self._max_rows is None else min(self._rows, self._max_rows)
            while end - row >= size:
                yield shard(row + size)
                row += size
            kept = next((i for i, mark in enumerate(marks[1:]) if mark.row > row), len(parts))
            begin = marks[kept].row
            parts, marks = parts[kept:], marks[kept:]
            if end == self._max_rows:
                self._rows = end
                break
        if self._rows > row:
            yield shard(self._rows)

    def _checks(self, shards: Iterator[Shard]) -> Iterator[Shard]:
        """The same; what is wrong with all of them is said before the last is given out."""
        before = None
        for shard in shards:
            if before is not None:
                yield before
            self._check(shard)
            before = shard
        self.count = self._rows
        self._check_whole()
        if before is not None:
            yield before

    def _check(self, shard: Shard) -> None:
        arrays, vocab_size = shard.arrays, self._manifest.vocab_size
        for wrong in (int(arrays["tokens"].min()), int(arrays["tokens"].max())):
            if not 0 <= wrong < vocab_size:
                raise UserError(
                    f"expected ids from 0 to {vocab_size - 1}, below the vocab_size of the "
                    f"teacher's head, got {wrong}; use the tokenizer that belongs to the teacher"
                )
        self._tokens += int(np.count_nonzero(arrays["segment_ids"]))
        self._targets.extend(arrays["loss_mask"].sum(axis=1).tolist())
        if not any(self._targets):
            say(f"WARNING: {self._split}: nothing to predict in {len(self._targets)} rows so far")
        for model, limit in self._contexts.items():
            count = data.segments_beyond(arrays["segment_ids"], arrays["positions"], limit)
            if model == "teacher" and self._refuse_teacher:
                data.check_context(count, limit, model, refuse=True)
            self._beyond[model] += count

    def _check_whole(self) -> None:
        """Refuse rows that cannot be trained on or make no table; say what there is."""
        data.check_unchanged(self._stamps)
        split = self._split
        if not self._rows:
            raise UserError(
                f"expected {split} text, got none; raise data.heldout_fraction, add text"
            )
        targets = self._targets if split == "train" else self._targets[len(self._targets) // 2 :]
        is_whole = not self._start.row  # else the others are not known
        if is_whole and not any(targets) and (split == "train" or self._has_table):
            raise UserError(
                f"expected {split} text with tokens to predict, got none; check the loss mask of "
                "the data, or raise data.heldout_fraction"
            )
        say(f"{split}: {self}")
        if split == "heldout" and is_whole and self._has_table and sum(targets) < FEW_TARGETS:
            say(
                f"WARNING: the test table will be of {sum(targets):,} tokens, too few to tell "
                "close students apart; raise data.heldout_fraction or data.max_heldout_rows"
            )

    def __str__(self) -> str:
        made, length = len(self._targets), self._manifest.sequence_length
        text = (
            f"{self._rows:,} rows of {length:,}: {self._tokens:,} tokens, "
            f"{made * length - self._tokens:,} padding, {sum(self._targets):,} to predict"
        )
        if self._start.row:
            text += f", in the {made:,} rows that were made now"
        empty = sum(not count for count in self._targets)
        return text + (f"; WARNING: {empty:,} rows with nothing to predict" if empty else "")

    @property
    def beyond(self) -> dict[str, int]:
        """Model → how many segments were longer than its context."""
        return self._beyond
