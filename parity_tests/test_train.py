"""Rungs "resumed run" and "exported folder": one configuration, trained whole by both backends.

The same YAML, store and first weights; then the numbers of metrics.jsonl, of the held-out table and
of a resumed run agree, a JAX-trained export loads in transformers and a torch-trained one in JAX
with equal logits. Besides: what torch_ref.train refuses, and that it goes on after a signal.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import yaml
from ladder import TIGHT, assert_close, assert_numbers, assert_same

import torch_ref.audit
import torch_ref.evaluate
import torch_ref.student
import torch_ref.teacher
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
            vocab_size=student.vocabulary_size(start, stores[0]),
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
            "save_every": 1,  # `allowed_of` reads every step's second moment
            "keep": STEPS,
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


def assert_same_metrics(rung: str, got: list[dict], expected: list[dict]) -> None:
    """As in test_steps: means 1e-6, norm and masses 1e-5."""
    assert [r["step"] for r in got] == [r["step"] for r in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert_numbers(f"{rung}, step {theirs['step']}", ours, theirs, 1e-5, **TIGHT)


def allowed_of(torch_run: Path) -> dict[str, np.ndarray]:
    """By parameter, what each entry may differ by at the end of a run: see the head of test_steps,
    with √v̂'s largest entry in each tensor for G."""
    b2, allowed = Config().optimizer.b2, {}
    for record in numbers(torch_run):
        file = torch_run / f"checkpoints/step_{record['step']:08d}.pt"
        saved = torch.load(file)["optimizer"]
        for key, moments in saved["state"].items():
            root = (moments["v"] / (1 - b2 ** saved["count"])).sqrt().numpy() + 1e-8
            share = np.minimum(1e-5 * root.max() / root, 2.0)
            allowed[key] = allowed.get(key, 2e-7) + record["learning_rate"] * share
    return allowed


def assert_same_weights(rung: str, by_jax: Path, torch_run: Path) -> None:
    """Two exported folders, entry by entry, and 2e-6 of the learning rates on average."""
    folders = by_jax, torch_run / "export"
    ours, theirs = (hf.load_model(folder, param_dtype=jnp.float32) for folder in folders)
    assert ours.config == theirs.config
    moved = sum(r["learning_rate"] for r in numbers(torch_run))
    left, right = (tiny.model_by_hf_name(model) for model in (ours, theirs))
    for name, unit in allowed_of(torch_run).items():
        mean = 2e-6 * moved / unit.mean()
        assert_close(rung, name, left[name], right[name], 1.0, unit=unit, mean=mean)


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
    ours, theirs = numbers(job.jax_run), numbers(job.torch_run)
    assert [r["step"] for r in theirs] == list(range(1, STEPS + 1))
    assert_same_metrics("whole run", ours, theirs)
    assert numbers(job.torch_run)[-1]["loss"] < 0.9 * numbers(job.torch_run)[0]["loss"]


def test_a_resumed_run_is_the_uninterrupted_one_on_both_backends(job, monkeypatch):
    """Case 29: bit for bit in each; and JAX, resumed, still agrees with torch, resumed."""
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
    assert numbers(resumed) == numbers(job.jax_run)[HALF:]
    assert (resumed / weights).read_bytes() == (job.jax_run / weights).read_bytes()
    assert_same_metrics("resumed run", numbers(resumed), numbers(stopped)[HALF:])
    assert_same_weights("resumed run", resumed / "export", stopped)


@pytest.mark.parametrize("trained_by", ["torch", "jax"])
def test_an_exported_folder_has_the_same_logits_in_both(job, trained_by):
    batch = Store.open(str(job.place / "cache/heldout")).read(range(3))
    folder = job.place / trained_by / "export"
    ours, theirs = folder_logits_in_jax(folder, batch), folder_logits_in_torch(folder, batch)
    assert_close(f"exported folder, {trained_by}", "logits", ours, theirs, 1e-5)
    start = folder_logits_in_torch(job.place / "student", batch)
    assert np.abs(theirs - start).max() > 0.01  # it is the trained one


def test_both_exports_hold_the_same_weights_and_documents(job):
    by_torch, by_jax = job.torch_run / "export", job.jax_run / "export"
    assert_same_weights("exported folder", by_jax, job.torch_run)
    names = {path.name for path in by_torch.iterdir()}
    assert names == {path.name for path in by_jax.iterdir()}
    for name in names - {"model.safetensors", "README.md"}:
        assert (by_jax / name).read_bytes() == (by_torch / name).read_bytes(), name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (job.place / "student" / name).read_bytes() == (by_torch / name).read_bytes(), name


