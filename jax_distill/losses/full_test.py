"""The values of two heads over the whole vocabulary against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Head, full_token_values, token_values
from jax_distill.losses.agreement_test import EPSILON, RTOL
from jax_distill.losses.float64_test import log_softmax, logits
from jax_distill.objective import Execution
from jax_distill.synthetic import exact_targets, loss_inputs


def compare(*arguments, **options):
    call = jax.jit(
        lambda *arguments: full_token_values(*arguments, **options), compiler_options=QUICK_COMPILE
    )
    return call(*arguments)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_of_two_students_are_those_of_float64(temperature):
    """Masked cells hold NaN and ids out of range; one head has padding, a soft-cap and a bias;
    widths differ; T is no multiple of C."""
    one = loss_inputs(2, 13, width=8, vocab_size=61, top_k=1, valid=0.7, seed=1)
    two = loss_inputs(2, 13, width=5, vocab_size=61, top_k=1, padding=3, seed=2)
    bias = np.random.default_rng(0).normal(size=64).astype(np.float32)
    heads = {
        "plain": (one.hidden, Head(one.weight)),
        "other": (two.hidden, Head(two.weight, bias, vocab_size=61, soft_cap=9.0)),
    }
    teacher_hidden, teacher_head = one.hidden[::-1].copy(), Head(one.weight)
    labels, mask = one.batch.labels.copy(), one.batch.mask
    labels[~mask], teacher_hidden[~mask] = -100, np.nan

    def log_q(hidden: np.ndarray, head: Head, tau: float) -> np.ndarray:
        matmul = np.float64(hidden) @ np.float64(head.weight).T
        matmul = matmul + (0.0 if head.bias is None else np.float64(head.bias))
        return log_softmax(logits(matmul, head) / tau)

    execution = Execution(chunk_size=8)
    got = compare(
        teacher_hidden, teacher_head, heads, labels, mask,
        temperature=temperature, execution=execution,
    )  # fmt: skip
    log_p, at_one = (log_q(teacher_hidden, teacher_head, tau) for tau in (temperature, 1.0))
    label = np.where(mask, labels, 0)[..., None]
    assert got.keys() == heads.keys()
    for name, (hidden, head) in heads.items():
        q, q_one = (log_q(hidden, head, tau) for tau in (temperature, 1.0))
        wanted = {
            "kl": (np.exp(log_p) * (log_p - q)).sum(axis=-1),
            "cross_entropy": -np.take_along_axis(q_one, label, axis=-1)[..., 0],
            "teacher_cross_entropy": -np.take_along_axis(at_one, label, axis=-1)[..., 0],
            "top1_agreement": log_p.argmax(axis=-1) == q.argmax(axis=-1),
            "confidence": np.exp(q_one.max(axis=-1)),
            "correct": q_one.argmax(axis=-1) == label[..., 0],
            "teacher_confidence": np.exp(at_one.max(axis=-1)),
            "teacher_correct": at_one.argmax(axis=-1) == label[..., 0],
            "acceptance_rate": np.minimum(np.exp(at_one), np.exp(q_one)).sum(axis=-1),
        }
        # A logit is a sum of D ≤ 8 products and as exact as D·ε/2 of their sizes; a log-probability
        # is a logit minus a logsumexp; the KL is their mean.
        size = np.abs(np.float64(hidden)) @ np.abs(np.float64(head.weight)).T
        bound = (RTOL + 8 * EPSILON) * (size.max() + np.log(61.0))
        for key, values in wanted.items():
            found = np.asarray(getattr(got[name], key))
            assert found.dtype == np.float32 and not found[~mask].any()
            np.testing.assert_allclose(found[mask], values[mask], rtol=0, atol=bound)


def test_at_every_token_stored_the_full_kl_is_the_bucket():
    hidden, weight, batch, teacher, *_ = loss_inputs(1, 6, width=8, vocab_size=23, top_k=23)
    eye = np.eye(23, dtype=np.float32)
    full = compare(
        teacher.astype(np.float32), Head(eye), {"student": (hidden, Head(weight))},
        batch.labels, batch.mask,
    )["student"]  # fmt: skip
    top_k = token_values(hidden, Head(weight), batch)
    bound = RTOL * (1.0 + float(np.abs(teacher).max()))
    np.testing.assert_allclose(full.kl, top_k.kl, rtol=0, atol=bound)
    np.testing.assert_array_equal(full.top1_agreement, top_k.top1_agreement)
    np.testing.assert_allclose(full.cross_entropy, top_k.cross_entropy, rtol=0, atol=bound)


def test_a_teacher_is_at_no_distance_from_itself_in_bf16():
    hidden, weight, batch, *_ = loss_inputs(1, 6, width=8, vocab_size=23, top_k=2, scale=20.0)
    mine = jnp.bfloat16(hidden), Head(jnp.bfloat16(weight))
    values = compare(*mine, {"same": mine}, batch.labels, batch.mask)["same"]
    assert not np.any(values.kl) and np.all(np.asarray(values.top1_agreement) == 1.0)
    np.testing.assert_array_equal(values.cross_entropy, values.teacher_cross_entropy)


def test_the_teacher_is_projected_once_for_all_its_students():
    hidden, weight, batch, *_ = loss_inputs(1, 6, width=8, vocab_size=23, top_k=2)
    students = {name: (hidden, Head(weight)) for name in ("a", "b", "c")}
    jaxpr = jax.make_jaxpr(
        lambda teacher: full_token_values(teacher, Head(weight), students, batch.labels, batch.mask)
    )(hidden)
    assert str(jaxpr).count("dot_general[") == 4


def test_heads_of_two_vocabularies_are_refused():
    hidden, weight, batch, *_ = loss_inputs(1, 6, width=8, vocab_size=23, top_k=2)
    student = (hidden, Head(weight, vocab_size=22))
    with pytest.raises(ValueError, match="vocab_size 23 in the head of small, got 22"):
        full_token_values(hidden, Head(weight), {"small": student}, batch.labels, batch.mask)
    with pytest.raises(ValueError, match="temperature"):
        full_token_values(hidden, Head(weight), {}, batch.labels, batch.mask, temperature=0.0)


def test_targets_of_the_builder_are_the_definition():
    """`synthetic` itself: log p of the K and of the rest, at τ."""
    logits = np.random.default_rng(0).normal(0.0, 3.0, (2, 3, 11))
    targets = exact_targets(logits, top_k=4, temperature=2.0)
    p = np.exp(log_softmax(logits / 2.0))
    ids = np.argsort(-p, axis=-1)[..., :4]
    np.testing.assert_array_equal(targets.indices, ids)
    kept = np.take_along_axis(p, ids, axis=-1)
    np.testing.assert_allclose(np.exp(targets.logprobs), kept, rtol=8 * EPSILON)
    np.testing.assert_allclose(np.exp(targets.log_tail), 1 - kept.sum(axis=-1), rtol=8 * EPSILON)
