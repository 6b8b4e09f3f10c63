"""The hashes of a folder's files, written beside it: what proves later that nothing has changed."""

import json
from pathlib import Path

from jax_distill.base.files import sha256_of, write_json


def write_hashes(folder: Path, record: Path) -> None:
    """Write size and sha256 of every file below `folder` to `record`, whole or not at all."""
    files = {name: _describe(folder / name) for name in _names(folder)}
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, {"files": files})


def first_change(folder: Path, record: Path) -> str | None:
    """The first file of `folder` that is not as `record` says, and how; None where all are.

    Raises:
        ValueError: the record itself is damaged.
    """
    try:
        files = json.loads(record.read_text("utf-8"))["files"]
        expected = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{record}: {type(error).__name__}: {error}") from error
    for name in sorted(expected.keys() | set(_names(folder))):
        file = folder / name
        if name not in expected:
            return f"{name}: not there when it was saved"
        if not file.is_file():
            return f"{name}: missing"
        size, digest = expected[name]
        if file.stat().st_size != size:
            return f"{name}: {file.stat().st_size} bytes, saved with {size}"
        if sha256_of(file) != digest:
            return f"{name}: other content than was saved"
    return None


def _names(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    )


def _describe(file: Path) -> dict[str, int | str]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
