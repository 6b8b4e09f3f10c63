"""The run folder: one process at a time, each step once, no other configuration by accident."""

import dataclasses
import json
import math

import pytest

from jax_distill import run as r
from jax_distill.config import Config, FromTeacher, OptimizerConfig, Refusal, StudentConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def config(tmp_path, **changes) -> Config:
    student = StudentConfig(from_teacher=FromTeacher(layers=[0]))
    return dataclasses.replace(Config(output_dir=str(tmp_path / "run"), student=student), **changes)


def test_a_second_process_is_refused_while_the_first_has_the_folder(tmp_path):
    with r.Run(config(tmp_path), backend="jax"):
        with pytest.raises(Refusal, match="in use by process"):
            r.Run(config(tmp_path), backend="jax")
    with r.Run(config(tmp_path), backend="jax"):
        pass


def test_another_configuration_is_refused_once_there_are_checkpoints(tmp_path):
    other = config(tmp_path, optimizer=OptimizerConfig(learning_rate=0.5))
    with r.Run(config(tmp_path), backend="jax"):
        pass
    with r.Run(other, backend="jax") as run:  # nothing was trained yet
        (run.path / "checkpoints").mkdir()
    with pytest.raises(Refusal, match="optimizer.learning_rate 0.5, got 0.0001"):
        r.Run(config(tmp_path), backend="jax")


def test_what_only_concerns_logging_may_change(tmp_path):
    first = config(tmp_path)
    with r.Run(first, backend="jax") as run:
        (run.path / "checkpoints").mkdir()
    train = dataclasses.replace(first.train, log_every=3, keep=5)
    with r.Run(dataclasses.replace(first, train=train), backend="jax"):
        pass


def test_metrics_have_every_step_once_after_a_kill(tmp_path):
    with r.Metrics(tmp_path, resume_step=0) as metrics:
        for step in (1, 2, 3):
            metrics.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a kill tore this line
    with r.Metrics(tmp_path, resume_step=2) as metrics:
        for step in (3, 4):
            metrics.log(step, {"loss": float(-step)})
    records = r.read_metrics(tmp_path / "metrics.jsonl")
    assert [(x["step"], x["loss"]) for x in records] == [(1, 1.0), (2, 2.0), (3, -3.0), (4, -4.0)]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    r.write_json(tmp_path / "x.json", {"a": [math.nan, 1.5], "b": math.inf})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.5], "b": None}


def test_manifest_says_what_numbers_depend_on(tmp_path):
    with r.Run(config(tmp_path), backend="jax") as run:
        manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["backend"] == "jax"
    assert {"python", "jax", "numpy", "tensorstore"} <= manifest["versions"].keys()
