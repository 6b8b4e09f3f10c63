"""The whole job on a tiny teacher: what it leaves behind, what it refuses, what must not matter."""

import dataclasses
import gc
import html
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from jax_distill import distil, evaluate, export, fit, hf, loop, sharding
from jax_distill.base.console import Stopped
from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache
from jax_distill.config import (
    CacheConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    FromTeacher,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    Source,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    save,
)
from jax_distill.conftest import on_devices
from jax_distill.data import row_indices
from jax_distill.losses import LossSums
from jax_distill.model import train_flops_per_token
from jax_distill.model_folder import CE_ONLY
from jax_distill.model_folder_test import snapshot
from jax_distill.run import read_metrics
from jax_distill.teacher_test import hf_folder, text_file
from jax_distill.training import program
from jax_distill.training.checkpoint import Checkpoints
from jax_distill.training.inputs import batches
from jax_distill.training.optimizer import make_optimizer
from jax_distill.training.state import make_state
from jax_distill.training.step import LossTask, StepSums, make_train_step

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


# The user's words are w100…w199, the assistant's w200…w299; w1 opens and w2 ends an answer.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}w1 {{ message.content }} w2 "
    "{% else %}w3 {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w1 {% endif %}"
)


def make_config(folder: Path, **changes) -> Config:
    config = Config(
        output_dir=str(folder / "run"),
        seed=3,
        teacher=TeacherConfig(path=str(folder / "teacher"), dtype="float32", batch_size=8),
        student=StudentConfig(from_teacher=FromTeacher(layers=[0])),
        data=DataConfig(
            path=str(folder / "text.jsonl"),
            format="jsonl",
            sequence_length=24,
            heldout_fraction=0.2,
        ),
        cache=CacheConfig(path=str(folder / "cache"), top_k=20, shard_rows=16),
        loss=LossConfig(chunk_size=10, ce_weight=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        train=TrainConfig(
            steps=6,
            batch_size=16,
            micro_batch_size=8,
            compute_dtype="float32",
            log_every=1,
            eval_every=3,
            save_every=2,
            ce_baseline=True,
        ),
        evaluate=EvaluateConfig(
            samples=0
        ),  # each model's programs for them take seconds to compile
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    hf_folder(folder / "teacher")
    (folder / "teacher/chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6}
    (folder / "teacher/generation_config.json").write_text(json.dumps(settings))
    text_file(folder / "text.jsonl", documents=150)
    return folder


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    """A finished run; the tests only read it."""
    compilation_cache.reset_cache()  # other tests of this process may have set it elsewhere or off
    with jax.numpy_dtype_promotion("standard"):
        distil.main(make_config(folder, evaluate=EvaluateConfig()))
    return folder / "run"


def test_summary_has_every_promised_number(finished):
    summary = json.loads((finished / "summary.json").read_text())
    rows = summary["test"]
    assert list(rows) == ["teacher", "student_before", "student", "ce_baseline"]
    for row in rows.values():
        assert set(row) == {
            *("kl", "cross_entropy", "perplexity", "top1_agreement"),
            *("acceptance_rate", "calibration_error"),
        }
        assert all(isinstance(value, float) for value in row.values())
    assert rows["teacher"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows["teacher"]["top1_agreement"] == rows["teacher"]["acceptance_rate"] == 1
    assert rows["student"]["kl"] < rows["student_before"]["kl"]
    assert summary["tokens_trained"] == 6 * 16 * 24
    assert summary["student_parameters"] < summary["teacher_parameters"]
    assert summary["cache"]["bytes_per_token"] > 0 and summary["seconds"] > 0


def test_the_run_folder_is_whole(finished):
    names = {path.name for path in finished.iterdir()}
    expected = "config.yaml manifest.json metrics.jsonl summary.json report.html checkpoints export"
    assert set(expected.split()) <= names
    report = (finished / "report.html").read_text()
    assert "data:image/png;base64," in report and "http" not in report
    samples = json.loads((finished / "summary.json").read_text())["samples"]
    assert len(samples) == 2
    for sample in samples:
        texts = sample["continuations"]
        models = ["teacher", "student_before", "student", "ce_baseline"]
        assert list(texts) == ["the text itself", *models] and all(texts.values())
        for text in (sample["prompt"], *texts.values()):
            assert f"<td>{html.escape(text)}</td>" in report
    for entry in json.loads((finished / "summary.json").read_text())["disagreements"]["student"]:
        assert f"<td>{html.escape(entry['context'])}</td>" in report
    assert "Largest disagreements" in report
    steps = [record["step"] for record in read_metrics(finished / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_export_holds_the_last_checkpoint_and_the_students_own_files(folder, finished, tmp_path):
    """Cases 31 and 38: exported again by another process, and nothing but the weights changed."""
    command = [sys.executable, "-m", "jax_distill.export", str(finished), str(tmp_path / "again")]
    subprocess.run(command, check=True, capture_output=True)
    ours = hf.load_model(finished / "export")
    again = hf.load_model(tmp_path / "again")
    for left, right in zip(
        jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(again)), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    start = json.loads((finished / "student/config.json").read_text())
    after = json.loads((finished / "export/config.json").read_text())
    assert {k: v for k, v in after.items() if "dtype" not in k} == {
        k: v for k, v in start.items() if "dtype" not in k
    }
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        for place in (finished / "export", tmp_path / "again"):
            assert (place / name).read_bytes() == (folder / "teacher" / name).read_bytes(), name
    card = (finished / "export/README.md").read_text()
    assert "cache fingerprint" in card and CE_ONLY in card


def test_export_of_the_best_and_of_a_step_that_is_not_there(finished, tmp_path):
    export.main([str(finished), str(tmp_path / "best"), "--step", "best", "--dtype", "bfloat16"])
    assert json.loads((tmp_path / "best/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="expected --step among .*got 5"):
        export.main([str(finished), str(tmp_path / "none"), "--step", "5"])


def test_a_second_run_finds_the_cache(folder, finished, capsys):
    distil.main(make_config(folder, output_dir=str(folder / "second")))
    said = capsys.readouterr().out
    assert "is there" in said and "documents" not in said
    assert "cache check: KL to the live teacher" in said
    first = read_metrics(finished / "metrics.jsonl")
    second = read_metrics(folder / "second/metrics.jsonl")
    assert [r["loss"] for r in first] == [r["loss"] for r in second]


def test_fewer_steps_than_are_done_are_refused(folder, finished):
    config = make_config(folder, output_dir=str(folder / "constant"))
    constant = dataclasses.replace(config.optimizer, schedule="constant")
    short = dataclasses.replace(config.train, ce_baseline=False, steps=3)
    config = dataclasses.replace(config, optimizer=constant, train=short)
    distil.main(config)
    fewer = dataclasses.replace(config, train=dataclasses.replace(short, steps=2))
    with pytest.raises(UserError, match="at least 3 steps, which are done, got 2"):
        distil.main(fewer)


def test_neither_a_fresh_nor_a_resumed_run_compiles_its_step_twice(folder, finished, monkeypatch):
    """And training begins with the student alone in memory, the teacher gone; a resumed run holds
    no other state while it reads the saved one."""
    made, held = [], []

    def bytes_held() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def remembered(*words, **options):
        held.append(bytes_held())
        made.append(make_train_step(*words, **options))
        return made[-1]

    def weighed(self, *words, **like):
        held.append(bytes_held())
        return restore(self, *words, **like)

    restore = Checkpoints.restore
    monkeypatch.setattr(Checkpoints, "restore", weighed)
    monkeypatch.setattr(program, "make_train_step", remembered)
    config = make_config(folder, output_dir=str(folder / "compiled"))
    constant = dataclasses.replace(config.optimizer, schedule="constant")
    short = dataclasses.replace(config.train, ce_baseline=False, steps=3)
    config = dataclasses.replace(config, optimizer=constant, train=short)
    before = bytes_held()
    distil.main(config)
    after = bytes_held()
    distil.main(dataclasses.replace(config, train=dataclasses.replace(short, steps=6)))
    # Each runs as one program, compiled ahead, which refuses any other shape or sharding.
    assert [step._cache_size() for step in made] == [0, 0]
    weights = hf.load_model(folder / "compiled/student")
    size = sum(w.nbytes for w in jax.tree.leaves(nnx.state(weights)))
    assert held[0] - before < 1.25 * size  # first run: the student; the teacher has more layers
    assert held[2] - after < size / 4  # second run: its student, then nothing, at the restore


def terminate_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """SIGTERM as soon as `step` is in the metrics."""
    logged = fit.Metrics.log

    def log_then_terminate(self, at, values):
        logged(self, at, values)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(fit.Metrics, "log", log_then_terminate)


def test_sigterm_saves_and_the_same_command_resumes_to_the_same_numbers(
    folder, finished, monkeypatch
):
    config = make_config(folder, output_dir=str(folder / "stopped"))
    metrics = folder / "stopped/metrics.jsonl"
    with monkeypatch.context() as patch:
        terminate_after(1, patch)
        with pytest.raises(Stopped, match="student: SIGTERM at step 1 of 6, state saved") as stop:
            distil.main(config)
    assert stop.value.number == signal.SIGTERM
    with Checkpoints(folder / "stopped/checkpoints", keep=2, seed=config.seed) as saved:
        assert saved.latest_step() == 1
    assert not (folder / "stopped/summary.json").exists()
    distil.main(config)
    numbers = ("loss", "learning_rate", "gradient_norm", "val_loss")
    for left, right in zip(
        read_metrics(finished / "metrics.jsonl"), read_metrics(metrics), strict=True
    ):
        assert [left.get(key) for key in numbers] == [right.get(key) for key in numbers]


def test_a_signal_at_the_last_step_ends_there_and_the_same_command_does_the_rest(
    folder, finished, monkeypatch
):
    config = make_config(folder, output_dir=str(folder / "stopped_last"))
    terminate_after(config.train.steps, monkeypatch)
    with pytest.raises(Stopped, match="student: SIGTERM (at|after) step 6 of 6, state saved"):
        distil.main(config)
    assert not (folder / "stopped_last/ce_baseline").exists()
    monkeypatch.undo()
    short = dataclasses.replace(config.train, ce_baseline=False)
    distil.main(dataclasses.replace(config, train=short))
    weights = "export/model.safetensors"
    assert (folder / "stopped_last" / weights).read_bytes() == (finished / weights).read_bytes()


def test_what_the_end_would_refuse_is_refused_before_training(folder, finished, monkeypatch):
    """A held-out table without a target; a folder of somebody else's where the export goes."""
    config = make_config(folder, output_dir=str(folder / "late"))
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "table_rows", lambda cache: np.arange(0))
        with pytest.raises(UserError, match="held-out text for the table"):
            distil.main(config)
    (folder / "late/export").mkdir()
    (folder / "late/export/thesis.txt").write_text("t")
    with pytest.raises(UserError, match="thesis.txt"):
        distil.main(config)
    assert not (folder / "late/checkpoints").exists()


def test_a_val_loss_that_is_not_finite_stops_before_the_save(folder, finished, monkeypatch):
    """The last update may have broken the weights: no loss of training tells."""
    config = make_config(folder, output_dir=str(folder / "broken_last"))
    lost = {"val_loss": float("nan")}
    monkeypatch.setattr(fit, "validation_means", lambda *_: lost)
    short = dataclasses.replace(config.train, steps=2, eval_every=2, save_every=None)
    with pytest.raises(RunError, match=r"step 2: validation loss nan after it, rows \["):
        distil.main(dataclasses.replace(config, train=short))
    assert not list((folder / "broken_last/checkpoints").glob("[0-9]*"))


def test_the_best_checkpoint_is_the_one_nearest_to_the_teacher(folder, finished, monkeypatch):
    """By KL, where the loss, of which the cross-entropy is a part, would choose another."""
    values = iter([{"val_kl": 0.1, "val_loss": 3.0}, {"val_kl": 0.2, "val_loss": 2.0}])
    monkeypatch.setattr(fit, "validation_means", lambda *_: next(values))
    config = make_config(folder, output_dir=str(folder / "best_by_kl"))
    short = dataclasses.replace(config.train, steps=2, eval_every=1, ce_baseline=False)
    distil.main(dataclasses.replace(config, train=short))
    with Checkpoints(folder / "best_by_kl/checkpoints", keep=2, seed=config.seed) as saved:
        assert saved.steps() == [1, 2] and saved.best_step() == 1


def test_validation_rows_without_a_target_choose_nothing(folder, finished):
    cache, mesh = Cache.open(str(folder / "cache/heldout")), sharding.make_mesh(data=-1, fsdp=1)
    zeros = LossSums(*(jnp.float32(0) for _ in LossSums._fields))
    args = (cache, make_config(folder), mesh)
    for count, numbers in ((0, False), (1, True)):
        sums = StepSums(zeros._replace(count=jnp.float32(count)), ())
        programs = fit.Programs(None, lambda *_, sums=sums: sums, None, None, None, None)
        assert bool(fit.validation_means(programs, None, *args)) is numbers


def test_a_trace_may_begin_late_and_ends_with_the_loop(tmp_path):
    """Resumed inside the steps asked for; more of them asked for than there are; two in a row."""
    for name, steps, taken in (("resumed", [1, 4], (2, 5)), ("short", [1, 99], (0, 3))):
        with fit.Trace(tmp_path / name, steps) as trace:
            for index in range(*taken):
                trace.before(index)
                jnp.ones(3).sum().block_until_ready()
                trace.after(index + 1)
        assert list((tmp_path / name).rglob("*.xplane.pb")), name
    with fit.Trace(tmp_path / "past", [1, 3]) as trace:  # resumed after them
        trace.before(3)
        trace.after(4)
    assert not (tmp_path / "past").exists()


def lose_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """The numbers of `step` are NaN, as they come from the device; those of later steps are not."""
    compiled = fit.Steps.dispatch

    def dispatch(self, state, batch):
        at = int(state.step) + 1
        state, numbers = compiled(self, state, batch)
        return state, numbers | {"loss": jnp.float32(jnp.nan)} if at == step else numbers

    patch.setattr(fit.Steps, "dispatch", dispatch)


@pytest.mark.parametrize("save_every", [4, 5, 100])
def test_nothing_of_a_step_that_is_not_finite_or_after_it_is_saved(
    folder, finished, monkeypatch, save_every
):
    """Step 4 of 6, the next one being under way: a checkpoint is due after it, after the next one,
    or after neither; and where a signal comes with it."""
    run = folder / f"lost_{save_every}"
    train_of = dataclasses.replace(
        make_config(folder).train, save_every=save_every, eval_every=2, ce_baseline=False
    )
    config = make_config(folder, output_dir=str(run), train=train_of)
    rows = row_indices(
        3, batch_size=16, num_rows=Cache.open(str(folder / "cache/train")).rows, seed=3
    )
    lose_at(4, monkeypatch)
    with pytest.raises(RunError) as caught:
        distil.main(config)
    message = str(caught.value)
    assert message.startswith("step 4: loss nan, gradient norm ")
    assert f"rows {rows.tolist()}" in message
    assert [int(path.name) for path in (run / "checkpoints").glob("[0-9]*")] == [2]
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]


def test_a_last_step_that_is_not_finite_or_one_with_a_signal_is_not_saved(
    folder, finished, monkeypatch
):
    for name, lost, signalled in (("last", 6, None), ("signalled", 5, 4)):
        run = folder / f"lost_{name}"
        train_of = dataclasses.replace(
            make_config(folder).train, save_every=3, eval_every=None, ce_baseline=False
        )
        with monkeypatch.context() as patch:
            lose_at(lost, patch)
            if signalled:
                terminate_after(signalled, patch)  # logged while step 5 is under way
            with pytest.raises(RunError, match=f"^step {lost}: loss nan"):
                distil.main(make_config(folder, output_dir=str(run), train=train_of))
        assert [int(path.name) for path in (run / "checkpoints").glob("[0-9]*")] == [3]


def test_a_step_is_dispatched_before_the_numbers_of_the_one_before_are_read(
    folder, finished, monkeypatch
):
    order: list[str] = []
    dispatch, read = fit.Steps.dispatch, fit.Steps.read

    def dispatched(self, state, batch):
        order.append("dispatch")
        return dispatch(self, state, batch)

    def was_read(self, done, saved):
        order.append(f"read {done.step}")
        return read(self, done, saved)

    monkeypatch.setattr(fit.Steps, "dispatch", dispatched)
    monkeypatch.setattr(fit.Steps, "read", was_read)
    sizes = dataclasses.replace(
        make_config(folder).train, save_every=None, eval_every=None, steps=4, ce_baseline=False
    )
    distil.main(make_config(folder, output_dir=str(folder / "ahead"), train=sizes))
    assert order == ("dispatch,read 1,dispatch,dispatch,read 2,dispatch,read 3,read 4".split(","))


def test_memory_and_the_time_to_compile_are_said_of_the_run(finished):
    summary = json.loads((finished / "summary.json").read_text())
    first, *later = read_metrics(finished / "metrics.jsonl")
    assert summary["compile_seconds"] == first["compile_seconds"] > 0
    assert all("compile_seconds" not in record for record in later)
    for record in (first, *later):  # a CPU's runtime does not say what is in use
        assert record["planned_peak_bytes"] > 0 and "peak_bytes_in_use" not in record
    assert later[-1]["peak_host_bytes"] == summary["peak_host_bytes"] >= first["peak_host_bytes"]
    assert "planned by the compiler" in (finished / "report.html").read_text()


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_training(
    folder, finished, monkeypatch
):
    config = make_config(folder, output_dir=str(folder / "no_room"))
    saved = fit.loop.saves(config.train, first=0, steps=6)
    assert saved == 4  # after 2, 3, 4 and 6
    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"GB free for checkpoints in .* \(8 of .*lower train.keep"):
        distil.main(config)
    assert not list((folder / "no_room/checkpoints").glob("[0-9]*"))


def test_a_loss_that_is_not_finite_stops_with_step_and_rows_and_spares_the_checkpoint(folder):
    broken = folder / "broken"
    config = make_config(
        folder,
        output_dir=str(broken),
        optimizer=OptimizerConfig(name="sgd", learning_rate=1e30, clip_norm=None),
        train=dataclasses.replace(make_config(folder).train, save_every=1, ce_baseline=False),
    )
    with pytest.raises(RunError, match=r"step \d: loss .*rows \[.*last checkpoint: step"):
        distil.main(config)
    model, step = export.restore_student(broken, "latest")
    assert step >= 1
    assert not (broken / "summary.json").exists()


def test_the_step_compiles_once(folder, finished):
    cache = Cache.open(str(folder / "cache/train"))
    config = make_config(folder)
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    model = distil.load_on_mesh(folder / "run/student", config, mesh)
    schedule = lambda _: jnp.float32(0.1)  # noqa: E731
    optimizer = make_optimizer("adamw", schedule, b1=0.9, b2=0.9, weight_decay=0.1, clip_norm=1.0)
    graphdef, state = make_state(model, optimizer, mesh)
    task = LossTask(config.loss.objective(), config.loss.execution(row_shards=8), 300)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_train_step(graphdef, optimizer, schedule, task, shardings=shardings)
    for _, _, batch in batches(cache, config, mesh, first=0, steps=4):
        state, _ = step(state, batch)
    assert step._cache_size() == 1


def test_batches_hold_the_rows_they_name_in_both_epochs(folder, finished):
    """Case 9: shuffled, accumulated, two epochs; every token row stands with its own targets."""
    cache = Cache.open(str(folder / "cache/train"))
    config = make_config(folder)
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    steps = 2 * cache.rows // config.train.batch_size
    everything = cache.read(np.arange(cache.rows))
    for _, rows, batch in batches(cache, config, mesh, first=0, steps=steps):
        flat = batch.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]))
        wanted = everything.map(lambda x, rows=rows: x[rows])
        for got, right in (
            (flat.tokens, wanted.tokens),
            (flat.targets.indices, wanted.targets.indices),
            (flat.targets.logprobs, wanted.targets.logprobs),
        ):
            np.testing.assert_array_equal(got, right)


def test_a_cache_without_temperature_one_serves_the_baseline_too(folder, tmp_path):
    config = make_config(
        folder,
        output_dir=str(tmp_path / "run"),
        cache=CacheConfig(path=str(tmp_path / "cache"), top_k=20, temperatures=[2.0]),
        loss=LossConfig(chunk_size=10, temperature=2.0),
    )
    short = dataclasses.replace(config.train, steps=1)
    distil.main(dataclasses.replace(config, train=short))
    assert "ce_baseline" in json.loads((tmp_path / "run/summary.json").read_text())["test"]


def test_another_tokenizer_is_refused_before_training(folder, finished, tmp_path):
    """Case 3, through the command."""
    swapped = tmp_path / "swapped"
    shutil.copytree(folder / "run/student", swapped)
    text = (swapped / "tokenizer.json").read_text()
    text = text.replace('"w7"', '"w_"').replace('"w8"', '"w7"').replace('"w_"', '"w8"')
    (swapped / "tokenizer.json").write_text(text)
    config = make_config(
        folder, output_dir=str(tmp_path / "run"), student=StudentConfig(path=str(swapped))
    )
    with pytest.raises(UserError, match=r"id 7\b"):
        distil.main(config)
    unseen = dataclasses.replace(config.cache, path=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"id 7\b"):
        distil.main(dataclasses.replace(config, cache=unseen))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("devices", "data", "fsdp"), [(1, 1, 1), (4, 2, 2)])
def test_the_whole_run_is_the_same_on_any_number_of_devices(
    folder, finished, tmp_path, devices, data, fsdp
):
    """`finished` ran on 8; each of these is a process with its own number of fake devices.

    Sums of another order differ in the last bits, and Adam's first steps divide them by themselves.
    """
    config = make_config(
        folder, output_dir=str(tmp_path / "run"), mesh=MeshConfig(data=data, fsdp=fsdp)
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ce_baseline=False))
    save(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "jax_distill.train", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, env=on_devices(devices), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected, got = (read_metrics(path / "metrics.jsonl") for path in (finished, tmp_path / "run"))
    assert [r["step"] for r in got] == [r["step"] for r in expected]
    for key in ("loss", "kl", "gradient_norm", "val_loss"):
        numbers = [[r[key] for r in run if key in r] for run in (expected, got)]
        np.testing.assert_allclose(*numbers, rtol=1e-5, err_msg=key)


def test_a_second_process_finds_compiled_programs_and_writes_the_trace_asked_for(
    folder, finished, tmp_path
):
    """The programs are those that `finished` compiled: the persistent cache is on."""
    config = make_config(folder, output_dir=str(tmp_path / "run"))
    options = dict(ce_baseline=False, profile_steps=[1, 2])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **options))
    save(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "jax_distill.train", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(
        command, env={**os.environ, "JAX_LOG_COMPILES": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compilation cache hit for 'jit_step_fn'" in done.stderr
    assert list((tmp_path / "run/profile").rglob("*.xplane.pb"))


# ---- other text than JSONL, other numbers than fp32 ---------------------------------------------


@pytest.fixture(scope="module")
def mixed(folder, finished) -> Path:
    """A run on three parts of token arrays and one of text, on a card of 1 TFLOP/s; its student is
    narrower, by importance over these rows."""
    rng = np.random.default_rng(1)
    arrays = rng.integers(150, 300, (150, 20), dtype=np.uint16)
    np.save(folder / "tokens.npy", arrays)
    lines = [
        " ".join(f"w{i}" for i in rng.integers(1, 150, rng.integers(3, 40))) for _ in range(150)
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    config = make_config(
        folder,
        output_dir=str(folder / "mixed"),
        student=StudentConfig(
            from_teacher=FromTeacher(layers=[0], num_key_value_heads=1, hidden_size=24)
        ),
        cache=dataclasses.replace(make_config(folder).cache, path=str(folder / "mixed/cache")),
    )
    path = [Source(str(folder / "tokens.npy"), 3.0), Source(str(folder / "words.jsonl"), 1.0)]
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=path, format="auto"),
        train=dataclasses.replace(config.train, ce_baseline=False),
    )
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "peak_bf16_flops", lambda kind: 1e12)
        distil.main(config)
    return folder / "mixed"


def test_token_arrays_and_text_are_trained_on_in_the_shares_asked_for(mixed):
    cache = Cache.open(str(mixed / "cache/train"))
    everything = cache.read(range(cache.rows))
    tokens = everything.tokens[everything.segment_ids > 0]
    of_arrays = int((tokens >= 150).sum())
    assert abs(of_arrays - 3 * (len(tokens) - of_arrays)) <= 3 * 40  # a document more or less
    rows = json.loads((mixed / "summary.json").read_text())["test"]
    assert rows["student"]["kl"] < rows["student_before"]["kl"]
    config = hf.load_model(mixed / "export").config
    assert (config.num_key_value_heads, config.hidden_size, config.head_dim) == (1, 24, 8)


def test_a_mixture_has_its_table_by_source(folder, mixed):
    summary = json.loads((mixed / "summary.json").read_text())
    arrays, words = (str(folder / name) for name in ("tokens.npy", "words.jsonl"))
    assert list(summary["test_by_source"]) == [arrays, words]
    for number, table in enumerate(summary["test_by_source"].values()):
        assert table.keys() == summary["test"].keys()
        cache = Cache.open(str(mixed / f"cache/by_source/{number}/heldout"))
        rows = cache.read(range(cache.rows), targets=False)
        of_arrays = rows.tokens[rows.mask] >= 150
        assert of_arrays.all() if number == 0 else not of_arrays.any()
        bars = [each["teacher"]["cross_entropy"] for each in (table, summary["test"])]
        assert bars[0] != bars[1]
    page = (mixed / "report.html").read_text()
    assert "<h2>By source</h2>" in page and page.count(f"<td>{words}</td>") == 3


def test_mfu_is_the_counted_operations_over_the_peak_of_all_devices(mixed, finished):
    per_token = train_flops_per_token(hf.model_config(hf.read_config(mixed / "student")), 24)
    for record in read_metrics(mixed / "metrics.jsonl"):
        flops = record["tokens_per_second"] * per_token
        assert record["tflops_per_second"] == pytest.approx(flops / 1e12)
        assert record["mfu"] == pytest.approx(flops / (1e12 * len(jax.devices())))
    records = read_metrics(finished / "metrics.jsonl")  # on a CPU, whose peak nobody knows
    assert all("tflops_per_second" in r and "mfu" not in r for r in records)


@pytest.fixture(scope="module")
def chatted(folder) -> tuple[Path, list[str]]:
    """A run in bf16 on conversations, most of them without an answer, and what it said."""
    rng, talks = np.random.default_rng(2), []
    for number in range(120):
        asked, answered = (
            " ".join(f"w{first + i}" for i in rng.integers(0, 100, 8)) for first in (100, 200)
        )
        talks.append([{"role": "user", "content": asked}])
        if number % 6 == 0:
            talks[-1].append({"role": "assistant", "content": answered})
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (folder / "talks.jsonl").write_text(lines)
    config = make_config(
        folder,
        output_dir=str(folder / "chatted"),
        cache=dataclasses.replace(make_config(folder).cache, path=str(folder / "chatted/cache")),
    )
    options = dict(path=str(folder / "talks.jsonl"), format="chat", packing=False)
    bf16 = dict(param_dtype="bfloat16", compute_dtype="bfloat16", remat="none")
    sizes = dict(batch_size=8, micro_batch_size=8, eval_every=None, ce_baseline=False)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, **options),
        train=dataclasses.replace(config.train, **bf16, **sizes),
    )
    said: list[str] = []
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        for module in (distil, loop):
            patch.setattr(module, "say", said.append)
        distil.main(config)
    return folder / "chatted", said


