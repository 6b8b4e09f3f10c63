"""The PyTorch losses against the formula: float64 loops over positions, and finite differences."""

import math

import numpy as np
import pytest
import torch

from jax_distill.config import Refusal
from torch_ref.losses import IMPLEMENTATIONS, LossSums
from torch_ref.losses.objective import DIVERGENCES, FLOOR, TAILS

EVERY = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
CHUNKED = [name for name in IMPLEMENTATIONS if name != "dense"]
ALL_KNOBS = dict(ce_weight=0.3, z_loss_weight=1e-2, temperature=2.0, kl_weight=0.7)


def problem(*, B=2, T=5, D=4, V=11, K=3, scale=1.0, seed=0, dtype=torch.float64):
    """hidden, lm_head and a teacher of its own logits, with holes in the mask and short counts."""
    rng = np.random.default_rng(seed)
    teacher = torch.tensor(rng.normal(size=(B, T, V)) * scale).log_softmax(-1)
    top, ids = teacher.topk(K, -1)
    count = torch.tensor(rng.integers(1, K + 1, size=(B, T)))
    count[0, 0] = K
    outside = torch.ones(B, T, V, dtype=torch.bool)
    kept = torch.arange(K) < count[..., None]
    outside = outside.scatter(-1, ids, ~kept)
    tail = torch.where(outside, teacher, -math.inf).logsumexp(-1)
    mask = torch.tensor(rng.random((B, T)) < 0.7)
    mask[0, 0] = True
    return dict(
        hidden=torch.tensor(rng.normal(size=(B, T, D))).to(dtype).requires_grad_(),
        lm_head=torch.tensor(rng.normal(size=(V, D)) * scale).to(dtype).requires_grad_(),
        labels=torch.tensor(rng.integers(0, V, size=(B, T))),
        mask=mask,
        teacher_indices=ids,
        teacher_logprobs=top.to(dtype),
        teacher_log_tail=tail.to(dtype),
        teacher_count=count,
    )


def run(implementation, inputs, **knobs) -> LossSums:
    knobs = {"chunk_size": 2, **knobs}
    return IMPLEMENTATIONS[implementation](*inputs.values(), **knobs)


def gradients(implementation, inputs, factor=1.0, **knobs):
    loss = run(implementation, inputs, **knobs).loss * factor
    return torch.autograd.grad(loss, [inputs["hidden"], inputs["lm_head"]])


def divergence_by_hand(p, q, divergence, beta):
    def kl(a, b):
        pairs = zip(a, b, strict=True)
        return sum(x * (math.log(x) - (math.log(y) if y else FLOOR)) for x, y in pairs if x)

    if divergence == "forward_kl":
        return kl(p, q)
    if divergence == "reverse_kl":
        return kl(q, p)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def by_hand(inputs, *, tail="bucket", divergence="forward_kl", jsd_beta=0.5, temperature=1.0, **w):
    """Every sum, in probability space, one position at a time."""
    arrays = {k: v.detach().double().numpy() for k, v in inputs.items()}
    sums = dict.fromkeys(LossSums._fields, 0.0)
    for b, t in np.argwhere(arrays["mask"]):
        z = arrays["lm_head"] @ arrays["hidden"][b, t]
        q_all = np.exp(z / temperature) / np.exp(z / temperature).sum()
        n = int(arrays["teacher_count"][b, t])
        ids = arrays["teacher_indices"][b, t, :n].astype(int)
        p = list(np.exp(arrays["teacher_logprobs"][b, t, :n]))
        p_tail = float(np.exp(arrays["teacher_log_tail"][b, t]))
        q = list(q_all[ids])
        q_tail = float(np.delete(q_all, ids).sum())
        sums["teacher_mass"] += sum(p)
        sums["student_mass"] += sum(q)
        P, Q = sum(p), sum(q)
        outcomes = {
            "bucket": ([*p, p_tail], [*q, q_tail]),
            "renormalize": ([*(x / P for x in p), 0.0], [*q, q_tail]),
            "truncate": (p, q),
            "ignore": ([x / P for x in p], [x / Q for x in q]),
        }
        kl = divergence_by_hand(*outcomes[tail], divergence, jsd_beta)
        log_z = math.log(np.exp(z).sum())
        cross_entropy = log_z - z[int(arrays["labels"][b, t])]
        sums["kl"] += kl
        sums["cross_entropy"] += cross_entropy
        sums["z_loss"] += log_z**2
        sums["top1_agreement"] += float(ids[0] == z.argmax())
        sums["count"] += 1
        sums["loss"] += (
            w.get("kl_weight", 1.0) * temperature**2 * kl
            + w.get("ce_weight", 0.0) * cross_entropy
            + w.get("z_loss_weight", 0.0) * log_z**2
        )
    return LossSums(**sums)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
