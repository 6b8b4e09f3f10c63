"""From logits to targets, against float64; and what the compiler makes of it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill import sharding, teacher
from jax_distill.teacher_test import TEMPERATURES, VOCAB, definition, mesh, random_model


def targets(hidden, lm_head, **knobs) -> dict[str, np.ndarray]:
    """`topk_targets`, compiled once instead of op by op."""
    knobs = {"temperatures": (1.0,), "chunk_size": 4} | knobs
    found = jax.jit(partial(teacher.topk_targets, **knobs))(hidden, lm_head)
    return {name: np.asarray(each) for name, each in found.items()}


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 13),
    columns=st.integers(2, 40),
    chunk_size=st.integers(1, 50),
    scale=st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    data=st.data(),
)
def test_targets_equal_the_float64_definition(rows, length, columns, chunk_size, scale, data):
    vocab_size = data.draw(st.integers(1, columns))
    top_k = data.draw(st.integers(1, vocab_size))
    rng = np.random.default_rng(length)
    hidden = rng.normal(0, 1, (rows, length, 5)).astype(np.float32)
    lm_head = (scale * rng.normal(0, 1, (columns, 5))).astype(np.float32)
    lm_head[vocab_size:] *= 100  # padding columns would win if they took part
    found = targets(
        hidden,
        lm_head,
        vocab_size=vocab_size,
        top_k=top_k,
        temperatures=TEMPERATURES,
        chunk_size=chunk_size,
    )
    assert found["finite"].all() and found["gaps"].dtype == np.float16
    for place, temperature in enumerate(TEMPERATURES):
        ids, gaps, log_z, log_tail = definition(
            hidden, lm_head, vocab_size=vocab_size, top_k=top_k, temperature=temperature
        )
        np.testing.assert_array_equal(found["indices"], ids)
        np.testing.assert_allclose(found["gaps"], gaps, rtol=2e-3, atol=1e-4)
        # fp32 logits up to |z| carry an error of |z|·1e-7, and 1/τ multiplies it.
        error = 3e-6 * (1 + 5 * scale) / temperature
        np.testing.assert_allclose(found["log_z"][..., place], log_z, rtol=1e-5, atol=error)
        got = np.asarray(found["log_tail"])[..., place]
        np.testing.assert_allclose(got, log_tail, rtol=1e-5, atol=error)


def test_equal_logits_are_ordered_by_id():
    z = np.array([3, 1, 3, 0, 3, 1, 1, 0], np.float32)
    found = targets(
        jnp.ones((1, 1, 1)),
        z[:, None],
        vocab_size=8,
        top_k=5,
    )
    assert found["indices"][0, 0].tolist() == [0, 2, 4, 1, 5]


@pytest.mark.parametrize("gap", [14.0, 20.7, 60.0, 200.0])
def test_a_tail_that_one_minus_the_sum_would_lose_is_kept(gap):
    """Case 21, the teacher's part: p_t down to e^-200, where 1 - Σ p_k is 0 in fp32."""
    z = np.array([80.0, 80.0 - gap, 80.0 - gap - 1], np.float32)
    found = targets(
        jnp.ones((1, 1, 1)),
        z[:, None],
        vocab_size=3,
        top_k=1,
    )
    exact = np.logaddexp(-gap, -gap - 1) - np.log1p(np.exp(-gap) + np.exp(-gap - 1))
    np.testing.assert_allclose(found["log_tail"][0, 0, 0], exact, rtol=2e-7)


def test_a_flat_teacher_keeps_the_exact_mass_of_its_k():
    """Where the K hold 1e-4 of the mass, log(1 - p_t) must be right, not only log p_t."""
    found = targets(
        jnp.ones((1, 1, 1)),
        jnp.zeros((50_000, 1)),
        vocab_size=50_000,
        top_k=5,
    )
    inside = -np.expm1(np.float64(found["log_tail"][0, 0, 0]))
    np.testing.assert_allclose(inside, 1e-4, rtol=1e-5)


def test_logits_that_are_not_finite_are_seen():
    for bad in (np.nan, np.inf, -np.inf):
        lm_head = np.ones((6, 1), np.float32)
        hidden = np.ones((1, 3, 1), np.float32)
        hidden[0, 1] = bad
        found = targets(
            hidden,
            lm_head,
            vocab_size=6,
            top_k=2,
            chunk_size=2,
        )
        assert found["finite"][0].tolist() == [True, False, True]


def test_memory_is_bounded_by_the_chunk_not_by_the_row():
    """Case 37: V = 152k, T = 8192 is planned, not run; a whole row's logits would be 4.7 GiB."""
    length, vocab, width, chunk = 8192, 152_000, 64, 256
    shapes = (
        jax.ShapeDtypeStruct((1, length, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocab, width), jnp.bfloat16),
    )
    knobs = dict(vocab_size=vocab - 100, top_k=100, temperatures=(1.0, 2.0), chunk_size=chunk)
    program = jax.jit(lambda h, w: teacher.topk_targets(h, w, **knobs)).lower(*shapes).compile()
    planned = program.memory_analysis().temp_size_in_bytes
    one_chunk = chunk * vocab * 4
    assert planned < 4 * one_chunk < length * vocab * 4 / 4


def test_rows_split_over_devices_travel_nowhere():
    """Each device finds the top K of its own rows; a gather would make every logit everywhere."""
    batch = {name: np.ones((8, 12), np.int32) for name in ("tokens", "segment_ids", "positions")}
    program = teacher.capture.lower(
        random_model(),
        sharding.place_batch(mesh(), batch),
        mesh=mesh(),
        vocab_size=VOCAB,
        top_k=10,
        temperatures=(1.0,),
        chunk_size=16,
    ).compile()
    assert not re.search(r"= [^=]*(all-gather|all-reduce|all-to-all)\(", program.as_text())
