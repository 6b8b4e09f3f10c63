"""Sources to documents, a stream: held-out split, order, repeated paragraphs, tokens, mixture.

The sources are read from their beginning at each pass; what is in memory at once is bounded: a
window of documents (WINDOW), the paragraphs seen (`SeenParagraphs`), two batches of tokens.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.config import Source
from jax_distill.data.document import Counts, Document, Documents, Raw
from jax_distill.data.paragraphs import SLOTS, SeenParagraphs, without_repeated
from jax_distill.data.sources import Path_, names_of, sources_of
from jax_distill.data.survey import SPLITS, Item, Split, read_items, survey_sources
from jax_distill.data.tokenizer import Tokenizer
from jax_distill.data.tokenizing import tokenized

WINDOW = 1 << 26  # bytes of the documents that are put into another order together


class Taken(NamedTuple):
    """How much of a stream of documents was used: documents and their tokens, one number a stream.
    Without weights all sources are one stream."""

    documents: tuple[int, ...]
    tokens: tuple[int, ...]


class Corpus:
    """The documents of a configuration's sources.

    1. Held out are the documents whose content's sha256, read as a number in [0, 1), is below
       `heldout_fraction`: whoever reads the same documents, in whatever order or mixture, agrees. A
       fraction above 0 holds out at least one document and leaves at least one (smallest and
       largest hash).
    2. Sources without weights are read side by side, each as far as the others in proportion to its
       documents. What fits a window of 64 MiB comes in the order of the hashes, a fixed shuffle, so
       that the first rows are a fair sample; of more, a document leaves the window for each that
       enters it, which one by the hash of that.
    3. A paragraph of text of at least 80 characters stands once: in the held-out part if it stands
       there at all. Repetitions are dropped and counted (`SeenParagraphs`). Chat and token
       documents are left as they are.
    4. Documents are tokenized (`tokenized`), no more than are asked for.
    5. Weights are shares of the tokens: the next document is that of the source that is furthest
       behind its share, until the source whose turn it is runs out; no document repeats. Paragraphs
       are then compared within a source, and with what is held out of any.

    Attributes:
        sources: their names, for messages.
        counts: of what was read so far.
    """

    def __init__(
        self,
        path: Path_,
        *,
        format: str = "auto",
        tokenizer: Tokenizer | None,
        heldout_fraction: float,
        holds_out_one: bool = True,
    ):
        """Reads the sources once, for the split.

        Args:
            path: a source as in `read_raw`, or a list of `Source(path, weight)`.
            format: of every source.
            tokenizer: None reads `texts` alone.
            heldout_fraction: in [0, 1).
            holds_out_one: as point 1 says; else the hash alone decides.

        Raises:
            UserError: see `read_raw`; weights that make no sense; fewer than two documents.
        """
        self._sources, self._format, self._tokenizer = sources_of(path), format, tokenizer
        self._eos_id = tokenizer.eos_id if tokenizer else None
        self.sources = names_of(self._sources)
        say(f"reading {self.sources}")
        self._survey = survey_sources(
            self._sources, format, self._eos_id, heldout_fraction, at_least_one=holds_out_one
        )
        self._read: dict[Split, _Counted] = {}

    @property
    def is_weighted(self) -> bool:
        return self._sources[0].weight is not None

    @property
    def streams(self) -> int:
        """How many streams of documents are mixed by their tokens."""
        return len(self._sources) if self.is_weighted else 1

    def documents(self, split: Split, start: Taken | None = None) -> Iterator[tuple[int, Document]]:
        """(stream, document), from the beginning or after what was `taken` before: that is read
        again, but not tokenized.

        Raises:
            UserError: see `read_raw` and `tokenized`; a source with a weight and no document.
        """
        taken = start or Taken((0,) * self.streams, (0,) * self.streams)
        counted = self._read[split] = _Counted()
        if not self.is_weighted:
            raws = self._cleaned(split, range(len(self._sources)), counted, self._seen(split))
            for document in self._tokenized(raws, counted, taken.documents[0]):
                yield 0, document
            counted.is_complete = True
            return
        streams, seen = [], self._seen(split)
        for number, done in enumerate(taken.documents):
            raws = self._cleaned(split, [number], counted, seen.copy())
            streams.append(self._tokenized(raws, counted, done))
        yield from _by_weight(streams, self._sources, taken, allow_none=split == "heldout")

    def share_read(self, split: Split) -> float:
        """How much of a part has been tokenized, by its bytes, in (0, 1]."""
        counted = self._read[split]
        return 1.0 if counted.is_complete else counted.size / max(self._survey.sizes[split], 1)

    @property
    def counts(self) -> Counts:
        found = {split: self._read.get(split, _Counted()) for split in SPLITS}
        lost = sum((each.lost for each in found.values()), Counter())
        read = {split: each.documents + each.lost["emptied_documents"]
                for split, each in found.items()}  # fmt: skip
        left = sum(max(self._survey.count[split] - read[split], 0) for split in found)
        return Counts(
            documents=found["train"].documents,
            tokens=found["train"].tokens,
            heldout_documents=found["heldout"].documents,
            heldout_tokens=found["heldout"].tokens,
            target_tokens=sum(each.targets for each in found.values()),
            untargeted_documents=sum(each.untargeted for each in found.values()),
            empty_documents=self._survey.empty,
            unread_documents=left,
            full_filters=sum(each.is_full for each in found.values()),
            named=dict(sum((each.named for each in found.values()), Counter())),
            **lost,
        )

    def texts(self) -> Iterator[str]:
        """The text documents of the training part, to train a tokenizer on."""
        counted = _Counted()
        raws = self._cleaned("train", range(len(self._sources)), counted, self._seen("train"))
        return (item.raw.content for item in raws if isinstance(item.raw.content, str))

    def _tokenized(
        self, items: Iterator[Item], counted: "_Counted", skip: int
    ) -> Iterator[Document]:
        """Documents of the items, but of the first `skip`, whose tokens are known."""
        assert self._tokenizer is not None
        counted.size += sum(item.size for item in itertools.islice(items, skip))
        sizes: deque[int] = deque()

        def raws() -> Iterator[Raw]:
            for item in items:
                sizes.append(item.size)
                yield item.raw

        for document in tokenized(raws(), self._tokenizer, counted.lost, counted.named):
            counted.size += sizes.popleft()
            counted.add(document)
            yield document

    def _seen(self, split: Split) -> SeenParagraphs:
        """A set of paragraphs to begin a part with: for training, those that are held out."""
        seen = SeenParagraphs(SLOTS >> (self.streams - 1).bit_length())
        if split == "train" and self._survey.threshold:
            for item in self._items("heldout", range(len(self._sources))):
                if isinstance(item.raw.content, str):
                    without_repeated(item.raw.content, seen, Counter())
        return seen

    def _cleaned(
        self, split: Split, sources: Sequence[int], counted: "_Counted", seen: SeenParagraphs
    ) -> Iterator[Item]:
        """The part's documents of some sources, in their order, without repeated paragraphs."""
        for item in _shuffled(self._items(split, sources)):
            if isinstance(item.raw.content, str):
                text = without_repeated(item.raw.content, seen, counted.lost)
                counted.is_full = seen.is_full
                if not text.strip():
                    counted.lost["emptied_documents"] += 1
                    continue
                item = item._replace(raw=item.raw._replace(content=text))
            yield item

    def _items(self, split: Split, sources: Sequence[int]) -> Iterator[Item]:
        """The part's documents of some sources, side by side, as they are read."""
        each = [read_items(self._sources[number], self._format, self._eos_id) for number in sources]
        totals = [self._survey.documents[number] for number in sources]
        threshold = self._survey.threshold
        for item in _side_by_side(each, totals):
            if item is not None and (item.digest < threshold) == (split == "heldout"):
                yield item


