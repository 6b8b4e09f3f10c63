"""Blockwise attention against the definition in float64: values and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.attention import Mask
from jax_distill.attention.blockwise import _first_block, _last_block, blockwise_attention


def blockwise(query, key, value, segment_ids, *, window=None, **options):
    return blockwise_attention(query, key, value, Mask(segment_ids, window), **options)


def definition(query, key, value, segment_ids, *, window=None, sinks=None):
    """Dense softmax attention in float64, one line a line of the formula."""
    batch, length, heads, width = query.shape
    ratio = heads // key.shape[2]
    key, value = (jnp.repeat(x, ratio, axis=2) for x in (key, value))
    logits = jnp.einsum("bthq,bshq->bhts", query, key) / np.sqrt(width)
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (window or length))
    seen = seen[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (batch, heads, length, 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, column], axis=-1))[..., :-1]
    else:
        weights = jax.nn.softmax(logits)
    return jnp.einsum("bhts,bshq->bthq", weights, value)


def inputs(length, heads, groups, dtype, seed=0):
    rng = np.random.default_rng(seed)
    rows, width = 2, 8
    shapes = [(rows, length, heads, width), *[(rows, length, groups, width)] * 2]
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    borders = np.sort(rng.integers(0, length, (rows, 3)), axis=1)
    segments = (np.arange(length)[None, :, None] >= borders[:, None, :]).sum(-1) + 1
    segments[1, length - length // 5 :] = 0  # padding
    sinks = jnp.asarray(rng.normal(size=heads), dtype)
    weights = jnp.asarray(rng.normal(size=shapes[0]), dtype)
    return arrays, jnp.asarray(segments, jnp.int32), sinks, weights


CASES = [
    # length, block, window, with sinks, heads, groups
    (32, 8, None, False, 4, 2),
    (37, 8, None, True, 4, 4),
    (37, 8, 5, True, 6, 2),
    (40, 8, 8, False, 4, 1),
    (40, 16, 1, True, 4, 2),
    (23, 64, 9, True, 2, 1),
    (48, 8, 21, False, 4, 2),
]


@pytest.mark.parametrize("length,block,window,with_sinks,heads,groups", CASES)
def test_values_and_gradients_are_the_definitions(length, block, window, with_sinks, heads, groups):
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        arrays, segments, sinks, weights = inputs(length, heads, groups, jnp.float64)

        def total(function, *arrays, **options):
            query, key, value, *sinks = arrays
            sink = sinks[0] if with_sinks else None
            out = function(query, key, value, segments, window=window, sinks=sink, **options)
            return jnp.sum(out * weights), out

        every = (0, 1, 2, 3) if with_sinks else (0, 1, 2)
        grad = jax.value_and_grad(total, argnums=tuple(i + 1 for i in every), has_aux=True)
        (_, out), got = jax.jit(grad, static_argnums=0, static_argnames="block")(
            blockwise, *arrays, sinks, block=block
        )
        (_, right), wanted = grad(definition, *arrays, sinks)
        # float64 sums of at most `length` terms of order 1 in another order.
        close = {"rtol": 0, "atol": 64 * length * np.finfo(np.float64).eps}
        np.testing.assert_allclose(out, right, **close)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, **close)


def test_bf16_inputs_accumulate_in_fp32():
    arrays, segments, sinks, _ = inputs(256, 4, 2, jnp.bfloat16)
    got = blockwise(*arrays, segments, window=100, sinks=sinks, block=32)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        exact = [x.astype(jnp.float64) for x in arrays]
        right = np.asarray(
            definition(*exact, segments, window=100, sinks=sinks.astype(jnp.float64))
        )
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right)
    # Two roundings to bf16 of relative error 2^-9 each: the weights', the output's.
    assert error < 2 * 2.0**-9


def test_a_change_in_one_document_does_not_reach_another():
    arrays, segments, sinks, _ = inputs(64, 4, 2, jnp.float32)
    before = blockwise(*arrays, segments, sinks=sinks, block=16)
    first = np.asarray(segments) == 1
    changed = [jnp.where(first[:, :, None, None], x + 1, x) for x in arrays]
    after = blockwise(*changed, segments, sinks=sinks, block=16)
    np.testing.assert_array_equal(np.asarray(before)[~first], np.asarray(after)[~first])
    assert np.abs(np.asarray(before - after)[first]).max() > 0.1


def test_memory_is_linear_in_the_length():
    """Temporaries of forward and backward, from XLA's own buffer assignment."""

    def temporaries(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def total(query, key, value, segments):
            return jnp.sum(blockwise(query, key, value, segments, block=128))

        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x, segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(4096)
    assert long < 4.5 * short
    assert long < 2 * 4096 * 4096 * 4 / 4  # a quarter of dense attention's [H,T,T]


def test_blocks_out_of_the_window_are_not_visited():
    """The loops' bounds: with a window of one block each query block meets at most two."""

    for index in range(6):
        first = int(_first_block(jnp.int32(index), 8, 8))
        assert first == max(index - 1, 0)
        assert int(_last_block(jnp.int32(index), 8, 6, 8)) == min(index + 1, 5)
        assert int(_first_block(jnp.int32(index), 8, 1)) == index
        assert int(_last_block(jnp.int32(index), 8, 6, 1)) == index
        assert int(_first_block(jnp.int32(index), 8, None)) == 0
