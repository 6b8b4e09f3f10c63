"""The sources of a corpus: which they are, and what tells one corpus from another."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_distill.base.errors import RunError, UserError
from jax_distill.config import Source
from jax_distill.data.builtin import builtin_versions
from jax_distill.data.readers import hub_fingerprint, source_files
from jax_distill.data.tokenizer import Tokenizer

# To be raised when the same input comes to give other documents.
_READER_VERSION = 3
_BUILTIN_VERSION = 1  # where all text is built in

Path_ = str | Sequence[Source]


def sources_of(path: Path_) -> list[Source]:
    """`data.path` as a list. Raises UserError for weights that make no sense."""
    sources = [Source(path, None)] if isinstance(path, str) else list(path)
    weights = [source.weight for source in sources]
    if not sources:
        raise UserError("expected data.path to name a source, got an empty list")
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        raise UserError(f"expected a weight for every source or for none, got {weights}")
    for source in sources:
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise UserError(f"expected a weight above 0 for {source.path}, got {source.weight}")
    return sources


def names_of(sources: list[Source]) -> str:
    """The sources in a message."""
    return ", ".join(source.path for source in sources)


def fingerprint(
    path: Path_, *, format: str, tokenizer: Tokenizer, settings: Mapping[str, Any]
) -> str:
    """sha256 of what decides a cache's rows: the sources' bytes, the tokenizer, the settings.

    Where the sources lie is no part of it, nor are the files' names. Built-in text goes in as the
    versions that it is made from, a hub data set as its name and its files' revision. A GB takes
    about a second.

    Args:
        settings: the rest, as JSON values: heldout_fraction, sequence_length, packing, max_rows, …

    Raises:
        UserError: a source is not there.
    """
    sources = sources_of(path)
    is_builtin = all(source.path.startswith("builtin:") for source in sources)
    version = _BUILTIN_VERSION if is_builtin else _READER_VERSION
    facts: list[Any] = [version, format, tokenizer.files_hash, dict(settings)]
    for source in sources:
        facts.append(source.weight if source.weight is None else float(source.weight))
        if source.path.startswith("builtin:"):
            facts.append([source.path, builtin_versions()])
        elif format == "hub":
            facts.append([source.path, hub_fingerprint(source.path)])
        else:
            facts.append([_file_hash(file) for file in source_files(source.path, format=format)])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def file_stamps(path: Path_, *, format: str) -> dict[str, tuple[int, int]]:
    """File → its size and the time of its last change in ns, of the sources that are files."""
    files = [
        file
        for source in sources_of(path)
        if not source.path.startswith("builtin:") and format != "hub"
        for file in source_files(source.path, format=format)
    ]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def check_unchanged(stamps: Mapping[str, tuple[int, int]]) -> None:
    """Refuse files that are not as they were at `file_stamps`: a stream reads them several times,
    and its rows would not be those of any one text.

    Raises:
        RunError: the first such file is named.
    """
    for name, stamp in stamps.items():
        file = Path(name)
        now = (file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else None
        if now != stamp:
            got = f"{now[0]:,} bytes and another time" if now else "no file any more"
            raise RunError(
                f"expected {name} as it was when it was first read ({stamp[0]:,} bytes), got "
                f"{got}; restore it and re-run the same command, or leave it alone and set another "
                "cache.path"
            )


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
