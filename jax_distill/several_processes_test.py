"""Two and four real processes on this machine (CPU, gloo) against one: the same cache, the same
student; one killed, resumed by another number of them; a live teacher, tensor, offload."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from jax_distill.cache import Cache
from jax_distill.conftest import on_devices
from jax_distill.fit import Steps
from jax_distill.kill_test import SIGNAL_AT
from jax_distill.run import read_metrics
from jax_distill.teacher_test import hf_folder, text_file
from jax_distill.train_kill_test import saved_steps
from jax_distill.training.checkpoint import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # see kill_test
STEPS, HEARTBEAT = 6, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    hf_folder(folder / "teacher")
    text_file(folder / "text.jsonl", documents=150)
    return folder


def command(folder: Path, module: str, *, run: str, cache: str) -> list[str]:
    """A student of one layer, its parameters and the teacher's split over all processes; two
    micro-batches a step."""
    settings = {
        "output_dir": str(folder / run),
        "seed": 5,
        "teacher": {"path": str(folder / "teacher"), "dtype": "float32", "batch_size": 8},
        "student": {"from_teacher": {"layers": [0]}},
        "data": {
            "path": str(folder / "text.jsonl"),
            "format": "jsonl",
            "sequence_length": 32,
            "heldout_fraction": 0.1,
        },
        "cache": {"path": str(folder / cache), "top_k": 20, "shard_rows": 10},
        "loss": {"chunk_size": 16, "ce_weight": 0.1},
        "optimizer": {"learning_rate": 1e-3},
        "train": {
            "steps": STEPS,
            "batch_size": 8,
            "micro_batch_size": 4,
            "compute_dtype": "float32",
            "log_every": 1,
            "eval_every": 4,
            "save_every": 2,
        },
        "mesh": {"data": 1, "fsdp": -1, "heartbeat_seconds": HEARTBEAT},
    }
    file = folder / f"{run}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [f"jax_distill.{module}", "--config", str(file)]


# What a process writes into a cache, in its log.
RECORD = """
import runpy, sys
from jax_distill.cache import writer
write = writer.Writer.write

def recorded(self, shard, *rest):
    print("wrote", self.path.rsplit("/", 1)[-1], shard, flush=True)
    return write(self, shard, *rest)

writer.Writer.write = recorded
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


OPEN_MPI_PORTS = 65536 - 2**12
"""The first of those that JAX chooses from by an Open MPI job's number."""


def free_port(first: int = 0) -> int:
    """One that nobody listens on, from `first` on where it is given."""
    for port in range(first, 65536):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("localhost", port))
            return free.getsockname()[1]
    raise OSError("no free port")


def placement(number: int, count: int, port: int, open_mpi: bool) -> tuple[dict, list[str]]:
    """What tells a process its number: the environment that Open MPI 4's mpirun makes, or
    options."""
    if not open_mpi:
        mesh = {"coordinator_address": f"localhost:{port}", "num_processes": count}
        mesh["process_id"] = number
        return {}, [f"--mesh.{key}={value}" for key, value in mesh.items()] if count > 1 else []
    job = (port - OPEN_MPI_PORTS) << 12
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
    }, ["--mesh.coordinator_address=auto"]


def start_all(
    words: Sequence[str],
    logs: Path,
    count: int,
    *,
    programs: Mapping[int, list[str]] | None = None,
    open_mpi: bool = False,
) -> list[subprocess.Popen]:
    """The command as `count` processes of one CPU device each. What each says is in
    logs/<number>.log. programs: of a process what stands for python's -m."""
    port = free_port(OPEN_MPI_PORTS if open_mpi else 0)
    logs.mkdir(exist_ok=True)
    base = on_devices(1) | {"JAX_PLATFORMS": "cpu"}
    started = []
    for each in range(count):
        variables, options = placement(each, count, port, open_mpi)
        environment = base | variables
        program = (programs or {}).get(each, ["-m"])
        with (logs / f"{each}.log").open("wb") as log:
            command = [sys.executable, *program, *words, *options]
            started.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
    return started


def finish_all(words: Sequence[str], logs: Path, count: int, **options: Any) -> list[str]:
    """Run them to a good end (options: `start_all`'s); what each said, without what gloo says of
    itself."""
    codes = [process.wait() for process in start_all(words, logs, count, **options)]
    said = [(logs / f"{each}.log").read_text() for each in range(count)]
    assert codes == [0] * count, "\n".join(text[-3000:] for text in said)
    return ["".join(x for x in text.splitlines(True) if "[Gloo]" not in x) for text in said]


@pytest.fixture(scope="module")
def one(folder) -> Path:
    """The folder, with the cache and the run of one process."""
    finish_all(command(folder, "train", run="one", cache="cache"), folder / "logs_one", 1)
    return folder


def assert_same_run(folder: Path, run: str, other: str = "one", steps: int = STEPS) -> None:
    """Steps, validation, weights and test table as of one process, to fp32 rounding: sums over rows
    in another order, over 6 steps."""
    ours, theirs = (read_metrics(folder / name / "metrics.jsonl") for name in (run, other))
    assert [each["step"] for each in ours] == list(range(1, steps + 1))
    for left, right in zip(ours, theirs, strict=True):
        for key in {"loss", "kl", "gradient_norm", "val_loss", "valid_tokens"} & right.keys():
            assert left[key] == pytest.approx(right[key], rel=2e-5), (key, left["step"])
    left, right = (load_file(folder / each / "export/model.safetensors") for each in (run, other))
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_allclose(left[key], right[key], rtol=0, atol=2e-5, err_msg=key)


