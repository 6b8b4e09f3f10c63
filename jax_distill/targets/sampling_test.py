"""Ids drawn from the teacher, and as many as reach p: against float64, and on the average over many
draws against the whole distribution.

Every number is a function of fixed seeds, so a bound of five standard errors either holds or not.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.batch import Batch
from jax_distill.cache import row_uniforms
from jax_distill.cache.draws import GROUP
from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Head, loss, token_values
from jax_distill.losses.float64_test import log_softmax
from jax_distill.objective import Execution, Objective
from jax_distill.synthetic import exact_targets, loss_inputs
from jax_distill.targets.capture import topk_targets
from jax_distill.targets.sampling import drawn_ids

VOCAB = 2 * GROUP + 77  # the last group is not full


def teacher_logits(positions: int, seed: int = 0) -> np.ndarray:
    """float32 [1,T,V], of deviation 3."""
    return np.random.default_rng(seed).normal(0, 3, (1, positions, VOCAB)).astype(np.float32)


def targets(z: np.ndarray, uniforms: np.ndarray | None = None, **options):
    """`topk_targets` of given logits: a head that is the identity."""
    options = {"vocab_size": VOCAB, "temperatures": (1.0,), "chunk_size": 64} | options
    call = jax.jit(partial(topk_targets, **options), compiler_options=QUICK_COMPILE)
    return jax.device_get(call(z, np.eye(VOCAB, dtype=np.float32), uniforms))


def test_ids_are_drawn_as_often_as_their_probability_says():
    """40,000 draws at each of 4 positions: n p ± 5 √(n p (1−p)) of every id expected 5 times
    or more (fewer are no normal deviates), and of all others of a position together."""
    weights = np.exp(teacher_logits(4, seed=1)).astype(np.float32)
    weights[..., GROUP : GROUP + 50] = 0.0
    uniforms = row_uniforms([7], 4, 40_000)
    ids = np.asarray(jax.jit(drawn_ids)(weights, uniforms))[0]
    p = weights[0].astype(np.float64) / weights[0].sum(axis=-1, keepdims=True, dtype=np.float64)
    counts = np.stack([np.bincount(each, minlength=VOCAB) for each in ids])
    n = ids.shape[-1]
    assert not counts[p == 0].any()
    seldom = n * p < 5
    p = np.concatenate([np.where(seldom, 0, p), (p * seldom).sum(-1, keepdims=True)], axis=-1)
    others = (counts * seldom).sum(-1, keepdims=True)
    counts = np.concatenate([np.where(seldom, 0, counts), others], axis=-1)
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
def test_the_least_and_the_largest_number_draw_ids_that_are_possible(u):
    """Rounding of u·Σ must not reach beyond the last id that has a probability."""
    weights = np.zeros((VOCAB,), np.float32)
    weights[[3, 5, GROUP + 9]] = 0.1, 0.7, 1e-9
    (found,) = np.asarray(drawn_ids(weights, np.full((1, 2), u, np.float32)))
    assert found == (3 if u == 0 else GROUP + 9 if weights.sum() > weights[:GROUP].sum() else 5)


def test_a_row_has_the_same_draws_in_any_batch_and_no_two_rows_have():
    both = row_uniforms([4, 9], 3, 5)
    np.testing.assert_array_equal(both[1], row_uniforms([9], 3, 5)[0])
    assert both.dtype == np.float32 and both.min() >= 0 and both.max() < 1
    assert len(np.unique(both)) == both.size


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_sample_is_stored_as_the_definition_says(temperature):
    """Distinct ids by logit, their counts; gaps to the largest of all logits, drawn or not; the
    tail is the rest's probability, as float64 has it."""
    z, uniforms = teacher_logits(9), row_uniforms([2], 9, 30)
    found, finite = targets(z, uniforms, top_k=30, temperatures=(temperature,), chunk_size=4)
    assert finite.all()
    weights = np.exp((z - z.max(axis=-1, keepdims=True)) / np.float32(temperature))
    drawn = np.asarray(drawn_ids(weights, uniforms))[0]
    log_p = log_softmax(z[0].astype(np.float64) / temperature)
    for position in range(9):
        ids, draws = np.unique(drawn[position], return_counts=True)
        order = np.argsort(-z[0, position, ids], kind="stable")
        ids, draws, count = ids[order], draws[order], len(ids)
        assert found.count[0, position] == count
        np.testing.assert_array_equal(found.indices[0, position, :count], ids)
        np.testing.assert_array_equal(found.draws[0, position, :count], draws)
        gaps = z[0, position].max() - z[0, position, ids]
        np.testing.assert_array_equal(found.gaps[0, position, :count], gaps.astype(np.float16))
        rest = np.delete(log_p[position], ids)
        wanted = np.log(np.exp(rest).sum())
        assert found.log_tail[0, position, 0] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        for name in ("indices", "gaps", "draws"):
            assert not getattr(found, name)[0, position, count:].any()


