"""Caches of random samples and of adaptive K, from the configuration to training's refusals."""

from dataclasses import replace

import numpy as np
import pytest

from jax_distill import audit, verify
from jax_distill.base.errors import UserError
from jax_distill.batch import DRAWS
from jax_distill.cache import Cache, create
from jax_distill.config import load
from jax_distill.data import Document
from jax_distill.packing import pack
from jax_distill.teacher_test import (
    COLUMNS,
    manifest,
    mesh,
    random_model,
    single_rows,
    write,
)

LENGTH, ROWS, SAMPLES = 12, 11, 20


def random_manifest(**fields):
    drawn = {"sampling": "random", "optional": {DRAWS: [LENGTH, SAMPLES]}, "top_k": SAMPLES}
    return manifest(LENGTH, **drawn | {"temperatures": (2.0,)} | fields)


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def drawn(model, tmp_path_factory) -> Cache:
    path = tmp_path_factory.mktemp("random") / "cache"
    return write(path, single_rows(ROWS, LENGTH), model, random_manifest())


def test_a_random_cache_says_how_often_and_padding_was_never_drawn(drawn):
    batch = drawn.read(range(ROWS), temperature=2.0)
    real = batch.segment_ids > 0
    assert batch.targets.draws.dtype == np.int32
    np.testing.assert_array_equal(batch.targets.draws.sum(axis=-1), np.where(real, SAMPLES, 0))
    count = (batch.targets.draws > 0).sum(axis=-1)
    np.testing.assert_array_equal(count, batch.targets.count)
    assert count[real].min() < SAMPLES


def test_batches_of_another_size_and_a_resumed_writer_draw_the_same(drawn, model, tmp_path):
    rows, wanted = single_rows(ROWS, LENGTH), random_manifest()
    with create(str(tmp_path / "b"), wanted, ROWS) as writer:
        first = drawn.read_arrays(np.arange(8))
        writer.write(0, first)
    resumed = write(tmp_path / "b", rows, model, wanted)
    again = write(tmp_path / "c", rows, model, wanted, batch_size=16, chunk_size=64)
    stored = drawn.read(range(ROWS), temperature=2.0).targets
    for cache in (resumed, again):
        found = cache.read(range(ROWS), temperature=2.0).targets
        np.testing.assert_array_equal(found.indices, stored.indices)
        np.testing.assert_array_equal(found.draws, stored.draws)


def test_the_cache_check_knows_a_random_cache_and_another_teacher(drawn, model):
    options = {"rows": 8, "temperature": 2.0, "mesh": mesh()}
    assert verify.check_cache(model, drawn, **options).matches
    assert not verify.check_cache(random_model(3), drawn, **options).matches


def test_the_audit_says_what_draws_hold_and_offers_no_smaller_k(drawn, capsys):
    assert audit.main([drawn.path, "--verify"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the distinct ids of {SAMPLES} draws (random)" in said
    assert f"verdict: {SAMPLES} draws are" in said and "what a smaller K" not in said


def test_a_part_of_a_sample_and_a_smaller_vocabulary_are_refused(drawn):
    with pytest.raises(UserError, match="expected cache.read_top_k null with the random samples"):
        drawn.read([0], temperature=2.0, top_k=3)
    assert drawn.student_length(COLUMNS, {}, "s") == drawn.manifest.vocab_size
    fewer = {f"t{i}": i for i in range(250)}
    named = replace(drawn.manifest, vocabulary=fewer)
    drawn_with_names = Cache.open(drawn.path)
    drawn_with_names.manifest = named
    with pytest.raises(UserError, match="a student with the 300 tokens .*, got 250 in s"):
        drawn_with_names.student_length(COLUMNS, fewer, "s")


def test_adaptive_k_is_named_and_takes_fewer_bytes(model, tmp_path):
    rows = single_rows(32, LENGTH)
    full = write(tmp_path / "full", rows, model, manifest(LENGTH, shard_rows=32))
    less = write(tmp_path / "less", rows, model, manifest(LENGTH, shard_rows=32, top_p=0.2))
    assert "top_p" not in full.manifest.identity() and less.manifest.identity()["top_p"] == 0.2
    assert less.nbytes < full.nbytes
    targets, all_k = (x.read(range(32), temperature=1.0).targets for x in (less, full))
    p = np.exp(all_k.logprobs.astype(np.float64)).cumsum(-1)
    count, real = targets.count, targets.count > 0
    inside = np.take_along_axis(p, np.maximum(count[..., None], 1) - 1, -1)[..., 0]
    assert (inside[real & (count < 10)] >= 0.2 - 1e-3).all()  # float16 gaps
    assert 1 <= count[real].min() < count.max() <= 10
    np.testing.assert_array_equal(targets.first(3).count, np.minimum(targets.count, 3))
    with pytest.raises(UserError, match="top_p: stored 0.2, wanted None; set --cache.top_p 0.2"):
        create(less.path, manifest(LENGTH, shard_rows=32), 32)
    with pytest.raises(UserError, match="sampling: .*set --cache.sampling top_k"):
        create(less.path, random_manifest(shard_rows=32), 32)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cache.read_top_k 5", "expected cache.read_top_k null with cache.sampling random"),
        ("--cache.top_p 0.5", "expected cache.top_p null with cache.sampling random"),
        ("--cache.temperatures [1,2]", "expected cache.temperatures .* with cache.sampling random"),
        ("--loss.divergence jsd", "expected loss.divergence forward_kl with cache.sampling random"),
        ("--loss.tail ignore", "expected loss.tail bucket with cache.sampling random"),
        ("--teacher.mode online", "expected cache.sampling top_k with teacher.mode online"),
        ("--cache.sampling top_k --cache.top_p 1", "expected cache.top_p between 0 and 1, got 1"),
        ("--cache.samples 0", "expected cache.samples above 0, got 0"),
    ],
)
def test_what_a_random_sample_cannot_do_together_is_refused_by_name(flags, words):
    base = "--config configs/quickstart.yaml --cache.sampling random"
    with pytest.raises(UserError, match=words):
        load([*base.split(), *flags.split()])


def test_an_all_ones_row_is_one_segment_and_predicts_what_it_did():
    documents = [Document(np.arange(n, dtype=np.int32), np.ones(n, bool)) for n in (3, 4, 6)]
    apart = pack(documents, sequence_length=8)
    across = pack(documents, sequence_length=8, separate_documents=False)
    assert apart.arrays["segment_ids"].max() == 2 and across.arrays["segment_ids"].max() == 1
    real = apart.arrays["segment_ids"] > 0
    np.testing.assert_array_equal(across.arrays["positions"], np.where(real, np.arange(8), 0))
    for name in ("tokens", "loss_mask"):
        np.testing.assert_array_equal(across.arrays[name], apart.arrays[name])
