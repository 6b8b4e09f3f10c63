"""Every implementation, tail and divergence against float64, over sizes that do not divide."""

import zlib
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, assume, given, seed, settings
from hypothesis import strategies as st

from jax_distill.batch import Batch
from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Head, LossSums, kl_and_grads, loss
from jax_distill.losses.float64_test import Gradients, Sums, float64_loss
from jax_distill.objective import DIVERGENCES, IMPLEMENTATIONS, TAILS, Execution, Objective
from jax_distill.synthetic import exact_targets, loss_inputs

EPSILON = float(np.finfo(np.float32).eps)
RTOL = 16 * EPSILON
"""Of an fp32 result: sums of at most 16 products or of 70 exponentials, each with a rounding of
ε/2, and a handful of steps more."""
SLACK = 4.0
EVERY = (*IMPLEMENTATIONS, "kl_and_grads")
EVERYTHING = Objective(
    tail="renormalize", divergence="jsd", kl_weight=0.7, ce_weight=0.3, z_loss_weight=0.01
)


class Case(NamedTuple):
    """What `loss` takes, in numpy."""

    hidden: np.ndarray
    head: Head
    batch: Batch


def make_case(
    seed: int = 0,
    *,
    rows: int = 2,
    length: int = 13,
    width: int = 8,
    vocab_size: int = 67,
    top_k: int = 5,
    valid: float = 0.7,
    short_counts: bool = True,
    bias: bool = False,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
    **inputs: Any,
) -> Case:
    """`synthetic.loss_inputs` that fit nothing: holes in the mask, count < K, T of no chunk."""
    hidden, weight, batch, *_ = loss_inputs(
        rows,
        length,
        width=width,
        vocab_size=vocab_size,
        top_k=top_k,
        valid=valid,
        short_counts=short_counts,
        seed=seed,
        **inputs,
    )
    values = np.random.default_rng(seed).normal(size=len(weight)) if bias else None
    head = Head(weight, None if values is None else np.float32(values))
    return Case(
        hidden,
        replace(head, vocab_size=vocab_size, soft_cap=soft_cap, logit_scale=logit_scale),
        batch,
    )


def with_targets(case: Case, **arrays: Any) -> Case:
    """The case with other arrays in its targets."""
    assert case.batch.targets is not None
    arrays = {
        name: np.asarray(x, getattr(case.batch.targets, name).dtype) for name, x in arrays.items()
    }
    return case._replace(batch=replace(case.batch, targets=replace(case.batch.targets, **arrays)))


def on_device(case: Case, dtype: Any = jnp.float32) -> Case:
    """hidden and weight in `dtype`, the rest as it is."""
    hidden, head, batch = jax.tree.map(jnp.asarray, case)
    return Case(hidden.astype(dtype), replace(head, weight=head.weight.astype(dtype)), batch)


def chunks_of(positions: int, case: Case, implementation: str = "fused", **more: Any) -> Execution:
    """An Execution whose chunks hold so many positions of each row."""
    if implementation == "kl_and_grads":
        implementation = "fused"
    return Execution(implementation, chunk_size=positions * len(case.hidden), **more)


@partial(
    jax.jit,
    static_argnames=("implementation", "objective", "execution"),
    compiler_options=QUICK_COMPILE,
)
def sums_and_gradients(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    *,
    implementation: str,
    objective: Objective,
    execution: Execution,
) -> tuple[LossSums, dict[str, jax.Array]]:
    if implementation == "kl_and_grads":
        sums, d_hidden, d_weight = kl_and_grads(hidden, head, batch, objective, execution)
        return sums, {"hidden": d_hidden, "weight": d_weight}

    def value(hidden, head):
        sums = loss(hidden, head, batch, objective, execution)
        return sums.loss, sums

    (_, sums), (d_hidden, d_head) = jax.value_and_grad(value, (0, 1), has_aux=True)(hidden, head)
    gradients = {"hidden": d_hidden, "weight": d_head.weight, "bias": d_head.bias}
    return sums, {name: x for name, x in gradients.items() if x is not None}


