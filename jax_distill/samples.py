"""Continuations of held-out text by several models, side by side: greedy, with a cache of keys and
values.

Letters: n prompts, P positions of a prompt.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_distill.base.console import say
from jax_distill.cache import Cache
from jax_distill.data import Tokenizer
from jax_distill.model import Decoder, continue_greedily
from jax_distill.model_folder import model_name
from jax_distill.sharding import to_host

PROMPT_TOKENS = 32
THE_TEXT = "the text itself"


class Words:
    """Token ids → text, by a folder's tokenizer; without one the ids themselves."""

    def __init__(self, folder: Path | None):
        known = folder is not None and (folder / "tokenizer.json").is_file()
        self._tokenizer = Tokenizer.load(folder) if folder is not None and known else None

    def text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Of ids that stand side by side."""
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return self._tokenizer.decode(tokens)

    def up_to_end(self, tokens: np.ndarray) -> np.ndarray:
        """[n] → without what follows the first end of text."""
        if self._tokenizer is None or self._tokenizer.eos_id is None:
            return tokens
        ends = np.flatnonzero(tokens == self._tokenizer.eos_id)
        return tokens[: ends[0] + 1] if len(ends) else tokens


class Prompts(NamedTuple):
    """The beginnings of documents, padded on the left (segment 0): int32 [n,P] three times, and
    what follows in the text, a list of n arrays."""

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    following: list[np.ndarray]


def _longest_document(segment_ids: np.ndarray) -> slice:
    """Of a row [T]; empty where it is padding."""
    ends = [*(np.flatnonzero(np.diff(segment_ids)) + 1), len(segment_ids)]
    runs = [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    real = [run for run in runs if segment_ids[run.start] > 0]
    return max(real, key=lambda run: run.stop - run.start, default=slice(0, 0))


def choose_prompts(cache: Cache, rows: np.ndarray, *, count: int, new_tokens: int) -> Prompts:
    """At most `count` beginnings, of the longest document each in rows spread over `rows`: its
    first PROMPT_TOKENS, or the first half where it is shorter than two times that."""
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int))]
    batch = cache.read(chosen, targets=False)
    tokens, segment_ids, positions = np.zeros((3, len(chosen), PROMPT_TOKENS), np.int32)
    following: list[np.ndarray] = []
    for row in range(len(chosen)):
        document = _longest_document(batch.segment_ids[row])
        size = min(PROMPT_TOKENS, (document.stop - document.start) // 2)
        if not size:
            continue
        which, end = len(following), document.start + size
        tokens[which, -size:] = batch.tokens[row, document.start : end]
        positions[which, -size:] = batch.positions[row, document.start : end]
        segment_ids[which, -size:] = 1
        following.append(batch.tokens[row, end : min(document.stop, end + new_tokens)])
    n = len(following)
    return Prompts(tokens[:n], segment_ids[:n], positions[:n], following)


def continuations(
    models: Mapping[str, Decoder],
    cache: Cache,
    rows: np.ndarray,
    words: Words,
    *,
    count: int,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """[{"prompt": its text, "continuations": {THE_TEXT: …, model: its text, …}}, …]: `new_tokens`
    greedy tokens after at most `count` beginnings of documents in `rows`, up to an end of text."""
    if not count or not len(rows):
        return []
    prompts = choose_prompts(cache, rows, count=count, new_tokens=new_tokens)
    if not prompts.following:
        return []
    inputs = (prompts.tokens, prompts.segment_ids, prompts.positions)
    options = {"new_tokens": new_tokens, "vocab_size": cache.manifest.vocab_size}
    made = {
        name: to_host(continue_greedily(model, *inputs, **options))
        for name, model in models.items()
    }
    samples = []
    for row, following in enumerate(prompts.following):
        by_name = {THE_TEXT: following, **{name: tokens[row] for name, tokens in made.items()}}
        prompt = prompts.tokens[row][prompts.segment_ids[row] > 0]
        texts = {name: words.text(words.up_to_end(tokens)) for name, tokens in by_name.items()}
        samples.append({"prompt": words.text(prompt), "continuations": texts})
    return samples


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """A line each, in quotes, so that what a model writes breaks none."""
    for number, sample in enumerate(samples, 1):
        say(f"sample {number}: {sample['prompt']!r}")
        for name, text in sample["continuations"].items():
            say(f"  {model_name(name)}: {text!r}")
