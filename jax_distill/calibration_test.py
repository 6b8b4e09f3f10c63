"""The expected calibration error against its definition (arXiv 1706.04599), in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.cache import CALIBRATION_BINS, table_of
from jax_distill.evaluate import miscalibration


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Σ_b n_b/n · |accuracy of b − mean confidence of b| over bins of equal width."""
    error = 0.0
    for b in range(CALIBRATION_BINS):
        inside = (confidence >= b / CALIBRATION_BINS) & (confidence < (b + 1) / CALIBRATION_BINS)
        inside |= (b == CALIBRATION_BINS - 1) & (confidence == 1)
        if inside.any():
            gap = correct[inside].mean() - confidence[inside].mean()
            error += inside.mean() * abs(gap)
    return error


def test_the_calibration_error_is_its_definition():
    """Two batches with holes and a certain token; a model that is sure and wrong has error 1, one
    whose confidence is its accuracy 0."""
    rng = np.random.default_rng(0)
    confidence = rng.random((2, 3, 40)).astype(np.float32)
    confidence[0, 0, 0] = 1.0
    correct = rng.random(confidence.shape) < confidence**2
    mask = rng.random(confidence.shape) < 0.7
    mask[0, 0, 0] = True
    sums = sum(
        np.float64(miscalibration(*map(jnp.asarray, (c, r.astype(np.float32), m))))
        for c, r, m in zip(confidence, correct, mask, strict=True)
    )
    row = {"cross_entropy": 1.0, "miscalibration": sums}
    found = table_of({"m": row}, int(mask.sum()))["m"]
    wanted = expected_calibration_error(confidence[mask].astype(np.float64), correct[mask])
    assert wanted > 0.05 and found["calibration_error"] == pytest.approx(wanted, rel=1e-5)
    assert set(found) == {"cross_entropy", "perplexity", "calibration_error"}
    for sure, right, error in ((1.0, 0.0, 1.0), (0.5, 0.5, 0.0)):
        c, r = (jnp.full((1, 8), x) for x in (sure, right))
        sums = miscalibration(c, r, jnp.ones((1, 8), bool))
        row = {"cross_entropy": 1.0, "miscalibration": np.asarray(sums)}
        assert table_of({"m": row}, 8)["m"]["calibration_error"] == pytest.approx(error)
