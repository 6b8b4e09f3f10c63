"""Sources to a corpus: held-out split, repeated paragraphs, tokens, mixture."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_distill.base.console import progress, say
from jax_distill.base.errors import UserError
from jax_distill.config import Source
from jax_distill.data.builtin import builtin_versions
from jax_distill.data.document import Corpus, Counts, Document, Raw
from jax_distill.data.readers import hub_fingerprint, read_raw, source_files
from jax_distill.data.tokenizer import Tokenizer

# To be raised when the same input comes to give other documents.
_READER_VERSION = 2
_BUILTIN_VERSION = 1  # where all text is built in
_PARAGRAPH_CHARACTERS = 80  # a shorter one may repeat
_BATCH = 250  # documents tokenized at once

Path_ = str | Sequence[Source]


class _Keyed(NamedTuple):
    digest: bytes
    source: int
    raw: Raw


def read_documents(
    path: Path_,
    *,
    format: str = "auto",
    tokenizer: Tokenizer,
    heldout_fraction: float,
    max_tokens: tuple[int | None, int | None] = (None, None),
) -> Corpus:
    """Reads, splits, cleans and tokenizes.

    1. Held out are the documents whose content's sha256, read as a number in [0, 1), is below
       `heldout_fraction`: whoever reads the same documents, in whatever order or mixture, agrees. A
       fraction above 0 holds out at least one document and leaves at least one (smallest and
       largest hash). Both parts are in the order of the hashes: a fixed shuffle, so that the first
       rows are a fair sample.
    2. A paragraph of text (between empty lines) of at least 80 characters, white space aside,
       stands once: in the held-out part if it stands there at all. Repetitions are dropped and
       counted. Chat and token documents are left as they are.
    3. Text gets BOS before it if the tokenizer adds one, and EOS after it if there is one; neither
       is doubled. Chat is rendered by the folder's template, tokens are taken as they are.
    4. Weights are shares of the tokens: of each source so many documents are used that the shares
       are as given and the source that runs out first is used whole; no document repeats. What
       that leaves out is counted. Without weights every source is used whole.

    Args:
        path: a source as in `read_raw`, or a list of `Source(path, weight)`.
        format: of every source.
        heldout_fraction: in [0, 1).
        max_tokens: of the training and of the held-out part: what comes after the document that
            reaches it is not tokenized, and counted; see `packing.tokens_needed`. With weights,
            which need every length, it is not used.

    Raises:
        UserError: see `read_raw`; a fraction out of range; a token id that the tokenizer lacks;
            nothing to train on, or nothing to predict in the held-out part.
    """
    sources = _sources(path)
    say(f"reading {_names(sources)}")
    lost: Counter[str] = Counter()
    named: Counter[str] = Counter()
    parts = _read(sources, format, heldout_fraction, tokenizer.eos_id, lost)
    weighted = sources[0].weight is not None
    documents = []
    for part, enough in zip(parts, (None, None) if weighted else max_tokens, strict=True):
        raws = [item.raw for item in part]
        documents.append(_tokenize(raws, tokenizer, lost, named, enough))
    if weighted:
        owners = [np.array([item.source for item in part], np.int64) for part in parts]
        used = _used_fractions(documents[0], owners[0], sources)
        documents = [_use(*pair, used, lost) for pair in zip(documents, owners, strict=True)]
    train, heldout = documents
    _check_targets(train, heldout, _names(sources))
    return Corpus(train, heldout, _counts(train, heldout, lost, named))


def _check_targets(train: list[Document], heldout: list[Document], names: str) -> None:
    if not any(document.targets[1:].any() for document in train):
        raise UserError(f"expected text to train on in {names}, got none; add documents")
    if heldout and not any(document.targets[1:].any() for document in heldout):
        raise UserError(
            f"expected text to predict in the held-out part of {names}, got none in "
            f"{len(heldout)} documents; raise data.heldout_fraction, or add documents"
        )


def _counts(
    train: list[Document], heldout: list[Document], lost: Counter[str], named: Counter[str]
) -> Counts:
    return Counts(
        documents=len(train),
        tokens=sum(len(document.tokens) for document in train),
        heldout_documents=len(heldout),
        heldout_tokens=sum(len(document.tokens) for document in heldout),
        target_tokens=sum(int(document.targets.sum()) for document in train + heldout),
        untargeted_documents=sum(not document.targets.any() for document in train + heldout),
        named=dict(named),
        **lost,
    )


def read_texts(path: Path_, *, format: str = "auto", heldout_fraction: float) -> list[str]:
    """The text documents of the training part, to train a tokenizer on: as in `read_documents`.

    Raises:
        UserError: as `read_documents`; or the sources are not text.
    """
    sources = _sources(path)
    train, _ = _read(sources, format, heldout_fraction, None, Counter())
    texts = [item.raw.content for item in train if isinstance(item.raw.content, str)]
    if not texts:
        raise UserError(
            f"expected text to train a tokenizer on in {_names(sources)}, got none; "
            f"set data.tokenizer to a folder"
        )
    return texts


def fingerprint(
    path: Path_, *, format: str, tokenizer: Tokenizer, settings: Mapping[str, Any]
) -> str:
    """sha256 of what decides a cache's rows: the sources' bytes, the tokenizer, the settings.

    Where the sources lie is no part of it, nor are the files' names. Built-in text goes in as the
    versions that it is made from, a hub data set as its name and its files' revision. A GB takes
    about a second.

    Args:
        settings: the rest, as JSON values: heldout_fraction, sequence_length, packing, max_rows, …

    Raises:
        UserError: a source is not there.
    """
    sources = _sources(path)
    is_builtin = all(source.path.startswith("builtin:") for source in sources)
    version = _BUILTIN_VERSION if is_builtin else _READER_VERSION
    facts: list[Any] = [version, format, tokenizer.files_hash, dict(settings)]
    for source in sources:
        facts.append(source.weight if source.weight is None else float(source.weight))
        if source.path.startswith("builtin:"):
            facts.append([source.path, builtin_versions()])
        elif format == "hub":
            facts.append([source.path, hub_fingerprint(source.path)])
        else:
            facts.append([_file_hash(file) for file in source_files(source.path, format=format)])
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sources(path: Path_) -> list[Source]:
    sources = [Source(path, None)] if isinstance(path, str) else list(path)
    weights = [source.weight for source in sources]
    if not sources:
        raise UserError("expected data.path to name a source, got an empty list")
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        raise UserError(f"expected a weight for every source or for none, got {weights}")
    for source in sources:
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise UserError(f"expected a weight above 0 for {source.path}, got {source.weight}")
    return sources


def _names(sources: list[Source]) -> str:
    return ", ".join(source.path for source in sources)


def _read(
    sources: list[Source], format: str, fraction: float, eos_id: int | None, lost: Counter[str]
) -> tuple[list[_Keyed], list[_Keyed]]:
    """(train, heldout), without empty documents and repeated paragraphs."""
    keyed = []
    for index, source in enumerate(sources):
        for raw in read_raw(source.path, format=format, eos_id=eos_id):
            if len(raw.content) == 0 or isinstance(raw.content, str) and raw.content.isspace():
                lost["empty_documents"] += 1
            else:
                keyed.append(_Keyed(_digest(raw), index, raw))
    train, heldout = _hold_out(keyed, fraction)
    heldout, train = _drop_repeated([heldout, train], lost)
    return train, heldout


def _digest(raw: Raw) -> bytes:
    """sha256 of the content alone: not of where it stands, not of how a tokenizer cuts it."""
    if isinstance(raw.content, str):
        try:
            data = raw.content.encode()
        except UnicodeEncodeError as error:
            bad = f"{ord(raw.content[error.start]):#x} at character {error.start}"
            raise UserError(
                f"{raw.where}: expected Unicode text, got half a pair {bad}; fix the line"
            ) from None
    elif isinstance(raw.content, np.ndarray):
        data = raw.content.astype("<i4").tobytes()
    else:
        content = [raw.content, raw.tools] if raw.tools else raw.content
        try:
            data = json.dumps(content, sort_keys=True, default=str).encode()
        except (RecursionError, TypeError):  # TypeError: keys of several types
            raise UserError(
                f"{raw.where}: expected messages, got brackets nested too deeply; fix the line"
            ) from None
    return hashlib.sha256(data).digest()


def _hold_out(keyed: list[_Keyed], fraction: float) -> tuple[list[_Keyed], list[_Keyed]]:
    """(train, heldout), each by hash: held out are those whose first 8 bytes are below fraction."""
    by_hash = sorted(keyed, key=lambda item: item.digest)
    bound = int(fraction * 2.0**64)
    count = sum(int.from_bytes(item.digest[:8]) < bound for item in by_hash)
    if fraction > 0:
        if len({item.digest for item in by_hash}) < 2:
            got = f"{len(keyed):,} that are all the same" if len(keyed) > 1 else len(keyed)
            raise UserError(
                f"expected at least 2 different documents to hold one out, got {got}; "
                f"give other documents, or set data.heldout_fraction 0"
            )
        count = min(max(count, _run(by_hash)), len(by_hash) - _run(by_hash[::-1]))
    return by_hash[count:], by_hash[:count]


def _run(keyed: list[_Keyed]) -> int:
    """How many documents at the beginning are the same one."""
    same = [item.digest == keyed[0].digest for item in keyed]
    return same.index(False)


def _drop_repeated(parts: list[list[_Keyed]], lost: Counter[str]) -> list[list[_Keyed]]:
    """Earlier parts keep their paragraphs; later documents, and later parts, lose repetitions."""
    seen: set[bytes] = set()
    kept: list[list[_Keyed]] = []
    for part in parts:
        kept.append([])
        for item in part:
            if isinstance(item.raw.content, str):
                text = _without_repeated(item.raw.content, seen, lost)
                item = item._replace(raw=item.raw._replace(content=text))
                if not text.strip():
                    lost["emptied_documents"] += 1
                    continue
            kept[-1].append(item)
    return kept


def _without_repeated(text: str, seen: set[bytes], lost: Counter[str]) -> str:
    """The text without the paragraphs that stand in `seen`, to which its own are added."""
    pieces = re.split(r"(\n[^\S\n]*\n\s*)", text)  # paragraph, border, paragraph, …
    kept = []
    for index in range(0, len(pieces), 2):
        words = " ".join(pieces[index].split())
        if len(words) >= _PARAGRAPH_CHARACTERS:
            key = hashlib.blake2b(words.encode(), digest_size=16).digest()
            if key in seen:
                lost["repeated_paragraphs"] += 1
                lost["repeated_characters"] += len(pieces[index])
                continue
            seen.add(key)
        kept.append("".join(pieces[index : index + 2]))
    return "".join(kept).strip("\n") if len(kept) * 2 < len(pieces) else text


def _tokenize(
    raws: list[Raw],
    tokenizer: Tokenizer,
    lost: Counter[str],
    named: Counter[str],
    enough: int | None,
) -> list[Document]:
    """Documents in their order, until they have `enough` tokens."""
    documents: list[Document] = []
    tokens = 0
    has_chat = any(isinstance(raw.content, list) for raw in raws)
    if has_chat:
        tokenizer.chat.check()  # refused as what it is: no line is to blame
    try:
        firsts = range(0, len(raws), _BATCH)
        for first in progress(firsts, "tokenizing", total=len(firsts)):
            if enough is not None and tokens >= enough:
                lost["untokenized_documents"] += len(raws) - first
                break
            batch = raws[first : first + _BATCH]
            texts = [raw.content for raw in batch if isinstance(raw.content, str)]
            encoded = iter(tokenizer.encode_batch(texts))
            for raw in batch:
                document = _document(raw, encoded, tokenizer, lost, named)
                documents.append(document)
                tokens += len(document.tokens)
    finally:
        if has_chat:
            tokenizer.chat.close()
    return documents


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


def _used_fractions(
    documents: list[Document], owner: np.ndarray, sources: list[Source]
) -> np.ndarray:
    """Per source, the fraction of its tokens to use; 1 where it runs out first."""
    lengths = np.array([len(document.tokens) for document in documents], np.int64)
    totals = np.bincount(owner, lengths, minlength=len(sources))
    for source, total in zip(sources, totals, strict=True):
        if total == 0:
            raise UserError(
                f"expected documents in {source.path} to give it weight {source.weight}, got none "
                f"to train on; add documents or leave the source out"
            )
    weights = np.array([source.weight for source in sources], np.float64)
    supply = totals / weights
    return supply.min() / supply


def _use(
    documents: list[Document], owner: np.ndarray, used: np.ndarray, lost: Counter[str]
) -> list[Document]:
    """Of each source its first documents, until its used fraction of the tokens is reached."""
    lengths = np.array([len(document.tokens) for document in documents], np.int64)
    keep = np.zeros(len(documents), bool)
    for index, fraction in enumerate(used):
        mine = np.flatnonzero(owner == index)
        before = np.cumsum(lengths[mine]) - lengths[mine]
        keep[mine] = before < fraction * lengths[mine].sum() - 0.5
    lost["left_out_documents"] += int((~keep).sum())
    lost["left_out_tokens"] += int(lengths[~keep].sum())
    return [document for document, kept in zip(documents, keep, strict=True) if kept]
