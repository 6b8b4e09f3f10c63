"""One optimizer step: what must not matter to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jax_distill import sharding
from jax_distill.batch import Batch, TopK
from jax_distill.model import Decoder
from jax_distill.objective import Execution, Objective
from jax_distill.synthetic import exact_targets
from jax_distill.teacher_test import random_model
from jax_distill.training.optimizer import make_optimizer
from jax_distill.training.state import make_state
from jax_distill.training.step import Live, LossTask, make_train_step

pytestmark = pytest.mark.usefixtures("optax_promotion")
# Chunks of 5 positions of each row, which 16 does not divide.
TASK = LossTask(Objective(ce_weight=0.5), Execution(chunk_size=5), vocab_size=300)


def put_on(mesh: Mesh, model: Decoder) -> Decoder:
    """The model with its parameters split over the mesh as a run has them."""
    weights = nnx.state(model, nnx.Param)
    shardings = jax.tree.map(
        lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
        weights,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    nnx.update(model, jax.device_put(weights, shardings))
    return model


def fsdp_mesh(devices: int) -> Mesh:
    return sharding.make_mesh(data=1, fsdp=devices, devices=jax.devices()[:devices])


def one_step(batch: Batch, *, devices: int, micro: int, task: LossTask = TASK, teacher=None):
    """Parameters and numbers after one step of plain SGD; `teacher`: a live one's parameters."""
    mesh = jax.make_mesh(
        (devices, 1),
        ("data", "fsdp"),
        devices=jax.devices()[:devices],
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    model = random_model(1)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(state, sharding.replicated(mesh)))
    schedule = lambda _: jnp.float32(1.0)  # noqa: E731
    optimizer = make_optimizer("sgd", schedule, b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=None)
    graphdef, start = make_state(model, optimizer, mesh)
    chunk_size = 5 * (micro // devices)
    execution = dataclasses.replace(task.execution, chunk_size=chunk_size, row_shards=devices)
    task = task._replace(execution=execution)
    step = make_train_step(graphdef, optimizer, schedule, task)
    rows = sharding.shard_batch(mesh, batch.micro_batches(micro), leading=1)
    teacher = jax.device_put(teacher, sharding.replicated(mesh))
    after, numbers = step(start, rows, teacher)
    return jax.device_get(after.params), jax.device_get(numbers)


def uneven_batch(lengths: list[int]) -> Batch:
    rng = np.random.default_rng(0)
    rows, length, top_k = len(lengths), 16, 5
    tokens = rng.integers(0, 300, (rows, length), dtype=np.int32)
    inside = np.arange(length)[None] < np.array(lengths)[:, None]
    logits = rng.normal(size=(rows, length, top_k)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) + np.log(np.float32(0.8))
    ids = np.argsort(rng.random((rows, length, 300)), axis=-1)[..., :top_k]
    return Batch(
        tokens=tokens,
        labels=np.roll(tokens, -1, axis=1),
        segment_ids=inside.astype(np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape).copy(),
        mask=inside & (np.arange(length)[None] < np.array(lengths)[:, None] - 1),
        targets=TopK(
            indices=ids.astype(np.int32),
            logprobs=logprobs,
            log_tail=np.full((rows, length), np.log(0.2), np.float32),
            count=np.full((rows, length), top_k, np.int32),
        ),
    )


@functools.cache
def whole_step():
    """A batch with holes, and what one step with it on one device does."""
    batch = uneven_batch([2, 2, 2, 2, 16, 16, 16, 16])
    batch.mask[:, :5] = False
    batch.mask[:4, 0] = True
    return batch, one_step(batch, devices=1, micro=8)


@pytest.mark.parametrize(("devices", "micro"), [(1, 4), (1, 2), (1, 1), (2, 8), (4, 4), (2, 2)])
def test_micro_batches_and_devices_do_not_change_the_update(devices, micro):
    """Case 27: uneven lengths, one denominator. Nor does the order of a row's valid positions."""
    batch, (expected, numbers) = whole_step()
    execution = dataclasses.replace(TASK.execution, valid_first=micro <= 2)
    task = TASK._replace(execution=execution)
    got, others = one_step(batch, devices=devices, micro=micro, task=task)
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)
    assert others["loss"] == pytest.approx(numbers["loss"], rel=1e-6)
    assert others["valid_tokens"] == 44


def test_a_batch_without_a_valid_token_changes_nothing():
    """Case 11."""
    batch = uneven_batch([16] * 8)
    batch.mask[:] = False
    params, numbers = one_step(batch, devices=1, micro=8)
    assert numbers["loss"] == 0 and numbers["gradient_norm"] == 0
    before = jax.tree.leaves(nnx.state(random_model(1), nnx.Param))
    for left, right in zip(before, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("devices", "micro"), [(1, 4), (4, 4)])
def test_a_live_teacher_updates_as_its_exact_distribution_does(devices, micro):
    """K = V targets of float64 from its own logits. A gradient is a sum over N valid tokens of
    differences of probabilities, each exact to the error of its logit's exponent."""
    batch = uneven_batch([16, 9, 3, 16])
    teacher = random_model(2)
    hidden = teacher.hidden_states(
        *map(jnp.asarray, (batch.tokens, batch.segment_ids, batch.positions))
    )
    weight = np.float64(teacher.lm_head_weight())[: TASK.vocab_size]
    logits = np.float64(hidden) @ weight.T
    stored = dataclasses.replace(
        batch, targets=exact_targets(logits, top_k=TASK.vocab_size, temperature=2.0)
    )
    graph, params = nnx.split(teacher, nnx.Param)
    options = dict(devices=devices, micro=micro)
    (expected, offline) = one_step(stored, **options)
    live = TASK._replace(live=Live(graph, 2.0))
    (got, online) = one_step(
        dataclasses.replace(batch, targets=None), task=live, teacher=params, **options
    )
    eps = float(np.finfo(np.float32).eps)
    bound = 100 * eps * max(1.0, np.abs(logits).max())
    assert online["kl"] == pytest.approx(offline["kl"], rel=0, abs=bound)
    start = nnx.state(random_model(1), nnx.Param)
    for left, right, before in zip(*map(jax.tree.leaves, (got, expected, start)), strict=True):
        size = np.abs(right - before).max()
        assert size > 0
        np.testing.assert_allclose(left, right, rtol=eps, atol=bound * size)
