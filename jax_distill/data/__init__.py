"""Readers: text, JSONL, chat, tokens → token documents; and which rows a step sees."""

from jax_distill.data.corpus import fingerprint, read_documents, read_texts
from jax_distill.data.document import Corpus, Counts, Document
from jax_distill.data.order import row_indices
from jax_distill.data.tokenizer import Tokenizer, train_tokenizer, vocabulary_of

__all__ = [
    "Corpus",
    "Counts",
    "Document",
    "Tokenizer",
    "fingerprint",
    "read_documents",
    "read_texts",
    "row_indices",
    "train_tokenizer",
    "vocabulary_of",
]
