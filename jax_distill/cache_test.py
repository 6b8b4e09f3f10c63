"""The cache: what goes in comes out, and nothing that is missing, torn or another's comes out."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill.base.errors import UserError
from jax_distill.cache import Cache, Manifest, create, shard_file

TEMPERATURES = (1.0, 2.0)


def log_softmax(z: np.ndarray, temperature: float) -> np.ndarray:
    """float64, from the definition."""
    z = z.astype(np.float64) / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def captured(logits: np.ndarray, top_k: int, temperatures=TEMPERATURES) -> dict[str, np.ndarray]:
    """The teacher arrays of logits [N,T,V], from the definitions in float64."""
    z = logits.astype(np.float64)
    order = np.argsort(-z, axis=-1, kind="stable")
    ids, outside = order[..., :top_k], order[..., top_k:]
    top = z.max(-1, keepdims=True)
    log_z, log_tail = [], []
    for temperature in temperatures:
        log_z.append(np.log(np.exp((z - top) / temperature).sum(-1)))
        rest = np.take_along_axis(log_softmax(z, temperature), outside, -1)
        with np.errstate(divide="ignore"):
            log_tail.append(np.log(np.exp(rest).sum(-1)))
    width = np.uint16 if z.shape[-1] <= 65536 else np.uint32
    return {
        "teacher_indices": ids.astype(width),
        "teacher_count": np.full(z.shape[:2], top_k, np.uint16),
        "teacher_gaps": np.minimum(top - np.take_along_axis(z, ids, -1), 65504).astype(np.float16),
        "teacher_log_z": np.stack(log_z, -1).astype(np.float32),
        "teacher_log_tail": np.stack(log_tail, -1).astype(np.float32),
    }


def random_rows(rows: int, length: int, vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, vocab_size, (rows, length), np.int32),
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask": rng.integers(0, 2, (rows, length)).astype(np.uint8),
    }


def cache_of(path: Path, manifest: Manifest, arrays: dict[str, np.ndarray]) -> Cache:
    with create(str(path), manifest, len(arrays["tokens"])) as writer:
        for shard, first, last in writer.missing_shards():
            writer.write(shard, {name: each[first : last + 1] for name, each in arrays.items()})
    return Cache.open(str(path))


def small(path: Path, *, rows=10, length=12, vocab_size=50, top_k=5, shard_rows=4, **fields):
    """(cache, its arrays, the teacher's logits [N,T,V])."""
    logits = np.random.default_rng(1).normal(0, 4, (rows, length, vocab_size)).astype(np.float32)
    arrays = random_rows(rows, length, vocab_size)
    if top_k:
        arrays |= captured(logits, top_k)
        fields = {"temperatures": TEMPERATURES, "teacher_fingerprint": "t"} | fields
    manifest = Manifest(
        sequence_length=length,
        shard_rows=shard_rows,
        vocab_size=vocab_size,
        top_k=top_k,
        **fields,
    )
    return cache_of(path, manifest, arrays), arrays, logits


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


# ---- what is read is what was written -----------------------------------------------------------


def test_rows_come_back_in_any_order_with_repeats(tmp_path):
    cache, arrays, _ = small(tmp_path)
    rows = np.array([9, 0, 3, 3])
    batch = cache.read(rows)
    assert cache.complete and cache.rows == 10
    for name in ("tokens", "segment_ids", "positions"):
        np.testing.assert_array_equal(getattr(batch, name), arrays[name][rows])
        assert getattr(batch, name).dtype == np.int32
    np.testing.assert_array_equal(batch.targets.indices, arrays["teacher_indices"][rows])
    assert batch.targets.indices.dtype == batch.targets.count.dtype == np.int32
    assert batch.targets.logprobs.dtype == batch.targets.log_tail.dtype == np.float32


def test_labels_are_the_next_tokens_and_the_last_column_counts_for_nothing(tmp_path):
    cache, arrays, _ = small(tmp_path)
    batch = cache.read(range(10))
    np.testing.assert_array_equal(batch.labels[:, :-1], arrays["tokens"][:, 1:])
    np.testing.assert_array_equal(batch.mask[:, :-1], arrays["loss_mask"][:, :-1] == 1)
    assert not batch.labels[:, -1].any() and not batch.mask[:, -1].any()
    assert batch.mask.dtype == bool


@pytest.mark.parametrize("length", [1, 2])
def test_rows_of_length_1_and_2_are_stored(tmp_path, length):
    """Case 10."""
    cache, arrays, _ = small(tmp_path, length=length)
    batch = cache.read([0, 9])
    np.testing.assert_array_equal(batch.tokens, arrays["tokens"][[0, 9]])
    assert not batch.mask[:, -1].any()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 7),
    length=st.integers(1, 9),
    shard_rows=st.integers(1, 9),
    vocab_size=st.integers(2, 40),
    data=st.data(),
)
def test_logprobs_equal_the_float64_softmax_at_every_stored_temperature(
    tmp_path_factory, rows, length, shard_rows, vocab_size, data
):
    top_k = data.draw(st.integers(1, vocab_size))
    path = tmp_path_factory.mktemp("cache")
    cache, arrays, logits = small(
        path, rows=rows, length=length, shard_rows=shard_rows, vocab_size=vocab_size, top_k=top_k
    )
    for temperature in TEMPERATURES:
        batch = cache.read(range(rows), temperature=temperature)
        ids = batch.targets.indices.astype(np.int64)
        exact = np.take_along_axis(log_softmax(logits, temperature), ids, -1)
        # fp16 gaps up to 32 move single logits by up to 8e-3; the probabilities' sum stays.
        np.testing.assert_allclose(batch.targets.logprobs, exact, atol=1.7e-2 / temperature)
        tail = np.exp(batch.targets.log_tail.astype(np.float64))
        total = np.exp(batch.targets.logprobs.astype(np.float64)).sum(-1) + tail
        np.testing.assert_allclose(total, 1.0, atol=1e-6)


