"""Where a loss goes wrong in practice: bf16, large logits, thin tails, probabilities of 0."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill.batch import Batch
from jax_distill.losses import Head, kl_and_grads, loss
from jax_distill.losses.agreement_test import (
    EVERY,
    RTOL,
    Case,
    Expected,
    assert_agrees,
    chunks_of,
    expected,
    forward,
    make_case,
    on_device,
    relative_error,
    run,
    with_targets,
)
from jax_distill.losses.float64_test import Gradients, float64_loss, log_softmax
from jax_distill.objective import DIVERGENCES, LOG_FLOOR, TAILS, Objective
from jax_distill.synthetic import exact_targets, loss_inputs, rounding, rounding_by_norm

CHUNKED = ["forward_chunked", "fused_chunked", "fused"]
DATA = Objective(kl_weight=0.0, ce_weight=1.0)


def taught_by_itself(
    largest_logit: float, *, noise: float = 0.0, length: int = 64, top_k: int = 20
) -> Case:
    """bf16 inputs of |logit| ≤ largest_logit; the teacher is the student, noise apart."""
    rng = np.random.default_rng(17)
    hidden, weight = rng.normal(size=(1, length, 32)), rng.normal(size=(251, 32))
    hidden *= largest_logit / np.abs(hidden @ weight.T).max()
    hidden, weight = (np.float32(x.astype(ml_dtypes.bfloat16)) for x in (hidden, weight))
    z = np.float64(hidden) @ np.float64(weight).T
    targets = exact_targets(z + noise * rng.normal(size=z.shape), top_k=top_k)
    labels = rng.integers(0, 251, (1, length)).astype(np.int32)
    return Case(hidden, Head(weight), Batch(labels, np.ones((1, length), bool), targets))


def kl_error(largest_logit: float) -> float:
    """Nats of a token: its logit, its logsumexp and the stored log p are rounded at their size."""
    return rounding("float32", 3, largest_logit + math.log(251))


def logit_error(case: Case) -> float:
    """Of a logit, a sum of D products, and so the relative one of its q, and of a gradient."""
    size = (np.abs(case.hidden) @ np.abs(case.head.weight).T).max()
    return rounding("float32", case.hidden.shape[-1] + 3, size)


@cache
def nearly_taught(largest_logit: float) -> tuple[Case, Gradients]:
    """A student near convergence on 256 positions, and its gradients in float64."""
    case = taught_by_itself(largest_logit, noise=0.05, length=256)
    return case, float64_loss(*case)[1]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("largest_logit", [5.0, 20.0, 80.0])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(largest_logit, implementation):
    """Case 17: bf16 inputs, fp32 logits on both passes."""
    case = taught_by_itself(largest_logit)
    sums, gradients = run(implementation, case, dtype=jnp.bfloat16, chunk=16)
    assert abs(sums["loss"]) / sums["count"] < kl_error(largest_logit)
    _, usual = float64_loss(*case, DATA)
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient) < logit_error(case) * np.linalg.norm(usual[name])


@pytest.mark.parametrize("implementation", [*CHUNKED, "kl_and_grads"])
@pytest.mark.parametrize(
    ("largest_logit", "chunks"), [(5.0, 32), (20.0, 32), (80.0, 32), (20.0, 256)]
)
def test_gradients_near_convergence_keep_three_digits_in_bf16(
    implementation, largest_logit, chunks
):
    """Case 17: a bf16 logits buffer or a bf16 sum over chunks fails this."""
    case, wanted = nearly_taught(largest_logit)
    _, got = run(implementation, case, dtype=jnp.bfloat16, chunk=256 // chunks)
    for name in ("hidden", "weight"):  # rounded to bf16: dlogits, and the result
        assert relative_error(got[name], wanted[name]) < rounding_by_norm("bfloat16", 2)


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_the_loss_is_the_same_with_and_without_jit(implementation):
    """Case 18; and case 17 without jit."""
    case = taught_by_itself(80.0, noise=0.1, length=8)
    jitted = float(forward(implementation, case, dtype=jnp.bfloat16).loss)
    execution = chunks_of(4, case, implementation)
    plain = float(loss(*on_device(case, jnp.bfloat16), execution=execution).loss)
    # A token's KL is a difference of logits near 80: RTOL of them at 8 tokens.
    assert abs(plain - jitted) <= RTOL * 80.0 * 8
    agreed = taught_by_itself(80.0, length=8)
    hidden, head, batch = on_device(agreed, jnp.bfloat16)
    kl, gradients = jax.value_and_grad(
        lambda hidden, head: loss(hidden, head, batch, execution=execution).loss, (0, 1)
    )(hidden, head)
    assert abs(float(kl)) / 8 < kl_error(80.0)
    usual = float64_loss(*agreed, DATA)[1]
    for gradient, name in ((gradients[0], "hidden"), (gradients[1].weight, "weight")):
        limit = logit_error(agreed) * np.linalg.norm(usual[name])
        assert np.linalg.norm(np.float64(gradient)) < limit


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_finite_differences_of_the_reported_value_are_the_gradient(temperature):
    """Case 22, on the loss itself: τ² is in both."""
    case = make_case(22, temperature=temperature)
    objective = Objective(ce_weight=0.3)
    _, gradients = run("fused", case, objective)
    # Along the gradient, where the difference is largest beside the rounding of two fp32 sums.
    along = gradients["hidden"] / np.linalg.norm(gradients["hidden"])
    step = 0.02

    def value(sign: int) -> float:
        moved = np.float32(case.hidden + sign * step * along)
        return run("fused", case._replace(hidden=moved), objective)[0]["loss"]

    difference = value(1) - value(-1)
    predicted = 2 * step * np.linalg.norm(gradients["hidden"])
    exact = [
        float64_loss(case.hidden + sign * step * along, case.head, case.batch, objective)[0]["loss"]
        for sign in (1, -1)
    ]
    curvature = abs(exact[0] - exact[1] - predicted)
    assert curvature < 0.01 * predicted
    assert (
        abs(difference - predicted) <= curvature + 2 * expected(case, objective).sum_slack["loss"]
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, also those of loops, branches and calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def shapes_made(function: Any, *inputs: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """(primitive, shape, dtype) of all that a function computes."""
    closed = jax.make_jaxpr(function)(*inputs)
    return [
        (equation.primitive.name, var.aval.shape, str(var.aval.dtype))
        for equation in equations(closed.jaxpr)
        for var in equation.outvars
        if hasattr(var.aval, "shape")
    ]


@pytest.mark.parametrize("implementation", [*CHUNKED, "kl_and_grads"])
def test_logits_and_the_weight_gradients_sum_are_fp32_and_operands_bf16(implementation):
    """Read in the jaxpr: XLA on a CPU can hide that an fp32 is missing."""
    case = on_device(taught_by_itself(5.0, length=8), jnp.bfloat16)
    hidden, head, batch = case
    execution = chunks_of(4, case, implementation)

    def value(hidden, head):
        return loss(hidden, head, batch, execution=execution).loss

    def core(hidden, head):
        return kl_and_grads(hidden, head, batch, execution=execution)

    function = core if implementation == "kl_and_grads" else jax.grad(value, (0, 1))
    closed = jax.make_jaxpr(function)(hidden, head)
    matmuls = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(matmuls) == (4 if implementation == "fused_chunked" else 3)
    for matmul in matmuls:
        assert {str(var.aval.dtype) for var in matmul.invars} == {"bfloat16"}
        assert str(matmul.outvars[0].aval.dtype) == "float32"
    for eqn in equations(closed.jaxpr):  # nothing V wide is rounded and read on
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.shape[-1:] == (
            251,
        ):
            assert str(eqn.invars[0].aval.dtype) != "bfloat16"
    carried = [
        str(var.aval.dtype)
        for eqn in equations(closed.jaxpr)
        if eqn.primitive.name in ("while", "scan")
        for var in eqn.outvars
        if var.aval.shape == (251, 32)
    ]
    assert carried and set(carried) == {"float32"}


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_truncate_can_be_negative_and_bucket_cannot(implementation):
    """Case 19."""
    case = taught_by_itself(5.0, length=16)
    less = np.float64(case.batch.targets.logprobs) - 0.1  # the student puts more on the K
    shy = with_targets(case, logprobs=less, log_tail=np.log1p(-np.exp(less).sum(-1)))
    truncate = Objective(tail="truncate")
    sums, gradients = run(implementation, shy, truncate)
    assert sums["loss"] == sums["kl"] < -0.3
    wanted = float64_loss(*shy, truncate)[1]
    for name, gradient in gradients.items():  # which a clamp would make 0
        assert relative_error(gradient, wanted[name]) < logit_error(shy)
    assert float(forward(implementation, shy).loss) > 0.01
    assert abs(float(forward(implementation, case).loss)) < 16 * kl_error(5.0)


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("tail", TAILS)
def test_probability_put_outside_the_k_is_seen_by_all_but_ignore(tail, top_k):
    """Case 20: +20 on one logit outside K; `ignore` is blind to it and 0 at K = 1."""
    _, _, batch, logits, *_ = loss_inputs(1, 4, width=8, vocab_size=67, top_k=top_k)
    case = Case(np.float32(logits), Head(np.eye(67, dtype=np.float32)), batch)
    hidden = case.hidden.copy()
    for position in range(4):
        outside = np.setdiff1d(np.arange(67), batch.targets.indices[0, position])
        hidden[0, position, outside[0]] = hidden[0, position].max() + 10.0
    objective = Objective(tail=tail)
    before = float(forward("fused", case, objective).kl) / 4
    after = float(forward("fused", case._replace(hidden=hidden), objective).kl) / 4
    if tail == "ignore":
        assert after == pytest.approx(before, abs=2 * kl_error(float(np.abs(hidden).max())))
        assert top_k > 1 or after == 0.0
    else:
        assert after - before > 1.0


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("temperature", [2.0, 4.0])
def test_the_z_loss_alone_moves_every_logit_at_any_temperature(implementation, temperature):
    """It is of the whole distribution at τ = 1: d log²Z/dz = 2 log Z · softmax(z), in the K and
    outside, whatever the targets' τ."""
    case = make_case(31, temperature=temperature)
    objective = Objective(kl_weight=0.0, z_loss_weight=0.1)
    assert_agrees(run(implementation, case, objective), expected(case, objective))
    among = np.zeros(len(case.head.weight), bool)
    among[np.unique(case.batch.targets.indices[case.batch.mask])] = True
    assert not among.all()  # tokens that are stored nowhere have gradients, too
    d_weight = run(implementation, case, objective)[1]["weight"]
    assert np.linalg.norm(d_weight[~among], axis=1).min() > 0


