"""Rung "loss": both packages compute the same sums and gradients, whatever the objective.

Every tail × divergence × implementation, PyTorch against JAX on the same float32 inputs: masks with
holes, short counts, logits as peaked as a trained model's, lengths that the chunk does not divide.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from ladder import as_numpy, assert_close, assert_numbers

import jax_distill.losses
import torch_ref.losses

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5  # float32, relative
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
# Where all of JAX's chunked versions run the same lines, the definition and one of them stand for
# them (a program takes seconds to compile); torch_ref's are held against its dense one always.
IN_JAX = ("dense", "fused")
TEACHER = ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count")
B, T, D, V, K = 2, 13, 16, 211, 7


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """A teacher with log-probabilities down to e^-40, and a student half-way to it."""
    rng = np.random.default_rng(seed)
    lm_head = rng.normal(size=(V, D)).astype(np.float32) * 1.5
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    z = (hidden + 0.3 * rng.normal(size=hidden.shape)).astype(np.float64) @ lm_head.T
    log_p = torch.tensor(z).log_softmax(-1)
    top, ids = log_p.topk(K, -1)
    count = rng.integers(1, K + 1, size=(B, T))
    dropped = torch.arange(K) >= torch.tensor(count)[..., None]
    kept_out = torch.ones(B, T, V, dtype=torch.bool).scatter(-1, ids, dropped)
    return {
        "hidden": hidden,
        "lm_head": lm_head,
        "labels": rng.integers(0, V, size=(B, T)).astype(np.int32),
        "mask": rng.random((B, T)) < 0.7,
        "teacher_indices": ids.numpy().astype(np.int32),
        "teacher_logprobs": top.numpy().astype(np.float32),
        "teacher_log_tail": torch.where(kept_out, log_p, -torch.inf).logsumexp(-1).float().numpy(),
        "teacher_count": count.astype(np.int32),
    }


def jax_side(implementation: str, arrays: dict, settings: list[dict], bias=None) -> list:
    """For each of the settings (one program for all of them, which is quicker to compile): the sums
    by name, and the gradients of loss with respect to hidden, lm_head (and bias)."""
    f = jax_distill.losses.IMPLEMENTATIONS[implementation]
    hidden, lm_head, *rest = (jnp.asarray(x) for x in arrays.values())

    def loss(hidden, lm_head, bias, knobs):
        sums = f(hidden, lm_head, *rest, bias=bias, **knobs)
        return sums.loss, sums

    wanted = (0, 1) if bias is None else (0, 1, 2)
    bias = None if bias is None else jnp.asarray(bias)
    gradient = jax.grad(loss, argnums=wanted, has_aux=True)
    every = jax.jit(lambda *leaves: [gradient(*leaves, knobs) for knobs in settings])
    program = every.lower(hidden, lm_head, bias).compile(compiler_options=tiny.QUICK_COMPILE)
    return [
        ({k: float(v) for k, v in sums._asdict().items()}, [np.asarray(g) for g in gradients])
        for gradients, sums in program(hidden, lm_head, bias)
    ]


def torch_side(
    implementation: str, arrays: dict, dtype=torch.float32, bias=None, **knobs
) -> tuple[dict, list]:
    """The same of torch_ref; hidden and lm_head in `dtype`."""
    f = torch_ref.losses.IMPLEMENTATIONS[implementation]
    hidden, lm_head, *rest = (torch.tensor(x) for x in arrays.values())
    leaves = [hidden.to(dtype), lm_head.to(dtype)]
    leaves += [] if bias is None else [torch.tensor(bias)]
    for leaf in leaves:
        leaf.requires_grad_()
    sums = f(*leaves[:2], *rest, bias=None if bias is None else leaves[2], **knobs)
    gradients = torch.autograd.grad(sums.loss, leaves)
    return {k: v.item() for k, v in sums._asdict().items()}, [as_numpy(g) for g in gradients]


def assert_same(
    got: tuple[dict, list], expected: tuple[dict, list], rung: str, part_of: float = 0.0
) -> None:
    """The sums and gradients; `part_of`: a larger sum that the loss is a part of and rounds as."""
    tolerance = LOSS_TOLERANCE * max(1.0, part_of / abs(expected[0]["loss"]))
    assert_numbers(rung, got[0], expected[0], LOSS_TOLERANCE, loss=tolerance, kl=tolerance)
    for name, a, b in zip(("d_hidden", "d_lm_head", "d_bias"), got[1], expected[1], strict=False):
        assert_close(rung, name, a, b, GRADIENT_TOLERANCE)


def assert_same_in_torch(arrays: dict, expected: tuple[dict, list], rung: str, **knobs) -> None:
    """Every implementation of torch_ref against the numbers of its dense one."""
    for name in torch_ref.losses.IMPLEMENTATIONS:
        assert_same(torch_side(name, arrays, **knobs), expected, f"{rung}, torch {name}")


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "truncate", "ignore"])
@pytest.mark.parametrize("implementation", jax_distill.losses.IMPLEMENTATIONS)
def test_sums_and_gradients_are_those_of_torch(implementation, tail):
    """`truncate` is `bucket` without one of its terms: where what is left cancels (reverse KL), it
    is as exact as the sum that it is a part of."""
    arrays = inputs()
    settings = [
        dict(tail=tail, divergence=divergence, jsd_beta=0.3, chunk_size=4)
        for divergence in DIVERGENCES
    ]
    in_jax = jax_side(implementation, arrays, settings)
    for knobs, got in zip(settings, in_jax, strict=True):
        expected = torch_side("dense", arrays, **knobs)
        whole = torch_side("dense", arrays, **knobs | dict(tail="bucket"))[0]["loss"]
        part_of = whole if tail == "truncate" else 0.0
        rung = f"loss {implementation} {tail} {knobs['divergence']}"
        assert_same(got, expected, f"{rung}, JAX", part_of)
        in_torch = torch_side(implementation, arrays, **knobs)
        assert_same(in_torch, expected, f"{rung}, torch", part_of)


@pytest.mark.parametrize("implementation", jax_distill.losses.IMPLEMENTATIONS)
def test_temperature_cross_entropy_z_loss_bias_scale_and_soft_cap_too(implementation):
    arrays = inputs(seed=1)
    bias = np.random.default_rng(2).normal(size=V).astype(np.float32)
    knobs = dict(temperature=2.0, ce_weight=0.3, z_loss_weight=1e-2, kl_weight=0.7, chunk_size=4)
    knobs |= dict(soft_cap=20.0, logit_scale=0.8, vocab_size=V - 20)
    arrays["labels"] %= V - 20
    expected = torch_side("dense", arrays, bias=bias, **knobs)
    (got,) = jax_side(implementation, arrays, [knobs], bias)
    assert_same(got, expected, f"{implementation}, JAX")
    assert_same(
        torch_side(implementation, arrays, bias=bias, **knobs), expected, f"{implementation}"
    )


def test_edges_are_read_alike():
    """p_k = 0, p_t = 0, positions that store nothing, ids that the student lacks."""
    arrays = inputs(seed=3)
    arrays["teacher_logprobs"][:, ::3, -1] = -np.inf
    arrays["teacher_count"][:, ::3] = K
    arrays["teacher_count"][:, 1::3] = 0
    arrays["teacher_log_tail"][:, 1::3] = 0.0
    arrays["teacher_log_tail"][:, 2::6] = -np.inf
    arrays["labels"] %= V - 60
    settings = [
        dict(tail=tail, divergence=divergence, vocab_size=V - 60, chunk_size=4)
        for tail in ("bucket", "renormalize", "truncate", "ignore")
        for divergence in DIVERGENCES
    ]
    in_jax = jax_side("dense", arrays, settings)
    for knobs, got in zip(settings, in_jax, strict=True):
        expected = torch_side("dense", arrays, **knobs)
        assert all(np.isfinite(g).all() for g in expected[1])
        assert_same(got, expected, f"edges {knobs['tail']} {knobs['divergence']}")


@pytest.mark.parametrize("implementation", IN_JAX)
def test_a_student_without_any_column_for_the_tail_has_a_large_finite_loss(implementation):
    """Every id of the student is among the K, yet the teacher has p_t > 0: log q_t counts as −100,
    the floor that both state, and it has no gradient. So bucket is Σ p_k log(p_k/q_k) +
    p_t (log p_t + 100) per token, and its gradient that of the K alone."""
    arrays = inputs(seed=4)
    arrays["lm_head"] = arrays["lm_head"][:K]
    arrays["teacher_indices"] = np.broadcast_to(np.arange(K, dtype=np.int32), (B, T, K)).copy()
    arrays["teacher_count"][:] = K
    arrays["teacher_log_tail"][:] = np.log(0.1)
    p = 0.9 * np.random.default_rng(5).dirichlet(np.ones(K), (B, T))
    arrays["teacher_logprobs"] = np.log(p).astype(np.float32)
    arrays["labels"] %= K
    settings = [
        dict(tail=tail, divergence=divergence, chunk_size=4)
        for tail in ("bucket", "renormalize")
        for divergence in DIVERGENCES
    ]
    in_jax = jax_side(implementation, arrays, settings)
    for knobs, got in zip(settings, in_jax, strict=True):
        rung = f"no tail column {implementation} {knobs['tail']} {knobs['divergence']}"
        expected = torch_side("dense", arrays, **knobs)
        assert np.isfinite(expected[0]["loss"]) and all(np.isfinite(g).all() for g in expected[1])
        assert_same(got, expected, f"{rung}, JAX")
        assert_same_in_torch(arrays, expected, rung, **knobs)
    for divergence, floor in (("forward_kl", 0.1 * (np.log(0.1) + 100.0)), ("reverse_kl", 0.0)):
        (bucket, d_bucket), (truncate, d_truncate) = (
            torch_side("dense", arrays, tail=tail, divergence=divergence)
            for tail in ("bucket", "truncate")
        )
        more = (bucket["kl"] - truncate["kl"]) / bucket["count"]
        assert more == pytest.approx(floor, rel=1e-5, abs=1e-6)
        for name, a, b in zip(("d_hidden", "d_lm_head"), d_bucket, d_truncate, strict=True):
            assert_close(f"no tail column, {divergence}", name, a, b, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("implementation", IN_JAX)
def test_a_valid_label_outside_the_vocabulary_has_an_infinite_cross_entropy(implementation):
    """A label ≥ vocab_size at a position that counts has probability 0: infinite cross-entropy on
    both, so training stops with the step and the rows; without ce_weight the loss and every
    gradient stay as they are, and with it that position's cross-entropy has no gradient."""
    arrays = inputs(seed=6)
    arrays["labels"] %= V - 20
    clean = arrays | {"labels": arrays["labels"].copy()}
    outside = np.argwhere(arrays["mask"])[[0, -1]]
    for (row, position), label in zip(outside, (V - 20, V + 7), strict=True):
        arrays["labels"][row, position] = label
    knobs = dict(vocab_size=V - 20, chunk_size=4)
    settings = [knobs, knobs | dict(ce_weight=0.5, temperature=2.0, z_loss_weight=1e-3)]
    in_jax = jax_side(implementation, arrays, settings)
    for knobs, got in zip(settings, in_jax, strict=True):
        expected = torch_side("dense", arrays, **knobs)
        assert expected[0]["cross_entropy"] == np.inf
        assert np.isinf(expected[0]["loss"]) == ("ce_weight" in knobs)
        assert all(np.isfinite(g).all() for g in expected[1])
        rung = f"label outside, {implementation}"
        assert_same(got, expected, f"{rung}, JAX")
        assert_same_in_torch(arrays, expected, rung, **knobs)
    plain, with_label = (torch_side("dense", x, **settings[0]) for x in (clean, arrays))
    assert plain[0]["loss"] == with_label[0]["loss"]
    assert all((a == b).all() for a, b in zip(plain[1], with_label[1], strict=True))


