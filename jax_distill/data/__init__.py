"""Readers: text, JSONL, chat, tokens → token documents; and which rows a step sees."""

from jax_distill.data.context import check_context, segments_beyond
from jax_distill.data.corpus import fingerprint, read_documents, read_texts
from jax_distill.data.document import Corpus, Counts, Document
from jax_distill.data.order import reader_options, row_indices
from jax_distill.data.tokenizer import Tokenizer, train_tokenizer, vocabulary_of

__all__ = [
    "Corpus",
    "Counts",
    "Document",
    "Tokenizer",
    "check_context",
    "fingerprint",
    "read_documents",
    "read_texts",
    "reader_options",
    "row_indices",
    "segments_beyond",
    "train_tokenizer",
    "vocabulary_of",
]