def test_top_p_keeps_as_many_as_reach_it_and_the_rest_joins_the_tail():
    """One always; all K where they do not reach p. Decoded, the K and the tail sum to 1."""
    z = teacher_logits(40) * np.linspace(0.05, 6, 40, dtype=np.float32)[:, None]
    found, _ = targets(z, top_k=20, top_p=0.8, temperatures=(1.0, 2.0))
    log_p = np.sort(log_softmax(z[0].astype(np.float64)))[:, ::-1]
    reached = np.cumsum(np.exp(log_p), axis=-1) >= 0.8
    wanted = np.minimum(reached.argmax(axis=-1) + 1, 20)
    assert {1, 20} <= set(wanted.tolist()) and len(set(wanted.tolist())) > 5
    np.testing.assert_array_equal(found.count[0], wanted)
    for temperature in (1.0, 2.0):
        at_tau = np.sort(log_softmax(z[0].astype(np.float64) / temperature))[:, ::-1]
        decoded = found.decode(temperature)
        for position, count in enumerate(wanted):
            tail = np.log(np.exp(at_tau[position, count:]).sum())
            assert decoded.log_tail[0, position] == pytest.approx(tail, rel=1e-4, abs=1e-5)
            got = decoded.logprobs[0, position]
            np.testing.assert_allclose(got[:count], at_tau[position, :count], atol=4e-3)
            assert (got[count:] == -np.inf).all() and not found.gaps[0, position, count:].any()


def student(positions: int):
    """hidden [1,T,8] and weight [V,8] of a student that is not the teacher."""
    rng = np.random.default_rng(5)
    hidden = rng.normal(0, 1, (1, positions, 8)).astype(np.float32)
    return hidden, rng.normal(0, 1, (VOCAB, 8)).astype(np.float32)


def batch_of(sample, positions: int) -> Batch:
    grid = np.ones((1, positions), np.int32)
    return Batch(labels=grid, mask=grid.astype(bool), targets=sample)


