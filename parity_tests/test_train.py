"""Rungs "resumed run" and "exported folder": one configuration, trained whole by both backends.

The same YAML, cache and first weights; then the numbers of metrics.jsonl, of the held-out table and
of a resumed run agree, a JAX-trained export loads in transformers and a torch-trained one in JAX
with equal logits. Besides: what torch_ref.train refuses, and that it resumes after a signal.
"""

import dataclasses
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import yaml
from ladder import TIGHT, Drift, assert_close, assert_drift, assert_numbers, assert_same

import torch_ref.audit
import torch_ref.evaluate
import torch_ref.fit
import torch_ref.losses
import torch_ref.student
import torch_ref.teacher
import torch_ref.train
from jax_distill import config as config_module
from jax_distill import distil, evaluate, export, hf, student
from jax_distill.base.console import Stopped
from jax_distill.base.errors import RunError, UserError
from jax_distill.batch import DRAWS, Batch
from jax_distill.cache import Cache
from jax_distill.config import Config, FromTeacher
from jax_distill.hidden_layers import PROJECTION, with_pairs
from torch_ref import model as torch_model
from torch_ref.optimizer_test import state_by_name

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
    depths = (config.student.path, config.teacher.path)
    ours, theirs = (hf.model_config(hf.read_config(x)).num_hidden_layers for x in depths)
    config = with_pairs(config, student=ours, teacher=theirs)
    folder = Path(config.output_dir)
    caches = tuple(Cache.open(f"{config.cache.path}/{s}") for s in ("train", "heldout"))
    start = Path(config.student.path)
    mesh = tiny.one_device()
    # The resumed run compiles what the first one did.
    jax.config.update("jax_compilation_cache_dir", str(job.place / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    teacher = None
    if config.teacher.is_live:
        teacher = hf.load_model(
            config.teacher.path, param_dtype=jnp.float32, compute_dtype=jnp.float32
        )
    with jax.numpy_dtype_promotion("standard"):
        model = distil.fit(
            config,
            folder,
            hf.load_model(start, param_dtype=jnp.float32, compute_dtype=jnp.float32),
            caches=caches,
            mesh=mesh,
            steps=STEPS,
            vocab_size=student.vocabulary_size(start, caches[0]),
            what="student",
            teacher=teacher,
        )
    jax.config.update("jax_compilation_cache_dir", None)
    export.write_folder(folder / "export", model, student=start, dtype="float32", card="")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    place = tmp_path_factory.mktemp("job")
    teacher = tiny.llama_folder(place / "teacher", seed=9, num_hidden_layers=3)
    tiny.llama_folder(place / "student", seed=1)
    for split, rows, seed in (("train", 10, 0), ("heldout", 6, 1)):
        source = tiny.rows_cache(place / "rows" / split, tiny.packed_rows(rows, LENGTH, seed))
        tiny.taught_cache(place / "cache" / split, source, teacher)
    settings = {
        "seed": 3,
        "teacher": {"path": str(teacher), "dtype": "float32", "batch_size": 2},
        "student": {"path": str(place / "student")},
        "data": {"sequence_length": LENGTH},
        "cache": {"path": str(place / "cache"), "top_k": 12, "temperatures": [1.0, 2.0]},
        "loss": {"ce_weight": 0.3, "temperature": 2.0, "chunk_size": 32},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 2, "weight_decay": 0.1},
        "train": {
            "steps": STEPS,
            "batch_size": 4,
            "micro_batch_size": 2,
            "compute_dtype": "float32",
            "log_every": 1,
            "eval_every": 2,
            "save_every": 1,  # `drifts_of` reads every step's moments
            "keep": STEPS,
        },
    }
    file = place / "tiny.yaml"
    file.write_text(yaml.safe_dump(settings))
    made = Job(place, file, place / "torch", place / "jax")
    torch_ref.train.main(made.argv("torch"))
    jax_fit(made, "jax")
    return made


def numbers_of_both(job, name: str, **changes: dict) -> tuple[list[dict], list[dict]]:
    """What JAX and torch log of the job with `changes` to sections of its configuration."""
    settings = yaml.safe_load(job.config_file.read_text())
    for section, values in changes.items():
        settings[section] |= values
    file = job.place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    changed = dataclasses.replace(job, config_file=file)
    torch_ref.train.main(changed.argv(f"torch_{name}"))
    jax_fit(changed, f"jax_{name}")
    return tiny.numbers(job.place / f"jax_{name}"), tiny.numbers(job.place / f"torch_{name}")


def test_runs_beside_a_live_teacher_are_the_same(job):
    """The rows alone, the teacher in each step, the whole vocabulary."""
    rows = {"path": str(job.place / "rows")}
    got, expected = numbers_of_both(job, "online", teacher={"mode": "online"}, cache=rows)
    assert expected[0]["teacher_mass"] == pytest.approx(1, abs=1e-6)
    assert_same_metrics("beside a live teacher", got, expected)


def test_runs_on_random_samples_are_the_same(job):
    """Draws instead of the most likely ids, at the run's τ; torch_ref's own audit knows them."""
    teacher = Path(yaml.safe_load(job.config_file.read_text())["teacher"]["path"])
    fields = {"sampling": "random", "temperatures": (2.0,), "optional": {DRAWS: [LENGTH, 12]}}
    for split in ("train", "heldout"):
        rows = Cache.open(str(job.place / "rows" / split))
        cache = tiny.taught_cache(job.place / "drawn" / split, rows, teacher, **fields)
    torch_ref.audit.main([cache.path, "--teacher", str(teacher), "--spot_check", "3"])
    drawn = {"path": str(job.place / "drawn"), "temperatures": [2.0]}
    drawn |= {"sampling": "random", "samples": 12}
    got, expected = numbers_of_both(job, "random", cache=drawn)
    assert_same_metrics("random samples", got, expected)


def test_runs_with_a_live_top_k_and_hidden_states_are_the_same(job):
    """The teacher's twelve largest logits and its layers in each step; a narrower student, whose
    projections both backends start alike, train, and keep out of the exported folder."""
    tiny.llama_folder(job.place / "narrow", seed=1, hidden_size=16)
    got, expected = numbers_of_both(
        job,
        "hidden",
        teacher={"mode": "online_top_k"},
        student={"path": str(job.place / "narrow")},
        cache={"path": str(job.place / "rows"), "temperatures": [1.0]},
        loss={"hidden_weight": 0.5, "hidden_layers": 2},
    )
    assert expected[-1]["hidden_loss"] < expected[0]["hidden_loss"]
    assert 0 < expected[0]["teacher_mass"] < 1 and "val_hidden_loss" in expected[-1]
    assert_same_metrics("hidden states, live top K", got, expected)
    saved = torch.load(job.place / f"torch_hidden/checkpoints/step_{STEPS:08d}.pt")
    assert saved["parameters"][PROJECTION].shape == (2, 32, 16)
    for name in ("jax", "torch"):
        exported = torch_model.load_model(str(job.place / f"{name}_hidden/export"), dtype="float32")
        assert not any("projection" in key for key, _ in exported.named_parameters())


def assert_same_metrics(rung: str, got: list[dict], expected: list[dict]) -> None:
    """As in test_steps: means 1e-6, norm and masses 1e-5."""
    assert [r["step"] for r in got] == [r["step"] for r in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert_numbers(f"{rung}, step {theirs['step']}", ours, theirs, 1e-5, **TIGHT)


def drifts_of(torch_run: Path) -> dict[str, Drift]:
    """By parameter, how far apart two such runs may be at their end."""
    options, drifts = Config().optimizer, {}
    for record in tiny.numbers(torch_run):
        saved = torch.load(torch_run / f"checkpoints/step_{record['step']:08d}.pt")
        for key, state in state_by_name(saved["optimizer"]).items():
            moments, weights = (state["exp_avg"], state["exp_avg_sq"]), saved["parameters"][key]
            drift, rate = drifts.setdefault(key, Drift()), record["learning_rate"]
            drift.adamw(*moments, weights, rate, b1=options.b1, b2=options.b2)
    return drifts


def assert_same_weights(rung: str, by_jax: Path, torch_run: Path) -> None:
    """Two exported folders: what rounding of the gradients explains, see `ladder.Drift`."""
    folders = by_jax, torch_run / "export"
    ours, theirs = (hf.load_model(folder, param_dtype=jnp.float32) for folder in folders)
    assert ours.config == theirs.config
    left, right = (tiny.model_by_hf_name(model) for model in (ours, theirs))
    for name, drift in drifts_of(torch_run).items():
        assert_drift(rung, name, left[name], right[name], drift)


def folder_logits_in_torch(folder: Path, batch: Batch) -> np.ndarray:
    model = torch_model.load_model(str(folder), dtype="float32")
    inputs = map(torch.tensor, (batch.tokens, batch.segment_ids, batch.positions))
    with torch.no_grad():
        hidden = torch_model.hidden_states(model, *inputs)
        return torch_ref.losses.logits(hidden.flatten(0, 1), torch_model.head(model)).numpy()


def folder_logits_in_jax(folder: Path, batch: Batch) -> np.ndarray:
    model = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)
    hidden = model.hidden_states(batch.tokens, batch.segment_ids, batch.positions)
    return np.asarray(hidden.reshape(-1, hidden.shape[-1]) @ model.lm_head_weight().T)


def test_metrics_of_both_backends_agree_at_every_step(job):
    ours, theirs = tiny.numbers(job.jax_run), tiny.numbers(job.torch_run)
    assert [r["step"] for r in theirs] == list(range(1, STEPS + 1))
    assert_same_metrics("whole run", ours, theirs)
    assert tiny.numbers(job.torch_run)[-1]["loss"] < 0.9 * tiny.numbers(job.torch_run)[0]["loss"]


def test_a_resumed_run_is_the_uninterrupted_one_on_both_backends(job, monkeypatch):
    """Case 29: bit for bit in each; and JAX, resumed, still agrees with torch, resumed."""
    logged = torch_ref.fit.Metrics.log

    def log_then_kill(self, step, values):
        logged(self, step, values)
        if step == HALF + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torch_ref.fit.Metrics, "log", log_then_kill)
    with pytest.raises(Stopped, match="SIGTERM at step 4 of 6, state saved") as end:
        torch_ref.train.main(job.argv("stopped"))
    assert end.value.number == signal.SIGTERM
    stopped = job.place / "stopped"
    assert tiny.numbers(stopped)[-1]["step"] == HALF + 1 and not (stopped / "export").exists()
    monkeypatch.undo()
    torch_ref.train.main(job.argv("stopped"))
    assert tiny.numbers(stopped) == tiny.numbers(job.torch_run)
    weights = "export/model.safetensors"
    assert (stopped / weights).read_bytes() == (job.torch_run / weights).read_bytes()

    resumed = job.place / "jax_resumed"
    shutil.copytree(job.jax_run / "checkpoints" / str(HALF), resumed / "checkpoints" / str(HALF))
    jax_fit(job, "jax_resumed")
    assert tiny.numbers(resumed) == tiny.numbers(job.jax_run)[HALF:]
    assert (resumed / weights).read_bytes() == (job.jax_run / weights).read_bytes()
    assert_same_metrics("resumed run", tiny.numbers(resumed), tiny.numbers(stopped)[HALF:])
    assert_same_weights("resumed run", resumed / "export", stopped)


