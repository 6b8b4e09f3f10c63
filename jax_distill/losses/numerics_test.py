"""Where a loss goes wrong in practice: bf16, large logits, thin tails, masks, frozen heads."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_distill.losses import IMPLEMENTATIONS, fused_loop, kl_and_grads
from jax_distill.losses.agreement_test import (
    FAST_COMPILE,
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


@pytest.mark.parametrize("largest_logit", [5.0, 20.0, 80.0])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(largest_logit):
    """Case 17: bf16 inputs, fp32 logits on both passes."""
    batch = taught_by_itself(largest_logit)
    sums, gradients = run("fused", batch, dtype=jnp.bfloat16, chunk_size=16)
    assert abs(sums["kl"]) / sums["count"] < 1e-5
    _, usual = float64_loss(batch, kl_weight=0.0, ce_weight=1.0)
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient) < 1e-4 * np.linalg.norm(usual[name])


@pytest.mark.parametrize("implementation", ["fused_chunked", "fused"])
def test_gradients_near_convergence_keep_three_digits_in_bf16(implementation):
    """Case 17: 32 chunks; a bf16 logits buffer or a bf16 sum over chunks fails this."""
    batch = taught_by_itself(20.0, noise=0.05)
    _, wanted = float64_loss(batch)
    _, got = run(implementation, batch, dtype=jnp.bfloat16, chunk_size=2)
    assert relative_error(got["hidden"], wanted["hidden"]) < 3e-3
    assert relative_error(got["lm_head"], wanted["lm_head"]) < 3e-3


def test_dividing_by_the_count_costs_no_further_digit():
    """loss/count: one more rounding of d_hidden to bf16 would make 3.0e-3 of 2.4e-3."""
    batch = taught_by_itself(20.0, noise=0.01, positions=256)
    _, wanted = float64_loss(batch)
    data = arrays(batch, jnp.bfloat16)
    hidden = data.pop("hidden")
    loss = partial(IMPLEMENTATIONS["fused"], chunk_size=8)
    gradient = jax.jit(
        jax.grad(lambda hidden: loss(hidden, **data).loss / 37.0), compiler_options=FAST_COMPILE
    )(hidden)
    error = relative_error(37.0 * np.asarray(gradient, np.float64), wanted["hidden"])
    assert error < 2.8e-3


def test_the_loss_is_the_same_with_and_without_jit():
    """Case 18."""
    data = arrays(taught_by_itself(80.0, noise=0.1, positions=8), jnp.bfloat16)
    plain = IMPLEMENTATIONS["fused"](**data, chunk_size=4).loss
    assert float(plain) == pytest.approx(float(forward("fused", data).loss), rel=1e-5)


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


@pytest.mark.parametrize("implementation", CHUNKED)
def test_logits_and_the_head_gradients_sum_are_fp32_and_operands_bf16(implementation):
    """Read in the jaxpr: XLA on a CPU can hide that an fp32 is missing."""
    batch = taught_by_itself(5.0, positions=8)
    data = arrays(batch, jnp.bfloat16)
    loss = IMPLEMENTATIONS[implementation]

    def value(hidden, lm_head):
        return loss(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4).loss

    inputs = (data["hidden"], data["lm_head"])
    closed = jax.make_jaxpr(jax.grad(value, (0, 1)))(*inputs)
    products = [eqn for eqn in equations(closed.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) == {"forward_chunked": 3, "fused_chunked": 4, "fused": 3}[implementation]
    for product in products:
        assert {str(var.aval.dtype) for var in product.invars} == {"bfloat16"}
        assert str(product.outvars[0].aval.dtype) == "float32"
    carried = [
        str(var.aval.dtype)
        for eqn in equations(closed.jaxpr)
        if eqn.primitive.name in ("while", "scan")
        for var in eqn.outvars
        if var.aval.shape == (251, 32)
    ]
    assert carried and set(carried) == {"float32"}


@pytest.mark.parametrize("implementation", ["dense", "fused_chunked", "fused"])
def test_what_stands_in_masked_cells_never_matters(implementation):
    """Case 13: NaN, ±inf, ids out of range."""
    batch = make_batch(13)
    hole = ~batch.mask
    poison = np.random.default_rng(0).choice([np.nan, np.inf, -np.inf], hole.sum())
    wild = {
        name: np.where(
            hole.reshape(hole.shape + (1,) * (getattr(batch, name).ndim - 2)),
            np.nan if name != "teacher_log_tail" else np.inf,
            getattr(batch, name),
        )
        for name in ("hidden", "teacher_logprobs", "teacher_log_tail")
    }
    wild["hidden"][hole] = poison[:, None]
    for name, value in (("labels", -100), ("teacher_indices", 1 << 30), ("teacher_count", 1000)):
        field = getattr(batch, name).copy()
        field[hole] = value
        wild[name] = field
    knobs = {"ce_weight": 0.5, "z_loss_weight": 0.1}
    got = run(implementation, batch.replace(**wild), **knobs)
    assert_agrees(got, float64_loss(batch, **knobs))
    assert not got[1]["hidden"][hole].any()


def test_padding_to_another_length_changes_nothing():
    """Case 12: T = 32 and 64."""
    batch = make_batch(14, shape=(2, 32, 8, 67, 5))

    def padded(x: np.ndarray | None) -> np.ndarray | None:
        if x is None or x.shape[:2] != (2, 32):
            return x
        return np.concatenate([x, np.zeros_like(x)], axis=1)

    longer = Batch(**{name: padded(getattr(batch, name)) for name in batch.__dict__})
    short, long = run("fused", batch, chunk_size=16), run("fused", longer, chunk_size=16)
    assert short[0]["count"] == long[0]["count"]
    assert long[0]["loss"] == pytest.approx(short[0]["loss"], rel=1e-6)
    assert relative_error(long[1]["hidden"][:, :32], short[1]["hidden"]) < 1e-6
    assert relative_error(long[1]["lm_head"], short[1]["lm_head"]) < 1e-6


@pytest.mark.parametrize("implementation", ["dense", "fused_chunked", "fused"])
def test_a_batch_with_no_valid_token_is_zero(implementation):
    batch = make_batch(15, shape=(1, 6, 8, 67, 5))
    batch = batch.replace(mask=np.zeros((1, 6), bool))
    sums, gradients = run(implementation, batch, ce_weight=1.0)
    assert set(sums.values()) == {0.0}
    assert not gradients["hidden"].any() and not gradients["lm_head"].any()


def test_truncate_can_be_negative_and_bucket_cannot():
    """Case 19."""
    batch = taught_by_itself(5.0)
    agreed = batch.teacher_logprobs
    shy = batch.replace(teacher_logprobs=agreed - 0.1)  # the student puts more on the K
    data = arrays(shy.replace(teacher_log_tail=np.log1p(-np.exp(agreed - 0.1).sum(-1))))
    assert float(forward("fused", data, tail="truncate").kl) < -1.0
    assert float(forward("fused", data).kl) > 0.01
    assert abs(float(forward("fused", arrays(batch)).kl)) < 1e-4


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


@pytest.mark.parametrize("implementation", CHUNKED)
def test_both_gradients_are_multiplied_by_the_incoming_cotangent(implementation):
    """Case 23: the gradient of 3.7·loss."""
    data = arrays(make_batch(23))
    loss = IMPLEMENTATIONS[implementation]

    def value(hidden, lm_head, factor):
        return factor * loss(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4).loss

    gradients = jax.jit(jax.grad(value, (0, 1)), compiler_options=FAST_COMPILE)
    inputs = (data["hidden"], data["lm_head"])
    once, more = gradients(*inputs, jnp.float32(1.0)), gradients(*inputs, jnp.float32(3.7))
    for a, b in zip(once, more, strict=True):
        assert relative_error(np.asarray(b), 3.7 * np.asarray(a)) < 1e-6


def test_a_frozen_head_allocates_no_head_gradient():
    """Case 25: no fp32 [V,D] in the jaxpr, no memory for one in the program."""
    data = arrays(make_batch(25, shape=(1, 8, 64, 4001, 5)), jnp.bfloat16)
    loss = IMPLEMENTATIONS["fused"]

    def value(hidden, lm_head):
        return loss(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4).loss

    inputs = (data["hidden"], data["lm_head"])
    frozen, trained = jax.grad(value), jax.grad(value, (0, 1))
    assert not [
        s for _, s, t in shapes_made(frozen, *inputs) if s == (4001, 64) and t != "bfloat16"
    ]
    assert [s for _, s, t in shapes_made(trained, *inputs) if s == (4001, 64) and t == "float32"]
    temps = [
        jax.jit(f, compiler_options=FAST_COMPILE)
        .lower(*inputs)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for f in (frozen, trained)
    ]
    assert temps[1] - temps[0] > 0.9 * 4001 * 64 * 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tied_embeddings_and_low_rank_heads_train(dtype):
    """A head that hidden depends on, a head of base + A·B with only A trained, inside a scan."""
    batch = make_batch(26)
    data = arrays(batch, dtype)
    base, low = data["lm_head"], jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), dtype)

    def total(loss, embedding, left):
        def micro(total, _):
            hidden = jnp.take(embedding, data["labels"].reshape(-1), axis=0).reshape(2, 13, 8)
            tied = loss(**data | {"hidden": hidden, "lm_head": embedding}, chunk_size=4).loss
            lora = loss(**data | {"lm_head": base + left @ low}, chunk_size=4).loss
            return total + tied + lora, None

        return jax.lax.scan(micro, jnp.float32(0), None, length=2)[0]

    left = jnp.full((67, 3), 0.1, dtype)
    results = [
        jax.jit(jax.grad(lambda e, a, f=f: total(f, e, a), (0, 1)), compiler_options=FAST_COMPILE)(
            base, left
        )
        for f in (IMPLEMENTATIONS["dense"], IMPLEMENTATIONS["fused"])
    ]
    for wanted, got in zip(*results, strict=True):
        assert got.dtype == dtype
        error = relative_error(np.asarray(got, np.float64), np.asarray(wanted, np.float64))
        assert error < (2e-6 if dtype == jnp.float32 else 1e-2)


def test_a_head_wider_than_hidden_keeps_a_wide_gradient():
    """fp32 parameters under bf16 compute: d_lm_head is not rounded to bf16 on its way."""
    batch = taught_by_itself(20.0, noise=0.05)
    data = arrays(batch, jnp.bfloat16)
    wide = jnp.asarray(batch.lm_head, jnp.float32)
    for name in ("fused_chunked", "fused"):
        loss = IMPLEMENTATIONS[name]
        gradient = jax.jit(
            jax.grad(lambda w, loss=loss: loss(**data | {"lm_head": w}, chunk_size=16).loss),
            compiler_options=FAST_COMPILE,
        )(wide)
        assert gradient.dtype == jnp.float32
        again = np.asarray(gradient).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.any(again != np.asarray(gradient))


@pytest.mark.parametrize("implementation", ["forward_chunked", "fused"])
def test_valid_positions_first_changes_no_number(implementation):
    batch = make_batch(27, shape=(2, 23, 8, 67, 5))
    mask = batch.mask.copy()
    mask[0, 3:19] = False  # rows of unlike length
    batch = batch.replace(mask=mask)
    assert_agrees(run(implementation, batch, valid_first=True), float64_loss(batch))


def test_valid_positions_first_skips_the_empty_chunks(monkeypatch):
    turns = []
    read_chunk = fused_loop.read_chunk

    def counted(*args, **knobs):
        jax.debug.callback(lambda: turns.append(1))
        return read_chunk(*args, **knobs)

    monkeypatch.setattr(fused_loop, "read_chunk", counted)
    batch = make_batch(28, shape=(2, 24, 8, 67, 5), holes=False)
    mask = np.zeros((2, 24), bool)
    mask[0, 18:], mask[1, 3] = True, True
    data = arrays(batch.replace(mask=mask))
    for valid_first, expected in ((False, 6), (True, 2)):
        turns.clear()
        core = partial(kl_and_grads, chunk_size=4, valid_first=valid_first)
        jax.block_until_ready(
            jax.jit(lambda core=core: core(**data), compiler_options=FAST_COMPILE)()
        )
        jax.effects_barrier()
        assert len(turns) == expected
