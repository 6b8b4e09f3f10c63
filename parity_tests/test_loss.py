"""Rung "loss": both packages compute the same sums and gradients, whatever the objective.

Every tail × divergence × implementation, PyTorch against JAX on the same float32 inputs: masks with
holes, short counts, logits as peaked as a trained model's, lengths that the chunk does not divide.

Letters: B rows, T positions, D hidden, V vocabulary, K stored tokens.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ladder import as_numpy, assert_close, assert_numbers

import jax_distill.losses
import torch_ref.losses
from jax_distill.batch import Batch, TopK
from jax_distill.devices import QUICK_COMPILE
from jax_distill.objective import DIVERGENCES, IMPLEMENTATIONS, TAILS, Execution, Objective
from jax_distill.synthetic import loss_inputs, rounding

# Where all of JAX's chunked versions run the same lines, the definition and one of them stand for
# them (a program takes seconds to compile); torch_ref's are held against its dense one always.
IN_JAX = ("dense", "fused")
B, T, D, V, K = 2, 13, 16, 211, 7
# A logit is a sum of D products, and four steps more make a loss of it. Its error is the relative
# one of q = exp(z), and so a gradient's; logits have deviation 6 and are below 4 of these.
LOSS_TOLERANCE = rounding("float32", D + 4)
GRADIENT_TOLERANCE = rounding("float32", D + 4, 4 * 6.0)
CHUNK_SIZE = 4 * B  # tokens: 4 positions of each row
GRADIENTS = ("d_hidden", "d_weight", "d_bias")

Found = tuple[dict[str, float], list[np.ndarray]]  # sums by name, gradients


class Inputs(NamedTuple):
    """numpy hidden [B,T,D], weight [V,D], batch, bias [V] or None; the head's other fields."""

    hidden: np.ndarray
    weight: np.ndarray
    batch: Batch
    bias: np.ndarray | None = None
    head: dict[str, Any] = {}

    @property
    def targets(self) -> TopK:
        assert self.batch.targets is not None
        return self.batch.targets

    def with_batch(self, **fields: Any) -> "Inputs":
        return self._replace(batch=replace(self.batch, **fields))

    def with_targets(self, **fields: Any) -> "Inputs":
        return self.with_batch(targets=replace(self.targets, **fields))


def inputs(seed: int = 0, temperature: float = 1.0, **head: Any) -> Inputs:
    """A student on its way to the teacher; holes in the mask, short counts."""
    found = loss_inputs(
        B,
        T,
        width=D,
        vocab_size=V,
        top_k=K,
        temperature=temperature,
        scale=6.0,
        valid=0.7,
        seed=seed,
    )
    targets = found.batch.targets
    assert targets is not None
    count = np.random.default_rng(seed).integers(1, K + 1, size=(B, T)).astype(np.int32)
    dropped = np.where(np.arange(K) < count[..., None], -np.inf, targets.logprobs)
    log_tail = np.logaddexp(targets.log_tail, np.logaddexp.reduce(dropped, axis=-1))
    given = Inputs(found.hidden, found.weight, found.batch, head=head)
    given = given.with_targets(count=count, log_tail=log_tail.astype(np.float32))
    return given.with_batch(labels=given.batch.labels % head.get("vocab_size", V))


def jax_side(implementation: str, given: Inputs, objectives: list[Objective]) -> list[Found]:
    """The sums and gradients of each objective, in one program, which is quicker to compile."""
    batch = given.batch.map(jnp.asarray)
    execution = Execution(implementation, CHUNK_SIZE)

    def value(hidden, weight, bias, objective):
        head = jax_distill.losses.Head(weight, bias, **given.head)
        sums = jax_distill.losses.loss(hidden, head, batch, objective, execution)
        return sums.loss, sums

    bias = None if given.bias is None else jnp.asarray(given.bias)
    leaves = (jnp.asarray(given.hidden), jnp.asarray(given.weight), bias)
    gradient = jax.grad(value, argnums=(0, 1) if bias is None else (0, 1, 2), has_aux=True)
    every = jax.jit(lambda *leaves: [gradient(*leaves, objective) for objective in objectives])
    program = every.lower(*leaves).compile(compiler_options=QUICK_COMPILE)
    return [
        ({k: float(v) for k, v in sums._asdict().items()}, [np.asarray(g) for g in gradients])
        for gradients, sums in program(*leaves)
    ]


