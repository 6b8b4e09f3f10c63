"""One pass over the sources: which documents are held out, and how much there is."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.config import Source
from jax_distill.data.document import Raw
from jax_distill.data.readers import read_raw, say_files

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, Split] = ("train", "heldout")


class Item(NamedTuple):
    """A document as it was read, the sha256 of its content, and how many bytes that has."""

    digest: bytes
    size: int
    raw: Raw


@dataclass
class _Extreme:
    """The smallest or the largest digest, and the documents that have it."""

    digest: bytes
    count: int = 0
    size: int = 0

    def see(self, item: Item, *, beyond: bool) -> None:
        if beyond:
            self.digest, self.count, self.size = item.digest, 0, 0
        if item.digest == self.digest:
            self.count += 1
            self.size += item.size


@dataclass
class Survey:
    """What one pass over the sources finds.

    Attributes:
        documents: how many by source, empty ones included.
        threshold: held out are the documents whose digest is below it.
        sizes, count: bytes and documents of both parts.
        empty: documents without content.
    """

    documents: list[int]
    threshold: bytes = b""
    sizes: Counter[Split] = field(default_factory=Counter)
    count: Counter[Split] = field(default_factory=Counter)
    empty: int = 0

    def move(self, documents: _Extreme, old: Split, new: Split) -> None:
        """Count documents to the other part."""
        for split, sign in ((old, -1), (new, 1)):
            self.count[split] += sign * documents.count
            self.sizes[split] += sign * documents.size


def read_items(source: Source, format: str, eos_id: int | None) -> Iterator[Item | None]:
    """A source's documents; None for an empty one."""
    for raw in read_raw(source.path, format=format, eos_id=eos_id):
        if len(raw.content) == 0 or isinstance(raw.content, str) and raw.content.isspace():
            yield None
        else:
            data = content_bytes(raw)
            yield Item(hashlib.sha256(data).digest(), len(data), raw)


def survey_sources(
    sources: list[Source],
    format: str,
    eos_id: int | None,
    fraction: float,
    *,
    at_least_one: bool = True,
) -> Survey:
    """One pass: which digests are held out, and how much there is of both parts. at_least_one: of
    a fraction above 0, in both."""
    bound = int(fraction * 2.0**64).to_bytes(8, "big") + bytes(24) if fraction else b""
    survey = Survey(documents=[0] * len(sources), threshold=bound)
    smallest, largest = _Extreme(bytes([255]) * 33), _Extreme(b"")
    for number, source in enumerate(sources):
        say_files(source.path, format=format)
        for item in read_items(source, format, eos_id):
            survey.documents[number] += 1
            if item is None:
                survey.empty += 1
                continue
            smallest.see(item, beyond=item.digest < smallest.digest)
            largest.see(item, beyond=item.digest > largest.digest)
            split: Split = "heldout" if item.digest < bound else "train"
            survey.sizes[split] += item.size
            survey.count[split] += 1
    if not at_least_one:
        return survey
    total = survey.count.total()
    if fraction and smallest.digest >= largest.digest:
        got = f"{total:,} that are all the same" if total > 1 else total
        raise UserError(
            f"expected at least 2 different documents to hold one out, got {got}; "
            f"give other documents, or set data.heldout_fraction 0"
        )
    if fraction and not survey.count["heldout"]:
        survey.threshold = smallest.digest + bytes(1)
        survey.move(smallest, "train", "heldout")
    elif fraction and not survey.count["train"]:
        survey.threshold = largest.digest
        survey.move(largest, "heldout", "train")
    return survey


def content_bytes(raw: Raw) -> bytes:
    """The content alone: not where it stands, not how a tokenizer cuts it."""
    if isinstance(raw.content, str):
        try:
            return raw.content.encode()
        except UnicodeEncodeError as error:
            bad = f"{ord(raw.content[error.start]):#x} at character {error.start}"
            raise UserError(
                f"{raw.where}: expected Unicode text, got half a pair {bad}; fix the line"
            ) from None
    if isinstance(raw.content, np.ndarray):
        return raw.content.astype("<i4").tobytes()
    content = [raw.content, raw.tools] if raw.tools else raw.content
    try:
        return json.dumps(content, sort_keys=True, default=str).encode()
    except (RecursionError, TypeError):  # TypeError: keys of several types
        raise UserError(
            f"{raw.where}: expected messages, got brackets nested too deeply; fix the line"
        ) from None