def run(
    implementation: str,
    case: Case,
    objective: Objective = Objective(),
    *,
    chunk: int = 4,
    dtype: Any = jnp.float32,
    **execution: Any,
) -> tuple[Sums, Gradients]:
    """Sums and gradients as float64_loss gives them, in chunks of so many positions."""
    sums, gradients = sums_and_gradients(
        *on_device(case, dtype),
        implementation=implementation,
        objective=objective,
        execution=chunks_of(chunk, case, implementation, **execution),
    )
    return (
        {name: float(value) for name, value in sums._asdict().items()},
        {name: np.asarray(gradient, np.float64) for name, gradient in gradients.items()},
    )


def forward(
    implementation: str,
    case: Case,
    objective: Objective = Objective(),
    *,
    chunk: int = 4,
    dtype: Any = jnp.float32,
) -> LossSums:
    """The sums alone."""
    function = jax.jit(loss, static_argnums=(3, 4), compiler_options=QUICK_COMPILE)
    execution = chunks_of(chunk, case, implementation)
    return function(*on_device(case, dtype), objective, execution)


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of the whole array: ‖got − wanted‖ / ‖wanted‖."""
    return float(np.linalg.norm(got - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)


def rounding(
    case: Case, objective: Objective, sums: Sums, gradients: Gradients
) -> tuple[Sums, Sums]:
    """How far each sum moves, and each gradient by norm, when every input and every logit moves by
    fp32's ε: a small difference of large terms is known no better than that."""
    random = np.random.default_rng(0)
    hidden, head, batch = case
    targets = batch.targets
    assert targets is not None

    def moved(values: np.ndarray) -> np.ndarray:
        return values * (1 + EPSILON * random.normal(size=values.shape))

    furthest_sums = dict.fromkeys(sums, 0.0)
    furthest = dict.fromkeys(gradients, 0.0)
    for _ in range(4):
        bias = np.zeros(len(head.weight)) if head.bias is None else moved(head.bias)
        bias = bias + EPSILON * random.normal(size=bias.shape)
        other, others = float64_loss(
            moved(hidden),
            replace(head, weight=moved(head.weight), bias=bias),
            replace(
                batch,
                targets=replace(
                    targets, logprobs=moved(targets.logprobs), log_tail=moved(targets.log_tail)
                ),
            ),
            objective,
        )
        for name, value in other.items():
            furthest_sums[name] = max(furthest_sums[name], abs(value - sums[name]))
        for name, gradient in others.items():
            distance = float(np.linalg.norm(gradient - gradients[name]))
            furthest[name] = max(furthest[name], distance)
    return furthest_sums, furthest


class Expected(NamedTuple):
    """float64's answer to a case, and how far fp32 may be from it."""

    sums: Sums
    gradients: Gradients
    sum_slack: Sums
    gradient_slack: Sums


def expected(case: Case, objective: Objective = Objective()) -> Expected:
    sums, gradients = float64_loss(*case, objective)
    # A part of one token's loss is q·(log q − log p − KL) or the like, with numbers near KL, which
    # is near 100 where LOG_FLOOR stands for a log p: fp32 holds none finer than ε of its size.
    rtol = RTOL + EPSILON * abs(sums["kl"]) / max(sums["count"], 1.0)
    moved_sums, moved = rounding(case, objective, sums, gradients)
    return Expected(
        sums,
        gradients,
        {
            name: rtol * (abs(value) + sums["count"]) + SLACK * moved_sums[name]
            for name, value in sums.items()
        },
        {
            name: rtol * float(np.linalg.norm(gradient)) + SLACK * moved[name]
            for name, gradient in gradients.items()
        },
    )


