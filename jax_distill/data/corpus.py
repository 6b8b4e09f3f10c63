"""Sources to a corpus: held-out split, repeated paragraphs, tokens, mixture."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from jax_distill.config import Refusal, Source
from jax_distill.data.builtin import builtin_versions
from jax_distill.data.document import Corpus, Counts, Document, Raw
from jax_distill.data.readers import read_raw, source_files
from jax_distill.data.tokenizer import Tokenizer

_READER_VERSION = 1  # raise it when the same input comes to give other documents
_PARAGRAPH_CHARACTERS = 80  # a shorter one may repeat
_BATCH = 1000

Path_ = str | Sequence[Source]


class _Keyed(NamedTuple):
    digest: bytes
    source: int
    raw: Raw


def read_documents(
    path: Path_, *, format: str = "auto", tokenizer: Tokenizer, heldout_fraction: float
) -> Corpus:
    """Reads, splits, cleans and tokenises.

    1. Held out are the documents whose content's sha256, read as a number in [0, 1), is below
       `heldout_fraction`: whoever reads the same documents, in whatever order or mixture, agrees. A
       fraction above 0 holds out at least one document and leaves at least one (smallest and
       largest hash). The order of both parts is another part of the hash: a fixed shuffle, so that
       the first rows are a fair sample.
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

    Raises:
        Refusal: see `read_raw`; a fraction out of range; a token id that the tokenizer lacks;
            nothing to train on.
    """
    sources = _sources(path)
    keyed = _read(sources, format, tokenizer.eos_id)
    train, heldout = _hold_out(keyed, heldout_fraction)
    lost: Counter[str] = Counter()
    heldout, train = _drop_repeated([heldout, train], lost)
    parts = []
    for part in (train, heldout):
        documents = _tokenise([item.raw for item in part], tokenizer, lost)
        parts.append(_mix(documents, [item.source for item in part], sources, lost))
    if not any(len(document.tokens) > 1 for document in parts[0]):
        raise Refusal(f"expected text to train on in {_names(sources)}, got none; add documents")
    both = parts[0] + parts[1]
    counts = Counts(
        documents=len(parts[0]),
        tokens=sum(len(document.tokens) for document in parts[0]),
        heldout_documents=len(parts[1]),
        heldout_tokens=sum(len(document.tokens) for document in parts[1]),
        target_tokens=sum(int(document.targets.sum()) for document in both),
        untargeted_documents=sum(not document.targets.any() for document in both),
        **lost,
    )
    return Corpus(parts[0], parts[1], counts)


def read_texts(path: Path_, *, format: str = "auto", heldout_fraction: float) -> list[str]:
    """The text documents of the training part, to train a tokenizer on: as in `read_documents`.

    Raises:
        Refusal: as `read_documents`; or the sources are not text.
    """
    train, heldout = _hold_out(_read(_sources(path), format, None), heldout_fraction)
    _, train = _drop_repeated([heldout, train], Counter())
    texts = [item.raw.content for item in train if isinstance(item.raw.content, str)]
    if not texts:
        raise Refusal(f"expected text to train a tokenizer on, got none in {path}; name a tokenizer")
    return texts


def fingerprint(
    path: Path_,
    *,
    format: str,
    heldout_fraction: float,
    sequence_length: int,
    packing: bool,
    max_rows: int | None,
    tokenizer: Tokenizer,
) -> str:
    """sha256 of all that decides a store's rows: the sources' bytes and the settings.

    Built-in text goes in as the versions it is made from, a hub data set as its name and the
    version of `datasets`. Reading a few GB takes seconds.
    """
    digest = hashlib.sha256()
    settings = [_READER_VERSION, format, heldout_fraction, sequence_length, packing, max_rows]
    digest.update(json.dumps([*settings, tokenizer.files_hash]).encode())
    for source in _sources(path):
        weight = None if source.weight is None else float(source.weight)
        digest.update(json.dumps(["source", weight]).encode())
        if source.path.startswith("builtin:"):
            digest.update(f"{source.path} {builtin_versions()}".encode())
        elif format == "hub":
            digest.update(f"{source.path} datasets {version('datasets')}".encode())
        else:
            for file in source_files(source.path):
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _sources(path: Path_) -> list[Source]:
    sources = [Source(path, None)] if isinstance(path, str) else list(path)
    weights = [source.weight for source in sources]
    if not sources:
        raise Refusal("expected data.path to name a source, got an empty list")
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        raise Refusal(f"expected a weight for every source or for none, got {weights}")
    for source in sources:
        if source.weight is not None and not 0 < source.weight < float("inf"):
            raise Refusal(f"expected a weight above 0 for {source.path}, got {source.weight}")
    return sources


def _names(sources: list[Source]) -> str:
    return ", ".join(source.path for source in sources)


def _read(sources: list[Source], format: str, eos_id: int | None) -> list[_Keyed]:
    return [
        _Keyed(_digest(raw), index, raw)
        for index, source in enumerate(sources)
        for raw in read_raw(source.path, format=format, eos_id=eos_id)
    ]


def _digest(raw: Raw) -> bytes:
    """sha256 of the content alone: not of its place, not of how a tokenizer cuts it."""
    if isinstance(raw.content, str):
        data = raw.content.encode("utf-8", "surrogatepass")
    elif isinstance(raw.content, np.ndarray):
        data = raw.content.astype("<i4").tobytes()
    else:
        data = json.dumps(raw.content, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).digest()


def _hold_out(keyed: list[_Keyed], fraction: float) -> tuple[list[_Keyed], list[_Keyed]]:
    """(train, heldout): bytes 0–7 of the hash choose the part, the others the order in it."""
    if not 0 <= fraction < 1:
        raise Refusal(f"expected data.heldout_fraction in [0, 1), got {fraction}")
    by_hash = sorted(keyed, key=lambda item: item.digest)
    bound = int(fraction * 2.0**64)
    count = sum(int.from_bytes(item.digest[:8]) < bound for item in by_hash)
    if fraction > 0:
        if len({item.digest for item in by_hash}) < 2:
            raise Refusal(
                f"expected at least 2 different documents to hold one out, got {len(keyed)}; "
                f"give more documents, or set data.heldout_fraction: 0"
            )
        count = min(max(count, _run(by_hash)), len(by_hash) - _run(by_hash[::-1]))
    parts = by_hash[count:], by_hash[:count]
    train, heldout = (sorted(part, key=lambda item: item.digest[8:]) for part in parts)
    return train, heldout


def _run(keyed: list[_Keyed]) -> int:
    """How many documents at the beginning are the same one."""
    same = [item.digest == keyed[0].digest for item in keyed]
    return same.index(False)


def _drop_repeated(parts: list[list[_Keyed]], lost: Counter[str]) -> list[list[_Keyed]]:
    """Earlier parts keep their paragraphs; later documents, and later parts, lose repetitions."""
    seen: set[bytes] = set()
    kept = []
    for part in parts:
        kept.append([])
        for item in part:
            content = item.raw.content
            if len(content) == 0:
                lost["empty_documents"] += 1
                continue
            if isinstance(content, str):
                text = _without_repeated(content, seen, lost)
                if not text.strip():
                    lost["emptied_documents" if content.strip() else "empty_documents"] += 1
                    continue
                item = item._replace(raw=item.raw._replace(content=text))
            kept[-1].append(item)
    return kept


def _without_repeated(text: str, seen: set[bytes], lost: Counter[str]) -> str:
    """The text without the paragraphs that stand in `seen`, to which its own are added."""
    pieces = re.split(r"(\n[^\S\n]*\n\s*)", text)  # paragraph, border, paragraph, …
    kept = []
    for index in range(0, len(pieces), 2):
        words = " ".join(pieces[index].split())
        if len(words) >= _PARAGRAPH_CHARACTERS:
            key = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key in seen:
                lost["repeated_paragraphs"] += 1
                lost["repeated_characters"] += len(pieces[index])
                continue
            seen.add(key)
        kept.append("".join(pieces[index : index + 2]))
    return "".join(kept) if len(kept) * 2 < len(pieces) else text


def _tokenise(raws: list[Raw], tokenizer: Tokenizer, lost: Counter[str]) -> list[Document]:
    documents: list[Document] = []
    for first in range(0, len(raws), _BATCH):
        batch = raws[first : first + _BATCH]
        texts = [raw.content for raw in batch if isinstance(raw.content, str)]
        encoded = iter(tokenizer.encode_batch(texts))
        for raw in batch:
            if isinstance(raw.content, str):
                documents.append(_text_document(next(encoded), tokenizer, lost))
            elif isinstance(raw.content, np.ndarray):
                documents.append(_token_document(raw, tokenizer))
            else:
                documents.append(_chat_document(raw, tokenizer))
    return documents


def _text_document(tokens: np.ndarray, tokenizer: Tokenizer, lost: Counter[str]) -> Document:
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if tokenizer.adds_bos:
        others = tokens != bos
        doubled = int(others.argmax()) if others.any() else len(tokens)
        lost["dropped_bos"] += doubled
        tokens = np.concatenate([[bos], tokens[doubled:]])
    if eos is not None and (len(tokens) == 0 or tokens[-1] != eos):
        tokens = np.concatenate([tokens, [eos]])
    return Document(tokens.astype(np.int32), np.ones(len(tokens), bool))


def _token_document(raw: Raw, tokenizer: Tokenizer) -> Document:
    tokens = np.asarray(raw.content)
    if tokens.size and tokens.max() >= tokenizer.length:
        bad = int(np.argmax(tokens >= tokenizer.length))
        raise Refusal(
            f"{raw.where}: expected ids below {tokenizer.length}, the tokenizer's length, "
            f"got {tokens[bad]} at position {bad}; name the tokenizer that made them"
        )
    targets = np.ones(len(tokens), bool) if raw.targets is None else raw.targets
    return Document(tokens, targets)


def _chat_document(raw: Raw, tokenizer: Tokenizer) -> Document:
    try:
        return tokenizer.chat(raw.content)  # type: ignore[arg-type]
    except Refusal as refusal:
        raise Refusal(f"{raw.where}: {refusal}") from None


def _mix(
    documents: list[Document], source_of: list[int], sources: list[Source], lost: Counter[str]
) -> list[Document]:
    """Takes of each source, in order, documents up to its share of the tokens."""
    if sources[0].weight is None:
        return documents
    lengths = np.array([len(document.tokens) for document in documents], np.int64)
    owner = np.array(source_of, np.int64)
    weights = np.array([source.weight for source in sources], np.float64)
    totals = np.bincount(owner, lengths, minlength=len(sources))
    if len(documents) == 0:
        return documents
    shares = weights * (totals / weights).min()
    keep = np.zeros(len(documents), bool)
    for index in range(len(sources)):
        mine = np.flatnonzero(owner == index)
        before = np.cumsum(lengths[mine]) - lengths[mine]
        keep[mine] = before < shares[index] - 0.5
    lost["left_out_documents"] += int((~keep).sum())
    lost["left_out_tokens"] += int(lengths[~keep].sum())
    return [document for document, kept in zip(documents, keep, strict=True) if kept]
