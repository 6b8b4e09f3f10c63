"""Data sets of the hub: whole, or their first rows, kept on this machine as Arrow files."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import one_line

_FIRST = re.compile(r"(.*)\[:([0-9]+)\]")


def hub_fingerprint(path: str) -> str:
    """What tells a data set from another: its name, split and the revision of its files, as
    `datasets` has it; of the first rows of one, their bytes."""
    rows = hub_rows(path)
    if not _FIRST.fullmatch(path):
        return str(rows._fingerprint)
    digest = hashlib.sha256()
    for file in rows.cache_files:
        digest.update(Path(file["filename"]).read_bytes())
    return digest.hexdigest()


def hub_rows(path: str) -> Any:
    """The rows of `owner/name`, `owner/name:config` or `owner/name:config:split` (default: train):
    a `datasets.Dataset`, whose files are mapped into memory.

    `split[:n]` streams the first n rows, and downloads no more than these take; other slices
    (`train[:1%]`) are the hub's own, for which it is downloaded whole. Either is downloaded once.

    Raises:
        UserError: no package `datasets`, no network, no such set or split.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"expected the package datasets for the hub data set {path}; "
            f"run: pip install 'jax-distill[hub]'"
        ) from None
    first = _FIRST.fullmatch(path)
    whole, count = (first[1], int(first[2])) if first else (path, None)
    name, config, split = (whole.split(":", 2) + ["", ""])[:3]
    arguments = {"name": name, "config": config or None, "split": split or "train"}
    try:
        if count is None:
            return datasets.load_dataset(name, config or None, split=split or "train")
        # Kept by the hash of these arguments.
        return datasets.Dataset.from_generator(
            _first_rows, gen_kwargs={**arguments, "count": count}, split=split or "train"
        )
    except Exception as error:  # many kinds: no network, no such set, no such split
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise UserError(
            f"expected the hub data set {path}, got: {one_line(error)[:200]}; check its name and "
            "the network"
        ) from None


def _first_rows(name: str, config: str | None, split: str, count: int) -> Iterator[dict[str, Any]]:
    import datasets

    yield from datasets.load_dataset(name, config, split=split, streaming=True).take(count)
