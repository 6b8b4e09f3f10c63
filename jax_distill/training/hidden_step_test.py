"""A step with a hidden-state loss descends by plain autodiff of the definition: in micro-batches,
layer by layer, under every remat, over devices, beside a live teacher; projections included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import losses, sharding
from jax_distill.devices import QUICK_COMPILE
from jax_distill.model import Decoder
from jax_distill.objective import Execution, HiddenObjective
from jax_distill.targets import topk_targets
from jax_distill.teacher_test import model_config, random_model
from jax_distill.training.optimizer import make_optimizer
from jax_distill.training.projection import add_projection, projection_of
from jax_distill.training.state import make_state
from jax_distill.training.step import Live, make_train_step
from jax_distill.training.step_test import TASK, fsdp_mesh, put_on, uneven_batch

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PAIRS, WIDTH = ((2, 1), (0, 0)), 24  # the teacher is narrower than the student's 32
TASK = TASK._replace(hidden=HiddenObjective(PAIRS, weight=2.0))


@functools.cache
def teacher() -> Decoder:
    return random_model(7, hidden_size=WIDTH)


@functools.cache
def cached_batch():
    """Four rows with holes, the teacher's states beside them; those of masked cells are NaN."""
    batch = uneven_batch([16, 9, 16, 3])
    batch.mask[:, ::5] = False
    inputs = map(jnp.asarray, (batch.tokens, batch.segment_ids, batch.positions))
    layers = teacher().apply(*inputs, hidden_layers=TASK.hidden.teacher_layers).layers
    states = np.moveaxis(np.asarray(layers), 0, 2).copy()
    states[~batch.mask] = np.nan
    return dataclasses.replace(batch, teacher_layers=states)


def student(mesh, remat: str = "none", width: int = WIDTH) -> Decoder:
    model = Decoder(model_config(num_hidden_layers=3), rngs=nnx.Rngs(1), remat=remat)
    add_projection(model, pairs=len(PAIRS), teacher_width=width, mesh=mesh, seed=5)
    return put_on(mesh, model)


def one_step(
    batch, *, micro=4, devices=1, layerwise=False, remat="none", task=TASK, live=None, width=WIDTH
):
    """The gradient that one step of plain SGD descended by, and its numbers."""
    mesh = fsdp_mesh(devices)
    model = student(mesh, remat, width)
    schedule = lambda _: jnp.float32(1.0)  # noqa: E731
    optimizer = make_optimizer("sgd", schedule, b1=0.0, b2=0.0, weight_decay=0.0, clip_norm=None)
    graphdef, state = make_state(model, optimizer, mesh)
    before = jax.device_get(state.params)
    task = task._replace(execution=Execution(chunk_size=5 * micro, row_shards=devices))
    if live:
        graph, theirs = nnx.split(teacher(), nnx.Param)
        task = task._replace(live=live._replace(graphdef=graph, mesh=mesh))
        live = jax.device_put(theirs, sharding.replicated(mesh))
    options = dict(shardings=jax.tree.map(lambda leaf: leaf.sharding, state), layerwise=layerwise)
    step = make_train_step(graphdef, optimizer, schedule, task, **options)
    rows = sharding.shard_batch(mesh, batch.micro_batches(micro), leading=1)
    state, numbers = step.lower(state, rows, live).compile(QUICK_COMPILE)(state, rows, live)
    gradient = jax.tree.map(np.subtract, before, jax.device_get(state.params))
    return gradient, jax.device_get(numbers)


