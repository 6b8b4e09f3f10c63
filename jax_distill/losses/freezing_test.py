"""What is trained and what is not: frozen, tied, low-rank and partly trained heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Head, loss
from jax_distill.losses.agreement_test import (
    RTOL,
    Case,
    chunks_of,
    make_case,
    on_device,
    relative_error,
)
from jax_distill.losses.float64_test import float64_loss
from jax_distill.losses.numerics_test import logit_error, shapes_made, taught_by_itself
from jax_distill.objective import IMPLEMENTATIONS
from jax_distill.synthetic import rounding_by_norm


def loss_of(case: Case, implementation: str = "fused", chunk: int = 4) -> Callable[..., Any]:
    """(hidden, weight) → the loss of the case with these."""
    execution = chunks_of(chunk, case, implementation)

    def value(hidden, weight):
        return loss(hidden, Head(weight), case.batch, execution=execution).loss

    return value


def wide_case(width: int = 64, length: int = 8, dtype: Any = jnp.bfloat16) -> Case:
    """A head of 4001 tokens, of whose size nothing else is."""
    case = make_case(25, rows=1, length=length, width=width, vocab_size=4001)
    return on_device(case, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_both_gradients_are_multiplied_by_the_incoming_cotangent(implementation):
    """Case 23: the gradient of 3.7·loss."""
    case = on_device(make_case(23))
    value = loss_of(case, implementation)
    gradients = jax.jit(
        jax.grad(lambda hidden, weight, factor: factor * value(hidden, weight), (0, 1)),
        compiler_options=QUICK_COMPILE,
    )
    inputs = (case.hidden, case.head.weight)
    once, more = gradients(*inputs, jnp.float32(1.0)), gradients(*inputs, jnp.float32(3.7))
    for a, b in zip(once, more, strict=True):
        assert relative_error(np.asarray(b), 3.7 * np.asarray(a)) < RTOL


def matmuls(function: Any, *inputs: Any) -> int:
    """Matmuls in the jaxpr; the bodies of loops and branches count once."""
    return [name for name, *_ in shapes_made(function, *inputs)].count("dot_general")


def of_weights_shape(function: Any, *inputs: Any) -> list[str]:
    """dtypes of what is computed in the shape [4001,64] of the head."""
    return [t for _, shape, t in shapes_made(function, *inputs) if shape == (4001, 64)]


def temporaries(function: Any, *inputs: Any) -> int:
    """Bytes that the compiled program holds beside its inputs and outputs."""
    lowered = jax.jit(function, compiler_options=QUICK_COMPILE).lower(*inputs)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def frozen_by_stop_gradient(value):
    return jax.grad(lambda hidden, weight: value(hidden, jax.lax.stop_gradient(weight)))


def frozen_in_a_scan(value):
    """The head closed over, micro-batches in a loop, the loss under checkpoint."""

    def total(hidden, weight):
        micro = jax.checkpoint(lambda total, _: (total + value(hidden, weight), None))
        return jax.lax.scan(micro, jnp.float32(0), None, length=2)[0]

    return jax.grad(total)


def frozen_under_an_adapter(value):
    """LoRA on what makes hidden: only the two small factors are trained."""

    def total(adapter, hidden, weight):
        left, right = adapter
        return value(hidden + (hidden @ left) @ right, weight)

    def gradient(hidden, weight):
        adapter = (jnp.ones((64, 2), hidden.dtype), jnp.zeros((2, 64), hidden.dtype))
        return jax.grad(total)(adapter, hidden, weight)

    return gradient


@pytest.mark.parametrize(
    "frozen", [jax.grad, frozen_by_stop_gradient, frozen_in_a_scan, frozen_under_an_adapter]
)
def test_a_frozen_head_allocates_no_gradient(frozen):
    """Case 25: no matmul for it and no fp32 [V,D] in the jaxpr, no memory in the program."""
    case = wide_case()
    value, inputs = loss_of(case), (case.hidden, case.head.weight)
    trained = jax.grad(value, (0, 1))
    assert "float32" in of_weights_shape(trained, *inputs)
    assert set(of_weights_shape(frozen(value), *inputs)) <= {"bfloat16"}
    if frozen is jax.grad:
        assert matmuls(trained, *inputs) == 3 and matmuls(frozen(value), *inputs) == 2
    saved = temporaries(trained, *inputs) - temporaries(frozen(value), *inputs)
    assert saved > 0.9 * 4001 * 64 * 4


@pytest.mark.parametrize("implementation", ["forward_chunked", "fused_chunked"])
def test_a_frozen_head_is_dropped_from_the_program_of_the_other_loops(implementation):
    """Case 25: their jaxpr still has the matmul, which nothing reads and XLA leaves out."""
    case = wide_case()
    value, inputs = loss_of(case, implementation), (case.hidden, case.head.weight)
    saved = temporaries(jax.grad(value, (0, 1)), *inputs) - temporaries(jax.grad(value), *inputs)
    assert saved > 0.9 * 4001 * 64 * 4


def test_one_chunk_of_logits_and_one_of_dlogits_are_held_whatever_the_length():
    """In fp32, where a CPU's matmuls make no copies of their operands."""
    chunk = 8 * 4001 * 4
    held: dict[str, list[float]] = {"fused": [], "forward_chunked": []}
    for length in (16, 64):
        case = wide_case(width=8, length=length, dtype=jnp.float32)
        for name, sizes in held.items():
            trained = jax.grad(loss_of(case, name, chunk=8), (0, 1))
            sizes.append(temporaries(trained, case.hidden, case.head.weight) / chunk)
    assert max(held["fused"]) < 2.1
    assert held["forward_chunked"][1] > 8  # every chunk's