def test_coding_the_logits_as_gaps_costs_less_than_a_millionth_of_a_nat(tmp_path):
    vocab_size, top_k = 2000, 64
    rng = np.random.default_rng(3)
    logits = rng.gumbel(0, 2, (4, 16, vocab_size)).astype(np.float32) * 1.5
    arrays = random_rows(4, 16, vocab_size) | captured(logits, top_k)
    manifest = Manifest(
        sequence_length=16,
        shard_rows=4,
        vocab_size=vocab_size,
        top_k=top_k,
        temperatures=TEMPERATURES,
    )
    batch = cache_of(tmp_path, manifest, arrays).read(range(4))
    exact = np.take_along_axis(log_softmax(logits, 1.0), batch.targets.indices.astype(int), -1)
    tail = np.log1p(-np.exp(exact).sum(-1))
    stored, stored_tail = batch.targets.logprobs, batch.targets.log_tail
    kl = (np.exp(exact) * (exact - stored)).sum(-1) + np.exp(tail) * (tail - stored_tail)
    assert np.abs(kl).max() < 1e-6


def test_where_every_token_is_stored_the_tail_is_empty(tmp_path):
    cache, _, logits = small(tmp_path, vocab_size=7, top_k=7)
    batch = cache.read([2])
    assert (batch.targets.log_tail == -np.inf).all()
    np.testing.assert_allclose(np.exp(batch.targets.logprobs).sum(-1), 1.0, atol=1e-6)


def test_reading_fewer_of_the_k_moves_the_rest_into_the_tail(tmp_path):
    cache, _, _ = small(tmp_path)
    whole, first = cache.read([4, 7]), cache.read([4, 7], top_k=2)
    np.testing.assert_array_equal(first.targets.indices, whole.targets.indices[..., :2])
    np.testing.assert_array_equal(first.targets.logprobs, whole.targets.logprobs[..., :2])
    assert (first.targets.count == 2).all()
    dropped = np.exp(whole.targets.logprobs[..., 2:].astype(np.float64)).sum(-1)
    tail = np.exp(whole.targets.log_tail.astype(np.float64)) + dropped
    np.testing.assert_allclose(first.targets.log_tail, np.log(tail), rtol=1e-5)


def test_entries_beyond_the_count_are_ignored(tmp_path):
    rows = random_rows(2, 6, 30)
    logits = np.random.default_rng(5).normal(0, 2, (2, 6, 30)).astype(np.float32)
    arrays = rows | captured(logits, 4)
    short = captured(logits, 2)
    arrays["teacher_log_tail"] = short["teacher_log_tail"]
    arrays["teacher_count"][:] = 2
    arrays["teacher_indices"][..., 2:] = 29
    arrays["teacher_gaps"][..., 2:] = 0
    arrays["teacher_count"][0, 0] = 0
    arrays["teacher_log_tail"][0, 0] = 0
    manifest = Manifest(
        sequence_length=6, shard_rows=2, vocab_size=30, top_k=4, temperatures=TEMPERATURES
    )
    batch = cache_of(tmp_path, manifest, arrays).read([0, 1])
    assert (batch.targets.logprobs[..., 2:] == -np.inf).all()
    exact = np.take_along_axis(log_softmax(logits, 1.0), short["teacher_indices"].astype(int), -1)
    np.testing.assert_allclose(batch.targets.logprobs[1, :, :2], exact[1], atol=4e-3)
    assert (batch.targets.logprobs[0, 0] == -np.inf).all()
    assert batch.targets.log_tail[0, 0] == 0


