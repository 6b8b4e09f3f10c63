"""How a command reads its arguments and how it ends: exit code 2 for bad input, 1 for failure."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jax_distill.base.console import Stopped
from jax_distill.base.errors import RunError, UserError, one_line
from jax_distill.base.versions import own_version


class CommandLine(argparse.ArgumentParser):
    """argparse for the commands that read no YAML: no abbreviations, a refusal is one line."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=f"python -m {prog}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"expected the arguments that {self.prog} --help shows, got this: {message}; "
            "correct them"
        )


def above_zero(text: str) -> int:
    """A whole number above 0, as argparse's `type`."""
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text[:40]!r}")
    return int(text)


def at_least_zero(text: str) -> int:
    """A whole number, 0 among them, as argparse's `type`."""
    return 0 if re.fullmatch("0+", text) else above_zero(text)


def positive_numbers(text: str) -> list[int]:
    """`8192,32768` → [8192, 32768], as argparse's `type`."""
    return [above_zero(part) for part in text.split(",")]


def positive_decimals(text: str) -> list[float]:
    """`0.01,1` → [0.01, 1.0], as argparse's `type`."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) and float(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers above 0, got {text[:40]!r}")
    return [float(part) for part in parts]


def _interrupt(number: int, _: Any) -> None:
    raise KeyboardInterrupt(number)


def run_command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run an entry point: a UserError or RunError is one line on stderr and exit code 2 or 1.

    SIGINT and SIGTERM are one line too, with exit code 130 or 143, so that `train && deploy` stops:
    everything that takes long is written piece by piece and resumes. The training loop saves its
    state first, see `fit.fit`.
    `--version` alone prints the version of every command.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"jax_distill {own_version()}")
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        print(
            f"stopped by {signal.Signals(number).name}: what is written stays; "
            "re-run the same command to resume",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)
    except Stopped as stopped:
        print(f"{stopped}; re-run the same command to resume", file=sys.stderr)
        raise SystemExit(128 + stopped.number) from None
    except UserError as refusal:
        print(f"error: {one_line(refusal)}", file=sys.stderr)
        raise SystemExit(2) from None
    except RunError as failure:
        print(f"failed: {one_line(failure)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not SystemExit: Orbax's threads wait minutes for a folder that cannot come
    raise SystemExit(code or 0)