def test_the_run_folder_has_everything_that_is_promised(job):
    names = {path.name for path in job.torch_run.iterdir()}
    promised = "config.yaml manifest.json metrics.jsonl summary.json report.html checkpoints export"
    assert set(f"{promised} tensorboard student".split()) <= names
    page = (job.torch_run / "report.html").read_text("utf-8")
    assert "data:image/png;base64," in page and "top-1 agreement" in page and "http" not in page
    card = (job.torch_run / "export/README.md").read_text("utf-8")
    fingerprint = Store.open(str(job.place / "cache/train")).manifest.fingerprint
    assert "Trained with jax_distill's torch_ref on" in card and "\n| student before |" in card
    assert f"| store fingerprint | `{fingerprint}` |" in card and "\nloss:\n" in card


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
            assert_close(f"held-out table, {name}", key, got, value, 1e-5, unit=max(value, 0.1))


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
    for name, value in expected.items():
        assert_same("student cut", name, got[name], value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_decoder_trains_alike(job, monkeypatch, backend):
    """`--compile`: the same numbers from torch.compile's graphs of the decoder, forward and
    backward; `inductor` also makes C++ of them (minutes on a CPU)."""
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("torch.compile wants a C++ compiler on a CPU")
    compile_with = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_with)
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()
    # One shape in training, evaluation and table: each other one would be compiled, too.
    one = ["--train.micro_batch_size", "1", "--teacher.batch_size", "1", "--train.steps", "2"]
    torch_ref.train.main(job.argv(f"compiled_{backend}", "--compile", *one))
    assert counted["unique_graphs"] > 0
    compiled = numbers(job.place / f"compiled_{backend}")
    plain = numbers(job.torch_run)[:2]
    for got, expected in zip(compiled, plain, strict=True):
        shared = {k: v for k, v in expected.items() if k in got and k != "learning_rate"}
        assert {"loss", "kl", "gradient_norm"} <= shared.keys()
        got = {k: got[k] for k in shared}
        assert_numbers(f"compiled, step {expected['step']}", got, shared, 1e-5, **TIGHT)


def test_a_loss_that_is_not_finite_stops_with_step_and_rows(job):
    with pytest.raises(Failure, match=r"step \d: loss .*rows \[\d"):
        torch_ref.train.main(job.argv("diverged", "--optimizer.learning_rate", "1e38"))


@pytest.mark.parametrize(
    "flags,word",
    [
        (["--train.remat", "dots"], "train.remat"),
        (["--mesh.fsdp", "2"], "mesh.fsdp"),
        (["--train.profile_steps", "[2,3]"], "train.profile_steps"),
        (["--train.param_dtype", "bfloat16"], "train.param_dtype"),
        (["--optimizer.state_dtype", "bfloat16"], "optimizer.state_dtype"),
        (["--optimizer.layerwise", "true"], "optimizer.layerwise"),
        (["--cache.path", "nowhere"], "a store"),
    ],
)
def test_what_the_reference_cannot_do_is_refused_by_name(job, flags, word):
    with pytest.raises(Refusal, match=word):
        torch_ref.train.main(job.argv("refused", *flags))


def test_a_student_without_weights_is_refused_with_a_cure(job, tmp_path):
    """JAX draws them from the seed."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(job.place / "student/config.json", bare)
    said = "with weights, got .*bare, which has config.json without.*; name a folder .*jax_distill"
    with pytest.raises(Refusal, match=said):
        torch_ref.train.main(job.argv("bare", "--student.path", str(bare)))


@pytest.mark.parametrize("device", ["nonsense", "cuda", "cuda:1", "meta"])
@pytest.mark.parametrize("program", ["train", "teacher", "audit"])
def test_a_device_that_is_not_here_is_refused_before_any_work(job, monkeypatch, program, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    argv = job.argv("no_device")
    if program == "audit":
        argv = [str(job.place / "cache/train"), "--teacher", str(job.place / "teacher")]
    argv += ["--rows", str(job.place / "rows")] if program == "teacher" else []
    with pytest.raises(Refusal, match=f"expected --device cpu or cuda .*got {device}; "):
        getattr(torch_ref, program).main([*argv, "--device", device])
    assert not (job.place / "no_device").exists()


LATER = {
    "teacher.mode": "online",
    "loss.hidden_weight": 0.5,
    "loss.hidden_kind": "cosine",
    "loss.hidden_layers": (1,),
}


def with_field(key: str, value: Any) -> Config:
    """A configuration of a schema that has one field more, set to `value`."""
    room, name = key.split(".")
    section = getattr(Config(), room)
    field = (name, Any, dataclasses.field(default=value))
    wider = dataclasses.make_dataclass("Wider", [field], bases=(type(section),), frozen=True)
    return dataclasses.replace(Config(), **{room: wider(**vars(section))})


@pytest.mark.parametrize("key", LATER)
def test_online_and_hidden_state_losses_are_refused_by_name(job, key):
    """By the schema as long as JAX has no such field; and, once it has, until torch_ref does it."""
    if key not in config_module.field_names():
        with pytest.raises(Refusal, match=f"no such key {key}"):
            torch_ref.train.main(job.argv("later", f"--{key}", str(LATER[key])))
    if key not in torch_ref.train.KNOWN:
        with pytest.raises(Refusal, match=f"expected {key} None in torch_ref"):
            torch_ref.train.refuse_unknown(with_field(key, LATER[key]))


def test_every_field_of_the_configuration_is_known_or_refused():
    """A field added to the schema is refused by torch_ref until it is named there."""
    names = set(config_module.field_names())
    assert set(torch_ref.train.KNOWN) <= names
    changed = dataclasses.replace(Config(), mesh=dataclasses.replace(Config().mesh, data=2))
    with pytest.raises(Refusal, match="mesh.data"):
        torch_ref.train.refuse_unknown(changed)
