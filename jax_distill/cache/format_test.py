"""The formats themselves: a small cache of each, kept in the repository, reads for ever.

`fixture_format3/` was written by `write_fixture` below (`PYTHONPATH=. python -m
jax_distill.cache.format_test FOLDER`), `fixture_format2/` by an earlier one, and neither is ever
written again: a later version that cannot read them breaks its promise (docs/CACHE.md "Versions").
"""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_distill.base.errors import UserError
from jax_distill.cache import Cache, Manifest, create
from jax_distill.cache.fingerprint import vocabulary_fingerprint

FORMATS = {
    2: Path(__file__).parent / "fixture_format2",
    3: Path(__file__).parent / "fixture_format3",
}
FIXTURE = FORMATS[3]
ROWS, LENGTH, VOCAB = 3, 4, 6
VOCABULARY = {token: i for i, token in enumerate(["<eos>", "a", "b", "ä", "字", " "])}
# Logits of powers of two: at τ = 1 and 2 every stored number is one of a handful of logarithms.
every_format = pytest.mark.parametrize("version", FORMATS)
GAPS = [0.0, math.log(2), math.log(4)]
TOKENS = [[1, 2, 3, 0], [4, 5, 0, 0], [5, 4, 3, 2]]


def write_fixture(path: Path, format_version: int = 3, shards: int = 2) -> None:
    """Three rows in two shards, K = 3 of V = 6, τ 1 and 2; the last of the K is not real in row 2;
    row 1 ends in padding; hidden states of layer 1 besides. shards: how many are written now."""
    manifest = Manifest(
        sequence_length=LENGTH,
        shard_rows=2,
        vocab_size=VOCAB,
        top_k=3,
        temperatures=(1.0, 2.0),
        teacher_fingerprint="teacher",
        teacher_dtype="float32",
        tokenizer_fingerprint=vocabulary_fingerprint(VOCABULARY),
        data={"split": "train", "format": "text"},
        data_fingerprint="text",
        optional={"hidden_1": [LENGTH, 2]},
        vocabulary=VOCABULARY,
        counts={"tokens_in": 10},
        versions={"jax-distill": "0.1"},
        git_revision="0" * 40,
        format_version=format_version,
    )
    tokens = np.array(TOKENS, np.int32)
    segment_ids = np.array([[1, 1, 2, 2], [1, 1, 0, 0], [1, 1, 1, 1]], np.int32)
    real = segment_ids > 0
    count = np.where(real, 3, 0)
    count[2] = np.minimum(count[2], 2)
    position = np.arange(LENGTH)
    indices = (tokens[..., None] + np.arange(3)) % VOCAB
    log_z = [math.log(2.0), math.log(4.0)]  # whatever is not among the K has the rest
    log_tail = [math.log(1 / 8), math.log(1 / 4)]
    arrays = {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "positions": np.array([[0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 2, 3]], np.int32),
        "loss_mask": np.array([[1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0]], np.uint8),
        "teacher_indices": indices.astype(np.uint16),
        "teacher_count": count.astype(np.uint16),
        "teacher_gaps": np.where(real[..., None], np.array(GAPS), 0).astype(np.float16),
        "teacher_log_z": np.where(real[..., None], log_z, 0).astype(np.float32),
        "teacher_log_tail": np.where(real[..., None], log_tail, 0).astype(np.float32),
        "hidden_1": np.stack([tokens, tokens + position], -1).astype(ml_dtypes.bfloat16),
    }
    with create(str(path), manifest, ROWS) as writer:
        for shard, first, last in writer.missing_shards()[:shards]:
            writer.write(shard, {name: each[first : last + 1] for name, each in arrays.items()})


@every_format
def test_the_fixture_reads_with_the_numbers_that_were_written(version):
    cache = Cache.open(str(FORMATS[version]))
    cache.require_complete()
    assert (cache.rows, cache.shards, cache.tokens, cache.targets) == (3, 2, 10, 6)
    assert (cache.head.smallest_token, cache.largest_token, cache.clamped_gaps) == (0, 5, 0)
    assert cache.manifest.vocabulary == VOCABULARY
    batch = cache.read([2, 0])
    assert batch.tokens.tolist() == [TOKENS[2], TOKENS[0]]
    assert batch.labels.tolist() == [[4, 3, 2, 0], [2, 3, 0, 0]]
    assert batch.mask.tolist() == [[True, True, True, False], [True, False, True, False]]
    assert batch.segment_ids[1].tolist() == [1, 1, 2, 2]
    assert batch.positions[1].tolist() == [0, 1, 0, 1]
    found = batch.targets
    assert found.indices[1].tolist() == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [0, 1, 2]]
    assert found.count.tolist() == [[2] * 4, [3] * 4]
    # 7/8 of the probability among the K, in the proportions 4 : 2 : 1, and 2 : 1.
    expected = {1: [4 / 8, 2 / 8, 1 / 8], 0: [7 / 12, 7 / 24, 0]}
    for row, p in expected.items():
        np.testing.assert_allclose(np.exp(found.logprobs[row, 0]), p, rtol=5e-4)
    np.testing.assert_allclose(np.exp(found.log_tail), 1 / 8, rtol=1e-6)
    hot = cache.read([0], temperature=2.0).targets
    weights = np.array([1, 2**-0.5, 1 / 2])
    np.testing.assert_allclose(
        np.exp(hot.logprobs[0, 0]), 0.75 * weights / weights.sum(), rtol=5e-4
    )
    padding = cache.read([1]).targets
    assert padding.count[0].tolist() == [3, 3, 0, 0]
    assert padding.log_tail[0, 2] == 0 and (padding.logprobs[0, 2] == -np.inf).all()


