"""Gradients of the chunked losses where a shortcut would show: wide heads, biases, z-loss alone."""

import pytest
import torch

from jax_distill.objective import Execution, Objective
from torch_ref.losses import loss
from torch_ref.losses.chunked import HEAD_ROWS
from torch_ref.losses_test import CHUNKED, gradients, problem


@pytest.mark.parametrize("implementation", CHUNKED)
def test_the_heads_gradient_reaches_rows_beyond_the_first_block(implementation):
    """It is summed HEAD_ROWS rows at a time: three blocks, the last one short."""
    rows = 2 * HEAD_ROWS + 5
    given = problem(V=rows, D=2, T=3, B=1)
    objective = Objective(ce_weight=1.0)
    wanted = gradients("dense", given, objective)[1]
    got = gradients(implementation, given, objective)[1]
    for block in (slice(0, HEAD_ROWS), slice(HEAD_ROWS, 2 * HEAD_ROWS), slice(2 * HEAD_ROWS, rows)):
        assert wanted[block].norm() > 0
        torch.testing.assert_close(got[block], wanted[block], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("implementation", CHUNKED)
@pytest.mark.parametrize("temperature", [2.0, 4.0])
def test_the_z_loss_alone_moves_every_logit_at_any_temperature(implementation, temperature):
    given = problem(temperature=temperature)
    objective = Objective(kl_weight=0.0, z_loss_weight=0.1)
    hidden, weight = given.hidden.detach()[given.batch.mask], given.head.weight.detach()
    z = hidden @ weight.T
    d_z = 0.2 * z.logsumexp(-1, keepdim=True) * z.softmax(-1)
    got = gradients(implementation, given, objective)
    torch.testing.assert_close(got[1], d_z.T @ hidden, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got[0][given.batch.mask], d_z @ weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("implementation", CHUNKED)
def test_the_gradient_of_the_bias_is_summed_in_float32_over_many_chunks(implementation):
    """512 positions, one a chunk, in bf16; the float32 bias's gradient keeps float32's digits, up
    to the rounding of the operands, which are the same in both."""
    given = problem(B=1, T=512, V=31, D=8, dtype=torch.bfloat16)
    bias = torch.zeros(31, requires_grad=True)
    given = given._replace(head=given.head._replace(bias=bias))
    objective = Objective(kl_weight=0.0, ce_weight=1.0)

    def bias_gradient(chunk_size):
        value = loss(*given, objective, Execution(implementation, chunk_size)).loss
        return torch.autograd.grad(value, [bias])[0].double()

    whole, chunked = bias_gradient(512), bias_gradient(1)
    assert (chunked - whole).norm() < 512 * 2.0**-23 * whole.norm()