@functools.cache
def plain():
    """The mean loss of all rows at once, `jax.grad` of a plain forward; the hidden-state term
    written out."""
    batch = cached_batch().map(jnp.asarray)
    graphdef, params = nnx.split(student(fsdp_mesh(1)), nnx.Param)

    def mean(params):
        model = nnx.merge(graphdef, params)
        inputs = (batch.tokens, batch.segment_ids, batch.positions)
        output = model.apply(*inputs, hidden_layers=(2, 0))
        head = losses.Head(model.lm_head_weight(), vocab_size=TASK.vocab_size)
        sums = losses.loss(output.hidden, head, batch, TASK.objective, Execution("dense"))
        a = jnp.einsum("pbtd,ped->pbte", output.layers, projection_of(model))
        b = jnp.where(batch.mask[..., None, None], batch.teacher_layers, 1.0).transpose(2, 0, 1, 3)
        cosine = jnp.sum(a * b, -1) / jnp.linalg.norm(a, axis=-1) / jnp.linalg.norm(b, axis=-1)
        distance = jnp.sum(jnp.where(batch.mask, jnp.mean(1 - cosine, axis=0), 0))
        return (sums.loss + 2.0 * distance) / sums.count, distance / sums.count

    graded = jax.jit(jax.value_and_grad(mean, has_aux=True), compiler_options=QUICK_COMPILE)
    (loss, distance), gradient = graded(params)
    return float(loss), float(distance), jax.device_get(gradient)


def assert_plain(gradient, numbers):
    """Rounding: D·L·T fp32 additions of each sum at most, as in gradients_test; and, of w − g, that
    of a weight of size 1."""
    loss, distance, expected = plain()
    assert numbers["loss"] == pytest.approx(loss, rel=1e-5)
    assert numbers["hidden_loss"] == pytest.approx(distance, rel=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    assert np.abs(jax.tree.leaves(expected["hidden_projection"])[0]).max() > 1e-3
    for left, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=2e-5 * np.abs(right).max() + 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(micro=1, remat="layer"),
        dict(layerwise=True, remat="dots"),
        dict(devices=2, micro=2),
        dict(devices=4, layerwise=True),
    ],
    ids=str,
)
def test_a_step_descends_by_plain_autodiff_of_the_definition(options):
    assert_plain(*one_step(cached_batch(), **options))


def test_a_live_teacher_gives_the_states_that_a_cache_of_it_has():
    """Beside kl_weight 0 here: its divergence is measured, and has no gradient."""
    alone = TASK._replace(objective=dataclasses.replace(TASK.objective, kl_weight=0.0))
    stored = cached_batch()
    expected, numbers = one_step(stored, task=alone)
    batch = dataclasses.replace(stored, targets=None, teacher_layers=None)
    got, others = one_step(batch, task=alone, live=Live(None, 2.0), devices=4)
    assert others["hidden_loss"] == pytest.approx(numbers["hidden_loss"], rel=1e-5)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=2e-5 * np.abs(right).max() + 1e-6)


def test_a_live_top_k_is_what_a_cache_would_hold():
    """The same targets as the teacher's pass writes, decoded as a cache's reader does."""
    batch = cached_batch()
    inputs = map(jnp.asarray, (batch.tokens, batch.segment_ids, batch.positions))
    options = dict(vocab_size=TASK.vocab_size, top_k=7, temperatures=(2.0,), chunk_size=64)
    find = jax.jit(functools.partial(topk_targets, **options))
    encoded, _ = find(teacher().apply(*inputs).hidden, teacher().lm_head_weight())
    stored = dataclasses.replace(batch, targets=encoded.map(np.asarray).decode(2.0))
    expected, numbers = one_step(stored)
    live = Live(None, 2.0, top_k=7, vocab_size=TASK.vocab_size)
    rows = dataclasses.replace(batch, targets=None, teacher_layers=None)
    got, others = one_step(rows, live=live, devices=4)
    for name in ("loss", "kl", "teacher_mass", "hidden_loss"):
        assert others[name] == pytest.approx(numbers[name], rel=1e-5)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=2e-5 * np.abs(right).max() + 1e-6)


def test_equal_widths_have_no_projection():
    model = student(fsdp_mesh(1), width=32)
    assert projection_of(model) is None and "hidden_projection" not in nnx.state(model, nnx.Param)
