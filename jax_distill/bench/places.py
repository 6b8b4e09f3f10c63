"""Where a benchmark writes. Imports neither jax nor torch."""

import contextlib
from collections.abc import Collection
from pathlib import Path

from jax_distill.config import check_new_file


def check_place(path: Path | None, option: str, suffixes: Collection[str] = ()) -> None:
    """Refuse, before any work, a file that could not be written at its end; its folder is made.

    Raises:
        Refusal: it is a folder, in no folder, not to be written, or of another suffix.
    """
    if path is None:
        return
    with contextlib.suppress(OSError):  # the check says what is wrong with it
        path.parent.mkdir(parents=True, exist_ok=True)
    check_new_file(path, option, suffixes)
