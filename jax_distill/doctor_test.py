"""The first-minute check: right implementations pass, a wrong one is named with what avoids it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jax_distill.attention
from jax_distill import doctor
from jax_distill.base.errors import RunError
from jax_distill.config import Config, LossConfig, TeacherConfig, TrainConfig
from jax_distill.model import ModelConfig, experts, grouped_experts

pytestmark = pytest.mark.usefixtures("optax_promotion")
MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    layer_types=("full_attention", "sliding_attention"),
    sliding_window=9,
    attention_sinks=True,
)


@pytest.fixture(autouse=True)
def nothing_remembered():
    for function in (doctor.compare_attention, doctor.compare_loss):
        function.cache_clear()
    yield
    for function in (doctor.compare_attention, doctor.compare_loss):
        function.cache_clear()


def config(dtype: str = "float32", **loss) -> Config:
    made = Config(train=TrainConfig(compute_dtype=dtype), loss=LossConfig(**loss))
    return dataclasses.replace(made, data=dataclasses.replace(made.data, sequence_length=48))


def break_attention(monkeypatch, name: str, change) -> None:
    table = jax_distill.attention._FUNCTIONS
    right = table[name]
    monkeypatch.setitem(table, name, lambda *words, **options: change(right(*words, **options)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_right_passes_and_a_line_says_how_far_it_is(dtype, capsys):
    doctor.check(config(dtype), [(MODEL, dtype)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and all(f"{dtype}; up to" in line for line in lines)
    assert "attention grouped against reference" in lines[0] and "window 9" in lines[1]
    assert "loss fused against dense" in lines[2]


@pytest.mark.parametrize("name", ["blockwise", "grouped"])
def test_attention_that_is_wrong_is_named_with_the_option_that_avoids_it(name, monkeypatch):
    """A scale that is off by 2 % stands for a wrong kernel: bf16 itself explains half a percent."""
    how = {"dtype": "bfloat16", "length": 48, "implementation": name}
    doctor.compare_attention(MODEL, "sliding_attention", **how).require()
    break_attention(monkeypatch, name, lambda output: output * 1.02)
    doctor.compare_attention.cache_clear()
    with pytest.raises(RunError, match=rf"attention {name} .*--train.attention ") as caught:
        doctor.compare_attention(MODEL, "sliding_attention", **how).require()
    assert "\n" not in str(caught.value) and f"attention {name}," not in str(caught.value)


def test_a_wrong_gradient_alone_is_caught(monkeypatch):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * 1.02,))
    break_attention(monkeypatch, "grouped", same)
    with pytest.raises(
        RunError, match="e-02 in the gradient of query, .* in the gradient of sinks"
    ):
        doctor.check(config(), [(MODEL, "float32")])


def test_experts_kernels_that_are_wrong_are_named(monkeypatch):
    """XLA's ragged_dot in the kernel's place: right, then with a scale that is off by 2 %."""
    model = dataclasses.replace(MODEL, num_local_experts=4, num_experts_per_tok=2)
    how = {"dtype": "bfloat16", "implementation": "hopper"}
    scale = jnp.ones((), jnp.bfloat16)

    def dot(rows, weights, sizes):
        return scale * jax.lax.ragged_dot(rows, weights, sizes)

    grouped = functools.partial(grouped_experts.grouped_mix, ragged_dot=dot)
    monkeypatch.setattr(experts, "grouped_mix", grouped)
    doctor.compare_experts.cache_clear()
    doctor.compare_experts(model, **how).require()
    scale *= jnp.bfloat16(1.03125)
    doctor.compare_experts.cache_clear()
    with pytest.raises(RunError, match=r"experts hopper .*--train.experts blocks"):
        doctor.compare_experts(model, **how).require()


def test_nan_is_no_agreement(monkeypatch):
    break_attention(monkeypatch, "grouped", lambda output: output * jnp.nan)
    with pytest.raises(RunError, match="nan in the output"):
        doctor.check(config(), [(MODEL, "float32")])


def test_what_does_not_run_is_named(monkeypatch):
    def fails(_):
        raise ValueError("no kernel\nfor this card")

    break_attention(monkeypatch, "grouped", fails)
    message = "attention grouped to run on .*ValueError: no kernel.*set --train.attention blockwise"
    with pytest.raises(RunError, match=message):
        doctor.check(config(), [(MODEL, "float32")])


def test_the_loss_as_configured_is_compared(monkeypatch):
    sizes = {"dtype": "float32", "vocab_size": 300, "width": 32, "top_k": 20}
    options = {"divergence": "jsd", "ce_weight": 0.3, "valid_first": True, "tail": "renormalize"}
    doctor.compare_loss(LossConfig(**options), **sizes).require()
    dense = doctor.compare_loss(LossConfig(implementation="dense"), **sizes)
    assert not dense.errors and "nothing to compare" in dense.line
    right = doctor.losses.loss

    def wrong(hidden, head, batch, objective, execution):
        sums = right(hidden, head, batch, objective, execution)
        if execution.implementation == "dense":
            return sums
        return sums._replace(loss=sums.loss * 1.001)

    monkeypatch.setattr(doctor.losses, "loss", wrong)
    doctor.compare_loss.cache_clear()
    with pytest.raises(RunError, match="loss fused .*--loss.implementation dense"):
        doctor.compare_loss(LossConfig(**options), **sizes).require()


def test_the_loss_beside_a_live_teacher_is_compared(monkeypatch, capsys):
    """Through the whole vocabulary; a teacher in bf16 beside a student in fp32."""
    online = dataclasses.replace(
        config(), teacher=TeacherConfig(mode="online", path="a", dtype="bfloat16")
    )
    teacher = dataclasses.replace(MODEL, hidden_size=24)
    models = [(MODEL, "float32"), (teacher, "bfloat16")]
    doctor.check(online, models)
    line = " ".join(capsys.readouterr().out.split())
    assert "loss fused against dense" in line and "a live teacher 24 wide" in line
    right = doctor.losses.loss

    def wrong(hidden, head, batch, objective, execution):
        sums = right(hidden, head, batch, objective, execution)
        assert batch.teacher is not None and batch.targets is None
        return sums._replace(
            loss=sums.loss * (1.0 if execution.implementation == "dense" else 1.001)
        )

    monkeypatch.setattr(doctor.losses, "loss", wrong)
    doctor.compare_loss.cache_clear()
    with pytest.raises(RunError, match="loss fused .*--loss.implementation dense"):
        doctor.check(online, models)


def test_without_a_configuration_the_machine_is_described_and_compared(capsys):
    doctor.main([])
    said = capsys.readouterr().out
    for words in ("devices: ", "host memory: ", "GB free", "versions: ", "cuDNN: ", "loss fused"):
        assert words in said
