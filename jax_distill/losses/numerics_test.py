"""Where a loss goes wrong in practice: bf16, large logits, thin tails, probabilities of 0."""

import math
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill.losses import DIVERGENCES, IMPLEMENTATIONS, LOG_FLOOR, TAILS, kl_and_grads
from jax_distill.losses.agreement_test import (
    EVERY,
    arrays,
    assert_agrees,
    forward,
    relative_error,
    run,
)
from jax_distill.losses.float64_test import Batch, float64_loss, log_softmax, make_batch, top_k

CHUNKED = ["forward_chunked", "fused_chunked", "fused"]


def taught_by_itself(
    largest_logit: float, *, noise: float = 0.0, positions: int = 64, k: int = 20
) -> Batch:
    """bf16 inputs of |logit| ≤ largest_logit; the teacher is the student, noise apart."""
    rng = np.random.default_rng(17)
    hidden = rng.normal(size=(1, positions, 32))
    lm_head = rng.normal(size=(251, 32))
    hidden *= largest_logit / np.abs(hidden @ lm_head.T).max()
    hidden = hidden.astype(ml_dtypes.bfloat16).astype(np.float64)
    lm_head = lm_head.astype(ml_dtypes.bfloat16).astype(np.float64)
    z = hidden @ lm_head.T
    ids, logprobs, log_tail = top_k(log_softmax(z + noise * rng.normal(size=z.shape)), k)
    return make_batch(0, shape=(1, positions, 32, 251, k), holes=False).replace(
        hidden=hidden,
        lm_head=lm_head,
        teacher_indices=ids,
        teacher_logprobs=logprobs,
        teacher_log_tail=log_tail,
    )


@cache
def nearly_taught(largest_logit: float) -> tuple[Batch, dict[str, np.ndarray]]:
    """A student near convergence on 256 positions, and its gradients in float64."""
    batch = taught_by_itself(largest_logit, noise=0.05, positions=256)
    return batch, float64_loss(batch)[1]


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("largest_logit", [5.0, 20.0, 80.0])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(largest_logit, implementation):
    """Case 17: bf16 inputs, fp32 logits on both passes."""
    batch = taught_by_itself(largest_logit)
    sums, gradients = run(implementation, batch, dtype=jnp.bfloat16, chunk_size=16)
    assert abs(sums["loss"]) / sums["count"] < 1e-5
    _, usual = float64_loss(batch, kl_weight=0.0, ce_weight=1.0)
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient) < 1e-4 * np.linalg.norm(usual[name])


