"""The PyTorch losses where floating point could fail: zero probabilities, bf16, tiny tails."""

import math
from dataclasses import replace

import pytest
import torch

from jax_distill.batch import Batch, TopK
from jax_distill.objective import DIVERGENCES, TAILS, Objective
from jax_distill.synthetic import rounding, rounding_by_norm
from torch_ref.losses import Head, loss
from torch_ref.losses_test import (
    ALL_WEIGHTS,
    CHUNKED,
    EVERY,
    Problem,
    by_hand,
    gradients,
    problem,
    run,
)


@pytest.mark.parametrize("tail", TAILS)
@EVERY
def test_zero_probabilities_and_a_whole_vocabulary_stay_finite(implementation, tail):
    given = problem(V=6, K=6)
    logprobs = given.targets.logprobs.clone()
    logprobs[..., -1] = -math.inf
    given = given.with_targets(
        count=torch.full_like(given.targets.count, 6),
        log_tail=torch.full_like(given.targets.log_tail, -math.inf),
        logprobs=logprobs,
    )
    for divergence in DIVERGENCES:
        objective = Objective(tail=tail, divergence=divergence)
        got = run(implementation, given, objective)
        assert got.kl.item() == pytest.approx(by_hand(given, objective).kl, rel=1e-9)
        for gradient in gradients(implementation, given, objective):
            assert gradient.isfinite().all()


@EVERY
def test_a_position_without_any_stored_token_teaches_nothing(implementation):
    given = problem()
    given = given.with_targets(
        count=torch.zeros_like(given.targets.count),
        log_tail=torch.zeros_like(given.targets.log_tail),
    )
    for tail in TAILS:
        for divergence in DIVERGENCES:
            objective = Objective(tail=tail, divergence=divergence)
            if tail != "renormalize" or divergence == "forward_kl":  # else the floor, a constant
                assert run(implementation, given, objective).loss.abs() < 1e-12
            found = gradients(implementation, given, objective)
            assert all(g.abs().max() < 1e-12 for g in found)


@EVERY
def test_cross_entropy_needs_no_teacher(implementation):
    given = problem()
    alone = given._replace(batch=replace(given.batch, targets=None))
    objective = Objective(kl_weight=0.0, ce_weight=1.0)
    got = run(implementation, alone, objective)
    assert got.loss.item() == pytest.approx(by_hand(given, objective).loss, rel=1e-12)
    assert got.kl.isnan() and got.teacher_mass.isnan() and got.top1_agreement.isnan()
    found = gradients(implementation, alone, objective)
    for ours, expected in zip(found, gradients("dense", given, objective), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)


@EVERY
def test_a_student_equal_to_the_teacher_has_no_loss_in_bf16_at_large_logits(implementation):
    """Case 17."""
    given = problem(B=1, T=16, D=32, V=500, K=20, dtype=torch.bfloat16)
    hidden, weight = given.hidden.detach(), given.head.weight.detach()
    factor = 80 / (hidden.double() @ weight.double().T).abs().max()
    weight = (weight.double() * factor).bfloat16()
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    top, ids = log_p.topk(20, -1)
    given = given._replace(head=Head(weight.requires_grad_())).with_targets(
        indices=ids,
        logprobs=top.float(),
        log_tail=log_p.scatter(-1, ids, -math.inf).logsumexp(-1).float(),
        count=torch.full((1, 16), 20),
    )
    sums = run(implementation, given, chunk_size=5)
    assert sums.loss.dtype == torch.float32
    # A token's logit, logsumexp and stored log p are rounded at their size, up to 80.
    assert sums.kl / sums.count < rounding("float32", 3, 80 + math.log(500))
    # A logit is a sum of 32 products; its error is the relative one of q.
    size = (hidden.double().abs() @ weight.double().abs().T).max().item()
    of_q = rounding("float32", 32 + 3, size)
    for gradient, other, tokens in zip(
        gradients(implementation, given, chunk_size=5), (weight, hidden), (1, 16), strict=True
    ):
        assert gradient.dtype == torch.bfloat16
        assert gradient.abs().max() < tokens * of_q * other.abs().max()


