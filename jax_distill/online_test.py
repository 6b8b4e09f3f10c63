"""teacher.mode online: the teacher in the step, the vocabulary whole, the cache without targets."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_distill import config as c
from jax_distill import distil
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache
from jax_distill.distil_test import folder, make_config
from jax_distill.run import read_metrics
from jax_distill.teacher_test import VOCAB

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
__all__ = ["folder"]


def changed(config: c.Config, section: str, **values) -> c.Config:
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def online(folder, name: str) -> c.Config:
    config = make_config(folder, output_dir=str(folder / name))
    config = changed(config, "teacher", mode="online")
    return changed(config, "cache", path=str(folder / name / "rows"))


def run(config: c.Config) -> list[dict]:
    with jax.numpy_dtype_promotion("standard"):
        distil.main(config)
    return read_metrics(Path(config.output_dir) / "metrics.jsonl")


@pytest.fixture(scope="module")
def records(folder):
    return run(online(folder, "online"))


def test_rows_alone_are_cached_and_the_student_learns(folder, records):
    for split in ("train", "heldout"):
        assert Cache.open(str(folder / "online/rows" / split)).manifest.top_k == 0
    table = json.loads((folder / "online/summary.json").read_text())["test"]
    assert table["student"]["kl"] < table["student_before"]["kl"]
    assert all(record["teacher_mass"] == pytest.approx(1, abs=1e-6) for record in records)
    assert records[-1]["val_kl"] > 0 and records[-1]["kl"] < records[0]["kl"]


def test_offline_at_k_of_the_vocabulary_starts_with_the_same_loss(folder, records):
    """What float16 gaps do to a KL is below 1e-6 nats (docs/CACHE.md); its rounding is 1e-6 of the
    few nats of a random student. Later steps go apart by what the gaps do to gradients."""
    config = make_config(folder, output_dir=str(folder / "whole"))
    config = changed(config, "cache", path=str(folder / "whole/cache"), top_k=VOCAB)
    offline = run(changed(config, "train", steps=6, ce_baseline=False))
    for name in ("kl", "loss", "cross_entropy"):
        assert records[0][name] == pytest.approx(offline[0][name], rel=1e-5, abs=2e-6)
    assert records[-1]["kl"] == pytest.approx(offline[-1]["kl"], rel=1e-2)
    # The live top K goes through the cache's own codec: equal to fp32 rounding.
    live = changed(online(folder, "top_k"), "teacher", mode="online_top_k")
    live = changed(live, "cache", top_k=VOCAB)
    found = run(changed(live, "train", steps=1, ce_baseline=False))
    for name in ("kl", "loss", "cross_entropy", "gradient_norm"):
        assert found[0][name] == pytest.approx(offline[0][name], rel=1e-5, abs=2e-6)


def test_a_run_that_stopped_in_between_ends_the_same(folder, records):
    half = changed(online(folder, "half"), "train", ce_baseline=False)
    constant = changed(half, "optimizer", schedule="constant")
    whole = run(dataclasses.replace(constant, output_dir=str(folder / "in_one")))
    run(changed(constant, "train", steps=3, ce_baseline=False))
    resumed = run(constant)
    for left, right in zip(whole, resumed, strict=True):
        assert left["loss"] == right["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache.read_top_k", "8"], "cache.read_top_k null with teacher.mode online, got 8"),
        (["--loss.kl_weight", "0"], "loss.hidden_weight above 0 with teacher.mode online, got 0"),
        (["--cache.hidden_layers", "2"], "cache.hidden_layers 0 with teacher.mode online, got 2"),
        (["--teacher.mode", "life"], "offline, online, online_top_k, got 'life'"),
    ],
)
def test_what_excludes_itself_is_refused(options, message):
    argv = ["--config", "configs/quickstart.yaml", "--teacher.mode", "online", *options]
    if "life" in options:
        argv = argv[:2] + options
    with pytest.raises(UserError, match=message):
        c.load(argv, "jax_distill.train")


def test_any_temperature_is_there(folder):
    config = changed(online(folder, "warm"), "loss", temperature=3.5)
    config = changed(config, "train", steps=1, ce_baseline=False)
    record = run(config)[0]
    expected = 3.5**2 * record["kl"] + 0.1 * record["cross_entropy"]
    np.testing.assert_allclose(record["loss"], expected, rtol=1e-6)
