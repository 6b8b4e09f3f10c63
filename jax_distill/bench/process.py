"""Time and peak memory of one function in a process of its own. Imports neither jax nor torch.

A contestant of `bench peers` is a process, `python -m MODULE NAME INPUTS.npz OUTPUT.npz REPEATS`,
that loads the inputs, calls `measure` and writes loss, gradients, seconds, cpu_seconds and
peak_bytes.
"""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Outcome(NamedTuple):
    """loss: sum over tokens; d_hidden [T,D], d_lm_head [V,D]: of the sum."""

    loss: float
    d_hidden: np.ndarray
    d_lm_head: np.ndarray


def tells_memory() -> bool:
    """Linux tells a process what it holds and held; what is below needs it."""
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


def measure(function: Callable[[], Outcome], repeats: int) -> dict[str, Any]:
    """Of `repeats` calls after one: the fastest one's seconds, the processor time of the least busy
    one (all threads), and the peak beyond what was held before.

    The least of each: what else runs on the machine only ever adds.
    """
    tells = tells_memory()
    before = settle() if tells else 0
    outcome = function()
    seconds, busy = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        outcome = function()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - cpu_start)
    peak = peak_bytes() - before if tells else float("nan")
    times = {"seconds": min(seconds), "cpu_seconds": min(busy)}
    return {**outcome._asdict(), **times, "peak_bytes": peak}


def run_contestant(contestants: dict[str, Callable[..., Callable[[], Outcome]]]) -> None:
    """The body of such a process. A contestant takes the inputs by name; ImportError: exit 3."""
    name, inputs, output, repeats = sys.argv[1:]
    data = dict(np.load(inputs))
    try:
        function = contestants[name](**data)
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from None
    np.savez(output, **measure(function, int(repeats)))
