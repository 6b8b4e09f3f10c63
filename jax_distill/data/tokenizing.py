"""Raw documents to tokens and targets, in their order."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.data.document import Document, Raw
from jax_distill.data.tokenizer import Tokenizer

BATCH = 250  # documents tokenized at once


def tokenized(
    raws: Iterable[Raw], tokenizer: Tokenizer, lost: Counter[str], named: Counter[str]
) -> Iterator[Document]:
    """A document of each, up to two batches of BATCH ahead of what is asked for: texts are encoded
    on all cores, while the next ones are read.

    Text gets BOS before it if the tokenizer adds one, and EOS after it if there is one; neither is
    doubled. Chat is rendered by the folder's template, tokens are taken as they are.

    lost, named: count what was left out or changed (`document.Counts`).

    Raises:
        UserError: a token id that the tokenizer lacks; a chat that its template refuses.
    """

    def finished(batch: list[Raw], texts: Iterator[np.ndarray]) -> Iterator[Document]:
        for raw in batch:
            yield _document(raw, texts, tokenizer, lost, named)

    remaining, checked = iter(raws), False
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
            ahead = None
            while batch := list(itertools.islice(remaining, BATCH)):
                if not checked and any(isinstance(raw.content, list) for raw in batch):
                    tokenizer.chat.check()  # refused as what it is: no line is to blame
                    checked = True
                texts = [raw.content for raw in batch if isinstance(raw.content, str)]
                encoded = pool.submit(tokenizer.encode_batch, texts)
                if ahead is not None:
                    yield from finished(ahead[0], iter(ahead[1].result()))
                ahead = batch, encoded
            if ahead is not None:
                yield from finished(ahead[0], iter(ahead[1].result()))
    finally:
        if checked:
            tokenizer.chat.close()


def _document(
    raw: Raw,
    encoded: Iterator[np.ndarray],
    tokenizer: Tokenizer,
    lost: Counter[str],
    named: Counter[str],
) -> Document:
    for key in raw.unread:
        named[f"documents whose {key} is not read"] += 1
    if isinstance(raw.content, str):
        return _text_document(next(encoded), tokenizer, lost, named)
    if isinstance(raw.content, np.ndarray):
        return _token_document(raw, tokenizer)
    try:
        return tokenizer.chat.document(raw.content, raw.tools, named)
    except UserError as refusal:
        raise UserError(f"{raw.where}: {refusal}") from None


def _text_document(
    tokens: np.ndarray, tokenizer: Tokenizer, lost: Counter[str], named: Counter[str]
) -> Document:
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    ended = eos is not None and tokens[-1:] == [eos]
    inside = tokens[:-1] if ended else tokens
    if tokenizer.adds_bos:
        others = tokens != bos
        doubled = int(others.argmax()) if others.any() else len(tokens)
        lost["dropped_bos"] += doubled
        tokens, inside = np.concatenate([[bos], tokens[doubled:]]), inside[doubled:]
    # A text may be a conversation with its marks already in it, so that they stay what they are.
    named["control tokens written in texts, read as such"] += int(
        np.isin(inside, tokenizer.control_ids).sum()
    )
    if eos is not None and not ended:
        tokens = np.concatenate([tokens, [eos]])
    return Document(tokens.astype(np.int32), np.ones(len(tokens), bool))


def _token_document(raw: Raw, tokenizer: Tokenizer) -> Document:
    tokens = np.asarray(raw.content)
    if tokens.size and tokens.max() >= tokenizer.length:
        bad = int(np.argmax(tokens >= tokenizer.length))
        raise UserError(
            f"{raw.where}: expected ids below {tokenizer.length}, the tokenizer's length, "
            f"got {tokens[bad]} at position {bad}; name the tokenizer that made them"
        )
    targets = np.ones(len(tokens), bool) if raw.targets is None else raw.targets
    return Document(tokens, targets)
