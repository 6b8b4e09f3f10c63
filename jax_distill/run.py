"""The run folder, written alike by both backends.

    <output_dir>/config.yaml     the resolved configuration
                 manifest.json   versions, git revision, command, host
                 metrics.jsonl   one line a logged step, each step once
                 tensorboard/    the same numbers
                 summary.json    what came out
                 report.html, checkpoints/, export/
                 student/        what training began with

The layout has a version (RUN_FORMAT); later versions of the program read it.

One process writes a run folder at a time: a lock names the one that has it.
"""

import contextlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from jax_distill.base.errors import RunError, UserError, shown
from jax_distill.base.files import (
    Lock,
    exists,
    finite_json,
    write_json,
    write_text,
)
from jax_distill.base.json_object import BAD_JSON, json_problem, read_json_object
from jax_distill.base.versions import git_revision, versions
from jax_distill.config import Config, as_dict, flatten, read_mapping, save
from jax_distill.wandb_log import WandbLog, check_wandb

# What may change between a run and its resumption: nothing that moves a number, beyond rounding.
# What the rows and targets come from is known by the cache's fingerprint, wherever it lies.
FREE_FIELDS = (
    "output_dir",
    "teacher.path",
    "data.path",
    "cache.path",
    "optimizer.offload",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.resume_step",
    "train.profile_steps",
    "train.ce_baseline",
    "train.wandb",
    "teacher.batch_size",
    "teacher.beyond_context",
    "evaluate.samples",
    "evaluate.sample_tokens",
    "mesh.data",
    "mesh.fsdp",
    "mesh.expert",
    "mesh.tensor",
    "mesh.coordinator_address",
    "mesh.num_processes",
    "mesh.process_id",
    "mesh.heartbeat_seconds",
    "mesh.join_seconds",
)
LENGTH_FIELDS = ("train.steps", "train.epochs")  # free where no schedule depends on them


STUDENT_FOLDER = "student"  # what training began with: config.json, tokenizer, maybe weights
RUN_FORMAT = 2  # of manifest.json, metrics.jsonl and checkpoints/
WHOLE_CHECKPOINT = re.compile(r"\d+|step_\d+\.pt")  # Orbax's, torch_ref's


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl: each a `step`, larger than the one before, and numbers by
    name, null where one was not finite. A last line without its end was torn by a kill and is left
    out.

    Raises:
        UserError: damage anywhere else, by line. Nothing may be rewritten then: the file is the
            run's history.
    """
    if not exists(path):
        return []
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"expected {path} to be a readable file, got {error.strerror}; restore it"
        ) from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        record, problem = _record(line, after=records[-1]["step"] if records else -1)
        if problem:
            raise UserError(
                f"{path}:{number}: expected a record of metrics, got {problem}; "
                "restore the file, or delete the line"
            )
        records.append(record)
    record, problem = _record(torn, after=records[-1]["step"] if records else -1)
    return records if problem else [*records, record]


def _record(line: bytes, *, after: int) -> tuple[dict[str, Any], str]:
    """(a record of metrics.jsonl, what is wrong with it or '')."""
    try:
        record = json.loads(line.decode())
    except BAD_JSON as error:
        return {}, json_problem(error)
    if not isinstance(record, dict) or not is_whole(record.get("step")):
        return {}, shown(record)
    if record["step"] <= after:
        return {}, f"step {record['step']} after step {after}"
    for key, value in record.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            return {}, f"{key} {shown(value)}"
    return record, ""


def is_whole(value: Any) -> bool:
    """Whether a value of a JSON file is an int, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_run_manifest(run: Path) -> dict[str, Any]:
    """manifest.json of a run folder; {} where there is none.

    Raises:
        UserError: no JSON object, or a value that the program reads is of another type.
    """
    types = {"run_format": int, "backend": str, "cache": str, "seconds_before": int | float}
    return _read_typed(run / "manifest.json", "manifest", types)


