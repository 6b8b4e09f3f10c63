"""Gradients of every part of an output are `jax.grad`'s; the layerwise step is the ordinary step:
parameters, moments, counters and metrics, over several steps, under every remat, tied and not, in
fp32 and bf16, on one device and on four."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import sharding
from jax_distill.base.errors import RunError
from jax_distill.devices import QUICK_COMPILE
from jax_distill.model import Decoder
from jax_distill.model.layers import Initializer, Layer
from jax_distill.objective import Execution
from jax_distill.teacher_test import model_config
from jax_distill.training.checkpoint import Checkpoints
from jax_distill.training.gradients import backward
from jax_distill.training.optimizer import learning_rate_schedule, make_optimizer
from jax_distill.training.state import TrainState, make_state
from jax_distill.training.step import make_train_step
from jax_distill.training.step_test import TASK, fsdp_mesh, put_on, uneven_batch

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS, RATE, B1, B2 = 3, 1e-2, 0.9, 0.95
EPS = float(np.finfo(np.float32).eps)


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
    clip_norm: float | None = None,
    offload: str = "none",
):
    """The jitted step, a state of random weights and a batch of four uneven rows."""
    config = model_config(tie_word_embeddings=tied, attention_bias=True, num_hidden_layers=3)
    mesh = fsdp_mesh(devices)
    model = Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(param_dtype), remat=remat)
    put_on(mesh, model)
    schedule = learning_rate_schedule(
        "cosine", learning_rate=RATE, final=0.0, warmup_steps=1, steps=STEPS
    )
    options = dict(b1=B1, b2=B2, weight_decay=0.1, clip_norm=clip_norm, seed=5)
    optimizer = make_optimizer(name, schedule, state_dtype=state_dtype, **options)
    graphdef, state = make_state(model, optimizer, mesh, offload=offload)
    step = make_train_step(
        graphdef,
        optimizer,
        schedule,
        TASK._replace(execution=Execution(chunk_size=5 * micro // devices, row_shards=devices)),
        shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
        layerwise=layerwise,
        seed=5,
    )
    batch = uneven_batch([16, 9, 16, 3]).micro_batches(micro)
    return step, state, sharding.shard_batch(mesh, batch, leading=1)


def run(*, starts=(), **options):
    """(state, metrics) after each of STEPS steps; `starts`: the states these begin with, where it
    is not what the step before left."""
    step, state, batch = prepare(**options)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    program = step.lower(state, batch).compile(QUICK_COMPILE)
    found = []
    for number in range(STEPS):
        if number and starts:  # copied, for it is donated
            state = jax.device_put(jax.tree.map(np.copy, starts[number - 1]), shardings)
        state, metrics = program(state, batch)
        found.append(jax.device_get((state, metrics)))
    return found


@functools.cache
def ordinary(**options):
    return run(layerwise=False, **options)


def assert_same(*, like, **options):
    """Each step, from the state that the ordinary run `like` had before it: up to fp32 rounding.

    A gradient is a sum over the batch's positions, whose terms come of sums over the head's
    columns, n terms. Each addition rounds by at most eps/2 of Σ|terms|, so two orders of them
    differ by √n·eps·Σ|terms|, roundings being of either sign. So are the terms, whose Σ|terms| is
    then √n times the largest entry G. Hence n·eps·G, in a moment as in a gradient, and twice as
    much in one of squares.

    Adam moves a weight by about the learning rate whatever its gradient's size, and in a direction
    that rounding chose where the gradient is not above that. So a weight is held against what its
    own moments make of it, where nothing but the last roundings differs.
    """
    before = ordinary(**like)
    found = run(starts=[state for state, _ in before], **options)
    terms = 4 * 16 + model_config().vocab_size
    for number, ((state, metrics), (other, numbers)) in enumerate(
        zip(found, before, strict=True), 1
    ):
        assert jax.tree.structure(state) == jax.tree.structure(other)
        assert state.step == other.step == number
        for key, value in numbers.items():
            np.testing.assert_allclose(metrics[key], value, rtol=terms * EPS, err_msg=key)
        for left, right in zip(
            jax.tree.leaves(state.opt_state), jax.tree.leaves(other.opt_state), strict=True
        ):
            np.testing.assert_allclose(
                left, right, rtol=0, atol=2 * terms * EPS * np.abs(right).max()
            )
        rate = float(numbers["learning_rate"])
        for left, right, u, v in zip(
            *(jax.tree.leaves(x.params) for x in (state, other)),
            *(jax.tree.leaves(directions(x.opt_state, number)) for x in (state, other)),
            strict=True,
        ):
            rounding = EPS * (2 * np.abs(right) + 8 * rate * np.maximum(np.abs(u), np.abs(v)))
            np.testing.assert_array_less(np.abs(left - right + rate * (u - v)), rounding)


def directions(opt_state, count):
    """What a step of the learning rate goes along, from the moments after it, in float64."""
    wide = jax.tree.map(np.float64, opt_state)
    states = jax.tree.leaves(wide, is_leaf=lambda x: hasattr(x, "trace") or hasattr(x, "nu"))
    if hasattr(states[0], "trace"):
        return states[0].trace

    def unbiased(m, v):
        return m / (1 - B1**count) / (np.sqrt(v / (1 - B2**count)) + 1e-8)

    return jax.tree.map(unbiased, states[0].mu, states[0].nu)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
def test_adamw_under_every_remat(remat, tied):
    assert_same(layerwise=True, remat=remat, tied=tied, like=dict(tied=tied))


def test_sgd_with_momentum():
    assert_same(layerwise=True, name="sgd", like=dict(name="sgd"))


def test_four_devices_that_split_the_parameters():
    assert_same(layerwise=True, devices=4, like=dict(tied=True))


def test_accumulation_in_the_backward_pass_is_one_batch():
    assert_same(layerwise=False, micro=1, tied=False, like=dict(tied=False))


def test_bf16_parameters_and_moments_are_rounded_with_the_same_bits():
    """Gradients differ by rounding, so a draw in a thousand may come out otherwise; no more."""
    dtypes = dict(param_dtype="bfloat16", state_dtype="bfloat16")
    (state, _), (other, _) = (run(layerwise=each, **dtypes)[-1] for each in (True, False))
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
    """bf16 parameters and moments; the rounding bits of a step need no state of their own."""
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


def test_a_jax_whose_vjp_keeps_its_arguments_is_refused(monkeypatch):
    plain = jax.vjp

    def vjp(function, *arguments):
        out, pullback = plain(function, *arguments)
        return out, lambda cotangent: pullback(cotangent)

    monkeypatch.setattr(jax, "vjp", vjp)
    with pytest.raises(RunError, match=rf"args_res, got {jax.__version__}"):
        prepare_gradients("none", tied=True)


class RoutedLayer(Layer):
    """A layer with two statistics of its input and output beside it, as a router's layer has."""

    def __call__(self, x, inputs):
        y, _ = super().__call__(x, inputs)
        scale = self.input_layernorm.weight[...][None]
        return y, {"energy": jnp.mean(x * y, axis=0), "load": jnp.tanh(x * scale).sum()}


