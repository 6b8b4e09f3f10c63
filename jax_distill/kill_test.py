"""Real processes, killed with SIGKILL at given calls or out of disk, and started again.

`start`, `stopped`, `kill` and `finish` serve any command that resumes where it stopped. Each signal
comes from the process itself, at a call of a function: nothing here depends on the machine's speed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from jax_distill import audit
from jax_distill.cache import Cache, writer
from jax_distill.conftest import on_devices
from jax_distill.teacher_test import hf_folder, text_file

# A process takes the time that the machine has for it: the limit is only for one that hangs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Arguments: module:name of a function, which call of it (of those with this word among their
# arguments), before or after, the signal, the command.
SIGNAL_AT = """
import functools, importlib, os, runpy, sys
where, call, word, when, number, *sys.argv = sys.argv[1:]
module, _, path = where.partition(":")
*owners, name = path.split(".")
owner = functools.reduce(getattr, owners, importlib.import_module(module))
function, calls = getattr(owner, name), 0

def counted(*args, **kwargs):
    global calls
    mine = word in repr(args)
    calls += mine
    now = mine and calls == int(call)
    if now and when == "before":
        os.kill(os.getpid(), int(number))
    result = function(*args, **kwargs)
    if now and when == "after":
        os.kill(os.getpid(), int(number))
    return result

setattr(owner, name, counted)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Moment(NamedTuple):
    """Before or after the `call`-th call, from 1, of the function `name` in `module`; of those
    calls whose arguments have the `word` in them."""

    when: str
    module: str
    name: str
    call: int
    word: str = ""


def start(
    command: Sequence[str], log: Path, *, at: Moment | None = None, number: int = signal.SIGKILL
) -> subprocess.Popen:
    """Start `python -m …` as a person would, on one CPU device; all it says is added to `log`. At
    the moment given, it sends itself the signal `number`."""
    environment = on_devices(1)
    program = ["-m", *command]
    if at:
        where = [f"{at.module}:{at.name}", str(at.call), at.word, at.when, str(int(number))]
        program = ["-c", SIGNAL_AT, *where, *command]
    # What a script runs in the background ignores SIGINT, and hands that on; a handler it does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, *program],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**environment, "JAX_PLATFORMS": "cpu"},
            )
    finally:
        signal.signal(signal.SIGINT, before)


def stopped(command: Sequence[str], log: Path, *, at: Moment) -> subprocess.Popen:
    """The command, standing still at that moment; SIGCONT lets it go on."""
    process = start(command, log, at=at, number=signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), log.read_text()[-3000:]
    return process


def kill(command: Sequence[str], log: Path, *, at: Moment) -> None:
    """Start the command, which is killed at that moment."""
    ended = start(command, log, at=at).wait()
    assert ended == -signal.SIGKILL, f"{at}: {log.read_text()[-3000:]}"


def finish(command: Sequence[str], log: Path) -> None:
    """Run the command to its end, which must be a good one."""
    process = start(command, log)
    assert process.wait() == 0, log.read_text()[-3000:]


def folder_bytes(path: Path) -> dict[str, bytes]:
    """Every file but the writer's lock, which says who held it last."""
    files = [f for f in path.rglob("*") if f.is_file() and not f.name.startswith("writer.lock")]
    return {str(f.relative_to(path)): f.read_bytes() for f in files}


def teacher_command(folder: Path, cache: Path) -> list[str]:
    """Write caches of 36 shards with a tiny teacher over a text file."""
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
    return len(list(cache.glob("*/commits/[0-9]*.json")))


def in_writer(when: str, name: str, call: int) -> Moment:
    return Moment(when, writer.__name__, name, call)


def test_a_cache_killed_around_its_writes_ends_byte_identical(tmp_path):
    """Case 33: before a shard is written, between its arrays and its commit, after the commit, in
    the last shard of a cache, between two caches, before and in between what finishes one."""
    log = tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(teacher_command(tmp_path, whole), log)
    total, first = commits(whole), len(list(whole.glob("heldout/commits/[0-9]*.json")))
    assert 2 < first < total - 15
    command = teacher_command(tmp_path, killed)
    arrays = len(list((whole / "train").glob("*/zarr.json")))
    for moment, committed in (
        (in_writer("before", "Writer.write", 3), 2),
        (in_writer("before", "Writer._describe_file", 1), 2),
        (in_writer("before", "Writer._describe_file", (first - 3) * arrays + 2), first - 1),
        (in_writer("after", "Writer.write", 1), first),
        (in_writer("after", "Writer.write", 3), first + 3),
        (in_writer("after", "Writer._describe_file", 4 * arrays), first + 6),
        (in_writer("before", "Writer._describe_file", 2 * arrays), first + 7),
        (in_writer("before", "Writer._describe_file", (total - first - 8) * arrays + 1), total - 1),
        (in_writer("before", "Writer.finish", 1), total),
        (in_writer("before", "Writer._write_head", 1), total),
    ):
        kill(command, log, at=moment)
        assert commits(killed) == committed, moment
    finish(command, log)
    assert folder_bytes(killed) == folder_bytes(whole)


def test_a_cache_killed_while_it_is_begun_ends_byte_identical(tmp_path):
    """Case 33: before, between and after the manifest and the arrays' metadata."""
    log = tmp_path / "log"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(teacher_command(tmp_path, whole), log)
    command = teacher_command(tmp_path, killed)
    for moment, there, missing in (
        (in_writer("before", "_claim", 1), "writer.lock", "manifest.json"),
        (in_writer("after", "_claim", 1), "manifest.json", "*/zarr.json"),
        (in_writer("after", "Writer._open", 1), "*/zarr.json", "commits/[0-9]*"),
        (in_writer("after", "Writer._open", 4), "*/zarr.json", "commits/[0-9]*"),
    ):
        kill(command, log, at=moment)
        assert list(killed.glob(f"heldout/{there}"))
        assert not list(killed.glob(f"heldout/{missing}"))
    finish(command, log)
    assert folder_bytes(killed) == folder_bytes(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_writer_that_is_stopped_says_one_line_and_resumes(tmp_path, number):
    log, cache = tmp_path / "log", tmp_path / "cache"
    command = teacher_command(tmp_path, cache)
    process = start(command, log, at=in_writer("after", "Writer.write", 2), number=number)
    assert process.wait() == 128 + number
    said = log.read_text()
    assert f"stopped by {number.name}" in said.splitlines()[-1] and "Traceback" not in said
    finish(command, log)
    assert Cache.open(str(cache / "train")).complete


def test_a_full_disk_ends_the_writer_and_leaves_what_is_committed_good(tmp_path, small_disk):
    """Case 35."""
    log = tmp_path / "log"
    folder = small_disk / "cache"
    command = teacher_command(tmp_path, folder)
    process = stopped(command, log, at=in_writer("after", "Writer.write", 2))
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 1
    said = log.read_text()
    assert "failed: expected to write the cache" in said and "Traceback" not in said
    cache = Cache.open(str(folder / "heldout"))
    assert len(cache.commits) == 2 and not cache.complete
    bad = [problem for problem in audit.verify(cache) if "is not committed" not in problem]
    assert bad == []
    cache.read([0])
    ballast.unlink()
    finish(command, log)
    whole = tmp_path / "whole"
    finish(teacher_command(tmp_path, whole), log)
    assert folder_bytes(folder) == folder_bytes(whole)
