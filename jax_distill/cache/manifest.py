"""The manifest: what a cache is, and when two caches are the same. It never changes."""

import hashlib
import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_origin

from jax_distill.base.errors import UserError
from jax_distill.batch import DRAWS, ENCODED_FIELDS, TEACHER_PREFIX, EncodedTopK
from jax_distill.cache.coding import CODED, CODES, FREQUENT, GAP_STEPS, INDICES, frequent_ids
from jax_distill.cache.fingerprint import vocabulary_fingerprint

FORMAT_VERSION = 3
OLDEST_FORMAT = 2  # that is read; docs/CACHE.md, "Versions"
READ_FORMATS = f"{OLDEST_FORMAT} or {FORMAT_VERSION}"
LARGEST_TOP_K = 65535  # teacher_count is uint16
TEACHER_ARRAYS = tuple(f"{TEACHER_PREFIX}{name}" for name in ENCODED_FIELDS)
# Recorded but not compared; the vocabulary is, by its fingerprint.
NOT_IDENTITY = ("vocabulary", "counts", "versions", "git_revision")
# Arrays that a cache may have besides; hidden_<layer> is the third.
OPTIONAL_ARRAYS = {"loss_weight": "float16", DRAWS: "uint16"}
SAMPLINGS = ("top_k", "random")
HIDDEN_PREFIX, HIDDEN_DTYPE = "hidden_", "bfloat16"


