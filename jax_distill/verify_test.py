"""The cache check with a live teacher: correct caches pass, another teacher's fail."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill.base.errors import RunError
from jax_distill.batch import ROW_ARRAYS, EncodedTopK
from jax_distill.cache import Cache, create
from jax_distill.model import Decoder
from jax_distill.teacher_test import (
    VOCAB,
    manifest,
    mesh,
    model_config,
    random_model,
    single_rows,
    write,
)
from jax_distill.verify import check_cache, require_match

LENGTH, ROWS = 12, 24


def teacher_of(dtype: str, *, spread: float = 0.3, seed: int = 0) -> Decoder:
    """A small decoder with random weights; `spread` 0.3 makes distributions as peaked as a trained
    model's, the usual 0.02 makes them nearly flat."""
    model = Decoder(
        model_config(initializer_range=spread),
        rngs=nnx.Rngs(seed),
        param_dtype=jnp.dtype(dtype),
        compute_dtype=jnp.dtype(dtype),
    )
    return model


def cache_of(path: Path, model: Decoder, dtype: str, rows: dict[str, np.ndarray]) -> Cache:
    return write(path, rows, model, manifest(LENGTH, teacher_dtype=dtype))


def rewritten(cache: Cache, path: Path, change) -> Cache:
    """The cache with its teacher's arrays changed: `change(encoded) → encoded`."""
    stored = cache.manifest
    arrays = cache.read_arrays(np.arange(cache.rows))
    encoded = change(EncodedTopK.from_arrays(arrays, stored.temperatures))
    arrays = {name: arrays[name] for name in ROW_ARRAYS} | encoded.arrays()
    with create(str(path), stored, cache.rows) as writer:
        for shard, first, last in writer.missing_shards():
            writer.write(shard, {n: x[first : last + 1].copy() for n, x in arrays.items()})
    return Cache.open(str(path))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_correct_cache_passes_one_row_at_a_time_and_over_a_mesh(tmp_path, dtype, temperature):
    """Other batch shapes than the capture's, where bf16 rounds otherwise."""
    model = teacher_of(dtype)
    cache = cache_of(tmp_path, model, dtype, single_rows(ROWS, LENGTH))
    for over in (None, mesh()):
        verdict = check_cache(model, cache, rows=10, temperature=temperature, mesh=over)
        assert verdict.matches and not verdict.warning, verdict
        assert "10 rows; the worst is row" in verdict.line
        require_match(verdict, cache)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teacher_of_random_weights_passes(tmp_path, dtype, temperature):
    """Nearly flat everywhere: a shift costs little, in nats."""
    model = teacher_of(dtype, spread=0.02)
    cache = cache_of(tmp_path, model, dtype, single_rows(ROWS, LENGTH))
    verdict = check_cache(model, cache, rows=8, temperature=temperature)
    assert verdict.matches, verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_one_repeated_token_pass_with_a_warning(tmp_path, dtype):
    rows = single_rows(ROWS, LENGTH)
    rows["tokens"][:] = 7
    rows["positions"][:] = 0
    model = teacher_of(dtype)
    verdict = check_cache(model, cache_of(tmp_path, model, dtype, rows), rows=8, temperature=1.0)
    assert verdict.matches and "would not show" in verdict.warning


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_of_another_teacher_is_refused_by_its_worst_position(tmp_path, dtype):
    cache = cache_of(tmp_path, teacher_of(dtype), dtype, single_rows(ROWS, LENGTH))
    verdict = check_cache(teacher_of(dtype, seed=9), cache, rows=8, temperature=1.0)
    with pytest.raises(
        RunError, match=r"another teacher's.*row \d+, position \d+.*teacher.path"
    ) as e:
        require_match(verdict, cache)
    assert "delete" not in str(e.value)


def rolled(by: int):
    return lambda encoded: encoded.map(lambda x: np.roll(x, by, axis=1))


def permuted(encoded: EncodedTopK) -> EncodedTopK:
    ids = np.random.default_rng(0).permutation(VOCAB).astype(encoded.indices.dtype)
    return replace(encoded, indices=ids[encoded.indices])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", [rolled(1), rolled(-1), permuted], ids=["late", "early", "ids"])
def test_shifted_targets_and_permuted_ids_are_refused(tmp_path, dtype, temperature, change):
    """Case 7."""
    rows = single_rows(ROWS, LENGTH)
    for name in ("segment_ids", "loss_mask"):
        rows[name][:] = 1
    rows["positions"][:] = np.arange(LENGTH)
    rows["tokens"][:] = np.random.default_rng(1).integers(0, VOCAB, rows["tokens"].shape)
    model = teacher_of(dtype)
    cache = rewritten(cache_of(tmp_path / "a", model, dtype, rows), tmp_path / "b", change)
    verdict = check_cache(model, cache, rows=8, temperature=temperature)
    with pytest.raises(RunError, match="cache check"):
        require_match(verdict, cache)


def test_rows_with_targets_are_found_where_most_have_none(tmp_path):
    """Case 11: chat data whose first completions were cut away."""
    rows = single_rows(ROWS, LENGTH)
    rows["loss_mask"][:] = 0
    rows["loss_mask"][[5, 20], 0] = 1
    rows["segment_ids"][[5, 20], :2] = 1
    model = random_model()
    cache = cache_of(tmp_path / "few", model, "float32", rows)
    verdict = check_cache(model, cache, rows=4, temperature=1.0, seed=3)
    assert verdict.matches and "2 rows; the worst is row" in verdict.line
    rows["loss_mask"][:] = 0
    cache = cache_of(tmp_path / "none", model, "float32", rows)
    with pytest.raises(RunError, match="a row with something to predict"):
        check_cache(model, cache, rows=4, temperature=1.0)
