"""The run folder: one process at a time, each step once, no other configuration by accident."""

import dataclasses
import json
import math
import os
import struct

import pytest
import yaml
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jax_distill import run as r
from jax_distill.config import (
    Config,
    FromTeacher,
    OptimizerConfig,
    Refusal,
    StudentConfig,
    TeacherConfig,
)

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
    with r.Run(config(tmp_path), backend="jax"):  # nor now: a refusal may leave the empty folder
        pass
    with r.Run(other, backend="jax") as run:
        (run.path / "checkpoints/3").mkdir()
    with pytest.raises(Refusal, match="optimizer.learning_rate 0.5, got 0.0001"):
        r.Run(config(tmp_path), backend="jax")


def test_a_checkpoint_that_was_never_finished_binds_nobody(tmp_path):
    with r.Run(config(tmp_path), backend="jax") as run:
        (run.path / "checkpoints/3.orbax-checkpoint-tmp").mkdir(parents=True)
        (run.path / "checkpoints/.step_3.pt.tmp").mkdir()
        assert not run.trained
    other = config(tmp_path, optimizer=OptimizerConfig(learning_rate=0.5))
    with r.Run(other, backend="jax") as run:
        (run.path / "checkpoints/step_3.pt").touch()
        assert run.trained


@pytest.mark.parametrize(
    ("first", "second", "saved"), [("torch", "jax", "step_3.pt"), ("jax", "torch", "3")]
)
def test_a_run_of_the_other_backend_is_refused_and_left_alone(tmp_path, first, second, saved):
    with r.Run(config(tmp_path), backend=first) as run:
        (run.path / "checkpoints").mkdir()
        (run.path / "checkpoints" / saved).touch()
    before = (tmp_path / "run/manifest.json").read_bytes()
    with pytest.raises(Refusal, match=f"begun by the {first} backend, got {second}"):
        r.Run(config(tmp_path), backend=second)
    assert (tmp_path / "run/manifest.json").read_bytes() == before


def test_what_only_concerns_logging_may_change(tmp_path):
    first = config(tmp_path)
    with r.Run(first, backend="jax") as run:
        (run.path / "checkpoints/3").mkdir(parents=True)
    train = dataclasses.replace(first.train, log_every=3, keep=5)
    with r.Run(dataclasses.replace(first, train=train), backend="jax"):
        pass


def test_a_moved_run_and_a_field_younger_than_it_do_not_hinder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = config(tmp_path, teacher=TeacherConfig(path=str(tmp_path / "teacher")))
    with r.Run(begun, backend="jax") as run:
        (run.path / "checkpoints/3").mkdir(parents=True)
    old = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    del old["optimizer"]["clip_norm"]
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(old))
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = dataclasses.replace(begun, output_dir="moved", teacher=TeacherConfig(path="teacher"))
    with r.Run(moved, backend="jax"):
        pass
    unclipped = dataclasses.replace(moved, optimizer=OptimizerConfig(clip_norm=None))
    del old["optimizer"]["name"]
    (tmp_path / "moved/config.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(Refusal, match="clip_norm 1.0, got None"):
        r.Run(unclipped, backend="jax")


def test_another_store_is_refused_once_there_are_checkpoints(tmp_path):
    with r.Run(config(tmp_path), backend="jax") as run:
        run.use_store("a" * 64)
    with r.Run(config(tmp_path), backend="jax") as run:
        run.use_store("b" * 64)  # nothing was trained yet
        (run.path / "checkpoints/3").mkdir(parents=True)
    with r.Run(config(tmp_path), backend="jax") as run:
        with pytest.raises(Refusal, match="begun on the store bbbb.*got aaaa"):
            run.use_store("a" * 64)
        run.use_store("b" * 64)


def test_progress_leaves_the_compiling_first_step_out(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 112.0])
    monkeypatch.setattr(r.time, "monotonic", lambda: next(clock))
    progress = r.StepProgress("student", total=3, done=0, tokens_per_step=60)
    progress.update(1, 2.0)
    progress.update(2, 1.5)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == "student 2/3  5 tokens/s  loss 1.5000  12 s left"


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


def test_seconds_count_the_commands_before_and_not_the_time_between(tmp_path):
    begun = 1_700_000_000.0

    def pretend(path, seconds):
        os.utime(path, (begun + seconds, begun + seconds))

    with r.Run(config(tmp_path), backend="jax") as run:
        assert 0 <= run.seconds < 60
        with r.Metrics(run.path, resume_step=0) as metrics:
            metrics.log(1, {"loss": 1.0})
        pretend(run.path / "manifest.json", 0)
        pretend(run.path / "metrics.jsonl", 100)
    with r.Run(config(tmp_path), backend="jax") as run:
        assert 100 <= run.seconds < 160
        pretend(run.path / "manifest.json", 5000)
        pretend(run.path / "metrics.jsonl", 5030)
    with r.Run(config(tmp_path), backend="jax") as run:
        assert 130 <= run.seconds < 190


def test_tensorboard_holds_the_same_numbers(tmp_path):
    with r.Metrics(tmp_path, resume_step=4) as metrics:
        metrics.log(5, {"loss": 2.5, "kl": math.nan})
        metrics.log(6, {"loss": 1.25})
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(record) for record in tf_records(file.read_bytes())]
    assert any(e.step == 5 and e.session_log.status == SessionLog.START for e in events)
    numbers = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert numbers == [(5, "loss", 2.5), (6, "loss", 1.25)]


def tf_records(data: bytes) -> list[bytes]:
    """TFRecord: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    records = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + size])
        data = data[16 + size :]
    return records
