"""The files' form of ids and gaps: as docs/CACHE.md defines it, and nothing lost on the way."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from jax_distill.cache import coding
from jax_distill.cache.coding import CODES, FREQUENT, GAP_STEPS, GAPS, INDICES


def by_definition(ids: np.ndarray, vocab_size: int, size: int) -> tuple[list[int], list[int]]:
    """(frequent, codes) of one row's ids, from the format's text."""
    count = [int((ids == each).sum()) for each in range(vocab_size)]
    by_count = sorted(range(vocab_size), key=lambda each: (-count[each], each))[:size]
    frequent = [x for at in range(0, size, 256) for x in sorted(by_count[at : at + 256])]
    id_of = list(range(vocab_size))
    id_of[:size] = frequent
    displaced = [each for each in range(size) if each not in frequent]
    for code, each in zip(sorted(x for x in frequent if x >= size), displaced, strict=True):
        id_of[code] = each
    return frequent, [id_of.index(each) for each in ids.ravel()]


@pytest.mark.parametrize(
    ("vocab_size", "length", "top_k", "size"),
    [
        (300, 8, 4, 256),
        (40, 8, 4, 40),  # F is at most V: a renumbering of all of it
        (1500, 200, 90, 512),
        (70_000, 6, 5, 256),  # uint32
        (65_536, 6, 5, 256),  # every code of uint16 is one
    ],
)
def test_codes_are_the_definitions(vocab_size, length, top_k, size):
    rng = np.random.default_rng(vocab_size)
    dtype = np.uint16 if vocab_size <= 65_536 else np.uint32
    ids = (vocab_size * rng.random((3, length, top_k)) ** 4).astype(dtype)
    ids[0] = vocab_size - 1 - ids[0]  # a row whose frequent ids are the largest
    assert coding.frequent_ids(vocab_size, length, top_k) == size
    found = coding.encode({INDICES: ids, "tokens": ids[..., 0]}, vocab_size)
    assert list(found) == ["tokens", FREQUENT, CODES]
    assert found[FREQUENT].shape == (3, size)
    assert found[FREQUENT].dtype == found[CODES].dtype == dtype
    for row in range(3):
        frequent, codes = by_definition(ids[row], vocab_size, size)
        assert found[FREQUENT][row].tolist() == frequent
        if vocab_size <= 2000:
            assert found[CODES][row].ravel().tolist() == codes
        assert found[CODES][row].max() < vocab_size
    back = coding.decode(found, vocab_size)
    assert list(back) == ["tokens", INDICES]
    np.testing.assert_array_equal(back[INDICES], ids)


def test_a_gap_is_the_sum_of_its_steps():
    gaps = np.array([[[0.0, 0.5, 0.5, 3.0, 65504.0]]], np.float16)
    steps = coding.encode({GAPS: gaps}, 1)[GAP_STEPS]
    assert steps.tolist() == [[[0, 0x3800, 0, 0x4200 - 0x3800, 0x7BFF - 0x4200]]]
    np.testing.assert_array_equal(coding.decode({GAP_STEPS: steps}, 1)[GAPS], gaps)


@hypothesis.given(
    arrays_of.arrays(np.uint16, st.tuples(*[st.integers(1, 5)] * 3)),
    st.integers(65_536, 200_000),
)
def test_any_bits_come_back(bits, vocab_size):
    """What is beyond a position's count may be anything; ids in no order, gaps that fall."""
    dtype = np.uint16 if vocab_size == 65_536 else np.uint32
    arrays = {INDICES: bits.astype(dtype), GAPS: bits.view(np.float16)}
    found = coding.decode(coding.encode(arrays, vocab_size), vocab_size)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()


def test_frequent_ids_are_a_class_of_256_for_each_8192_entries():
    found = [coding.frequent_ids(200_000, length, 100) for length in (8, 81, 164, 512, 8192)]
    assert found == [256, 256, 512, 1536, 4096]
