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
from jax_distill.base import console
from jax_distill.base.errors import UserError
from jax_distill.config import (
    Config,
    FromTeacher,
    OptimizerConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def config(tmp_path, **changes) -> Config:
    student = StudentConfig(from_teacher=FromTeacher(layers=[0]))
    return dataclasses.replace(Config(output_dir=str(tmp_path / "run"), student=student), **changes)


def test_a_second_process_is_refused_while_the_first_has_the_folder(tmp_path):
    with r.Run(config(tmp_path), backend="jax"):
        with pytest.raises(UserError, match="in use by process"):
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
    with pytest.raises(UserError, match="optimizer.learning_rate 0.5, got 0.0001"):
        r.Run(config(tmp_path), backend="jax")


@pytest.mark.parametrize("name, begun, wanted", [("steps", 12, 20), ("epochs", 1.0, 2.5)])
def test_more_steps_under_a_schedule_are_refused_with_the_way_to_go_on(
    tmp_path, name, begun, wanted
):
    """A constant rate goes on in the same folder."""
    for schedule in ("cosine", "constant"):
        folder = tmp_path / schedule
        before, after = (
            dataclasses.replace(
                config(
                    tmp_path, output_dir=str(folder), optimizer=OptimizerConfig(schedule=schedule)
                ),
                train=TrainConfig(**{name: value}),
            )
            for value in (begun, wanted)
        )
        with r.Run(before, backend="jax"):
            (folder / "checkpoints/4").mkdir(parents=True)
        if schedule == "constant":
            with r.Run(after, backend="jax"):
                pass
            continue
        with pytest.raises(UserError) as refused:
            r.Run(after, backend="jax")
        said = str(refused.value)
        assert f"begun with train.{name} {begun}, got {wanted}; its cosine schedule" in said
        assert f"--student.path {folder}/export --output_dir {folder}_2" in said


@pytest.mark.parametrize(
    "given, rows, steps",
    [({}, 33, 8), ({"steps": 5}, 33, 5), ({"epochs": 2.5}, 33, 20), ({"epochs": 0.1}, 33, 1)],
)
def test_steps_follow_from_the_passes_over_the_cache(given, rows, steps):
    assert TrainConfig(batch_size=4, **given).total_steps(rows) == steps


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
    with pytest.raises(UserError, match=f"begun by the {first} backend, got {second}"):
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
    with pytest.raises(UserError, match="clip_norm 1.0, got None"):
        r.Run(unclipped, backend="jax")


def test_another_cache_is_refused_once_there_are_checkpoints(tmp_path):
    with r.Run(config(tmp_path), backend="jax") as run:
        run.use_cache("a" * 64)
    with r.Run(config(tmp_path), backend="jax") as run:
        run.use_cache("b" * 64)  # nothing was trained yet
        (run.path / "checkpoints/3").mkdir(parents=True)
    with r.Run(config(tmp_path), backend="jax") as run:
        with pytest.raises(UserError, match="begun on the cache bbbb.*got aaaa"):
            run.use_cache("a" * 64)
        run.use_cache("b" * 64)


def test_progress_leaves_the_compiling_first_step_out(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 112.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    progress = console.StepProgress("student", total=3, done=0, tokens_per_step=60)
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


@pytest.mark.parametrize(
    ("line", "damaged", "problem"),
    [
        (1, b'\xff"step": 1, "loss": 1.0}', "no UTF-8"),
        (2, b'{"step": 2, "loss": 2.0', "Expecting"),
        (2, b"", "Expecting"),
        (2, b"[2]", r"\[2\]"),
        (2, b"[" * 100_000, "nested too deeply"),
        (2, b'{"loss": 2.0}', "loss"),
        (2, b'{"step": 2.0}', "step"),
        (2, b'{"step": true}', "step"),
        (2, b'{"step": 1, "loss": 2.0}', "step 1 after step 1"),
        (2, b'{"step": 2, "loss": "2.0"}', "loss '2.0'"),
        (2, b'{"step": 2, "loss": {}}', "loss {}"),
        (3, b'{"step": 3, "lo', "Unterminated"),  # ended by a newline: no kill tears so
    ],
)
def test_damaged_metrics_are_refused_by_line_and_left_as_they_are(tmp_path, line, damaged, problem):
    lines = [b'{"step": %d, "loss": %d.0}' % (step, step) for step in (1, 2, 3)]
    lines[line - 1] = damaged
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(each + b"\n" for each in lines))
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{path}:{line}: expected a record.*{problem}") as caught:
        r.Metrics(tmp_path, resume_step=3)
    assert "\n" not in str(caught.value) and path.read_bytes() == before


def test_a_last_record_without_its_newline_is_kept_where_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": null}')
    assert [record["step"] for record in r.read_metrics(path)] == [1, 2]


@pytest.mark.parametrize(
    "damaged", [b"", b"[]", b"\xff", b"{" * 10_000, b'{"backend": 1}', b'{"run_format": "2"}',
                b'{"cache": [1]}', b'{"seconds_before": "1"}', b'{"run_format": true}'],
)  # fmt: skip
def test_a_damaged_manifest_is_refused_by_name_and_left_alone(tmp_path, damaged):
    with r.Run(config(tmp_path), backend="jax") as run:
        (run.path / "checkpoints/3").mkdir(parents=True)
    path = tmp_path / "run/manifest.json"
    path.write_bytes(damaged)
    for _ in range(2):  # the lock is free again
        with pytest.raises(UserError, match=f"the manifest .*{path}"):
            r.Run(config(tmp_path), backend="jax")
    assert path.read_bytes() == damaged


def test_a_damaged_or_missing_configuration_of_a_run_is_refused_by_name(tmp_path):
    with r.Run(config(tmp_path), backend="jax") as run:
        (run.path / "checkpoints/3").mkdir(parents=True)
    path = tmp_path / "run/config.yaml"
    for damaged in (b"\xff", b"- 1", b"seed: [", b"seed: &a 0", b"seed: 2020-13-45", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(
            UserError, match=str(path) if damaged != b"seed: 2020-13-45" else "seed"
        ):
            r.Run(config(tmp_path), backend="jax")


def test_a_summary_is_read_with_its_types(tmp_path):
    path = tmp_path / "summary.json"
    assert r.read_summary(tmp_path) == {}
    path.write_text('{"steps": 3, "test": {"student": {"kl": 0.5, "perplexity": null}}}')
    assert r.read_summary(tmp_path)["test"]["student"]["kl"] == 0.5
    for bad in ("[]", '{"steps": "3"}', '{"test": 1}', '{"test": {"a": 1}}',
                '{"test": {"a": {"kl": []}}}'):  # fmt: skip
        path.write_text(bad)
        with pytest.raises(UserError, match=f"summary .*{path}"):
            r.read_summary(tmp_path)


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
