"""What a person sees while a command runs: lines, progress bars; and the signals that stop it."""

import signal
import time
from collections.abc import Iterable
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    track,
)

Item = TypeVar("Item")

console = Console(highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """One line to the person who runs this, above any progress bar."""
    console.print(line, markup=False)


def progress(items: Iterable[Item], what: str, *, total: int, show: bool = True) -> Iterable[Item]:
    """The items, with a bar where this is a terminal (and `show` says so)."""
    hidden = not (show and console.is_terminal)
    return track(items, what, total=total, console=console, disable=hidden)


class Stopped(Exception):
    """The loop saved its state and ends early, as a signal asked. Exit code 128 + its number."""

    def __init__(self, message: str, signal_name: str) -> None:
        super().__init__(message)
        self.number = int(signal.Signals[signal_name])


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

    def expect(self, total: int) -> int:
        """So many steps it will be, as far as is known now."""
        self._total = total
        self._bar.update(self._task, total=total)
        return total

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
