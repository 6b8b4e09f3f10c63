"""The loss in float64 numpy, written from the formula, and its gradient by complex steps.

f(z + ih) = f(z) + ih·f'(z) + O(h²): with h = 1e-20 the imaginary part is the derivative to the last
digit, for any objective, with no second formula. The other test files hold every implementation
against this one; it takes the arguments of `loss`, with numpy arrays.
"""

from dataclasses import replace

import numpy as np
import pytest

from jax_distill.batch import Batch
from jax_distill.losses import Head
from jax_distill.objective import LOG_FLOOR, Objective
from jax_distill.synthetic import loss_inputs

STEP = 1e-20
Sums = dict[str, float]
Gradients = dict[str, np.ndarray]


def logsumexp(x: np.ndarray, where: np.ndarray | bool = True) -> np.ndarray:
    """Over the last axis, real or complex; −inf where nothing is chosen."""
    where = np.broadcast_to(where, x.shape)
    largest = np.max(np.where(where, x.real, -np.inf), axis=-1, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    total = np.sum(np.where(where, np.exp(np.where(where, x - largest, 0.0)), 0.0), axis=-1)
    some = np.any(where & (x.real > -np.inf), axis=-1)
    return np.where(some, np.log(np.where(some, total, 1.0)) + largest[..., 0], -np.inf)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - logsumexp(x)[..., None]


def logits(matmul: np.ndarray, head: Head) -> np.ndarray:
    """[..,V] without padding; the bias is in `matmul`."""
    z = matmul if head.logit_scale is None else matmul * head.logit_scale
    z = z if head.soft_cap is None else head.soft_cap * np.tanh(z / head.soft_cap)
    return z[..., : head.real_vocab_size]


def outcome_parts(objective: Objective, log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """One outcome's part, where log_p may be −inf and log_q is finite."""
    p, q = np.exp(log_p), np.exp(log_q)
    safe = np.where(p > 0, log_p, 0.0)
    if objective.divergence == "forward_kl":
        return np.where(p > 0, p * (safe - log_q), 0.0)
    if objective.divergence == "reverse_kl":
        return q * (log_q - np.maximum(log_p, LOG_FLOOR))
    beta = objective.jsd_beta
    log_m = np.log(beta * p + (1 - beta) * q)
    return np.where(p > 0, beta * p * (safe - log_m), 0.0) + (1 - beta) * q * (log_q - log_m)


def token_values(
    matmul: np.ndarray, head: Head, batch: Batch, objective: Objective
) -> dict[str, np.ndarray]:
    """[B,T] values from the head's matmul [B,T,V], real or complex, masked cells 0."""
    z, targets = logits(matmul, head), batch.targets
    stored = batch.mask[..., None] & (np.arange(targets.top_k) < targets.count[..., None])
    real = stored & (targets.indices < z.shape[-1])
    among_k = np.zeros(z.shape, bool)
    log_p = np.full(z.shape, -np.inf)
    row, position, entry = np.nonzero(real)
    token = targets.indices[row, position, entry]
    among_k[row, position, token] = True
    log_p[row, position, token] = targets.logprobs[row, position, entry]
    lacking = stored & ~real
    log_p_lacking = logsumexp(np.where(lacking, targets.logprobs, -np.inf), lacking)
    log_p_tail = np.where(batch.mask, targets.log_tail, -np.inf).astype(np.float64)
    log_p_tail = np.logaddexp(log_p_tail, log_p_lacking)

    log_q = log_softmax(z / targets.temperature)
    log_q_tail = logsumexp(log_q, ~among_k)
    log_q_tail = np.where(np.any(~among_k, axis=-1), log_q_tail, LOG_FLOOR)
    mass = {
        "teacher_mass": np.sum(np.exp(log_p), axis=-1),
        "student_mass": np.sum(np.where(among_k, np.exp(log_q), 0.0), axis=-1),
    }
    if objective.tail in ("renormalize", "ignore"):
        total = logsumexp(log_p, among_k)
        log_p = log_p - np.where(np.isfinite(total), total, 0.0)[..., None]
        log_p_tail = np.full(log_p_tail.shape, -np.inf)
    if objective.tail == "ignore":
        total = logsumexp(log_q, among_k)
        log_q = log_q - np.where(np.isfinite(total), total, 0.0)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.sum(np.where(among_k, outcome_parts(objective, log_p, log_q), 0.0), axis=-1)
        if objective.tail in ("bucket", "renormalize"):
            kl = kl + outcome_parts(objective, log_p_tail, log_q_tail)
    label = np.where(batch.mask, batch.labels, 0)[..., None]
    cross_entropy = -np.take_along_axis(log_softmax(z), label, axis=-1)[..., 0]
    z_loss = logsumexp(z) ** 2
    loss = objective.kl_weight * targets.temperature**2 * kl
    loss = loss + objective.ce_weight * cross_entropy + objective.z_loss_weight * z_loss
    values = {"loss": loss, "kl": kl, "cross_entropy": cross_entropy, "z_loss": z_loss, **mass}
    return {name: np.where(batch.mask, value, 0.0) for name, value in values.items()}


def float64_loss(
    hidden: np.ndarray, head: Head, batch: Batch, objective: Objective = Objective()
) -> tuple[Sums, Gradients]:
    """Sums by name, and the gradients of the loss sum by hidden, weight and bias."""
    weight = np.asarray(head.weight, np.float64)
    hidden = np.where(batch.mask[..., None], hidden, 0.0).astype(np.float64)
    matmul = hidden @ weight.T + (0.0 if head.bias is None else np.float64(head.bias))
    values = token_values(matmul, head, batch, objective)
    sums = {name: float(np.sum(value)) for name, value in values.items()}
    d_matmul = np.zeros(matmul.shape)
    for token in range(matmul.shape[-1]):
        stepped = matmul.astype(complex)
        stepped[..., token] += 1j * STEP
        d_matmul[..., token] = token_values(stepped, head, batch, objective)["loss"].imag / STEP
    gradients = {
        "hidden": d_matmul @ weight,
        "weight": np.einsum("btv,btd->vd", d_matmul, hidden),
        "bias": d_matmul.sum(axis=(0, 1)),
    }
    return {**sums, "count": float(batch.mask.sum())}, gradients


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_complex_steps_are_the_finite_differences_of_the_reported_loss(divergence):
    """Case 22: at τ = 2, τ² is in the value and in the gradient."""
    hidden, weight, batch, *_ = loss_inputs(
        2, 13, width=8, vocab_size=67, top_k=5, temperature=2.0, valid=0.7, short_counts=True
    )
    objective = Objective(divergence=divergence, ce_weight=0.3)
    _, gradients = float64_loss(hidden, Head(weight), batch, objective)
    step = 1e-6 * np.random.default_rng(2).normal(size=hidden.shape)
    above = float64_loss(hidden + step, Head(weight), batch, objective)[0]["loss"]
    below = float64_loss(hidden - step, Head(weight), batch, objective)[0]["loss"]
    predicted = 2 * np.sum(gradients["hidden"] * step)
    # Rounding: 2 ε(float64)·|loss| ≈ 1e-14 of a difference near 1e-5. Curvature: step² ≈ 1e-12.
    assert above - below == pytest.approx(predicted, rel=1e-6)


def test_bucket_with_every_token_stored_is_the_whole_kl():
    hidden, weight, batch, teacher, *_ = loss_inputs(2, 5, width=8, vocab_size=17, top_k=17)
    log_p, log_q = log_softmax(teacher), log_softmax(np.float64(hidden) @ np.float64(weight).T)
    logprobs = np.take_along_axis(log_p, batch.targets.indices, axis=-1)  # not rounded to fp32
    batch = replace(batch, targets=replace(batch.targets, logprobs=logprobs))
    sums, gradients = float64_loss(hidden, Head(weight), batch)
    assert sums["kl"] == pytest.approx(np.sum(np.exp(log_p) * (log_p - log_q)), rel=1e-12)
    expected = (np.exp(log_q) - np.exp(log_p)) @ weight
    np.testing.assert_allclose(gradients["hidden"], expected, rtol=1e-9, atol=1e-12)