def assert_agrees(got: tuple[Sums, Gradients], wanted: Expected) -> None:
    """Sums and gradients (by norm) to fp32 rounding."""
    sums, gradients = got
    assert {"loss", "count"} <= sums.keys() and {"hidden", "weight"} <= gradients.keys()
    for name in sums.keys() & wanted.sums.keys():
        assert abs(sums[name] - wanted.sums[name]) <= wanted.sum_slack[name], name
    for name, gradient in gradients.items():
        distance = np.linalg.norm(gradient - wanted.gradients[name])
        assert distance <= wanted.gradient_slack[name], name


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, Objective, dict[str, Any]]:
    """A batch that fits nothing: T no multiple of C, or shorter; any B, D, V and K ≤ V."""
    chunk = draw(st.integers(2, 9))
    length = draw(st.integers(1, 14).filter(lambda t: t % chunk))
    vocab_size = draw(st.integers(3, 70))
    few = st.sampled_from([1, 2, 5, vocab_size - 1, vocab_size])
    top_k = draw(few.filter(lambda k: k <= vocab_size))
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    # hypothesis begins with the least of everything
    assume((rows, length, width, vocab_size, top_k) != (1, 1, 1, 3, 1))
    holes = draw(st.booleans())
    case = make_case(
        draw(st.integers(0, 1000)),
        rows=rows,
        length=length,
        width=width,
        vocab_size=vocab_size,
        top_k=top_k,
        padding=draw(st.integers(0, 2)),
        temperature=draw(st.sampled_from([1.0, 2.0])),
        valid=0.7 if holes else 1.0,
        short_counts=holes,
    )
    objective = Objective(ce_weight=draw(st.sampled_from([0.0, 0.5])), jsd_beta=0.3)
    execution = {"valid_first": draw(st.booleans()), "chunk": chunk}
    return case, objective, {**execution, "gradient_chunks": draw(st.integers(1, 3))}


