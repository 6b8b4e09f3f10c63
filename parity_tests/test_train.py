"""Rungs "resumed run" and "exported folder": one configuration, trained whole by both backends.

The same YAML, store and first weights; then the numbers of metrics.jsonl, of the held-out table and
of a resumed run agree, a JAX-trained export loads in transformers and a torch-trained one in JAX
with equal logits. Besides: what torch_ref.train refuses, and that it goes on after a signal.
"""

import dataclasses
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
import tiny
import torch
import yaml
from ladder import assert_close

import torch_ref.evaluate
import torch_ref.student
import torch_ref.train
from jax_distill import config as config_module
from jax_distill import evaluate, export, hf, student, train
from jax_distill.cache import Store
from jax_distill.config import Config, Failure, FromTeacher, Refusal
from jax_distill.run import read_metrics
from torch_ref import model as torch_model

LENGTH, STEPS, HALF = 32, 6, 3


@dataclasses.dataclass
class Job:
    """A finished place to train in, and what both backends made of it."""

    place: Path
    config_file: Path
    torch_run: Path
    jax_run: Path

    def config(self, run: str) -> Config:
        argv = ["--config", str(self.config_file), "--output_dir", str(self.place / run)]
        return config_module.load(argv)

    def argv(self, run: str, *more: str) -> list[str]:
        return [
            *("--config", str(self.config_file), "--output_dir", str(self.place / run)),
            *("--device", "cpu", *more),
        ]


