"""Rung "teacher", where the JAX model cannot be it: another architecture, one from the hub, one
that is gone. Proves: torch_ref.teacher writes the cache, and both backends train from it alike;
what needs the live teacher is left out in one line; other weights are still refused.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import torch
import transformers
import yaml
from ladder import TIGHT, assert_close, assert_numbers

import torch_ref.audit
import torch_ref.model
import torch_ref.teacher
import torch_ref.train
from jax_distill import audit, distil, hf, teacher
from jax_distill.base.errors import UserError
from jax_distill.batch import ROW_ARRAYS
from jax_distill.cache import Cache
from jax_distill.config import Config, load

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
LENGTH, STEPS = 24, 3


def neox_folder(folder: Path, seed: int = 0) -> Path:
    """A random GPT-NeoX (biases, LayerNorm, parallel residuals: nothing of it is a Llama's)."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=tiny.HEAD_ROWS, hidden_size=32, intermediate_size=48)
    config = transformers.GPTNeoXConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256
    )
    model = transformers.GPTNeoXForCausalLM(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


def write_text(path: Path, documents: int = 90) -> Path:
    rng = np.random.default_rng(0)
    lines = (
        " ".join(f"w{i}" for i in rng.integers(3, 300, rng.integers(3, 40)))
        for _ in range(documents)
    )
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


@dataclasses.dataclass
class Setup:
    """A folder with a teacher, a student, text, rows and the cache that torch_ref.teacher wrote."""

    path: Path
    config_file: Path

    def argv(self, *more: str) -> list[str]:
        return ["--config", str(self.config_file), *more]

    def config(self, *more: str) -> Config:
        return load(self.argv(*more))


def make_setup(path: Path, teacher_path: str) -> Setup:
    """Everything up to the rows, by the command that `torch_ref.teacher` names."""
    tiny.llama_folder(path / "student", seed=1)
    settings = {
        "seed": 3,
        "output_dir": str(path / "jax"),
        "teacher": {"path": teacher_path, "dtype": "float32", "batch_size": 8},
        "student": {"path": str(path / "student")},
        "data": {
            "path": str(write_text(path / "text.jsonl")),
            "format": "jsonl",
            "sequence_length": LENGTH,
            "heldout_fraction": 0.2,
        },
        "cache": {"path": str(path / "cache"), "top_k": 12, "shard_rows": 16},
        "loss": {"ce_weight": 0.3, "chunk_size": 128},
        "optimizer": {"learning_rate": 2e-3},
        "train": {"steps": STEPS, "batch_size": 8, "compute_dtype": "float32", "log_every": 1},
    }
    file = path / "x.yaml"
    file.write_text(yaml.safe_dump(settings))
    setup = Setup(path, file)
    bare = ["--teacher.path", "", "--loss.kl_weight", "0", "--loss.ce_weight", "1"]
    rows = ["--cache.path", str(path / "rows"), "--data.tokenizer", str(path / "teacher")]
    teacher.main(setup.config(*rows, *bare))
    return setup


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    path = tmp_path_factory.mktemp("neox")
    neox_folder(path / "teacher")
    setup = make_setup(path, str(path / "teacher"))
    torch_ref.teacher.main(setup.argv("--rows", str(path / "rows"), "--device", "cpu"))
    return setup


def test_jax_trains_from_the_cache_of_an_architecture_it_does_not_have(setup, capsys):
    """And torch_ref from the same cache, to the same numbers."""
    with jax.numpy_dtype_promotion("standard"):
        distil.main(setup.config())
    said = capsys.readouterr().out
    assert said.count("training from the cache alone") == 1 and "GPTNeoXForCausalLM" in said
    assert "is there" in said and "cache check:" not in said
    summary = json.loads((setup.path / "jax/summary.json").read_text())
    assert summary["test"] == {} and summary["teacher_parameters"] is None
    assert summary["validation"]["val_kl"] > 0
    assert (setup.path / "jax/report.html").exists()

    torch_ref.train.main(setup.argv("--output_dir", str(setup.path / "torch"), "--device", "cpu"))
    theirs, ours = (tiny.numbers(setup.path / name) for name in ("torch", "jax"))
    assert len(ours) == len(theirs) == STEPS
    for got, expected in zip(ours, theirs, strict=True):
        assert_numbers(f"another teacher, step {expected['step']}", got, expected, 1e-5, **TIGHT)
    assert theirs[-1]["loss"] < theirs[0]["loss"]
    table = json.loads((setup.path / "torch/summary.json").read_text())["test"]
    assert table["teacher"]["kl"] == pytest.approx(0, abs=1e-6)  # it can ask the live teacher
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        both = [(setup.path / run / "export" / name).read_bytes() for run in ("jax", "torch")]
        assert both[0] == both[1], name


def test_a_missing_cache_is_refused_with_the_cure(setup, tmp_path):
    elsewhere = setup.config("--cache.path", str(tmp_path / "none"))
    with pytest.raises(UserError, match="GPTNeoXForCausalLM.*torch_ref.teacher"):
        teacher.write_caches(elsewhere)
    argv = [str(setup.path / "cache/train"), "--spot_check", "1"]
    with pytest.raises(UserError, match="GPTNeoXForCausalLM.*torch_ref.audit"):
        audit.main([*argv, "--teacher", str(setup.path / "teacher")])
    torch_ref.audit.main([*argv, "--teacher", str(setup.path / "teacher")])


def test_other_weights_under_the_same_path_are_refused_by_both(setup, tmp_path):
    other = neox_folder(tmp_path / "other", seed=5)
    config = setup.config("--teacher.path", str(other))
    with pytest.raises(UserError, match="teacher_fingerprint"):
        teacher.write_caches(config)
    with pytest.raises(UserError, match="fingerprint"):
        torch_ref.train.live_teacher(config, Cache.open(str(setup.path / "cache/train")))


@pytest.mark.parametrize(
    "key,stored,configured",
    [
        ("data.sequence_length", LENGTH, 512),
        ("data.format", "jsonl", "auto"),
        ("data.packing", True, False),
        ("data.heldout_fraction", 0.2, 0.5),
        ("data.max_rows", None, 10),
        ("data.max_heldout_rows", None, 3),
        ("cache.top_k", 12, 20),
        ("cache.temperatures", [1.0], [1.0, 2.0]),
        ("teacher.dtype", "float32", "bfloat16"),
    ],
)
def test_a_cache_that_was_made_otherwise_is_refused_with_both_values(
    setup, tmp_path, key, stored, configured
):
    """Or config.yaml and the model card would state what was not used. Rows alone know no K."""
    changed = [f"--{key}", str(configured).lower(), "--output_dir", str(tmp_path / "run")]
    said = [f"at {setup.path}/cache/", f": stored {stored!r}, wanted {configured!r}; set --{key} "]
    with pytest.raises(UserError, match=".*".join(map(re.escape, said))):
        torch_ref.train.main(setup.argv("--device", "cpu", *changed))
    assert not (tmp_path / "run/student").exists()
    rows = Cache.open(str(setup.path / "rows/train"))
    if not key.startswith("data."):
        torch_ref.train.refuse_other_settings(rows, "train", setup.config(*changed))


def test_a_teacher_that_is_gone_is_not_missed(setup, tmp_path, capsys):
    """The cache describes itself; both say in one line what is left out."""
    config = setup.config("--teacher.path", str(tmp_path / "gone"))
    train_cache, _ = teacher.write_caches(config)
    assert train_cache.complete and teacher.teacher_folders(config) == (None, None)
    path, why = torch_ref.train.live_teacher(config, train_cache)
    assert path is None and str(tmp_path / "gone") in why
    assert capsys.readouterr().out.count("training from the cache alone") == 1
    cut = ["--student.path", "", "--student.from_teacher.layers", "[0]"]
    with pytest.raises(UserError, match="gone"):
        teacher.teacher_folders(setup.config("--teacher.path", str(tmp_path / "gone"), *cut))


HUB_JOB = """
import sys
sys.modules.update(dict.fromkeys("jax jaxlib flax optax orbax grain".split()))
import torch_ref.audit, torch_ref.teacher, torch_ref.train
config, rows, cache, run = sys.argv[1:]
job = ["--config", config, "--device", "cpu", "--teacher.path", "owner/name", "--cache.path", cache]
torch_ref.teacher.main([*job, "--rows", rows])
torch_ref.audit.main([cache + "/train", "--teacher", "owner/name", "--spot_check", "2"])
torch_ref.train.main([*job, "--output_dir", run, "--train.steps", "2"])
"""


def hub_cache(root: Path, folder: Path) -> Path:
    """A hub cache, laid out as huggingface_hub does, that holds `folder` as owner/name."""
    repo, revision = root / "models--owner--name", "0" * 40
    shutil.copytree(folder, repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(revision)
    return repo / "snapshots" / revision


def test_a_hub_id_teaches_with_jax_made_unimportable(setup, tmp_path, monkeypatch):
    """torch_ref's teacher, audit and train given `owner/name`, which is in the local hub cache: the
    cache is that of the folder, so its name does not depend on the path. Its numbers are those to
    rounding: another process's memory is aligned otherwise, and some kernels round by that."""
    snapshot = hub_cache(tmp_path / "hub", setup.path / "teacher")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HUB_JOB]
        + [str(setup.config_file), str(setup.path / "rows")]
        + [str(tmp_path / "cache"), str(tmp_path / "run")],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "2 rows: cache check: KL" in result.stdout and "is not the teacher" not in result.stdout
    run = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"export", "report.html", "summary.json"} <= run
    for split in ("train", "heldout"):
        here, there = (Path(x) / "cache" / split for x in (tmp_path, setup.path))
        ours, theirs = (Cache.open(str(x)) for x in (here, there))
        assert ours.manifest.identity() == theirs.manifest.identity()
        got, expected = (x.read_arrays(np.arange(x.rows)) for x in (ours, theirs))
        for name in (*ROW_ARRAYS, "teacher_count"):
            np.testing.assert_array_equal(got[name], expected[name], name)
        assert_close("hub id", "log_z", got["teacher_log_z"], expected["teacher_log_z"])

    # The JAX side resolves the same id to the same files.
    monkeypatch.setattr(hf.folder, "_snapshot", lambda _: snapshot)
    config = setup.config("--teacher.path", "owner/name", "--cache.path", str(tmp_path / "cache"))
    assert teacher.write_caches(config)[0].complete
