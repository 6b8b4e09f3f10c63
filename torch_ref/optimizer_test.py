"""Optimizers against PyTorch's own (float64) and against the formula."""

import math

import pytest
import torch

from torch_ref.optimizer import Optimizer, global_norm, learning_rate_schedule

NAMES = ("model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "model.norm.weight")


def parameters(shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(
            shape if "mlp" in name else shape[:1], generator=generator, dtype=torch.float64
        )
        for name in NAMES
    }


def optimizer(name, values, **knobs):
    knobs = dict(b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=None) | knobs
    return Optimizer(name, values, **knobs)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_are_those_of_pytorchs_own(name):
    ours, theirs = parameters(), parameters()
    groups = [
        {"params": [theirs[n] for n in NAMES if "norm" not in n], "weight_decay": 0.1},
        {"params": [theirs[n] for n in NAMES if "norm" in n], "weight_decay": 0.0},
    ]
    if name == "adamw":
        reference: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    else:
        reference = torch.optim.SGD(groups, momentum=0.9)
    mine = optimizer(name, ours)
    for step in range(5):
        gradients = parameters(seed=10 + step)
        rate = 0.1 / (step + 1)
        mine.step(gradients, rate)
        for group in reference.param_groups:
            group["lr"] = rate
        for n in NAMES:
            theirs[n].grad = gradients[n]
        reference.step()
    for n in NAMES:
        torch.testing.assert_close(ours[n], theirs[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5), (130, 140), (140, 130)])
def test_adafactor_follows_the_paper_over_the_stack_of_layers(shape):
    values, expected = parameters(shape), parameters(shape)
    mine = optimizer("adafactor", values)
    layers = NAMES[:2]
    v = row = column = 0.0
    for step in range(3):
        gradients = parameters(shape, seed=10 + step)
        mine.step(gradients, 0.01)
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
    gradients = parameters(seed=1)
    norm = global_norm(gradients).item()
    for clip, factor in ((norm / 4, 0.25), (norm * 4, 1.0)):
        values, before = parameters(), parameters()
        optimizer("sgd", values, weight_decay=0.0, clip_norm=clip).step(gradients, 1.0)
        for n in NAMES:
            expected = before[n] - factor * gradients[n]
            torch.testing.assert_close(values[n], expected, rtol=1e-5, atol=1e-6)


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
