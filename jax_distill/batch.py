"""A training batch, and the teacher's top-K targets: the one form that every part speaks.

    teacher's pass ─► EncodedTopK ─► cache ─► EncodedTopK.decode(τ) ─► TopK ─► Batch ─► loss

The capture makes `EncodedTopK`, whose arrays the cache stores; a disk between is no condition. The
classes are generic in the kind of their arrays: numpy.ndarray, jax.Array or torch.Tensor. This
module needs numpy alone; `jax_distill.losses` registers the classes as pytrees, temperatures
static.

Letters: B rows, T positions, A micro-batches, K stored tokens, S temperatures. Leading axes are
written `..`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

from jax_distill.objective import Objective

Array = TypeVar("Array", bound=Any)

ROW_ARRAYS = ("tokens", "segment_ids", "positions", "loss_mask")
"""What a row of a cache consists of, beside the teacher's arrays."""
TEACHER_PREFIX = "teacher_"
DRAWS = f"{TEACHER_PREFIX}draws"
"""The array that a cache of random samples has besides."""


class _Arrays:
    """A dataclass of arrays; fields that are None or no array (temperatures) stay as they are."""

    def map(self, function: Callable[[Any], Any]) -> Self:
        """The same with `function` applied to every array, those of fields within it too."""
        changed = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, _Arrays):
                changed[each.name] = value.map(function)
            elif hasattr(value, "shape"):
                changed[each.name] = function(value)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class TopK(_Arrays, Generic[Array]):
    """The teacher's distribution of the next token at each position: K outcomes and the rest.

    Attributes:
        indices: int32 [..,K], token ids, unique among the first `count` of a position. Ids that a
            student lacks fold into its tail.
        logprobs: float32 [..,K], log p_k in nats at `temperature`, over the teacher's whole
            vocabulary; by value descending. What lies from `count` on is never read.
        log_tail: float32 [..], log of the probability outside the K, measured by the teacher: it
            cannot be recovered from 1 − Σ p_k, which rounding makes negative. −inf at K = V.
        count: int32 [..], how many of the K are real; 0 where all probability is in the tail.
        temperature: τ at which these were computed, and at which the loss scores the student.
        draws: int32 [..,K], how often each id was drawn from the teacher at τ, where the K are a
            random sample and not the most likely; None where they are.
    """

    indices: Array
    logprobs: Array
    log_tail: Array
    count: Array
    temperature: float = 1.0
    draws: Array | None = None

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.indices.shape[-1])

    def first(self, top_k: int) -> "TopK[Array]":
        """The first `top_k` of the K entries; the probability of those dropped joins the tail.
        numpy or jax arrays; nothing changes where K ≤ `top_k`.

        Raises:
            ValueError: a random sample, of which a part is no sample.
        """
        if self.draws is not None:
            raise ValueError("expected the K most likely ids, got a random sample; read all of it")
        xp = self.logprobs.__array_namespace__()
        real = _is_real(self.count, self.top_k, xp)
        logprobs = xp.where(real, self.logprobs, np.float32(-np.inf))
        dropped = _logsumexp(logprobs[..., top_k:], xp)
        tail = xp.logaddexp(self.log_tail.astype(_accumulator(xp)), dropped)
        return TopK(
            indices=self.indices[..., :top_k],
            logprobs=logprobs[..., :top_k],
            log_tail=tail.astype(np.float32),
            count=xp.minimum(self.count, np.int32(top_k)),
            temperature=self.temperature,
        )


@dataclass(frozen=True)
class EncodedTopK(_Arrays, Generic[Array]):
    """Top-K targets as the teacher measures them and the cache stores them, at every temperature.

    Attributes:
        indices: int32 (uint16 or uint32 on disk) [..,K], by logit descending, ties by id ascending.
        gaps: float16 [..,K], max logit − logit ≥ 0; the same K at every temperature.
        log_z: float32 [..,S], logsumexp(z/τ) − max(z)/τ over the real vocabulary, nats.
        log_tail: float32 [..,S], log of the probability outside the K; −inf at K = V.
        count: uint16 [..], how many of the K are real.
        temperatures: the S values of τ.
        draws: of a random sample, uint16 [..,K]: see `TopK`; the K ids are those drawn, by logit
            descending all the same, and gaps and log_tail are of them.
    """

    indices: Array
    gaps: Array
    log_z: Array
    log_tail: Array
    count: Array
    temperatures: tuple[float, ...] = (1.0,)
    draws: Array | None = None

    def arrays(self) -> dict[str, Array]:
        """By the names that they have in a cache: `teacher_indices`, `teacher_gaps`, …"""
        found = {f"{TEACHER_PREFIX}{name}": getattr(self, name) for name in ENCODED_FIELDS}
        return found if self.draws is None else found | {DRAWS: self.draws}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], temperatures: tuple[float, ...]
    ) -> "EncodedTopK[Array]":
        """The inverse of `arrays`; other names are ignored."""
        found = {name: arrays[f"{TEACHER_PREFIX}{name}"] for name in ENCODED_FIELDS}
        return cls(**found, temperatures=temperatures, draws=arrays.get(DRAWS))

    def decode(self, temperature: float) -> TopK[Array]:
        """The targets at one of `temperatures`; numpy arrays or, under jit too, jax arrays.

        Raises:
            ValueError: a temperature that was not measured.
        """
        if temperature not in self.temperatures:
            raise ValueError(
                f"expected a temperature of {list(self.temperatures)}, got {temperature}; "
                "choose one of them, or write a cache at this one"
            )
        which = self.temperatures.index(temperature)
        log_tail = self.log_tail[..., which]
        return TopK(
            indices=self.indices.astype(np.int32),
            logprobs=logprobs_from_gaps(
                self.gaps, self.log_z[..., which], log_tail, self.count, temperature
            ),
            log_tail=log_tail,
            count=self.count.astype(np.int32),
            temperature=temperature,
            draws=None if self.draws is None else self.draws.astype(np.int32),
        )


