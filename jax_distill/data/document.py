"""What the readers hand on: raw documents first, token documents after."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


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
    """

    content: str | list[dict[str, Any]] | np.ndarray
    where: str
    targets: np.ndarray | None = None


@dataclass(frozen=True)
class Counts:
    """What came in and where it went. `str()` of it is one line.

    Attributes:
        documents: of the training part; heldout_documents: of the held-out part.
        tokens: of the training part; heldout_tokens: of the held-out part.
        target_tokens: tokens of both parts that may be predicted.
        repeated_paragraphs: paragraphs dropped because they had stood before.
        repeated_characters: what they held.
        emptied_documents: documents of which nothing was left after that.
        empty_documents: documents that had no content to begin with.
        untargeted_documents: documents without one token to predict (kept).
        left_out_documents: documents left out so that the mixture keeps its weights.
        left_out_tokens: what they held.
        dropped_bos: beginning-of-sequence tokens beyond the first of a document.
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
    left_out_documents: int = 0
    left_out_tokens: int = 0
    dropped_bos: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.documents:,} documents of {self.tokens:,} tokens to train on",
            f"{self.heldout_documents:,} of {self.heldout_tokens:,} held out",
            f"{self.target_tokens:,} tokens to predict",
        ]
        rest = [
            (self.repeated_paragraphs, "repeated paragraphs dropped"),
            (self.repeated_characters, "characters in them"),
            (self.emptied_documents, "documents empty after that"),
            (self.empty_documents, "documents empty as read"),
            (self.untargeted_documents, "documents with nothing to predict"),
            (self.left_out_documents, "documents left out by weight"),
            (self.left_out_tokens, "tokens in them"),
            (self.dropped_bos, "doubled BOS dropped"),
        ]
        return "; ".join(parts + [f"{count:,} {what}" for count, what in rest if count])


@dataclass(frozen=True)
class Corpus:
    """Token documents, split. Each part is in the order of the documents' content hashes.

    Attributes:
        train, heldout: lists of Document.
        counts: where everything went.
    """

    train: list[Document]
    heldout: list[Document]
    counts: Counts
