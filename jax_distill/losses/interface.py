"""The one signature, checked, and the implementations behind it."""

from functools import partial
from typing import Any, NamedTuple

import jax

from jax_distill.config import Refusal
from jax_distill.losses.carry import Wanted
from jax_distill.losses.check import report
from jax_distill.losses.chunked import chunked_sums
from jax_distill.losses.definition import dense_terms
from jax_distill.losses.fused_loop import fused_sums, run_chunks
from jax_distill.losses.layout import Layout
from jax_distill.losses.logits import Head
from jax_distill.losses.objectives import Objective, Targets, Teacher
from jax_distill.losses.sums import LossSums, sum_terms

NAMES = ("dense", "forward_chunked", "fused_chunked", "fused")
TEACHER = ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count")


@jax.named_scope("loss")  # profiles and plans find its buffers by this name
def loss_sums(
    hidden: jax.Array,
    lm_head: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    teacher_indices: jax.Array | None,
    teacher_logprobs: jax.Array | None,
    teacher_log_tail: jax.Array | None,
    teacher_count: jax.Array | None,
    *,
    implementation: str = "fused",
    vocab_size: int | None = None,
    tail: str = "bucket",
    divergence: str = "forward_kl",
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    z_loss_weight: float = 0.0,
    chunk_size: int = 1024,
    bias: jax.Array | None = None,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
    valid_first: bool = False,
    layout: Layout | None = None,
    check: bool = False,
) -> LossSums:
    """Sums over valid tokens; nats. `IMPLEMENTATIONS[name]` is this with the name filled in.

    Four implementations of one value and gradient: `dense` (the definition, [B,T,V] at once),
    `forward_chunked` (keeps the logits of every chunk), `fused_chunked` (makes them again: the
    paper's) and `fused` (makes the gradients beside the loss: three products, one chunk).

    Args:
        hidden: [B,T,D]; its dtype is that of the products' operands. Accumulation is fp32.
        lm_head: [V,D], HF's layout; where it is wider than hidden, its gradient stays as wide.
        labels: [B,T] int32, the token that position t predicts.
        mask: [B,T] bool. What stands in a masked cell (NaN, ids out of range) is never used.
        teacher_indices: [B,T,K] int32, unique within a row. Duplicates are for the store to merge;
            here the student's probability of such a column would be counted twice.
        teacher_logprobs: [B,T,K], log p_k at `temperature`, over the teacher's whole vocabulary.
        teacher_log_tail: [B,T], log of the probability outside the K.
        teacher_count: [B,T], how many of the K are real. All four None with kl_weight 0.
        vocab_size: columns at and beyond it are padding; None: V. Teacher ids below 0 or at and
            beyond it fold into the tail; such a label has probability 0 and an infinite
            cross-entropy.
        tail, divergence, jsd_beta, temperature, kl_weight, ce_weight, z_loss_weight: `Objective`.
        chunk_size: C positions of each row per chunk; a chunk's logits are [B,C,V].
        bias: [V], of the head. soft_cap, logit_scale: `Head`.
        valid_first: sort each row's valid positions to the front and skip the empty chunks; pays
            where much is masked (chat data). Changes no result.
        layout: split over a mesh by hand, `fused` only; None leaves the split to the compiler.
        check: print one line to stderr for ids out of range and duplicates.

    Raises:
        Refusal: a name or number that means nothing, shapes that do not fit.
    """
    if implementation not in NAMES:
        raise Refusal(f"expected implementation in {NAMES}, got {implementation!r}; choose one")
    if layout is not None and implementation != "fused":
        raise Refusal(
            f"expected layout=None with {implementation}, got {layout}; jit splits it by itself"
        )
    head, objective, targets = read_problem(
        hidden,
        lm_head,
        labels,
        mask,
        teacher_indices,
        teacher_logprobs,
        teacher_log_tail,
        teacher_count,
        bias=bias,
        chunk_size=chunk_size,
        vocab_size=vocab_size,
        soft_cap=soft_cap,
        logit_scale=logit_scale,
        check=check,
        tail=tail,
        divergence=divergence,
        jsd_beta=jsd_beta,
        temperature=temperature,
        kl_weight=kl_weight,
        ce_weight=ce_weight,
        z_loss_weight=z_loss_weight,
    )
    if implementation == "dense":
        terms = dense_terms(hidden, lm_head, bias, targets, head=head, objective=objective)
        return sum_terms(terms, targets.mask)
    if implementation == "fused":
        return fused_sums(
            hidden, lm_head, bias, targets, head, objective, chunk_size, valid_first, layout
        )
    return chunked_sums(
        hidden,
        lm_head,
        bias,
        targets,
        head=head,
        objective=objective,
        chunk_size=chunk_size,
        valid_first=valid_first,
        recompute=implementation == "fused_chunked",
    )