def read_summary(run: Path) -> dict[str, Any]:
    """summary.json of a run folder; {} where there is none. `test` is a table: rows by name, in
    them numbers by name.

    Raises:
        UserError: no JSON object, or not of that form.
    """
    path = run / "summary.json"
    summary = _read_typed(path, "summary", {"test": dict, "steps": int})
    for name, row in (summary.get("test") or {}).items():
        is_row = isinstance(row, dict)
        if not is_row or not all(isinstance(value, int | float | None) for value in row.values()):
            raise UserError(
                f"expected numbers in test.{name} of the summary {path}, got {shown(row)}; "
                "restore or delete the file"
            )
    return summary


def _read_typed(path: Path, what: str, types: dict[str, Any]) -> dict[str, Any]:
    content = (
        read_json_object(path, what=f"{what} of a run", cure="restore or delete the file")
        if exists(path)
        else {}
    )
    for key, kind in types.items():
        value = content.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            name = getattr(kind, "__name__", str(kind))
            raise UserError(
                f"expected {key} in the {what} {path} as {name}, got {shown(value)}; "
                "restore or delete the file"
            )
    return content


class Metrics:
    """metrics.jsonl and its TensorBoard twin; a step is written once, whatever was killed when.
    `wandb` gets the same, if given."""

    def __init__(self, folder: Path, *, resume_step: int, wandb: WandbLog | None = None) -> None:
        """Keep the records up to `resume_step`, drop what a killed run logged beyond it."""
        self._folder, self._wandb = folder, wandb
        path, board = folder / "metrics.jsonl", folder / "tensorboard"
        with self._disk_errors():
            board.mkdir(parents=True, exist_ok=True)
            kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
            write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
            self._file: IO[str] = open(path, "a", encoding="utf-8")
            # Not SummaryWriter: its thread would meet a full disk where nobody can catch it.
            self._board = EventsWriter(str(board / "events"))
        start = SessionLog(status=SessionLog.START)  # hides what was logged from here on before
        self._board.write_event(Event(step=resume_step + 1, session_log=start))

    def log(self, step: int, values: dict[str, float]) -> None:
        """One record. A number that is not finite is null in the file.

        Raises:
            RunError: the disk would not take it.
        """
        line = json.dumps(finite_json({"step": step, **values}), allow_nan=False)
        now = time.time()
        with self._disk_errors():
            self._file.write(line + "\n")
            self._file.flush()
            for key, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    event = Event(step=step, wall_time=now, summary=scalar(key, value))
                    self._board.write_event(event)
            self._board.flush()
        if self._wandb:
            self._wandb.log(step, values)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"expected to write metrics into {self._folder}, got {error.strerror}; "
                "make room there, and re-run the same command to resume"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # said by log, where it first came up
                file.close()
        if self._wandb:
            self._wandb.finish(failed=kind is not None)


