"""From logits to targets, against float64; and what the compiler makes of it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill import sharding
from jax_distill.batch import EncodedTopK
from jax_distill.targets import capture, topk_targets
from jax_distill.teacher_test import TEMPERATURES, VOCAB, definition, mesh, random_model


def targets(hidden, lm_head, **options) -> tuple[EncodedTopK, np.ndarray]:
    """`topk_targets`, compiled once instead of op by op."""
    options = {"temperatures": (1.0,), "chunk_size": 4} | options
    return jax.device_get(jax.jit(partial(topk_targets, **options))(hidden, lm_head))


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 13),
    padded=st.integers(2, 40),
    chunk_size=st.integers(1, 50),
    scale=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    data=st.data(),
)
def test_targets_equal_the_float64_definition(rows, length, padded, chunk_size, scale, data):
    vocab_size = data.draw(st.integers(1, padded))
    top_k = data.draw(st.integers(1, vocab_size))
    rng = np.random.default_rng(length)
    hidden = rng.normal(0, 1, (rows, length, 5)).astype(np.float32)
    lm_head = (scale * rng.normal(0, 1, (padded, 5))).astype(np.float32)
    lm_head[vocab_size:] *= 100  # padded ids would win if they took part
    found, finite = targets(
        hidden,
        lm_head,
        vocab_size=vocab_size,
        top_k=top_k,
        temperatures=TEMPERATURES,
        chunk_size=chunk_size,
    )
    assert finite.all() and found.gaps.dtype == np.float16
    # An fp32 logit is a sum of 5 terms, so off by 5·eps/2 of their sizes' sum at most.
    sizes = np.abs(hidden).astype(np.float64) @ np.abs(lm_head[:vocab_size]).T.astype(np.float64)
    off = 2.5 * float(np.finfo(np.float32).eps) * sizes.max()
    z = (hidden.astype(np.float64) @ lm_head.T.astype(np.float64))[..., :vocab_size]
    for which, temperature in enumerate(TEMPERATURES):
        ids, gaps, log_z, log_tail = definition(
            hidden, lm_head, vocab_size=vocab_size, top_k=top_k, temperature=temperature
        )
        if scale == 0.0:  # equal logits: by id
            np.testing.assert_array_equal(found.indices, ids)
        # Logits that are nearer to each other than that may be taken in another order.
        assert (np.diff(np.sort(found.indices), axis=-1) > 0).all()
        taken, wanted = (np.take_along_axis(z, i, -1) for i in (found.indices, ids))
        np.testing.assert_allclose(taken, wanted, rtol=0, atol=2 * off)
        np.testing.assert_allclose(found.gaps, gaps, rtol=2e-3, atol=1e-4 + 2 * off)
        # Two logits' errors, which 1/τ multiplies, and a few roundings of the sums.
        error = 3e-6 + 4 * off / temperature
        np.testing.assert_allclose(found.log_z[..., which], log_z, rtol=1e-5, atol=error)
        got = np.asarray(found.log_tail)[..., which]
        np.testing.assert_allclose(got, log_tail, rtol=1e-5, atol=error)


def test_equal_logits_are_ordered_by_id():
    z = np.array([3, 1, 3, 0, 3, 1, 1, 0], np.float32)
    found, finite = targets(
        jnp.ones((1, 1, 1)),
        z[:, None],
        vocab_size=8,
        top_k=5,
    )
    assert found.indices[0, 0].tolist() == [0, 2, 4, 1, 5]


@pytest.mark.parametrize("gap", [14.0, 20.7, 60.0, 200.0])
def test_a_tail_that_one_minus_the_sum_would_lose_is_kept(gap):
    """Case 21, the teacher's part: p_t down to e^-200, where 1 - Σ p_k is 0 in fp32."""
    z = np.array([80.0, 80.0 - gap, 80.0 - gap - 1], np.float32)
    found, finite = targets(
        jnp.ones((1, 1, 1)),
        z[:, None],
        vocab_size=3,
        top_k=1,
    )
    exact = np.logaddexp(-gap, -gap - 1) - np.log1p(np.exp(-gap) + np.exp(-gap - 1))
    np.testing.assert_allclose(found.log_tail[0, 0, 0], exact, rtol=2e-7)


def test_a_flat_teacher_keeps_the_exact_mass_of_its_k():
    """Where the K hold 1e-4 of the mass, log(1 - p_t) must be right, not only log p_t."""
    found, finite = targets(
        jnp.ones((1, 1, 1)),
        jnp.zeros((50_000, 1)),
        vocab_size=50_000,
        top_k=5,
    )
    inside = -np.expm1(np.float64(found.log_tail[0, 0, 0]))
    np.testing.assert_allclose(inside, 1e-4, rtol=1e-5)


def test_a_gap_beyond_float16_is_the_largest_that_float16_has():
    found, finite = targets(jnp.ones((1, 1, 1)), jnp.array([[0.0], [-1e5]]), vocab_size=2, top_k=2)
    assert found.gaps[0, 0].tolist() == [0.0, 65504.0] and finite.all()


def test_logits_that_are_not_finite_are_seen():
    for bad in (np.nan, np.inf, -np.inf):
        lm_head = np.ones((6, 1), np.float32)
        hidden = np.ones((1, 3, 1), np.float32)
        hidden[0, 1] = bad
        found, finite = targets(
            hidden,
            lm_head,
            vocab_size=6,
            top_k=2,
            chunk_size=2,
        )
        assert finite[0].tolist() == [True, False, True]


def test_memory_is_bounded_by_the_chunk_not_by_the_row():
    """Case 37: V = 152k, T = 8192 is planned, not run; a whole row's logits would be 4.7 GiB."""
    length, vocab, width, chunk = 8192, 152_000, 64, 256
    shapes = (
        jax.ShapeDtypeStruct((1, length, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocab, width), jnp.bfloat16),
    )
    options = dict(vocab_size=vocab - 100, top_k=100, temperatures=(1.0, 2.0), chunk_size=chunk)
    program = jax.jit(lambda h, w: topk_targets(h, w, **options)).lower(*shapes).compile()
    planned = program.memory_analysis().temp_size_in_bytes
    one_chunk = chunk * vocab * 4
    assert planned < 4 * one_chunk < length * vocab * 4 / 4


def test_rows_split_over_devices_travel_nowhere():
    """Each device finds the top K of its own rows; a gather would make every logit everywhere."""
    batch = {name: np.ones((8, 12), np.int32) for name in ("tokens", "segment_ids", "positions")}
    program = capture.lower(
        random_model(),
        sharding.shard_rows(mesh(), batch),
        mesh=mesh(),
        vocab_size=VOCAB,
        top_k=10,
        temperatures=(1.0,),
        chunk_size=16,
    ).compile()
    assert not re.search(r"= [^=]*(all-gather|all-reduce|all-to-all)\(", program.as_text())