@dataclass
class _Counted:
    """What one pass has read of one part."""

    lost: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    untargeted: int = 0
    size: int = 0
    is_full: bool = False
    is_complete: bool = False

    def add(self, document: Document) -> None:
        targets = int(document.targets.sum())
        self.documents += 1
        self.tokens += len(document.tokens)
        self.targets += targets
        self.untargeted += not targets


def read_documents(
    path: Path_, *, format: str = "auto", tokenizer: Tokenizer, heldout_fraction: float
) -> Documents:
    """All documents of a `Corpus` at once, for sets that memory holds. Raises as it does; also
    where there is nothing to train on, or nothing to predict in the held-out part."""
    corpus = Corpus(path, format=format, tokenizer=tokenizer, heldout_fraction=heldout_fraction)
    heldout, train = (
        [document for _, document in corpus.documents(split)] for split in ("heldout", "train")
    )
    if not any(document.targets[1:].any() for document in train):
        raise UserError(f"expected text to train on in {corpus.sources}, got none; add documents")
    if heldout and not any(document.targets[1:].any() for document in heldout):
        raise UserError(
            f"expected text to predict in the held-out part of {corpus.sources}, got none in "
            f"{len(heldout)} documents; raise data.heldout_fraction, or add documents"
        )
    return Documents(train, heldout, corpus.counts)