def jax_fit(job: Job, run: str) -> None:
    """`jax_distill.train`'s loop on one device, and its export."""
    config = job.config(run)
    folder = Path(config.output_dir)
    stores = tuple(Store.open(f"{config.cache.path}/{s}") for s in ("train", "heldout"))
    start = Path(config.student.path)
    mesh = tiny.one_device()
    # The resumed run compiles what the first one did.
    jax.config.update("jax_compilation_cache_dir", str(job.place / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    with jax.numpy_dtype_promotion("standard"):
        model = train.fit(
            config,
            folder,
            hf.load_model(start, param_dtype=jnp.float32, compute_dtype=jnp.float32),
            stores=stores,
            mesh=mesh,
            steps=STEPS,
            vocab_size=train.student_vocabulary(start, stores[0]),
            what="student",
        )
    jax.config.update("jax_compilation_cache_dir", None)
    export.write_folder(folder / "export", model, student=start, dtype="float32", card="")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    place = tmp_path_factory.mktemp("job")
    teacher = tiny.llama_folder(place / "teacher", seed=9, num_hidden_layers=3)
    tiny.llama_folder(place / "student", seed=1)
    for split, rows, seed in (("train", 10, 0), ("heldout", 6, 1)):
        source = tiny.rows_store(place / "rows" / split, tiny.packed_rows(rows, LENGTH, seed))
        tiny.taught_store(place / "cache" / split, source, teacher)
    settings = {
        "seed": 3,
        "teacher": {"path": str(teacher), "dtype": "float32", "batch_size": 2},
        "student": {"path": str(place / "student")},
        "data": {"sequence_length": LENGTH},
        "cache": {"path": str(place / "cache"), "top_k": 12, "temperatures": [1.0, 2.0]},
        "loss": {"ce_weight": 0.3, "temperature": 2.0, "chunk_size": 16},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 2, "weight_decay": 0.1},
        "train": {
            "steps": STEPS,
            "batch_size": 4,
            "micro_batch_size": 2,
            "compute_dtype": "float32",
            "log_every": 1,
            "eval_every": 2,
            "save_every": HALF,
        },
    }
    file = place / "tiny.yaml"
    file.write_text(yaml.safe_dump(settings))
    made = Job(place, file, place / "torch", place / "jax")
    torch_ref.train.main(made.argv("torch"))
    jax_fit(made, "jax")
    return made


def numbers(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the machine."""
    records = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in r.items() if "per_second" not in k} for r in records]


def assert_same_metrics(got: list[dict], expected: list[dict]) -> None:
    assert [r["step"] for r in got] == [r["step"] for r in expected] == list(range(1, STEPS + 1))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-5), f"step {theirs['step']}: {key}"


def folder_logits_in_torch(folder: Path, batch: dict) -> np.ndarray:
    model = torch_model.load_model(str(folder), dtype="float32")
    place = (torch.tensor(batch[k]) for k in ("tokens", "segment_ids", "positions"))
    with torch.no_grad():
        hidden = torch_model.hidden_states(model, *place)
        return torch_model.logits(hidden.flatten(0, 1), torch_model.head(model)).numpy()


def folder_logits_in_jax(folder: Path, batch: dict) -> np.ndarray:
    model = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)
    hidden = model.hidden_states(*(batch[k] for k in ("tokens", "segment_ids", "positions")))
    return np.asarray(hidden.reshape(-1, hidden.shape[-1]) @ model.lm_head_weight().T)


def test_metrics_of_both_backends_agree_at_every_step(job):
    assert_same_metrics(numbers(job.jax_run), numbers(job.torch_run))
    assert numbers(job.torch_run)[-1]["loss"] < 0.9 * numbers(job.torch_run)[0]["loss"]


def test_a_resumed_run_is_the_uninterrupted_one_on_both_backends(job, monkeypatch):
    """Case 29: bit for bit in torch; and JAX, resumed, still agrees with torch, resumed."""
    logged = torch_ref.train.Metrics.log

    def log_then_kill(self, step, values):
        logged(self, step, values)
        if step == HALF + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch_ref.train.Metrics, "log", log_then_kill)
    torch_ref.train.main(job.argv("stopped"))
    stopped = job.place / "stopped"
    assert numbers(stopped)[-1]["step"] == HALF + 1 and not (stopped / "export").exists()
    monkeypatch.undo()
    torch_ref.train.main(job.argv("stopped"))
    assert numbers(stopped) == numbers(job.torch_run)
    weights = "export/model.safetensors"
    assert (stopped / weights).read_bytes() == (job.torch_run / weights).read_bytes()

    resumed = job.place / "jax_resumed"
    shutil.copytree(job.jax_run / "checkpoints" / str(HALF), resumed / "checkpoints" / str(HALF))
    jax_fit(job, "jax_resumed")
    assert [r["step"] for r in numbers(resumed)] == list(range(HALF + 1, STEPS + 1))
    for ours, theirs in zip(numbers(resumed), numbers(stopped)[HALF:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)


@pytest.mark.parametrize("trained_by", ["torch", "jax"])
def test_an_exported_folder_has_the_same_logits_in_both(job, trained_by):
    batch = Store.open(str(job.place / "cache/heldout")).read(range(3))
    folder = job.place / trained_by / "export"
    ours, theirs = folder_logits_in_jax(folder, batch), folder_logits_in_torch(folder, batch)
    assert_close(f"exported folder, {trained_by}", "logits", ours, theirs, 1e-5)
    start = folder_logits_in_torch(job.place / "student", batch)
    assert np.abs(theirs - start).max() > 0.01  # it is the trained one


def test_both_exports_hold_the_same_weights_and_documents(job):
    ours = hf.load_model(job.jax_run / "export", param_dtype=jnp.float32)
    theirs = hf.load_model(job.torch_run / "export", param_dtype=jnp.float32)
    rates = sum(r["learning_rate"] for r in numbers(job.torch_run))
    for model in (ours, theirs):
        assert model.config == ours.config
    got, expected = (tiny.model_by_hf_name(model) for model in (ours, theirs))
    for name, value in expected.items():
        assert np.abs(got[name] - value).max() <= 1e-3 * rates, name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        kept = (job.place / "student" / name).read_bytes()
        assert kept == (job.torch_run / "export" / name).read_bytes(), name
    raw = [
        json.loads((run / "export/config.json").read_text()) for run in (job.torch_run, job.jax_run)
    ]
    assert {k: v for k, v in raw[0].items() if "dtype" not in k} == {
        k: v for k, v in raw[1].items() if "dtype" not in k
    }


def test_the_heldout_table_is_the_same(job):
    summary = json.loads((job.torch_run / "summary.json").read_text())
    assert summary["heldout"].keys() == {"teacher", "student_before", "student"}

    def load(path: Path):
        return hf.load_model(path, param_dtype=jnp.float32, compute_dtype=jnp.float32)

    store = Store.open(str(job.place / "cache/heldout"))
    students = {
        "student_before": load(job.place / "student"),
        "student": load(job.torch_run / "export"),
    }
    rows = evaluate.table_rows(store)
    assert rows.tolist() == torch_ref.evaluate.table_rows(store).tolist()
    expected = evaluate.heldout_table(
        load(job.place / "teacher"), students, store, rows, batch_size=2, chunk_size=16
    )
    for name, row in expected.items():
        for key, value in row.items():
            got = summary["heldout"][name][key]
            assert got == pytest.approx(value, rel=1e-5, abs=1e-6), f"{name} {key}"


@pytest.mark.parametrize(
    "wanted", [FromTeacher(layers=[0, 2]), FromTeacher(parameters=38_000)], ids=["layers", "size"]
)
def test_a_student_cut_from_the_teacher_is_the_same(job, tmp_path, wanted):
    teacher = job.place / "teacher"
    torch_ref.student.cut_student(str(teacher), tmp_path / "torch", wanted)
    knobs = dataclasses.asdict(wanted)
    student.make_student(teacher, tmp_path / "jax", **knobs)
    ours, theirs = (
        hf.load_model(tmp_path / name, param_dtype=jnp.float32) for name in ("torch", "jax")
    )
    assert ours.config == theirs.config and ours.config.num_hidden_layers == 2
    got, expected = tiny.model_by_hf_name(ours), tiny.model_by_hf_name(theirs)
    assert all((got[name] == expected[name]).all() for name in expected)


def test_the_reference_trains_with_jax_made_unimportable(job):
    code = (
        "import sys; sys.modules.update(dict.fromkeys('jax jaxlib flax optax grain'.split()))\n"
        "import torch_ref.train; torch_ref.train.main(sys.argv[1:])"
    )
    argv = job.argv("without_jax", "--train.steps", "2")
    command = [sys.executable, "-W", "ignore", "-c", code, *argv]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (job.place / "without_jax/export/model.safetensors").exists()


def test_a_loss_that_is_not_finite_stops_with_step_and_rows(job):
    with pytest.raises(Failure, match=r"step \d: loss .*rows \[\d"):
        torch_ref.train.main(job.argv("diverged", "--optimizer.learning_rate", "1e38"))


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--train.remat", "dots"], "train.remat"),
        (["--mesh.fsdp", "2"], "mesh.fsdp"),
        (["--train.profile_steps", "[2,3]"], "train.profile_steps"),
        (["--train.param_dtype", "bfloat16"], "train.compute_dtype"),
        (["--cache.path", "nowhere"], "a store"),
    ],
)
def test_what_the_reference_cannot_do_is_refused_by_name(job, flags, word):
    with pytest.raises(Refusal, match=word):
        torch_ref.train.main(job.argv("refused", *flags))


def test_every_field_of_the_configuration_is_known_or_refused():
    """A field added to the schema is refused by torch_ref until it is named there."""
    names = set(config_module.field_names())
    assert set(torch_ref.train.KNOWN) <= names
    changed = dataclasses.replace(Config(), mesh=dataclasses.replace(Config().mesh, data=2))
    with pytest.raises(Refusal, match="mesh.data"):
        torch_ref.train.refuse_unknown(changed)
