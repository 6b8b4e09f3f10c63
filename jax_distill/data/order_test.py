"""Which rows a step sees: each epoch once, for ever the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill.data import row_indices


def test_row_indices_cover_each_epoch_once_and_never_change():
    """Case 9, its pure part: two epochs with batches across the border, other orders, pinned."""
    for num_rows, batch_size in ((1, 1), (1, 5), (2, 3), (37, 5), (64, 64), (100, 7), (1025, 100)):
        steps = -(-2 * num_rows // batch_size)
        stream = np.concatenate(
            [row_indices(s, batch_size=batch_size, num_rows=num_rows, seed=3) for s in range(steps)]
        )
        first, second = stream[:num_rows], stream[num_rows : 2 * num_rows]
        assert sorted(first) == sorted(second) == list(range(num_rows))
        if num_rows > 30:
            assert not np.array_equal(first, second)
            assert not np.array_equal(first, np.arange(num_rows))
            other = row_indices(0, batch_size=num_rows, num_rows=num_rows, seed=4)
            assert not np.array_equal(first, other)
    assert row_indices(0, batch_size=8, num_rows=20, seed=0).tolist() == PINNED_FIRST
    assert row_indices(2, batch_size=8, num_rows=20, seed=0).tolist() == PINNED_BORDER
    large = row_indices(10**9, batch_size=4, num_rows=10**10 + 7, seed=-5)
    assert large.tolist() == PINNED_LARGE and large.dtype == np.int64


PINNED_FIRST = [13, 18, 15, 12, 0, 4, 17, 5]
PINNED_BORDER = [6, 3, 1, 10, 8, 0, 13, 18]
PINNED_LARGE = [8008990206, 9555320744, 2765645286, 7208525201]


@settings(max_examples=50, deadline=None)
@given(
    step=st.integers(0, 10**6),
    batch_size=st.integers(1, 50),
    num_rows=st.integers(1, 5000),
    seed=st.integers(-(2**70), 2**70),
)
def test_a_batch_is_the_same_slice_of_the_stream_whatever_the_batch_size(
    step, batch_size, num_rows, seed
):
    whole = row_indices(step, batch_size=batch_size, num_rows=num_rows, seed=seed)
    single = [
        row_indices(step * batch_size + i, batch_size=1, num_rows=num_rows, seed=seed)[0]
        for i in range(batch_size)
    ]
    assert whole.tolist() == single and 0 <= whole.min() and whole.max() < num_rows


def test_each_row_comes_first_about_as_often_as_any_other():
    """The permutations of many seeds put no row at a place more often than chance (chi-square)."""
    firsts = np.array([row_indices(0, batch_size=1, num_rows=10, seed=s)[0] for s in range(5000)])
    counts = np.bincount(firsts, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 30  # 9 degrees of freedom: p < 0.0005 above