@pytest.mark.parametrize("implementation", CHUNKED)
def test_the_gradient_of_the_bias_is_summed_in_fp32_over_many_chunks(implementation):
    """In bf16 a sum of 256 terms would lose what is below 2⁻⁸ of it, term by term. The result is
    rounded once, into the bias's dtype."""
    case = taught_by_itself(20.0, noise=0.05, length=256)
    case = case._replace(head=replace(case.head, bias=np.zeros(251, np.float32)))
    wanted = float64_loss(*case, DATA)[1]["bias"]
    got = run(implementation, case, DATA, dtype=jnp.bfloat16, chunk=1)[1]["bias"]
    # dlogits are rounded to bf16, and so is the result.
    assert relative_error(got, wanted) < rounding_by_norm("bfloat16", 2)


def thin(student_tail: float, *, log_p: list[float] | None = None, log_tail: float) -> Case:
    """One position; logits are hidden: 0, −12, then 38 of student_tail. The teacher's top-1
    probability is 1 − 1e-6, its second 1e-6, where log_p does not say otherwise."""
    hidden = np.full((1, 1, 40), student_tail, np.float32)
    hidden[0, 0, :2] = [0.0, -12.0]
    log_p = [math.log1p(-1e-6 - 1e-9), math.log(1e-6)] if log_p is None else log_p
    case = Case(
        hidden,
        Head(np.eye(40, dtype=np.float32)),
        loss_inputs(1, 1, width=8, vocab_size=40, top_k=2).batch,
    )
    return with_targets(case, indices=[[[0, 1]]], logprobs=[[log_p]], log_tail=[[log_tail]])


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_a_tail_of_1e_minus_9_keeps_its_digits(implementation):
    """Case 21: in value and gradient, entry by entry."""
    case = thin(-23.0, log_tail=math.log(1e-9))
    wanted = float64_loss(*case)[1]["hidden"][0, 0, 2:]
    got = run(implementation, case)[1]["hidden"][0, 0, 2:]
    # d/dz = q_k (1 − p_t/q_t); q_k, q_t and p_t are exponentials of rounded numbers near −23.
    p, q = 1e-9, 38 * math.exp(-23.0)
    limit = rounding("float32", 6, 23 * (q + p) / (q - p))
    np.testing.assert_allclose(got, wanted, rtol=limit)


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_a_student_tail_that_underflows_is_finite_and_large(implementation):
    case = thin(-300.0, log_tail=math.log(0.01))
    got = run(implementation, case)
    sums, gradients = float64_loss(*case)
    spacing = 300 * 2.0**-23  # of fp32 at a logit of 300: the error of exp() of it
    slack = {name: 4 * spacing * float(np.linalg.norm(x)) for name, x in gradients.items()}
    assert_agrees(
        got,
        Expected(sums, gradients, {n: 4 * spacing * (1 + abs(x)) for n, x in sums.items()}, slack),
    )
    assert 2.5 < got[0]["kl"] < 5.0


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_the_log_of_a_thin_student_tail_keeps_its_digits(implementation):
    """Case 21: a teacher of nothing but tail, so that the KL is −log q_t, of a q_t near 4e-9."""
    case = thin(-23.0, log_p=[-math.inf, -math.inf], log_tail=0.0)
    q = np.exp(log_softmax(np.float64(case.hidden[0, 0])))
    got = run(implementation, case)[0]["kl"]
    assert got == pytest.approx(-math.log(q[2:].sum()), rel=RTOL)