@pytest.mark.parametrize("vocab_size", [256, 257, 65536, 65537, 131072, 131073])
def test_ids_at_the_edges_of_integer_widths_come_back(tmp_path, vocab_size):
    """Cases 5 and 6: ids 0 and V-1 are ids like any other; no value is a sentinel."""
    width = np.uint16 if vocab_size <= 65536 else np.uint32
    ids = [0, vocab_size - 1, min(255, vocab_size - 2), min(65535, vocab_size - 3), 1]
    rows = random_rows(2, 3, vocab_size)
    rows["tokens"][:] = [[0, vocab_size - 1, 0]]
    arrays = rows | {
        "teacher_indices": np.broadcast_to(np.array(ids, width), (2, 3, 5)).copy(),
        "teacher_count": np.full((2, 3), 5, np.uint16),
        "teacher_gaps": np.zeros((2, 3, 5), np.float16),
        "teacher_log_z": np.full((2, 3, 1), math.log(10), np.float32),
        "teacher_log_tail": np.full((2, 3, 1), math.log(0.5), np.float32),
    }
    manifest = Manifest(
        sequence_length=3, shard_rows=2, vocab_size=vocab_size, top_k=5, temperatures=(1.0,)
    )
    cache = cache_of(tmp_path, manifest, arrays)
    batch = cache.read([1])
    assert batch.targets.indices[0, 0].tolist() == ids
    assert batch.tokens[0].tolist() == [0, vocab_size - 1, 0]
    assert cache.largest_token == vocab_size - 1
    np.testing.assert_allclose(batch.targets.logprobs, math.log(0.1), rtol=1e-6)


def test_a_cache_without_a_teacher_holds_rows_alone(tmp_path):
    cache, arrays, _ = small(tmp_path, top_k=0)
    batch = cache.read([1, 5], temperature=3.0)
    assert batch.targets is None
    np.testing.assert_array_equal(batch.tokens, arrays["tokens"][[1, 5]])


def test_the_teachers_arrays_stay_on_disk_where_they_are_not_wanted(tmp_path):
    cache, _, _ = small(tmp_path)
    for name in ("teacher_gap_steps", "teacher_codes", "teacher_frequent"):
        (tmp_path / shard_file(cache.manifest, name, 0)).unlink()
    batch = cache.read([0], targets=False, temperature=3.0, top_k=99)
    assert batch.targets is None


def test_a_mask_of_zeros_is_stored_and_a_cache_counts_its_tokens(tmp_path):
    arrays = random_rows(5, 8, 20)
    arrays["loss_mask"][:] = 0
    arrays["segment_ids"][4, 6:] = 0
    manifest = Manifest(sequence_length=8, shard_rows=2, vocab_size=20)
    cache = cache_of(tmp_path, manifest, arrays)
    assert not cache.read(range(5)).mask.any()
    assert (cache.tokens, cache.targets) == (38, 0)
    assert cache.nbytes == sum(len(b) for f, b in folder_bytes(tmp_path).items() if "/c/" in f)


# ---- vocabulary ---------------------------------------------------------------------------------


def vocabulary(size: int) -> dict[str, int]:
    return {f"word{i}": i for i in range(size)}


@pytest.mark.parametrize("size", [297, 300, 303, 320])
def test_tokenizers_with_more_or_fewer_tokens_at_the_end_are_allowed(tmp_path, size):
    """Cases 1, 2 and 4."""
    cache, _, _ = small(tmp_path, vocab_size=300, vocabulary=vocabulary(300))
    cache.check_vocabulary(vocabulary(size))


def test_swapped_words_are_refused_by_the_first_conflicting_id(tmp_path):
    """Case 3."""
    cache, _, _ = small(tmp_path, vocab_size=300, vocabulary=vocabulary(300))
    swapped = vocabulary(300) | {"word7": 200, "word200": 7}
    with pytest.raises(UserError, match="id 7 to 'word7'.* got 'word200'"):
        cache.check_vocabulary(swapped)