def torch_side(
    implementation: str, given: Inputs, objective: Objective = Objective(), dtype=torch.float32
) -> Found:
    """The same of torch_ref; hidden and weight in `dtype`."""
    leaves = [torch.tensor(x).to(dtype) for x in (given.hidden, given.weight)]
    leaves += [] if given.bias is None else [torch.tensor(given.bias)]
    hidden, *of_head = [leaf.requires_grad_() for leaf in leaves]
    head = torch_ref.losses.Head(*of_head, **given.head)
    execution = Execution(implementation, CHUNK_SIZE)
    batch = given.batch.map(torch.tensor)
    sums = torch_ref.losses.loss(hidden, head, batch, objective, execution)
    gradients = torch.autograd.grad(sums.loss, leaves)
    return {k: v.item() for k, v in sums._asdict().items()}, [as_numpy(g) for g in gradients]


def assert_same_loss(got: Found, expected: Found, rung: str, part_of: float = 0.0) -> None:
    """The sums and gradients; `part_of`: a larger sum that the loss is a part of and rounds as."""
    tolerance = LOSS_TOLERANCE * max(1.0, part_of / abs(expected[0]["loss"]))
    assert_numbers(rung, got[0], expected[0], LOSS_TOLERANCE, loss=tolerance, kl=tolerance)
    for name, a, b in zip(GRADIENTS, got[1], expected[1], strict=False):
        assert_close(rung, name, a, b, GRADIENT_TOLERANCE)