def test_a_damaged_step_is_refused_and_an_older_one_resumes_to_the_same_run(job):
    run = job.place / "damaged"
    shutil.copytree(job.torch_run, run)
    weights, again = "export/model.safetensors", ["--train.resume_step", str(HALF)]
    newest = run / f"checkpoints/step_{STEPS:08d}.pt"
    flipped = bytearray(newest.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    newest.write_bytes(flipped)
    with pytest.raises(RunError, match=f"step {STEPS}.*--train.resume_step {STEPS - 1}$"):
        torch_ref.train.main(job.argv("damaged"))
    (run / weights).unlink()
    torch_ref.train.main(job.argv("damaged", *again))
    assert newest.with_name(f"{newest.name}.set_aside").read_bytes() == flipped
    assert tiny.numbers(run) == tiny.numbers(job.torch_run)
    assert (run / weights).read_bytes() == (job.torch_run / weights).read_bytes()
    with pytest.raises(UserError, match="expected train.resume_step among the checkpoints .*got 9"):
        torch_ref.train.main(job.argv("damaged", "--train.resume_step", "9"))


@pytest.mark.parametrize("trained_by", ["torch", "jax"])
def test_an_exported_folder_has_the_same_logits_in_both(job, trained_by):
    batch = Cache.open(str(job.place / "cache/heldout")).read(range(3))
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
    fingerprint = Cache.open(str(job.place / "cache/train")).manifest.fingerprint
    assert "Trained with jax_distill's torch_ref on" in card and "\n| student before |" in card
    assert f"| cache fingerprint | `{fingerprint}` |" in card and "\nloss:\n" in card


def test_the_test_table_is_the_same(job):
    summary = json.loads((job.torch_run / "summary.json").read_text())
    assert summary["test"].keys() == {"teacher", "student_before", "student"}

    def load(path: Path):
        return hf.load_model(path, param_dtype=jnp.float32, compute_dtype=jnp.float32)

    cache = Cache.open(str(job.place / "cache/heldout"))
    students = {
        "student_before": load(job.place / "student"),
        "student": load(job.torch_run / "export"),
    }
    rows = evaluate.table_rows(cache)
    expected = evaluate.test_table(
        load(job.place / "teacher"), students, cache, rows, batch_size=2, chunk_size=16
    )
    for name, row in expected.items():
        for key, value in row.items():
            got = summary["test"][name][key]
            assert_close(f"held-out table, {name}", key, got, value, 1e-5, unit=max(value, 0.1))


def test_a_table_with_a_weight_that_is_not_finite_is_refused(job):
    """By model and rows, and not with a top-1 agreement of 1."""
    cache = Cache.open(str(job.place / "cache/heldout"))
    load = functools.partial(torch_model.load_model, dtype="float32", device=torch.device("cpu"))
    models = {name: load(str(job.place / "teacher")) for name in ("teacher", "student")}
    with torch.no_grad():
        next(models["student"].parameters()).fill_(torch.nan)
    with pytest.raises(RunError, match="expected finite logits of student, got .* in rows "):
        torch_ref.evaluate.test_table(
            models, cache, np.arange(cache.rows), batch_size=2, chunk_size=16
        )


@pytest.mark.parametrize(
    "wanted", [FromTeacher(layers=[0, 2]), FromTeacher(parameters=38_000)], ids=["layers", "size"]
)
def test_a_student_cut_from_the_teacher_is_the_same(job, tmp_path, wanted):
    teacher = job.place / "teacher"
    torch_ref.student.cut_student(str(teacher), tmp_path / "torch", wanted)
    student.make_student(teacher, tmp_path / "jax", wanted)
    ours, theirs = (
        hf.load_model(tmp_path / name, param_dtype=jnp.float32) for name in ("torch", "jax")
    )
    assert ours.config == theirs.config and ours.config.num_hidden_layers == 2
    got, expected = tiny.model_by_hf_name(ours), tiny.model_by_hf_name(theirs)
    for name, value in expected.items():
        assert_same("student cut", name, got[name], value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
# torch's advice to those who have Python 3.13.0, where a bug of CPython makes its guards slower
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
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
    compiled = tiny.numbers(job.place / f"compiled_{backend}")
    plain = tiny.numbers(job.torch_run)[:2]
    for got, expected in zip(compiled, plain, strict=True):
        shared = {k: v for k, v in expected.items() if k in got and k != "learning_rate"}
        assert {"loss", "kl", "gradient_norm"} <= shared.keys()
        got = {k: got[k] for k in shared}
        assert_numbers(f"compiled, step {expected['step']}", got, shared, 1e-5, **TIGHT)


def test_a_loss_that_is_not_finite_stops_with_step_and_rows(job):
    with pytest.raises(RunError, match=r"step \d: loss .*rows \[\d"):
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
        (["--cache.path", "nowhere"], "a cache"),
    ],
)
def test_what_the_reference_cannot_do_is_refused_by_name(job, flags, word):
    with pytest.raises(UserError, match=word):
        torch_ref.train.main(job.argv("refused", *flags))


