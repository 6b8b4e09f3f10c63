"""Files of token ids and the K largest logprobs of each position → a cache's targets.

| form | a line of JSONL, or a row of parquet |
|---|---|
| own | `tokens` [n], `top_ids` and `top_logprobs` [n or n−1][k]: entry i is what position i predicts, the distribution of token i+1 |
| vLLM | `prompt_token_ids` [n], `prompt_logprobs` [n]: entry 0 is null, entry i an object {id: {"logprob": …}} (or {id: …}), what position i−1 predicts: the distribution of token i. vLLM adds the actual token i where it is not among the K largest: a K+1st |

`targets` [n] of 0 or 1 beside either says, as in token data, which tokens may be predicted. An
entry that is null or empty is not learned. In parquet the objects are maps or structs.

Logprobs are natural logarithms at τ = 1, of the whole vocabulary. Of the rest of the vocabulary
1 − Σ is all there is: below 0, by the rounding of what made them, it is clamped at 0 and counted.

n tokens, K kept entries, E entries of all positions of a sequence.
"""  # noqa: E501

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_distill.base.errors import UserError, shown
from jax_distill.base.json_object import json_line
from jax_distill.batch import EncodedTopK
from jax_distill.data.files import data_suffix, numbered_lines
from jax_distill.data.tables import SUFFIXES, table_rows

EXCESS = 0.01
"""That probabilities may sum to more than 1, or one be above it: bf16 logprobs are off by 2^-9 of
themselves, 0.4 % of the probability at −2 nats."""
LARGEST_GAP = np.float64(np.finfo(np.float16).max)


class Imported(NamedTuple):
    """One sequence.

    Attributes:
        tokens: int32 [n]. targets: bool [n], whether token i may be predicted: the position before
            has an entry.
        encoded: of [n,K] arrays, τ = 1, as a cache stores them; count 0 where nothing is known.
        clamped: positions whose 1 − Σ was below 0.
    """

    tokens: np.ndarray
    targets: np.ndarray
    encoded: EncodedTopK[np.ndarray]
    clamped: int


def read_sequences(file: Path, *, top_k: int, vocab_size: int) -> Iterator[Imported]:
    """The sequences of a file, .parquet, .arrow or JSONL (.gz, .zst), in its order; those without a
    token left out.

    Raises:
        UserError: a line that is of neither form, ids outside the vocabulary or twice in an entry,
            logprobs that are not finite or no log-probabilities; file and line are named.
    """
    for where, row in _rows(file):
        if (found := _sequence(row, where, top_k=top_k, vocab_size=vocab_size)) is not None:
            yield found


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a table or of JSONL."""
    if data_suffix(file) in SUFFIXES:
        for number, row in enumerate(table_rows(file)):
            yield f"{file} row {number}", row
        return
    for number, line in numbered_lines(file):
        where = f"{file}:{number}"
        yield where, json_line(line, where, cure="fix the line")


def _sequence(
    row: Mapping[str, Any], where: str, *, top_k: int, vocab_size: int
) -> Imported | None:
    is_vllm = "prompt_logprobs" in row
    key = "prompt_token_ids" if is_vllm else "tokens"
    if missing := {key, *(() if is_vllm else ("top_ids", "top_logprobs"))} - row.keys():
        raise UserError(
            f"{where}: expected the key {sorted(missing)[0]}, got {', '.join(row)[:200] or 'none'};"
            " write tokens, top_ids and top_logprobs, or prompt_token_ids and prompt_logprobs"
        )
    tokens = _whole_numbers(row[key], vocab_size, f"{where}: {key}")
    if not tokens.size:
        return None
    entries = _vllm_entries(row, len(tokens), where) if is_vllm else _entries(row, tokens, where)
    counts = np.array([len(ids) for ids, _ in entries], np.int64)
    position = np.repeat(np.arange(len(entries)), counts)
    ids = _whole_numbers(
        [*itertools.chain.from_iterable(ids for ids, _ in entries)], vocab_size, f"{where}: ids"
    )
    try:  # each a number: of lists np.array would make another axis
        logprobs = np.fromiter(
            itertools.chain.from_iterable(values for _, values in entries), np.float64
        )
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: expected logprobs to be numbers, got others; fix it") from None
    _check_logprobs(position, ids, logprobs, where)
    encoded, clamped = encode(position, ids, logprobs, length=len(tokens), top_k=top_k)
    targets = np.concatenate([[False], encoded.count[:-1] > 0])
    if row.get("targets") is not None:
        given = _whole_numbers(row["targets"], 2, f"{where}: targets", cure="fix it")
        if given.shape != tokens.shape:
            raise UserError(
                f"{where}: expected targets for each of {len(tokens)} tokens, got {len(given)}; "
                "fix it"
            )
        targets &= given > 0
    return Imported(tokens, targets, encoded, clamped)


Entry = tuple[list[Any], list[Any]]
"""Ids and logprobs of one position."""


def _entries(row: Mapping[str, Any], tokens: np.ndarray, where: str) -> list[Entry]:
    """Of our own form, by position."""
    ids, values = row["top_ids"], row["top_logprobs"]
    lengths = [len(each) if isinstance(each, list) else -1 for each in (ids, values)]
    if lengths[0] != lengths[1] or lengths[0] not in (len(tokens), len(tokens) - 1):
        raise UserError(
            f"{where}: expected top_ids and top_logprobs of {len(tokens)} positions, one for each "
            f"token, or one less, got {shown(ids)} and {shown(values)}; fix it"
        )
    entries = []
    for position, pair in enumerate(zip(ids, values, strict=True)):
        one, two = (each or [] for each in pair)
        if not (isinstance(one, list) and isinstance(two, list) and len(one) == len(two)):
            raise UserError(
                f"{where}: expected as many ids as logprobs, lists, at position {position}, got "
                f"{shown(one)} and {shown(two)}; fix it"
            )
        entries.append((one, two))
    return entries


def _vllm_entries(row: Mapping[str, Any], length: int, where: str) -> list[Entry]:
    """Of vLLM's form, by the position that predicts."""
    given = row["prompt_logprobs"]
    if not isinstance(given, list) or len(given) != length or given[0]:
        is_list = isinstance(given, list) and given
        got = f"{shown(given)} with {shown(given[0])} first" if is_list else shown(given)
        raise UserError(
            f"{where}: expected prompt_logprobs for each of {length} prompt_token_ids, null first, "
            f"got {got}; save what vLLM returns unchanged"
        )
    entries: list[Entry] = []
    for number, each in enumerate(given[1:], 1):
        # A parquet map comes as pairs, a struct as an object with null where an id is not there.
        pairs = [*each.items()] if isinstance(each, dict) else each or []
        try:
            found = [(int(token), value) for token, value in pairs if value is not None]
            values = [v["logprob"] if isinstance(v, Mapping) else v for _, v in found]
        except (TypeError, ValueError, KeyError, OverflowError):
            raise UserError(
                f"{where}: expected entry {number} of prompt_logprobs as an object of token ids "
                f"and logprobs, got {shown(each)}; save what vLLM returns unchanged"
            ) from None
        entries.append(([token for token, _ in found], values))
    return entries


