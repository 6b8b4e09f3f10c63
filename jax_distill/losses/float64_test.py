"""The loss in float64 numpy, written from the formula, and its gradient by complex steps.

f(z + ih) = f(z) + ih·f'(z) + O(h²): with h = 1e-20 the imaginary part is the derivative to the last
digit, for any objective, with no second formula. The other test files hold every implementation
against this one.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jax_distill.losses.objectives import LOG_FLOOR

STEP = 1e-20
TEACHER = ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count")


@dataclass(frozen=True)
class Batch:
    """hidden [B,T,D], lm_head [V,D] and a store's arrays, float64; `knobs` as the loss takes."""

    hidden: np.ndarray
    lm_head: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    teacher_indices: np.ndarray
    teacher_logprobs: np.ndarray
    teacher_log_tail: np.ndarray
    teacher_count: np.ndarray
    bias: np.ndarray | None = None

    def replace(self, **fields: Any) -> "Batch":
        return replace(self, **fields)


def top_k(logprobs: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids [B,T,k] by value descending, their log-probabilities, the log of the rest."""
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :k]
    outside = np.ones(logprobs.shape, bool)
    np.put_along_axis(outside, ids, False, axis=-1)
    return ids, np.take_along_axis(logprobs, ids, axis=-1), logsumexp(logprobs, outside)


def make_batch(
    seed: int = 0,
    *,
    shape: tuple[int, int, int, int, int] = (2, 13, 8, 67, 5),
    vocab_size: int | None = None,
    teacher_vocab: int | None = None,
    temperature: float = 1.0,
    scale: float = 2.0,
    holes: bool = True,
) -> Batch:
    """Random (B,T,D,V,K): a teacher over teacher_vocab ids, masked cells, counts below K."""
    rows, positions, width, columns, k = shape
    vocab_size = columns if vocab_size is None else vocab_size
    rng = np.random.default_rng(seed)
    teacher = rng.normal(size=(rows, positions, teacher_vocab or vocab_size)) * scale
    logprobs = log_softmax(teacher / temperature)
    ids, chosen, log_tail = top_k(logprobs, k)
    count = np.full((rows, positions), k)
    if holes and k > 1:  # fewer real entries: what is cut belongs to the tail
        count = rng.integers(1, k + 1, (rows, positions))
        real = np.arange(k) < count[..., None]
        log_tail = np.logaddexp(log_tail, logsumexp(chosen, ~real))
        ids = np.where(real, ids, -7)
        chosen = np.where(real, chosen, np.nan)
    mask = rng.random((rows, positions)) < 0.7 if holes else np.ones((rows, positions), bool)
    return Batch(
        hidden=rng.normal(size=(rows, positions, width)) * scale / np.sqrt(width),
        lm_head=rng.normal(size=(columns, width)),
        labels=rng.integers(0, vocab_size, (rows, positions)),
        mask=mask,
        teacher_indices=ids,
        teacher_logprobs=chosen,
        teacher_log_tail=log_tail,
        teacher_count=count,
    )


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


def finished(raw: np.ndarray, soft_cap: float | None, logit_scale: float | None) -> np.ndarray:
    z = raw if logit_scale is None else raw * logit_scale
    return z if soft_cap is None else soft_cap * np.tanh(z / soft_cap)


def outcome_terms(divergence: str, log_p: np.ndarray, log_q: np.ndarray, beta: float) -> np.ndarray:
    """One outcome's part, where log_p may be −inf and log_q is finite."""
    p, q = np.exp(log_p), np.exp(log_q)
    safe = np.where(p > 0, log_p, 0.0)
    if divergence == "forward_kl":
        return np.where(p > 0, p * (safe - log_q), 0.0)
    if divergence == "reverse_kl":
        return q * (log_q - np.maximum(log_p, LOG_FLOOR))
    log_m = np.log(beta * p + (1 - beta) * q)
    return np.where(p > 0, beta * p * (safe - log_m), 0.0) + (1 - beta) * q * (log_q - log_m)


def per_token(
    raw: np.ndarray,
    batch: Batch,
    *,
    vocab_size: int | None = None,
    tail: str = "bucket",
    divergence: str = "forward_kl",
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    z_loss_weight: float = 0.0,
    soft_cap: float | None = None,
    logit_scale: float | None = None,
    **_: Any,
) -> dict[str, np.ndarray]:
    """[B,T] terms from the head's product raw [B,T,V], real or complex, masked cells 0."""
    vocab_size = raw.shape[-1] if vocab_size is None else vocab_size
    z = finished(raw, soft_cap, logit_scale)[..., :vocab_size]
    mask = batch.mask[..., None]
    real = mask & (np.arange(batch.teacher_indices.shape[-1]) < batch.teacher_count[..., None])
    has = real & (batch.teacher_indices < vocab_size)
    among_k = np.zeros(z.shape, bool)
    log_p = np.full(z.shape, -np.inf)
    row, position, entry = np.nonzero(has)
    column = batch.teacher_indices[row, position, entry]
    among_k[row, position, column] = True
    log_p[row, position, column] = batch.teacher_logprobs[row, position, entry]
    lacking = logsumexp(np.where(real & ~has, batch.teacher_logprobs, -np.inf), real & ~has)
    log_p_tail = np.logaddexp(np.where(batch.mask, batch.teacher_log_tail, -np.inf), lacking)

    log_q = log_softmax(z / temperature)
    outside = ~among_k
    log_q_tail = logsumexp(log_q, outside)
    log_q_tail = np.where(np.any(outside, axis=-1), log_q_tail, LOG_FLOOR)
    mass = {
        "teacher_mass": np.sum(np.exp(log_p), axis=-1),
        "student_mass": np.sum(np.where(among_k, np.exp(log_q), 0.0), axis=-1),
    }
    if tail in ("renormalize", "ignore"):
        total = logsumexp(log_p, among_k)
        log_p = log_p - np.where(np.isfinite(total), total, 0.0)[..., None]
        log_p_tail = np.full(log_p_tail.shape, -np.inf)
    if tail == "ignore":
        total = logsumexp(log_q, among_k)
        log_q = log_q - np.where(np.isfinite(total), total, 0.0)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = outcome_terms(divergence, log_p, log_q, jsd_beta)
        kl = np.sum(np.where(among_k, parts, 0.0), axis=-1)
        if tail in ("bucket", "renormalize"):
            kl = kl + outcome_terms(divergence, log_p_tail, log_q_tail, jsd_beta)
    label = np.where(batch.mask, batch.labels, 0)[..., None]
    cross_entropy = -np.take_along_axis(log_softmax(z), label, axis=-1)[..., 0]
    z_loss = logsumexp(z) ** 2
    loss = kl_weight * temperature**2 * kl + ce_weight * cross_entropy + z_loss_weight * z_loss
    terms = {"loss": loss, "kl": kl, "cross_entropy": cross_entropy, "z_loss": z_loss, **mass}
    return {name: np.where(batch.mask, term, 0.0) for name, term in terms.items()}


def float64_loss(batch: Batch, **knobs: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Sums by name, and the gradients of the loss sum by hidden, lm_head and bias."""
    hidden = np.where(batch.mask[..., None], batch.hidden, 0.0)
    raw = hidden @ batch.lm_head.T + (0.0 if batch.bias is None else batch.bias)
    sums = {name: float(np.sum(term)) for name, term in per_token(raw, batch, **knobs).items()}
    d_raw = np.zeros(raw.shape)
    for column in range(raw.shape[-1]):
        stepped = raw.astype(complex)
        stepped[..., column] += 1j * STEP
        d_raw[..., column] = per_token(stepped, batch, **knobs)["loss"].imag / STEP
    gradients = {
        "hidden": d_raw @ batch.lm_head,
        "lm_head": np.einsum("btv,btd->vd", d_raw, hidden),
        "bias": d_raw.sum(axis=(0, 1)),
    }
    return {**sums, "count": float(batch.mask.sum())}, gradients


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_complex_steps_are_the_finite_differences_of_the_reported_loss(divergence):
    """Case 22: at τ = 2, τ² is in the value and in the gradient."""
    batch = make_batch(1, temperature=2.0)
    knobs: dict[str, Any] = {"divergence": divergence, "temperature": 2.0, "ce_weight": 0.3}
    _, gradients = float64_loss(batch, **knobs)
    step = 1e-6 * np.random.default_rng(2).normal(size=batch.hidden.shape)
    above = float64_loss(batch.replace(hidden=batch.hidden + step), **knobs)[0]["loss"]
    below = float64_loss(batch.replace(hidden=batch.hidden - step), **knobs)[0]["loss"]
    predicted = 2 * np.sum(gradients["hidden"] * step)
    assert above - below == pytest.approx(predicted, rel=1e-6)


def test_bucket_with_every_token_stored_is_the_whole_kl():
    batch = make_batch(3, shape=(2, 5, 8, 17, 17), holes=False)
    sums, gradients = float64_loss(batch)
    log_q = log_softmax(batch.hidden @ batch.lm_head.T)
    log_p = np.zeros(log_q.shape)
    np.put_along_axis(log_p, batch.teacher_indices, batch.teacher_logprobs, axis=-1)
    assert sums["kl"] == pytest.approx(np.sum(np.exp(log_p) * (log_p - log_q)), rel=1e-12)
    expected = (np.exp(log_q) - np.exp(log_p)) @ batch.lm_head
    np.testing.assert_allclose(gradients["hidden"], expected, rtol=1e-9, atol=1e-12)
