"""Files to raw documents, one after the other: text, JSONL, Parquet and Arrow (text, chat, tokens),
token arrays, hub data sets.

| format | what is a document |
|---|---|
| text | a folder: each file in it; one file, or one of more than 16 million characters: runs of \
paragraphs of about 20,000 characters |
| jsonl | the `text` of each line (of a table: row) |
| chat | each line's `messages` ({role, content}) or `conversations` ({from, value}) |
| tokens | each line's `tokens` (beside them, if given, `targets`: 0 or 1 each) |
| tokens, .npy | a row of a 2-D array; a run of a 1-D array up to and including EOS |
| hub | each row of the data set's `messages`, `conversations`, `text` or `tokens` column |

Text and JSONL may be compressed (.gz, .zst). Text is UTF-8, a leading BOM and CRLF line ends are
taken away. Empty lines of JSONL are skipped. What is read of a file at once is bounded.

Of a folder, the files are read whose suffix is that of data, hidden ones, README and the like, and
the files of a test or validation split aside, as in a cloned data set; see `source_files`.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_distill.base.console import say
from jax_distill.base.errors import UserError, shown
from jax_distill.base.files import find_path
from jax_distill.base.json_object import json_line
from jax_distill.data import conversation
from jax_distill.data.builtin import gather, read_builtin
from jax_distill.data.conversation import messages_of
from jax_distill.data.document import Raw
from jax_distill.data.files import COMPRESSED, data_suffix, numbered_lines, paragraphs
from jax_distill.data.hub import hub_rows
from jax_distill.data.tables import SUFFIXES as _TABLES
from jax_distill.data.tables import files_of_data_sets, table_rows

_BLOCK_CHARACTERS = 20_000
_WHOLE_CHARACTERS = 1 << 24  # a file of a folder is one document up to here
_TOKENS = 1 << 22  # of a 1-D array, looked at together
_KEYS = {"chat": conversation.KEYS, "jsonl": ("text",), "tokens": ("tokens",)}


def read_raw(path: str, *, format: str, eos_id: int | None = None) -> Iterator[Raw]:
    """The documents of one source, in the order of the files' names and of their lines.

    Args:
        path: file, folder (its data files, recursively), `builtin:…` or, with format hub,
            what `hub.hub_rows` takes: `owner/name:config:split`, `train[:1%]`, `train[:10000]`.
        format: as `data.format`. `auto`, file by file: .npy is tokens; .jsonl, .ndjson, .json,
            .parquet and .arrow go by the keys of their first line or row; anything else is text.
        eos_id: ends the documents of a 1-D token array.

    Raises:
        UserError: nothing there, or a line that is not what the format says.
    """
    if path.startswith("builtin:"):
        yield from read_builtin(path)
    elif format == "hub":
        yield from _hub(path)
    else:
        is_folder = Path(find_path(path)).is_dir()
        for file in source_files(path, format=format):
            yield from _documents(file, format, eos_id, whole=is_folder)


def say_files(path: str, *, format: str) -> None:
    """One line on what is read of a folder, and what is not."""
    root = Path(find_path(path))
    if not path.startswith("builtin:") and format != "hub" and root.is_dir():
        say(_which_files(root, source_files(path, format=format)))


def _documents(file: Path, format: str, eos_id: int | None, *, whole: bool) -> Iterator[Raw]:
    kind = _detect(file) if format == "auto" else format
    if kind == "tokens" and data_suffix(file) == ".npy":
        return _token_array(file, eos_id)
    if kind == "text":
        return _text(file, whole=whole)
    if data_suffix(file) in _TABLES:
        return _table(file, kind)
    return _lines(file, kind)


_JSON = (".jsonl", ".ndjson", ".json")
_PROSE = (".txt", ".text", ".md", ".rst")
_ROWS = (*_JSON, *_TABLES)
_SUFFIXES = {"text": _PROSE, "jsonl": _ROWS, "chat": _ROWS, "tokens": (*_ROWS, ".npy")}
_ABOUT = re.compile(
    r"(readme|license|licence|citation|changelog|dataset_infos?|dataset_dict|state\.json)\b.*", re.I
)
_OTHER_SPLIT = re.compile(r"(test|valid|validation|val|dev|eval|evaluation)([-_.0-9].*)?", re.I)


def source_files(path: str, *, format: str = "auto") -> list[Path]:
    """The files of a path, sorted by their names.

    Of a folder, those with a suffix of the format (auto: .jsonl .ndjson .json .parquet .arrow .npy
    .txt .text and, where there is none of these, .md .rst), compressed or not, without hidden ones;
    without README, LICENSE and the like; without those in or of a split called test, validation,
    val, dev or eval, where there are
    others.

    Raises:
        UserError: the path does not exist, or is a folder without such files.
    """
    root = Path(find_path(path))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(
            f"expected data at {path}, nothing is there; give a file, a folder, builtin:english, "
            f"or a hub id with data.format: hub"
        )
    there = _visible(root)
    suffixes = _SUFFIXES.get(format, (*_ROWS, ".npy", ".txt", ".text"))
    data = [file for file in there if not _ABOUT.fullmatch(file.name)]
    files = [file for file in data if data_suffix(file) in suffixes]
    if not files and format == "auto":
        files = [file for file in data if data_suffix(file) in _PROSE]
    files = files_of_data_sets(files)
    own = [
        file
        for file in files
        if not any(_OTHER_SPLIT.fullmatch(part) for part in file.relative_to(root).parts)
    ]
    if not files:
        got = ", ".join(file.name for file in there[:5]) or "none"
        raise UserError(
            f"expected files {' '.join(suffixes)}, also {' '.join(COMPRESSED)}, in the folder "
            f"{path}, got {got}; convert them to JSONL, name one file, or set data.format"
        )
    return own or files


def _visible(root: Path) -> list[Path]:
    """The files of a folder in the order of their names, hidden ones aside."""
    files = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
    visible = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    return [root / file for file in sorted(visible, key=lambda file: file.as_posix())]


def _which_files(root: Path, files: list[Path]) -> str:
    def names(found: list[Path]) -> str:
        some = ", ".join(file.relative_to(root).as_posix() for file in found[:8])
        return some + (f" and {len(found) - 8:,} more" if len(found) > 8 else "")

    left = [file for file in _visible(root) if file not in set(files)]
    return f"data: {root}: reading {names(files)}" + (f"; not {names(left)}" if left else "")


def _detect(file: Path) -> str:
    suffix = data_suffix(file)
    if suffix in _TABLES:
        first = next(table_rows(file), None)
        kind = "jsonl" if first is None else _kind(first)
        if kind is None:
            assert first is not None
            raise UserError(_wrong_keys(f"{file} row 0", first, "text, messages or tokens"))
        return kind
    if suffix not in _JSON:
        return "tokens" if suffix == ".npy" else "text"
    for number, line in numbered_lines(file):
        row = _row(file, number, line)
        kind = _kind(row)
        if kind is None:
            raise UserError(_wrong_keys(f"{file}:{number}", row, "text, messages or tokens"))
        return kind
    return "jsonl"  # an empty file


def _kind(row: Mapping[str, Any]) -> str | None:
    """The format of a row, by its keys."""
    return next((kind for kind, keys in _KEYS.items() if any(key in row for key in keys)), None)


def _text(file: Path, *, whole: bool) -> Iterator[Raw]:
    pieces = paragraphs(file)
    if whole:
        found = list(_up_to(pieces, _WHOLE_CHARACTERS))
        after = next(pieces, None)
        if after is None:
            yield Raw("\n\n".join(found), str(file))
            return
        pieces = itertools.chain(found, [after], pieces)
    for number, block in enumerate(gather(pieces, _BLOCK_CHARACTERS), 1):
        yield Raw(block, f"{file} block {number}")


def _up_to(pieces: Iterator[str], characters: int) -> Iterator[str]:
    """The first of them, until they have so many characters."""
    count = 0
    while count < characters and (piece := next(pieces, None)) is not None:
        count += len(piece)
        yield piece


def _lines(file: Path, kind: str) -> Iterator[Raw]:
    for number, line in numbered_lines(file):
        row = _row(file, number, line)
        yield _content(_with_key(row, kind, f"{file}:{number}"), kind, f"{file}:{number}")


def _table(file: Path, kind: str) -> Iterator[Raw]:
    for number, row in enumerate(table_rows(file)):
        row = {key: value for key, value in row.items() if value is not None}
        where = f"{file} row {number}"
        yield _content(_with_key(row, kind, where), kind, where)


def _with_key(row: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The row, which must have what its format needs."""
    if not any(key in row for key in _KEYS[kind]):
        raise UserError(_wrong_keys(where, row, _KEYS[kind][0]))
    return row