@pytest.mark.parametrize("draws", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
def test_every_objective_of_every_implementation_equals_float64(tail, divergence, draws):
    """Case 26: V of no block's size, T no multiple of C, a remainder shorter than C."""

    @seed(zlib.crc32(f"{tail} {divergence} {draws}".encode()))
    # A failure is not shrunk: each try compiles five programs.
    @settings(max_examples=draws, deadline=None, database=None, phases=(Phase.generate,))
    @given(cases())
    def holds(drawn):
        case, objective, execution = drawn
        objective = replace(objective, tail=tail, divergence=divergence)
        wanted = expected(case, objective)
        for implementation in EVERY:
            assert_agrees(run(implementation, case, objective, **execution), wanted)

    holds()


@pytest.mark.parametrize("implementation", EVERY)
def test_every_implementation_applies_every_option(implementation):
    """Case 24: soft-cap, logit scale and bias are applied, not dropped; padding rows too."""
    case = make_case(
        2, vocab_size=50, padding=17, temperature=2.0, bias=True, soft_cap=6.0, logit_scale=0.8
    )
    wanted = expected(case, EVERYTHING)
    assert_agrees(run(implementation, case, EVERYTHING), wanted)
    for name in ("soft_cap", "logit_scale", "vocab_size", "bias"):  # the oracle does notice
        other = case._replace(head=replace(case.head, **{name: None}))
        value = float64_loss(*other, EVERYTHING)[0]["loss"]
        assert abs(value / wanted.sums["loss"] - 1) > 1e-3


def test_remainder_is_counted_once_and_padding_rows_never():
    """Case 26: sums over T = 13 in chunks of 5 are those of one chunk; rows ≥ 60 give +50."""
    case = make_case(4, vocab_size=60, padding=7, valid=1.0, short_counts=False)
    weight = case.head.weight.copy()
    weight[60:] = 50.0 * np.sign(case.hidden.mean(axis=(0, 1)))
    case = case._replace(head=replace(case.head, weight=weight))
    wanted = expected(case)
    for chunk in (5, 100):
        assert_agrees(run("fused", case, chunk=chunk), wanted)


def test_differently_padded_heads_cut_to_the_tokenizer():
    """Case 1: tokenizer 300, student 304 wide: equals the head cut to 300."""
    case = make_case(5, vocab_size=300, padding=4, top_k=9)
    cut = case._replace(head=replace(case.head, weight=case.head.weight[:300]))
    sums, gradients = run("fused", case)
    assert not gradients["weight"][300:].any()
    gradients["weight"] = gradients["weight"][:300]
    assert_agrees((sums, gradients), expected(cut))


def test_tokens_that_only_the_student_has_belong_to_the_tail():
    """Case 2: teacher of 300 tokens, student of 320."""
    case = make_case(6, vocab_size=320, teacher_vocab_size=300, top_k=9)
    sums, gradients = run("fused", case)
    assert_agrees((sums, gradients), expected(case))
    fewer = case._replace(
        head=replace(case.head, vocab_size=300),
        batch=replace(case.batch, labels=case.batch.labels % 300),
    )
    assert sums["kl"] > run("fused", fewer)[0]["kl"]  # what the student puts on them is lost


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_teacher_ids_that_the_student_lacks_fold_into_the_tail(implementation):
    """Case 1, the other way round: K entries at and beyond the student's vocabulary."""
    case = make_case(7, vocab_size=40, teacher_vocab_size=60, top_k=6)
    assert np.any(case.batch.targets.indices >= 40)
    assert_agrees(run(implementation, case), expected(case))


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_ids_at_the_ends_of_the_vocabulary_are_ordinary(implementation):
    """Case 6: 0 and V−1 are tokens; no sentinel lies among the ids."""
    case = make_case(8, length=6, vocab_size=33, top_k=4, short_counts=False)
    case = with_targets(case, indices=np.broadcast_to([0, 32, 5, 6], (2, 6, 4)))
    labels = np.broadcast_to(np.int32([32, 0, 32, 0, 32, 0]), (2, 6))
    case = case._replace(batch=replace(case.batch, labels=labels))
    objective = Objective(ce_weight=1.0)
    assert_agrees(run(implementation, case, objective), expected(case, objective))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_temperature_scales_value_and_gradient(temperature):
    """Case 22: at K = V the bucket is the whole KL at that τ; the gradient is its gradient."""
    case = make_case(
        9, length=6, vocab_size=23, top_k=23, valid=1.0, short_counts=False, temperature=temperature
    )
    got = run("fused", case)
    assert_agrees(got, expected(case, Objective(tail="truncate")))
    assert got[0]["loss"] == pytest.approx(temperature**2 * got[0]["kl"], rel=RTOL)


def test_the_temperature_of_the_targets_is_the_one_that_scores():
    """The same arrays that say τ = 2 are scored at τ = 2."""
    case = make_case(11, temperature=1.0)
    as_two = replace(case.batch, targets=replace(case.batch.targets, temperature=2.0))
    other = case._replace(batch=as_two)
    for name in ("dense", "fused"):
        assert_agrees(run(name, other), expected(other))
    assert abs(run("fused", other)[0]["kl"] / run("fused", case)[0]["kl"] - 1) > 0.05


def test_without_targets_the_loss_is_cross_entropy_alone():
    case = make_case(10)
    objective = Objective(kl_weight=0.0, ce_weight=1.0)
    wanted = expected(case, objective)
    case = case._replace(batch=replace(case.batch, targets=None))
    for name in ("dense", "fused"):
        sums = forward(name, case, objective)
        assert abs(float(sums.loss) - wanted.sums["loss"]) <= wanted.sum_slack["loss"]
        assert np.isnan(sums.kl) and np.isnan(sums.student_mass)


def top1_case() -> Case:
    """One position each where the student agrees, differs, ties."""
    hidden = np.float32([[[0.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]])
    targets = exact_targets(np.log(np.array([[[0.1, 0.6, 0.2, 0.1]] * 3])), top_k=2)
    batch = Batch(labels=np.zeros((1, 3), np.int32), mask=np.ones((1, 3), bool), targets=targets)
    return Case(hidden, Head(np.eye(4, dtype=np.float32)), batch)


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_top1_agreement_counts_strict_winners_only(implementation):
    assert float(forward(implementation, top1_case()).top1_agreement) == 1.0
