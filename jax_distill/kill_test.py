"""Real processes, killed with SIGKILL at random instants or out of disk, and started again.

`start`, `wait_until`, `kill_when` and `finish` serve any command that goes on where it stopped.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from jax_distill import audit
from jax_distill.cache import Store
from jax_distill.teacher_test import hf_folder, text_file

pytestmark = pytest.mark.slow
PATIENCE = 240  # seconds for one wait; the machine may be busy


def start(command: Sequence[str], log: Path) -> subprocess.Popen:
    """Start `python -m …` as a person would, on one CPU device; all it says is added to `log`."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    # What a script runs in the background ignores SIGINT, and hands that on; a handler it does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment, "JAX_PLATFORMS": "cpu"},
            )
    finally:
        signal.signal(signal.SIGINT, before)


def wait_until(process: subprocess.Popen, reached: Callable[[], bool], log: Path) -> None:
    """Return once `reached`; fail, with what the process said, if it ends or hangs before."""
    end = time.monotonic() + PATIENCE
    while not reached():
        ended, late = process.poll() is not None, time.monotonic() > end
        if (ended and not reached()) or late:
            process.kill()
            pytest.fail(f"ended {process.wait()}, or too slow:\n{log.read_text()[-3000:]}")
        time.sleep(0.002)


def kill_when(
    command: Sequence[str], reached: Callable[[], bool], log: Path, *, delay: float
) -> None:
    """Start the command and SIGKILL it `delay` seconds after `reached`."""
    process = start(command, log)
    wait_until(process, reached, log)
    time.sleep(delay)
    process.kill()
    process.wait()


def finish(command: Sequence[str], log: Path) -> None:
    """Run the command to its end, which must be a good one."""
    process = start(command, log)
    assert process.wait(PATIENCE) == 0, log.read_text()[-3000:]


def printed_seed() -> int:
    """A new seed at each run; a failure shows it, and KILL_SEED=… repeats it."""
    seed = int(os.environ.get("KILL_SEED", time.time_ns() % 10**6))
    print(f"KILL_SEED={seed}")
    return seed


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def teacher_command(folder: Path, cache: Path) -> list[str]:
    """Write stores of 36 shards with a tiny teacher over a text file."""
    hf_folder(folder / "teacher")
    settings = {
        "output_dir": str(folder / "run"),
        "teacher": {"path": str(folder / "teacher"), "dtype": "float32", "batch_size": 4},
        "student": {"path": str(folder / "teacher")},
        "data": {
            "path": str(text_file(folder / "text.jsonl", documents=2000)),
            "format": "jsonl",
            "sequence_length": 128,
            "heldout_fraction": 0.1,
        },
        "cache": {"path": str(cache), "top_k": 40, "shard_rows": 10, "temperatures": [1.0, 2.0]},
    }
    file = folder / "kill.yaml"
    file.write_text(yaml.safe_dump(settings))
    return ["jax_distill.teacher", "--config", str(file)]


def commits(cache: Path) -> int:
    return len(list(cache.glob("*/commits/*.json")))


def test_a_store_killed_three_times_ends_byte_identical(tmp_path):
    """Case 33."""
    log = tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(teacher_command(tmp_path, whole), log)
    total = commits(whole)
    assert total > 30
    instants = random.Random(printed_seed())
    command = teacher_command(tmp_path, killed)
    moments = sorted(instants.sample(range(total - 4), 3))
    for moment in moments:
        at_least = max(moment, commits(killed) + 1)
        kill_when(
            command,
            lambda at_least=at_least: commits(killed) >= at_least,
            log,
            delay=instants.uniform(0, 0.1),
        )
        assert commits(killed) < total, f"killed too late for moments {moments}"
    finish(command, log)
    assert folder_bytes(killed) == folder_bytes(whole)


def test_a_store_killed_while_it_is_begun_ends_byte_identical(tmp_path):
    """Case 33: before, between and after the manifest and the arrays' metadata."""
    log = tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(teacher_command(tmp_path, whole), log)
    command = teacher_command(tmp_path, killed)
    for file in ("train/writer.lock", "train/manifest.json", "train/tokens/zarr.json"):
        kill_when(command, (killed / file).exists, log, delay=0)
    finish(command, log)
    assert folder_bytes(killed) == folder_bytes(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_writer_that_is_told_to_stop_says_one_line_and_goes_on(tmp_path, number):
    log, cache = tmp_path / "log", tmp_path / "cache"
    command = teacher_command(tmp_path, cache)
    process = start(command, log)
    wait_until(process, lambda: commits(cache) >= 2, log)
    process.send_signal(number)
    assert process.wait(PATIENCE) == 128 + number
    said = log.read_text()
    assert f"stopped by {number.name}" in said.splitlines()[-1] and "Traceback" not in said
    finish(command, log)
    assert Store.open(str(cache / "train")).complete


def test_a_full_disk_ends_the_writer_and_leaves_what_is_committed_good(tmp_path, small_disk):
    """Case 35."""
    log = tmp_path / "log"
    cache = small_disk / "cache"
    command = teacher_command(tmp_path, cache)
    process = start(command, log)
    wait_until(process, lambda: commits(cache) >= 2, log)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert process.wait(PATIENCE) == 1
    said = log.read_text()
    assert "failed: expected to write the store" in said and "Traceback" not in said
    store = Store.open(str(cache / "train"))
    assert 2 <= len(store.commits) < store.shards
    bad = [problem for problem in audit.verify(store) if "is not committed" not in problem]
    assert bad == []
    store.read([0])
    ballast.unlink()
    finish(command, log)
    whole = tmp_path / "whole"
    finish(teacher_command(tmp_path, whole), log)
    assert folder_bytes(cache) == folder_bytes(whole)