ENCODED_FIELDS = ("indices", "gaps", "log_z", "log_tail", "count")
"""What every cache with a teacher stores."""


@dataclass(frozen=True)
class LiveTeacher(_Arrays, Generic[Array]):
    """The teacher itself as targets: its distribution over the whole vocabulary, never stored.

    Attributes:
        hidden: [B,T,D'], after its final norm; D' need not be the student's.
        head: its `losses.Head`, of the student's vocabulary; constant, like hidden. `map` passes
            over it: it has no rows.
        temperature: τ of the divergence.
    """

    hidden: Array
    head: Any
    temperature: float = 1.0


@dataclass(frozen=True)
class Batch(_Arrays, Generic[Array]):
    """B rows of T positions; with a leading axis A, A micro-batches of them.

    Attributes:
        labels: int32 [B,T], tokens[t+1]: the token that position t predicts.
        mask: bool [B,T], whether predicting it counts. What a masked cell of any array holds
            (NaN, ids out of range) is never used.
        targets, teacher: the teacher's top K, or the teacher itself; None and None where the text
            alone teaches.
        tokens, segment_ids, positions: int32 [B,T], what the model reads: documents of a row count
            from 1, 0 is padding; positions restart in each document. A loss needs none of them.
        teacher_layers: bf16 or fp32 [B,T,P,D'], outputs of P of the teacher's layers, for a
            hidden-state loss.
    """

    labels: Array
    mask: Array
    targets: TopK[Array] | None = None
    tokens: Any = None
    segment_ids: Any = None
    positions: Any = None
    teacher: LiveTeacher[Array] | None = None
    teacher_layers: Any = None

    @classmethod
    def from_rows(
        cls, rows: Mapping[str, np.ndarray], targets: TopK[np.ndarray] | None = None
    ) -> "Batch[np.ndarray]":
        """From numpy rows as a cache stores them (ROW_ARRAYS). The one place that shifts: position
        t predicts token t+1; in the last column label and mask are 0."""
        tokens = rows["tokens"]
        mask = rows["loss_mask"] != 0
        mask[:, -1] = False
        return Batch(
            labels=np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1),
            mask=mask,
            targets=targets,
            tokens=tokens,
            segment_ids=rows["segment_ids"],
            positions=rows["positions"],
        )

    def micro_batches(self, rows: int) -> "Batch[Array]":
        """[B,..] → [A,rows,..], A = B / rows, in order; `rows` must divide B."""
        return self.map(lambda x: x.reshape(-1, rows, *x.shape[1:]))


def check_loss_inputs(hidden: Array, head: Any, batch: Batch[Array], objective: Objective) -> None:
    """Refuse what does not fit together, before anything is compiled or computed.

    head: a `Head` of either backend: weight [V,D], bias [V] or None, vocab_size or None.

    Raises:
        ValueError: shapes that do not fit hidden [B,T,D], a divergence without targets, a
            vocab_size or temperature that means nothing.
    """
    shape, of_weight = tuple(hidden.shape), tuple(head.weight.shape)
    if len(shape) != 3 or len(of_weight) != 2:
        raise ValueError(
            f"expected hidden [B,T,D] and head.weight [V,D], got {shape} and {of_weight}; pass one "
            "row as hidden[None]"
        )
    (rows, length, width), weight_rows = shape, of_weight[0]
    if width == weight_rows != of_weight[1]:
        raise ValueError(
            f"expected head.weight [V,{width}] beside hidden {shape}, got {of_weight}; transpose "
            "it: head.weight is [V,D]"
        )
    if head.vocab_size is not None and not 0 < head.vocab_size <= weight_rows:
        raise ValueError(
            f"expected 0 < vocab_size ≤ {weight_rows} (rows of head.weight), got "
            f"{head.vocab_size}; pass the tokenizer's length"
        )
    expected: dict[str, tuple[Any, tuple[int, ...]]] = {
        "head.weight": (head.weight, (weight_rows, width)),
        "head.bias": (head.bias, (weight_rows,)),
        "batch.labels": (batch.labels, (rows, length)),
        "batch.mask": (batch.mask, (rows, length)),
        **_checked_targets(batch, (rows, length), head, objective),
    }
    for name, (value, wanted) in expected.items():
        if value is not None and tuple(value.shape) != wanted:
            raise ValueError(
                f"expected {name} of shape {wanted} beside hidden {shape}, got "
                f"{tuple(value.shape)}; pass arrays of one batch and one model"
            )


