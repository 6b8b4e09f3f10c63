"""Rows: every token once, borders masked, positions and segments as the model needs them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill.data import Document, segments_beyond
from jax_distill.packing import BLOCK, Rows, pack, packed, pieces_of


def document(length: int, first: int = 1, targets=None) -> Document:
    """Tokens first, first+1, …, so that a token's value says where it comes from."""
    tokens = np.arange(first, first + length, dtype=np.int32)
    targets = np.ones(length, bool) if targets is None else np.array(targets, bool)
    return Document(tokens, targets)


def segments(rows: Rows) -> list[np.ndarray]:
    """The tokens of each segment, row after row; checks the layout on the way."""
    found = []
    for tokens, ids, positions in zip(
        *(rows.arrays[name] for name in ("tokens", "segment_ids", "positions")), strict=True
    ):
        used = int((ids > 0).sum())
        assert (ids[:used] > 0).all() and (np.diff(ids[:used]) >= 0).all()
        assert not tokens[used:].any() and not ids[used:].any() and not positions[used:].any()
        assert sorted(set(ids[:used])) == list(range(1, ids.max() + 1))  # 1, 2, … without holes
        for segment in range(1, ids.max() + 1):
            inside = ids == segment
            assert positions[inside].tolist() == list(range(inside.sum()))
            found.append(tokens[inside])
    return found


def test_three_documents_of_seven_tokens_in_rows_of_ten():
    """Case 16: no token lost, the labels at the borders masked."""
    documents = [document(7, 10 * i) for i in (1, 2, 3)]
    rows = pack(documents, sequence_length=10, packing=True)
    assert sorted(np.concatenate(segments(rows))) == sorted(
        np.concatenate([d.tokens for d in documents])
    )
    assert rows.tokens_in == rows.tokens_out == 21 and rows.tokens_cut == 0
    assert rows.predicted == 18 == rows.arrays["loss_mask"].sum()
    for mask, ids in zip(rows.arrays["loss_mask"], rows.arrays["segment_ids"], strict=True):
        assert mask.tolist() == [
            int(t + 1 < 10 and ids[t] == ids[t + 1] and ids[t] > 0) for t in range(10)
        ]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    sequence_length=st.integers(2, 17),
    packing=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_token_stands_in_one_row_once_with_its_own_mask(
    lengths, sequence_length, packing, seed
):
    rng = np.random.default_rng(seed)
    starts = 1 + np.cumsum([0, *lengths])[:-1] if lengths else []
    documents = [
        document(n, int(first), rng.random(n) < 0.6)
        for n, first in zip(lengths, starts, strict=True)
    ]
    rows = pack(documents, sequence_length=sequence_length, packing=packing)
    found = segments(rows)
    total = sum(lengths)
    assert sorted(np.concatenate(found) if found else []) == list(range(1, total + 1))
    pieces = [
        p
        for n in lengths
        for p in [sequence_length] * (n // sequence_length) + [n % sequence_length]
        if p
    ]
    assert sorted(map(len, found)) == sorted(pieces) and rows.pieces == len(pieces)
    assert all((np.diff(segment) == 1).all() for segment in found)  # of one document, in order
    owner = np.repeat(np.arange(len(lengths)), lengths)
    wanted = np.concatenate([[False], *(d.targets for d in documents)])
    tokens, ids, mask = (rows.arrays[name] for name in ("tokens", "segment_ids", "loss_mask"))
    predicted = set()
    for row, position in zip(*np.nonzero(mask), strict=True):
        now, following = tokens[row, position], tokens[row, position + 1]
        assert following == now + 1 and owner[now - 1] == owner[following - 1]
        predicted.add(int(following))
    firsts = {int(segment[0]) for segment in found}
    assert predicted == {t for t in range(1, total + 1) if wanted[t] and t not in firsts}
    assert rows.documents == len(lengths) and rows.empty_documents == lengths.count(0)
    assert rows.tokens_in == rows.tokens_out == int((ids > 0).sum()) == total
    assert not packing or len(rows) <= max(1, len(pieces))
    assert packing or ids.max(initial=0) <= 1
    assert mask.dtype == np.uint8 and {
        a.dtype for n, a in rows.arrays.items() if n != "loss_mask"
    } == {np.dtype(np.int32)}
    assert all(array.shape == (len(rows), sequence_length) for array in rows.arrays.values())


@pytest.mark.parametrize("packing", [True, False])
def test_documents_of_one_and_two_tokens(packing):
    """Case 10: their tokens are kept; one token predicts nothing, two predict one."""
    rows = pack([document(1), document(2, 5), document(0)], sequence_length=2, packing=packing)
    assert sorted(np.concatenate(segments(rows))) == [1, 5, 6]
    assert rows.predicted == 1 and rows.empty_documents == 1
    assert rows.rows_without_target == 1


def test_a_row_whose_completion_is_cut_away_is_counted_and_said():
    """Case 11: the prompt fills its row; the row stays, with nothing to predict."""
    talk = document(12, targets=[False] * 8 + [True] * 4)
    rows = pack([talk], sequence_length=8, packing=True)
    assert rows.arrays["loss_mask"].sum(axis=1).tolist() == [0, 3]
    assert rows.rows_without_target == 1 and rows.predicted == 3
    assert "WARNING: 1 rows with nothing to predict" in str(rows)
    cut = pack([talk], sequence_length=8, packing=True, max_rows=1)
    assert (cut.tokens_cut, cut.predicted, cut.rows_without_target) == (4, 0, 1)


@pytest.mark.parametrize("packing", [True, False])
def test_wider_rows_hold_the_same_with_more_padding(packing):
    """Case 12, the rows: in rows of 32 and of 64 the same documents give the same labels."""
    documents = [document(n, 100 * n, np.arange(n) % 3 > 0) for n in (1, 7, 20, 32)]
    narrow, wide = (pack(documents, sequence_length=n, packing=packing) for n in (32, 64))
    for rows in (narrow, wide):
        assert sorted(map(len, segments(rows))) == [1, 7, 20, 32]

    def labels(rows):
        mask = rows.arrays["loss_mask"][:, :-1] == 1
        return sorted(rows.arrays["tokens"][:, 1:][mask])

    assert labels(narrow) == labels(wide) and narrow.predicted == wide.predicted
    if not packing:
        for name, array in narrow.arrays.items():
            assert np.array_equal(wide.arrays[name][:, :32], array)
            assert not wide.arrays[name][:, 32:].any()


@pytest.mark.parametrize("packing", [True, False])
def test_rows_beyond_max_rows_are_cut_and_counted(packing):
    documents = [document(9, 100 * i) for i in range(1, 40)]
    whole = pack(documents, sequence_length=10, packing=packing)
    some = pack(documents, sequence_length=10, packing=packing, max_rows=11)
    assert len(whole) == 39 and len(some) == 11
    assert all(np.array_equal(some.arrays[n], whole.arrays[n][:11]) for n in whole.arrays)
    assert (some.tokens_in, some.tokens_out, some.tokens_cut) == (351, 99, 252)
    assert "351 tokens in, 99 out, 252 cut, 11 padding, 88 to predict" in str(some)
    same = pack(documents, sequence_length=10, packing=packing, max_rows=1000)
    assert len(same) == 39 and same.tokens_cut == 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=400),
    sequence_length=st.integers(2, 12),
    packing=st.booleans(),
)
def test_packing_begins_again_where_a_block_ends(lengths, sequence_length, packing):
    """The rows that follow a block are those of the pieces that follow its own."""
    documents = [document(n, 1000 * i) for i, n in enumerate(lengths)]
    pieces = list(pieces_of(documents, sequence_length))
    blocks = list(packed(pieces, sequence_length, packing=packing))
    assert sum(block.pieces for block in blocks) == len(pieces)
    assert all(len(block.arrays["tokens"]) == BLOCK for block in blocks[:-1])
    done = 0
    for number, block in enumerate(blocks):
        rest = list(packed(pieces[done:], sequence_length, packing=packing))
        assert len(rest) == len(blocks) - number
        for name, array in block.arrays.items():
            np.testing.assert_array_equal(rest[0].arrays[name], array)
        done += block.pieces


