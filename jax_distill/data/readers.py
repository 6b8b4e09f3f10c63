"""Files to raw documents: text, JSONL (text, chat, tokens), token arrays, hub data sets.

| format | what is a document |
|---|---|
| text | a folder: each file in it; one file: runs of paragraphs of about 20,000 characters |
| jsonl | each line's `text` |
| chat | each line's `messages`: a list of {role, content} |
| tokens | each line's `tokens` (beside them, if given, `targets`: 0 or 1 each) |
| tokens, .npy | a row of a 2-D array; a run of a 1-D array up to and including EOS |
| hub | each row of the data set's `messages`, `text` or `tokens` column |

Text is UTF-8, a leading BOM and CRLF line ends are taken away. Empty lines of JSONL are skipped.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_distill.config import Refusal, find_path
from jax_distill.data.builtin import gather, read_builtin
from jax_distill.data.document import Raw

FORMATS = ("auto", "text", "jsonl", "chat", "tokens", "hub")
_BLOCK_CHARACTERS = 20_000
_KEYS = {"jsonl": "text", "chat": "messages", "tokens": "tokens"}


def read_raw(path: str, *, format: str, eos_id: int | None = None) -> list[Raw]:
    """The documents of one source, in the order of the files' names and of their lines.

    Args:
        path: file, folder (its files, recursively, hidden ones aside), `builtin:…` or, with format
            hub, `owner/name`, `owner/name:config` or `owner/name:config:split` (default: train;
            slices such as `train[:1%]` are the hub's own).
        format: one of `FORMATS`. `auto`, file by file: .npy is tokens; .jsonl, .ndjson and .json go
            by the keys of their first line; anything else is text.
        eos_id: ends the documents of a 1-D token array.

    Raises:
        Refusal: nothing there, unknown format, or a line that is not what the format says.
    """
    if format not in FORMATS:
        raise Refusal(f"expected data.format to be one of {', '.join(FORMATS)}, got {format}")
    if path.startswith("builtin:"):
        return read_builtin(path)
    if format == "hub":
        return list(_hub(path))
    raws: list[Raw] = []
    root = Path(find_path(path))
    for file in source_files(path):
        kind = _detect(file) if format == "auto" else format
        if kind == "tokens" and file.suffix == ".npy":
            raws += _token_array(file, eos_id)
        elif kind == "text":
            raws += _text(file, whole=root.is_dir())
        else:
            raws += _lines(file, _KEYS[kind])
    return raws


def source_files(path: str) -> list[Path]:
    """The files of a path, sorted by their names.

    Raises:
        Refusal: the path does not exist, or is a folder without files.
    """
    root = Path(find_path(path))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise Refusal(
            f"expected data at {path}, nothing is there; give a file, a folder, builtin:english, "
            f"or a hub id with data.format: hub"
        )
    files = [
        (place.as_posix(), root / place)
        for place in (file.relative_to(root) for file in root.rglob("*") if file.is_file())
        if not any(part.startswith(".") for part in place.parts)
    ]
    if not files:
        raise Refusal(f"expected files in the folder {path}, it has none")
    return [file for _, file in sorted(files)]


def _detect(file: Path) -> str:
    if file.suffix not in (".jsonl", ".ndjson", ".json"):
        return "tokens" if file.suffix == ".npy" else "text"
    for number, line in _numbered_lines(file):
        row = _row(file, number, line)
        for kind, key in (("chat", "messages"), ("jsonl", "text"), ("tokens", "tokens")):
            if key in row:
                return kind
        raise Refusal(_wrong_keys(file, number, row, "text, messages or tokens"))
    return "jsonl"  # an empty file


def _text(file: Path, *, whole: bool) -> list[Raw]:
    text = _decoded(file, file.read_bytes())
    if whole:
        return [Raw(text, str(file))]
    paragraphs = text.split("\n\n")
    blocks = gather(paragraphs, _BLOCK_CHARACTERS)
    return [Raw(block, f"{file} block {number}") for number, block in enumerate(blocks, 1)]


def _decoded(file: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Refusal(
            f"{file}:{line}: expected UTF-8, got byte 0x{data[error.start]:02x}; "
            f"convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None
    return text.replace("\r\n", "\n")


def _lines(file: Path, key: str) -> Iterator[Raw]:
    for number, line in _numbered_lines(file):
        row = _row(file, number, line)
        if key not in row:
            raise Refusal(_wrong_keys(file, number, row, key))
        yield _content(row, key, f"{file}:{number}")


def _numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, from 1. Bytes are split, so that U+2028 ends no line."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                byte = line[error.start]
                raise Refusal(
                    f"{file}:{number}: expected UTF-8, got byte 0x{byte:02x}; convert the file"
                ) from None
            if text:
                yield number, text


def _row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise Refusal(
            f"{file}:{number}: expected one JSON object a line, got {line[:40]!r} ({error}); "
            f"mend or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise Refusal(
            f"{file}:{number}: expected a JSON object, got {line[:40]!r}; "
            f'write {{"text": …}}, {{"messages": …}} or {{"tokens": …}}'
        )
    return row


def _wrong_keys(file: Path, number: int, row: dict[str, Any], key: str) -> str:
    got = ", ".join(row) or "none"
    return f"{file}:{number}: expected the key {key}, got {got}; rename it, or set data.format"


def _content(row: dict[str, Any], key: str, where: str) -> Raw:
    value = row[key]
    if key == "text" and not isinstance(value, str):
        raise Refusal(f"{where}: expected text to be a string, got {value!r:.40}; mend the line")
    if key == "messages" and not isinstance(value, list):
        raise Refusal(f"{where}: expected messages to be a list, got {value!r:.40}; mend the line")
    if key == "tokens":
        tokens = _token_ids(value, where)
        if row.get("targets") is None:
            return Raw(tokens, where)
        targets = _token_ids(row["targets"], where)
        if targets.shape != tokens.shape or targets.max(initial=0) > 1:
            raise Refusal(
                f"{where}: expected targets of 0 or 1, one for each of {len(tokens)} tokens, "
                f"got {len(targets)} up to {targets.max(initial=0)}; mend the line"
            )
        return Raw(tokens, where, targets.astype(bool))
    return Raw(value, where)


def _token_ids(value: Any, where: str) -> np.ndarray:
    try:
        tokens = np.asarray(value)
    except ValueError:  # lists of different lengths
        tokens = np.empty(0)
    if isinstance(value, list) and not value:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise Refusal(f"{where}: expected a list of whole numbers, got {value!r:.40}; mend it")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 2**31):
        bad = int(np.argmax((tokens < 0) | (tokens >= 2**31)))
        raise Refusal(
            f"{where}: expected ids from 0 up, got {tokens[bad]} at position {bad}; "
            f"leave padding out, the packer pads"
        )
    return tokens.astype(np.int32)


def _token_array(file: Path, eos_id: int | None) -> list[Raw]:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise Refusal(f"{file}: expected a .npy array, got {error}; save it anew") from None
    if array.ndim == 2:
        rows = ((f"{file} row {index}", row) for index, row in enumerate(array))
        return [Raw(_token_ids(row, where), where) for where, row in rows]
    if array.ndim != 1:
        raise Refusal(f"{file}: expected a 1-D or 2-D array of token ids, got {array.ndim} axes")
    tokens = _token_ids(array, str(file))
    if eos_id is None:
        return [Raw(tokens, str(file))]
    ends = np.flatnonzero(tokens == eos_id) + 1
    pieces = [piece for piece in np.split(tokens, ends) if piece.size]
    return [Raw(piece, f"{file} document {number}") for number, piece in enumerate(pieces, 1)]


def hub_fingerprint(path: str) -> str:
    """What `datasets` keeps a data set apart by: its name, split and the revision of its files."""
    return str(_hub_rows(path)._fingerprint)


def _hub(path: str) -> Iterator[Raw]:
    for index, row in enumerate(_hub_rows(path)):
        key = next((key for key in ("messages", "text", "tokens") if key in row), None)
        if key is None:
            raise Refusal(
                f"{path} row {index}: expected the column messages, text or tokens, "
                f"got {', '.join(row)}; rename it and give it as JSONL"
            )
        yield _content(row, key, f"{path} row {index}")


def _hub_rows(path: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise Refusal(
            f"expected the package datasets for the hub data set {path}; "
            f"run: pip install 'jax-distill[hub]'"
        ) from None
    name, config, split = (path.split(":", 2) + ["", ""])[:3]
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # many kinds: no network, no such set, no such split
        reason = " ".join(str(error).split())[:200]
        raise Refusal(
            f"expected the hub data set {path}, got: {reason}; check its name and the network"
        ) from None
