"""The PyTorch losses against the formula: float64 loops over positions, and finite differences."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from jax_distill.batch import Batch, TopK
from jax_distill.objective import (
    DIVERGENCES,
    IMPLEMENTATIONS,
    LOG_FLOOR,
    TAILS,
    Execution,
    Objective,
)
from jax_distill.synthetic import loss_inputs
from torch_ref.losses import Head, LossSums, TokenValues, loss, token_values

EVERY = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
CHUNKED = [name for name in IMPLEMENTATIONS if name != "dense"]
ALL_WEIGHTS = Objective(ce_weight=0.3, z_loss_weight=1e-2, kl_weight=0.7)


class Problem(NamedTuple):
    """Arguments of a loss, as tensors; hidden and head.weight take gradients."""

    hidden: torch.Tensor
    head: Head
    batch: Batch

    def with_targets(self, **fields: torch.Tensor) -> "Problem":
        assert self.batch.targets is not None
        return self._replace(batch=replace(self.batch, targets=replace(self.targets, **fields)))

    @property
    def targets(self) -> TopK:
        assert self.batch.targets is not None
        return self.batch.targets


def problem(
    *, B=2, T=5, D=4, V=11, K=3, scale=1.0, temperature=1.0, seed=0, dtype=torch.float64
) -> Problem:
    """A student beside a teacher of its own, with holes in the mask and short counts."""
    found = loss_inputs(
        B,
        T,
        width=D,
        vocab_size=V,
        top_k=K,
        scale=scale,
        temperature=temperature,
        valid=0.7,
        seed=seed,
    )
    batch = found.batch.map(torch.tensor)
    count = np.random.default_rng(seed).integers(1, K + 1, size=(B, T))
    count[0, 0] = K
    batch.mask[0, 0] = True
    batch = replace(batch, targets=replace(batch.targets, count=torch.tensor(count)))
    hidden, weight = (torch.tensor(x).to(dtype) for x in (found.hidden, found.weight))
    return Problem(hidden.requires_grad_(), Head(weight.requires_grad_()), batch)


def run(implementation, given: Problem, objective=Objective(), chunk_size=4) -> LossSums:
    return loss(*given, objective, Execution(implementation, chunk_size))


def gradients(implementation, given: Problem, objective=Objective(), factor=1.0, **options):
    value = run(implementation, given, objective, **options).loss * factor
    return torch.autograd.grad(value, [given.hidden, given.head.weight])


def divergence_by_hand(p, q, objective: Objective):
    def kl(a, b):
        pairs = zip(a, b, strict=True)
        return sum(x * (math.log(x) - (math.log(y) if y else LOG_FLOOR)) for x, y in pairs if x)

    if objective.divergence == "forward_kl":
        return kl(p, q)
    if objective.divergence == "reverse_kl":
        return kl(q, p)
    beta = objective.jsd_beta
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def values_by_hand(given: Problem, objective=Objective()) -> dict[tuple[int, int], TokenValues]:
    """Every value, in probability space, one valid position at a time."""
    hidden, weight = (x.detach().double().numpy() for x in (given.hidden, given.head.weight))
    targets, temperature = given.targets.map(lambda x: x.numpy()), given.targets.temperature
    found = {}
    for b, t in np.argwhere(given.batch.mask.numpy()).tolist():
        z = weight @ hidden[b, t]
        q_all = np.exp(z / temperature) / np.exp(z / temperature).sum()
        n = int(targets.count[b, t])
        ids = targets.indices[b, t, :n].astype(int)
        p = list(np.exp(targets.logprobs[b, t, :n].astype(np.float64)))
        p_tail = float(np.exp(targets.log_tail[b, t].astype(np.float64)))
        q = list(q_all[ids])
        q_tail = float(np.delete(q_all, ids).sum())
        P, Q = sum(p), sum(q)
        outcomes = {
            "bucket": ([*p, p_tail], [*q, q_tail]),
            "renormalize": ([*(x / P for x in p), 0.0], [*q, q_tail]),
            "truncate": (p, q),
            "ignore": ([x / P for x in p], [x / Q for x in q]),
        }
        kl = divergence_by_hand(*outcomes[objective.tail], objective)
        log_z = math.log(np.exp(z).sum())
        cross_entropy = log_z - z[int(given.batch.labels[b, t])]
        found[b, t] = TokenValues(
            loss=objective.kl_weight * temperature**2 * kl
            + objective.ce_weight * cross_entropy
            + objective.z_loss_weight * log_z**2,
            kl=kl,
            cross_entropy=cross_entropy,
            z_loss=log_z**2,
            teacher_mass=P,
            student_mass=Q,
            top1_agreement=float(ids[0] == z.argmax()),
        )
    return found


def by_hand(given: Problem, objective=Objective()) -> LossSums:
    values = values_by_hand(given, objective)
    return LossSums(*np.sum(list(values.values()), axis=0), len(values))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
@EVERY
def test_every_sum_equals_the_formula_and_the_gradient_its_finite_differences(
    implementation, tail, divergence
):
    given = problem(temperature=2.0)
    objective = replace(ALL_WEIGHTS, tail=tail, divergence=divergence, jsd_beta=0.3)
    got = run(implementation, given, objective)
    np.testing.assert_allclose([x.item() for x in got], by_hand(given, objective), rtol=1e-12)

    def value(hidden, weight):
        return run(implementation, Problem(hidden, Head(weight), given.batch), objective).loss

    assert torch.autograd.gradcheck(value, (given.hidden, given.head.weight), fast_mode=True)


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_token_values_are_the_formulas_at_every_position_and_0_where_masked(chunk_size):
    given = problem(temperature=2.0)
    got = token_values(*given, ALL_WEIGHTS, Execution(chunk_size=chunk_size))
    expected = values_by_hand(given, ALL_WEIGHTS)
    assert not any(x[~given.batch.mask].any() for x in got)
    for (b, t), values in expected.items():
        np.testing.assert_allclose([x[b, t].item() for x in got], values, rtol=1e-12)
    ours = torch.autograd.grad(got.loss.sum(), [given.hidden, given.head.weight])
    for g, e in zip(ours, gradients("dense", given, ALL_WEIGHTS), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("chunk_size", [1, 6, 10, 64])
@pytest.mark.parametrize("implementation", CHUNKED)
def test_any_chunk_size_gives_the_dense_loss_and_gradients(implementation, chunk_size, temperature):
    given = problem(T=5, scale=5.0, temperature=temperature)
    options = dict(objective=Objective(ce_weight=0.5), chunk_size=chunk_size)
    np.testing.assert_allclose(
        [x.item() for x in run(implementation, given, **options)],
        [x.item() for x in run("dense", given, **options)],
        rtol=1e-12,
    )
    for got, expected in zip(
        gradients(implementation, given, **options),
        gradients("dense", given, **options),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("implementation", CHUNKED)
def test_a_chunk_has_the_logits_of_chunk_size_tokens_whatever_the_batch(
    implementation, monkeypatch
):
    """Its one meaning: tokens, not positions of each row."""
    seen = []
    finish = Head.finish
    monkeypatch.setattr(Head, "finish", lambda head, z: (seen.append(len(z)), finish(head, z))[1])
    for rows in (1, 2, 4):
        seen.clear()
        run(implementation, problem(B=rows, T=9), chunk_size=8)
        assert max(seen) == 8 and sum(seen) == 9 * rows


@EVERY
def test_bias_scale_and_soft_cap_reach_loss_and_gradients(implementation):
    """Case 24."""
    given = problem(temperature=2.0)
    plain = run(implementation, given, ALL_WEIGHTS).loss
    bias = torch.linspace(-2, 2, 11, dtype=torch.float64, requires_grad=True)

    def value(hidden, weight, bias):
        head = Head(weight, bias, soft_cap=3.0, logit_scale=0.5)
        return run(implementation, Problem(hidden, head, given.batch), ALL_WEIGHTS).loss

    leaves = (given.hidden, given.head.weight, bias)
    assert (value(*leaves) - plain).abs() > 0.1
    assert torch.autograd.gradcheck(value, leaves)


@EVERY
def test_padding_of_the_head_takes_no_part(implementation):
    given = problem()
    padding = torch.full((5, 4), 9.0, dtype=torch.float64)
    padded = torch.cat([given.head.weight.detach(), padding]).requires_grad_()
    bias = torch.zeros(16, dtype=torch.float64)
    wide = given._replace(head=Head(padded, bias, vocab_size=11))
    assert run(implementation, wide).loss == run(implementation, given).loss
    d_head = gradients(implementation, wide)[1]
    torch.testing.assert_close(d_head[:11], gradients(implementation, given)[1])
    assert not d_head[11:].any()


@EVERY
def test_teacher_ids_that_the_student_lacks_join_the_tail(implementation):
    """Case 1."""
    given = problem(V=11, K=11)
    given = given.with_targets(count=torch.full_like(given.targets.count, 11))
    batch = replace(given.batch, labels=given.batch.labels.clamp(max=7))
    narrow = Problem(given.hidden, Head(given.head.weight.detach()[:8].requires_grad_()), batch)
    indices, logprobs = given.targets.indices, given.targets.logprobs
    keep = indices < 8
    order = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    folded = narrow.with_targets(
        indices=indices.gather(-1, order),
        logprobs=logprobs.gather(-1, order),
        log_tail=torch.where(keep, -math.inf, logprobs.double()).logsumexp(-1),
        count=keep.sum(-1),
    )
    expected = by_hand(folded)
    got = run(implementation, narrow)
    assert got.kl.isfinite() and got.kl.item() == pytest.approx(expected.kl, rel=1e-12)
    assert got.teacher_mass.item() == pytest.approx(expected.teacher_mass, rel=1e-12)


@EVERY
def test_masked_cells_may_hold_anything(implementation):
    """Case 13."""
    given = problem()
    hole = ~given.batch.mask
    assert hole.any()

    def dirty(x, value):
        x = x.detach().clone()
        x[hole] = value
        return x

    targets = replace(
        given.targets,
        indices=dirty(given.targets.indices, -5),
        logprobs=dirty(given.targets.logprobs, math.inf),
        log_tail=dirty(given.targets.log_tail, math.nan),
        count=dirty(given.targets.count, 99),
    )
    batch = replace(given.batch, labels=dirty(given.batch.labels, 10**6), targets=targets)
    hidden = dirty(given.hidden, math.nan).requires_grad_()
    changed = Problem(hidden, given.head, batch)
    sums, same = run(implementation, given), run(implementation, changed)
    assert all(a == b for a, b in zip(sums, same, strict=True))
    d_hidden, d_head = gradients(implementation, changed)
    assert not d_hidden[hole].any()
    for got, expected in zip((d_hidden, d_head), gradients(implementation, given), strict=True):
        assert torch.equal(got, expected)


@EVERY
def test_no_valid_token_gives_zero_loss_and_gradient(implementation):
    """Case 11."""
    given = problem()
    batch = replace(given.batch, mask=torch.zeros_like(given.batch.mask))
    given = given._replace(batch=batch)
    assert all(x == 0 for x in run(implementation, given))
    assert all(not g.any() for g in gradients(implementation, given))


@EVERY
def test_the_incoming_gradient_scales_both_gradients(implementation):
    """Case 23."""
    given = problem()
    once, more = gradients(implementation, given), gradients(implementation, given, factor=3.7)
    for a, b in zip(once, more, strict=True):
        torch.testing.assert_close(b, 3.7 * a, rtol=1e-12, atol=0)


def test_what_does_not_fit_together_is_a_value_error():
    given = problem()
    zero = replace(given.targets, temperature=0.0)
    for wrong, word in (
        (given._replace(batch=replace(given.batch, targets=None)), "kl_weight"),
        (given._replace(batch=replace(given.batch, targets=zero)), "temperature"),
        (given._replace(hidden=given.hidden[:1]), "labels"),
        (given._replace(head=given.head._replace(vocab_size=12)), "vocab_size"),
        (given._replace(head=given.head._replace(weight=given.head.weight.T)), "transpose it"),
        (given._replace(head=given.head._replace(weight=given.head.weight[:, 1:])), "one model"),
        (given._replace(hidden=given.hidden[0]), "hidden"),
        (given.with_targets(count=given.targets.count[:, :2]), "targets.count"),
    ):
        for function in (loss, token_values):
            with pytest.raises(ValueError, match=word):
                function(*wrong)