def test_conversations_are_trained_on_by_the_assistants_words_alone(chatted):
    cache = Cache.open(str(chatted[0] / "cache/train"))
    everything = cache.read(range(cache.rows))
    learned = everything.labels[everything.mask]
    assert learned.size and all(label == 2 or label >= 200 for label in learned)
    rows = json.loads((chatted[0] / "summary.json").read_text())["test"]
    assert list(rows) == ["teacher", "student_before", "student"]
    assert rows["teacher"]["kl"] == pytest.approx(0, abs=1e-6) and rows["student"]["kl"] > 0.01


def test_steps_without_a_valid_token_are_counted_and_warned_of(chatted):
    """Case 11."""
    run, said = chatted
    cache = Cache.open(str(run / "cache/train"))
    expected = {}
    for step in range(6):
        rows = row_indices(step, batch_size=8, num_rows=cache.rows, seed=3)
        if not cache.read(rows).mask.any():
            expected[step + 1] = (
                f"step {step + 1}: no valid token in rows {rows.tolist()}: nothing was learned"
            )
    assert expected and [line for line in said if "no valid token" in line] == [*expected.values()]
    for record in read_metrics(run / "metrics.jsonl"):
        numbers = [record[key] for key in ("valid_tokens", "loss", "gradient_norm")]
        assert all(x == 0 if record["step"] in expected else x > 0 for x in numbers)


