"""Training killed at given calls ends where an uninterrupted run ends, bit for bit."""

import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml

from jax_distill import export
from jax_distill.kill_test import Moment, finish, kill, start, stopped
from jax_distill.run import Metrics, read_metrics
from jax_distill.teacher_test import hf_folder, text_file
from jax_distill.training.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # see kill_test
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS = 24


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


def logged(step: int, *, first: int = 1) -> Moment:
    """After `step` is in the metrics, in a process that begins with step `first`."""
    return Moment("after", Metrics.__module__, "Metrics.log", step - first + 1)


def renamed(when: str, call: int) -> Moment:
    """Orbax renames what it has written: of each checkpoint three parts, then the whole."""
    return Moment(when, "os", "rename", call, "orbax-checkpoint-tmp")


def test_kills_leave_weights_moments_metrics_and_export_bit_identical(tmp_path):
    """Case 29: before the first checkpoint; in the midst of one, and before and after it is whole;
    between a step's metrics and its save; before the export."""
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl", documents=150)
    log, run = tmp_path / "log", tmp_path / "killed"
    finish(command(tmp_path, "whole"), log)
    for moment, saved in (
        (logged(2), 0),
        (renamed("after", 2), 0),
        (renamed("before", 4), 0),
        (renamed("after", 2 * 4), 6),
        (logged(9, first=7), 6),
        (renamed("before", 5 * 4), 18),
        (Moment("before", export.__name__, "write_folder", 1), STEPS),
    ):
        kill(command(tmp_path, "killed"), log, at=moment)
        assert max(saved_steps(run), default=0) == saved, moment
        assert not (run / "summary.json").exists()
    finish(command(tmp_path, "killed"), log)

    whole, killed = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")
    )
    assert [r["step"] for r in killed] == list(range(1, STEPS + 1))
    for left, right in zip(whole, killed, strict=True):
        assert numbers(left) == numbers(right)
    for left, right in zip(state(tmp_path / "whole"), state(tmp_path / "killed"), strict=True):
        np.testing.assert_array_equal(left, right)
    weights = "export/model.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (
        tmp_path / "killed" / weights
    ).read_bytes()


def numbers(record: dict[str, float]) -> dict[str, float]:
    """Without what depends on the machine."""
    machine = ("second", "mfu", "bytes")
    return {k: v for k, v in record.items() if not any(word in k for word in machine)}


def state(run: Path) -> list[np.ndarray]:
    """Every leaf of the last checkpoint, parameters and moments."""
    items = {name: ocp.args.StandardRestore() for name in ("params", "opt_state")}
    with Checkpoints(run / "checkpoints", keep=2, seed=5) as checkpoints:
        found = checkpoints._orbax.restore(STEPS, args=ocp.args.Composite(**items))
    return [np.asarray(leaf) for leaf in jax.tree.leaves([found[name] for name in items])]


def test_sigterm_saves_and_exits_143_and_says_how_to_resume(tmp_path):
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl", documents=150)
    log = tmp_path / "log"
    process = start(command(tmp_path, "run"), log, at=logged(4), number=signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert "re-run the same command to resume" in log.read_text()
    # Step 5 was under way when step 4 was logged.
    assert saved_steps(tmp_path / "run")[-1] == 5
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 5


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

    process = stopped([*words, str(run)], log, at=renamed("after", 2 * 4))
    assert saved_steps(run) == [3, 6]
    ballast = small_disk / "ballast"
    if trouble == "full":
        with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        place = str(run / "checkpoints")
        subprocess.run(["mount", "--bind", place, place], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 1
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
