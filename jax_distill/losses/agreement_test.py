"""Every implementation, tail and divergence against float64, over sizes that do not divide."""

import inspect
import textwrap
import zlib
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, assume, given, seed, settings
from hypothesis import strategies as st

from jax_distill import losses
from jax_distill.config import LossConfig, Refusal
from jax_distill.losses import DIVERGENCES, IMPLEMENTATIONS, TAILS, LossSums, kl_and_grads
from jax_distill.losses.float64_test import Batch, float64_loss, make_batch, top_k

FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.version.__version_info__ < (0, 11):  # later compilers know no such option
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False  # a third of the time
EPSILON = float(np.finfo(np.float32).eps)
SLACK = 4.0
EVERY = (*IMPLEMENTATIONS, "kl_and_grads")
EVERYTHING: dict[str, Any] = {
    "temperature": 2.0,
    "kl_weight": 0.7,
    "ce_weight": 0.3,
    "z_loss_weight": 0.01,
    "soft_cap": 6.0,
    "logit_scale": 0.8,
}


class Core(NamedTuple):
    """What kl_and_grads tells of the sums."""

    loss: jax.Array
    count: jax.Array


def arrays(batch: Batch, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The loss's positional arguments by name, hidden and lm_head in `dtype`."""
    out = {name: getattr(batch, name) for name in Batch.__dataclass_fields__ if name != "bias"}
    for name in ("hidden", "lm_head"):
        out[name] = jnp.asarray(out[name], dtype)
    for name in ("labels", "teacher_indices", "teacher_count"):
        out[name] = jnp.asarray(out[name], jnp.int32)
    for name in ("teacher_logprobs", "teacher_log_tail"):
        out[name] = jnp.asarray(out[name], jnp.float32)
    return out | {"mask": jnp.asarray(batch.mask)}


@cache
def compiled(implementation: str, wrt: tuple[int, ...], knobs: tuple[tuple[str, Any], ...]) -> Any:
    """jit of (hidden, lm_head, bias, the rest) → sums and gradients."""

    def core(hidden, lm_head, bias, data):
        """kl_and_grads in the shape of value_and_grad."""
        out = kl_and_grads(**data, hidden=hidden, lm_head=lm_head, bias=bias, **dict(knobs))
        (loss, count), *gradients = out
        return (loss, Core(loss, count)), gradients

    def value(hidden, lm_head, bias, data):
        loss = IMPLEMENTATIONS[implementation]
        sums = loss(**data, hidden=hidden, lm_head=lm_head, bias=bias, **dict(knobs))
        return sums.loss, sums

    function = jax.value_and_grad(value, wrt, has_aux=True) if wrt else value
    function = core if implementation == "kl_and_grads" else function
    return jax.jit(function, compiler_options=FAST_COMPILE)


def run(
    implementation: str, batch: Batch, *, dtype: Any = jnp.float32, **knobs: Any
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Sums and gradients as float64_loss gives them, C = 4 unless told."""
    data = arrays(batch, dtype)
    bias = None if batch.bias is None else jnp.asarray(batch.bias, jnp.float32)
    wrt = (0, 1) if bias is None else (0, 1, 2)
    jitted = compiled(implementation, wrt, tuple({"chunk_size": 4, **knobs}.items()))
    hidden, lm_head = data.pop("hidden"), data.pop("lm_head")
    (_, sums), gradients = jitted(hidden, lm_head, bias, data)
    names = ("hidden", "lm_head", "bias")
    return (
        {name: float(value) for name, value in sums._asdict().items()},
        {name: np.asarray(g, np.float64) for name, g in zip(names, gradients, strict=False)},
    )


def forward(implementation: str, data: dict[str, Any], **knobs: Any) -> LossSums:
    """The sums alone."""
    jitted = compiled(implementation, (), tuple({"chunk_size": 4, **knobs}.items()))
    rest = {name: value for name, value in data.items() if name not in ("hidden", "lm_head")}
    return jitted(data["hidden"], data["lm_head"], None, rest)[1]


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Of the whole array: ‖got − wanted‖ / ‖wanted‖."""
    return float(np.linalg.norm(got - wanted)) / size(wanted)


def size(wanted: np.ndarray) -> float:
    """‖wanted‖, never 0."""
    return max(float(np.linalg.norm(wanted)), 1e-30)


def rounding(batch: Batch, wanted: dict[str, np.ndarray], **knobs: Any) -> dict[str, float]:
    """How far each gradient moves, by norm, when every input and every logit moves by fp32's ε: a
    gradient that is a small difference of large terms is known no better than that."""
    random = np.random.default_rng(0)
    columns = len(batch.lm_head)

    def moved(values: np.ndarray) -> np.ndarray:
        return values * (1 + EPSILON * random.normal(size=values.shape))

    furthest = dict.fromkeys(wanted, 0.0)
    for _ in range(4):
        bias = np.zeros(columns) if batch.bias is None else moved(batch.bias)
        _, gradients = float64_loss(
            batch.replace(
                hidden=moved(batch.hidden),
                lm_head=moved(batch.lm_head),
                teacher_logprobs=moved(batch.teacher_logprobs),
                teacher_log_tail=moved(batch.teacher_log_tail),
                bias=bias + EPSILON * random.normal(size=columns),
            ),
            **knobs,
        )
        for name, gradient in gradients.items():
            distance = float(np.linalg.norm(gradient - wanted[name]))
            furthest[name] = max(furthest[name], distance)
    return furthest


def assert_agrees(
    got: Any, wanted: Any, *, rtol: float = 2e-6, slack: dict[str, float] | None = None
) -> None:
    """Sums to fp32 rounding of their own size, gradients by norm, and `slack` times SLACK more."""
    sums, gradients = got
    assert {"loss", "count"} <= sums.keys() and {"hidden", "lm_head"} <= gradients.keys()
    for name in sums.keys() & wanted[0].keys():
        assert sums[name] == pytest.approx(wanted[0][name], rel=rtol, abs=2e-5), name
    for name, gradient in gradients.items():
        allowed = rtol + SLACK * (slack or {}).get(name, 0.0) / size(wanted[1][name])
        assert relative_error(gradient, wanted[1][name]) < allowed, name


@st.composite
def problems(draw: st.DrawFn) -> tuple[Batch, dict[str, Any]]:
    """A batch that fits nothing: T no multiple of C, or shorter; any B, D, V and K ≤ V."""
    chunk_size = draw(st.integers(2, 9))
    positions = draw(st.integers(1, 14).filter(lambda t: t % chunk_size))
    columns = draw(st.integers(3, 70))
    k = draw(st.sampled_from([1, 2, 5, columns - 1, columns]).filter(lambda k: k <= columns))
    shape = (draw(st.integers(1, 3)), positions, draw(st.integers(1, 9)), columns, k)
    assume(shape != (1, 1, 1, 3, 1))  # hypothesis begins with the least of everything
    temperature = draw(st.sampled_from([1.0, 2.0]))
    padding = draw(st.integers(0, min(2, columns - k)))
    batch = make_batch(
        draw(st.integers(0, 1000)),
        shape=shape,
        vocab_size=columns - padding,
        temperature=temperature,
        holes=draw(st.booleans()),
    )
    knobs = {"ce_weight": draw(st.sampled_from([0.0, 0.5])), "temperature": temperature}
    order = {"valid_first": draw(st.booleans()), "chunk_size": chunk_size}
    return batch, {**knobs, **order, "vocab_size": columns - padding, "jsd_beta": 0.3}


@pytest.mark.parametrize("draws", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", TAILS)
def test_every_objective_of_every_implementation_equals_float64(tail, divergence, draws):
    """Case 26: V of no block's size, T no multiple of C, a remainder shorter than C."""

    @seed(zlib.crc32(f"{tail} {divergence} {draws}".encode()))
    # A failure is not made smaller: each try compiles five programs.
    @settings(max_examples=draws, deadline=None, database=None, phases=(Phase.generate,))
    @given(problems())
    def holds(problem):
        batch, knobs = problem
        knobs = {**knobs, "tail": tail, "divergence": divergence}
        wanted = float64_loss(batch, **knobs)
        slack = rounding(batch, wanted[1], **knobs)
        # Reverse KL's gradient is q·(log q − log p − KL): both of them near 100 at LOG_FLOOR, and
        # fp32 holds neither finer than ε of its size.
        rtol = 2e-6 + EPSILON * abs(wanted[0]["kl"]) / max(wanted[0]["count"], 1.0)
        for implementation in EVERY:
            assert_agrees(run(implementation, batch, **knobs), wanted, rtol=rtol, slack=slack)

    holds()


@pytest.mark.parametrize("implementation", EVERY)
def test_every_implementation_applies_every_knob(implementation):
    """Case 24: soft-cap, logit scale and bias are applied, not dropped; padding columns too."""
    batch = make_batch(2, vocab_size=50, temperature=2.0)
    batch = batch.replace(bias=np.random.default_rng(0).normal(size=67))
    knobs = {**EVERYTHING, "tail": "renormalize", "divergence": "jsd", "vocab_size": 50}
    wanted = float64_loss(batch, **knobs)
    assert_agrees(run(implementation, batch, **knobs), wanted)
    dropped = [(batch, {**knobs, name: None}) for name in ("soft_cap", "logit_scale", "vocab_size")]
    for other in [*dropped, (batch.replace(bias=None), knobs)]:  # the oracle does notice
        loss = float64_loss(other[0], **other[1])[0]["loss"]
        assert abs(loss / wanted[0]["loss"] - 1) > 1e-3


def test_remainder_is_counted_once_and_padding_columns_never():
    """Case 26: sums over T = 13 in chunks of 5 are those of one chunk; columns ≥ 60 hold +50."""
    batch = make_batch(4, vocab_size=60, holes=False)
    lm_head = batch.lm_head.copy()
    lm_head[60:] = 50.0 * np.sign(batch.hidden.mean(axis=(0, 1)))
    batch = batch.replace(lm_head=lm_head)
    wanted = float64_loss(batch, vocab_size=60)
    for chunk_size in (5, 100):
        assert_agrees(run("fused", batch, chunk_size=chunk_size, vocab_size=60), wanted)


def test_differently_padded_heads_cut_to_the_tokenizer():
    """Case 1: tokenizer 300, teacher 320 wide, student 304: equals both cut to 300."""
    batch = make_batch(5, shape=(2, 7, 8, 304, 9), vocab_size=300)
    cut = batch.replace(lm_head=batch.lm_head[:300])
    sums, gradients = run("fused", batch, vocab_size=300)
    assert not gradients["lm_head"][300:].any()
    gradients["lm_head"] = gradients["lm_head"][:300]
    assert_agrees((sums, gradients), float64_loss(cut))


def test_columns_only_the_student_has_belong_to_the_tail():
    """Case 2: teacher of 300 tokens, student of 320."""
    batch = make_batch(6, shape=(2, 7, 8, 320, 9), teacher_vocab=300)
    sums, gradients = run("fused", batch)
    assert_agrees((sums, gradients), float64_loss(batch))
    lower = run("fused", batch, vocab_size=300)[0]
    assert sums["kl"] > lower["kl"]  # what the student puts on them is lost to the K


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_teacher_ids_the_student_lacks_fold_into_the_tail(implementation):
    """Case 1, the other way round: K entries at and beyond the student's vocabulary."""
    batch = make_batch(7, shape=(2, 7, 8, 40, 6), teacher_vocab=60)
    assert np.any(batch.teacher_indices >= 40)
    assert_agrees(run(implementation, batch), float64_loss(batch))


@pytest.mark.parametrize("implementation", ["dense", "fused"])
def test_ids_at_the_ends_of_the_vocabulary_are_ordinary(implementation):
    """Case 6: 0 and V−1 are tokens; no sentinel lives in the range of ids."""
    batch = make_batch(8, shape=(2, 6, 8, 33, 4))
    indices = np.broadcast_to([0, 32, 5, 6], batch.teacher_indices.shape).copy()
    labels = np.where(np.arange(6) % 2, 0, 32) * np.ones((2, 1), int)
    batch = batch.replace(
        teacher_indices=indices,
        teacher_logprobs=np.nan_to_num(batch.teacher_logprobs, nan=-3.0),
        labels=labels,
    )
    assert_agrees(run(implementation, batch, ce_weight=1.0), float64_loss(batch, ce_weight=1.0))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_temperature_scales_value_and_gradient(temperature):
    """Case 22: at K = V the bucket is the whole KL at that τ; the gradient is its gradient."""
    batch = make_batch(9, shape=(2, 6, 8, 23, 23), holes=False, temperature=temperature)
    wanted = float64_loss(batch, temperature=temperature, tail="truncate")
    got = run("fused", batch, temperature=temperature)
    assert_agrees(got, wanted)
    assert got[0]["loss"] == pytest.approx(temperature**2 * got[0]["kl"], rel=1e-6)


def test_a_teacher_of_none_is_cross_entropy_alone():
    batch = make_batch(10)
    data = arrays(batch) | dict.fromkeys(
        ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count")
    )
    wanted = float64_loss(batch, kl_weight=0.0, ce_weight=1.0)[0]["loss"]
    for name in ("dense", "fused"):
        sums = forward(name, data, kl_weight=0.0, ce_weight=1.0)
        assert float(sums.loss) == pytest.approx(wanted, rel=1e-6)
        assert np.isnan(sums.kl) and np.isnan(sums.student_mass)


def test_top1_agreement_counts_strict_winners_only():
    ids, logprobs, log_tail = top_k(np.log(np.array([[[0.1, 0.6, 0.2, 0.1]] * 3])), 2)
    hidden = np.array([[[0.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]])
    batch = make_batch(0, shape=(1, 3, 4, 4, 2), holes=False).replace(
        hidden=hidden,
        lm_head=np.eye(4),
        teacher_indices=ids,
        teacher_logprobs=logprobs,
        teacher_log_tail=log_tail,
    )
    for name in ("dense", "fused"):
        assert float(forward(name, arrays(batch)).top1_agreement) == 1.0


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"tail": "buckets"}, "tail"),
        ({"divergence": "kl"}, "divergence"),
        ({"divergence": "jsd", "jsd_beta": 1.0}, "jsd_beta"),
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"vocab_size": 68}, "vocab_size"),
        ({"teacher_count": None}, "teacher"),
        ({"labels": jnp.zeros((2, 12), jnp.int32)}, "labels"),
        ({"implementation": "fusedd"}, "implementation"),
    ],
)
def test_nonsense_is_refused_in_one_line(knobs, word):
    with pytest.raises(Refusal, match=word) as refusal:
        IMPLEMENTATIONS["fused"](**arrays(make_batch()) | knobs)
    assert "\n" not in str(refusal.value)