def _row(file: Path, number: int, line: str) -> dict[str, Any]:
    cure = 'write {"text": …}, {"messages": …} or {"tokens": …}'
    return json_line(line, f"{file}:{number}", cure=cure)


def _wrong_keys(where: str, row: dict[str, Any], key: str) -> str:
    got = ", ".join(row)[:200] or "none"
    return (
        f"{where}: expected the key {key}, got {got}; set data.format, or write "
        '{"text": …}, {"messages": [{"role": …, "content": …}, …]} or {"tokens": …}'
    )


def _content(row: dict[str, Any], kind: str, where: str) -> Raw:
    if kind == "chat":
        try:
            messages, tools, others = messages_of(row)
        except UserError as refusal:
            raise UserError(f"{where}: {refusal}") from None
        return Raw(messages, where, tools=tools, unread=tuple(others))
    if kind == "jsonl":
        value = row["text"]
        if not isinstance(value, str):
            got = shown(value)
            raise UserError(f"{where}: expected text to be a string, got {got}; fix the line")
        return Raw(value, where, unread=tuple(key for key in row if key != "text"))
    unread = tuple(key for key in row if key not in ("tokens", "targets"))
    tokens = _token_ids(row["tokens"], where)
    if row.get("targets") is None:
        return Raw(tokens, where, unread=unread)
    targets = _token_ids(row["targets"], where)
    if targets.shape != tokens.shape or targets.max(initial=0) > 1:
        raise UserError(
            f"{where}: expected targets of 0 or 1, one for each of {len(tokens)} tokens, "
            f"got {len(targets)} up to {targets.max(initial=0)}; fix the line"
        )
    return Raw(tokens, where, targets.astype(bool), unread=unread)