@pytest.mark.parametrize("implementation", [*CHUNKED, "kl_and_grads"])
@pytest.mark.parametrize(
    ("largest_logit", "chunks"), [(5.0, 32), (20.0, 32), (80.0, 32), (20.0, 256)]
)
def test_gradients_near_convergence_keep_three_digits_in_bf16(
    implementation, largest_logit, chunks
):
    """Case 17: a bf16 logits buffer or a bf16 sum over chunks fails this."""
    batch, wanted = nearly_taught(largest_logit)
    _, got = run(implementation, batch, dtype=jnp.bfloat16, chunk_size=256 // chunks)
    assert relative_error(got["hidden"], wanted["hidden"]) < 3e-3
    assert relative_error(got["lm_head"], wanted["lm_head"]) < 3e-3


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_the_loss_is_the_same_with_and_without_jit(implementation):
    """Case 18; and case 17 without jit."""
    loss = partial(IMPLEMENTATIONS[implementation], chunk_size=4)
    data = arrays(taught_by_itself(80.0, noise=0.1, positions=8), jnp.bfloat16)
    jitted = float(forward(implementation, data).loss)
    assert float(loss(**data).loss) == pytest.approx(jitted, rel=1e-5)
    agreed = taught_by_itself(80.0, positions=8)
    data = arrays(agreed, jnp.bfloat16)
    hidden, lm_head = data.pop("hidden"), data.pop("lm_head")
    kl, gradients = jax.value_and_grad(lambda *trained: loss(*trained, **data).loss, (0, 1))(
        hidden, lm_head
    )
    assert abs(float(kl)) / 8 < 1e-5
    usual = float64_loss(agreed, kl_weight=0.0, ce_weight=1.0)[1]
    for gradient, name in zip(gradients, ("hidden", "lm_head"), strict=True):
        assert np.linalg.norm(np.float64(gradient)) < 1e-4 * np.linalg.norm(usual[name])


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_finite_differences_of_the_reported_value_are_the_gradient(temperature):
    """Case 22, on the loss itself: τ² is in both."""
    batch = make_batch(22, temperature=temperature)
    knobs = {"temperature": temperature, "ce_weight": 0.3}
    along = np.random.default_rng(3).normal(size=batch.hidden.shape)
    step = 5e-3 * along * batch.mask[..., None]
    above = run("fused", batch.replace(hidden=batch.hidden + step), **knobs)[0]["loss"]
    below = run("fused", batch.replace(hidden=batch.hidden - step), **knobs)[0]["loss"]
    predicted = 2 * np.sum(run("fused", batch, **knobs)[1]["hidden"] * step)
    assert above - below == pytest.approx(predicted, rel=2e-3)


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
def test_logits_and_the_head_gradients_sum_are_fp32_and_operands_bf16(implementation):
    """Read in the jaxpr: XLA on a CPU can hide that an fp32 is missing."""
    batch = taught_by_itself(5.0, positions=8)
    data = arrays(batch, jnp.bfloat16)

    def value(hidden, lm_head):
        loss = IMPLEMENTATIONS[implementation]
        return loss(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4).loss

    def core(hidden, lm_head):
        return kl_and_grads(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4)

    function = core if implementation == "kl_and_grads" else jax.grad(value, (0, 1))
    closed = jax.make_jaxpr(function)(data["hidden"], data["lm_head"])
    products = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) == (4 if implementation == "fused_chunked" else 3)
    for product in products:
        assert {str(var.aval.dtype) for var in product.invars} == {"bfloat16"}
        assert str(product.outvars[0].aval.dtype) == "float32"
    for eqn in equations(closed.jaxpr):  # nothing of the vocabulary's width is rounded and read on
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
    batch = taught_by_itself(5.0, positions=16)
    agreed = batch.teacher_logprobs
    shy = batch.replace(teacher_logprobs=agreed - 0.1)  # the student puts more on the K
    shy = shy.replace(teacher_log_tail=np.log1p(-np.exp(agreed - 0.1).sum(-1)))
    sums, gradients = run(implementation, shy, tail="truncate")
    assert sums["loss"] == sums["kl"] < -0.3
    wanted = float64_loss(shy, tail="truncate")[1]
    for name, gradient in gradients.items():  # which a clamp would make 0
        assert relative_error(gradient, wanted[name]) < 1e-4
    assert float(forward(implementation, arrays(shy)).loss) > 0.01
    assert abs(float(forward(implementation, arrays(batch)).loss)) < 1e-4


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "truncate", "ignore"])
def test_probability_put_outside_the_k_is_seen_by_all_but_ignore(tail, k):
    """Case 20: +20 on one logit outside K; `ignore` is blind to it and 0 at K = 1."""
    batch = make_batch(20, shape=(1, 4, 67, 67, k), holes=False).replace(lm_head=np.eye(67))
    hidden = batch.hidden.copy()
    for position in range(4):
        outside = np.setdiff1d(np.arange(67), batch.teacher_indices[0, position])
        hidden[0, position, outside[0]] += 20.0
    before = forward("fused", arrays(batch), tail=tail).kl / 4
    after = forward("fused", arrays(batch.replace(hidden=hidden)), tail=tail).kl / 4
    if tail == "ignore":
        assert float(after) == pytest.approx(float(before), abs=1e-5)
        assert k > 1 or float(after) == 0.0
    else:
        assert float(after - before) > 1.0