def signal_at(function: Callable[..., Any], call: int, number: int) -> list[str]:
    """A program that sends itself the signal after that call, from 1, of a function."""
    where = f"{function.__module__}:{function.__qualname__}"
    return ["-c", SIGNAL_AT, where, str(call), "", "after", str(int(number))]


def test_two_processes_stop_together_and_train_the_student_of_one(one):
    """A signal to the second one alone, after step 2 is under way: known in both a step later."""
    words = command(one, "train", run="two", cache="cache")
    stop = {1: signal_at(Steps.dispatch, 2, signal.SIGTERM)}
    codes = [each.wait() for each in start_all(words, one / "logs_stop", 2, programs=stop)]
    said = (one / "logs_stop/0.log").read_text()
    assert codes == [128 + signal.SIGTERM] * 2, said[-3000:]
    assert "SIGTERM at step 3 of 6, state saved" in said
    assert saved_steps(one / "two")[-1] == 3
    first, second = finish_all(words, one / "logs_two", 2)
    assert second == "" and "resumed at step 3 of 6" in first and "done in" in first
    assert_same_run(one, "two")


def test_one_killed_ends_all_and_another_number_resumes(one):
    """The second of two processes is killed once it has begun to save step 4."""
    words, logs = command(one, "train", run="killed", cache="cache"), one / "logs_killed"
    kill = {1: signal_at(Checkpoints.save, 2, signal.SIGKILL)}
    first, second = [each.wait() for each in start_all(words, logs, 2, programs=kill)]
    said = (logs / "0.log").read_text()
    assert second == -signal.SIGKILL and first != 0, said[-3000:]
    assert re.search(r"unhealthy \(stopped sending heartbeats\):\s+1\b", said), said[-3000:]
    assert not (one / "killed/summary.json").exists()
    saved = saved_steps(one / "killed")[-1]
    assert saved in (2, 4)
    (text,) = finish_all(words, one / "logs_resumed", 1)
    assert f"resumed at step {saved} of {STEPS}" in text
    assert_same_run(one, "killed")


@pytest.mark.parametrize("count", [2, 4])
def test_several_teachers_write_the_cache_of_one(one, count):
    name = f"cache_{count}"
    words = command(one, "teacher", run=f"teacher_{count}", cache=name)
    words += ["--mesh.data=4", "--mesh.fsdp=1"] if count == 4 else []
    programs = dict.fromkeys(range(count), ["-c", RECORD])
    # Two as if mpirun had started them.
    logs = one / f"logs_{name}"
    said = finish_all(words, logs, count, programs=programs, open_mpi=count == 2)
    for split in ("train", "heldout"):
        ours, theirs = (Cache.open(str(one / each / split)) for each in (name, "cache"))
        ours.require_complete()
        wrote = [re.findall(rf"^wrote {split} (\d+)$", text, re.MULTILINE) for text in said]
        assert sorted(int(x) for each in wrote for x in each) == list(range(theirs.shards))
        assert all(wrote) or split == "heldout"
        assert ours.manifest == theirs.manifest
        rows = range(theirs.rows)
        left, right = ours.read(rows), theirs.read(rows)
        assert left.targets is not None and right.targets is not None
        for a, b in (left.tokens, right.tokens), (left.targets.indices, right.targets.indices):
            np.testing.assert_array_equal(a, b)
        # Matmuls of other shapes round otherwise, and a gap below 4 by one fp16 step then.
        np.testing.assert_allclose(left.targets.logprobs, right.targets.logprobs, atol=2e-3)
        np.testing.assert_allclose(left.targets.log_tail, right.targets.log_tail, atol=1e-5)
    others = [re.sub(r"^wrote .*\n", "", text, flags=re.MULTILINE) for text in said[1:]]
    assert not any(others)


def test_a_live_teacher_split_by_tensor_with_offloaded_moments(folder):
    """Two processes that hold halves of the same rows' heads, MLP and vocabulary, teacher and
    student; the moments in their hosts' memory; a hidden-state loss."""
    options = ["--teacher.mode=online", "--loss.hidden_weight=1", "--train.steps=2"]
    options += ["--evaluate.samples=0", "--train.micro_batch_size=8", "--train.remat=none"]
    options += ["--mesh.fsdp=1", "--mesh.tensor=-1", "--optimizer.offload=moments"]
    for name, count in ("live_one", 1), ("live_two", 2):
        words = command(folder, "train", run=name, cache="rows")
        finish_all([*words, *options], folder / f"logs_{name}", count)
    assert_same_run(folder, "live_two", "live_one", steps=2)
    tables = [
        json.loads((folder / run / "summary.json").read_text())["test"]["student"]
        for run in ("live_one", "live_two")
    ]
    for key in ("kl", "cross_entropy"):
        assert tables[1][key] == pytest.approx(tables[0][key], rel=1e-4), key
