"""What the readers hand on: raw documents first, token documents after."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

_NAMED = 20  # kinds of changes that one line names


class Document(NamedTuple):
    """Tokens of one document, no padding.

    Attributes:
        tokens: [n] int32.
        targets: [n] bool; targets[i] says that token i may be predicted (there is a loss on it).
            The packer turns this into a mask over the positions that predict.
    """

    tokens: np.ndarray
    targets: np.ndarray


class Raw(NamedTuple):
    """One document as it was read.

    Attributes:
        content: text (str), chat messages (list of dicts) or token ids ([n] int32 array).
        where: file and line, for error messages.
        targets: [n] bool beside token ids, or None: every token is a target.
        tools: JSON Schemas of functions beside chat messages, or None.
        unread: keys that stood beside the content and are not read.
    """

    content: str | list[dict[str, Any]] | np.ndarray
    where: str
    targets: np.ndarray | None = None
    tools: list[Any] | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Counts:
    """What came in and where it went. `str()` of it is one line.

    Attributes:
        documents, tokens: of the training part; heldout_documents, heldout_tokens: held out.
        target_tokens: tokens of both parts that may be predicted.
        named: whatever else was changed, left out or not read, by words that say it.

    The others are described by the words that `LOST` has for them.
    """

    documents: int = 0
    tokens: int = 0
    heldout_documents: int = 0
    heldout_tokens: int = 0
    target_tokens: int = 0
    repeated_paragraphs: int = 0
    repeated_characters: int = 0
    emptied_documents: int = 0
    empty_documents: int = 0
    untargeted_documents: int = 0
    dropped_bos: int = 0
    unread_documents: int = 0
    full_filters: int = 0
    named: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            f"{self.documents:,} documents of {self.tokens:,} tokens to train on",
            f"{self.heldout_documents:,} of {self.heldout_tokens:,} held out",
            f"{self.target_tokens:,} tokens to predict",
        ]
        rest = [(getattr(self, name), words) for name, words in LOST.items()]
        named = [(count, what) for what, count in self.named.items() if count]
        rest += named[:_NAMED]
        if len(named) > _NAMED:
            rest.append((len(named) - _NAMED, "more of such kinds"))
        return "; ".join(parts + [f"{count:,} {what}" for count, what in rest if count])


LOST = {
    "repeated_paragraphs": "repeated paragraphs dropped",
    "repeated_characters": "characters in them",
    "emptied_documents": "documents empty after that",
    "empty_documents": "documents empty as read",
    "untargeted_documents": "documents with nothing to predict",
    "dropped_bos": "doubled BOS dropped",
    "unread_documents": "documents not read further: max_rows or a weight has enough",
    "full_filters": "filters of paragraphs full: later repetitions may stay",
}


@dataclass(frozen=True)
class Documents:
    """Token documents, split, each part in the order of its stream (`data.Corpus`).

    Attributes:
        train, heldout: lists of Document.
        counts: where everything went.
    """

    train: list[Document]
    heldout: list[Document]
    counts: Counts
