"""Where students are furthest from their teacher: the held-out positions of largest KL, with the
most likely tokens of both as text.

Letters: B rows, T positions, D hidden, V vocabulary; n positions found, k tokens shown of each.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_distill.base.console import say
from jax_distill.batch import Batch
from jax_distill.cache import Cache
from jax_distill.html_tables import tokens_as_text
from jax_distill.losses import Head
from jax_distill.losses.head import head_matmul
from jax_distill.model_folder import model_name
from jax_distill.samples import Words

POSITIONS = 8
TOKENS = 4
CONTEXT_TOKENS = 16
Tops = dict[str, tuple[Any, Any]]
"""By "teacher" and "student": the ids and probabilities [k] of their most likely tokens."""


class Furthest(NamedTuple):
    """The positions of largest KL of a batch, largest first.

    Attributes:
        kl: fp32 [n], nats. where: int32 [n], row · T + position.
        teacher_ids, student_ids: int32 [n,k], the most likely tokens, in order.
        teacher_probabilities, student_probabilities: fp32 [n,k], theirs, at temperature 1.
    """

    kl: jax.Array
    where: jax.Array
    teacher_ids: jax.Array
    teacher_probabilities: jax.Array
    student_ids: jax.Array
    student_probabilities: jax.Array


def furthest_positions(
    kl: jax.Array, teacher: tuple[jax.Array, Head], student: tuple[jax.Array, Head], *, count: int
) -> Furthest:
    """kl: fp32 [B,T], 0 where masked; hidden [B,T,D] and head of both → at most `count` positions.
    The logits are made again for these alone, [n,V]."""
    largest, where = jax.lax.top_k(kl.reshape(-1), min(count, kl.size))

    def most_likely(hidden: jax.Array, head: Head) -> tuple[jax.Array, jax.Array]:
        chosen = hidden.reshape(-1, hidden.shape[-1])[where]
        z = head.transform(head_matmul(chosen[None], head.weight))[0, :, : head.real_vocab_size]
        p, ids = jax.lax.top_k(jax.nn.softmax(z), min(TOKENS, z.shape[-1]))
        return ids, p

    return Furthest(largest, where, *most_likely(*teacher), *most_likely(*student))


class Disagreements:
    """The positions of largest KL of all batches so far, by student."""

    def __init__(self, words: Words, cache: Cache, *, count: int = POSITIONS):
        self._words, self._cache, self.count = words, cache, count
        self._kept: dict[str, list[tuple[float, int, int, Tops]]] = {}

    def add(self, name: str, rows: np.ndarray, found: Furthest) -> None:
        """What a student's batch of these rows of the cache has, [B] of them at most; numpy."""
        kept = self._kept.setdefault(name, [])
        for number, (kl, where) in enumerate(zip(found.kl, found.where, strict=True)):
            if kl > 0:  # else it is masked, or there is no difference
                index, position = divmod(int(where), self._cache.sequence_length)
                tops = {
                    "teacher": (found.teacher_ids[number], found.teacher_probabilities[number]),
                    "student": (found.student_ids[number], found.student_probabilities[number]),
                }
                kept.append((float(kl), -int(rows[index]), -position, tops))
        self._kept[name] = heapq.nlargest(self.count, kept, key=lambda item: item[:3])

    def found(self) -> dict[str, list[dict[str, Any]]]:
        """By student, largest KL first: kl (nats), row and position in the cache, `context` (the
        text up to there), `next` (the text's own next token), and the most likely tokens with their
        probabilities of `teacher` and `student`."""
        return {name: [self._in_words(*item) for item in kept] for name, kept in self._kept.items()}

    def _in_words(self, kl: float, row: int, position: int, tops: Tops) -> dict[str, Any]:
        row, position, text = -row, -position, self._words.text
        batch = self._cache.read([row], targets=False)
        entry: dict[str, Any] = {"kl": kl, "row": row, "position": position}
        entry |= {"context": text(_context(batch, position))}
        entry |= {"next": text(batch.labels[0, position, None])}
        for name, (ids, probabilities) in tops.items():
            pairs = zip(np.asarray(ids)[:, None], probabilities, strict=True)
            entry[name] = [(text(token), float(p)) for token, p in pairs]
        return entry


def _context(batch: Batch, position: int) -> np.ndarray:
    """The last tokens of the document up to a position of one row, at most CONTEXT_TOKENS."""
    part = slice(max(position + 1 - CONTEXT_TOKENS, 0), position + 1)
    own = batch.segment_ids[0, part] == batch.segment_ids[0, position]
    return batch.tokens[0, part][own]


def print_disagreements(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Three lines a position."""
    for name, entries in found.items():
        say(f"largest KL, {model_name(name)}:")
        for entry in entries:
            say(f"  {entry['kl']:.2f} nats after {entry['context']!r}, then {entry['next']!r}")
            for key in ("teacher", "student"):
                say(f"    {key}: {', '.join(tokens_as_text(entry[key]))}")