class RoutedDecoder(Decoder):
    def __init__(self, config, **options):
        super().__init__(config, **options)
        init = Initializer(options["rngs"], config.initializer_range, jnp.dtype(jnp.float32))
        self.layers = RoutedLayer(
            init, config, implementation="reference", experts="blocks", row_sharding=None
        )


def every_part(model, output):
    """A loss that reads all of an output: hidden states, layers 2 and 0, both statistics, head."""
    logits = output.hidden @ model.lm_head_weight().T
    weights = jnp.arange(1.0, 4.0)
    loss = jnp.sum(jnp.square(logits)) / 100
    loss += jnp.sum(jnp.sin(output.layers[0])) + 3.0 * jnp.sum(jnp.cos(output.layers[1]))
    loss += jnp.sum(weights[:, None] * jnp.square(output.aux["energy"]))
    return loss + jnp.sum(weights * output.aux["load"]), output.aux["load"]


def prepare_gradients(remat, *, tied):
    """(graphdef, params, inputs [A,B,T]) of three routed layers, and `backward`'s sum over A."""
    config = model_config(tie_word_embeddings=tied, num_hidden_layers=3)
    model = RoutedDecoder(config, rngs=nnx.Rngs(0), remat=remat)
    graphdef, params = nnx.split(model, nnx.Param)
    batch = uneven_batch([16, 9, 16, 3]).micro_batches(2).map(jnp.asarray)

    def gradients(params, batch):
        def add(total, some, grads):
            return some.write(total, jax.tree.map(jnp.add, some.read(total), grads))

        def accumulate(total, micro):
            return backward(
                graphdef,
                params,
                micro,
                loss_fn=every_part,
                carry=total,
                on_gradient=add,
                hidden_layers=(2, 0),
            )

        return jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batch)

    program = jax.jit(gradients).lower(params, batch).compile(QUICK_COMPILE)
    return graphdef, params, batch, program(params, batch)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
