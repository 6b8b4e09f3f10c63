"""The JSON files of a cache beside its manifest: commits and heads, checked where they enter."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from jax_distill.base.errors import RunError
from jax_distill.base.json_object import one_line
from jax_distill.cache.layout import Layout
from jax_distill.cache.location import Location, sha256_hex
from jax_distill.cache.manifest import Manifest, digest, parse_object, whole_number

MANIFEST = "manifest.json"
OPEN_ROWS = 1 << 40
"""As many rows as its arrays are made for while a cache's N is not known."""
# Whatever bytes do: not JSON, other types, missing names, deep nesting, huge numbers.
JSON_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError),
    *(RecursionError, OverflowError, MemoryError),
)
RERUN = "re-run the command that wrote it"


def commit_key(shard: int) -> str:
    """The key of a shard's commit."""
    return f"commits/{shard:06d}.json"


def head_key(number: int) -> str:
    """The key of a head."""
    return f"commits/head-{number:06d}.json"


@contextlib.contextmanager
def reading(location: Location, key: str, action: str = RERUN) -> Iterator[None]:
    """The one place where a damaged JSON file of a cache becomes a RunError that names it."""
    try:
        yield
    except JSON_ERRORS as error:
        raise RunError(
            f"expected a whole {key} in the cache at {location}, got one that does not read "
            f"({type(error).__name__}: {one_line(error)}); {action}"
        ) from error


