"""A hidden-state loss from the YAML to the export: which layers, what the cache holds of them, a
run that resumes, the projections that stay out of the exported folder."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jax_distill import config as c
from jax_distill import distil, export, hf
from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache
from jax_distill.distil_test import folder, make_config
from jax_distill.hf.tensor_files import weight_files
from jax_distill.hidden_layers import cached_layers, layer_pairs, start_projection, with_pairs
from jax_distill.online_test import changed, run
from jax_distill.teacher_test import hf_folder, model_config

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
__all__ = ["folder"]
NARROW = 16


def hidden_config(folder, name: str) -> c.Config:
    """A student of width 16 and one layer beside a teacher of width 32 and two."""
    if not (folder / "narrow").is_dir():
        hf_folder(folder / "narrow", seed=1, hidden_size=NARROW, head_dim=4, num_hidden_layers=1)
    config = make_config(folder, output_dir=str(folder / name))
    config = changed(config, "student", path=str(folder / "narrow"), from_teacher=None)
    config = changed(config, "loss", hidden_weight=0.5, hidden_kind="mse")
    config = changed(config, "cache", path=str(folder / "states"), hidden_layers=[1])
    config = changed(config, "optimizer", schedule="constant")
    return changed(config, "train", ce_baseline=False)


@pytest.fixture(scope="module")
def records(folder):
    return run(hidden_config(folder, "hidden"))


def test_the_cache_holds_the_teachers_states_in_bfloat16(folder, records):
    """bf16 of the fp32 states, whose rounding differs in batches of another shape: two steps of
    bf16's 2^-8 at most."""
    cache = Cache.open(str(folder / "states/train"))
    assert cache.manifest.hidden_shapes() == {1: (24, 32)}
    batch = cache.read(range(8), hidden_layers=[1])
    teacher = hf.load_model(folder / "teacher", param_dtype=np.float32, compute_dtype=np.float32)
    states = jax.jit(lambda *inputs: teacher.apply(*inputs, hidden_layers=[1]).layers[0])(
        batch.tokens, batch.segment_ids, batch.positions
    )
    real = batch.segment_ids > 0
    found = batch.teacher_layers[:, :, 0].astype(np.float32)
    np.testing.assert_allclose(found[real], np.asarray(states)[real], rtol=2**-7, atol=1e-6)
    assert not found[~real].any()
    with pytest.raises(UserError, match=r"hidden states of layers \[0\] .* got \[1\]"):
        cache.read([0], hidden_layers=[0])


def test_the_term_is_logged_apart_and_falls(records):
    first, last = records[0], records[-1]
    assert last["hidden_loss"] < first["hidden_loss"] and last["val_hidden_loss"] > 0
    for record in records:
        parts = record["kl"] + 0.1 * record["cross_entropy"] + 0.5 * record["hidden_loss"]
        assert record["loss"] == pytest.approx(parts, rel=1e-6)


def test_a_run_on_hidden_states_alone_has_its_cache_checked(folder, records, monkeypatch):
    """They are of the same pass as the targets: what is wrong of one is wrong of the other."""

    def refuse(*_):
        raise RunError("not this teacher's")

    monkeypatch.setattr(distil, "check_train_cache", refuse)
    alone = changed(hidden_config(folder, "alone"), "loss", kl_weight=0.0)
    with pytest.raises(RunError, match="not this teacher's"):
        run(alone)


def test_a_run_that_stopped_in_between_ends_the_same_and_exports_no_projection(folder, records):
    config = hidden_config(folder, "resumed")
    run(changed(config, "train", steps=3, ce_baseline=False))
    resumed = run(config)
    for left, right in zip(records, resumed, strict=True):
        assert left["loss"] == right["loss"] and left["gradient_norm"] == right["gradient_norm"]
    export.main([config.output_dir, str(folder / "exported"), "--step", "6"])
    for out in (folder / "exported", folder / "resumed/export"):
        assert not any("projection" in key for key in weight_files(out))
    ours, theirs = (
        hf.load_model(x, param_dtype=np.float32, compute_dtype=np.float32)
        for x in (folder / "exported", folder / "resumed/export")
    )
    for left, right in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_array_equal(left, right)


def test_which_layers_are_paired():
    assert layer_pairs(None, student=24, teacher=30) == ((5, 6), (11, 14), (17, 21), (23, 29))
    assert layer_pairs(None, student=2, teacher=6) == ((0, 2), (1, 5))
    assert layer_pairs(1, student=28, teacher=32) == ((27, 31),)
    assert layer_pairs([[1, 0], [0, 5]], student=2, teacher=6) == ((1, 0), (0, 5))
    assert cached_layers(4, 30) == [6, 14, 21, 29] and cached_layers([5, 2], 6) == [2, 5]
    drawn = start_projection(2, width=64, teacher=48, seed=1)
    assert drawn.shape == (2, 48, 64) and drawn.dtype == np.float32
    assert drawn.std() == pytest.approx(1 / 8, rel=0.03)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (3, "from 1 to 2, the layers of the shallower model, got 3"),
        ([[0, 1], [0, 2]], r"different layers from 0 to 1 of the student, got \[0, 0\]"),
        ([[0, 6]], r"different layers from 0 to 5 of the teacher, got \[6\]"),
        ([[0, 1, 2]], "as pairs"),
    ],
)
def test_layers_that_a_model_lacks_are_refused(wanted, message):
    with pytest.raises(UserError, match=message):
        layer_pairs(wanted, student=2, teacher=6)
    with pytest.raises(UserError, match="cache.hidden_layers"):
        cached_layers(7, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected cache.hidden_layers with loss.hidden_weight 1.0 in teacher.mode offline"),
        (["--teacher.path", "", "--loss.kl_weight", "0"], "expected teacher.path with loss.hidden"),
    ],
)
def test_a_hidden_state_loss_without_hidden_states_is_refused(options, message):
    argv = ["--config", "configs/quickstart.yaml", "--loss.hidden_weight", "1", *options]
    with pytest.raises(UserError, match=message):
        c.load(argv, "jax_distill.train")


def test_without_the_teachers_depth_pairs_are_needed(folder):
    config = hidden_config(folder, "unused")
    with pytest.raises(UserError, match="pairs of layers where the teacher's config.json"):
        with_pairs(config, student=1, teacher=None)
    named = changed(config, "loss", hidden_layers=[[0, 1]])
    assert with_pairs(named, student=1, teacher=None) == named
    assert model_config().num_hidden_layers == 2 and Path(config.cache.path).name == "states"
