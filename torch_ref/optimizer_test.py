"""What torch_ref asks of torch's optimizers, and adafactor against the formula (float64)."""

import math

import pytest
import torch

from torch_ref.optimizer import (
    clip_gradients,
    learning_rate_schedule,
    make_optimizer,
    set_learning_rate,
)

NAMES = ("model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "model.norm.weight")


def state_by_name(state_dict):
    """Parameter name → its tensors (adamw: exp_avg, exp_avg_sq, step) in an optimizer's
    `state_dict()`."""
    groups = state_dict["param_groups"]
    names = {i: n for g in groups for i, n in zip(g["params"], g["param_names"], strict=True)}
    return {names[index]: state for index, state in state_dict["state"].items()}


def parameters(shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(
            shape if "mlp" in name else shape[:1], generator=generator, dtype=torch.float64
        )
        for name in NAMES
    }


def optimizer(name, values, **changed):
    return make_optimizer(name, values, **dict(b1=0.9, b2=0.95, weight_decay=0.1) | changed)


def take_step(made, values, gradients, rate):
    for name, p in values.items():
        p.grad = gradients[name]
    set_learning_rate(made, rate)
    made.step()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_are_the_formulas_and_norms_do_not_decay(name):
    """adamw: p −= lr·(m̂/(√v̂ + 1e-8) + λ·p); sgd: t ← g + λ·p + b1·t, p −= lr·t."""
    values, expected = parameters(), parameters()
    made = optimizer(name, values)
    first, second = (dict.fromkeys(NAMES, 0.0) for _ in range(2))
    for step in range(5):
        gradients, rate = parameters(seed=10 + step), 0.1 / (step + 1)
        take_step(made, values, gradients, rate)
        for n, g in gradients.items():
            p, decay = expected[n], 0.0 if "norm" in n else 0.1
            if name == "adamw":
                first[n] = 0.9 * first[n] + 0.1 * g
                second[n] = 0.95 * second[n] + 0.05 * g * g
                m, v = first[n] / (1 - 0.9 ** (step + 1)), second[n] / (1 - 0.95 ** (step + 1))
                expected[n] = p - rate * (m / (v.sqrt() + 1e-8) + decay * p)
            else:
                first[n] = 0.9 * first[n] + g + decay * p
                expected[n] = p - rate * first[n]
    for n in NAMES:
        torch.testing.assert_close(values[n], expected[n], rtol=1e-12, atol=1e-12)
    if name == "adamw":
        state = state_by_name(made.state_dict())
        assert state.keys() == set(NAMES)
        for n in NAMES:
            torch.testing.assert_close(state[n]["exp_avg_sq"], second[n], rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(3, 5), (130, 140), (140, 130)])
def test_adafactor_follows_the_paper_over_the_stack_of_layers(shape):
    values, expected = parameters(shape), parameters(shape)
    made = optimizer("adafactor", values)
    layers = NAMES[:2]
    v = row = column = 0.0
    for step in range(3):
        gradients = parameters(shape, seed=10 + step)
        take_step(made, values, gradients, 0.01)
        g = torch.stack([gradients[n] for n in layers])
        p = torch.stack([expected[n] for n in layers])
        beta = 1 - (step + 1) ** -0.8
        v = beta * v + (1 - beta) * (g**2 + 1e-30)
        row = beta * row + (1 - beta) * (g**2 + 1e-30).mean(2)
        column = beta * column + (1 - beta) * (g**2 + 1e-30).mean(1)
        if min(shape) >= 128:
            second = row[:, :, None] * column[:, None, :] / row.mean(1)[:, None, None]
            if shape[0] > shape[1]:  # the mean of the longer axis' factor divides
                second = row[:, :, None] * column[:, None, :] / column.mean(1)[:, None, None]
        else:
            second = v
        u = g / second.sqrt()
        u = u / max(1.0, u.square().mean().sqrt())
        p = p - 0.01 * p.square().mean().sqrt() * u - 0.1 * p
        expected |= dict(zip(layers, p, strict=True))
    for n in layers:
        torch.testing.assert_close(values[n], expected[n], rtol=1e-10, atol=1e-12)


def test_clipping_scales_the_whole_gradient_and_only_above_the_norm():
    """Of many float32 numbers, too, of which torch's own norm loses the fifth digit."""
    gradient = torch.randn(10**6, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().norm().item()
    for clip_norm, factor in ((exact / 4, 0.25), (exact * 4, 1.0), (None, 1.0)):
        p = torch.zeros(10**6)
        p.grad = gradient.clone()
        norm = clip_gradients([p, torch.zeros(3)], clip_norm)  # the second has no gradient
        assert norm.item() == pytest.approx(exact, rel=5e-7)
        torch.testing.assert_close(p.grad, factor * gradient, rtol=5e-6, atol=0)


@pytest.mark.parametrize(
    "kind,half,end", [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_schedules_warm_up_and_end_where_they_should(kind, half, end):
    rate = learning_rate_schedule(kind, learning_rate=1.0, final=0.1, warmup_steps=3, steps=13)
    assert [rate(s) for s in range(3)] == pytest.approx([0.25, 0.5, 0.75])
    assert rate(3) == 1.0
    assert rate(8) == pytest.approx(half)
    assert rate(13) == rate(99) == pytest.approx(end)
    if kind == "cosine":
        assert rate(5) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)