def _whole_numbers(
    value: Any,
    limit: int,
    what: str,
    cure: str = "name the tokenizer that made them (data.tokenizer)",
) -> np.ndarray:
    """int32 [n] from 0 up to below `limit`."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        array = np.empty((0, 0))
    if isinstance(value, list) and not value:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{what}: expected a list of whole numbers, got {shown(value)}; fix it")
    if array.min() < 0 or array.max() >= limit:
        wrong = array[(array < 0) | (array >= limit)][0]
        raise UserError(f"{what}: expected 0 to {limit - 1}, got {wrong}; {cure}")
    return array.astype(np.int32)


def _check_logprobs(
    position: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, where: str
) -> None:
    """Refuse [E] entries that are no part of a distribution."""
    if len(bad := np.flatnonzero(~np.isfinite(logprobs))):
        raise UserError(
            f"{where}: expected finite logprobs, got {logprobs[bad[0]]} for id {ids[bad[0]]} at "
            f"position {position[bad[0]]}; leave the entry out"
        )
    order = np.lexsort((ids, position))
    same = (np.diff(ids[order]) == 0) & (np.diff(position[order]) == 0)
    if same.any():
        one = order[:-1][same][0]
        raise UserError(
            f"{where}: expected each id once at a position, got {ids[one]} twice at "
            f"{position[one]}; fix it"
        )
    sums = np.bincount(position, np.exp(np.minimum(logprobs, 1.0)))
    if len(bad := np.flatnonzero(sums > 1 + EXCESS)):
        raise UserError(
            f"{where}: expected probabilities that sum to 1 at most, got {sums[bad[0]]:.4g} at "
            f"position {bad[0]}; give natural logarithms at temperature 1, before any top-k or "
            "top-p renormalization"
        )


def encode(
    position: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, *, length: int, top_k: int
) -> tuple[EncodedTopK[np.ndarray], int]:
    """The `top_k` largest of [E] entries of each of `length` positions, by value descending, ties
    by id ascending, at τ = 1: gaps max − logprob, log_z −max, log_tail log(1 − Σ of those kept),
    sums in float64. What is not kept is part of the tail.

    Args:
        position: int [E], ascending. ids: int32 [E]. logprobs: float64 [E], nats.

    Returns:
        arrays [length,top_k] and [length,1]; and how many positions' 1 − Σ was below 0, whose
        log_tail is −inf.
    """
    order = np.lexsort((ids, -logprobs, position))
    position, ids, logprobs = position[order], ids[order], logprobs[order]
    counts = np.bincount(position, minlength=length)
    rank = np.arange(len(position)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = rank < top_k
    cell = position[kept], rank[kept]
    grid = np.full((length, top_k), -np.inf)
    grid[cell] = logprobs[kept]
    indices = np.zeros((length, top_k), np.int32)
    indices[cell] = ids[kept]
    known = counts > 0
    top = np.where(known, grid[:, 0], 0.0)
    gaps = np.where(grid > -np.inf, np.minimum(top[:, None] - grid, LARGEST_GAP), 0.0)
    total = np.exp(grid).sum(axis=1)
    with np.errstate(divide="ignore"):
        log_tail = np.where(known, np.log1p(-np.minimum(total, 1.0)), 0.0)
    return EncodedTopK(
        indices=indices,
        gaps=gaps.astype(np.float16),
        log_z=-top[:, None].astype(np.float32),
        log_tail=log_tail[:, None].astype(np.float32),
        count=np.minimum(counts, top_k).astype(np.uint16),
    ), int((total > 1.0).sum())