def assert_same_in_torch(given: Inputs, expected: Found, rung: str, objective: Objective) -> None:
    """Every implementation of torch_ref against the numbers of its dense one."""
    for name in IMPLEMENTATIONS:
        assert_same_loss(torch_side(name, given, objective), expected, f"{rung}, torch {name}")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_and_gradients_are_those_of_torch(implementation, tail):
    """`truncate` is `bucket` without one of its terms: where what is left cancels (reverse KL), it
    is as exact as the sum that it is a part of."""
    given = inputs()
    objectives = [Objective(tail, divergence, jsd_beta=0.3) for divergence in DIVERGENCES]
    in_jax = jax_side(implementation, given, objectives)
    for objective, got in zip(objectives, in_jax, strict=True):
        expected = torch_side("dense", given, objective)
        whole = torch_side("dense", given, replace(objective, tail="bucket"))[0]["loss"]
        part_of = whole if tail == "truncate" else 0.0
        rung = f"loss {implementation} {tail} {objective.divergence}"
        assert_same_loss(got, expected, f"{rung}, JAX", part_of)
        in_torch = torch_side(implementation, given, objective)
        assert_same_loss(in_torch, expected, f"{rung}, torch", part_of)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_temperature_cross_entropy_z_loss_bias_scale_and_soft_cap_too(implementation):
    head = dict(soft_cap=20.0, logit_scale=0.8, vocab_size=V - 20)
    bias = np.random.default_rng(2).normal(size=V).astype(np.float32)
    given = inputs(seed=1, temperature=2.0, **head)._replace(bias=bias)
    objective = Objective(ce_weight=0.3, z_loss_weight=1e-2, kl_weight=0.7)
    expected = torch_side("dense", given, objective)
    (got,) = jax_side(implementation, given, [objective])
    assert_same_loss(got, expected, f"{implementation}, JAX")
    assert_same_loss(torch_side(implementation, given, objective), expected, implementation)


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_token_values_are_the_same(implementation):
    given = inputs(seed=1, temperature=2.0, vocab_size=V - 20)
    objective, execution = Objective(ce_weight=0.3), Execution(implementation, CHUNK_SIZE)
    head = jax_distill.losses.Head(jnp.asarray(given.weight), **given.head)
    program = jax.jit(jax_distill.losses.token_values, static_argnums=(3, 4))
    batch = given.batch.map(jnp.asarray)
    got = program(jnp.asarray(given.hidden), head, batch, objective, execution)
    theirs = torch_ref.losses.token_values(
        torch.tensor(given.hidden),
        torch_ref.losses.Head(torch.tensor(given.weight), **given.head),
        given.batch.map(torch.tensor),
        objective,
        execution,
    )
    assert got._fields == theirs._fields
    for name, ours, expected in zip(got._fields, got, theirs, strict=True):
        assert_close("token values", name, ours, expected, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_random_samples_are_read_alike(temperature):
    """Draws beside short counts, holes in the mask and ids that the student lacks."""
    given = inputs(seed=8, temperature=temperature, vocab_size=V - 20)
    draws = np.random.default_rng(8).integers(1, 9, (B, T, K)).astype(np.int32)
    given = given.with_targets(draws=draws)
    objectives = [Objective(), Objective(ce_weight=0.3)]
    for implementation in IN_JAX:
        in_jax = jax_side(implementation, given, objectives)
        for objective, got in zip(objectives, in_jax, strict=True):
            rung = f"draws {implementation} ce {objective.ce_weight}"
            expected = torch_side("dense", given, objective)
            assert_same_loss(got, expected, f"{rung}, JAX")
            assert_same_in_torch(given, expected, rung, objective)


def test_edges_are_read_alike():
    """p_k = 0, p_t = 0, positions that cache nothing, ids that the student lacks."""
    given = inputs(seed=3, vocab_size=V - 60)
    targets = given.targets.map(np.copy)
    targets.logprobs[:, ::3, -1] = -np.inf
    targets.count[:, ::3] = K
    targets.count[:, 1::3] = 0
    targets.log_tail[:, 1::3] = 0.0
    targets.log_tail[:, 2::6] = -np.inf
    given = given.with_batch(targets=targets)
    objectives = [Objective(tail, divergence) for tail in TAILS for divergence in DIVERGENCES]
    in_jax = jax_side("dense", given, objectives)
    for objective, got in zip(objectives, in_jax, strict=True):
        expected = torch_side("dense", given, objective)
        assert all(np.isfinite(g).all() for g in expected[1])
        assert_same_loss(got, expected, f"edges {objective.tail} {objective.divergence}")


@pytest.mark.parametrize("implementation", IN_JAX)
def test_a_student_without_any_token_for_the_tail_has_a_large_finite_loss(implementation):
    """Every id of the student is among the K, yet the teacher has p_t > 0: log q_t counts as
    LOG_FLOOR = −100 on both, and it has no gradient. So bucket is Σ p_k log(p_k/q_k) +
    p_t (log p_t + 100) per token, and its gradient that of the K alone."""
    given = inputs(seed=4)
    p = 0.9 * np.random.default_rng(5).dirichlet(np.ones(K), (B, T))
    given = given._replace(weight=given.weight[:K]).with_batch(
        labels=given.batch.labels % K,
        targets=TopK(
            indices=np.broadcast_to(np.arange(K, dtype=np.int32), (B, T, K)).copy(),
            logprobs=np.log(p).astype(np.float32),
            log_tail=np.full((B, T), np.log(0.1), np.float32),
            count=np.full((B, T), K, np.int32),
        ),
    )
    objectives = [
        Objective(tail, divergence)
        for tail in ("bucket", "renormalize")
        for divergence in DIVERGENCES
    ]
    in_jax = jax_side(implementation, given, objectives)
    for objective, got in zip(objectives, in_jax, strict=True):
        rung = f"no tail {implementation} {objective.tail} {objective.divergence}"
        expected = torch_side("dense", given, objective)
        assert np.isfinite(expected[0]["loss"]) and all(np.isfinite(g).all() for g in expected[1])
        assert_same_loss(got, expected, f"{rung}, JAX")
        assert_same_in_torch(given, expected, rung, objective)
    for divergence, floor in (("forward_kl", 0.1 * (np.log(0.1) + 100.0)), ("reverse_kl", 0.0)):
        (bucket, d_bucket), (truncate, d_truncate) = (
            torch_side("dense", given, Objective(tail, divergence))
            for tail in ("bucket", "truncate")
        )
        more = (bucket["kl"] - truncate["kl"]) / bucket["count"]
        assert more == pytest.approx(floor, rel=GRADIENT_TOLERANCE, abs=GRADIENT_TOLERANCE)
        for name, a, b in zip(GRADIENTS, d_bucket, d_truncate, strict=False):
            assert_close(f"no tail, {divergence}", name, a, b, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("implementation", IN_JAX)
def test_a_valid_label_outside_the_vocabulary_has_an_infinite_cross_entropy(
    implementation, weighted
):
    """A label ≥ vocab_size at a position that counts has probability 0: infinite cross-entropy on
    both, so training stops with the step and the rows; without ce_weight the loss and every
    gradient stay as they are, and with it that position's cross-entropy has no gradient."""
    given = inputs(seed=6, temperature=2.0 if weighted else 1.0, vocab_size=V - 20)
    labels = given.batch.labels.copy()
    outside = np.argwhere(given.batch.mask)[[0, -1]]
    for (row, position), label in zip(outside, (V - 20, V + 7), strict=True):
        labels[row, position] = label
    changed = given.with_batch(labels=labels)
    objective = Objective(ce_weight=0.5, z_loss_weight=1e-3) if weighted else Objective()
    expected = torch_side("dense", changed, objective)
    assert expected[0]["cross_entropy"] == np.inf
    assert np.isinf(expected[0]["loss"]) == weighted
    assert all(np.isfinite(g).all() for g in expected[1])
    rung = f"label outside, {implementation}"
    (got,) = jax_side(implementation, changed, [objective])
    assert_same_loss(got, expected, f"{rung}, JAX")
    assert_same_in_torch(changed, expected, rung, objective)
    if not weighted:
        plain = torch_side("dense", given, objective)
        assert plain[0]["loss"] == expected[0]["loss"]
        assert all((a == b).all() for a, b in zip(plain[1], expected[1], strict=True))


@pytest.mark.parametrize("implementation", IN_JAX)
def test_bf16_inputs_give_the_same_loss_and_gradients_to_one_rounding(implementation):
    """bf16, stated apart: both form logits of the same bf16 operands in float32, so the sums agree
    as in float32; gradients are bf16 and may differ by a rounding of the largest entry on either
    side (2⁻⁷; both also round dlogits to bf16 before their two matmuls)."""
    given = inputs(seed=7)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (given.hidden, given.weight)]
    objective = Objective(ce_weight=0.3)
    (got,) = jax_side(implementation, given._replace(hidden=low[0], weight=low[1]), [objective])
    hidden, weight = (np.asarray(x, np.float32) for x in low)
    exact = given._replace(hidden=hidden, weight=weight)
    expected = torch_side(implementation, exact, objective, torch.bfloat16)
    rung = f"loss {implementation}, bf16"
    assert_numbers(rung, got[0], expected[0], LOSS_TOLERANCE)
    for name, a, b in zip(GRADIENTS, got[1], expected[1], strict=False):
        assert_close(rung, name, a, b, rounding("bfloat16", 2))


def test_cross_entropy_alone_is_the_same_without_a_teacher():
    given = inputs().with_batch(targets=None)
    objective = Objective(kl_weight=0.0, ce_weight=1.0)
    expected = torch_side("dense", given, objective)
    sides = {f"JAX {name}": jax_side(name, given, [objective])[0] for name in IN_JAX}
    sides |= {f"torch {name}": torch_side(name, given, objective) for name in IMPLEMENTATIONS}
    for side, (sums, gradients) in sides.items():
        for name in ("loss", "cross_entropy", "count"):
            rung = f"cross-entropy, {side}"
            assert_close(rung, name, sums[name], expected[0][name], LOSS_TOLERANCE)
        for name in ("kl", "teacher_mass", "student_mass", "top1_agreement"):
            assert np.isnan(sums[name])
        for name, a, b in zip(GRADIENTS, gradients, expected[1], strict=False):
            assert_close(rung, name, a, b, GRADIENT_TOLERANCE)
