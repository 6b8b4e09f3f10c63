"""The verdict on a cache, from divergences made of logits and errors of known size."""

import numpy as np
import pytest

from jax_distill.cache import judge
from jax_distill.cache.verdict import CODING_FLOOR, tolerances

DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.5, 1.0, 2.0, 8.0)


def log_softmax(z: np.ndarray, temperature: float) -> np.ndarray:
    z = z / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def divergences(stored: np.ndarray, live: np.ndarray, temperature: float):
    """(KL(stored ‖ live), the same one position late): float64 [P], from logits [P,V]."""
    p, q = log_softmax(stored, temperature), log_softmax(live, temperature)
    late = np.roll(p, 1, axis=0)
    return tuple((np.exp(x) * (x - q)).sum(-1) for x in (p, late))


def logits(seed: int = 0, *, spread: float = 6.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (64, 500))


def with_error(z: np.ndarray, relative: float, seed: int = 1) -> np.ndarray:
    """Every logit off by a relative rounding of the largest."""
    error = relative * np.abs(z).max() * np.random.default_rng(seed).uniform(-1, 1, z.shape)
    return z + error


ROUNDING = {"float32": 2.0**-11, "bfloat16": 2.0**-8}  # TF32 matmuls; hidden states of 8 bits


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_correct_cache_passes_at_every_temperature(dtype, temperature):
    z = logits()
    kl, shifted = divergences(z, with_error(z, ROUNDING[dtype]), temperature)
    verdict = judge(kl, shifted, dtype=dtype, temperature=temperature)
    assert verdict.matches and verdict.warning == ""
    assert verdict.line.startswith("cache check: ") and "\n" not in verdict.line


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_teacher_shifted_targets_and_permuted_ids_fail(dtype, temperature):
    z = logits()
    permuted = z[:, np.random.default_rng(2).permutation(z.shape[1])]
    for stored in (logits(9), np.roll(z, 1, axis=0), np.roll(z, -1, axis=0), permuted):
        kl, shifted = divergences(stored, z, temperature)
        verdict = judge(kl, shifted, dtype=dtype, temperature=temperature)
        assert not verdict.matches and "this teacher's" not in verdict.line
    kl, shifted = divergences(np.roll(z, -1, axis=0), z, temperature)
    verdict = judge(kl, shifted, dtype=dtype, temperature=temperature)
    assert "one position too early" in verdict.line


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_teacher_that_says_the_same_everywhere_passes_with_a_warning(dtype, temperature):
    """Rows of one repeated token: a shift costs nothing, so it proves nothing."""
    z = np.broadcast_to(logits()[:1], (64, 500))
    kl, shifted = divergences(z, with_error(z, 2.0**-14), temperature)
    verdict = judge(kl, shifted, dtype=dtype, temperature=temperature)
    assert verdict.matches and "would not show" in verdict.warning


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_position_alone_can_fail(dtype):
    mean, worst = tolerances(dtype, 1.0)
    kl, shifted = np.zeros(10_000), np.full(10_000, 5.0)
    kl[77] = 1.01 * worst
    assert not judge(kl, shifted, dtype=dtype, temperature=1.0).matches
    kl[77] = 0.99 * worst
    assert judge(kl, shifted, dtype=dtype, temperature=1.0).matches
    kl[:] = 1.01 * mean
    assert not judge(kl, shifted, dtype=dtype, temperature=1.0).matches


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_does_not_match(wrong):
    kl = np.zeros(8)
    kl[3] = wrong
    assert not judge(kl, np.ones(8), dtype="bfloat16", temperature=1.0).matches


def test_the_tolerance_falls_with_the_square_of_the_temperature_to_the_coding_error():
    (mean, worst), (hot_mean, hot_worst) = tolerances("bfloat16", 1.0), tolerances("bfloat16", 2.0)
    for cold, hot in ((mean, hot_mean), (worst, hot_worst)):
        assert (cold - CODING_FLOOR) / (hot - CODING_FLOOR) == pytest.approx(4)
    assert tolerances("float32", 1e9) == pytest.approx((CODING_FLOOR, CODING_FLOOR))
