"""The manifest: what a store is, and when two stores are the same."""

import hashlib
import json
from dataclasses import dataclass, field, fields
from typing import Any

from jax_distill.config import Refusal

FORMAT_VERSION = 1
ROW_ARRAYS = ("tokens", "segment_ids", "positions", "loss_mask")
TEACHER_ARRAYS = (
    "teacher_indices",
    "teacher_count",
    "teacher_gaps",
    "teacher_log_z",
    "teacher_log_tail",
)
# Told but not compared; the vocabulary is, by its fingerprint.
NOT_IDENTITY = ("vocabulary", "counts", "versions", "git_revision")


def digest(value: Any) -> str:
    """sha256, in hex, of a JSON value written with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a store is. Two stores of equal identity (all but NOT_IDENTITY) hold the same numbers.

    `data` holds the settings that the rows were made with, `data_fingerprint` stands for the text
    itself. `vocabulary` maps each token to its id; empty where there was no tokenizer.
    """

    sequence_length: int
    shard_rows: int
    vocab_size: int
    top_k: int = 0
    temperatures: tuple[float, ...] = ()
    sampling: str = "top_k"
    teacher_fingerprint: str = ""
    teacher_dtype: str = ""
    tokenizer_fingerprint: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    data_fingerprint: str = ""
    vocabulary: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git_revision: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """One name for the whole store: sha256 of its identity."""
        return digest(self.identity())

    def identity(self) -> dict[str, Any]:
        values = {name: value for name, value in self._values().items() if name not in NOT_IDENTITY}
        return json.loads(json.dumps(values))  # tuples become lists, as in the file

    def _values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def to_json(self) -> bytes:
        values = self._values()
        by_id = sorted(self.vocabulary.items(), key=lambda item: (item[1], item[0]))
        values["vocabulary"] = dict(by_id)
        return json.dumps(values, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        values = json.loads(text)
        if values.get("format_version") != FORMAT_VERSION:
            raise Refusal(
                f"expected a store of format version {FORMAT_VERSION}, got "
                f"{values.get('format_version')}; write it again with this version"
            )
        unknown = sorted(set(values) - {each.name for each in fields(cls)})
        if unknown:
            raise Refusal(
                f"expected the manifest's fields, got also {unknown}; write the store again"
            )
        return cls(**values | {"temperatures": tuple(values["temperatures"])})

    def array_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape of one row) of each array of the store."""
        length, top_k, temperatures = self.sequence_length, self.top_k, len(self.temperatures)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "tokens": ("int32", (length,)),
            "segment_ids": ("int32", (length,)),
            "positions": ("int32", (length,)),
            "loss_mask": ("uint8", (length,)),
        }
        if top_k:
            ids = "uint16" if self.vocab_size <= 65536 else "uint32"
            shapes["teacher_indices"] = (ids, (length, top_k))
            shapes["teacher_count"] = ("uint16", (length,))
            shapes["teacher_gaps"] = ("float16", (length, top_k))
            shapes["teacher_log_z"] = ("float32", (length, temperatures))
            shapes["teacher_log_tail"] = ("float32", (length, temperatures))
        return shapes


def first_difference(stored: Any, wanted: Any, name: str = "") -> str | None:
    """The first place where two JSON values differ, as `name: stored …, wanted …`; None when
    equal."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in stored if key not in wanted)]:
            place = f"{name}.{key}" if name else key
            found = first_difference(stored.get(key), wanted.get(key), place)
            if found:
                return found
        return None
    if isinstance(stored, list) and isinstance(wanted, list) and len(stored) == len(wanted):
        pairs = enumerate(zip(stored, wanted, strict=True))
        found_each = (first_difference(a, b, f"{name}.{i}") for i, (a, b) in pairs)
        return next((found for found in found_each if found), None)
    return None if stored == wanted else f"{name}: stored {stored!r}, wanted {wanted!r}"


def _identity_difference(stored: Manifest, wanted: Manifest) -> str | None:
    """The first difference of two stores, with the fingerprints before what they are made of."""
    first = ("format_version", "teacher_fingerprint", "tokenizer_fingerprint")
    old, new = stored.identity(), wanted.identity()
    order = [*first, *(name for name in new if name not in first)]
    return first_difference({n: old[n] for n in order}, {n: new[n] for n in order})


def refuse_other_store(path: str, stored: Manifest, wanted: Manifest) -> None:
    """Refusal naming the first field in which the store at `path` is not the one that is wanted."""
    found = _identity_difference(stored, wanted)
    if found:
        raise Refusal(
            f"expected the store at {path} to be made with the same settings, got another {found}; "
            "give another cache.path, or delete the old store"
        )
