"""Rung "loss", hidden states: the distance and its gradients in both backends; and a cache's
bfloat16 states in torch."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ladder import FP32, WORST, assert_close

import jax_distill.cache
from jax_distill.cache import Cache
from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import hidden_sum
from jax_distill.objective import HIDDEN_KINDS, HiddenObjective
from torch_ref import losses as torch_losses
from torch_ref.step import as_tensor

PAIRS = ((0, 1), (2, 0))


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("kind", HIDDEN_KINDS)
def test_the_distance_and_its_gradients(kind, projected):
    rng = np.random.default_rng(3)
    student = rng.normal(size=(2, 3, 7, 12)).astype(np.float32)
    teacher = rng.normal(1, 2, size=(3, 7, 2, 20 if projected else 12)).astype(np.float32)
    mask = rng.random((3, 7)) < 0.6
    student[:, ~mask] = np.nan
    weight = rng.normal(size=(2, 20, 12)).astype(np.float32) / 4 if projected else None

    def total(student, weight):
        return hidden_sum(student, teacher, jnp.asarray(mask), weight, kind=kind)

    graded = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), compiler_options=QUICK_COMPILE)
    value, gradients = graded(student, weight)
    leaves = (student, weight)
    tensors = [None if x is None else torch.tensor(x, requires_grad=True) for x in leaves]
    expected = torch_losses.hidden_sum(
        list(tensors[0]),
        torch.tensor(teacher),
        torch.tensor(mask),
        tensors[1],
        HiddenObjective(PAIRS, kind),
    )
    expected.backward()
    assert_close(f"hidden states, {kind}", "distance", value, expected, FP32)
    for name, got, tensor in zip(("student", "projection"), gradients, tensors, strict=True):
        if tensor is not None:
            assert_close(f"hidden states, {kind}", name, got, tensor.grad, WORST)


def test_a_cache_gives_torch_the_states_that_it_gives_jax():
    path = Path(jax_distill.cache.__file__).parent / "fixture_format3"
    states = Cache.open(str(path)).read([2, 0], hidden_layers=[1]).teacher_layers
    assert states.shape == (2, 4, 1, 2) and states.dtype.name == "bfloat16"
    tensor = as_tensor(states, torch.device("cpu"))
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(
        tensor.float().numpy(), np.asarray(jnp.asarray(states), np.float32)
    )
