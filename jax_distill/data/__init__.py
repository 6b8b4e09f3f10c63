"""Readers: text, JSONL, chat, tokens → token documents; and which rows a step sees."""

from jax_distill.data.context import check_context, segments_beyond
from jax_distill.data.corpus import Corpus, Taken, read_documents, read_texts
from jax_distill.data.document import Counts, Document, Documents
from jax_distill.data.order import reader_options, row_indices
from jax_distill.data.sources import check_unchanged, file_stamps, fingerprint
from jax_distill.data.survey import SPLITS, Split
from jax_distill.data.tokenizer import Tokenizer, train_tokenizer, vocabulary_of

__all__ = [
    "SPLITS",
    "Corpus",
    "Counts",
    "Document",
    "Documents",
    "Split",
    "Taken",
    "Tokenizer",
    "check_context",
    "check_unchanged",
    "file_stamps",
    "fingerprint",
    "read_documents",
    "read_texts",
    "reader_options",
    "row_indices",
    "segments_beyond",
    "train_tokenizer",
    "vocabulary_of",
]
