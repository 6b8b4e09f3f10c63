"""The run folder, written alike by both backends.

    <output_dir>/config.yaml     the resolved configuration
                 manifest.json   versions, git revision, command, host
                 metrics.jsonl   one line a logged step, each step once
                 tensorboard/    the same numbers
                 summary.json    what came out
                 report.html, checkpoints/, export/

One process writes a run folder at a time: a lock names the one that has it.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jax_distill.config import Config, Failure, Refusal, as_dict, save

PACKAGES = (
    "jax-distill jax jaxlib flax optax orbax-checkpoint tensorstore grain numpy tokenizers "
    "safetensors gguf scipy torch transformers"
).split()

# What may change between a run and its resumption: nothing that moves a number.
# What the rows and targets come from is known by the store's fingerprint, wherever it lies.
FREE_FIELDS = (
    "output_dir",
    "teacher.path",
    "data.path",
    "cache.path",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.profile_steps",
    "train.ce_baseline",
    "teacher.batch_size",
)


WHOLE_CHECKPOINT = re.compile(r"\d+|step_\d+\.pt")  # Orbax's, torch_ref's


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on, and Python's own."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """The revision this package runs from (with `-dirty` where files differ), outside git None."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed, maybe in an environment inside another repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all; a number that is not finite becomes null."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; a last line torn by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Metrics:
    """metrics.jsonl and its TensorBoard twin; a step is written once, whatever was killed when."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Keep the records up to `resume_step`, drop what a killed run logged beyond it."""
        self._folder = folder
        path, board = folder / "metrics.jsonl", folder / "tensorboard"
        with self._disk_errors():
            board.mkdir(parents=True, exist_ok=True)
            kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
            temporary = folder / ".metrics.jsonl.tmp"
            temporary.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
            os.replace(temporary, path)
            self._file: IO[str] = open(path, "a", encoding="utf-8")
            # Not SummaryWriter: its thread would meet a full disk where nobody can catch it.
            self._board = EventsWriter(str(board / "events"))
        start = SessionLog(status=SessionLog.START)  # hides what was logged from here on before
        self._board.write_event(Event(step=resume_step + 1, session_log=start))

    def log(self, step: int, values: dict[str, float]) -> None:
        """One record. A number that is not finite is null in the file.

        Raises:
            Failure: the disk would not take it.
        """
        line = json.dumps(_finite({"step": step, **values}), allow_nan=False)
        now = time.time()
        with self._disk_errors():
            self._file.write(line + "\n")
            self._file.flush()
            for key, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    event = Event(step=step, wall_time=now, summary=scalar(key, value))
                    self._board.write_event(event)
            self._board.flush()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Failure(
                f"expected to write metrics into {self._folder}, got {error.strerror}; "
                "make room there, and the same command goes on"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # said by log, where it first came up
                file.close()


class Run:
    """The run folder, opened by one process. Use as a context manager."""

    def __init__(self, config: Config, *, backend: str) -> None:
        """Create or reopen `config.output_dir`.

        Raises:
            Refusal: another process has it, or it was begun with another configuration or by the
                other backend, which cannot read its checkpoints.
        """
        self.path = Path(config.output_dir)
        self.started = time.time()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+", encoding="utf-8")
        except OSError as error:
            raise Refusal(
                f"expected a writable output_dir, got {self.path} ({error.strerror})"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise Refusal(
                f"{self.path} is in use by {owner}; wait for it, or set another --output_dir"
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()
        try:
            self._before = self._read_manifest()
            self._check_same(config, backend)
        except Refusal:
            self._lock.close()
            raise
        self._seconds_before = self._seconds_of_earlier_commands()
        save(config, self.path / "config.yaml")
        self._manifest = {
            "backend": backend,
            "command": sys.argv,
            "host": platform.node(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds_before": self._seconds_before,
            "git_revision": git_revision(),
            "versions": versions(),
            "store": self._before.get("store"),
        }
        write_json(self.path / "manifest.json", self._manifest)

    @property
    def trained(self) -> bool:
        """Whether there is a whole checkpoint to go on from (either backend's)."""
        folder = self.path / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return any(WHOLE_CHECKPOINT.fullmatch(name) for name in names)

    def use_store(self, fingerprint: str) -> None:
        """Note which store the run trains on; a run that was begun on another is refused.

        Raises:
            Refusal: there are checkpoints of training on other rows or targets.
        """
        before = self._before.get("store")
        if self.trained and before not in (None, fingerprint):
            raise Refusal(
                f"{self.path} was begun on the store {before[:12]}…, got {fingerprint[:12]}…; "
                "give that store back, or set another --output_dir for another run"
            )
        self._manifest["store"] = fingerprint
        write_json(self.path / "manifest.json", self._manifest)

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else {}

    @property
    def seconds(self) -> float:
        """Wall time of this command and of the killed or stopped ones that it goes on from."""
        return self._seconds_before + time.time() - self.started

    def _seconds_of_earlier_commands(self) -> float:
        """A killed command leaves no last word: it lasted to the newest thing that it wrote."""
        if not self._before:
            return 0.0
        begin = last = (self.path / "manifest.json").stat().st_mtime
        for wrote in ("summary.json", "**/metrics.jsonl", "**/checkpoints", "cache/*/commits"):
            last = max([last, *(path.stat().st_mtime for path in self.path.glob(wrote))])
        return self._before.get("seconds_before", 0.0) + last - begin

    def _check_same(self, config: Config, backend: str) -> None:
        path = self.path / "config.yaml"
        if not self.trained or not path.exists():
            return
        begun = self._before.get("backend", backend)
        if begun != backend:
            raise Refusal(
                f"{self.path} was begun by the {begun} backend, got {backend}; "
                "go on with that one, or set another --output_dir"
            )
        now, default = _flatten(as_dict(config)), _flatten(as_dict(Config()))
        # A field that is younger than the run had its default.
        before = default | _flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        for key in sorted(before.keys() | now.keys()):
            old, new = before.get(key), now.get(key)
            longer = key == "train.steps" and config.optimizer.schedule == "constant"
            if key in FREE_FIELDS or longer or old == new or _same_place(key, old, new):
                continue
            raise Refusal(
                f"{self.path} was begun with {key} {old}, got {new}; "
                "set another --output_dir for another run"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()


def _same_place(key: str, old: Any, new: Any) -> bool:
    """Whether two spellings of a path mean one file or folder."""
    both = isinstance(old, str) and isinstance(new, str)
    return both and key.endswith("path") and Path(old).resolve() == Path(new).resolve()


def _flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


console = Console(highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """One line to the person who runs this, above any progress bar."""
    console.print(line, markup=False)


class Stopped(Exception):
    """The loop saved its state and ends early because it was told to."""


def not_finite(step: int, found: str, rows: Iterable[int], saved: int | None) -> Failure:
    """What there is to say when training has broken down."""
    return Failure(
        f"step {step}: {found}, rows {[int(row) for row in rows]}; "
        f"last checkpoint: step {saved or 0}; "
        "lower optimizer.learning_rate, or look at these rows"
    )


class StopSignal:
    """SIGTERM and SIGINT ask the loop to save and stop after the step at hand."""

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, self._before[number])  # a second one ends at once

    def __exit__(self, *_: Any) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)


class StepProgress:
    """A bar with loss, tokens/s and time left on a terminal, a line now and then elsewhere."""

    def __init__(self, what: str, *, total: int, done: int, tokens_per_step: int) -> None:
        self._what, self._total, self._first = what, total, done
        self._tokens = tokens_per_step
        self._begin = self._last_line = time.monotonic()
        self._counted = done  # the first step compiles; speed is counted after it
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(what, total=total, completed=done, note="")

    def update(self, step: int, loss: float | None) -> None:
        """`step` steps are done; `loss` is the latest one known."""
        now = time.monotonic()
        speed = (step - self._counted) * self._tokens / max(now - self._begin, 1e-9)
        if self._counted == self._first:
            self._begin, self._counted = now, step
        note = f"{speed:,.0f} tokens/s" + ("" if loss is None else f"  loss {loss:.4f}")
        self._bar.update(self._task, completed=step, note=note)
        if not console.is_terminal and (now - self._last_line > 10 or step == self._total):
            self._last_line = now
            left = (self._total - step) * self._tokens / max(speed, 1e-9)
            say(f"{self._what} {step}/{self._total}  {note}  {left:,.0f} s left")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
