"""The layerwise step is the ordinary step: parameters, moments, counters and metrics, over several
steps, under every remat, tied and not, in fp32 and bf16, on one device and on four."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import sharding
from jax_distill.checkpoint import Checkpoints
from jax_distill.config import LossConfig, Refusal
from jax_distill.model import Decoder
from jax_distill.optimizer import learning_rate_schedule, make_optimizer
from jax_distill.step import TrainState, make_state, make_train_step
from jax_distill.step_test import uneven_batch
from jax_distill.teacher_test import model_config

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS, RATE = 3, 1e-2
LOSS = LossConfig(chunk_size=5, ce_weight=0.5)
# Many small programs: compiling them well would take longer than running them badly.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def prepare(
    *,
    layerwise: bool,
    tied: bool = True,
    remat: str = "none",
    name: str = "adamw",
    devices: int = 1,
    param_dtype: str = "float32",
    state_dtype: str = "float32",
    micro: int = 4,
):
    """The jitted step, a state of random weights and a batch of four uneven rows."""
    config = dataclasses.replace(
        model_config(), tie_word_embeddings=tied, attention_bias=True, num_hidden_layers=3
    )
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(
        (1, devices), ("data", "fsdp"), devices=jax.devices()[:devices], axis_types=axes
    )
    model = Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(param_dtype), remat=remat)
    weights = nnx.state(model, nnx.Param)
    places = jax.tree.map(
        lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
        weights,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    nnx.update(model, jax.device_put(weights, places))
    schedule = learning_rate_schedule(
        "cosine", learning_rate=RATE, final=0.0, warmup_steps=1, steps=STEPS
    )
    knobs = dict(b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=None, seed=5)
    optimizer = make_optimizer(name, schedule, state_dtype=state_dtype, **knobs)
    graphdef, state = make_state(model, optimizer, mesh)
    step = make_train_step(
        graphdef,
        optimizer,
        schedule,
        loss=LOSS,
        vocab_size=300,
        places=jax.tree.map(lambda leaf: leaf.sharding, state),
        layerwise=layerwise,
        seed=5,
    )
    rows = uneven_batch([16, 9, 16, 3])
    batch = {k: v.reshape(-1, micro, *v.shape[1:]) for k, v in rows.items()}
    batch = sharding.place_batch(mesh, batch, leading=1)
    return step, state, batch


def run(**knobs):
    """State and metrics after STEPS steps."""
    step, state, batch = prepare(**knobs)
    program = step.lower(state, batch).compile(QUICK_COMPILE)
    for _ in range(STEPS):
        state, metrics = program(state, batch)
    return jax.device_get(state), jax.device_get(metrics)


ordinary = functools.cache(functools.partial(run, layerwise=False))


def assert_same(got, expected):
    """Up to fp32 rounding. Adam moves a weight by about the learning rate whatever its gradient's
    size, so a parameter may differ by a share of that; the moments are as tight as gradients."""
    (state, metrics), (other, numbers) = got, expected
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for key, value in numbers.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)
    for left, right in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(other.opt_state), strict=True
    ):
        scale = np.abs(right).max()
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5 * scale)
    for left, right in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True
    ):
        difference = np.abs(left - right)
        assert difference.max() <= 1e-3 * STEPS * RATE
        assert difference.mean() <= 1e-4 * STEPS * RATE
    assert state.step == other.step == STEPS


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
def test_adamw_under_every_remat(remat, tied):
    assert_same(run(layerwise=True, remat=remat, tied=tied), ordinary(tied=tied))


def test_sgd_with_momentum():
    assert_same(run(layerwise=True, name="sgd"), ordinary(name="sgd"))


def test_four_devices_that_split_the_parameters():
    assert_same(run(layerwise=True, devices=4), ordinary(tied=True))


def test_accumulation_in_the_backward_pass_is_one_batch():
    assert_same(run(layerwise=False, micro=1, tied=False), ordinary(tied=False))


def test_bf16_parameters_and_moments_take_the_same_chances():
    """Gradients differ by rounding, so a coin in a thousand may fall otherwise; no more."""
    dtypes = dict(param_dtype="bfloat16", state_dtype="bfloat16")
    (state, _), (other, _) = run(layerwise=True, **dtypes), run(layerwise=False, **dtypes)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True)
    for left, right in pairs:
        assert left.dtype == right.dtype == jnp.bfloat16
        assert np.mean(left == right) > 0.98
    (adam, *_), (expected, *_) = state.opt_state, other.opt_state
    for moment in ("mu", "nu"):
        for left, right in zip(
            jax.tree.leaves(getattr(adam, moment)),
            jax.tree.leaves(getattr(expected, moment)),
            strict=True,
        ):
            assert left.dtype == right.dtype == jnp.bfloat16
            assert np.mean(left == right) > 0.9


def test_it_compiles_once_and_resumes_bit_for_bit(tmp_path):
    """bf16 parameters and moments; the chance of a step needs no state of its own."""
    dtypes = dict(param_dtype="bfloat16", state_dtype="bfloat16")
    step, start, batch = prepare(layerwise=True, **dtypes)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
    )
    state = start
    for _ in range(2):
        state, _ = step(state, batch)
    with Checkpoints(tmp_path / "c", keep=1, seed=5) as checkpoints:
        checkpoints.save(2, state.params, state.opt_state)
    for _ in range(2):
        state, _ = step(state, batch)
    assert step._cache_size() == 1
    with Checkpoints(tmp_path / "c", keep=1, seed=5) as checkpoints:
        found = checkpoints.restore(2, params=like.params, opt_state=like.opt_state)
    again = TrainState(step=jnp.int32(2), **found)
    again = again._replace(step=jax.device_put(again.step, state.step.sharding))
    for _ in range(2):
        again, _ = step(again, batch)
    for left, right in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(left, right)


def test_several_micro_batches_are_refused():
    with pytest.raises(Refusal, match=r"one micro-batch .*got 4"):
        run(layerwise=True, micro=1)
