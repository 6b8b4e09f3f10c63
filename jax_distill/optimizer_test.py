"""Schedules against their closed forms; what decay touches; each optimizer moves as optax says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.optimizer import decayed, learning_rate_schedule, make_optimizer

pytestmark = pytest.mark.usefixtures("optax_promotion")
KNOBS = dict(learning_rate=0.3, final=0.1, warmup_steps=4, steps=20)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedule_is_the_closed_form(kind):
    schedule = learning_rate_schedule(kind, **KNOBS)
    for step in range(25):
        x = min(max((step - 4) / 16, 0.0), 1.0)
        main = {
            "cosine": 0.1 + 0.2 * (1 + math.cos(math.pi * x)) / 2,
            "linear": 0.3 - 0.2 * x,
            "constant": 0.3,
        }[kind]
        expected = 0.3 * (step + 1) / 5 if step < 4 else main
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-6), step


def test_first_step_moves_and_the_peak_is_reached():
    schedule = learning_rate_schedule("cosine", **KNOBS)
    assert float(schedule(0)) > 0
    assert float(schedule(4)) == pytest.approx(0.3)
    assert float(schedule(20)) == pytest.approx(0.1)


PARAMS = {
    "layers": {
        "input_layernorm": {"weight": jnp.ones((2, 4))},
        "q_proj": {"weight": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4))},
    },
    "norm": {"weight": jnp.ones(4)},
    "embed_tokens": {"weight": jnp.ones((8, 4))},
}


def test_decay_spares_norms_and_biases_though_they_are_stacked():
    chosen = decayed(PARAMS)
    assert chosen["layers"]["q_proj"] == {"weight": True, "bias": False}
    assert not chosen["layers"]["input_layernorm"]["weight"]
    assert not chosen["norm"]["weight"]
    assert chosen["embed_tokens"]["weight"]


def update(name, **knobs):
    defaults = dict(b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(name, lambda _: jnp.float32(0.1), **{**defaults, **knobs})
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.5), PARAMS)
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    return updates


def test_adamw_first_step_is_the_sign_times_the_learning_rate():
    updates = update("adamw", weight_decay=0.2)
    np.testing.assert_allclose(updates["norm"]["weight"], -0.1, rtol=1e-6)
    # decoupled: −lr·(sign + 0.2·p)
    np.testing.assert_allclose(updates["embed_tokens"]["weight"], -0.12, rtol=1e-6)


def test_sgd_first_step_is_the_gradient_times_the_learning_rate():
    np.testing.assert_allclose(update("sgd")["norm"]["weight"], -0.05, rtol=1e-6)


def test_clipping_scales_the_whole_gradient():
    total = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    norm = 0.5 * math.sqrt(total)
    got = update("sgd", clip_norm=1.0)["norm"]["weight"]
    np.testing.assert_allclose(got, -0.1 * 0.5 / norm, rtol=1e-5)


def test_adafactor_moves_every_leaf():
    assert all(bool(jnp.all(leaf < 0)) for leaf in jax.tree.leaves(update("adafactor")))