def test_a_student_without_weights_is_refused_with_a_cure(job, tmp_path):
    """JAX draws them from the seed."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(job.place / "student/config.json", bare)
    said = "with weights, got .*bare, which has config.json without.*; name a folder .*jax_distill"
    with pytest.raises(UserError, match=said):
        torch_ref.train.main(job.argv("bare", "--student.path", str(bare)))


@pytest.mark.parametrize("device", ["nonsense", "cuda", "cuda:1", "meta"])
@pytest.mark.parametrize("program", ["train", "teacher", "audit"])
def test_a_device_that_is_not_here_is_refused_before_any_work(job, monkeypatch, program, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    argv = job.argv("no_device")
    if program == "audit":
        argv = [str(job.place / "cache/train"), "--teacher", str(job.place / "teacher")]
    argv += ["--rows", str(job.place / "rows")] if program == "teacher" else []
    with pytest.raises(UserError, match=f"expected --device cpu or cuda .*got {device}; "):
        getattr(torch_ref, program).main([*argv, "--device", device])
    assert not (job.place / "no_device").exists()


def test_every_field_of_the_configuration_is_known_or_refused():
    """A field added to the schema is refused by torch_ref until it is named there."""
    names = set(config_module.field_names())
    assert set(torch_ref.train.KNOWN) <= names
    changed = dataclasses.replace(Config(), mesh=dataclasses.replace(Config().mesh, data=2))
    with pytest.raises(UserError, match="mesh.data"):
        torch_ref.train.refuse_unknown(changed)