def values_and_gradients(hidden, weight, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """KL [T] and ∂(its sum)/∂hidden [T,8]: each position's own."""

    def total(hidden):
        values = token_values(hidden, Head(weight), batch)
        return jnp.sum(values.loss), values.kl

    gradient, kl = jax.jit(jax.grad(total, has_aux=True), compiler_options=QUICK_COMPILE)(hidden)
    return np.asarray(kl[0], np.float64), np.asarray(gradient[0], np.float64)


def test_on_the_average_over_draws_value_and_gradient_are_those_of_the_whole_vocabulary():
    """2,000 samples of 12 draws from one teacher at τ = 2 against one student: their mean KL and
    their mean gradient are within five standard errors of the full ones, computed in float64. The
    bucket over the same ids is not: it is biased."""
    repeats, temperature = 2000, 2.0
    z, hidden, weight = teacher_logits(1), *student(1)
    many = np.repeat(z, repeats, axis=1), np.repeat(hidden, repeats, axis=1)
    uniforms = row_uniforms([0], repeats, 12)
    encoded, _ = targets(many[0], uniforms, top_k=12, temperatures=(temperature,))
    sample = encoded.decode(temperature)
    log_p = log_softmax(z[0, 0].astype(np.float64) / temperature)
    z_student = hidden[0, 0].astype(np.float64) @ weight.T.astype(np.float64)
    log_q = log_softmax(z_student / temperature)
    full = (np.exp(log_p) * (log_p - log_q)).sum()
    d_hidden = temperature * (np.exp(log_q) - np.exp(log_p)) @ weight.astype(np.float64)  # τ²/τ

    def off(sample) -> tuple[float, np.ndarray]:
        """By how many standard errors the means are off."""
        kl, gradient = values_and_gradients(many[1], weight, batch_of(sample, repeats))
        error = [x.std(axis=0, ddof=1) / repeats**0.5 for x in (kl, gradient)]
        return (kl.mean() - full) / error[0], (gradient.mean(axis=0) - d_hidden) / error[1]

    value, gradient = off(sample)
    assert abs(value) <= 5 and (np.abs(gradient) <= 5).all(), (value, gradient)
    value, gradient = off(replace(sample, draws=None))
    assert abs(value) > 20 and (np.abs(gradient) > 20).any()


@pytest.mark.parametrize("implementation", ["dense", "fused"])  # the other two run their lines
def test_draws_in_proportion_to_the_teacher_give_the_full_kl_exactly(implementation):
    """p_v = n_v / M with every id drawn n_v times: value and gradients are those of the whole
    vocabulary, computed in float64; the tail, whichever is set, has nothing to say."""
    vocab_size, rng = 23, np.random.default_rng(3)
    hidden, weight, batch, *_ = loss_inputs(
        2, 13, width=8, vocab_size=vocab_size, top_k=1, valid=0.7
    )
    draws, mask = rng.integers(1, 40, (2, 13, vocab_size)), batch.mask[..., None]
    whole = exact_targets(np.log(draws.astype(np.float64)), top_k=vocab_size)
    ordered = np.take_along_axis(draws, whole.indices, axis=-1).astype(np.int32)
    drawn = replace(batch, targets=replace(whole, draws=ordered))

    def value(hidden, weight):
        execution = Execution(implementation, chunk_size=8)
        sums = loss(hidden, Head(weight), drawn, Objective(tail="ignore"), execution)
        return sums.loss, sums

    call = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True), compiler_options=QUICK_COMPILE)
    (d_hidden, d_weight), sums = call(hidden, weight)
    x, w = hidden.astype(np.float64), weight.astype(np.float64)
    p, log_q = draws / draws.sum(axis=-1, keepdims=True), log_softmax(x @ w.T)
    dz = np.where(mask, np.exp(log_q) - p, 0.0)
    wanted = np.where(mask, p * (np.log(p) - log_q), 0.0).sum()
    assert sums.kl == pytest.approx(wanted, rel=1e-5) and int(sums.count) == mask.sum()
    for got, exact in ((d_hidden, dz @ w), (d_weight, np.einsum("btv,btd->vd", dz, x))):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * float(np.abs(exact).max()))


def test_what_a_sample_cannot_give_is_refused():
    hidden, weight, batch, *_ = loss_inputs(1, 4, width=8, vocab_size=23, top_k=5)
    assert batch.targets is not None
    sample = replace(batch.targets, draws=np.ones((1, 4, 5), np.int32))
    with pytest.raises(ValueError, match="a random sample; read all of it"):
        sample.first(2)
    drawn = replace(batch, targets=sample)
    for divergence in ("reverse_kl", "jsd"):
        with pytest.raises(ValueError, match="expected divergence forward_kl with targets drawn"):
            loss(hidden, Head(weight), drawn, Objective(divergence=divergence))
    short = replace(batch, targets=replace(sample, draws=sample.draws[..., :2]))
    with pytest.raises(ValueError, match="targets.draws of shape"):
        loss(hidden, Head(weight), short)
