"""`train --sweep KEY=V1,V2 [KEY=V1,V2 …]`: one run for each combination, one after the other.

Each run is a process of its own with a folder of its own below the configuration's `output_dir`,
and resumes as any run does. What can share the cache shares it.
"""

import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.config import as_dict, load, read_grid, read_mapping

READ_ONLY = ("cache.read_top_k", "cache.path")  # change nothing that a cache holds
WRITES_CACHE = ("data.", "teacher.", "cache.")


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: its folder, and the words of its command line."""

    folder: Path
    words: list[str]

    def finished(self, prog: str) -> bool:
        """Whether its folder holds the end of this very run."""
        file = self.folder / "config.yaml"
        if not (self.folder / "summary.json").is_file() or not file.is_file():
            return False
        return read_mapping(str(file), "the configuration of the run") == as_dict(
            load(self.words, prog)
        )


def take_sweep(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The values by key after `--sweep`, up to the next option; and the other words.

    Raises:
        UserError: what stands there is no `KEY=V1,V2`, or a key stands twice.
    """
    start = list(argv).index("--sweep")
    end = start + 1
    while end < len(argv) and not argv[end].startswith("--"):
        end += 1
    return read_grid(argv[start + 1 : end]), [*argv[:start], *argv[end:]]


def combinations(prog: str, argv: Sequence[str]) -> list[Combination]:
    """Every combination of the swept values, each checked as the command itself would.

    Raises:
        UserError: the first wrong key, value or configuration.
    """
    values, rest = take_sweep(argv)
    base = load(rest, prog)
    shared = not any(key.startswith(WRITES_CACHE) and key not in READ_ONLY for key in values)
    short = [key.rsplit(".", 1)[-1] for key in values]
    names = short if len(set(short)) == len(short) else list(values)
    found = []
    for chosen in itertools.product(*values.values()):
        name = ",".join(f"{key}={value}" for key, value in zip(names, chosen, strict=True))
        folder = Path(base.output_dir) / re.sub(r"[^\w.,=+-]+", "_", name)
        words = [*rest, "--output_dir", str(folder)]
        words += ["--cache.path", base.cache.path] if shared and "cache.path" not in values else []
        for key, value in zip(values, chosen, strict=True):
            words.append(f"--{key}={value}")
        load(words, prog)
        found.append(Combination(folder, words))
    if len({each.folder for each in found}) < len(found):
        alike = ", ".join(str(each.folder) for each in found)
        raise UserError(
            f"--sweep: expected values that give folders of different names, got {alike}; run "
            "these one by one, each with its --output_dir"
        )
    return found


def run_one(command: Sequence[str]) -> int:
    """Run one command to its end; its exit code. A signal to stop is handed on to it: it saves.

    It has a process group of its own: Ctrl-C in a terminal goes to the whole group, and with the
    one that is handed on it would be the second, which ends a run without saving.
    """
    child = subprocess.Popen(command, process_group=0)
    try:
        return child.wait()
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        child.send_signal(number)
        child.wait()
        raise


def sweep(prog: str, argv: Sequence[str], own: Sequence[str] = ()) -> int:
    """Run the sweep, or with `--print_commands` print its commands, one a line, for a scheduler.

    A run that fails is named and the others go on; the exit code is then 1. At the end stand the
    runs side by side, and `curves.png` in the `output_dir`.

    own: options of the command that are no keys of the configuration.

    Raises:
        UserError: as `combinations`; one of several processes.
    """
    wants_print = "--print_commands" in argv
    words = [word for word in argv if word != "--print_commands"]
    address = load(take_sweep(words)[1], prog).mesh.coordinator_address
    if address and not wants_print:
        raise UserError(
            f"expected one process with --sweep, got mesh.coordinator_address {address}: every "
            "process would begin runs of its own; add --print_commands, and start each command "
            "that it prints as all processes"
        )
    runs = combinations(prog, words)
    failed = []
    for number, run in enumerate(runs, 1):
        command = [sys.executable, "-m", prog, *own, *run.words]
        if wants_print:
            print(shlex.join(["python", *command[1:]]))
            continue
        say(f"sweep, run {number} of {len(runs)}: {run.folder}")
        if run.finished(prog):
            say("finished earlier; delete its folder to run it again")
            continue
        code = run_one(command)
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise KeyboardInterrupt(code - 128)
        failed += [run.folder] if code else []
    if wants_print:
        return 0
    done = [str(run.folder) for run in runs if (run.folder / "metrics.jsonl").is_file()]
    if done:
        figure = str(runs[0].folder.parent / "curves.png")
        run_one([sys.executable, "-m", "jax_distill.report", *done, "--out", figure])
    if failed:
        names = ", ".join(map(str, failed))
        say(f"{len(failed)} of {len(runs)} runs failed: {names}; their own last lines say why")
    return 1 if failed else 0
