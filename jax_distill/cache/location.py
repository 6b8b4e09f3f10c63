"""Where a cache lies: the one module that knows kinds of paths.

Everything a cache does to storage goes through `Location`, over TensorStore's KvStore: open, list,
read, write, delete, lock, free space. Keys are relative to the cache's folder, with `/`.
`Location(path)` is a `Folder` of this machine, or a `Bucket` of an object store.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tensorstore as ts

from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import DISK_FULL, Lock, check_writable, sha256_of
from jax_distill.cache.object_lock import ObjectLock, active_owner
from jax_distill.cache.object_store import (
    DEADLINE,
    DRIVERS,
    NO_ANSWER,
    context,
    endpoint,
    reason,
    spec,
)

LOCK = "writer.lock"
WriterLock: TypeAlias = Lock | ObjectLock


class Digest(NamedTuple):
    """What a key holds: its bytes, their sha256 in hex, a stamp that any change of the content
    changes (JSON), and when it last changed, by the clock of this machine; 0 where a stamp is never
    given twice."""

    bytes: int
    sha256: str
    stamp: list[Any]
    changed: float


class Location:
    """A folder that holds one cache, there or not. `str()` of it is the path as it was given."""

    def __new__(cls, path: str) -> "Location":
        """The kind that `path` is of."""
        return super().__new__(Bucket if "://" in path else Folder)

    def __init__(self, path: str):
        """Raises UserError for a kind of path that cannot hold a cache."""
        self._shown = path

    def __getnewargs__(self) -> tuple[str]:
        return (self._shown,)  # so that a cache can be sent to another process

    def __str__(self) -> str:
        return self._shown

    name: str
    """The last part of the path, for titles and file names."""
    identity: str
    """The same for every way to write this path."""
    what_to_check: str
    """Where a read fails."""
    context: ts.Context | None = None
    """What TensorStore opens it with."""

    def spec(self, name: str = "") -> dict[str, Any]:
        """TensorStore's kvstore spec of the folder, or of the array `name` in it."""
        raise NotImplementedError

    @functools.cached_property
    def _store(self) -> ts.KvStore:
        if problem := self.problem():
            raise UserError(problem)
        return ts.KvStore.open(self.spec(), context=self.context).result()

    def problem(self) -> str:
        """Why nothing there can be reached, and what to do, in one line; "": it can be."""
        return ""

    def unreachable(self, error: Exception) -> str:
        """What a read that raised `error` should say, where it found no damage: the store does not
        answer, or does not give us the key; "" otherwise."""
        return ""

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            raise RunError(
                f"expected to {what} in the cache at {self}, got: {reason(error)}; check "
                f"{self.what_to_check}"
            ) from error

    def read(self, key: str) -> bytes | None:
        """The content of a key; None where nothing is. Raises RunError where it does not read."""
        with self._reading(f"read {key}"):
            found = self._store.read(key).result()
        return found.value if found.state == "value" else None

    def write(self, key: str, content: bytes) -> None:
        """Write a key whole or not at all, flushed when this returns. Raises as `writing`."""
        with self.writing():
            self._store.write(key, content).result()

    def keys(self, folder: str) -> list[str]:
        """Every key below `folder/`, sorted."""
        span = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" follows "/"
        with self._reading(f"list {folder}"):
            return sorted(key.decode() for key in self._store.list(span).result())

    def delete(self, key: str) -> None:
        """Delete a key; nothing happens where it is not there. Raises as `writing`."""
        with self.writing():
            self._store.write(key, None).result()

    def delete_temporary(self) -> None:
        """Delete what a killed write left beside its key. Only the writer may call this."""

    def digest(self, key: str) -> Digest | None:
        """Of a key's content, all of which is read. None where nothing is."""
        raise NotImplementedError

    def has_stamp(self, key: str, stamp: list[Any]) -> bool:
        """Whether a key is there and its stamp is this one; its content is not read."""
        raise NotImplementedError

    def local_path(self, name: str) -> Path:
        """Where a library that knows only local files may keep `name` beside the caches; UserError
        where there are none."""
        raise NotImplementedError

    def check_writable(self) -> None:
        """Refuse, before any work, a folder that cannot be made or written: UserError."""
        raise NotImplementedError

    def free_bytes(self) -> int | None:
        """Room left; None where there is no bound."""
        return None

    def lock(self) -> WriterLock:
        """One writer at a time. Raises UserError naming the other one."""
        raise NotImplementedError

    def active_writer(self) -> str | None:
        """Who writes here now, as its lock names it; None: nobody."""
        raise NotImplementedError

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A full or read-only disk is no bug of ours: RunError. TensorStore says ValueError."""
        try:
            yield
        except (ValueError, OSError) as error:
            full = any(f"os_error_code='{code}'" in str(error) for code in DISK_FULL)
            full = full or (isinstance(error, OSError) and error.errno in DISK_FULL)
            action = "make room" if full else "fix that"
            raise RunError(
                f"expected to write the cache at {self}, got: {reason(error)}; what is committed "
                f"stays good: {action} and re-run the same command to resume"
            ) from error


class Folder(Location):
    """On a file system of this machine."""

    what_to_check = "the disk and its permissions"

    def __init__(self, path: str):
        super().__init__(path)
        self._folder = Path(path).absolute()
        self.name = self._folder.name

    @property
    def identity(self) -> str:  # type: ignore[override]
        return str(self._folder.resolve())

    def spec(self, name: str = "") -> dict[str, Any]:
        return {"driver": "file", "path": f"{self._folder}/{name}{'/' if name else ''}"}

    def delete(self, key: str) -> None:
        with self.writing(), contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / key)

    def delete_temporary(self) -> None:
        for file in self._folder.rglob("*.__lock"):  # TensorStore's name for a file half written
            file.unlink(missing_ok=True)

    def _stamp(self, key: str) -> tuple[list[int], float] | None:
        try:
            found = (self._folder / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return [found.st_size, found.st_mtime_ns, found.st_ino], found.st_mtime

    def digest(self, key: str) -> Digest | None:
        stamp = self._stamp(key)  # before the content, which may change meanwhile
        if stamp is None:
            return None
        return Digest(stamp[0][0], sha256_of(self._folder / key), *stamp)

    def has_stamp(self, key: str, stamp: list[Any]) -> bool:
        try:
            found = self._stamp(key)
        except OSError:
            return False
        return found is not None and found[0] == stamp

    def local_path(self, name: str) -> Path:
        return self._folder / name

    def check_writable(self) -> None:
        check_writable(self._folder, "cache.path")

    def free_bytes(self) -> int | None:
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def lock(self) -> Lock:
        return Lock(self._folder / LOCK, f"the cache at {self}")

    def active_writer(self) -> str | None:
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


class Bucket(Location):
    """A prefix of an object store, `s3://BUCKET/…` or `gs://BUCKET/…`.

    The environment says how to reach it, as it does for the stores' own tools, so that every
    command that takes a path of a cache finds it: AWS_ENDPOINT_URL (_S3), AWS_REGION, credentials.
    """

    what_to_check = "the path, the network and the credentials"

    def __init__(self, path: str):
        super().__init__(path)
        scheme, _, rest = path.partition("://")
        self._bucket, *parts = [part for part in rest.split("/") if part] or [""]
        if scheme not in DRIVERS or not self._bucket:
            raise UserError(
                "expected a local folder, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER for the cache, "
                f"got {path}; give one of these"
            )
        self._prefix = "".join(f"{part}/" for part in parts)
        self._driver = DRIVERS[scheme]
        self._url = f"{scheme}://{self._bucket}/{self._prefix}"
        self.name = [self._bucket, *parts][-1]

    @property
    def identity(self) -> str:  # type: ignore[override]
        return f"{endpoint(self._driver)} {self._url}".strip()

    @property
    def context(self) -> ts.Context:  # type: ignore[override]
        return context()

    def spec(self, name: str = "") -> dict[str, Any]:
        path = f"{self._prefix}{name}{'/' if name else ''}"
        return spec(self._driver, self._bucket, path)

    def problem(self) -> str:
        """A missing bucket reads as one without keys, so this lists."""
        at = (
            endpoint(self._driver)
            or {"s3": "Amazon S3", "gcs": "Google Cloud Storage"}[self._driver]
        )
        span = ts.KvStore.KeyRange(LOCK, f"{LOCK}0")
        try:
            store = ts.KvStore.open(self.spec(), context=self.context).result(timeout=DEADLINE)
            store.list(span).result(timeout=DEADLINE)
        except TimeoutError:
            return (
                f"expected an answer from {at} within {DEADLINE:.0f} s for {self}, got none; check "
                "the network" + (", and AWS_ENDPOINT_URL" if self._driver == "s3" else "")
            )
        except (ValueError, OSError) as error:
            why = reason(error)
            if re.search("NoSuchBucket|bucket does not exist", why):
                return (
                    f"expected a bucket {self._bucket} at {at} for {self}, got none of that name; "
                    "create it, or correct the path"
                )
            what, check = f"to list {self}", self.what_to_check
            if re.search("PERMISSION_DENIED|UNAUTHENTICATED|AccessKey|Signature|cred", why):
                what = f"credentials that may list {self}"
                if self._driver == "s3":
                    check = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            return f"expected {what} at {at}, got: {why}; check {check}"
        return ""

    def unreachable(self, error: Exception) -> str:
        """A request that failed as often as it was retried, or was refused, is no damage."""
        if not (re.search(NO_ANSWER, str(error)) or self.problem()):
            return ""
        return (
            f"expected to read the cache at {self}, got: {reason(error)}; check "
            f"{self.what_to_check}, and re-run the same command to resume"
        )

    def digest(self, key: str) -> Digest | None:
        with self._reading(f"read {key}"):
            found = self._store.read(key).result()
        if found.state != "value":
            return None
        stamp = [found.stamp.generation.decode("latin-1")]
        return Digest(len(found.value), sha256_hex(found.value), stamp, 0.0)

    def has_stamp(self, key: str, stamp: list[Any]) -> bool:
        try:  # whatever a damaged note of it says
            found = self._store.read(key, if_not_equal=stamp[0].encode("latin-1")).result()
        except (ValueError, AttributeError, IndexError):
            return False
        return found.state == "unspecified"  # not sent, being the same

    def local_path(self, name: str) -> Path:
        raise UserError(
            f"expected a local cache.path for {name}, which is trained into it, got {self}; train "
            f"it once with a local --cache.path, and set data.tokenizer to {name} in there"
        )

    def check_writable(self) -> None:
        probe = f"probe-{uuid.uuid4()}"
        store = self._store
        try:
            store.write(probe, b"").result(timeout=DEADLINE)
            store.write(probe, None).result(timeout=DEADLINE)
        except (ValueError, OSError) as error:
            raise UserError(
                f"expected cache.path to be a bucket that can be written and deleted from, got "
                f"{self} ({reason(error)}); check {self.what_to_check}"
            ) from None

    def lock(self) -> ObjectLock:
        return ObjectLock(self._store, LOCK, f"the cache at {self}", f"{self._url}{LOCK}")

    def active_writer(self) -> str | None:
        return active_owner(self.read(LOCK))


def sha256_hex(content: bytes) -> str:
    """The sha256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()