def digest(value: Any) -> str:
    """sha256, in hex, of a JSON value written with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def parse_object(content: bytes) -> dict[str, Any]:
    """A JSON object of finite numbers. Raises ValueError, TypeError or RecursionError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"expected finite numbers, got {constant}")

    value = json.loads(content, parse_constant=refuse)
    if type(value) is not dict:
        raise TypeError(f"expected a JSON object, got {type(value).__name__}")
    return value


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """`value`, if it is an int (no bool) from low to high; else ValueError."""
    if type(value) is not int or not low <= value <= high:
        bounds = f"from {low} to {high}" if low < high else str(low)
        raise ValueError(f"{name}: expected a whole number {bounds}, got {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache is. Two caches of equal identity (all but NOT_IDENTITY) hold the same numbers.

    Attributes:
        sequence_length: T. shard_rows: rows of a shard.
        vocab_size: V, how many ids are real; every id of the cache is below it.
        top_k: K, 0 without a teacher. temperatures: the S values of τ.
        sampling: `top_k`, the most likely; `random`, the distinct ones of K draws from the teacher,
            beside the array `teacher_draws`.
        top_p: of the K as many are kept as reach it at the first τ; None: all.
        teacher_fingerprint, teacher_dtype: whose numbers these are, and in which precision.
        tokenizer_fingerprint: sha256 of the sorted id → token map; vocabulary: token → id, that map
            itself, empty where there was no tokenizer.
        data: the settings that the rows were made with; data_fingerprint: of the text itself.
        optional: further arrays, name → shape of one row (docs/CACHE.md "Optional arrays").
        counts: what became of the documents. versions, git_revision: of what wrote it.
    """

    sequence_length: int
    shard_rows: int
    vocab_size: int
    top_k: int = 0
    temperatures: tuple[float, ...] = ()
    sampling: str = "top_k"
    top_p: float | None = None
    teacher_fingerprint: str = ""
    teacher_dtype: str = ""
    tokenizer_fingerprint: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    optional: dict[str, list[int]] = field(default_factory=dict)
    vocabulary: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git_revision: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """One name for the whole cache: sha256 of its identity."""
        return digest(self.identity())

    def identity(self) -> dict[str, Any]:
        """What two caches of the same numbers have in common, as JSON holds it. How the files hold
        these numbers is no part of it: a cache of an older format keeps its name."""
        values = {name: value for name, value in self._values().items() if name not in NOT_IDENTITY}
        values["format_version"] = OLDEST_FORMAT
        return json.loads(json.dumps(values))  # tuples become lists, as in the file

    def _values(self) -> dict[str, Any]:
        """Without top_p where it is None: caches written before it existed keep their identity."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if name != "top_p" or value}

    def to_json(self) -> bytes:
        """The file's content."""
        values = self._values()
        by_id = sorted(self.vocabulary.items(), key=lambda item: (item[1], item[0]))
        values["vocabulary"] = dict(by_id)
        return json.dumps(values, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, path: str) -> Self:
        """The inverse of `to_json`; `path` is for messages.

        Raises:
            UserError: another format.
            ValueError, TypeError, KeyError, AttributeError, RecursionError: damaged.
        """
        values = parse_object(content)
        version = whole_number("format_version", values["format_version"], 1, 1 << 31)
        if version < OLDEST_FORMAT:
            raise UserError(
                f"expected a cache of format {READ_FORMATS} at {path}, got format {version}, "
                "which is no longer read; re-create it: python -m jax_distill.teacher "
                "--config X.yaml --cache.path NEW_FOLDER"
            )
        if version > FORMAT_VERSION:
            raise UserError(
                f"expected a cache of format {READ_FORMATS} at {path}, got format {version}; "
                "install the jax_distill that wrote it, or a newer one"
            )
        unknown = sorted(set(values) - {each.name for each in fields(cls)})
        if unknown:
            raise ValueError(f"expected the manifest's fields, got also {unknown}")
        temperatures = values.get("temperatures", [])
        manifest = cls(**values | {"temperatures": tuple(temperatures)})
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Types and ranges of what was read. ValueError or TypeError names the field."""
        for name, low in (("sequence_length", 1), ("shard_rows", 1), ("vocab_size", 1)):
            whole_number(name, getattr(self, name), low, 1 << 40)
        whole_number("top_k", self.top_k, 0, min(self.vocab_size, LARGEST_TOP_K))
        for each in fields(self):
            value = getattr(self, each.name)
            kind = get_origin(each.type) or each.type
            if kind in (str, dict) and type(value) is not kind:
                raise TypeError(f"{each.name}: expected a {kind.__name__}, got {value!r}")
        for temperature in self.temperatures:
            if type(temperature) is not float or not 0 < temperature < math.inf:
                raise ValueError(f"temperatures: expected numbers above 0, got {temperature!r}")
        if self.top_p is not None and not (type(self.top_p) is float and 0 < self.top_p < 1):
            raise ValueError(f"top_p: expected a number between 0 and 1, got {self.top_p!r}")
        for token, number in self.vocabulary.items():
            whole_number(f"vocabulary {token[:40]!r}", number, 0, 1 << 40)
        for name, number in self.counts.items():
            whole_number(f"counts.{name[:40]}", number, 0, 1 << 62)
        for name, shape in self.optional.items():
            optional_dtype(name)
            for size in shape:
                whole_number(f"optional.{name}", size, 1, 1 << 40)
            if shape[0] != self.sequence_length:
                raise ValueError(f"optional.{name}: expected T first, got {shape}")
        if self.vocabulary and self.tokenizer_fingerprint:
            found = vocabulary_fingerprint(self.vocabulary)
            if found != self.tokenizer_fingerprint:
                raise ValueError(
                    f"vocabulary: expected fingerprint {self.tokenizer_fingerprint}, got {found}"
                )

    def hidden_shapes(self) -> dict[int, tuple[int, int]]:
        """Layer -> (T, D) of each array of the teacher's hidden states."""
        return {
            int(name.removeprefix(HIDDEN_PREFIX)): (shape[0], shape[1])
            for name, shape in self.optional.items()
            if name.startswith(HIDDEN_PREFIX)
        }

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose outputs the cache holds."""
        return tuple(self.hidden_shapes())

    def array_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape of one row) of each array, as it is written and read."""
        length, top_k, temperatures = self.sequence_length, self.top_k, len(self.temperatures)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "tokens": ("int32", (length,)),
            "segment_ids": ("int32", (length,)),
            "positions": ("int32", (length,)),
            "loss_mask": ("uint8", (length,)),
        }
        if top_k:
            ids = "uint16" if self.vocab_size <= 65536 else "uint32"
            encoded = EncodedTopK(
                indices=(ids, (length, top_k)),
                gaps=("float16", (length, top_k)),
                log_z=("float32", (length, temperatures)),
                log_tail=("float32", (length, temperatures)),
                count=("uint16", (length,)),
            )
            shapes |= encoded.arrays()
        return shapes | {n: (optional_dtype(n), tuple(s)) for n, s in self.optional.items()}

    @property
    def is_coded(self) -> bool:
        """Whether the files hold the K entries as `cache.coding` says."""
        return self.format_version > OLDEST_FORMAT and self.top_k > 0

    def stored_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape of one row) of each array, as the files hold it."""
        shapes = self.array_shapes()
        if not self.is_coded:
            return shapes
        ids, length, top_k = shapes[INDICES][0], self.sequence_length, self.top_k
        coded: dict[str, tuple[str, tuple[int, ...]]] = {
            FREQUENT: (ids, (frequent_ids(self.vocab_size, length, top_k),)),
            CODES: (ids, (length, top_k)),
            GAP_STEPS: ("uint16", (length, top_k)),
        }
        return {name: shape for name, shape in shapes.items() if name not in CODED} | coded


def optional_dtype(name: str) -> str:
    """The dtype of an optional array. Raises ValueError for a name that has no meaning."""
    if name.startswith(HIDDEN_PREFIX) and name.removeprefix(HIDDEN_PREFIX).isdecimal():
        return HIDDEN_DTYPE
    if name not in OPTIONAL_ARRAYS:
        known = ", ".join([*OPTIONAL_ARRAYS, f"{HIDDEN_PREFIX}<layer>"])
        raise ValueError(f"expected optional arrays among {known}, got {name}")
    return OPTIONAL_ARRAYS[name]


# Where an identity's fields come from: the option that would make another cache's value fit.
OPTIONS = {
    "sequence_length": "data.sequence_length",
    "shard_rows": "cache.shard_rows",
    "top_k": "cache.top_k",
    "top_p": "cache.top_p",
    "sampling": "cache.sampling",
    "temperatures": "cache.temperatures",
    "teacher_dtype": "teacher.dtype",
    "data.format": "data.format",
    "data.packing": "data.packing",
    "data.separate_documents": "data.separate_documents",
    "data.heldout_fraction": "data.heldout_fraction",
}
ACTIONS = {
    "teacher_fingerprint": "set teacher.path to the teacher that it was written with",
    "tokenizer_fingerprint": "set data.tokenizer to the tokenizer that it was written with",
    "data_fingerprint": "set data.path to the text that it was written from",
}


def differences(stored: Any, wanted: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, stored, wanted) of each value in which two JSON objects differ."""
    if not (isinstance(stored, dict) and isinstance(wanted, dict)):
        return [] if stored == wanted else [(name, stored, wanted)]
    found = []
    for key in dict.fromkeys([*wanted, *stored]):
        inner = f"{name}.{key}" if name else key
        found += differences(stored.get(key), wanted.get(key), inner)
    return found


