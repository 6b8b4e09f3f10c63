"""The whole job on a tiny teacher: what it leaves behind, what it refuses, what must not matter."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import evaluate, export, hf, sharding, student, train
from jax_distill.cache import Store
from jax_distill.config import (
    CacheConfig,
    Config,
    DataConfig,
    Failure,
    FromTeacher,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    Refusal,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    save,
)
from jax_distill.optimizer import make_optimizer
from jax_distill.run import read_metrics
from jax_distill.step import make_state, make_train_step, train_flops_per_token
from jax_distill.teacher_test import hf_folder, model_config, random_model, text_file

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


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
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    hf_folder(folder / "teacher")
    text_file(folder / "text.jsonl", documents=150)
    return folder


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    """A finished run; the tests only read it."""
    with jax.numpy_dtype_promotion("standard"):
        train.main(make_config(folder))
    return folder / "run"


def test_summary_has_every_promised_number(finished):
    summary = json.loads((finished / "summary.json").read_text())
    rows = summary["heldout"]
    assert list(rows) == ["teacher", "student_before", "student", "ce_baseline"]
    for row in rows.values():
        assert set(row) == {"kl", "cross_entropy", "perplexity", "top1_agreement"}
        assert all(isinstance(value, float) for value in row.values())
    assert rows["teacher"]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows["teacher"]["top1_agreement"] == 1
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
    steps = [record["step"] for record in read_metrics(finished / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_export_holds_the_last_checkpoint_and_the_students_own_files(finished, tmp_path):
    """Cases 31 and 38: exported again from the checkpoint, and nothing but the weights changed."""
    export.main([str(finished), str(tmp_path / "again")])
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
    for name in ("tokenizer.json",):
        assert (finished / "export" / name).read_bytes() == (
            finished / "student" / name
        ).read_bytes()
    card = (finished / "export/README.md").read_text()
    assert "store fingerprint" in card and "ce baseline" in card


def test_export_of_the_best_and_of_a_step_that_is_not_there(finished, tmp_path):
    export.main([str(finished), str(tmp_path / "best"), "--step", "best", "--dtype", "bfloat16"])
    assert json.loads((tmp_path / "best/config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(Refusal, match="expected --step among .*got 5"):
        export.main([str(finished), str(tmp_path / "none"), "--step", "5"])


def test_a_second_run_finds_the_store(folder, finished, capsys):
    train.main(make_config(folder, output_dir=str(folder / "second")))
    said = capsys.readouterr().out
    assert "is there" in said and "documents" not in said
    assert "gate: teacher as its own student: KL" in said
    first = read_metrics(finished / "metrics.jsonl")
    second = read_metrics(folder / "second/metrics.jsonl")
    assert [r["loss"] for r in first] == [r["loss"] for r in second]


def test_the_gate_refuses_a_store_shifted_by_one(folder, finished, tmp_path):
    """Case 7."""
    store = Store.open(str(folder / "cache/train"))
    teacher = hf.load_model(folder / "teacher")
    knobs = dict(rows=4, temperature=1.0, tolerance=1e-3)
    line = evaluate.identity_gate(teacher, store, **knobs)
    assert "shifted by one" in line

    class Shifted:
        manifest, rows = store.manifest, store.rows

        def read(self, rows, **knobs):
            batch = store.read(rows, **knobs)
            return batch | {
                key: np.roll(value, 1, axis=1)
                for key, value in batch.items()
                if key.startswith("teacher_")
            }

    with pytest.raises(Failure, match="row 0|row [1-3]"):
        evaluate.identity_gate(teacher, Shifted(), **knobs)  # type: ignore[arg-type]


def test_the_gate_takes_the_first_rows_that_have_targets(folder, finished):
    """Case 11: chat data whose first completions were cut away."""
    store = Store.open(str(folder / "cache/train"))
    teacher = hf.load_model(folder / "teacher")

    class FirstRowsEmpty:
        manifest, rows, path = store.manifest, store.rows, store.path

        def __init__(self, empty):
            self.empty = empty

        def read(self, rows, **knobs):
            batch = store.read(rows, **knobs)
            return batch | {"mask": batch["mask"] & (np.asarray(rows) >= self.empty)[:, None]}

    knobs = dict(rows=4, temperature=1.0, tolerance=1e-3)
    assert "gate" in evaluate.identity_gate(teacher, FirstRowsEmpty(5), **knobs)  # type: ignore
    with pytest.raises(Failure, match="something to predict"):
        evaluate.identity_gate(teacher, FirstRowsEmpty(10**6), **knobs)  # type: ignore


def test_fewer_steps_than_are_done_are_refused(folder, finished):
    config = make_config(folder, output_dir=str(folder / "constant"))
    constant = dataclasses.replace(config.optimizer, schedule="constant")
    short = dataclasses.replace(config.train, ce_baseline=False, steps=3)
    config = dataclasses.replace(config, optimizer=constant, train=short)
    train.main(config)
    fewer = dataclasses.replace(config, train=dataclasses.replace(short, steps=2))
    with pytest.raises(Refusal, match="at least 3, which are done, got 2"):
        train.main(fewer)


def test_neither_a_fresh_nor_a_resumed_run_compiles_its_step_twice(folder, finished, monkeypatch):
    made = []

    def remembered(*words, **knobs):
        made.append(make_train_step(*words, **knobs))
        return made[-1]

    monkeypatch.setattr(train, "make_train_step", remembered)
    config = make_config(folder, output_dir=str(folder / "compiled"))
    constant = dataclasses.replace(config.optimizer, schedule="constant")
    short = dataclasses.replace(config.train, ce_baseline=False, steps=3)
    config = dataclasses.replace(config, optimizer=constant, train=short)
    train.main(config)
    train.main(dataclasses.replace(config, train=dataclasses.replace(short, steps=6)))
    assert [step._cache_size() for step in made] == [1, 1]


def test_sigterm_saves_and_the_same_command_goes_on_to_the_same_numbers(folder, finished, capsys):
    config = make_config(folder, output_dir=str(folder / "stopped"))
    metrics = folder / "stopped/metrics.jsonl"

    def terminate() -> None:
        while not read_metrics(metrics):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    train.main(config)
    thread.join()
    assert "same command goes on" in capsys.readouterr().out
    assert not (folder / "stopped/summary.json").exists()
    train.main(config)
    numbers = ("loss", "learning_rate", "gradient_norm", "heldout_loss")
    for left, right in zip(
        read_metrics(finished / "metrics.jsonl"), read_metrics(metrics), strict=True
    ):
        assert [left.get(key) for key in numbers] == [right.get(key) for key in numbers]


def test_a_loss_that_is_not_finite_stops_with_step_and_rows_and_spares_the_checkpoint(folder):
    broken = folder / "broken"
    config = make_config(
        folder,
        output_dir=str(broken),
        optimizer=OptimizerConfig(name="sgd", learning_rate=1e30, clip_norm=None),
        train=dataclasses.replace(make_config(folder).train, save_every=1, ce_baseline=False),
    )
    with pytest.raises(Failure, match=r"step \d: loss .*rows \[.*last checkpoint: step"):
        train.main(config)
    model, step = export.restore_student(broken, "latest")
    assert step >= 1
    assert not (broken / "summary.json").exists()


def one_step(batch: dict, *, devices: int, micro: int, loss: LossConfig):
    """Parameters and numbers after one step of plain SGD."""
    mesh = jax.make_mesh(
        (devices, 1),
        ("data", "fsdp"),
        devices=jax.devices()[:devices],
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    model = random_model(1)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(state, sharding.replicated(mesh)))
    schedule = lambda _: jnp.float32(1.0)  # noqa: E731
    optimizer = make_optimizer("sgd", schedule, b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=None)
    graphdef, start = make_state(model, optimizer, mesh)
    step = make_train_step(graphdef, optimizer, schedule, loss=loss, vocab_size=300)
    split = {k: v.reshape(-1, micro, *v.shape[1:]) for k, v in batch.items()}
    after, numbers = step(start, sharding.place_batch(mesh, split, leading=1))
    return jax.device_get(after.params), jax.device_get(numbers)


def uneven_batch(lengths: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, length, top_k = len(lengths), 16, 5
    tokens = rng.integers(0, 300, (rows, length), dtype=np.int32)
    inside = np.arange(length)[None] < np.array(lengths)[:, None]
    logits = rng.normal(size=(rows, length, top_k)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) + np.log(np.float32(0.8))
    ids = np.argsort(rng.random((rows, length, 300)), axis=-1)[..., :top_k]
    return {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, axis=1),
        "segment_ids": inside.astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape).copy(),
        "mask": inside & (np.arange(length)[None] < np.array(lengths)[:, None] - 1),
        "teacher_indices": ids.astype(np.int32),
        "teacher_logprobs": logprobs,
        "teacher_log_tail": np.full((rows, length), np.log(0.2), np.float32),
        "teacher_count": np.full((rows, length), top_k, np.int32),
    }


@pytest.mark.parametrize(("devices", "micro"), [(1, 4), (1, 2), (1, 1), (2, 8), (4, 4), (2, 2)])
def test_micro_batches_and_devices_do_not_change_the_update(devices, micro):
    """Case 27: uneven lengths, one denominator."""
    batch = uneven_batch([2, 2, 2, 2, 16, 16, 16, 16])
    loss = LossConfig(chunk_size=5, ce_weight=0.5)
    expected, numbers = one_step(batch, devices=1, micro=8, loss=loss)
    got, others = one_step(batch, devices=devices, micro=micro, loss=loss)
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)
    assert others["loss"] == pytest.approx(numbers["loss"], rel=1e-6)
    assert others["valid_tokens"] == 64


def test_a_batch_without_a_valid_token_changes_nothing():
    """Case 11."""
    batch = uneven_batch([16] * 8)
    batch["mask"][:] = False
    params, numbers = one_step(batch, devices=1, micro=8, loss=LossConfig(chunk_size=5))
    assert numbers["loss"] == 0 and numbers["gradient_norm"] == 0
    before = jax.tree.leaves(nnx.state(random_model(1), nnx.Param))
    for left, right in zip(before, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(left, right)


def test_the_step_compiles_once(folder, finished):
    store = Store.open(str(folder / "cache/train"))
    config = make_config(folder)
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    model = train.load_on_mesh(folder / "run/student", config, mesh)
    schedule = lambda _: jnp.float32(0.1)  # noqa: E731
    optimizer = make_optimizer("adamw", schedule, b1=0.9, b2=0.9, weight_decay=0.1, clip_norm=1.0)
    graphdef, state = make_state(model, optimizer, mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    knobs = dict(loss=config.loss, vocab_size=300, places=places)
    step = make_train_step(graphdef, optimizer, schedule, **knobs)
    for _, _, batch in train.batches(store, config, mesh, first=0, steps=4):
        state, _ = step(state, batch)
    assert step._cache_size() == 1


def test_batches_hold_the_rows_they_name_in_both_epochs(folder, finished):
    """Case 9: shuffled, accumulated, two epochs; every token row stands with its own targets."""
    store = Store.open(str(folder / "cache/train"))
    config = make_config(folder)
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    steps = 2 * store.rows // config.train.batch_size
    everything = store.read(np.arange(store.rows))
    for _, rows, batch in train.batches(store, config, mesh, first=0, steps=steps):
        for key in ("tokens", "teacher_indices", "teacher_logprobs"):
            flat = np.asarray(batch[key]).reshape(len(rows), *everything[key].shape[1:])
            np.testing.assert_array_equal(flat, everything[key][rows])


def test_student_by_size_keeps_first_and_last_layers():
    config = dataclasses.replace(model_config(), num_hidden_layers=10)
    full = student.count_parameters(config)
    assert student.layers_for(config, full) == list(range(10))
    layer = (full - student.count_parameters(model_config())) // 8
    assert student.layers_for(config, full - 7 * layer) == [0, 1, 9]
    with pytest.raises(Refusal, match="at least"):
        student.layers_for(config, 100)


def test_student_keeps_the_chosen_layers_bit_for_bit(folder, tmp_path):
    out = student.make_student(folder / "teacher", tmp_path / "s", layers=[1], parameters=None)
    teacher, got = hf.load_model(folder / "teacher"), hf.load_model(out)
    np.testing.assert_array_equal(
        got.layers.mlp.up_proj.weight[...][0], teacher.layers.mlp.up_proj.weight[...][1]
    )
    with pytest.raises(Refusal, match="rising"):
        student.make_student(folder / "teacher", tmp_path / "t", layers=[1, 0], parameters=None)


def test_a_store_without_temperature_one_serves_the_baseline_too(folder, tmp_path):
    config = make_config(
        folder,
        output_dir=str(tmp_path / "run"),
        cache=CacheConfig(path=str(tmp_path / "cache"), top_k=20, temperatures=[2.0]),
        loss=LossConfig(chunk_size=10, temperature=2.0),
    )
    short = dataclasses.replace(config.train, steps=1)
    train.main(dataclasses.replace(config, train=short))
    assert "ce_baseline" in json.loads((tmp_path / "run/summary.json").read_text())["heldout"]


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
    with pytest.raises(Refusal, match=r"id 7\b"):
        train.main(config)
    unseen = dataclasses.replace(config.cache, path=str(tmp_path / "cache"))
    with pytest.raises(Refusal, match=r"id 7\b"):
        train.main(dataclasses.replace(config, cache=unseen))
    assert not (tmp_path / "cache").exists()


def test_flops_are_the_formula():
    config = model_config()
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    expected = 6 * (2 * layer + 320 * 32) + 6 * 2 * 32 * 24
    assert train_flops_per_token(config, 24) == expected


@pytest.mark.parametrize(("devices", "data", "fsdp"), [(1, 1, 1), (2, 1, 2), (4, 2, 2)])
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
    flag = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "jax_distill.train", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(
        command, env={**os.environ, "XLA_FLAGS": flag}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected, got = (read_metrics(path / "metrics.jsonl") for path in (finished, tmp_path / "run"))
    assert [r["step"] for r in got] == [r["step"] for r in expected]
    for key in ("loss", "kl", "gradient_norm", "heldout_loss"):
        numbers = [[r[key] for r in run if key in r] for run in (expected, got)]
        np.testing.assert_allclose(*numbers, rtol=1e-5, err_msg=key)


def test_a_trace_is_written_for_the_steps_asked_for(folder, finished):
    config = make_config(folder, output_dir=str(folder / "traced"))
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train, steps=3, ce_baseline=False, profile_steps=[1, 2], eval_every=None
        ),
    )
    train.main(config)
    assert list((folder / "traced/profile").rglob("*.xplane.pb"))
