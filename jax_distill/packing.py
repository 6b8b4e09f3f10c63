"""Documents to rows: first-fit packing, segments, positions and the loss mask.

N rows of T positions. Rows come in blocks of 64, and no row of a block holds what comes after it:
where a block ends the packing can begin again.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset

from jax_distill.data import Document

BLOCK = 64  # rows open at once


@dataclass(frozen=True)
class Rows:
    """Rows for a cache. `str()` of it is one line of counts.

    Attributes:
        arrays: tokens, segment_ids, positions [N,T] int32 and loss_mask [N,T] uint8. Segments count
            from 1 in each row, 0 is padding; positions restart in each segment; loss_mask[t] is 1
            iff token t+1 belongs to the same segment and is a target.
        documents: came in; empty_documents: of them without a token, they give no row.
        pieces: segments, a document longer than a row has several.
        tokens_in, tokens_out: of the documents, in the rows.
        tokens_cut: beyond max_rows. tokens_in = tokens_out + tokens_cut.
        predicted: ones in the loss mask.
        rows_without_target: rows with no such one: they cost time and teach nothing.
    """

    arrays: dict[str, np.ndarray]
    documents: int
    empty_documents: int
    pieces: int
    tokens_in: int
    tokens_out: int
    tokens_cut: int
    predicted: int
    rows_without_target: int

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def __str__(self) -> str:
        size = self.arrays["tokens"].size
        text = (
            f"{len(self):,} rows of {self.arrays['tokens'].shape[1]:,}: {self.tokens_in:,} tokens "
            f"in, {self.tokens_out:,} out, {self.tokens_cut:,} cut, "
            f"{size - self.tokens_out:,} padding, {self.predicted:,} to predict"
        )
        if self.empty_documents:
            text += f"; {self.empty_documents:,} empty documents"
        if self.rows_without_target:
            text += f"; WARNING: {self.rows_without_target:,} rows with nothing to predict"
        return text


class Block(NamedTuple):
    """The rows of one block.

    Attributes:
        arrays: as of `Rows`, [n,T] with n up to BLOCK.
        pieces: that stand in them.
    """

    arrays: dict[str, np.ndarray]
    pieces: int


def pack(
    documents: Iterable[Document],
    *,
    sequence_length: int,
    packing: bool = True,
    separate_documents: bool = True,
    max_rows: int | None = None,
) -> Rows:
    """The first `max_rows` rows of `packed`, or all, with their counts. Documents beyond those rows
    are not counted, but for what was read of them."""
    counts = Counter[str]()

    def counted() -> Iterator[Document]:
        for document in documents:
            counts["documents"] += 1
            counts["empty"] += not len(document.tokens)
            counts["tokens"] += len(document.tokens)
            yield document

    options = {"packing": packing, "separate_documents": separate_documents}
    blocks = packed(pieces_of(counted(), sequence_length), sequence_length, **options)
    parts, rows = [_empty(0, sequence_length)], 0
    while (max_rows is None or rows < max_rows) and (block := next(blocks, None)) is not None:
        parts.append(block.arrays)
        rows += len(block.arrays["tokens"])
    arrays = {name: np.concatenate([part[name] for part in parts])[:max_rows] for name in parts[0]}
    segment_ids, loss_mask = arrays["segment_ids"], arrays["loss_mask"]
    tokens_out = int(np.count_nonzero(segment_ids))
    return Rows(
        arrays=arrays,
        documents=counts["documents"],
        empty_documents=counts["empty"],
        pieces=int(segment_ids.max(axis=1, initial=0).sum()),
        tokens_in=counts["tokens"],
        tokens_out=tokens_out,
        tokens_cut=counts["tokens"] - tokens_out,
        predicted=int(loss_mask.sum()),
        rows_without_target=int((~loss_mask.any(axis=1)).sum()),
    )


def packed(
    pieces: Iterable[Document],
    sequence_length: int,
    *,
    packing: bool = True,
    separate_documents: bool = True,
) -> Iterator[Block]:
    """Lays pieces (`pieces_of`) into rows of `sequence_length`, block by block; the last may have
    less than BLOCK.

    With `packing` they go, in order, into the first of 64 open rows that has room (grain's
    first-fit; where none has, the block is full); without it each has its own row. Without
    `separate_documents` a row is one segment, whose positions run through it: attention reads
    across the borders (an all-ones mask), and the loss mask stays as it is.
    """
    for arrays in (_first_fit if packing else _one_each)(iter(pieces), sequence_length):
        segment_ids, targets = arrays["segment_ids"], arrays.pop("targets")
        loss_mask = np.zeros(targets.shape, np.uint8)
        same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
        loss_mask[:, :-1] = same & targets[:, 1:]
        count = int(segment_ids.max(axis=1, initial=0).sum())
        if not separate_documents:
            real = segment_ids > 0
            arrays["segment_ids"] = real.astype(np.int32)
            arrays["positions"] = np.where(real, np.arange(sequence_length, dtype=np.int32), 0)
        yield Block(arrays | {"loss_mask": loss_mask}, count)


def pieces_of(documents: Iterable[Document], sequence_length: int) -> Iterator[Document]:
    """A document longer than a row is cut into pieces of a row's length, each a segment of its own;
    nothing of it is lost but the labels at the borders. An empty one gives none."""
    for tokens, targets in documents:
        for first in range(0, len(tokens), sequence_length):
            last = first + sequence_length
            yield Document(tokens[first:last].astype(np.int32), targets[first:last])


class _Pieces(grain.IterDataset, grain.DatasetIterator):
    """An iterator as grain wants one. Its own place is no concern of grain's here."""

    def __init__(self, pieces: Iterator[Document]):
        super().__init__()
        self._pieces = pieces

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._pieces)._asdict()

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _first_fit(pieces: Iterator[Document], length: int) -> Iterator[dict[str, np.ndarray]]:
    rows = iter(
        FirstFitPackIterDataset(
            _Pieces(pieces),
            length_struct={"tokens": length, "targets": length},
            num_packing_bins=BLOCK,
            shuffle_bins=False,
        )
    )
    names = {
        "tokens": "tokens",
        "segment_ids": "tokens_segment_ids",
        "positions": "tokens_positions",
        "targets": "targets",
    }
    while block := list(itertools.islice(rows, BLOCK)):
        yield {name: np.stack([row[key] for row in block]) for name, key in names.items()}


def _one_each(pieces: Iterator[Document], length: int) -> Iterator[dict[str, np.ndarray]]:
    while block := list(itertools.islice(pieces, BLOCK)):
        arrays = _empty(len(block), length)
        arrays["targets"] = arrays.pop("loss_mask").astype(bool)
        for row, (tokens, targets) in enumerate(block):
            count = len(tokens)
            arrays["tokens"][row, :count] = tokens
            arrays["targets"][row, :count] = targets
            arrays["segment_ids"][row, :count] = 1
            arrays["positions"][row, :count] = np.arange(count)
        yield arrays


def _empty(rows: int, length: int) -> dict[str, np.ndarray]:
    arrays = {
        name: np.zeros((rows, length), np.int32) for name in ("tokens", "segment_ids", "positions")
    }
    return arrays | {"loss_mask": np.zeros((rows, length), np.uint8)}
