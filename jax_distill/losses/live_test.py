"""A live teacher: values from the formula in float64; at K = V the loss from stored targets."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_distill.batch import Batch, LiveTeacher
from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Head, loss, token_values
from jax_distill.losses.float64_test import log_softmax
from jax_distill.objective import DIVERGENCES, IMPLEMENTATIONS, Execution, Objective
from jax_distill.synthetic import exact_targets, loss_inputs

V, EPS = 61, float(np.finfo(np.float32).eps)


def inputs(temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray, Batch, Batch]:
    """hidden, weight, a batch with K = V stored targets, and the same with its teacher live:
    another width and padding; masked cells hold NaN."""
    one = loss_inputs(2, 13, width=8, vocab_size=V, top_k=V, valid=0.7, padding=3, seed=1)
    rng = np.random.default_rng(2)
    weight = (2 * rng.normal(size=(V + 7, 5))).astype(np.float32)
    hidden = rng.normal(size=(2, 13, 5)).astype(np.float32)
    targets = exact_targets(
        np.float64(hidden) @ np.float64(weight[:V]).T, top_k=V, temperature=temperature
    )
    hidden[~one.batch.mask] = np.nan
    stored = replace(one.batch, targets=targets)
    teacher = LiveTeacher(hidden, Head(weight, vocab_size=V), temperature)
    return one.hidden, one.weight, stored, replace(stored, targets=None, teacher=teacher)


def objective_of(divergence: str) -> Objective:
    return Objective(
        divergence=divergence, jsd_beta=0.3, kl_weight=0.7, ce_weight=0.2, z_loss_weight=1e-3
    )


def logits64(hidden: np.ndarray, weight: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask[..., None], np.float64(hidden), 0) @ np.float64(weight[:V]).T


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_values_are_the_formula_in_float64(divergence, temperature):
    """A logit is a sum of D products, exact to D·ε/2 of their sizes; a log-probability is two of
    them and a logsumexp of V; a divergence is a mean of log-probabilities' differences."""
    hidden, weight, _, batch = inputs(temperature)
    objective = objective_of(divergence)
    got = jax.jit(token_values, static_argnums=(3, 4), compiler_options=QUICK_COMPILE)(
        hidden, Head(weight, vocab_size=V), batch, objective, Execution(chunk_size=8)
    )
    z = logits64(hidden, weight, batch.mask)
    teacher_z = logits64(batch.teacher.hidden, batch.teacher.head.weight, batch.mask)
    log_p, log_q = log_softmax(teacher_z / temperature), log_softmax(z / temperature)
    p, q = np.exp(log_p), np.exp(log_q)
    m = 0.3 * p + 0.7 * q
    kl = {
        "forward_kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jsd": (0.3 * p * (log_p - np.log(m)) + 0.7 * q * (log_q - np.log(m))).sum(-1),
    }[divergence]
    label = np.where(batch.mask, batch.labels, 0)[..., None]
    cross_entropy = -np.take_along_axis(log_softmax(z), label, -1)[..., 0]
    z_loss = np.square(np.take_along_axis(z, label, -1)[..., 0] + cross_entropy)
    total = 0.7 * temperature**2 * kl + 0.2 * cross_entropy + 1e-3 * z_loss
    sizes = [np.abs(x).max() for x in (z, teacher_z)]
    bound = 2 * (8 + np.log2(V)) * EPS * max(1.0, *sizes)
    for value, wanted, unit in (
        (got.kl, kl, bound),
        (got.cross_entropy, cross_entropy, bound),
        (got.z_loss, z_loss, 2 * np.sqrt(z_loss.max()) * bound),
        (got.loss, total, (1 + temperature**2) * bound),
    ):
        np.testing.assert_allclose(value, np.where(batch.mask, wanted, 0), rtol=0, atol=unit)
    agrees = (z.argmax(-1) == teacher_z.argmax(-1)) & batch.mask
    np.testing.assert_array_equal(got.top1_agreement, agrees)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_at_k_of_the_vocabulary_online_is_offline(implementation, divergence, temperature):
    """Sums and both gradients, of every implementation. dlogits are differences of probabilities,
    each exact to the error of its exponent (above); a gradient sums N of them, or V."""
    hidden, weight, stored, live = inputs(temperature)
    execution = Execution(implementation=implementation, chunk_size=8)

    def total(hidden, weight, batch):
        head = Head(weight, vocab_size=V)
        sums = loss(hidden, head, batch, objective_of(divergence), execution)
        return sums.loss, sums

    graded = jax.jit(
        jax.value_and_grad(total, argnums=(0, 1), has_aux=True), compiler_options=QUICK_COMPILE
    )
    (_, offline), expected = graded(hidden, weight, stored)
    (_, online), got = graded(hidden, weight, live)
    size = (
        np.abs(logits64(hidden, weight, live.mask)).max()
        + np.abs(logits64(live.teacher.hidden, live.teacher.head.weight, live.mask)).max()
    )
    tokens = float(offline.count)
    bound = 4 * (8 + np.log2(V)) * EPS * max(size, 1.0) * temperature**2
    for name in ("loss", "kl", "cross_entropy"):
        np.testing.assert_allclose(
            getattr(online, name), getattr(offline, name), rtol=0, atol=tokens * bound
        )
    for left, right in zip(got, expected, strict=True):
        assert np.abs(right).max() > 0.01
        np.testing.assert_allclose(left, right, rtol=0, atol=np.sqrt(tokens) * bound * 8)
    assert not np.asarray(got[0])[~live.mask].any()


def test_what_does_not_fit_is_refused():
    hidden, weight, stored, live = inputs()
    head = Head(weight, vocab_size=V)
    with pytest.raises(ValueError, match="got both"):
        loss(hidden, head, replace(stored, teacher=live.teacher))
    with pytest.raises(ValueError, match="the student's vocabulary 60, got 61"):
        loss(hidden, replace(head, vocab_size=60), live)
    with pytest.raises(ValueError, match="teacher.hidden of shape"):
        loss(hidden, head, live.map(lambda x: x if x.shape[-1] != 5 else x[:, :3]))
    with pytest.raises(ValueError, match="temperature above 0"):
        loss(hidden, head, replace(live, teacher=replace(live.teacher, temperature=0.0)))
