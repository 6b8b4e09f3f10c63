"""Paragraphs that stand more than once: found by 128 bits of each, in bounded memory."""

import hashlib
import re
from collections import Counter

import numpy as np

_CHARACTERS = 80  # a shorter one may repeat
SLOTS = 1 << 24  # at most: 256 MiB
_FULL = 0.7  # of the slots; beyond it a search gets long
_PROBES = 16  # slots looked at together


class SeenParagraphs:
    """A set of paragraphs, by the first 128 bits of their BLAKE2b: an open-addressing table [slots,
    2] uint64 with linear probing, which doubles up to `slots`. Once it is full, no more are added,
    and what repeats them is not found: `is_full` says so. Two different paragraphs are taken for
    the same with a chance of 2⁻⁸¹ among 12 million.
    """

    def __init__(self, slots: int = SLOTS):
        self._most, self._count = slots, 0
        self._table = np.zeros((min(1 << 12, slots), 2), np.uint64)

    def copy(self) -> "SeenParagraphs":
        """Another one with the same paragraphs."""
        other = SeenParagraphs(self._most)
        other._table, other._count = self._table.copy(), self._count
        return other

    @property
    def is_full(self) -> bool:
        """Whether it takes no more."""
        return len(self._table) == self._most and self._count >= _FULL * self._most

    def add(self, keys: list[bytes]) -> list[bool]:
        """Add keys of 16 bytes; whether each is new, also among those before it in the list."""
        distinct = list(dict.fromkeys(keys))
        if not distinct:
            return []
        while self._count + len(distinct) > _FULL * len(self._table) and (
            len(self._table) < self._most
        ):
            self._double()
        found = self._insert(np.frombuffer(b"".join(distinct), np.uint64).reshape(-1, 2))
        new = dict(zip(distinct, found.tolist(), strict=True))
        return [new.pop(key, False) for key in keys]

    def _double(self) -> None:
        old = self._table[self._table.any(axis=1)]
        self._table, self._count = np.zeros((2 * len(self._table), 2), np.uint64), 0
        self._insert(old)

    def _insert(self, keys: np.ndarray) -> np.ndarray:
        """Which of different keys [n,2] were not there: bool [n]. They are then, if not full."""
        # A few at a time: for the memory that looking takes, and as the room above _FULL is small.
        step = max(1, min(1 << 14, self._most // 16))
        pieces = [self._insert_few(keys[i : i + step]) for i in range(0, len(keys), step)]
        return np.concatenate(pieces) if pieces else np.zeros(0, bool)

    def _insert_few(self, keys: np.ndarray) -> np.ndarray:
        new, left = np.zeros(len(keys), bool), np.arange(len(keys))
        may_add, last = not self.is_full, len(self._table) - 1
        slots = (keys[:, 0] & np.uint64(last)).astype(np.int64)
        while len(left):
            window = slots[left, None] + np.arange(_PROBES) & last
            there = self._table[window]
            found = (there == keys[left, None]).all(axis=2).any(axis=1)
            empty = ~there.any(axis=2)  # a key that is there stands before the first one
            ends = ~found & empty.any(axis=1)
            won = left[ends]
            if may_add:
                free = window[ends, empty[ends].argmax(axis=1)]
                self._table[free] = keys[won]
                won = won[(self._table[free] == keys[won]).all(axis=1)]  # one of two that met there
            new[won] = True
            slots[left[~(found | ends)]] += _PROBES
            left = left[~(found | new[left])]
        self._count += int(new.sum()) if may_add else 0
        return new


def without_repeated(text: str, seen: SeenParagraphs, lost: Counter[str]) -> str:
    """The text without the paragraphs (between empty lines) of at least 80 characters, white space
    aside, that are in `seen`, to which its own are added."""
    pieces = re.split(r"(\n[^\S\n]*\n\s*)", text)  # paragraph, border, paragraph, …
    words = [" ".join(paragraph.split()) for paragraph in pieces[::2]]
    long = [each for each in words if len(each) >= _CHARACTERS]
    keys = [hashlib.blake2b(each.encode(), digest_size=16).digest() for each in long]
    is_new, kept = iter(seen.add(keys)), []
    for index, each in enumerate(words):
        if len(each) < _CHARACTERS or next(is_new):
            kept.append("".join(pieces[2 * index : 2 * index + 2]))
        else:
            lost["repeated_paragraphs"] += 1
            lost["repeated_characters"] += len(pieces[2 * index])
    return text if len(kept) == len(words) else "".join(kept).strip("\n")
