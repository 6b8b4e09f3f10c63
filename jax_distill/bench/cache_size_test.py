"""Rows laid out anew, ids in a larger vocabulary; the estimate beside what was measured."""

import json

import numpy as np
import pytest

from jax_distill.base.errors import UserError
from jax_distill.bench.cache_size import id_map, laid_out, main
from jax_distill.cache import Cache, Manifest, create
from jax_distill.teacher import expected_bytes

# (V, T) → bytes a position at K = 100, zstd 1, measured (docs/CACHE.md): SmolLM2-135M's logits, in
# vocabularies above its own by a random increasing map of its ids; V = 2,048 is the quickstart's.
MEASURED = {
    (2048, 256): 220.5,
    (2048, 512): 217.7,
    (2048, 8192): 211.8,
    (49152, 256): 242.8,
    (49152, 512): 238.7,
    (49152, 1024): 230.8,
    (49152, 8192): 228.6,
    (128256, 512): 246.3,
    (128256, 8192): 240.8,
    (201088, 512): 250.0,
    (201088, 8192): 242.7,
}


def manifest(vocab_size: int, length: int, **fields) -> Manifest:
    values = {"shard_rows": 4, "top_k": 100, "temperatures": (1.0,)} | fields
    return Manifest(vocab_size=vocab_size, sequence_length=length, **values)


@pytest.mark.parametrize(("vocab_size", "length"), MEASURED)
def test_the_estimate_is_what_was_measured_a_little_from_above(vocab_size, length):
    found = expected_bytes(manifest(vocab_size, length), 1000) / 1000 / length
    assert 1.0 <= found / MEASURED[vocab_size, length] < 1.065


def test_a_cache_that_is_resumed_in_format_2_is_expected_to_take_what_those_took():
    """297.4 bytes a position measured at V = 49,152, 322.6 at 201,088 (T = 512, K = 100)."""
    for vocab_size, measured in ((49_152, 297.4), (201_088, 322.6)):
        old = manifest(vocab_size, 512, format_version=2)
        assert 1.0 <= expected_bytes(old, 1000) / 1000 / 512 / measured < 1.065


def test_short_rows_take_no_more_than_uncompressed():
    found = expected_bytes(manifest(300, 8, top_k=20), 1) / 8
    assert found <= 20 * 4 + 7 + 3 + 900 / 8


@pytest.fixture
def cache(tmp_path):
    """12 rows of 32 positions: few ids, which compress."""
    made = manifest(300, 32, top_k=4)
    rng = np.random.default_rng(0)
    rows = {
        name: rng.integers(0, 4, (12, *shape)).astype(dtype)
        for name, (dtype, shape) in made.array_shapes().items()
    }
    rows["teacher_indices"][...] = np.arange(4) * 70
    with create(str(tmp_path / "cache"), made, 12) as writer:
        for shard, first, last in writer.missing_shards():
            writer.write(shard, {name: x[first : last + 1] for name, x in rows.items()})
    return Cache.open(str(tmp_path / "cache"))


def test_the_same_numbers_in_rows_of_another_length_and_a_larger_vocabulary(cache, tmp_path):
    arrays = cache.read_arrays(np.arange(12))
    for length, rows in ((128, 3), (16, 24), (100, 3)):
        for name, array in laid_out(arrays, length).items():
            assert array.shape[:2] == (rows, length)
            flat = arrays[name].reshape(-1, *array.shape[2:])
            np.testing.assert_array_equal(
                array.reshape(-1, *array.shape[2:]), flat[: rows * length]
            )
    spread, permuted = (id_map(kind, 300, 70000) for kind in ("spread", "permuted"))
    assert (np.diff(spread) > 0).all() and sorted(permuted) == spread.tolist()
    file = tmp_path / "sizes.json"
    words = ["--length", "32,128", "--vocab_size", "70000", "--json", str(file)]
    assert main([cache.path, *words]) == 0
    own, *mapped = json.loads(file.read_text())[:3]
    whole = cache.nbytes / 12 / 32
    assert own["all"] == pytest.approx(whole, rel=0.01) and own["vocab_size"] == 300
    assert own["ids"] + own["gaps"] + own["rest"] == pytest.approx(own["all"])
    assert [each["map"] for each in mapped] == ["spread", "permuted"]
    for words, expected in (
        (["--length", "400"], "up to the cache's 384 tokens"),
        (["--vocab_size", "300"], "above 300"),
    ):
        with pytest.raises(UserError, match=expected):
            main([cache.path, *words])
