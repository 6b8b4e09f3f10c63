"""The public functions: values per token, what is refused, targets that never saw a disk."""

import inspect
import pydoc
import textwrap
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill import losses
from jax_distill.batch import TopK
from jax_distill.batch_test import exact_encoding
from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Head, kl_and_grads, loss, token_values
from jax_distill.losses.agreement_test import (
    EPSILON,
    EVERYTHING,
    RTOL,
    Case,
    chunks_of,
    forward,
    make_case,
    on_device,
)
from jax_distill.objective import TAILS, Execution, Objective
from jax_distill.synthetic import loss_inputs


@pytest.mark.parametrize("valid", [0.7, 0.0])
def test_token_values_sum_to_the_sums_of_the_loss(valid):
    case = on_device(make_case(30, temperature=2.0, bias=True, soft_cap=6.0, valid=valid))
    values = jax.jit(token_values, static_argnums=(3, 4))(*case, EVERYTHING, chunks_of(5, case))
    sums = loss(*case, EVERYTHING, chunks_of(4, case))
    for name, value in values._asdict().items():
        assert value.shape == (2, 13) and value.dtype == jnp.float32
        assert not np.any(np.asarray(value)[~np.asarray(case.batch.mask)])
        # Not one program: each value may differ by RTOL of its size, at least 1.
        size = float(np.sum(np.abs(value))) + float(sums.count)
        assert abs(float(np.sum(value)) - float(getattr(sums, name))) <= RTOL * size


def test_the_gradient_of_one_tokens_value_is_that_tokens():
    case = on_device(make_case(33))

    def weighed(hidden, which):
        values = token_values(hidden, case.head, case.batch, execution=chunks_of(4, case))
        return jnp.sum(values.loss * which)

    which = jnp.zeros((2, 13)).at[:, 3:5].set(1.0)
    gradient = jax.jit(jax.grad(weighed), compiler_options=QUICK_COMPILE)
    some, every = gradient(case.hidden, which), gradient(case.hidden, jnp.ones((2, 13)))
    np.testing.assert_array_equal(some[:, 3:5], every[:, 3:5])
    assert not np.any(some[:, :3]) and not np.any(some[:, 5:])


def with_field(case: Case, field: str, value: Any) -> tuple[Any, ...]:
    """(hidden, head, batch) with one field replaced: 'head.vocab_size', 'targets.count', …"""
    hidden, head, batch = case
    owner, _, name = field.partition(".")
    if owner == "head":
        head = replace(head, **{name: value})
    elif owner == "batch":
        batch = replace(batch, **{name: value})
    elif owner == "targets":
        batch = replace(batch, targets=replace(batch.targets, **{name: value}))
    return value if owner == "hidden" else hidden, head, batch


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("hidden", np.zeros((13, 8), np.float32), "hidden"),
        ("head.vocab_size", 68, "vocab_size"),
        ("head.vocab_size", 0, "vocab_size"),
        ("head.bias", np.zeros(66, np.float32), "bias"),
        ("head.weight", np.zeros((67, 9), np.float32), "weight"),
        ("head.weight", np.zeros((8, 67), np.float32), "transpose it: head.weight is .V,D."),
        ("batch.labels", np.zeros((2, 12), np.int32), "labels"),
        ("batch.targets", None, "targets"),
        ("targets.temperature", 0.0, "temperature"),
        ("targets.count", np.zeros((2, 13, 1), np.int32), "count"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(field, value, word):
    for function in (loss, kl_and_grads, token_values):
        with pytest.raises(ValueError, match=word) as error:
            function(*with_field(make_case(), field, value))
        assert "\n" not in str(error.value) and "; " in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        (Objective, {"tail": "buckets"}, "tail"),
        (Objective, {"divergence": "kl"}, "divergence"),
        (Objective, {"divergence": "jsd", "jsd_beta": 1.0}, "jsd_beta"),
        (Execution, {"implementation": "fusedd"}, "implementation"),
        (Execution, {"chunk_size": 0}, "chunk_size"),
        (Execution, {"row_shards": 0}, "row_shards"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(kind, options, word):
    with pytest.raises(ValueError, match=word) as error:
        kind(**options)
    assert "\n" not in str(error.value)


def test_the_public_functions_take_at_most_seven_arguments():
    for function in (loss, kl_and_grads, token_values, losses.full_token_values):
        assert len(inspect.signature(function).parameters) <= 7
        assert "Args:" in function.__doc__ or "as `loss` has them" in function.__doc__


def test_help_shows_the_signature_and_the_mathematics():
    text = pydoc.plain(pydoc.render_doc(loss))
    for part in ("loss(hidden: ", "kl_weight·τ²·divergence", "Σ_K p_k log(p_k/q_k)"):
        assert part in text
    assert "partial" not in text


@pytest.mark.parametrize("tail", TAILS)
def test_captured_targets_feed_the_loss_without_a_disk(tail):
    """Encoded, decoded by numpy or under jit: the same loss, and the exact targets' to what float16
    gaps lose, at another temperature than 1."""
    hidden, weight, batch, teacher, *_ = loss_inputs(
        2, 6, width=8, vocab_size=67, top_k=5, temperature=2.0
    )
    encoded = exact_encoding(teacher, top_k=5, temperatures=(1.0, 2.0))
    case = Case(hidden, Head(weight), batch)
    objective, execution = Objective(tail=tail), chunks_of(4, case)

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def from_encoded(hidden, head, encoded):
        decoded = replace(batch, targets=encoded.decode(2.0))
        return loss(hidden, head, decoded, objective, execution).kl

    def from_targets(targets: TopK) -> float:
        other = case._replace(batch=replace(batch, targets=targets))
        return float(forward("fused", other, objective).kl)

    exact, in_numpy = from_targets(batch.targets), from_targets(encoded.decode(2.0))
    in_jit = float(from_encoded(hidden, Head(weight), encoded))
    # Where log p is off by δ, Σ p log(p/q) is off by at most δ·Σ p(1 + |log p/q|) ≤ δ·(KL + 2).
    # Each decoding rounds log p, and the shift that puts the sum right doubles what a gap lost.
    share = exact + 2 * batch.mask.sum()
    rounded = 8 * EPSILON * float(np.abs(batch.targets.logprobs).max())
    assert abs(in_numpy - in_jit) <= (rounded + RTOL) * share
    of_gaps = 2 * 2.0**-11 * float(encoded.gaps.max()) / 2.0
    assert abs(in_numpy - exact) <= (rounded + RTOL + of_gaps) * share


def test_the_example_of_the_package_runs():
    example = losses.__doc__.split("\n\n", 2)[2].rsplit("\n\n", 1)[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)
    assert float(names["value"]) > 0
    assert names["d_hidden"].shape == (2, 64, 32) and names["d_weight"].shape == (1000, 32)
    assert not names["d_hidden"][1, 32:].any()
