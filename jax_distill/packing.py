"""Documents to rows: first-fit packing, segments, positions and the loss mask.

N rows of T positions.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset

from jax_distill.data import Document, segments_beyond

_BINS = 64  # rows open at once


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

    def segments_beyond(self, length: int) -> int:
        """See the function of that name. A document longer than a row counts by its pieces."""
        return segments_beyond(self.arrays["segment_ids"], self.arrays["positions"], length)

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


def tokens_needed(max_rows: int | None, sequence_length: int) -> int | None:
    """So many tokens of the first documents decide the first `max_rows` rows of `pack`; None: all.

    Whatever was packed stands in a row that was given out or in one of the open ones, so that after
    S tokens at least S/T − _BINS − 1 rows were given out (T: sequence_length; the 1 is the piece at
    hand).
    """
    return None if max_rows is None else (max_rows + _BINS + 1) * sequence_length


def pack(
    documents: Sequence[Document],
    *,
    sequence_length: int,
    packing: bool = True,
    separate_documents: bool = True,
    max_rows: int | None = None,
) -> Rows:
    """Lays documents into rows of `sequence_length`.

    A document longer than a row is cut into pieces of a row's length, each a segment of its own;
    nothing of it is lost but the labels at the borders. With `packing` the pieces go, in order,
    into the first of 64 open rows that has room (grain's first-fit); without it each has its own
    row. Rows beyond max_rows are cut and counted. Without `separate_documents` a row is one
    segment, whose positions run through it: attention reads across the borders (an all-ones mask),
    and the loss mask stays as it is.
    """
    pieces = list(_pieces(documents, sequence_length))
    tokens_in = sum(len(piece.tokens) for piece in pieces)
    arrays = (_first_fit if packing else _one_each)(pieces, sequence_length, max_rows)
    targets = arrays.pop("targets")
    segment_ids = arrays["segment_ids"]
    loss_mask = np.zeros(targets.shape, np.uint8)
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    loss_mask[:, :-1] = same & targets[:, 1:]
    arrays["loss_mask"] = loss_mask
    tokens_out = int(np.count_nonzero(segment_ids))
    if not separate_documents:
        real = segment_ids > 0
        arrays["segment_ids"] = real.astype(np.int32)
        arrays["positions"] = np.where(real, np.arange(sequence_length, dtype=np.int32), 0)
    return Rows(
        arrays=arrays,
        documents=len(documents),
        empty_documents=sum(len(document.tokens) == 0 for document in documents),
        pieces=int(segment_ids.max(axis=1, initial=0).sum()),
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        tokens_cut=tokens_in - tokens_out,
        predicted=int(loss_mask.sum()),
        rows_without_target=int((~loss_mask.any(axis=1)).sum()),
    )


def _pieces(documents: Sequence[Document], length: int) -> Iterator[Document]:
    for tokens, targets in documents:
        for first in range(0, len(tokens), length):
            yield Document(tokens[first : first + length], targets[first : first + length])


def _first_fit(pieces: list[Document], length: int, max_rows: int | None) -> dict[str, np.ndarray]:
    if not pieces:
        return _empty(0, length)
    elements = [
        {"tokens": piece.tokens.astype(np.int32), "targets": piece.targets} for piece in pieces
    ]
    packed = FirstFitPackIterDataset(
        grain.MapDataset.source(elements).to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        ),
        length_struct={"tokens": length, "targets": length},
        num_packing_bins=min(_BINS, len(pieces)),
        shuffle_bins=False,
    )
    rows = list(itertools.islice(packed, max_rows))
    names = {
        "tokens": "tokens",
        "segment_ids": "tokens_segment_ids",
        "positions": "tokens_positions",
        "targets": "targets",
    }
    return {name: np.stack([row[key] for row in rows]) for name, key in names.items()}


def _one_each(pieces: list[Document], length: int, max_rows: int | None) -> dict[str, np.ndarray]:
    pieces = pieces[:max_rows]
    arrays = _empty(len(pieces), length)
    for row, (tokens, targets) in enumerate(pieces):
        count = len(tokens)
        arrays["tokens"][row, :count] = tokens
        arrays["targets"][row, :count] = targets
        arrays["segment_ids"][row, :count] = 1
        arrays["positions"][row, :count] = np.arange(count)
    return arrays


def _empty(rows: int, length: int) -> dict[str, np.ndarray]:
    arrays = {
        name: np.zeros((rows, length), np.int32) for name in ("tokens", "segment_ids", "positions")
    }
    return arrays | {"targets": np.zeros((rows, length), bool)}
