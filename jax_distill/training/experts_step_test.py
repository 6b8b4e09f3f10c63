"""The step of a model with experts, sinks and two kinds of layers: its gradients are `jax.grad`'s,
and neither micro-batches, devices nor the layerwise update change them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import sharding
from jax_distill.devices import QUICK_COMPILE
from jax_distill.model import Decoder, ModelConfig
from jax_distill.objective import Execution
from jax_distill.training.optimizer import make_optimizer
from jax_distill.training.state import make_state
from jax_distill.training.step import loss_fn, make_train_step
from jax_distill.training.step_test import TASK, fsdp_mesh, put_on, uneven_batch

pytestmark = pytest.mark.usefixtures("optax_promotion")
CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
    attention_bias=True,
    output_bias=True,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    sliding_window=3,
    attention_sinks=True,
    num_local_experts=4,
    num_experts_per_tok=2,
)
ROWS = [16, 9, 16, 3]
ROUTER = TASK._replace(router_weight=0.1)


def step_of(*, devices=1, micro=4, task=ROUTER, layerwise=False, remat="none"):
    """(parameters, numbers) after one step of plain SGD with rate 1."""
    mesh = fsdp_mesh(devices)
    rows = sharding.batch_sharding(mesh)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), remat=remat, row_sharding=rows)
    put_on(mesh, model)
    schedule = lambda _: jnp.float32(1.0)  # noqa: E731
    optimizer = make_optimizer("sgd", schedule, b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=None)
    graphdef, state = make_state(model, optimizer, mesh)
    execution = Execution(chunk_size=5 * micro // devices, row_shards=devices)
    task = task._replace(execution=execution)
    step = make_train_step(graphdef, optimizer, schedule, task, layerwise=layerwise)
    batch = sharding.shard_batch(mesh, uneven_batch(ROWS).micro_batches(micro), leading=1)
    after, numbers = step.lower(state, batch).compile(QUICK_COMPILE)(state, batch)
    return jax.device_get(after.params), jax.device_get(numbers)


@functools.cache
def definition(router_weight: float):
    """Parameters less `jax.grad` of the mean loss, and the routers' load, by `apply`'s scan."""
    task = TASK._replace(router_weight=router_weight, execution=Execution(chunk_size=20))
    model, batch = Decoder(CONFIG, rngs=nnx.Rngs(0)), uneven_batch(ROWS).map(jnp.asarray)
    graphdef, params = nnx.split(model, nnx.Param)

    def mean(params):
        return loss_fn(params, graphdef, batch, task)[0] / batch.mask.sum().astype(jnp.float32)

    gradients = jax.jit(jax.grad(mean)).lower(params).compile(QUICK_COMPILE)(params)
    load = model.apply(batch.tokens, batch.segment_ids, batch.positions).aux
    return jax.tree.map(lambda p, g: np.asarray(p - g), params, gradients), jax.device_get(load)


def assert_same(got, expected):
    """Gradients of size G are sums of up to 64 tokens' terms in another order: 1e-5 of G at most,
    and a rounding of the parameter."""
    before = nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    leaves = map(jax.tree.leaves, (got, expected, before))
    for left, right, start in zip(*leaves, strict=True):
        largest = np.abs(right - np.asarray(start)).max()
        assert largest > 0
        np.testing.assert_allclose(left, right, rtol=3e-7, atol=1e-5 * largest + 1e-8)


@pytest.mark.parametrize(
    "options",
    [{}, {"remat": "layer"}, {"layerwise": True}, {"devices": 2, "remat": "layer"}],
    ids=str,
)
def test_the_update_is_the_gradient_with_the_load_balancing_term(options):
    params, numbers = step_of(**options)
    expected, load = definition(ROUTER.router_weight)
    assert_same(params, expected)
    sent = load.assigned
    assert np.all(sent.sum(axis=1) == 2 * sum(ROWS))  # padding is sent nowhere
    share = sent / sent.sum(axis=1, keepdims=True)
    mean = load.probability / sum(ROWS)
    balance = np.mean(4 * (share * mean).sum(axis=1))
    assert numbers["router_balance"] == pytest.approx(balance, rel=1e-5)
    assert numbers["router_largest_share"] == pytest.approx(share.max(), rel=1e-6)
    own = numbers["kl"] + 0.5 * numbers["cross_entropy"]
    assert numbers["loss"] == pytest.approx(own + 0.1 * balance, rel=1e-5)


def test_micro_batches_change_nothing_without_the_term():
    expected, load = definition(0.0)
    params, numbers = step_of(micro=1, task=TASK)
    assert_same(params, expected)
    share = load.assigned / load.assigned.sum(axis=1, keepdims=True)
    assert numbers["router_largest_share"] == pytest.approx(share.max(), rel=1e-6)