def test_gradients_through_chosen_layers_and_aux_are_those_of_a_plain_forward(remat, tied):
    """Cotangents of the last layer, of the first, and of what layers return beside their output,
    of two micro-batches. Rounding: D·L·T fp32 additions of each sum at most."""
    graphdef, params, batch, (got, loads) = prepare_gradients(remat, tied=tied)

    def plain(params):
        def total(micro):
            model = nnx.merge(graphdef, params)
            inputs = (micro.tokens, micro.segment_ids, micro.positions)
            return every_part(model, model.apply(*inputs, hidden_layers=(2, 0)))

        losses, loads = zip(*[total(batch.map(lambda x, a=a: x[a])) for a in (0, 1)], strict=True)
        return sum(losses), jnp.stack(loads)

    expected, theirs = jax.jit(jax.grad(plain, has_aux=True))(params)
    np.testing.assert_allclose(loads, theirs, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5 * np.abs(right).max(), rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_in_the_backward_pass_takes_the_gradients_of_layers_and_aux_too(tied):
    """w ← w − g in the backward pass, one batch: w − g, up to the rounding of that difference and
    of g (as above)."""
    config = model_config(tie_word_embeddings=tied, num_hidden_layers=3)
    graphdef, params = nnx.split(RoutedDecoder(config, rngs=nnx.Rngs(0)), nnx.Param)
    batch = uneven_batch([16, 9, 16, 3]).map(jnp.asarray)

    def update(params, some, grads):
        return some.write(params, jax.tree.map(jnp.subtract, some.read(params), grads))

    def descend(params, batch):
        return backward(
            graphdef,
            params,
            batch,
            loss_fn=every_part,
            carry=params,
            on_gradient=update,
            params_of=lambda carry: carry,
            hidden_layers=(2, 0),
        )

    def plain(params):
        model = nnx.merge(graphdef, params)
        inputs = (batch.tokens, batch.segment_ids, batch.positions)
        return every_part(model, model.apply(*inputs, hidden_layers=(2, 0)))

    got, loads = jax.jit(descend).lower(params, batch).compile(QUICK_COMPILE)(params, batch)
    gradients, theirs = jax.jit(jax.grad(plain, has_aux=True))(params)
    np.testing.assert_allclose(loads, theirs, rtol=1e-5)
    for new, old, g in zip(*map(jax.tree.leaves, (got, params, gradients)), strict=True):
        bound = EPS * np.abs(old - g) + 1e-5 * np.abs(g).max()
        np.testing.assert_array_less(np.abs(new - (old - g)), bound)