def refuse_other_cache(path: str, stored: Manifest, wanted: Manifest) -> None:
    """Refuse a cache at `path` that is not the one wanted: UserError naming what differs, and the
    options with which the cache that is there would be used."""
    # The fingerprints first: what they stand for makes other fields differ.
    first = ("teacher_fingerprint", "tokenizer_fingerprint", "data_fingerprint")
    old, new = stored.identity(), wanted.identity()
    order = [*first, *(name for name in old | new if name not in first)]
    found = differences({n: old.get(n) for n in order}, {n: new.get(n) for n in order})
    if not found:
        return
    split = old["data"].get("split")
    actions = [_action(name, a, b, split, stored.sampling) for name, a, b in found]
    shown = ", ".join(f"{name}: stored {a!r}, wanted {b!r}" for name, a, b in found)
    to_use = " and ".join(dict.fromkeys(action for action in actions if action))
    raise UserError(
        f"expected the cache at {path} to be made with these settings, got another {shown}; "
        + (f"{to_use}, or choose another cache.path" if to_use else "choose another cache.path")
    )


def _action(name: str, stored: Any, wanted: Any, split: Any, sampling: str) -> str:
    """What to set for the stored value of one field to be the wanted one; "" for what follows."""
    if name.startswith(f"optional.{HIDDEN_PREFIX}"):
        return "set cache.hidden_layers to the layers that are stored"
    if name == "data.max_rows":
        option = "data.max_heldout_rows" if split == "heldout" else "data.max_rows"
    elif name == "top_k" and sampling == "random":
        option = "cache.samples"
    elif name in OPTIONS:
        option = OPTIONS[name]
    else:
        return ACTIONS.get(name, "")
    value = stored if isinstance(stored, str) else json.dumps(stored, separators=(",", ":"))
    fewer = option == "cache.top_k" and 0 < wanted < stored
    return f"set --{option} {value}" + (f" --cache.read_top_k {wanted}" if fewer else "")
