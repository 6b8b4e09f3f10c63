"""One optimizer step: what must not matter to it, and what its operations are counted as."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import sharding
from jax_distill.config import LossConfig
from jax_distill.optimizer import make_optimizer
from jax_distill.step import make_state, make_train_step, train_flops_per_token
from jax_distill.teacher_test import model_config, random_model

pytestmark = pytest.mark.usefixtures("optax_promotion")


def one_step(batch: dict, *, devices: int, micro: int, loss: LossConfig):
    """Parameters and numbers after one step of plain SGD."""
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
    step = make_train_step(graphdef, optimizer, schedule, loss=loss, vocab_size=300)
    split = {k: v.reshape(-1, micro, *v.shape[1:]) for k, v in batch.items()}
    after, numbers = step(start, sharding.place_batch(mesh, split, leading=1))
    return jax.device_get(after.params), jax.device_get(numbers)


def uneven_batch(lengths: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rows, length, top_k = len(lengths), 16, 5
    tokens = rng.integers(0, 300, (rows, length), dtype=np.int32)
    inside = np.arange(length)[None] < np.array(lengths)[:, None]
    logits = rng.normal(size=(rows, length, top_k)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) + np.log(np.float32(0.8))
    ids = np.argsort(rng.random((rows, length, 300)), axis=-1)[..., :top_k]
    return {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, axis=1),
        "segment_ids": inside.astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape).copy(),
        "mask": inside & (np.arange(length)[None] < np.array(lengths)[:, None] - 1),
        "teacher_indices": ids.astype(np.int32),
        "teacher_logprobs": logprobs,
        "teacher_log_tail": np.full((rows, length), np.log(0.2), np.float32),
        "teacher_count": np.full((rows, length), top_k, np.int32),
    }


@functools.cache
def whole_step():
    """A batch with holes, a loss, and what one step with it on one device does."""
    batch = uneven_batch([2, 2, 2, 2, 16, 16, 16, 16])
    batch["mask"][:, :5] = False
    batch["mask"][:4, 0] = True
    loss = LossConfig(chunk_size=5, ce_weight=0.5)
    return batch, loss, one_step(batch, devices=1, micro=8, loss=loss)


@pytest.mark.parametrize(("devices", "micro"), [(1, 4), (1, 2), (1, 1), (2, 8), (4, 4), (2, 2)])
def test_micro_batches_and_devices_do_not_change_the_update(devices, micro):
    """Case 27: uneven lengths, one denominator. Nor does the order of a row's valid positions."""
    batch, loss, (expected, numbers) = whole_step()
    sorted_loss = dataclasses.replace(loss, valid_first=micro <= 2)
    got, others = one_step(batch, devices=devices, micro=micro, loss=sorted_loss)
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)
    assert others["loss"] == pytest.approx(numbers["loss"], rel=1e-6)
    assert others["valid_tokens"] == 44


def test_a_batch_without_a_valid_token_changes_nothing():
    """Case 11."""
    batch = uneven_batch([16] * 8)
    batch["mask"][:] = False
    params, numbers = one_step(batch, devices=1, micro=8, loss=LossConfig(chunk_size=5))
    assert numbers["loss"] == 0 and numbers["gradient_norm"] == 0
    before = jax.tree.leaves(nnx.state(random_model(1), nnx.Param))
    for left, right in zip(before, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(left, right)


def test_flops_are_the_formula():
    config = model_config()
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    expected = 6 * (2 * layer + 320 * 32) + 6 * 2 * 32 * 24
    assert train_flops_per_token(config, 24) == expected