BF16_LOSS, BF16_GRADIENT = 1e-4, 2**-7


@pytest.mark.parametrize("implementation", IN_JAX)
def test_bf16_inputs_give_the_same_loss_and_gradients_to_one_rounding(implementation):
    """bf16, stated apart: both form logits of the same bf16 operands in float32, so the sums agree
    to 1e-4; gradients are bf16 and may differ by a rounding of the largest entry on either side
    (2⁻⁷; JAX also rounds dlogits to bf16 before its two products)."""
    arrays = inputs(seed=7)
    low = {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("hidden", "lm_head")}
    knobs = dict(ce_weight=0.3, chunk_size=4)
    (got,) = jax_side(implementation, arrays | low, [knobs])
    exact = {name: np.asarray(x, np.float32) for name, x in low.items()}
    expected = torch_side(implementation, arrays | exact, torch.bfloat16, **knobs)
    rung = f"loss {implementation}, bf16"
    assert_numbers(rung, got[0], expected[0], BF16_LOSS)
    for name, a, b in zip(("d_hidden", "d_lm_head"), got[1], expected[1], strict=True):
        assert_close(rung, name, a, b, BF16_GRADIENT)


def test_cross_entropy_alone_is_the_same_without_a_teacher():
    arrays = {k: v for k, v in inputs().items() if not k.startswith("teacher")}
    knobs = dict(kl_weight=0.0, ce_weight=1.0, chunk_size=4)
    expected = torch_side("dense", arrays, **knobs)
    without = [knobs | dict.fromkeys(TEACHER)]
    sides = {f"JAX {name}": jax_side(name, arrays, without)[0] for name in IN_JAX}
    for name in torch_ref.losses.IMPLEMENTATIONS:
        sides[f"torch {name}"] = torch_side(name, arrays, **knobs)
    for side, (sums, gradients) in sides.items():
        for name in ("loss", "cross_entropy", "count"):
            rung = f"cross-entropy, {side}"
            assert_close(rung, name, sums[name], expected[0][name], LOSS_TOLERANCE)
        for name, a, b in zip(("d_hidden", "d_lm_head"), gradients, expected[1], strict=True):
            assert_close(rung, name, a, b, GRADIENT_TOLERANCE)
