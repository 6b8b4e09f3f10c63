"""Tokens that do not count: they change nothing, and where it is asked for they cost nothing."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jax_distill.batch import Batch, TopK
from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import chunked, dlogits, kl_and_grads, loss
from jax_distill.losses.agreement_test import (
    EVERY,
    RTOL,
    Case,
    assert_agrees,
    chunks_of,
    expected,
    make_case,
    relative_error,
    run,
)
from jax_distill.objective import Objective


def poisoned(hidden: np.ndarray, batch: Batch) -> tuple[np.ndarray, Batch]:
    """The same with NaN, ±inf and ids out of range in all masked cells."""
    hole = ~batch.mask
    wild = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), hole.sum())

    def fill(x: np.ndarray, value: float) -> np.ndarray:
        x = x.copy()
        x[hole] = value
        return x

    assert batch.targets is not None
    targets = TopK(
        indices=fill(batch.targets.indices, 1 << 30),
        logprobs=fill(batch.targets.logprobs, np.nan),
        log_tail=fill(batch.targets.log_tail, np.inf),
        count=fill(batch.targets.count, 1000),
        draws=None if batch.targets.draws is None else fill(batch.targets.draws, -1),
        temperature=batch.targets.temperature,
    )
    hidden = hidden.copy()
    hidden[hole] = wild[:, None]
    return hidden, replace(batch, labels=fill(batch.labels, -100), targets=targets)


def with_mask(case: Case, mask: np.ndarray) -> Case:
    return case._replace(batch=replace(case.batch, mask=mask))


@pytest.mark.parametrize("valid_first", [False, True])
@pytest.mark.parametrize("implementation", EVERY)
def test_what_stands_in_masked_cells_never_matters(implementation, valid_first):
    """Case 13: NaN, ±inf, ids out of range."""
    case = make_case(13)
    hole = ~case.batch.mask
    assert hole[0].any() and hole[1].any()
    hidden, batch = poisoned(case.hidden, case.batch)
    beside_nan = case.batch.targets.indices.copy()  # the ids may also look right
    beside_nan[1] = batch.targets.indices[1]
    batch = replace(batch, targets=replace(batch.targets, indices=beside_nan))
    objective = Objective(ce_weight=0.5, z_loss_weight=0.1)
    got = run(implementation, Case(hidden, case.head, batch), objective, valid_first=valid_first)
    assert_agrees(got, expected(case, objective))
    assert not got[1]["hidden"][hole].any()
    usual = run(implementation, case, objective, valid_first=valid_first)
    assert got[0] == usual[0]  # what is masked adds exactly nothing
    for name, gradient in usual[1].items():
        np.testing.assert_array_equal(got[1][name], gradient)


@pytest.mark.parametrize("implementation", EVERY)
def test_padding_to_another_length_changes_nothing(implementation):
    """Case 12: T = 32 and 64."""
    case = make_case(14, length=32)
    longer = jax.tree.map(
        lambda x: np.concatenate([x, np.zeros_like(x)], axis=1), (case.hidden, case.batch)
    )
    longer = Case(longer[0], case.head, longer[1])
    short, long = (run(implementation, each, chunk=16) for each in (case, longer))
    assert short[0]["count"] == long[0]["count"]
    # The same terms, summed in other groups.
    assert long[0]["loss"] == pytest.approx(short[0]["loss"], rel=RTOL)
    assert relative_error(long[1]["hidden"][:, :32], short[1]["hidden"]) < RTOL
    assert relative_error(long[1]["weight"], short[1]["weight"]) < RTOL


@pytest.mark.parametrize("implementation", EVERY)
def test_a_batch_with_no_valid_token_is_zero(implementation):
    case = make_case(15, rows=1, length=6, valid=0.0)
    sums, gradients = run(implementation, case, Objective(ce_weight=1.0))
    assert set(sums.values()) == {0.0}
    assert not gradients["hidden"].any() and not gradients["weight"].any()


@pytest.mark.parametrize("implementation", EVERY)
def test_valid_positions_first_changes_no_number(implementation):
    case = make_case(27, length=23)
    mask = case.batch.mask.copy()
    mask[0, 3:19] = False  # rows with unlike numbers of valid positions
    case = with_mask(case, mask)
    assert_agrees(run(implementation, case, valid_first=True), expected(case))


@pytest.mark.parametrize(
    ("implementation", "module", "name"),
    [
        ("forward_chunked", chunked, "project"),
        ("fused_chunked", chunked, "project"),
        ("fused", dlogits, "head_matmul"),
        ("kl_and_grads", dlogits, "head_matmul"),
    ],
)
def test_valid_positions_first_skips_the_empty_chunks(monkeypatch, implementation, module, name):
    """Of 24 positions in chunks of 4 the rows use 6 and 1: two chunks, not six, are projected."""
    projected = []
    matmul = getattr(module, name)

    def counted(*args):
        jax.debug.callback(lambda: projected.append(1))
        return matmul(*args)

    monkeypatch.setattr(module, name, counted)
    mask = np.zeros((2, 24), bool)
    mask[0, 18:], mask[1, 3] = True, True
    case = with_mask(make_case(28, length=24), mask)
    function = kl_and_grads if implementation == "kl_and_grads" else loss
    for valid_first, chunks in ((False, 6), (True, 2)):
        projected.clear()
        execution = chunks_of(4, case, implementation, valid_first=valid_first)
        call = partial(function, *case, execution=execution)
        jax.block_until_ready(jax.jit(call, compiler_options=QUICK_COMPILE)())
        jax.effects_barrier()
        assert len(projected) == chunks


def test_the_sums_of_micro_batches_are_those_of_the_batch():
    """One denominator: rows or positions apart add up, with uneven counts, value and gradient."""
    case = make_case(29, rows=4, length=12)
    case = with_mask(case, case.batch.mask & (np.arange(12) < np.array([[1], [12], [5], [0]])))
    whole, gradients = run("fused", case)
    for axis in (0, 1):
        halves = []
        for half in (0, 1):
            split = partial(np.split, indices_or_sections=2, axis=axis)
            part = jax.tree.map(lambda x, s=split, h=half: s(x)[h], (case.hidden, case.batch))
            halves.append(run("fused", Case(part[0], case.head, part[1])))
        for name in ("loss", "count", "cross_entropy"):
            total = sum(sums[name] for sums, _ in halves)
            assert total == pytest.approx(whole[name], rel=RTOL)
        d_hidden = np.concatenate([g["hidden"] for _, g in halves], axis)
        assert relative_error(d_hidden, gradients["hidden"]) < RTOL
        d_weight = sum(g["weight"] for _, g in halves)
        assert relative_error(d_weight, gradients["weight"]) < RTOL
