"""Tokens that do not count: they change nothing, and where it is asked for they cost nothing."""

from functools import partial

import jax
import numpy as np
import pytest

from jax_distill.losses import IMPLEMENTATIONS, chunked, fused_loop, kl_and_grads
from jax_distill.losses.agreement_test import (
    EVERY,
    FAST_COMPILE,
    arrays,
    assert_agrees,
    relative_error,
    run,
)
from jax_distill.losses.float64_test import Batch, float64_loss, make_batch


@pytest.mark.parametrize("valid_first", [False, True])
@pytest.mark.parametrize("implementation", EVERY)
def test_what_stands_in_masked_cells_never_matters(implementation, valid_first):
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
        field[0] = getattr(batch, name)[0]  # beside NaN the ids may also look right
        wild[name] = field
    assert hole[0].any() and hole[1].any()
    knobs = {"ce_weight": 0.5, "z_loss_weight": 0.1}
    got = run(implementation, batch.replace(**wild), **knobs, valid_first=valid_first)
    assert_agrees(got, float64_loss(batch, **knobs))
    assert not got[1]["hidden"][hole].any()
    usual = run(implementation, batch, **knobs, valid_first=valid_first)
    assert got[0] == usual[0]  # what is masked adds exactly nothing
    for name, gradient in usual[1].items():
        np.testing.assert_array_equal(got[1][name], gradient)


@pytest.mark.parametrize("implementation", EVERY)
def test_padding_to_another_length_changes_nothing(implementation):
    """Case 12: T = 32 and 64."""
    batch = make_batch(14, shape=(2, 32, 8, 67, 5))

    def padded(x: np.ndarray | None) -> np.ndarray | None:
        if x is None or x.shape[:2] != (2, 32):
            return x
        return np.concatenate([x, np.zeros_like(x)], axis=1)

    longer = Batch(**{name: padded(getattr(batch, name)) for name in batch.__dict__})
    short, long = (run(implementation, x, chunk_size=16) for x in (batch, longer))
    assert short[0]["count"] == long[0]["count"]
    assert long[0]["loss"] == pytest.approx(short[0]["loss"], rel=1e-6)
    assert relative_error(long[1]["hidden"][:, :32], short[1]["hidden"]) < 1e-6
    assert relative_error(long[1]["lm_head"], short[1]["lm_head"]) < 1e-6


@pytest.mark.parametrize("implementation", EVERY)
def test_a_batch_with_no_valid_token_is_zero(implementation):
    batch = make_batch(15, shape=(1, 6, 8, 67, 5))
    batch = batch.replace(mask=np.zeros((1, 6), bool))
    sums, gradients = run(implementation, batch, ce_weight=1.0)
    assert set(sums.values()) == {0.0}
    assert not gradients["hidden"].any() and not gradients["lm_head"].any()


@pytest.mark.parametrize("implementation", EVERY)
def test_valid_positions_first_changes_no_number(implementation):
    batch = make_batch(27, shape=(2, 23, 8, 67, 5))
    mask = batch.mask.copy()
    mask[0, 3:19] = False  # rows of unlike length
    batch = batch.replace(mask=mask)
    assert_agrees(run(implementation, batch, valid_first=True), float64_loss(batch))


@pytest.mark.parametrize(
    ("implementation", "module", "name"),
    [
        ("forward_chunked", chunked, "project"),
        ("fused_chunked", chunked, "project"),
        ("fused", fused_loop, "fp32_product"),
        ("kl_and_grads", fused_loop, "fp32_product"),
    ],
)
def test_valid_positions_first_skips_the_empty_chunks(monkeypatch, implementation, module, name):
    """Of 24 positions in chunks of 4 the rows use 6 and 1: two chunks, not six, are projected."""
    turns = []
    product = getattr(module, name)

    def counted(*args):
        jax.debug.callback(lambda: turns.append(1))
        return product(*args)

    monkeypatch.setattr(module, name, counted)
    batch = make_batch(28, shape=(2, 24, 8, 67, 5), holes=False)
    mask = np.zeros((2, 24), bool)
    mask[0, 18:], mask[1, 3] = True, True
    data = arrays(batch.replace(mask=mask))
    function = {**IMPLEMENTATIONS, "kl_and_grads": kl_and_grads}[implementation]
    for valid_first, expected in ((False, 6), (True, 2)):
        turns.clear()
        call = partial(function, chunk_size=4, valid_first=valid_first)
        jax.block_until_ready(
            jax.jit(lambda call=call: call(**data), compiler_options=FAST_COMPILE)()
        )
        jax.effects_barrier()
        assert len(turns) == expected


def test_the_sums_of_micro_batches_are_those_of_the_batch():
    """One denominator: rows or positions apart add up, with uneven counts, value and gradient."""
    batch = make_batch(29, shape=(4, 12, 8, 67, 5))
    batch = batch.replace(mask=batch.mask & (np.arange(12) < np.array([[1], [12], [5], [0]])))
    whole, gradients = run("fused", batch)
    for axis in (0, 1):
        parts = [
            {
                name: np.split(x, 2, axis)[half] if x is not None and x.ndim > axis else x
                for name, x in batch.__dict__.items()
                if name != "lm_head"
            }
            for half in (0, 1)
        ]
        halves = [run("fused", batch.replace(**part)) for part in parts]
        for name in ("loss", "count", "cross_entropy"):
            total = sum(sums[name] for sums, _ in halves)
            assert total == pytest.approx(whole[name], rel=1e-6)
        d_hidden = np.concatenate([g["hidden"] for _, g in halves], axis)
        assert relative_error(d_hidden, gradients["hidden"]) < 1e-6
        d_lm_head = sum(g["lm_head"] for _, g in halves)
        assert relative_error(d_lm_head, gradients["lm_head"]) < 1e-6