IMPLEMENTATIONS = {name: partial(loss_sums, implementation=name) for name in NAMES}
dense, forward_chunked, fused_chunked, fused = IMPLEMENTATIONS.values()


@jax.named_scope("loss")
def kl_and_grads(
    hidden: jax.Array,
    lm_head: jax.Array,
    *targets: Any,
    bias: jax.Array | None = None,
    chunk_size: int = 1024,
    valid_first: bool = False,
    **knobs: Any,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """The core of `fused` on its own: (loss sum, count), d_hidden, d_lm_head.

    Arguments as `loss_sums` has them, by position or name, but `implementation` and `layout`.
    d_hidden [B,T,D] has hidden's dtype and, where the caller donates hidden, its memory; d_lm_head
    [V,D] is fp32. Both are gradients of the loss SUM; a bias is taken as constant.
    """
    problem = read_problem(hidden, lm_head, *targets, bias=bias, chunk_size=chunk_size, **knobs)
    end = run_chunks(
        hidden,
        lm_head,
        bias,
        problem.targets,
        head=problem.head,
        objective=problem.objective,
        chunk_size=chunk_size,
        valid_first=valid_first,
        wanted=Wanted(hidden=True, lm_head=True, bias=False),
    )
    assert end.d_lm_head is not None  # it was wanted
    return (end.sums.loss, end.sums.count), end.rows, end.d_lm_head


class Problem(NamedTuple):
    """A call's arguments, checked."""

    head: Head
    objective: Objective
    targets: Targets


def read_problem(
    hidden: jax.Array,
    lm_head: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    teacher_indices: jax.Array | None,
    teacher_logprobs: jax.Array | None,
    teacher_log_tail: jax.Array | None,
    teacher_count: jax.Array | None,
    *,
    bias: jax.Array | None,
    chunk_size: int,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
    check: bool = False,
    **objective: Any,
) -> Problem:
    """Refuse what does not fit together, before anything is compiled. objective: `Objective`'s."""
    goal = Objective(**objective)
    teacher: Any = (teacher_indices, teacher_logprobs, teacher_log_tail, teacher_count)
    if hidden.ndim != 3 or lm_head.ndim != 2:
        raise Refusal(
            f"expected hidden [B,T,D] and lm_head [V,D], got {hidden.shape} and {lm_head.shape}; "
            "give one row as hidden[None]"
        )
    (rows, positions, width), columns = hidden.shape, lm_head.shape[0]
    vocab_size = columns if vocab_size is None else vocab_size
    if not 0 < vocab_size <= columns:
        raise Refusal(
            f"expected 0 < vocab_size ≤ {columns} (the head's rows), got {vocab_size}; "
            "pass the tokenizer's length"
        )
    if chunk_size < 1:
        raise Refusal(f"expected chunk_size ≥ 1, got {chunk_size}; 1024 is a good start")
    missing = sum(value is None for value in teacher)
    if missing and (goal.kl_weight or missing < len(teacher)):
        raise Refusal(
            f"expected four teacher_* arrays, got {len(teacher) - missing}; "
            "pass them all, or None for each with kl_weight=0"
        )
    shapes: dict[str, tuple[int, ...]] = {"lm_head": (columns, width), "bias": (columns,)}
    shapes |= dict.fromkeys(("labels", "mask", *TEACHER), (rows, positions))
    if not missing:
        stored = (rows, positions, teacher[0].shape[-1])
        shapes |= {"teacher_indices": stored, "teacher_logprobs": stored}
    named = {"lm_head": lm_head, "bias": bias, "labels": labels, "mask": mask}
    for name, value in (named | dict(zip(TEACHER, teacher, strict=True))).items():
        if value is not None and value.shape != shapes[name]:
            raise Refusal(
                f"expected {name} of shape {shapes[name]} beside hidden {hidden.shape}, "
                f"got {value.shape}; pass arrays of one batch"
            )
    targets = Targets(labels, mask.astype(bool), None if missing else Teacher(*teacher))
    if check:
        report(targets, vocab_size=vocab_size)
    return Problem(Head(vocab_size, soft_cap, logit_scale), goal, targets)
