"""Training killed at random instants ends where an uninterrupted run ends, bit for bit."""

import random
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jax_distill.checkpoint import Checkpoints
from jax_distill.kill_test import finish, kill_when, printed_seed, start, wait_until
from jax_distill.run import read_metrics
from jax_distill.teacher_test import hf_folder, text_file

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
STEPS = 60


def command(folder: Path, name: str) -> list[str]:
    """A student of one layer; three micro-batches a step, several epochs."""
    settings = {
        "output_dir": str(folder / name),
        "seed": 5,
        "teacher": {"path": str(folder / "teacher"), "dtype": "float32"},
        "student": {"from_teacher": {"layers": [0]}},
        "data": {
            "path": str(folder / "text.jsonl"),
            "format": "jsonl",
            "sequence_length": 32,
            "heldout_fraction": 0.1,
        },
        "cache": {"path": str(folder / "cache"), "top_k": 20, "shard_rows": 16},
        "loss": {"chunk_size": 16, "ce_weight": 0.1},
        "optimizer": {"learning_rate": 1e-3},
        "train": {
            "steps": STEPS,
            "batch_size": 6,
            "micro_batch_size": 2,
            "compute_dtype": "float32",
            "log_every": 1,
            "eval_every": 20,
            "save_every": 3,
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return ["jax_distill.train", "--config", str(file)]


def test_three_kills_leave_weights_moments_metrics_and_export_bit_identical(tmp_path):
    """Case 29."""
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl", documents=150)
    log = tmp_path / "log"
    finish(command(tmp_path, "whole"), log)
    instants = random.Random(printed_seed())
    metrics = tmp_path / "killed/metrics.jsonl"
    for step in sorted(instants.sample(range(5, STEPS - 10), 3)):
        kill_when(
            command(tmp_path, "killed"),
            lambda step=step: any(r["step"] >= step for r in read_metrics(metrics)),
            log,
            delay=instants.uniform(0, 0.05),
        )
        assert not (tmp_path / "killed/summary.json").exists()
    finish(command(tmp_path, "killed"), log)

    whole, killed = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")
    )
    assert [r["step"] for r in killed] == list(range(1, STEPS + 1))
    for left, right in zip(whole, killed, strict=True):
        speed = ("tokens_per_second", "tflops_per_second", "mfu")
        assert {k: v for k, v in left.items() if k not in speed} == {
            k: v for k, v in right.items() if k not in speed
        }
    for left, right in zip(state(tmp_path / "whole"), state(tmp_path / "killed"), strict=True):
        np.testing.assert_array_equal(left, right)
    weights = "export/model.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (
        tmp_path / "killed" / weights
    ).read_bytes()


def state(run: Path) -> list[np.ndarray]:
    """Every leaf of the last checkpoint, parameters and moments."""
    with Checkpoints(run / "checkpoints", keep=2, seed=5) as checkpoints:
        items = checkpoints.restore_as_saved(STEPS)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(items)]


def test_sigterm_saves_exits_0_and_says_how_to_go_on(tmp_path):
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl", documents=150)
    log = tmp_path / "log"
    process = start(command(tmp_path, "run"), log)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(process, lambda: len(read_metrics(metrics)) >= 4, log)
    process.terminate()
    assert process.wait(120) == 0
    assert "the same command goes on" in log.read_text()
    assert saved_steps(tmp_path / "run")[-1] == read_metrics(metrics)[-1]["step"]


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_spares_the_last(
    tmp_path, small_disk, trouble
):
    """Case 30, on a disk of its own."""
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl", documents=150)
    log, run = tmp_path / "log", small_disk / "run"
    words = [*command(tmp_path, "whole"), "--output_dir"]
    finish([*words, str(tmp_path / "whole")], log)

    process = start([*words, str(run)], log)
    wait_until(process, lambda: len(saved_steps(run)) >= 2, log)
    ballast = small_disk / "ballast"
    if trouble == "full":
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        place = str(run / "checkpoints")
        subprocess.run(["mount", "--bind", place, place], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    assert process.wait(120) == 1
    assert "failed: expected to write " in log.read_text()  # a full disk may meet metrics first
    assert saved_steps(run) and not (run / "summary.json").exists()

    if trouble == "full":
        ballast.unlink()
    else:
        subprocess.run(["umount", place], check=True)
    finish([*words, str(run)], log)
    for left, right in zip(state(tmp_path / "whole"), state(run), strict=True):
        np.testing.assert_array_equal(left, right)


def saved_steps(run: Path) -> list[int]:
    if not (run / "checkpoints").exists():
        return []
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