def test_fused_is_the_default_here_and_in_the_configuration():
    assert inspect.signature(losses.loss_sums).parameters["implementation"].default == "fused"
    assert LossConfig().implementation == "fused"


def test_check_reports_ids_out_of_range_and_duplicates(capsys):
    batch = make_batch(12, holes=False)
    indices, labels = batch.teacher_indices.copy(), batch.labels.copy()
    indices[1, 4, 2] = indices[1, 4, 0]
    labels[0, 3] = 67
    indices[0, 7, 1], indices[1, 2, 4] = 67, -1
    bad = batch.replace(teacher_indices=indices, labels=labels)
    masked = np.ones(batch.mask.shape, bool)
    masked[[1, 0, 0, 1], [4, 3, 7, 2]] = False

    def reported(batch: Batch) -> str:
        forward("fused", arrays(batch), check=True)
        jax.effects_barrier()
        return capsys.readouterr().err

    lines = reported(bad).splitlines()
    assert len(lines) == 3
    for line, wanted, place in zip(
        lines,
        (
            "1 labels out of range",
            "2 rows of teacher ids out of range",
            "1 rows of teacher ids wit",
        ),
        ("row 0, position 3", "row 0, position 7", "row 1, position 4"),
        strict=True,
    ):
        assert wanted in line and "vocab_size 67" in line and line.endswith(place)
    assert reported(batch) == reported(bad.replace(mask=masked)) == ""


def test_the_example_of_the_package_runs():
    example = losses.__doc__.split("\n\n", 2)[2].rsplit("\n\n", 1)[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)
    assert float(names["value"]) > 0
    assert names["d_hidden"].shape == (2, 64, 32) and names["d_lm_head"].shape == (1000, 32)
    assert not names["d_hidden"][1, 32:].any()