def read_texts(path: Path_, *, format: str = "auto", heldout_fraction: float) -> Iterator[str]:
    """The text documents of the training part, to train a tokenizer on.

    Raises:
        UserError: as `Corpus`; or the sources are not text.
    """
    corpus = Corpus(path, format=format, tokenizer=None, heldout_fraction=heldout_fraction)
    texts = corpus.texts()
    first = next(texts, None)
    if first is None:
        raise UserError(
            f"expected text to train a tokenizer on in {corpus.sources}, got none; "
            f"set data.tokenizer to a folder"
        )
    return itertools.chain([first], texts)


def _side_by_side(streams: list[Iterator[Item | None]], totals: list[int]) -> Iterator[Item | None]:
    """Every item of every stream; the next is that of the stream of which the smallest part of its
    total has come, the first of several."""
    behind = [(0.0, number) for number in range(len(streams)) if totals[number]]
    come = [0] * len(streams)
    while behind:
        _, number = behind[0]
        come[number] += 1
        item = next(streams[number], _END)
        if isinstance(item, _End):
            heapq.heappop(behind)
        else:
            heapq.heapreplace(behind, (come[number] / totals[number], number))
            yield item


class _End:
    """Behind the last item."""


_END = _End()


def _shuffled(items: Iterator[Item]) -> Iterator[Item]:
    """In the order of the digests, where they fit WINDOW; else each that comes sends one of the
    window out, chosen by its own digest."""
    window: list[Item] = []
    size = 0
    for item in items:
        window.append(item)
        size += item.size
        while size > WINDOW:
            chosen = int.from_bytes(item.digest[8:16]) % len(window)
            window[chosen], window[-1] = window[-1], window[chosen]
            size -= window[-1].size
            yield window.pop()
    window.sort(key=lambda item: item.digest)
    yield from window


def _by_weight(
    streams: list[Iterator[Document]], sources: list[Source], taken: Taken, *, allow_none: bool
) -> Iterator[tuple[int, Document]]:
    weights = [source.weight or 1.0 for source in sources]
    documents, tokens = list(taken.documents), list(taken.tokens)
    while True:
        number = min(range(len(streams)), key=lambda each: tokens[each] / weights[each])
        document = next(streams[number], None)
        if document is None:
            if not documents[number] and not allow_none:
                raise UserError(
                    f"expected documents in {sources[number].path} to give it weight "
                    f"{weights[number]}, got none to train on; add documents or leave the source "
                    "out"
                )
            return
        documents[number] += 1
        tokens[number] += len(document.tokens)
        yield number, document
