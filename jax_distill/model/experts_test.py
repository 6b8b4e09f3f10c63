"""Experts against their definition in float64: every expert on every token, weighted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill import sharding
from jax_distill.base.errors import UserError
from jax_distill.model import experts as experts_module
from jax_distill.model.experts import (
    BLOCK,
    ExpertWeights,
    Gate,
    RouterLoad,
    _each_block,
    _sorted_pairs,
    mix_experts,
    route,
)
from jax_distill.model.grouped_experts import ROWS, WIDTH, grouped_mix
from jax_distill.model.mxfp4 import Packed, packed_shapes

N, D, E, K, F = 37, 6, 5, 2, 4
GATE = Gate(1.702, 1.5)  # low enough to be reached
WIDE = np.float64


def definition(x, experts, weights, parameters):
    """out_n = Σ_k w_nk · (((up + 1) · gate · σ(1.702 · gate)) · down + bias) of expert e_nk."""
    gate_up = jnp.einsum("nd,edf->nef", x, parameters.gate_up) + parameters.gate_up_bias[None]
    gate, up = jnp.minimum(gate_up[..., ::2], 1.5), jnp.clip(gate_up[..., 1::2], -1.5, 1.5)
    inner = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
    y = jnp.einsum("nef,efd->ned", inner, parameters.down) + parameters.down_bias[None]
    chosen = jnp.take_along_axis(y, experts[:, :, None], axis=1)
    return jnp.sum(chosen * weights[:, :, None], axis=1)


def inputs(dtype, seed=0):
    """No token goes to expert 3, most to expert 0."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(N, E)) + np.array([3.0, 0, 0, -99, 0])
    experts = np.argsort(-scores, axis=1)[:, :K].astype(np.int32)
    shapes = [(N, D), (N, K), (E, D, 2 * F), (E, 2 * F), (E, F, D), (E, D)]
    x, weights, *parameters = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return x, jnp.asarray(experts), weights, ExpertWeights(*parameters)


@pytest.mark.parametrize("block", [8, 16, 512, None])
def test_values_and_gradients_are_the_definitions(block):
    """Blocks that end inside an expert's rows, one block for all, an expert without a row."""
    with jax.enable_x64(True):
        x, experts, weights, parameters = inputs(WIDE)
        d_out = jnp.asarray(np.random.default_rng(1).normal(size=(N, D)))

        def of(function, **options):
            def total(x, weights, parameters):
                return jnp.sum(function(x, experts, weights, parameters, **options) * d_out)

            program = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
            return program(x, weights, parameters)

        ours, theirs = of(mix_experts, gate=GATE, block=block), of(definition)
        for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13 * np.abs(expected).max())
        assert not np.any(ours[1][2].gate_up[3]) and np.any(ours[1][2].gate_up[4])


@pytest.mark.parametrize("rows", [1, 200])  # fewer than the kernel takes, and more
def test_grouped_matmuls_around_the_kernel_are_the_definition(rows, monkeypatch):
    """XLA's own ragged_dot in the kernel's place, which has its meaning; in float64, on one device
    and on two inside shard_map."""
    monkeypatch.setattr(experts_module, "grouped_mix", partial(grouped_mix, ragged_dot=xla_dot))
    with jax.enable_x64(True):
        x, experts, weights, parameters = inputs(WIDE)
        x, weights = (jnp.tile(a, (rows, 1))[: 2 * rows] for a in (x, weights))
        experts = jnp.tile(experts, (rows, 1))[: 2 * rows]
        d_out = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

        def of(function, **options):
            def total(x, weights, parameters):
                return jnp.sum(function(x, experts, weights, parameters, **options) * d_out)

            return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(x, weights, parameters)

        theirs = of(definition)
        mesh = sharding.make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
        for row_sharding in (None, sharding.batch_sharding(mesh)):
            ours = of(mix_experts, gate=GATE, implementation="hopper", row_sharding=row_sharding)
            for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                limit = 1e-13 * max(rows, 1) * np.abs(expected).max()
                np.testing.assert_allclose(got, expected, rtol=0, atol=limit)


def xla_dot(rows, weights, sizes):
    """As the kernel would take them."""
    assert rows.shape[0] >= ROWS and rows.shape[1] % WIDTH == weights.shape[2] % WIDTH == 0
    assert rows.shape[1] == weights.shape[1] and sizes.dtype == jnp.int32
    return jax.lax.ragged_dot(rows, weights, sizes, preferred_element_type=rows.dtype)


