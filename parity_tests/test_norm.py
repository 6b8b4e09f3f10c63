"""Rung "norm": our RMSNorm is transformers' LlamaRMSNorm, where eps matters and where not."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from ladder import BF16, assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from jax_distill.model.layers import Initializer, RMSNorm


def norms(width: int, eps: float) -> tuple[RMSNorm, LlamaRMSNorm]:
    weight = np.random.default_rng(1).normal(1, 0.5, width).astype(np.float32)
    ours = RMSNorm(Initializer(nnx.Rngs(0), 0.02, jnp.float32), (width,), (None,), eps=eps)
    ours.weight = nnx.Param(jnp.asarray(weight))
    theirs = LlamaRMSNorm(width, eps)
    theirs.weight.data = torch.tensor(weight)
    return ours, theirs


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_values(eps, magnitude):
    ours, theirs = norms(48, eps)
    x = np.random.default_rng(0).normal(size=(7, 48)).astype(np.float32) * magnitude
    assert_close("norm", f"x·{magnitude}, eps {eps}", ours(jnp.asarray(x)), theirs(torch.tensor(x)))


def test_values_of_bf16_input():
    """We multiply by the weight in fp32 and round once, transformers rounds before and after."""
    ours, theirs = norms(48, 1e-6)
    x = np.random.default_rng(0).normal(size=(7, 48)).astype(np.float32)
    got = ours(jnp.asarray(x, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    expected = theirs(torch.tensor(x, dtype=torch.bfloat16))
    assert_close("norm", "bf16", got, expected, BF16)
