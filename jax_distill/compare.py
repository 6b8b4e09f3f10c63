"""How far the targets of two caches of the same rows are apart, such as those of a teacher in fp32
and in bf16, or of its quantized self: `python -m jax_distill.audit A --compare B`.

Letters: P positions, K stored ids (each cache has its own K).
"""

from typing import Any, NamedTuple

import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.batch import TopK
from jax_distill.cache import Cache

READ_TOKENS = 65_536  # of a read


class Comparison(NamedTuple):
    """Of the valid positions of some rows.

    temperature: τ of both. kl: float64 [P], nats. same_first: bool [P], whether both hold the same
    most likely id.
    """

    temperature: float
    kl: np.ndarray
    same_first: np.ndarray


def outcome_kl(ours: TopK[np.ndarray], theirs: TopK[np.ndarray], vocab_size: int) -> np.ndarray:
    """KL(p‖q) float64 [P], nats, of the outcomes that both targets tell apart: each id that both
    hold, and all others as one. p: ours, q: theirs, [P,K] each.

    Merged outcomes lower a KL (data processing inequality; Cover and Thomas, Elements of
    Information Theory, 2006, section 2.8): the teachers are at least so far apart.
    """
    keys, logs, tails = [], [], []
    for targets in (ours, theirs):
        real = np.arange(targets.top_k) < targets.count[:, None]
        position = np.nonzero(real)[0]
        keys.append(position * vocab_size + targets.indices[real])
        logs.append(targets.logprobs[real].astype(np.float64))
        tails.append(np.exp(targets.log_tail.astype(np.float64)))
    shared = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    both = shared[1:]
    log_p, log_q = (each[index] for each, index in zip(logs, both, strict=True))
    kl = np.bincount(keys[0][both[0]] // vocab_size, np.exp(log_p) * (log_p - log_q), len(tails[0]))
    rests = []
    for key, log, tail, index in zip(keys, logs, tails, both, strict=True):
        alone = np.ones(len(key), bool)
        alone[index] = False
        rests.append(tail + np.bincount(key[alone] // vocab_size, np.exp(log[alone]), len(tail)))
    with np.errstate(divide="ignore", invalid="ignore"):
        of_rest = np.where(rests[0] > 0, rests[0] * np.log(rests[0] / rests[1]), 0.0)
    return kl + of_rest


def shared_temperature(ours: Cache, theirs: Cache) -> float:
    """The first τ of ours that theirs has, too.

    Raises:
        UserError: there is none; one of them has no teacher, or random samples, whose ids differ
            by chance; other rows, as far as the manifests say.
    """
    for cache in (ours, theirs):
        if not cache.manifest.top_k or cache.manifest.sampling == "random":
            kind = "random samples" if cache.manifest.top_k else "rows alone"
            raise UserError(
                f"expected the most likely ids in both caches to compare, got {kind} in "
                f"{cache.path}; name another cache"
            )
        cache.require_complete()
    shape = (ours.rows, ours.sequence_length)
    if (theirs.rows, theirs.sequence_length) != shape:
        raise UserError(
            f"expected two caches of the same rows, got {shape[0]:,} of {shape[1]:,} tokens in "
            f"{ours.path} and {theirs.rows:,} of {theirs.sequence_length:,} in {theirs.path}; "
            "write both with the same data settings"
        )
    both = [t for t in ours.manifest.temperatures if t in theirs.manifest.temperatures]
    if not both:
        raise UserError(
            f"expected a temperature that both caches have, got {list(ours.manifest.temperatures)} "
            f"and {list(theirs.manifest.temperatures)}; write one again with cache.temperatures of "
            "the other"
        )
    return both[0]


def compare(ours: Cache, theirs: Cache, rows: np.ndarray) -> Comparison:
    """Of the rows named, in both caches.

    Raises:
        UserError: see `shared_temperature`; a row has other tokens in the other cache.
    """
    temperature = shared_temperature(ours, theirs)
    vocab_size = max(ours.manifest.vocab_size, theirs.manifest.vocab_size)
    step = max(READ_TOKENS // ours.sequence_length, 1)
    kl, same_first = [], []
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        batches = [each.read(some, temperature=temperature) for each in (ours, theirs)]
        other = (batches[0].tokens != batches[1].tokens).any(axis=1)
        if other.any():
            raise UserError(
                f"expected the same tokens in both caches, got others in row {some[other][0]} of "
                f"{theirs.path}; compare caches of the same text and tokenizer"
            )
        valid = batches[0].mask & batches[1].mask
        left, right = (_positions(batch.targets, valid) for batch in batches)
        kl.append(outcome_kl(left, right, vocab_size))
        same_first.append(left.indices[:, 0] == right.indices[:, 0])
    return Comparison(temperature, np.concatenate(kl), np.concatenate(same_first))


def _positions(targets: Any, valid: np.ndarray) -> TopK[np.ndarray]:
    return targets.map(lambda x: x[valid])


def sentence(found: Comparison, other: str) -> str:
    """What was compared and how far apart it is, in one line."""
    if not len(found.kl):
        return f"compared with {other}: no position predicts anything"
    middle, high = np.quantile(found.kl, [0.5, 0.99])
    return (
        f"compared with {other} at τ = {found.temperature:g}, {len(found.kl):,} positions: KL "
        f"from this to that mean {found.kl.mean():.3g} nats (median {middle:.3g}, 99 % below "
        f"{high:.3g}, largest {found.kl.max():.3g}); the most likely id is the same at "
        f"{found.same_first.mean():.2%}"
    )
