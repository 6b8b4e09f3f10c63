"""How a command ends: one line and exit code 2 for bad input, 1 for what cannot go on."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn


class Refusal(Exception):
    """Bad input, in one line: what was expected, what came, what to do. Exit code 2."""


class Failure(Exception):
    """The work cannot go on (loss not finite, store broken), in one line. Exit code 1."""


class CommandLine(argparse.ArgumentParser):
    """argparse for the commands that read no YAML: no abbreviations, a refusal is one line."""

    def __init__(self, prog: str, **knobs: Any) -> None:
        super().__init__(prog=f"python -m {prog}", allow_abbrev=False, **knobs)

    def error(self, message: str) -> NoReturn:
        raise Refusal(
            f"expected the arguments that {self.prog} --help shows, got this: {message}; "
            "correct them"
        )


def above_zero(text: str) -> int:
    """A whole number above 0, as argparse's `type`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _interrupt(number: int, _: Any) -> None:
    raise KeyboardInterrupt(number)


def run_command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run an entry point: a Refusal or Failure is one line on stderr and exit code 2 or 1.

    SIGINT and SIGTERM are one line, too (exit code 130 or 143): everything that takes long is
    written piece by piece, and is gone on with. The training loop has a better answer of its own.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        print(
            f"stopped by {signal.Signals(number).name}: what is written stays; "
            "the same command goes on",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        raise SystemExit(2) from None
    except Failure as failure:
        print(f"failed: {failure}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not SystemExit: Orbax's threads wait minutes for a folder that cannot come
    raise SystemExit(code or 0)