@EVERY
def test_every_sum_equals_the_formula_and_the_gradient_its_finite_differences(
    implementation, tail, divergence
):
    inputs = problem()
    knobs = dict(tail=tail, divergence=divergence, jsd_beta=0.3, **ALL_KNOBS)
    got = run(implementation, inputs, **knobs)
    np.testing.assert_allclose([x.item() for x in got], by_hand(inputs, **knobs), rtol=1e-12)

    def loss(hidden, lm_head):
        return run(implementation, {**inputs, "hidden": hidden, "lm_head": lm_head}, **knobs).loss

    assert torch.autograd.gradcheck(loss, (inputs["hidden"], inputs["lm_head"]), fast_mode=True)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 5, 64])
@pytest.mark.parametrize("implementation", CHUNKED)
def test_any_chunk_size_gives_the_dense_loss_and_gradients(implementation, chunk_size, temperature):
    inputs = problem(T=5, scale=5.0)
    knobs = dict(temperature=temperature, ce_weight=0.5, chunk_size=chunk_size)
    np.testing.assert_allclose(
        [x.item() for x in run(implementation, inputs, **knobs)],
        [x.item() for x in run("dense", inputs, **knobs)],
        rtol=1e-12,
    )
    for got, expected in zip(
        gradients(implementation, inputs, **knobs), gradients("dense", inputs, **knobs), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


@EVERY
def test_bias_scale_and_soft_cap_reach_loss_and_gradients(implementation):
    """Case 24."""
    inputs = problem()
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    plain = run(implementation, inputs, **ALL_KNOBS).loss
    knobs = dict(soft_cap=3.0, logit_scale=0.5, **ALL_KNOBS)
    assert (run(implementation, inputs, bias=bias, **knobs).loss - plain).abs() > 0.1

    def loss(hidden, lm_head, bias):
        changed = {**inputs, "hidden": hidden, "lm_head": lm_head}
        return run(implementation, changed, bias=bias, **knobs).loss

    assert torch.autograd.gradcheck(loss, (inputs["hidden"], inputs["lm_head"], bias))


@EVERY
def test_padded_columns_take_no_part(implementation):
    inputs = problem()
    padding = torch.full((5, 4), 9.0, dtype=torch.float64)
    padded = torch.cat([inputs["lm_head"].detach(), padding]).requires_grad_()
    wide = {**inputs, "lm_head": padded}
    assert run(implementation, wide, vocab_size=11).loss == run(implementation, inputs).loss
    d_head = gradients(implementation, wide, vocab_size=11)[1]
    torch.testing.assert_close(d_head[:11], gradients(implementation, inputs)[1])
    assert not d_head[11:].any()


@EVERY
def test_teacher_ids_that_the_student_lacks_join_the_tail(implementation):
    """Case 1."""
    inputs = problem(V=11, K=11)
    inputs["teacher_count"] = torch.full_like(inputs["teacher_count"], 11)
    inputs["teacher_log_tail"] = torch.full_like(inputs["teacher_log_tail"], -math.inf)
    narrow = {**inputs, "lm_head": inputs["lm_head"].detach()[:8].requires_grad_()}
    narrow["labels"] = narrow["labels"].clamp(max=7)
    keep = inputs["teacher_indices"] < 8
    order = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    logprobs = inputs["teacher_logprobs"]
    by_hand_inputs = {
        **narrow,
        "teacher_indices": inputs["teacher_indices"].gather(-1, order),
        "teacher_logprobs": logprobs.gather(-1, order),
        "teacher_log_tail": torch.where(keep, -math.inf, logprobs).logsumexp(-1),
        "teacher_count": keep.sum(-1),
    }
    expected = by_hand(by_hand_inputs)
    got = run(implementation, narrow)
    assert got.kl.isfinite() and got.kl.item() == pytest.approx(expected.kl, rel=1e-12)
    assert got.teacher_mass.item() == pytest.approx(expected.teacher_mass, rel=1e-12)


@EVERY
def test_masked_cells_may_hold_anything(implementation):
    """Case 13."""
    inputs = problem()
    dirty = {k: v.detach().clone() for k, v in inputs.items()}
    hole = ~inputs["mask"]
    assert hole.any()
    dirty["hidden"][hole] = math.nan
    dirty["labels"][hole] = 10**6
    dirty["teacher_indices"][hole] = -5
    dirty["teacher_logprobs"][hole] = math.inf
    dirty["teacher_log_tail"][hole] = math.nan
    dirty["teacher_count"][hole] = 99
    for name in ("hidden", "lm_head"):
        dirty[name].requires_grad_()
    clean_sums, dirty_sums = run(implementation, inputs), run(implementation, dirty)
    assert all(a == b for a, b in zip(clean_sums, dirty_sums, strict=True))
    d_hidden, d_head = gradients(implementation, dirty)
    assert not d_hidden[hole].any()
    for got, expected in zip((d_hidden, d_head), gradients(implementation, inputs), strict=True):
        assert torch.equal(got, expected)


@EVERY
def test_no_valid_token_gives_zero_loss_and_gradient(implementation):
    """Case 11."""
    inputs = problem()
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    assert all(x == 0 for x in run(implementation, inputs))
    assert all(not g.any() for g in gradients(implementation, inputs))


@EVERY
def test_the_incoming_gradient_scales_both_gradients(implementation):
    """Case 23."""
    inputs = problem()
    once, more = gradients(implementation, inputs), gradients(implementation, inputs, factor=3.7)
    for a, b in zip(once, more, strict=True):
        torch.testing.assert_close(b, 3.7 * a, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tail", TAILS)
@EVERY
def test_zero_probabilities_and_a_whole_vocabulary_stay_finite(implementation, tail):
    inputs = problem(V=6, K=6)
    inputs["teacher_count"] = torch.full_like(inputs["teacher_count"], 6)
    inputs["teacher_log_tail"] = torch.full_like(inputs["teacher_log_tail"], -math.inf)
    inputs["teacher_logprobs"] = inputs["teacher_logprobs"].clone()
    inputs["teacher_logprobs"][..., -1] = -math.inf
    for divergence in DIVERGENCES:
        knobs = dict(tail=tail, divergence=divergence)
        got = run(implementation, inputs, **knobs)
        assert got.kl.item() == pytest.approx(by_hand(inputs, **knobs).kl, rel=1e-9)
        for gradient in gradients(implementation, inputs, **knobs):
            assert gradient.isfinite().all()


@EVERY
def test_a_position_without_any_stored_token_teaches_nothing(implementation):
    inputs = problem()
    inputs["teacher_count"] = torch.zeros_like(inputs["teacher_count"])
    inputs["teacher_log_tail"] = torch.zeros_like(inputs["teacher_log_tail"])
    for tail in TAILS:
        for divergence in DIVERGENCES:
            knobs = dict(tail=tail, divergence=divergence)
            if tail != "renormalize" or divergence == "forward_kl":  # else the floor, a constant
                assert run(implementation, inputs, **knobs).loss.abs() < 1e-12
            assert all(g.abs().max() < 1e-12 for g in gradients(implementation, inputs, **knobs))


@EVERY
def test_cross_entropy_needs_no_teacher(implementation):
    inputs = problem()
    alone = {k: None if k.startswith("teacher") else v for k, v in inputs.items()}
    knobs = dict(kl_weight=0.0, ce_weight=1.0)
    got = run(implementation, alone, **knobs)
    assert got.loss.item() == pytest.approx(by_hand(inputs, **knobs).loss, rel=1e-12)
    assert got.kl.isnan() and got.teacher_mass.isnan() and got.top1_agreement.isnan()
    with pytest.raises(Refusal, match="teacher targets"):
        run(implementation, alone)


@EVERY
def test_a_student_equal_to_the_teacher_has_no_loss_in_bf16_at_large_logits(implementation):
    """Case 17."""
    inputs = problem(B=1, T=16, D=32, V=500, K=20, dtype=torch.bfloat16)
    hidden, lm_head = inputs["hidden"].detach(), inputs["lm_head"].detach()
    logits = hidden.double() @ lm_head.double().T
    factor = 80 / logits.abs().max()
    inputs["lm_head"] = (lm_head.double() * factor).bfloat16().requires_grad_()
    log_p = (hidden.double() @ inputs["lm_head"].double().T).log_softmax(-1).detach()
    top, ids = log_p.topk(20, -1)
    tail = log_p.scatter(-1, ids, -math.inf).logsumexp(-1)
    inputs |= {"teacher_indices": ids, "teacher_logprobs": top.float()}
    inputs |= {"teacher_log_tail": tail.float(), "teacher_count": torch.full((1, 16), 20)}
    sums = run(implementation, inputs, chunk_size=5)
    assert sums.loss.dtype == torch.float32
    assert sums.kl / sums.count < 1e-5
    for gradient in gradients(implementation, inputs, chunk_size=5):
        assert gradient.dtype == torch.bfloat16
        assert gradient.abs().max() < 1e-3


@pytest.mark.parametrize("implementation", CHUNKED)
def test_bf16_head_gradient_is_summed_in_float32_over_many_chunks(implementation):
    inputs = problem(B=2, T=64, D=16, V=300, K=8, dtype=torch.bfloat16, seed=3)
    exact = {k: v.detach().double() if v.is_floating_point() else v for k, v in inputs.items()}
    for name in ("hidden", "lm_head"):
        exact[name].requires_grad_()
    for got, expected in zip(
        gradients(implementation, inputs, chunk_size=2), gradients("dense", exact), strict=True
    ):
        assert (got.double() - expected).norm() / expected.norm() < 3e-3


@EVERY
def test_a_float32_head_under_bf16_hidden_is_rounded_in_the_products_only(implementation):
    low = problem(scale=3.0, dtype=torch.bfloat16)
    wide = {**low, "lm_head": low["lm_head"].detach().float().requires_grad_()}
    unround = wide["lm_head"].detach() * (1 + 1e-4)
    nudged = {**wide, "lm_head": unround.requires_grad_()}
    loss = run(implementation, low, **ALL_KNOBS).loss
    assert loss == run(implementation, wide, **ALL_KNOBS).loss
    assert loss == run(implementation, nudged, **ALL_KNOBS).loss
    d_head = gradients(implementation, wide, **ALL_KNOBS)[1]
    assert d_head.dtype == torch.float32
    assert torch.equal(d_head.bfloat16(), gradients(implementation, low, **ALL_KNOBS)[1])


@EVERY
def test_a_frozen_head_gets_no_gradient_and_no_grad_mode_only_the_value(implementation):
    """Case 25."""
    inputs = problem()
    inputs["lm_head"] = inputs["lm_head"].detach()
    loss = run(implementation, inputs).loss
    (d_hidden,) = torch.autograd.grad(loss, [inputs["hidden"]])
    assert d_hidden.any()
    with torch.no_grad():
        assert run(implementation, inputs).loss == loss


def test_a_tiny_tail_keeps_its_gradient_in_float32():
    """Case 21: top-1 probability 1 − 1e-6, tail 1e-9."""
    p = torch.tensor([1 - 1e-6, 1e-6 - 1e-9], dtype=torch.float64)
    z = torch.tensor([[12.0, -2.0, -9.0, -11.0, -8.5]], dtype=torch.float64)
    results = []
    for dtype in (torch.float64, torch.float32):
        hidden = z[None].to(dtype).requires_grad_()
        eye = torch.eye(5, dtype=dtype, requires_grad=True)
        teacher = (
            torch.tensor([[[0, 1]]]),
            p.log().to(dtype)[None, None],
            torch.full((1, 1), math.log(1e-9), dtype=dtype),
            torch.tensor([[2]]),
        )
        where = (torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))
        loss = IMPLEMENTATIONS["fused"](hidden, eye, *where, *teacher).loss
        results.append(torch.autograd.grad(loss, hidden)[0][0, 0].double())
    outside = slice(2, None)
    torch.testing.assert_close(results[1][outside], results[0][outside], rtol=1e-3, atol=0)


@pytest.mark.parametrize("implementation", CHUNKED)
def test_more_logit_outside_k_raises_every_loss_but_ignore(implementation):
    """Case 20."""
    inputs = problem(V=11, K=3)
    raised = {**inputs, "bias": torch.zeros(11, dtype=torch.float64)}
    outside = set(range(11)) - set(inputs["teacher_indices"].flatten().tolist())
    if not outside:  # every id is stored somewhere: look at one position alone
        inputs["mask"] = torch.zeros_like(inputs["mask"])
        inputs["mask"][0, 0] = True
        outside = set(range(11)) - set(inputs["teacher_indices"][0, 0].tolist())
    bias = raised.pop("bias")
    bias[min(outside)] = 20.0
    for tail in TAILS:
        before = run(implementation, inputs, tail=tail)
        after = run(implementation, inputs, tail=tail, bias=bias)
        rise = ((after.kl - before.kl) / before.count).item()
        assert abs(rise) < 1e-9 if tail == "ignore" else rise > 1


def test_unknown_names_are_refused():
    inputs = problem()
    for knobs, word in (
        (dict(tail="ghost"), "tail"),
        (dict(divergence="kl"), "divergence"),
        (dict(divergence="jsd", jsd_beta=1.0), "jsd_beta"),
        (dict(temperature=0.0), "temperature"),
    ):
        with pytest.raises(Refusal, match=word):
            run("dense", inputs, **knobs)