@pytest.mark.parametrize("packing", [True, False])
def test_segments_longer_than_a_model_has_positions_are_counted(packing):
    """Case 49."""
    documents = [document(n) for n in (3, 7, 8, 9, 20, 1)]
    rows = pack(documents, sequence_length=16, packing=packing)
    ids, positions = rows.arrays["segment_ids"], rows.arrays["positions"]
    found = [segments_beyond(ids, positions, n) for n in (0, 3, 7, 8, 9, 15, 16)]
    assert found == [7, 5, 3, 2, 1, 1, 0]


def test_nothing_packs_to_nothing():
    for documents in ([], [document(0)]):
        for packing in (True, False):
            rows = pack(documents, sequence_length=4, packing=packing)
            assert len(rows) == 0 and rows.tokens_in == 0
            assert all(array.shape == (0, 4) for array in rows.arrays.values())


def test_packing_is_the_same_every_time_and_and_tight():
    rng = np.random.default_rng(1)
    documents = [document(int(n), 1) for n in rng.integers(1, 400, 2500)]
    first = pack(documents, sequence_length=256, packing=True)
    second = pack(documents, sequence_length=256, packing=True)
    assert all(np.array_equal(first.arrays[n], second.arrays[n]) for n in first.arrays)
    assert first.tokens_out == first.tokens_in > 0.93 * first.arrays["tokens"].size