class Run:
    """The run folder, opened by one process. Use as a context manager."""

    def __init__(self, config: Config, *, backend: str, is_writer: bool = True) -> None:
        """Create or reopen `config.output_dir`. Of several processes of a run one `is_writer`; the
        others look at what is there.

        Raises:
            UserError: another process has it, or it was begun with another configuration or by the
                other backend, which cannot read its checkpoints.
        """
        self.path = Path(config.output_dir)
        self.started = time.time()
        self._is_writer = is_writer
        if not is_writer:
            return
        check_wandb(config)
        self._lock = Lock(self.path / ".lock", f"output_dir {self.path}")
        try:
            self._before = read_run_manifest(self.path)
            self._check_same(config, backend)
        except BaseException:
            self._lock.release()
            raise
        self._seconds_before = self._seconds_of_earlier_commands()
        save(config, self.path / "config.yaml")
        self._manifest = {
            "run_format": RUN_FORMAT,
            "backend": backend,
            "command": sys.argv,
            "host": platform.node(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "seconds_before": self._seconds_before,
            "git_revision": git_revision(),
            "versions": versions(),
            "cache": self._before.get("cache"),
        }
        write_json(self.path / "manifest.json", self._manifest)

    @property
    def trained(self) -> bool:
        """Whether there is a whole checkpoint to resume from (either backend's)."""
        folder = self.path / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return any(WHOLE_CHECKPOINT.fullmatch(name) for name in names)

    def use_cache(self, fingerprint: str) -> None:
        """Note which cache the run trains on; a run that was begun on another is refused.

        Raises:
            UserError: there are checkpoints of training on other rows or targets.
        """
        if not self._is_writer:
            return
        before = self._before.get("cache")
        if self.trained and before not in (None, fingerprint):
            raise UserError(
                f"{self.path} was begun on the cache {before[:12]}…, got {fingerprint[:12]}…; "
                "give that cache back, or set another --output_dir for another run"
            )
        self._manifest["cache"] = fingerprint
        write_json(self.path / "manifest.json", self._manifest)

    @property
    def seconds(self) -> float:
        """Wall time of this command and of the killed or stopped ones that it resumes."""
        return self._seconds_before + time.time() - self.started

    def _seconds_of_earlier_commands(self) -> float:
        """A killed command leaves no last word: it lasted to the newest thing that it wrote."""
        if not self._before:
            return 0.0
        begin = last = (self.path / "manifest.json").stat().st_mtime
        for wrote in ("summary.json", "**/metrics.jsonl", "**/checkpoints", "cache/*/commits"):
            last = max([last, *(path.stat().st_mtime for path in self.path.glob(wrote))])
        return (self._before.get("seconds_before") or 0.0) + last - begin

    def _check_same(self, config: Config, backend: str) -> None:
        path = self.path / "config.yaml"
        if not self.trained:
            return
        version = self._before.get("run_format", 1)
        if version != RUN_FORMAT:
            raise UserError(
                f"expected a run folder of format {RUN_FORMAT} at {self.path}, got {version}; "
                "set another --output_dir, and start from this run's export/ as student.path"
            )
        begun = self._before.get("backend", backend)
        if begun != backend:
            raise UserError(
                f"{self.path} was begun by the {begun} backend, got {backend}; "
                "continue with that one, or set another --output_dir"
            )
        now, default = flatten(as_dict(config)), flatten(as_dict(Config()))
        # A field that is younger than the run had its default.
        before = default | flatten(read_mapping(path, "the configuration of the run"))
        for key in sorted(before.keys() | now.keys()):
            old, new = before.get(key), now.get(key)
            length, schedule = key in LENGTH_FIELDS, config.optimizer.schedule
            longer = length and schedule == "constant"
            if key in FREE_FIELDS or longer or old == new or _same_place(key, old, new):
                continue
            cure = "set another --output_dir for another run"
            if length:
                cure = (
                    f"its {schedule} schedule is of that length. Once it has finished, go on from "
                    f"it: --student.path {self.path}/export --output_dir {self.path}_2, or {cure}"
                )
            key, old, new = (_short(each) for each in (key, old, new))
            raise UserError(f"{self.path} was begun with {key} {old}, got {new}; {cure}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._is_writer:
            self._lock.release()


def _short(value: Any, most: int = 200) -> str:
    """As text, cut: a damaged config.yaml may hold anything."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _same_place(key: str, old: Any, new: Any) -> bool:
    """Whether two spellings of a path mean one file or folder."""
    both = isinstance(old, str) and isinstance(new, str)
    return both and key.endswith("path") and os.path.realpath(old) == os.path.realpath(new)


def not_finite(step: int, found: str, rows: Iterable[int], saved: int | None) -> RunError:
    """What there is to say when training has broken down."""
    return RunError(
        f"step {step}: {found}, rows {[int(row) for row in rows]}; "
        f"last checkpoint: step {saved or 0}; "
        "lower optimizer.learning_rate, or look at these rows"
    )
