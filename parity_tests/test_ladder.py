"""Proves that a failing rung can be read: it names the rung, the tensor, the largest and the mean
difference, the place and both values there; and that it fails at all."""

import re

import numpy as np
import pytest
import torch
from ladder import assert_close, assert_numbers


def planted(at: tuple[int, ...], by: float) -> tuple[np.ndarray, np.ndarray]:
    theirs = np.linspace(-2.0, 2.0, 24, dtype=np.float32).reshape(2, 3, 4)
    ours = theirs.copy()
    ours[at] += by
    return ours, theirs


def message(*arguments, **knobs) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_close(*arguments, **knobs)
    return str(failure.value).split("\nassert ")[0]


def test_a_failure_says_rung_tensor_largest_and_mean_difference_and_where():
    said = message("gradients, tied", "model.norm.weight", *planted((1, 2, 0), 0.048), 1e-5)
    expected = (
        "gradients, tied: model.norm.weight differs by 0.048 at (1, 2, 0) (ours 1.5262609, "
        "theirs 1.4782609), 0.002 on average; allowed 2e-05 (1e-05 of 2)"
    )
    assert said == expected


def test_a_failure_on_average_alone_is_one():
    ours, theirs = planted((0, 0, 0), 0.0)
    said = message("steps", "w", ours + 0.01, theirs, 0.02, unit=1.0, mean=1e-3)
    assert "0.01 on average; allowed 0.02 (0.02 of 1) and 0.001 on average" in said
    assert_close("steps", "w", ours + 0.01, theirs, 0.02, unit=1.0, mean=0.011)


def test_each_entry_may_have_a_unit_of_its_own():
    ours, theirs = planted((1, 2, 0), 0.5)
    ours[0, 0, 0] += 0.01
    units = np.full(theirs.shape, 1e-3)
    units[1, 2, 0] = 1.0
    said = message("steps", "w", ours, theirs, 1.0, unit=units)
    assert "w differs by 0.01 at (0, 0, 0)" in said and "allowed 0.001 (1 of 0.001)" in said
    units[0, 0, 0] = 0.02
    assert_close("steps", "w", ours, theirs, 1.0, unit=units)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_fails_where_theirs_is(bad):
    ours, theirs = planted((0, 1, 3), bad)
    assert "differs by inf at (0, 1, 3)" in message("logits", "z", ours, theirs, 1e9)
    assert "differs by inf" in message("logits", "z", theirs, np.full_like(theirs, np.nan), 1.0)


def test_what_is_within_passes_and_shapes_must_match():
    ours, theirs = planted((1, 0, 0), 1.9e-5)
    assert_close("logits", "z", ours, torch.tensor(theirs), 1e-5)
    message("logits", "z", ours, theirs, 9e-6)
    infinite = np.array([1.0, np.inf, -np.inf])
    assert_close("loss", "log_q", infinite, infinite)
    message("loss", "log_q", infinite, -infinite, 1e9)
    assert "(2, 3, 4) against (3, 4)" in message("logits", "z", ours, theirs[0])


def test_numbers_are_named_and_each_has_its_own_scale():
    theirs = {"loss": 3.0, "gradient_norm": 200.0}
    assert_numbers(
        "step 7", {"loss": 3.0, "gradient_norm": 200.001}, theirs, 1e-6, gradient_norm=1e-5
    )
    with pytest.raises(AssertionError, match=re.escape("step 7: loss differs by 1e-05 at ()")):
        assert_numbers("step 7", {"loss": 3.00001, "gradient_norm": 200.0}, theirs, 1e-6)
    with pytest.raises(AssertionError, match="step 7: .'loss'. against"):
        assert_numbers("step 7", {"loss": 3.0}, theirs, 1.0)
