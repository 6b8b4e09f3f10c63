"""Proves that a failing rung can be read: it names the rung, the tensor, the largest and the mean
difference, the index and both values there; and that it fails at all."""

import re

import numpy as np
import pytest
import torch
from ladder import (
    TIGHT,
    Drift,
    assert_as_near,
    assert_close,
    assert_drift,
    assert_numbers,
    assert_rare,
    assert_same,
    assert_same_targets,
)

from jax_distill.batch import Batch, TopK


def planted(at: tuple[int, ...], by: float) -> tuple[np.ndarray, np.ndarray]:
    theirs = np.linspace(-2.0, 2.0, 24, dtype=np.float32).reshape(2, 3, 4)
    ours = theirs.copy()
    ours[at] += by
    return ours, theirs


def message_of(check, *arguments, **options) -> str:
    with pytest.raises(AssertionError) as failure:
        check(*arguments, **options)
    return str(failure.value).split("\nassert ")[0]


def test_a_failure_says_rung_tensor_largest_and_mean_difference_and_where():
    said = message_of(
        assert_close, "gradients, tied", "model.norm.weight", *planted((1, 2, 0), 0.048), 1e-5
    )
    expected = (
        "gradients, tied: model.norm.weight differs by 0.048 at (1, 2, 0) (ours 1.5262609, "
        "theirs 1.4782609), 0.002 on average; allowed 2e-05 (1e-05 of 2)"
    )
    assert said == expected


def test_a_failure_on_average_alone_is_one():
    ours, theirs = planted((0, 0, 0), 0.0)
    said = message_of(assert_close, "steps", "w", ours + 0.01, theirs, 0.02, unit=1.0, mean=1e-3)
    assert "0.01 on average; allowed 0.02 (0.02 of 1) and 0.001 on average" in said
    assert_close("steps", "w", ours + 0.01, theirs, 0.02, unit=1.0, mean=0.011)


def test_each_entry_may_have_a_unit_of_its_own():
    ours, theirs = planted((1, 2, 0), 0.5)
    ours[0, 0, 0] += 0.01
    units = np.full(theirs.shape, 1e-3)
    units[1, 2, 0] = 1.0
    said = message_of(assert_close, "steps", "w", ours, theirs, 1.0, unit=units)
    assert "w differs by 0.01 at (0, 0, 0)" in said and "allowed 0.001 (1 of 0.001)" in said
    units[0, 0, 0] = 0.02
    assert_close("steps", "w", ours, theirs, 1.0, unit=units)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_fails_where_theirs_is(bad):
    ours, theirs = planted((0, 1, 3), bad)
    assert "differs by inf at (0, 1, 3)" in message_of(
        assert_close, "logits", "z", ours, theirs, 1e9
    )
    assert "differs by inf" in message_of(
        assert_close, "logits", "z", theirs, np.full_like(theirs, np.nan), 1.0
    )


def test_what_is_within_passes_and_shapes_must_match():
    ours, theirs = planted((1, 0, 0), 1.9e-5)
    assert_close("logits", "z", ours, torch.tensor(theirs), 1e-5)
    message_of(assert_close, "logits", "z", ours, theirs, 9e-6)
    infinite = np.array([1.0, np.inf, -np.inf])
    assert_close("loss", "log_q", infinite, infinite)
    message_of(assert_close, "loss", "log_q", infinite, -infinite, 1e9)
    assert "(2, 3, 4) against (3, 4)" in message_of(assert_close, "logits", "z", ours, theirs[0])


def test_numbers_are_named_and_each_has_its_own_scale():
    theirs = {"loss": 3.0, "gradient_norm": 200.0}
    assert_numbers(
        "step 7", {"loss": 3.0, "gradient_norm": 200.001}, theirs, 1e-6, gradient_norm=1e-5
    )
    with pytest.raises(AssertionError, match=re.escape("step 7: loss differs by 1e-05 at ()")):
        assert_numbers("step 7", {"loss": 3.00001, "gradient_norm": 200.0}, theirs, 1e-6)
    with pytest.raises(AssertionError, match="step 7: .'loss'. against"):
        assert_numbers("step 7", {"loss": 3.0}, theirs, 1.0)


@pytest.mark.parametrize("name", ["loss", "kl", "val_cross_entropy"])
def test_means_of_a_run_keep_one_part_in_a_million_and_a_norm_ten(name):
    numbers = {name: 3.0, "gradient_norm": 2.0}
    assert_numbers("run", {name: 3.0, "gradient_norm": 2.00001}, numbers, 1e-5, **TIGHT)
    with pytest.raises(AssertionError, match=f"run: {name} differs by 1e-05"):
        assert_numbers("run", {name: 3.00001, "gradient_norm": 2.0}, numbers, 1e-5, **TIGHT)


