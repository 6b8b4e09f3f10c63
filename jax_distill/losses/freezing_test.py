"""What is trained and what is not: frozen, tied, low-rank and partly trained heads."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_distill.losses import IMPLEMENTATIONS
from jax_distill.losses.agreement_test import FAST_COMPILE, arrays, relative_error
from jax_distill.losses.float64_test import float64_loss, make_batch
from jax_distill.losses.numerics_test import shapes_made, taught_by_itself


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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


def products(function: Any, *inputs: Any) -> int:
    """Matrix products in the jaxpr; the bodies of loops and branches count once."""
    return [name for name, *_ in shapes_made(function, *inputs)].count("dot_general")


def head_sized(function: Any, *inputs: Any) -> list[str]:
    """dtypes of what is made in the shape [4001,64] of the head."""
    return [t for _, shape, t in shapes_made(function, *inputs) if shape == (4001, 64)]


def temps(function: Any, *inputs: Any) -> int:
    """Bytes that the compiled program holds beside its inputs and outputs."""
    lowered = jax.jit(function, compiler_options=FAST_COMPILE).lower(*inputs)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def frozen_by_stop_gradient(value):
    return jax.grad(lambda hidden, lm_head: value(hidden, jax.lax.stop_gradient(lm_head)))


def frozen_in_a_scan(value):
    """The head closed over, micro-batches in a loop, the loss under checkpoint."""

    def total(hidden, lm_head):
        micro = jax.checkpoint(lambda total, _: (total + value(hidden, lm_head), None))
        return jax.lax.scan(micro, jnp.float32(0), None, length=2)[0]

    return jax.grad(total)


def frozen_under_an_adapter(value):
    """LoRA on what makes hidden: only the two small factors are trained."""

    def total(adapter, hidden, lm_head):
        left, right = adapter
        return value(hidden + (hidden @ left) @ right, lm_head)

    def gradient(hidden, lm_head):
        adapter = (jnp.ones((64, 2), hidden.dtype), jnp.zeros((2, 64), hidden.dtype))
        return jax.grad(total)(adapter, hidden, lm_head)

    return gradient


@pytest.mark.parametrize(
    "frozen", [jax.grad, frozen_by_stop_gradient, frozen_in_a_scan, frozen_under_an_adapter]
)
def test_a_frozen_head_allocates_no_head_gradient(frozen):
    """Case 25: no product for it and no fp32 [V,D] in the jaxpr, no memory in the program."""
    data = arrays(make_batch(25, shape=(1, 8, 64, 4001, 5)), jnp.bfloat16)
    loss = IMPLEMENTATIONS["fused"]

    def value(hidden, lm_head):
        return loss(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4).loss

    inputs = (data["hidden"], data["lm_head"])
    trained = jax.grad(value, (0, 1))
    assert "float32" in head_sized(trained, *inputs)
    assert set(head_sized(frozen(value), *inputs)) <= {"bfloat16"}
    if frozen is jax.grad:
        assert products(trained, *inputs) == 3 and products(frozen(value), *inputs) == 2
    assert temps(trained, *inputs) - temps(frozen(value), *inputs) > 0.9 * 4001 * 64 * 4


@pytest.mark.parametrize("implementation", ["forward_chunked", "fused_chunked"])
def test_a_frozen_head_is_dropped_from_the_program_of_the_other_loops(implementation):
    """Case 25: their jaxpr still has the product, which nothing reads and XLA leaves out."""
    data = arrays(make_batch(25, shape=(1, 8, 64, 4001, 5)), jnp.bfloat16)
    loss = IMPLEMENTATIONS[implementation]

    def value(hidden, lm_head):
        return loss(**data | {"hidden": hidden, "lm_head": lm_head}, chunk_size=4).loss

    inputs = (data["hidden"], data["lm_head"])
    trained, frozen = jax.grad(value, (0, 1)), jax.grad(value)
    assert temps(trained, *inputs) - temps(frozen, *inputs) > 0.9 * 4001 * 64 * 4


def test_one_chunk_of_logits_and_one_of_dlogits_are_held_whatever_the_length():
    """In fp32, where a CPU's products make no copies of their operands."""
    chunk = 8 * 4001 * 4
    held: dict[str, list[float]] = {"fused": [], "forward_chunked": []}
    for positions in (16, 64):
        data = arrays(make_batch(25, shape=(1, positions, 8, 4001, 5)))
        inputs = (data.pop("hidden"), data.pop("lm_head"))
        for name, sizes in held.items():
            loss = partial(IMPLEMENTATIONS[name], chunk_size=8)
            trained = jax.grad(lambda *trained, f=loss, d=data: f(*trained, **d).loss, (0, 1))
            sizes.append(temps(trained, *inputs) / chunk)
    assert max(held["fused"]) < 2.1
    assert held["forward_chunked"][1] > 8  # every chunk's


def test_frozen_hidden_states_cost_no_gradient_either():
    """Only the head is trained: two products, and hidden is left alone."""
    data = arrays(make_batch(25), jnp.bfloat16)
    loss = partial(IMPLEMENTATIONS["fused"], chunk_size=4)

    def value(lm_head, hidden):
        return loss(**data | {"hidden": hidden, "lm_head": lm_head}).loss

    inputs = (data["lm_head"], data["hidden"])
    assert products(jax.grad(value), *inputs) == 2
    assert products(jax.grad(value, (0, 1)), *inputs) == 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_no_gradient_is_asked_for_only_the_forward_runs(implementation):
    data = arrays(make_batch(25), jnp.bfloat16)
    loss = partial(IMPLEMENTATIONS[implementation], chunk_size=4)
    assert products(lambda data: loss(**data), data) == 1


def test_part_of_a_head_is_trained():
    """Rows below 30 frozen: the others get what they would have got, these nothing."""
    data = arrays(make_batch(27))

    def value(loss, lm_head, first):
        frozen = jax.lax.stop_gradient(lm_head)
        rows = jnp.arange(lm_head.shape[0])[:, None] < first
        return loss(**data | {"lm_head": jnp.where(rows, frozen, lm_head)}, chunk_size=4).loss

    def gradient(name, first):
        loss = IMPLEMENTATIONS[name]
        jitted = jax.jit(jax.grad(lambda w: value(loss, w, first)), compiler_options=FAST_COMPILE)
        return np.asarray(jitted(data["lm_head"]))

    whole, part = gradient("dense", 0), gradient("fused", 30)
    assert not part[:30].any()
    assert relative_error(part[30:], whole[30:]) < 2e-6


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