def thin(student_tail: float) -> Batch:
    """One position, top-1 probability 1 − 1e-6 and tail 1e-9 of the teacher; logits are hidden."""
    log_p = np.log(np.array([1 - 1e-6 - 1e-9, 1e-6]))
    hidden = np.full((1, 1, 40), student_tail)
    hidden[0, 0, :2] = [0.0, -12.0]
    return make_batch(21, shape=(1, 1, 40, 40, 2), holes=False).replace(
        hidden=hidden,
        lm_head=np.eye(40),
        teacher_indices=np.array([[[0, 1]]]),
        teacher_logprobs=log_p[None, None],
        teacher_log_tail=np.full((1, 1), np.log(1e-9)),
    )


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_a_tail_of_1e_minus_9_keeps_its_digits(implementation):
    """Case 21: in value and gradient, column by column."""
    batch = thin(-23.0)
    wanted = float64_loss(batch)[1]["hidden"][0, 0, 2:]
    got = run(implementation, batch)[1]["hidden"][0, 0, 2:]
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_a_student_tail_that_underflows_is_finite_and_large(implementation):
    batch = thin(-300.0).replace(teacher_log_tail=np.full((1, 1), np.log(0.01)))
    got = run(implementation, batch)
    spacing = 300 * 2.0**-23  # of fp32 at a logit of 300: the error of exp() of it
    assert_agrees(got, float64_loss(batch), rtol=4 * spacing)
    assert 2.5 < got[0]["kl"] < 5.0


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_the_log_of_a_thin_student_tail_keeps_its_digits(implementation):
    """Case 21: a teacher of nothing but tail, so that the KL is −log q_t, of a q_t near 4e-9."""
    batch = thin(-23.0).replace(
        teacher_logprobs=np.full((1, 1, 2), -np.inf), teacher_log_tail=np.zeros((1, 1))
    )
    q = np.exp(log_softmax(batch.hidden[0, 0]))
    got = run(implementation, batch)[0]["kl"]
    assert got == pytest.approx(-math.log(q[2:].sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("implementation", "tail", "divergence"),
    [("fused", tail, divergence) for tail in TAILS for divergence in DIVERGENCES]
    + [("dense", "bucket", divergence) for divergence in DIVERGENCES],
)
def test_probabilities_of_exactly_zero(implementation, tail, divergence):
    """A stored p_k of 0 and a p_t of 0: value and gradient finite and those of float64."""
    batch = make_batch(24, holes=False)
    p = np.exp(batch.teacher_logprobs)
    p[..., -1] = 0.0
    p[:, ::2] /= p[:, ::2].sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_tail = np.log(np.maximum(1.0 - p.sum(axis=-1), 0.0))
        log_tail[:, ::2] = -np.inf
        batch = batch.replace(teacher_logprobs=np.log(p), teacher_log_tail=log_tail)
    knobs = {"tail": tail, "divergence": divergence}
    assert_agrees(run(implementation, batch, **knobs), float64_loss(batch, **knobs))


def test_reverse_kl_of_what_the_teacher_rules_out_is_floored_at_a_stated_value():
    """Student uniform over 4, teacher half and half on 2 of them and no tail."""
    batch = make_batch(0, shape=(1, 1, 4, 4, 2), holes=False).replace(
        hidden=np.zeros((1, 1, 4)),
        teacher_indices=np.array([[[0, 1]]]),
        teacher_logprobs=np.log(np.full((1, 1, 2), 0.5)),
        teacher_log_tail=np.full((1, 1), -np.inf),
    )
    kl = run("fused", batch, divergence="reverse_kl")[0]["kl"]
    assert kl == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - LOG_FLOOR), rel=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(number=st.integers(0, 10_000), scale=st.floats(0.01, 8.0))
def test_bucket_is_never_above_the_whole_kl_nor_below_zero(number, scale):
    batch = make_batch(number, shape=(1, 6, 8, 33, 4), scale=scale, holes=False)
    whole = make_batch(number, shape=(1, 6, 8, 33, 33), scale=scale, holes=False)
    np.testing.assert_array_equal(batch.hidden, whole.hidden)
    kl = float(forward("fused", arrays(batch)).kl)
    assert -1e-5 < kl < float64_loss(whole)[0]["kl"] * (1 + 1e-6) + 1e-5
