"""The lock of a writer on an object store, where no kernel releases it when a process ends."""

import contextlib
import json
import os
import platform
import time
import uuid
from pathlib import Path
from typing import Any

import tensorstore as ts

from jax_distill.base.errors import UserError

RELEASE_SECONDS = 10.0
ATTEMPTS = 10  # to take a lock that others want too


class ObjectLock:
    """One writer at a time has the object `key`, because the store creates it once alone.

    A killed writer leaves it behind. On the same machine the next one sees that the process is gone
    and takes over; from another machine nobody can see that, so that a person decides.
    """

    def __init__(self, store: ts.KvStore, key: str, what: str, url: str) -> None:
        """Take the lock at once.

        Raises:
            UserError: another process has it, or had it on another machine; the store never grants
                it.
            ValueError: the store does not answer.
        """
        self._store, self._key = store, key
        self._generation: bytes | None = None
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = {
            "owner": f"process {os.getpid()} on {platform.node()}",
            "since": since,
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "machine": _machine(),
            "token": uuid.uuid4().hex,
        }
        content = json.dumps(owner, indent=1).encode()
        for _ in range(ATTEMPTS):
            found = store.read(key).result()
            if found.value == content:  # written, though its answer was lost on the way
                self._generation = found.stamp.generation
                return
            if other := active_owner(found.value if found.state == "value" else None):
                raise UserError(
                    f"{what} is in use by {other}; wait for it to finish, or choose another "
                    f"folder; if it is no more, delete {url} and re-run the same command"
                )
            # Nobody's: it is ours unless somebody else is quicker.
            written = store.write(key, content, if_equal=found.stamp.generation).result()
            if written.generation:
                self._generation = written.generation
                return
        raise UserError(
            f"expected to create {url}, got {ATTEMPTS} refusals and no lock of another writer; "
            "see that its bucket is there and knows If-None-Match and If-Match"
        )

    def release(self) -> None:
        """Let go of it; twice does no harm, and so does a store that no longer answers: the next
        writer sees that this process is gone."""
        generation, self._generation = self._generation, None
        if generation is not None:
            with contextlib.suppress(ValueError, OSError):
                # Only ours: somebody may have deleted it and taken theirs.
                self._store.write(self._key, None, if_equal=generation).result(
                    timeout=RELEASE_SECONDS
                )


def active_owner(content: bytes | None) -> str | None:
    """Whose lock that is; None where nobody has it, or a process of this machine that is gone."""
    if content is None:
        return None
    try:
        lock: dict[str, Any] = json.loads(content)
        name = f"{lock['owner']} since {lock['since']}"
        started = _started(lock["pid"])
        is_gone = lock["machine"] == _machine() and started not in (lock["started"], RUNNING)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "another process"  # a lock all the same
    return None if is_gone else name


RUNNING = "running"


def _machine() -> str:
    """The same for every process that sees the same process ids, until the machine starts again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return f"{platform.node()} {uuid.getnode():x}"


def _started(pid: int) -> str:
    """When the process of that number began, so that another of the same number is told apart; ""
    where there is none. RUNNING where it cannot be said: no /proc, or one that hides other users'
    processes."""
    try:
        stat = Path(f"/proc/{pid:d}/stat").read_text("utf-8")
    except OSError:
        try:
            os.kill(pid, 0)
        except PermissionError:  # another user's
            return RUNNING
        except OSError:
            return ""
        return RUNNING
    # After the name, which may hold anything: the state, and 19 fields later the start.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]  # a zombie has ended, though nobody asked how
