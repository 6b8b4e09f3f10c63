"""JSON objects out of files that somebody else wrote: whatever is wrong with one is one line."""

import json
from pathlib import Path
from typing import Any

from jax_distill.base.errors import UserError, shown

MAX_BYTES = 2**28  # of a JSON file; the largest tokenizer.json known has 34 MB
# What Python's readers of text, JSON and numbers raise on damage. OSError: no permission, bad disk.
DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    OverflowError,
    MemoryError,
)


# What `json.loads` raises on text that somebody else wrote: not JSON, a number of 5,000 digits,
# 10,000 brackets, more than there is memory for.
BAD_JSON = (ValueError, RecursionError, OverflowError, MemoryError)


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_json_object(
    path: str | Path, *, what: str = "", cure: str = "re-download it"
) -> dict[str, Any]:
    """The object of a JSON file.

    Args:
        what: names the file in a message, for example "manifest of a run".

    Raises:
        UserError: no regular file there, unreadable, too large, or not one JSON object in UTF-8.
            The message names the file and ends in `cure`.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ValueError("no file there")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{size:,} bytes")
        found = json.loads(path.read_bytes().decode("utf-8"))
        problem = "" if isinstance(found, dict) else shown(found)
    except OSError as error:
        problem = error.strerror or one_line(error)
    except BAD_JSON as error:
        problem = json_problem(error)
    if problem:
        name = f"the {what} {path}" if what else str(path)
        raise UserError(f"expected a JSON object in {name}, got {problem}; {cure}")
    return found


def json_problem(error: BaseException) -> str:
    """What one of `BAD_JSON` says of the text, in a few words."""
    if isinstance(error, RecursionError):
        return "brackets nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"bytes that are no UTF-8 (0x{error.object[error.start]:02x} at {error.start})"
    return str(error).split(";")[0] or type(error).__name__


def token_ids(value: Any, vocab_size: int, name: str) -> list[int]:
    """The ids under a key like `eos_token_id`: null is none, a number one, a list several.

    Args:
        name: what the message calls it: file and key.

    Raises:
        UserError: an id that is not a whole number from 0 to vocab_size - 1; true is none.
    """
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for each in ids:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < vocab_size:
            raise UserError(
                f"expected {name} to be ids from 0 to {vocab_size - 1}, got {shown(value)}; "
                "correct the file"
            )
    return ids


def json_line(line: str, where: str, *, cure: str) -> dict[str, Any]:
    """The object that one line of JSONL is.

    Raises:
        UserError: it is none; `where` names it, and `cure` says what to do about another value.
    """
    try:
        row = json.loads(line)
    except BAD_JSON as error:
        raise UserError(
            f"{where}: expected one JSON object a line, got {line[:40]!r} "
            f"({json_problem(error)}); fix or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {line[:40]!r}; {cure}")
    return row
