"""Where a cache lies: the one module that knows kinds of paths.

Everything a cache does to storage goes through `Location`, over TensorStore's KvStore: open, list,
read, write, delete, lock, free space. Keys are relative to the cache's folder, with `/`.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import DISK_FULL, Lock, check_writable, sha256_of
from jax_distill.base.json_object import one_line

LOCK = "writer.lock"


class Location:
    """A folder that holds one cache, there or not. `str()` of it is the path as it was given."""

    def __init__(self, path: str):
        """Raises UserError for a kind of path that caches cannot lie on."""
        if "://" in path:
            raise UserError(
                f"expected a local folder for the cache, got {path}; give a path on this machine"
            )
        self._shown = path
        self._folder = Path(path).absolute()

    def __str__(self) -> str:
        return self._shown

    @property
    def name(self) -> str:
        """The last part of the path, for titles and file names."""
        return self._folder.name

    @property
    def identity(self) -> str:
        """The same for every way to write this path."""
        return str(self._folder.resolve())

    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's kvstore spec of the folder, or of the array `name` in it."""
        return {"driver": "file", "path": f"{self._folder}/{name}{'/' if name else ''}"}

    @functools.cached_property
    def _store(self) -> ts.KvStore:
        return ts.KvStore.open(self.spec()).result()

    def read(self, key: str) -> bytes | None:
        """The content of a key; None where nothing is. Raises RunError where it does not read."""
        try:
            found = self._store.read(key).result()
        except (ValueError, OSError) as error:
            raise RunError(
                f"expected to read {key} in the cache at {self}, got: {one_line(error)}; check the "
                "disk and its permissions"
            ) from error
        return found.value if found.state == "value" else None

    def write(self, key: str, content: bytes) -> None:
        """Write a key whole or not at all, flushed when this returns."""
        self._store.write(key, content).result()

    def keys(self, folder: str) -> list[str]:
        """Every key below `folder/`, sorted."""
        span = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" follows "/"
        try:
            return sorted(key.decode() for key in self._store.list(span).result())
        except (ValueError, OSError) as error:
            raise RunError(
                f"expected to list {folder} in the cache at {self}, got: {one_line(error)}; check "
                "the disk and its permissions"
            ) from error

    def delete(self, key: str) -> None:
        """Delete a key; nothing happens where it is not there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / key)

    def delete_temporary(self) -> None:
        """Delete what a killed write left beside its key. Only the writer may call this."""
        for file in self._folder.rglob("*.__lock"):  # TensorStore's name for a file half written
            file.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        """Bytes of a key; None where nothing is."""
        try:
            return (self._folder / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sha256(self, key: str) -> str:
        """The sha256 of a key that is there, in hex."""
        return sha256_of(self._folder / key)

    def stamp(self, key: str) -> tuple[list[int], float] | None:
        """What changes whenever a key's content does, and when that was (seconds): the size, the
        time of the last change in ns, the inode. None where there is no such thing."""
        try:
            found = (self._folder / key).stat()
        except OSError:
            return None
        return [found.st_size, found.st_mtime_ns, found.st_ino], found.st_mtime

    def local_path(self, name: str) -> Path:
        """Where a library that knows only local files may keep `name` beside the caches."""
        return self._folder / name

    def check_writable(self) -> None:
        """Refuse, before any work, a folder that cannot be made or written: UserError."""
        check_writable(self._folder, "cache.path")

    def free_bytes(self) -> int | None:
        """Room left; None where there is no bound."""
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def lock(self) -> Lock:
        """One writer at a time. Raises UserError naming the other one."""
        return Lock(self._folder / LOCK, f"the cache at {self}")

    def active_writer(self) -> str | None:
        """Who writes here now, as its lock names it; None: nobody."""
        owner = self._folder / f"{LOCK}.owner"
        try:
            handle = os.open(self._folder / LOCK, os.O_RDONLY)
        except OSError:
            return None
        try:
            name = owner.read_text("utf-8")
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return name.strip() or "another process"
        except OSError:  # no owner: nobody writes; or locks do not work here
            return None
        finally:
            os.close(handle)
        return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A full or read-only disk is no bug of ours: RunError. TensorStore says ValueError."""
        try:
            yield
        except (ValueError, OSError) as error:
            reason = one_line(error)
            full = any(f"os_error_code='{code}'" in str(error) for code in DISK_FULL)
            full = full or (isinstance(error, OSError) and error.errno in DISK_FULL)
            action = "make room" if full else "fix that"
            raise RunError(
                f"expected to write the cache at {self}, got: {reason}; what is committed stays "
                f"good: {action} and re-run the same command to resume"
            ) from error


def sha256_hex(content: bytes) -> str:
    """The sha256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()