def _checked_targets(
    batch: Batch[Array], grid: tuple[int, int], head: Any, objective: Objective
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Of targets or a live teacher, each array by its name, and the shape that it must have beside
    a grid [B,T]; ValueError for what is wrong with them otherwise."""
    targets, teacher = batch.targets, batch.teacher
    if targets is None and teacher is None and objective.kl_weight:
        raise ValueError(
            f"expected batch.targets with kl_weight {objective.kl_weight}, got None; pass the "
            "teacher's, or set kl_weight 0"
        )
    if targets is not None and teacher is not None:
        raise ValueError("expected batch.targets or batch.teacher, got both; pass one of them")
    source = targets or teacher
    if source is not None and not source.temperature > 0.0:
        raise ValueError(
            f"expected a temperature above 0 in batch.targets, got {source.temperature}; "
            "pass the one that they were read at"
        )
    if targets is not None:
        if targets.draws is not None and objective.divergence != "forward_kl":
            raise ValueError(
                "expected divergence forward_kl with targets drawn at random, whose mean is an "
                f"estimate of it alone, got {objective.divergence}; set forward_kl"
            )
        stored = (*grid, targets.top_k)
        return {
            "targets.indices": (targets.indices, stored),
            "targets.logprobs": (targets.logprobs, stored),
            "targets.log_tail": (targets.log_tail, grid),
            "targets.count": (targets.count, grid),
            "targets.draws": (targets.draws, stored),
        }
    if teacher is not None:
        theirs, ours = (h.vocab_size or h.weight.shape[0] for h in (teacher.head, head))
        if theirs != ours:
            raise ValueError(
                f"expected a live teacher's head of the student's vocabulary {ours}, got {theirs}; "
                "pass heads cut to one tokenizer"
            )
        return {"teacher.hidden": (teacher.hidden, (*grid, teacher.head.weight.shape[1]))}
    return {}


def logprobs_from_gaps(gaps: Any, log_z: Any, log_tail: Any, count: Any, temperature: float) -> Any:
    """log p_k = −gap/τ − log_z, moved together so that Σ p_k = 1 − p_tail.

    The move takes out what float16 gaps did to the sum; 1e-7 nats of KL per token are left. A pure
    function of numpy arrays (sums in float64) or of jax arrays, under jit too (in float32).

    Args:
        gaps: float16 [..,K]. log_z, log_tail: float32 [..], at τ. count: integer [..].

    Returns:
        float32 [..,K], nats; −inf from `count` on.
    """
    xp = gaps.__array_namespace__()
    unnormalized = gaps.astype(np.float32) / np.float32(-temperature) - log_z[..., None]
    real = _is_real(count, gaps.shape[-1], xp)
    logprobs = xp.where(real, unnormalized, np.float32(-np.inf))
    total = _logsumexp(logprobs, xp)
    possible = total > -np.inf
    move = _log_one_minus_exp(log_tail, xp) - xp.where(possible, total, np.float32(0))
    move = xp.where(possible, move, np.float32(0)).astype(np.float32)
    return logprobs + move[..., None]


def _is_real(count: Any, top_k: int, xp: Any) -> Any:
    """bool [..,K]: the entries below count [..]."""
    entry = xp.arange(top_k, dtype=np.int32).reshape((1,) * count.ndim + (top_k,))
    return entry < count[..., None].astype(np.int32)


def _accumulator(xp: Any) -> Any:
    """The dtype of sums over the K: jax has no float64 by default."""
    return np.float64 if xp is np else np.float32


def _logsumexp(logprobs: Any, xp: Any) -> Any:
    """[..,K] → [..]: logsumexp over K, −inf for none; fp32 terms, their sum in `_accumulator`."""
    if not logprobs.shape[-1]:
        return xp.full(logprobs.shape[:-1], -np.inf, _accumulator(xp))
    top = logprobs.max(axis=-1)
    shift = xp.where(top > -np.inf, top, np.float32(0))
    total = xp.exp(logprobs - shift[..., None]).sum(axis=-1, dtype=_accumulator(xp))
    with np.errstate(divide="ignore"):
        return shift + xp.log(total)


def _log_one_minus_exp(x: Any, xp: Any) -> Any:
    """log(1 − e^x) for x ≤ 0, exact near both ends (Maechler 2012)."""
    x = xp.minimum(x.astype(_accumulator(xp)), _accumulator(xp)(0))
    with np.errstate(divide="ignore"):
        near_zero = xp.log(-xp.expm1(xp.maximum(x, _accumulator(xp)(-1.0))))
        far = xp.log1p(-xp.exp(x))
    return xp.where(x > -np.log(2.0), near_zero, far)