def test_packed_matrices_run_in_blocks_under_hopper_too():
    """A packed teacher beside a student whose experts run through the kernels."""
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((N, 32), (N, K)))
    experts = jnp.asarray(np.argsort(rng.random((N, E)))[:, :K], jnp.int32)

    def packed(rows, columns):
        blocks, scales = packed_shapes(rows, columns)
        codes = jnp.asarray(rng.integers(0, 256, (E, *blocks)), jnp.uint8)
        return Packed(codes, jnp.full((E, *scales), 125, jnp.uint8))

    biases = jnp.ones((E, 64)), jnp.ones((E, 32))
    parameters = ExpertWeights(packed(32, 64), biases[0], packed(32, 32), biases[1])
    blocks, hopper = (
        mix_experts(x, experts, weights, parameters, gate=GATE, implementation=name)
        for name in ("blocks", "hopper")
    )
    assert np.array_equal(blocks, hopper)


def test_the_kernels_are_refused_in_one_line_where_they_cannot_run():
    x, experts, weights, parameters = inputs(np.float32)
    with pytest.raises(UserError, match="for train.experts hopper, got .* --train.experts blocks$"):
        mix_experts(x, experts, weights, parameters, gate=GATE, implementation="hopper")


def test_fp32_and_bf16_round_as_their_matmuls_do():
    exact = definition(*inputs(np.float32))
    got = mix_experts(*inputs(np.float32), gate=GATE)
    np.testing.assert_allclose(got, exact, atol=1e-5 * np.abs(exact).max())
    x, experts, weights, parameters = inputs(np.float32)
    rounded = mix_experts(x.astype(jnp.bfloat16), experts, weights, parameters, gate=GATE)
    assert rounded.dtype == jnp.bfloat16
    error = np.abs(np.asarray(rounded, np.float32) - exact).max()
    # x, both weight matrices, what lies between them, the result: five roundings of 2^-9 each, of
    # sums of at most 2F terms whose parts may cancel.
    assert error < 5 * 2.0**-9 * 2 * F * np.abs(exact).max()


def test_rows_of_experts_do_only_their_own_work():
    """The turns that the loops take at 32K tokens × top-4 of 32: each ends in one block that is not
    full at most, so that they do 1.125 of the rows' work at most; and they do all of it."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((32768, 32)), axis=1)[:, :4].astype(np.int32)
    _, begins, ends = _sorted_pairs(jnp.asarray(experts), 32, BLOCK)
    assert int(begins[0]) == 0 and int(ends[-1]) == experts.size
    turns = 0
    for begin, end in zip(begins, ends, strict=True):
        turns = _each_block(begin, end, BLOCK, lambda first, count: count + 1, turns)
    assert experts.size <= int(turns) * BLOCK <= 1.125 * experts.size


def test_the_router_is_a_softmax_over_the_largest_and_counts_real_tokens():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(N, E)).astype(np.float32)
    real = np.arange(N) % 3 > 0
    experts, weights, load = route(jnp.asarray(logits), jnp.asarray(real), top_k=K)
    order = np.argsort(-logits, axis=1)[:, :K]
    assert np.array_equal(experts, order)
    largest = np.exp(np.take_along_axis(logits, order, axis=1).astype(WIDE))
    np.testing.assert_allclose(weights, largest / largest.sum(1, keepdims=True), rtol=1e-6)
    assert np.array_equal(load.assigned, np.bincount(order[real].reshape(-1), minlength=E))
    everywhere = np.exp(logits.astype(WIDE)) / np.exp(logits.astype(WIDE)).sum(1, keepdims=True)
    np.testing.assert_allclose(load.probability, everywhere[real].sum(0), rtol=1e-5)


def test_the_balance_is_one_where_all_get_the_same_and_its_formula_elsewhere():
    even = RouterLoad(jnp.full((3, E), 8.0), jnp.full((3, E), 4.0))
    assert even.balance() == pytest.approx(1.0)
    assigned, probability = (np.random.default_rng(0).random((2, E)) * 9 for _ in range(2))
    load = RouterLoad(jnp.asarray(assigned, jnp.float32), jnp.asarray(probability, jnp.float32))
    share, mean = (x / x.sum(1, keepdims=True) for x in (assigned, probability))
    assert load.balance() == pytest.approx(np.mean(E * (share * mean).sum(1)), rel=1e-6)
    assert RouterLoad(jnp.zeros((1, E)), jnp.zeros((1, E))).balance() == 0