def test_what_must_be_equal_is_named_where_it_first_is_not():
    ours = np.array([[3, 4, 5], [6, 7, 8]], np.int32)
    theirs = ours + np.array([[0, 0, 0], [0, 1, 1]], np.int32)
    said = message_of(assert_same, "teacher", "ids", ours, torch.tensor(theirs))
    assert said == ("teacher: ids differs in 2 of 6 entries, first at (1, 1) (ours 7, theirs 8)")
    free = np.zeros(ours.shape, bool)
    free[1, 1] = True
    assert "in 1 of 6 entries, first at (1, 2)" in message_of(
        assert_same, "teacher", "ids", ours, theirs, free=free
    )
    free[1, 2] = True
    assert_same("teacher", "ids", ours, theirs, free=free)
    assert_rare("teacher", "a step", free, 0.34)
    said = message_of(assert_rare, "teacher", "a step", free, 0.3)
    assert said == "teacher: a step in 2 of 6 entries, first at (1, 1); allowed 0.3 of them"


def test_the_nearer_of_two_that_round_passes_and_the_other_says_where():
    ours, exact = planted((1, 2, 0), 0.048)
    theirs = exact + np.float32(0.01)  # Euclidean: 0.049
    assert_as_near("logits", "bf16", ours, theirs, exact, factor=1.0)
    said = message_of(assert_as_near, "logits", "bf16", ours, theirs, exact, factor=0.5)
    assert said.startswith("logits: bf16 is off by 0.048 (theirs by 0.049), 0.0245 allowed; most")
    assert "most at (1, 2, 0), by 0.048 (ours 1.5262609, theirs 1.488" in said
    assert_as_near("logits", "bf16", ours, theirs, exact, factor=0.5, rounding=0.01)


def batch() -> Batch:
    """Two rows of three positions and four ids, the last position padding."""
    log_p = np.log(np.tile(np.float32([0.4, 0.2, 0.2, 0.1]), (2, 3, 1)))
    whole = np.ones((2, 3), np.int32)
    targets = TopK(
        indices=np.tile(np.arange(4, dtype=np.int32), (2, 3, 1)),
        logprobs=log_p,
        log_tail=np.full((2, 3), np.log(np.float32(0.1))),
        count=np.array([[4, 4, 0]] * 2, np.int32),
    )
    return Batch(whole, whole, targets, whole, whole, whole)


def test_targets_differ_by_an_id_a_probability_or_a_tail_and_by_nothing_less():
    def changed(name: str, at: tuple[int, ...], by: float) -> Batch:
        copy = batch().map(np.copy)
        getattr(copy.targets, name)[at] += by
        return copy

    assert_same_targets("cache", batch(), batch())
    assert_same_targets("cache", batch(), changed("indices", (0, 2, 1), 1))  # padding
    assert_same_targets("cache", batch(), changed("logprobs", (0, 0, 1), 5e-5))
    for name, at, by, word in (
        ("indices", (0, 1, 0), 1, "indices differs in 1 of 24"),
        ("indices", (0, 1, 2), 1, "other indices in 1 of 16"),  # a tie: once is rare
        ("logprobs", (1, 0, 3), 2e-3, "logprobs differs by 0.002"),
        ("logprobs", (1, 0, 3), 5e-4, "a float16 step in logprobs in 1 of 24"),
        ("log_tail", (1, 1), 2e-4, "log_tail differs by 0.0002"),
        ("count", (1, 1), 1, "count differs in 1 of 6"),
    ):
        said = message_of(assert_same_targets, "cache", changed(name, at, by), batch())
        assert said.startswith(f"cache: {word}"), said


def test_one_entry_of_a_small_tensor_may_move_by_noise_and_no_other():
    def drift_of(*noise: int) -> Drift:
        g = np.ones(32, np.float32)
        g[list(noise)] = 1e-6
        drift = Drift()
        drift.adamw(0.1 * g, 0.05 * g**2, np.ones(32), 1e-3, b1=0.9, b2=0.95)
        return drift

    theirs = np.ones(32, np.float32)
    ours = theirs.copy()
    ours[5] += 2e-3  # a full learning rate forth instead of back
    assert_drift("steps", "w", ours, theirs, drift_of(5))
    said = message_of(assert_drift, "steps", "w", ours, theirs, drift_of(6))
    assert said.startswith("steps: w differs by 0.002 at (5,)")
    said = message_of(assert_drift, "steps", "w", ours, theirs, drift_of(5, 6))
    assert said.startswith("steps: a gradient of w is noise in 2 of 32 entries")