def _token_ids(value: Any, where: str) -> np.ndarray:
    try:
        tokens = np.asarray(value)
    except ValueError:  # lists of different lengths
        tokens = np.empty(0)
    if isinstance(value, list) and not value:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(f"{where}: expected a list of whole numbers, got {shown(value)}; fix it")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**31):
        bad = int(np.argmax((tokens < 0) | (tokens >= 2**31)))
        raise UserError(
            f"{where}: expected ids from 0 up, got {tokens[bad]} at position {bad}; "
            f"leave padding out, the packer pads"
        )
    return tokens.astype(np.int32)


def _token_array(file: Path, eos_id: int | None) -> Iterator[Raw]:
    try:
        with np.errstate(over="raise"):  # a shape whose size is no int64
            array = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # its header is Python, and fails in as many ways
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: expected a .npy array, got {problem}; save it again") from None
    beyond = file.stat().st_size - array.offset - array.nbytes
    if beyond:
        raise UserError(
            f"{file}: expected a .npy array of {array.nbytes:,} bytes, as its header says, "
            f"got {beyond:,} more; save it again"
        )
    if array.ndim == 2:
        for index, row in enumerate(array):
            yield Raw(_token_ids(row, f"{file} row {index}"), f"{file} row {index}")
        return
    if array.ndim != 1:
        raise UserError(f"{file}: expected a 1-D or 2-D array of token ids, got {array.ndim} axes")
    if eos_id is None:
        yield Raw(_token_ids(array, str(file)), str(file))
        return
    for number, (first, end) in enumerate(_ended(array, eos_id), 1):
        yield Raw(
            _token_ids(array[first:end], f"{file} document {number}"), f"{file} document {number}"
        )


def _ended(array: np.ndarray, eos_id: int) -> Iterator[tuple[int, int]]:
    """(first, end) of each run of a 1-D array up to and including eos_id."""
    begin = 0
    for start in range(0, len(array), _TOKENS):
        for end in np.flatnonzero(array[start : start + _TOKENS] == eos_id) + start + 1:
            yield begin, int(end)
            begin = int(end)
    if begin < len(array):
        yield begin, len(array)


def _hub(path: str) -> Iterator[Raw]:
    for index, row in enumerate(hub_rows(path)):
        kind = _kind(row)
        if kind is None:
            raise UserError(
                f"{path} row {index}: expected the column messages, text or tokens, "
                f"got {', '.join(row)}; rename it and give it as JSONL"
            )
        yield _content(row, kind, f"{path} row {index}")
