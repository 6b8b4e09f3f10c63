"""Random inputs of a loss, for tests and benchmarks of both backends; numpy only.

Letters: B rows, T positions, D hidden, V vocabulary, K stored tokens.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jax_distill.batch import Batch, TopK

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # u = ε/2: the most that one rounding changes


def rounding(dtype: str, terms: float, condition: float = 1.0) -> float:
    """u·terms·condition: how far a sum of so many terms may be off, on any processor and in any
    order, as a part of its exact value (Higham, Accuracy and Stability, 2002, section 4.2).
    condition: Σ|x| / |Σx|; or, for what is an exponential, the size of its exponent."""
    return UNIT[dtype] * terms * condition


def rounding_by_norm(dtype: str, roundings: int) -> float:
    """The same of an array by its norm, where each entry was rounded so often: errors between −u
    and u, alike likely, have variance u²/3 each."""
    return UNIT[dtype] * (roundings / 3) ** 0.5


class LossInputs(NamedTuple):
    """float32 hidden [B,T,D], weight [V,D]; the batch; the teacher's logits float64 [B,T,V], and
    its hidden states and head, of the student's shapes."""

    hidden: np.ndarray
    weight: np.ndarray
    batch: Batch
    teacher_logits: np.ndarray
    teacher_hidden: np.ndarray
    teacher_weight: np.ndarray


def random_targets(rows: int, length: int, *, vocab_size: int, top_k: int, seed: int = 0) -> Batch:
    """A batch without a teacher's matmul, for sizes that allow none: every position valid, one
    document a row, K unique ids at each with 90 % of the probability."""
    rng = np.random.default_rng(seed)
    grid = (rows, length)
    tokens = rng.integers(0, vocab_size, grid, dtype=np.int32)
    labels = np.roll(tokens, -1, axis=1)
    spread = np.arange(top_k, dtype=np.int32) * (vocab_size // top_k)
    falling = -0.1 * np.arange(top_k, dtype=np.float32)
    logprobs = falling - np.log(np.exp(falling).sum()) + np.float32(np.log(0.9))
    targets = TopK(
        indices=(labels[..., None] + spread) % np.int32(vocab_size),
        logprobs=np.broadcast_to(logprobs.astype(np.float32), (*grid, top_k)),
        log_tail=np.full(grid, np.log(0.1), np.float32),
        count=np.full(grid, top_k, np.int32),
    )
    return Batch(
        labels=labels,
        mask=np.ones(grid, bool),
        targets=targets,
        tokens=tokens,
        segment_ids=np.ones(grid, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), grid),
    )


def loss_inputs(
    rows: int,
    length: int,
    *,
    width: int,
    vocab_size: int,
    top_k: int,
    teacher_vocab_size: int | None = None,
    padding: int = 0,
    temperature: float = 1.0,
    scale: float = 3.0,
    distance: float = 1.0,
    valid: float = 1.0,
    short_counts: bool = False,
    seed: int = 0,
) -> LossInputs:
    """A student beside a teacher of the same width, whose targets are exact (float64).

    Args:
        vocab_size: tokens that the student has; its weight has `padding` more rows.
        teacher_vocab_size: tokens that the teacher has; None: the student's.
        scale: standard deviation of the teacher's logits, about.
        distance: of the student from the teacher; 0 is the teacher itself.
        valid: share of the positions whose mask is True, at random.
        short_counts: a position has between 1 and K entries; those beyond hold NaN and id −7, and
            their probability has joined the tail.
    """
    rng = np.random.default_rng(seed)
    teacher_vocab_size = vocab_size if teacher_vocab_size is None else teacher_vocab_size
    tokens = max(vocab_size + padding, teacher_vocab_size)

    def normal(*shape: int, deviation: float = 1.0) -> np.ndarray:
        return (deviation * rng.normal(size=shape)).astype(np.float32)

    teacher_hidden = normal(rows, length, width, deviation=scale)
    teacher_weight = normal(tokens, width, deviation=width**-0.5)
    hidden = teacher_hidden + normal(rows, length, width, deviation=distance)
    weight = teacher_weight + normal(tokens, width, deviation=0.3 * distance * width**-0.5)
    logits = (teacher_hidden.astype(np.float64) @ teacher_weight.astype(np.float64).T)[
        ..., :teacher_vocab_size
    ]
    targets = exact_targets(logits, top_k=top_k, temperature=temperature)
    if short_counts:
        targets = shortened(targets, rng.integers(1, top_k + 1, (rows, length)))
    batch = Batch(
        labels=rng.integers(0, vocab_size, (rows, length)).astype(np.int32),
        mask=rng.random((rows, length)) < valid,
        targets=targets,
    )
    return LossInputs(
        hidden, weight[: vocab_size + padding], batch, logits, teacher_hidden, teacher_weight
    )


def shortened(targets: TopK, count: np.ndarray) -> TopK:
    """Targets with `count` [..] ≤ K entries: NaN and id −7 beyond; what is cut joins the tail."""
    real = np.arange(targets.top_k) < count[..., None]
    cut = np.where(real, -np.inf, targets.logprobs.astype(np.float64))
    tail = np.logaddexp(targets.log_tail, np.logaddexp.reduce(cut, axis=-1))
    return replace(
        targets,
        indices=np.where(real, targets.indices, np.int32(-7)),
        logprobs=np.where(real, targets.logprobs, np.float32(np.nan)),
        log_tail=tail.astype(np.float32),
        count=count.astype(np.int32),
    )


def exact_targets(logits: np.ndarray, *, top_k: int, temperature: float = 1.0) -> TopK:
    """The top K of float64 logits [..,V] at τ, from the definition; log_tail −inf at K = V."""
    scaled = logits / temperature
    largest = scaled.max(axis=-1, keepdims=True)
    log_z = np.log(np.exp(scaled - largest).sum(axis=-1, keepdims=True)) + largest
    log_p = scaled - log_z
    order = np.argsort(-log_p, axis=-1, kind="stable")
    sorted_p = np.take_along_axis(log_p, order, axis=-1)
    with np.errstate(divide="ignore"):
        log_tail = np.log(np.exp(sorted_p[..., top_k:]).sum(axis=-1))
    return TopK(
        indices=order[..., :top_k].astype(np.int32),
        logprobs=sorted_p[..., :top_k].astype(np.float32),
        log_tail=log_tail.astype(np.float32),
        count=np.full(logits.shape[:-1], top_k, np.int32),
        temperature=temperature,
    )