def test_frozen_hidden_states_cost_no_gradient_either():
    """Only the head is trained: two matmuls, and hidden is left alone."""
    case = on_device(make_case(25), jnp.bfloat16)
    value = loss_of(case)
    inputs = (case.hidden, case.head.weight)
    assert matmuls(jax.grad(value, 1), *inputs) == 2
    assert matmuls(jax.grad(value, (0, 1)), *inputs) == 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_no_gradient_is_asked_for_only_the_forward_runs(implementation):
    case = on_device(make_case(25), jnp.bfloat16)
    execution = chunks_of(4, case, implementation)
    assert matmuls(lambda *case: loss(*case, execution=execution), *case) == 1


def test_part_of_a_head_is_trained():
    """Rows below 30 frozen: the others get what they would have got, these nothing."""
    case = on_device(make_case(27))

    def gradient(name, first):
        value = loss_of(case, name)

        def partly(weight):
            rows = jnp.arange(weight.shape[0])[:, None] < first
            return value(case.hidden, jnp.where(rows, jax.lax.stop_gradient(weight), weight))

        return np.asarray(
            jax.jit(jax.grad(partly), compiler_options=QUICK_COMPILE)(case.head.weight)
        )

    whole, part = gradient("dense", 0), gradient("fused", 30)
    assert not part[:30].any()
    assert relative_error(part[30:], whole[30:]) < 2 * RTOL


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tied_embeddings_and_low_rank_heads_train(dtype):
    """A head that hidden depends on, a head of base + A·B with only A trained, inside a scan."""
    case = on_device(make_case(26), dtype)
    low = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), dtype)

    def gradients(implementation):
        value = loss_of(case, implementation)

        def total(embedding, left):
            def micro(total, _):
                ids = case.batch.labels.reshape(-1)
                hidden = jnp.take(embedding, ids, axis=0).reshape(2, 13, 8)
                tied = value(hidden, embedding)
                return total + tied + value(case.hidden, case.head.weight + left @ low), None

            return jax.lax.scan(micro, jnp.float32(0), None, length=2)[0]

        function = jax.jit(jax.grad(total, (0, 1)), compiler_options=QUICK_COMPILE)
        return function(case.head.weight, jnp.full((67, 3), 0.1, dtype))

    for wanted, got in zip(gradients("dense"), gradients("fused"), strict=True):
        assert got.dtype == dtype
        error = relative_error(np.asarray(got, np.float64), np.asarray(wanted, np.float64))
        # Both have their own rounding; in bf16 of dlogits, the result and sums over micro-batches.
        assert error < (2 * RTOL if dtype == jnp.float32 else rounding_by_norm("bfloat16", 2 * 4))


def test_an_fp32_head_beside_bf16_hidden_states_keeps_an_fp32_gradient():
    """fp32 parameters under bf16 compute: d_weight is not rounded to bf16 on its way."""
    case = taught_by_itself(20.0, noise=0.05)
    hidden, weight = on_device(case, jnp.bfloat16).hidden, jnp.asarray(case.head.weight)
    for name in ("fused_chunked", "fused"):
        value = loss_of(case, name, chunk=16)
        gradient = jax.jit(jax.grad(value, 1), compiler_options=QUICK_COMPILE)(hidden, weight)
        assert gradient.dtype == jnp.float32
        rounded = np.asarray(gradient).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.any(rounded != np.asarray(gradient))


def test_dividing_by_the_count_costs_no_further_digit():
    """loss/count: one more rounding of d_hidden to bf16 would make √(3/2) of the error, which is
    that of two: of dlogits and of the result."""
    case = taught_by_itself(20.0, noise=0.01, length=256)
    _, wanted = float64_loss(*case)
    value = loss_of(case, chunk=8)
    bf16 = on_device(case, jnp.bfloat16)
    errors = {}
    for count in (1.0, 37.0):
        gradient = jax.jit(
            jax.grad(lambda hidden, count=count: value(hidden, bf16.head.weight) / count),
            compiler_options=QUICK_COMPILE,
        )(bf16.hidden)
        errors[count] = relative_error(count * np.asarray(gradient, np.float64), wanted["hidden"])
    assert errors[37.0] < (2.5 / 2) ** 0.5 * errors[1.0]


def test_a_bias_is_trained_beside_a_frozen_weight():
    case = on_device(make_case(34, bias=True))

    def value(bias, head):
        execution = chunks_of(4, case)
        return loss(case.hidden, replace(head, bias=bias), case.batch, execution=execution).loss

    gradient = jax.jit(jax.grad(value), compiler_options=QUICK_COMPILE)
    got = np.asarray(gradient(case.head.bias, case.head), np.float64)
    exact = make_case(34, bias=True)
    assert relative_error(got, float64_loss(*exact)[1]["bias"]) < logit_error(exact)
    assert matmuls(jax.grad(value), case.head.bias, case.head) == 1