def test_bf16_parameters_are_trained_and_exported_as_such(chatted):
    run, _ = chatted
    assert json.loads((run / "export/config.json").read_text())["dtype"] == "bfloat16"
    saved, step = export.restore_student(run, "latest")
    before, after = hf.load_model(run / "student"), hf.load_model(run / "export")
    leaves = [jax.tree.leaves(nnx.state(model)) for model in (saved, after, before)]
    assert step == 6 and all(leaf.dtype == jnp.bfloat16 for leaf in leaves[0])
    for kept, exported, first in zip(*leaves, strict=True):
        np.testing.assert_array_equal(kept.astype(jnp.float32), exported.astype(jnp.float32))
        assert (exported.astype(jnp.float32) != first.astype(jnp.float32)).any()


def test_a_run_resumes_with_the_student_that_it_began_with_and_no_other(folder, finished, tmp_path):
    """What the checkpoints began with stays as it is; where it has changed, the run is refused."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    before = snapshot(run / "student")
    distil.main(make_config(folder, output_dir=str(run)))
    assert snapshot(run / "student") == before
    weights = "export/model.safetensors"
    assert (run / weights).read_bytes() == (finished / weights).read_bytes()
    (run / "student/README.md").unlink()
    with pytest.raises(UserError, match="as this run began with it, got another README.md"):
        distil.main(make_config(folder, output_dir=str(run)))
    unfinished = tmp_path / "unfinished"  # nobody knows whose folder it is where nothing is trained
    shutil.copytree(run / "student", unfinished / "student")
    with pytest.raises(UserError, match="student with files that this command did not write"):
        distil.main(make_config(folder, output_dir=str(unfinished)))
