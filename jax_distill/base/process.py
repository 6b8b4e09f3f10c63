"""Time and memory of a call in this process. Imports neither jax nor torch.

A loss that `bench peers` compares is a process, `python -m MODULE NAME INPUTS.npz OUTPUT.npz
REPEATS`; `run_peer` is its body.
"""

import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Measured(NamedTuple):
    """Of `repeats` calls: seconds, and processor seconds of all threads, of each; the most bytes
    that the process held beyond what it held before, None where the system does not say."""

    seconds: list[float]
    cpu_seconds: list[float]
    peak_bytes: int | None


class Outcome(NamedTuple):
    """loss: sum over tokens; d_hidden [T,D], d_weight [V,D]: of the sum."""

    loss: float
    d_hidden: np.ndarray
    d_weight: np.ndarray


def machine_memory() -> int:
    """Bytes of this machine, or of the control group that this process may fill."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, _group_bytes("max") or memory)


def available_memory() -> int:
    """Bytes that this process can still take without swapping: what the system calls available,
    within the control group; all of the machine's where the system does not say."""
    machine = machine_memory()
    free = _group_bytes("max")
    free = machine if free is None else free - (_group_bytes("current") or 0)
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return free
    words = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return min(free, int(words[1]) * 1024) if words else free


def _group_bytes(name: str) -> int | None:
    """memory.<name> of the control group; None where there is none, or no limit."""
    path = Path(f"/sys/fs/cgroup/memory.{name}")
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def tells_memory() -> bool:
    """Whether the system says what a process holds and held; Linux does."""
    return Path("/proc/self/clear_refs").is_file()


def resident_bytes() -> int:
    """What the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The most it has held since `forget_peak`."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def peak_host_bytes() -> int:
    """The most that this process has held since it began (getrusage)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Let the high-water mark start again from what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def settle() -> int:
    """Forget the peak, once nothing more is being given back; what is held then.

    Runtimes free what a call has used from other threads, after its result is there.
    """
    held, quiet = resident_bytes(), 0
    while quiet < 4:
        time.sleep(0.05)
        now = resident_bytes()
        quiet = quiet + 1 if now >= held else 0
        held = min(held, now)
    forget_peak()
    return held


def measure(
    call: Callable[[Any], Any],
    repeats: int,
    *,
    setup: Callable[[], Any] = lambda: None,
    input_bytes: int = 0,
    first_counts: bool = True,
) -> tuple[Any, Measured]:
    """The last result of call(setup()), and what `repeats` of these calls took after a first one,
    whose time is not taken. No result is kept beside the next call.

    input_bytes: of what is in memory already and counts as the call's.
    first_counts: the peak is beyond what was held before the first call; else beyond what is held
        after it: without the code and the threads that it loaded, but also without what an
        allocator has kept of it.
    """
    seconds, cpu_seconds = [], []
    before = settle() if tells_memory() else 0
    call(setup())
    if tells_memory() and not first_counts:
        before = settle()
    result = None
    for _ in range(repeats):
        result = None
        given = setup()
        start, cpu_start = time.perf_counter(), time.process_time()
        result = call(given)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        del given
    peak = peak_bytes() - before + input_bytes if tells_memory() else None
    return result, Measured(seconds, cpu_seconds, peak)


def run_peer(losses: Mapping[str, Callable[..., Callable[[], Outcome]]]) -> None:
    """The body of a process of `bench peers`: the loss NAME, given INPUTS by name, called REPEATS
    times; writes its outcome, the least seconds and cpu_seconds (what else runs on the machine
    only ever adds) and peak_bytes. ImportError: exit 3."""
    name, inputs, output, repeats = sys.argv[1:]
    data = dict(np.load(inputs))
    try:
        function = losses[name](**data)
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from None
    outcome, measured = measure(lambda _: function(), int(repeats))
    least = {key: min(getattr(measured, key)) for key in ("seconds", "cpu_seconds")}
    peak = float("nan") if measured.peak_bytes is None else measured.peak_bytes
    np.savez(output, **outcome._asdict(), **least, peak_bytes=peak)
