"""Whether a cache's files are those that were committed: checked before training, and by audit.

crc32c inside a shard proves a chunk, not its place: two shard files swapped would read without an
error. Size and sha256 in the commit bind content and place.
"""

import contextlib
import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax_distill.base.console import progress, say
from jax_distill.base.files import user_cache_folder, write_json
from jax_distill.cache.arrays import metadata_key, shard_file
from jax_distill.cache.documents import MANIFEST, Commits, Head
from jax_distill.cache.location import Digest, Location, sha256_hex
from jax_distill.cache.manifest import Manifest

REMEMBERED_BYTES = 16 << 20  # a smaller cache is read faster than it is worth remembering
ANNOUNCED_BYTES = 1 << 29
SETTLED_SECONDS = 2.0  # a file changed later than that may change again under the same stamp


def metadata_problems(
    location: Location, manifest: Manifest, head_key: str, head: Head, commits: Commits
) -> dict[str, str]:
    """Key → what is wrong with it, of the manifest, each zarr.json and each commit that the head
    (at `head_key`) names, and of the head's counts."""
    found = dict(commits.damaged)
    uncommitted = False
    for key, expected in head.metadata.items():
        if key in found:
            continue
        sha256 = commits.sha256.get(key)
        if sha256 is None:
            content = location.read(key)
            sha256 = None if content is None else sha256_hex(content)
        if sha256 is None and key.startswith("commits/"):
            uncommitted = True  # not finished any more, but nothing that is there is wrong
        elif sha256 != expected and not _is_longer(location, key, expected, head.rows):
            found[key] = "missing" if sha256 is None else _other("sha256", sha256, expected)
    if head.finished and not found and not uncommitted:
        needed = {MANIFEST, *(metadata_key(name) for name in manifest.stored_shapes())}
        counted = Head.of(
            head.rows, head.metadata, commits.whole, finished=True, growth=head.growth
        )
        if head != counted or not needed | set(commits.sha256) <= head.metadata.keys():
            found[head_key] = "its counts are not those of the commits"
    return found


def _is_longer(location: Location, key: str, expected: str, rows: int) -> bool:
    """Whether a zarr.json is the one with this sha256 but for a number of rows beyond `rows`: a
    growth was stopped between it and the head."""
    content = longer_array(location.read(key) or b"", rows) if key.endswith("zarr.json") else b""
    return sha256_hex(content) == expected


def longer_array(content: bytes, rows: int) -> bytes:
    """The zarr.json of more than N `rows` as it was with N of them; b"" for any other content."""
    try:
        values = json.loads(content)
        if not rows < values["shape"][0]:
            return b""
        values["shape"][0] = rows
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return b""
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()


def shard_problems(
    location: Location, manifest: Manifest, commits: Commits, *, remember: bool
) -> dict[str, tuple[int, str]]:
    """Key → (shard, what is wrong with it) of every committed shard's file that is missing, or not
    as committed.

    remember: pass over files whose stamp (size, time of change in ns, inode; an object store's
    generation) is the one that they had when they were last found right; noted in the user cache
    folder.
    """
    expected = {
        shard_file(manifest, name, shard): (shard, file)
        for shard, commit in commits.whole.items()
        for name, file in commit.files.items()
    }
    size = sum(file["bytes"] for _, file in expected.values())
    remember = remember and size >= REMEMBERED_BYTES
    memory = _memory_file(location)
    known = _read_memory(memory) if remember else {}

    def as_known(key: str) -> bool:
        """What was noted is [*stamp, sha256]."""
        noted = known.get(key)
        if type(noted) is not list or noted[-1:] != [expected[key][1]["sha256"]]:
            return False
        return location.has_stamp(key, noted[:-1])

    begin = time.time()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16), thread_name_prefix="sha256") as pool:
        same = dict(zip(expected, pool.map(as_known, expected), strict=True))
        todo = [key for key in expected if not same[key]]
        left = sum(expected[key][1]["bytes"] for key in todo)
        if left >= ANNOUNCED_BYTES:
            say(f"checking {left / 1e9:.1f} GB of the cache at {location} against its commits")
        found = progress(
            pool.map(lambda key: _check(location, key, expected[key][1]), todo),
            "checking the cache",
            total=len(todo),
            show=left >= ANNOUNCED_BYTES,
        )
        results = dict(zip(todo, found, strict=True))
    if remember and todo:
        right = {key: known[key] for key in expected if same[key]} | {
            key: [*digest.stamp, digest.sha256]
            for key, (problem, digest) in results.items()
            if not problem and digest and digest.changed < begin - SETTLED_SECONDS
        }
        with contextlib.suppress(OSError):  # then the next opening takes as long as this one
            memory.parent.mkdir(parents=True, exist_ok=True)
            write_json(memory, {"cache": location.identity, "files": right})
    return {key: (expected[key][0], problem) for key, (problem, _) in results.items() if problem}


def _check(location: Location, key: str, expected: dict[str, Any]) -> tuple[str, Digest | None]:
    """(what is wrong with a shard's file or "", what it holds)."""
    try:
        found = location.digest(key)
    except OSError as error:
        return f"does not read ({error.strerror})", None
    if found is None:
        return "missing", None
    if found.bytes != expected["bytes"]:
        return f"{found.bytes} bytes, committed with {expected['bytes']}", found
    if found.sha256 != expected["sha256"]:
        return _other("sha256", found.sha256, expected["sha256"]), found
    return "", found


def _other(what: str, got: str, expected: str) -> str:
    return f"{what} {got[:12]}…, committed with {expected[:12]}…"


def _memory_file(location: Location) -> Path:
    name = hashlib.sha256(location.identity.encode()).hexdigest()[:32]
    return user_cache_folder() / "verified" / f"{name}.json"


def _read_memory(file: Path) -> dict[str, list[Any]]:
    """Nothing known, where the file is missing or says anything else."""
    try:
        files = json.loads(file.read_text("utf-8"))["files"]
        return files if type(files) is dict else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return {}
