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
from ladder import assert_close

import jax_distill.losses
import torch_ref.losses

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5  # float32, relative
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
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


def torch_side(implementation: str, arrays: dict, bias=None, **knobs) -> tuple[dict, list]:
    f = torch_ref.losses.IMPLEMENTATIONS[implementation]
    hidden, lm_head, *rest = (torch.tensor(x) for x in arrays.values())
    leaves = [hidden, lm_head] + ([] if bias is None else [torch.tensor(bias)])
    for leaf in leaves:
        leaf.requires_grad_()
    sums = f(*leaves[:2], *rest, bias=None if bias is None else leaves[2], **knobs)
    gradients = torch.autograd.grad(sums.loss, leaves)
    return {k: v.item() for k, v in sums._asdict().items()}, [g.numpy() for g in gradients]


def assert_same(got: tuple[dict, list], expected: tuple[dict, list], rung: str) -> None:
    for name, value in expected[0].items():
        difference = abs(got[0][name] - value)
        assert difference <= LOSS_TOLERANCE * abs(value), f"{rung}: {name} {got[0][name]} {value}"
    for name, a, b in zip(("d_hidden", "d_lm_head", "d_bias"), got[1], expected[1], strict=False):
        assert_close(rung, name, a, b, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("tail", ["bucket", "renormalize", "truncate", "ignore"])
@pytest.mark.parametrize("implementation", jax_distill.losses.IMPLEMENTATIONS)
def test_sums_and_gradients_are_those_of_torch(implementation, tail):
    arrays = inputs()
    settings = [
        dict(tail=tail, divergence=divergence, jsd_beta=0.3, chunk_size=4)
        for divergence in DIVERGENCES
    ]
    in_jax = jax_side(implementation, arrays, settings)
    for knobs, got in zip(settings, in_jax, strict=True):
        expected = torch_side("dense", arrays, **knobs)
        rung = f"loss {implementation} {tail} {knobs['divergence']}"
        assert_same(got, expected, f"{rung}, JAX")
        assert_same(torch_side(implementation, arrays, **knobs), expected, f"{rung}, torch")


@pytest.mark.parametrize("implementation", jax_distill.losses.IMPLEMENTATIONS)
def test_temperature_cross_entropy_z_loss_bias_scale_and_soft_cap_too(implementation):
    arrays = inputs(seed=1)
    bias = np.random.default_rng(2).normal(size=V).astype(np.float32)
    knobs = dict(temperature=2.0, ce_weight=0.3, z_loss_weight=1e-2, kl_weight=0.7, chunk_size=4)
    knobs |= dict(soft_cap=20.0, logit_scale=0.8, vocab_size=V - 20)
    arrays["labels"] %= V - 20
    expected = torch_side("dense", arrays, bias, **knobs)
    (got,) = jax_side(implementation, arrays, [knobs], bias)
    assert_same(got, expected, f"{implementation}, JAX")
    assert_same(torch_side(implementation, arrays, bias, **knobs), expected, f"{implementation}")


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


def test_cross_entropy_alone_is_the_same_without_a_teacher():
    arrays = {k: v for k, v in inputs().items() if not k.startswith("teacher")}
    knobs = dict(kl_weight=0.0, ce_weight=1.0, chunk_size=4)
    for implementation in jax_distill.losses.IMPLEMENTATIONS:
        (got,) = jax_side(implementation, arrays, [knobs | dict.fromkeys(TEACHER)])
        expected = torch_side(implementation, arrays, **knobs)
        for name in ("loss", "cross_entropy", "count"):
            assert got[0][name] == pytest.approx(expected[0][name], rel=LOSS_TOLERANCE)
        assert_same(({}, got[1]), ({}, expected[1]), f"cross-entropy {implementation}")