@every_format
def test_this_version_writes_what_the_fixture_holds(tmp_path, version):
    """Values, not bytes: compressors change."""
    write_fixture(tmp_path, version)
    assert_same(Cache.open(str(tmp_path)), Cache.open(str(FORMATS[version])))


def assert_same(ours: Cache, stored: Cache) -> None:
    assert ours.manifest == stored.manifest
    assert ours._arrays.keys() == stored._arrays.keys() == stored.manifest.stored_shapes().keys()
    for name in stored.manifest.stored_shapes():
        a, b = (cache._arrays[name].read().result() for cache in (ours, stored))
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_cache_of_an_older_format_is_the_same_cache_and_is_finished_in_it(tmp_path):
    """The name by which runs know it, and what a writer of today adds to it."""
    old, new = (Cache.open(str(folder)) for folder in FORMATS.values())
    assert old.fingerprint == new.fingerprint and old.nbytes != new.nbytes
    every = np.arange(ROWS)
    for name, array in old.read_arrays(every).items():
        np.testing.assert_array_equal(new.read_arrays(every)[name], array)
    write_fixture(tmp_path, 2, shards=1)
    assert not Cache.open(str(tmp_path)).complete
    write_fixture(tmp_path)
    Cache.open(str(tmp_path)).require_complete()
    assert_same(Cache.open(str(tmp_path)), old)


def test_format_1_is_refused_by_the_command_that_writes_it_again(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "old")
    file = tmp_path / "old/manifest.json"
    values = json.loads(file.read_text())
    del values["optional"]
    file.write_text(json.dumps(values | {"format_version": 1}))
    message = (
        "format 2 or 3 .*got format 1.*python -m jax_distill.teacher --config X.yaml --cache.path"
    )
    with pytest.raises(UserError, match=message) as caught:
        Cache.open(str(tmp_path / "old"))
    assert "\n" not in str(caught.value)


def optional_cache(path: Path, **fields) -> Manifest:
    """A begun cache, whose manifest announces what this version does not read."""
    stored = replace(Cache.open(str(FIXTURE)).manifest, **fields)
    create(str(path), stored, ROWS).close()
    return stored


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"optional": {"loss_weight": [LENGTH]}}, "loss_weight"),
        ({"optional": {"teacher_draws": [LENGTH, 3]}}, "sampling top_k"),  # nobody's
        ({"sampling": "random"}, "sampling random"),
    ],
)
def test_what_would_change_the_loss_and_is_not_used_is_refused_by_name(tmp_path, fields, named):
    optional_cache(tmp_path, **fields)
    with pytest.raises(UserError, match=f"got one with {named}, which this version does not use"):
        Cache.open(str(tmp_path))


def test_optional_arrays_have_the_documented_types():
    manifest = replace(
        Cache.open(str(FIXTURE)).manifest,
        optional={"loss_weight": [4], "teacher_draws": [4, 3], "hidden_12": [4, 8]},
    )
    shapes = manifest.array_shapes()
    assert shapes["loss_weight"] == ("float16", (4,))
    assert shapes["teacher_draws"] == ("uint16", (4, 3))
    assert shapes["hidden_12"] == ("bfloat16", (4, 8))


@pytest.mark.parametrize("optional", [{"attention": [4]}, {"hidden_x": [4, 2]}, {"hidden_1": [3]}])
def test_an_optional_array_without_a_meaning_is_damage(tmp_path, optional):
    content = replace(Cache.open(str(FIXTURE)).manifest, optional=optional)
    values = {name: getattr(content, name) for name in vars(content)}
    with pytest.raises(ValueError, match="optional"):
        Manifest.parse(json.dumps(values).encode(), "")


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]))