@pytest.mark.parametrize(
    ("implementation", "tail", "divergence"),
    [("fused", tail, divergence) for tail in TAILS for divergence in DIVERGENCES]
    + [("dense", "bucket", divergence) for divergence in DIVERGENCES],
)
def test_probabilities_of_exactly_zero(implementation, tail, divergence):
    """A stored p_k of 0 and a p_t of 0: value and gradient finite and those of float64."""
    case = make_case(24, valid=1.0, short_counts=False)
    p = np.exp(np.float64(case.batch.targets.logprobs))
    p[..., -1] = 0.0
    p[:, ::2] /= p[:, ::2].sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_tail = np.log(np.maximum(1.0 - p.sum(axis=-1), 0.0))
        log_tail[:, ::2] = -np.inf
        case = with_targets(case, logprobs=np.log(p), log_tail=log_tail)
    objective = Objective(tail=tail, divergence=divergence)
    assert_agrees(run(implementation, case, objective), expected(case, objective))


def test_reverse_kl_of_what_the_teacher_rules_out_is_floored_at_a_stated_value():
    """Student uniform over 4, teacher half and half on 2 of them and no tail."""
    batch = loss_inputs(1, 1, width=8, vocab_size=4, top_k=2).batch
    case = Case(np.zeros((1, 1, 4), np.float32), Head(np.eye(4, dtype=np.float32)), batch)
    half = math.log(0.5)
    case = with_targets(case, indices=[[[0, 1]]], logprobs=[[[half, half]]], log_tail=[[-math.inf]])
    kl = run("fused", case, Objective(divergence="reverse_kl"))[0]["kl"]
    assert kl == pytest.approx(0.5 * half + 0.5 * (half - LOG_FLOOR), rel=RTOL)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(number=st.integers(0, 10_000), scale=st.floats(0.01, 8.0))
def test_bucket_is_never_above_the_whole_kl_nor_below_zero(number, scale):
    inputs = dict(rows=1, length=6, vocab_size=33, scale=scale, valid=1.0, short_counts=False)
    case = make_case(number, top_k=4, **inputs)
    whole = make_case(number, top_k=33, **inputs)
    np.testing.assert_array_equal(case.hidden, whole.hidden)
    kl = float(forward("fused", case).kl)
    # Each of 6 tokens adds log-probabilities up to 100 or so, to RTOL of them at most.
    assert -RTOL * 600 < kl < float64_loss(*whole)[0]["kl"] * (1 + RTOL) + RTOL * 600