@dataclass(frozen=True)
class Commit:
    """What a shard holds; the shard counts once this is written.

    Attributes:
        shard, first_row, last_row: which rows (both inclusive).
        tokens: without padding. targets: positions whose mask is 1.
        smallest_token, largest_token: of every id in `tokens`, padding included.
        clamped_gaps: entries stored at float16's largest gap.
        files: array → size and sha256 of the shard's file in it.
        resume: where its writer can begin to make the rows that come after, in the writer's words;
            None where it needs no such thing. Not in the file then.
    """

    shard: int
    first_row: int
    last_row: int
    tokens: int
    targets: int
    smallest_token: int
    largest_token: int
    clamped_gaps: int
    files: dict[str, dict[str, Any]]
    resume: dict[str, Any] | None = None

    @classmethod
    def parse(
        cls,
        content: bytes,
        *,
        key: str,
        manifest: Manifest,
        rows: int | None,
        short: Mapping[int, int] = MappingProxyType({}),
    ) -> Self:
        """Raises one of JSON_ERRORS where it is not the commit `key` of such a cache, whose arrays
        have `rows` (None: not known). short: shard → its rows, of those before a growth."""
        commit = cls(**_without_sha256(parse_object(content)))
        size, top_k = manifest.shard_rows, manifest.top_k
        most = OPEN_ROWS if rows is None else rows
        shard = whole_number("shard", commit.shard, 0, (most - 1) // size)
        if key != commit_key(shard):
            raise ValueError(f"expected the commit of {key}, got that of shard {shard}")
        first = shard * size
        last = min(first + short.get(shard, size), most) - 1
        whole_number("first_row", commit.first_row, first, first)
        is_open = rows is None and shard not in short
        last = whole_number("last_row", commit.last_row, first if is_open else last, last)
        positions = (last - first + 1) * manifest.sequence_length
        whole_number("tokens", commit.tokens, 0, positions)
        whole_number("targets", commit.targets, 0, positions)
        largest = whole_number("largest_token", commit.largest_token, 0, manifest.vocab_size - 1)
        whole_number("smallest_token", commit.smallest_token, 0, largest)
        whole_number("clamped_gaps", commit.clamped_gaps, 0, positions * top_k)
        if commit.resume is not None and type(commit.resume) is not dict:
            raise TypeError(f"resume: expected a JSON object, got {commit.resume!r}")
        if commit.files.keys() != manifest.stored_shapes().keys():
            raise ValueError(f"files: expected {sorted(manifest.stored_shapes())}")
        for name, file in commit.files.items():
            if file.keys() != {"sha256", "bytes"}:
                raise ValueError(f"files.{name}: expected sha256 and bytes, got {sorted(file)}")
            whole_number(f"files.{name}.bytes", file["bytes"], 1, 1 << 62)
            check_sha256(f"files.{name}.sha256", file["sha256"])
        return commit

    def to_json(self) -> bytes:
        """The file's content, its own sha256 among it."""
        values = asdict(self)
        if self.resume is None:
            del values["resume"]
        return _with_sha256(values)


def _with_sha256(values: dict[str, Any]) -> bytes:
    return json.dumps(values | {"sha256": digest(values)}, indent=1).encode()


def _without_sha256(values: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError where the content is not the one that was written."""
    stored = values.pop("sha256")
    if stored != digest(values):
        raise ValueError("its sha256 is not that of its content")
    return values


def check_sha256(name: str, value: Any) -> str:
    """`value`, if it is a sha256 in hex; else ValueError."""
    if type(value) is not str or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ValueError(f"{name}: expected a sha256 in hex, got {str(value)[:80]!r}")
    return value


@dataclass(frozen=True)
class Head:
    """The state of a cache as a whole. The last whole head counts; older ones are history.

    Attributes:
        rows: N; 0 while it is not known. Of a cache that has grown, the arrays' rows (`Layout`).
        growth: of each time it has grown, `rows` before that and the text's `data_fingerprint`.
        finished: whether every shard is committed; the counts are of those in `metadata`.
        metadata: key → sha256 of the manifest, each array's zarr.json and, once finished, each
            commit.
    """

    rows: int
    finished: bool
    tokens: int
    targets: int
    clamped_gaps: int
    smallest_token: int
    largest_token: int
    metadata: dict[str, str]
    growth: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        rows: int,
        metadata: dict[str, str],
        commits: dict[int, Commit],
        *,
        finished: bool,
        growth: tuple[dict[str, Any], ...] = (),
    ) -> Self:
        """The head of these commits."""
        each = commits.values()
        return cls(
            rows=rows,
            finished=finished,
            tokens=sum(commit.tokens for commit in each),
            targets=sum(commit.targets for commit in each),
            clamped_gaps=sum(commit.clamped_gaps for commit in each),
            smallest_token=min((commit.smallest_token for commit in each), default=0),
            largest_token=max((commit.largest_token for commit in each), default=0),
            metadata=dict(sorted(metadata.items())),
            growth=growth,
        )

    def layout(self, shard_rows: int) -> Layout:
        """Where the rows stand."""
        return Layout(self.rows, [each["rows"] for each in self.growth], shard_rows)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Raises one of JSON_ERRORS where it is not a whole head."""
        values = _without_sha256(parse_object(content))
        head = cls(**values | {"growth": tuple(values.get("growth", ()))})
        if type(head.finished) is not bool:
            raise TypeError(f"finished: expected true or false, got {head.finished!r}")
        whole_number("rows", head.rows, int(head.finished), OPEN_ROWS)
        before = 0
        for growth in head.growth:
            before = whole_number("growth.rows", growth["rows"], before + 1, head.rows - 1)
            check_sha256("growth.data_fingerprint", growth["data_fingerprint"])
        for each in fields(cls):
            if each.name not in ("rows", "finished", "metadata", "growth"):
                whole_number(each.name, getattr(head, each.name), 0, 1 << 62)
        for key, sha256 in head.metadata.items():
            check_sha256(key, sha256)
        return head

    def to_json(self) -> bytes:
        """The file's content, its own sha256 among it."""
        values = asdict(self)
        if not self.growth:
            del values["growth"]
        return _with_sha256(values)


class State(NamedTuple):
    """What stands at a location: the manifest, the last whole head and its number (None, −1: its
    writer was stopped before there was one), and why later heads do not count."""

    manifest: Manifest
    head: Head | None
    number: int
    damaged: str


def read_state(location: Location) -> State | None:
    """None where no cache is.

    Raises:
        UserError: a cache of another format.
        RunError: a damaged manifest.
    """
    content = location.read(MANIFEST)
    if content is None:
        return None
    head, number, damaged = None, -1, ""
    for key in reversed([key for key in location.keys("commits") if "/head-" in key]):
        try:
            number = int(key.removeprefix("commits/head-").removesuffix(".json"))
            head = Head.parse(location.read(key) or b"")
            break
        except JSON_ERRORS as error:
            damaged, number = f"{key} does not read ({one_line(error)})", -1
    action = "restore that file from a copy, or choose another cache.path"
    with reading(location, MANIFEST, action):
        # The format first: that another version wrote it says more than a hash.
        manifest = Manifest.parse(content, str(location))
        if head is not None and head.metadata.get(MANIFEST) != sha256_hex(content):
            raise ValueError("its sha256 is not the one that the head names")
    return State(manifest, head, number, damaged)


def read_manifest(path: str) -> Manifest | None:
    """The manifest of the cache at `path`; None where no cache is. Raises as `read_state`."""
    state = read_state(Location(path))
    return state.manifest if state else None


class Commits(NamedTuple):
    """Shard → its commit; key → sha256 of its file; key → why one that is there does not count."""

    whole: dict[int, Commit]
    sha256: dict[str, str]
    damaged: dict[str, str]


def read_commits(
    location: Location,
    manifest: Manifest,
    rows: int | None,
    head: Head | None,
    *,
    growing: bool = False,
) -> Commits:
    """Every commit of a cache whose arrays have `rows` (None: not known); one that the head names
    by another sha256 is damaged. What a growth has left beyond a finished head counts where it is
    `growing` alone."""
    found = Commits({}, {}, {})
    short: Mapping[int, int] = {}
    if head is not None:
        ends = [each["rows"] for each in head.growth] + ([head.rows] if growing else [])
        short = Layout(head.rows, ends, manifest.shard_rows).short
    beyond = set() if growing else set(growth_leftovers(location, manifest, head))
    for key in location.keys("commits"):
        if "/head-" in key or not key.endswith(".json") or key in beyond:
            continue
        try:
            content = location.read(key) or b""
            commit = Commit.parse(content, key=key, manifest=manifest, rows=rows, short=short)
            if head and head.metadata.get(key, sha256_hex(content)) != sha256_hex(content):
                raise ValueError("it is not the commit that the head names")
        except JSON_ERRORS as error:
            found.damaged[key] = f"{type(error).__name__}: {one_line(error)}"
            continue
        found.whole[commit.shard] = commit
        found.sha256[key] = sha256_hex(content)
    return found


def growth_leftovers(location: Location, manifest: Manifest, head: Head | None) -> list[str]:
    """Keys of the commits that a growth which was stopped has left beyond a finished head."""
    if head is None or not head.finished:
        return []
    shards = -(-head.rows // manifest.shard_rows)
    keys = [key.removeprefix("commits/").removesuffix(".json") for key in location.keys("commits")]
    return [commit_key(int(key)) for key in keys if key.isdecimal() and int(key) >= shards]


def resume_point(path: str, growth: str | None = None) -> dict[str, Any] | None:
    """What the commit before the first shard that the cache at `path` lacks says of where the rows
    after it can be made from; None: from the beginning. growth: of the shards that the growth of
    this data fingerprint has left. Raises as `read_state`."""
    state = read_state(Location(path))
    if state is None:
        return None
    known = state.head.rows or None if state.head and not growth else None
    commits = read_commits(
        Location(path), state.manifest, known, state.head, growing=bool(growth)
    ).whole
    first = next(number for number in itertools.count() if number not in commits)
    resume = commits[first - 1].resume if first else None
    return resume if (resume or {}).get("growth") == growth else None