@pytest.mark.parametrize("implementation", CHUNKED)
def test_bf16_head_gradient_is_summed_in_float32_over_many_chunks(implementation):
    given = problem(B=2, T=64, D=16, V=300, K=8, dtype=torch.bfloat16, seed=3)
    hidden, weight = (x.detach().double() for x in (given.hidden, given.head.weight))
    exact = Problem(hidden.requires_grad_(), Head(weight.requires_grad_()), given.batch)
    for got, expected in zip(
        gradients(implementation, given, chunk_size=4), gradients("dense", exact), strict=True
    ):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < rounding_by_norm("bfloat16", 2)  # dlogits, and the result


@EVERY
def test_a_float32_head_under_bf16_hidden_is_rounded_in_the_matmuls_only(implementation):
    low = problem(scale=3.0, temperature=2.0, dtype=torch.bfloat16)
    weight = low.head.weight.detach().float()
    fp32, nudged = (
        low._replace(head=Head((weight * factor).requires_grad_())) for factor in (1, 1 + 1e-4)
    )
    value = run(implementation, low, ALL_WEIGHTS).loss
    assert value == run(implementation, fp32, ALL_WEIGHTS).loss
    assert value == run(implementation, nudged, ALL_WEIGHTS).loss
    d_head = gradients(implementation, fp32, ALL_WEIGHTS)[1]
    assert d_head.dtype == torch.float32
    assert not torch.equal(d_head, d_head.bfloat16().float())
    assert torch.equal(d_head.bfloat16(), gradients(implementation, low, ALL_WEIGHTS)[1])


@EVERY
def test_a_frozen_head_gets_no_gradient_and_no_grad_mode_only_the_value(implementation):
    """Case 25."""
    given = problem()
    given = given._replace(head=Head(given.head.weight.detach()))
    value = run(implementation, given).loss
    (d_hidden,) = torch.autograd.grad(value, [given.hidden])
    assert d_hidden.any()
    with torch.no_grad():
        assert run(implementation, given).loss == value


def test_a_tiny_tail_keeps_its_gradient_in_float32():
    """Case 21: top-1 probability 1 − 1e-6, tail 1e-9."""
    p = torch.tensor([1 - 1e-6, 1e-6 - 1e-9], dtype=torch.float64)
    z = torch.tensor([[12.0, -2.0, -9.0, -11.0, -8.5]], dtype=torch.float64)
    results = []
    for dtype in (torch.float64, torch.float32):
        hidden = z[None].to(dtype).requires_grad_()
        eye = torch.eye(5, dtype=dtype, requires_grad=True)
        targets = TopK(
            indices=torch.tensor([[[0, 1]]]),
            logprobs=p.log().to(dtype)[None, None],
            log_tail=torch.full((1, 1), math.log(1e-9), dtype=dtype),
            count=torch.tensor([[2]]),
        )
        labels, mask = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
        value = loss(hidden, Head(eye), Batch(labels, mask, targets)).loss
        results.append(torch.autograd.grad(value, hidden)[0][0, 0].double())
    outside = slice(2, None)
    # d/dz = q_k (1 − p_t/q_t); q_k, q_t and p_t are exponentials of rounded numbers near −21.
    q_tail = z[0].softmax(-1)[outside].sum().item()
    limit = rounding("float32", 6, 21 * (q_tail + 1e-9) / abs(q_tail - 1e-9))
    torch.testing.assert_close(results[1][outside], results[0][outside], rtol=limit, atol=0)


@pytest.mark.parametrize("implementation", CHUNKED)
def test_more_logit_outside_k_raises_every_loss_but_ignore(implementation):
    """Case 20, at one position."""
    given = problem(V=11, K=3)
    mask = torch.zeros_like(given.batch.mask)
    mask[0, 0] = True
    given = given._replace(batch=replace(given.batch, mask=mask))
    outside = set(range(11)) - set(given.targets.indices[0, 0].tolist())
    bias = torch.zeros(11, dtype=torch.float64)
    bias[min(outside)] = 20.0
    raised = given._replace(head=given.head._replace(bias=bias))
    for tail in TAILS:
        before, after = (run(implementation, x, Objective(tail=tail)) for x in (given, raised))
        rise = ((after.kl - before.kl) / before.count).item()
        assert abs(rise) < 1e-9 if tail == "ignore" else rise > 1
