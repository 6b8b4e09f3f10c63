"""Hidden states: value and gradients are the formula in float64; masked cells; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import hidden_sum
from jax_distill.objective import HIDDEN_KINDS

EPS = float(np.finfo(np.float32).eps)
P, B, T, D, E = 3, 2, 5, 8, 6


def inputs(projected: bool):
    """Student [P,B,T,D], teacher [B,T,P,E], mask with holes that hold NaN, projection or None."""
    rng = np.random.default_rng(0)
    width = E if projected else D
    student = rng.normal(size=(P, B, T, D)).astype(np.float32)
    teacher = rng.normal(1, 2, size=(B, T, P, width)).astype(np.float32)
    mask = rng.random((B, T)) < 0.7
    student[:, ~mask], teacher[~mask] = np.nan, np.nan
    weight = rng.normal(size=(P, E, D)).astype(np.float32) / 3 if projected else None
    return student, teacher, mask, weight


def definition(student, teacher, mask, weight, kind):
    """(sum, its gradients for student and weight), float64, position by position."""
    student, teacher = np.float64(student), np.float64(teacher)
    total, d_student = 0.0, np.zeros_like(student)
    d_weight = None if weight is None else np.zeros(weight.shape)
    for p, b, t in np.ndindex(P, B, T):
        if not mask[b, t]:
            continue
        h, target = student[p, b, t], teacher[b, t, p]
        a = h if weight is None else np.float64(weight[p]) @ h
        if kind == "mse":
            total += np.mean((a - target) ** 2) / P
            d_a = 2 * (a - target) / a.size / P
        else:
            na, nb = np.linalg.norm(a), np.linalg.norm(target)
            cosine = a @ target / (na * nb)
            total += (1 - cosine) / P
            d_a = -(target / (na * nb) - cosine * a / na**2) / P
        d_student[p, b, t] = d_a if weight is None else np.float64(weight[p]).T @ d_a
        if d_weight is not None:
            d_weight[p] += np.outer(d_a, h)
    return total, d_student, d_weight


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("kind", HIDDEN_KINDS)
def test_value_and_gradients_are_the_formula_in_float64(kind, projected):
    """fp32: a projected element is a sum of D products, a distance one of D' of them, the gradient
    of W one of the positions: (D + D' + B·T) roundings of a few times the largest entry."""
    student, teacher, mask, weight = inputs(projected)

    def total(student, weight):
        return 3.7 * hidden_sum(student, teacher, jnp.asarray(mask), weight, kind=kind)

    graded = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), compiler_options=QUICK_COMPILE)
    value, (d_student, d_weight) = graded(student, weight)
    expected, d_h, d_w = definition(student, teacher, mask, weight, kind)
    bound = 4 * (D + E + B * T) * EPS
    np.testing.assert_allclose(value, 3.7 * expected, rtol=bound)
    assert not np.asarray(d_student)[:, ~mask].any()
    assert (d_weight is None) == (d_w is None)
    for got, wanted in ((d_student, d_h), (d_weight, d_w)):
        if wanted is not None:
            size = 3.7 * np.abs(wanted).max()
            np.testing.assert_allclose(got, 3.7 * wanted, rtol=0, atol=bound * size)


def test_a_state_of_zeros_and_a_mask_of_none_have_a_finite_gradient():
    student, teacher, mask, _ = inputs(False)
    student[0] = 0.0

    def total(student, mask):
        return hidden_sum(student, teacher, mask)

    graded = jax.value_and_grad(total)
    value, gradient = graded(student, jnp.asarray(mask))
    assert np.isfinite(value) and not np.asarray(gradient)[0].any()
    value, gradient = graded(student, jnp.zeros((B, T), bool))
    assert value == 0 and not np.asarray(gradient).any()


@pytest.mark.parametrize("change", ["width", "pairs", "projection"])
def test_what_does_not_fit_is_refused(change):
    student, teacher, mask, weight = inputs(True)
    if change == "width":
        weight = None
    elif change == "pairs":
        teacher = teacher[:, :, :2]
    else:
        weight = weight[..., :4]
    with pytest.raises(ValueError, match="expected the teacher's hidden states"):
        hidden_sum(student, teacher, mask, weight)
