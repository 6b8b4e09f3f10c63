"""Moments on the host: the step is the one with moments on the device, in whatever way it updates;
they stay there; a checkpoint goes from one to the other; a host without room is refused.

A CPU device has `pinned_host` memory too, so this is the path that a GPU takes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill.base.errors import UserError
from jax_distill.devices import QUICK_COMPILE
from jax_distill.model import Decoder
from jax_distill.teacher_test import model_config
from jax_distill.training import offload
from jax_distill.training.checkpoint import Checkpoints
from jax_distill.training.gradients_test import EPS, assert_same, prepare
from jax_distill.training.optimizer import make_optimizer
from jax_distill.training.state import TrainState, make_state, state_shapes
from jax_distill.training.updates import Updates

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BF16 = dict(param_dtype="bfloat16", state_dtype="bfloat16")
MESH = dict(axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1])


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


CASES = {
    "clipped": (dict(clip_norm=0.05), {}),
    "accumulated, untied": (dict(tied=False), dict(micro=1)),
    "layerwise": ({}, dict(layerwise=True, remat="layer")),
    "layerwise, split over 4": (dict(tied=True), dict(layerwise=True, devices=4)),
    "split over 4": (dict(clip_norm=0.05), dict(devices=4)),
    "sgd": (dict(name="sgd"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_step_with_moments_on_the_device(case):
    like, changed = CASES[case]
    assert_same(like=like, **{"layerwise": False, "offload": "moments", **like, **changed})


def small(dtypes, where, **options):
    """(optimizer, state with moments that are not 0, gradients) of a model of three layers."""
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), **MESH)
    config = model_config(num_hidden_layers=3, tie_word_embeddings=False)
    model = Decoder(
        config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtypes.get("param_dtype", "float32"))
    )
    weights = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(weights, jax.NamedSharding(mesh, jax.P())))
    optimizer = make_optimizer(
        "adamw",
        lambda count: 0.1 / (1.0 + count),
        b1=0.9,
        b2=0.95,
        weight_decay=0.1,
        clip_norm=0.5,
        state_dtype=dtypes.get("state_dtype", "float32"),
        seed=5,
    )
    _, state = make_state(model, optimizer, mesh, offload=where)
    draw = jax.random.normal(jax.random.key(2), (1 << 16,))
    grads = jax.tree.map(lambda p: draw[: p.size].reshape(p.shape).astype(p.dtype), state.params)
    return optimizer, state, grads


@pytest.mark.parametrize("dtypes", [{}, BF16], ids=["fp32", "bf16"])
def test_an_update_by_slices_is_the_update_at_once(dtypes):
    """Of the same gradients: moments, bias correction, decay, clipping and stochastic rounding,
    two steps of each.

    XLA contracts a multiplication and an addition into one rounding in one program and not in the
    other, so fp32 differs by the roundings: of a step 8, by eps/2 each of at most a weight plus
    what it moves by, 0.1·(1 + 0.1·|weight|), or of a moment. In bf16 one draw in 2¹⁶ for each fp32
    spacing of difference comes out otherwise.
    """
    states = []
    for where, update in (("moments", Updates.by_slices), ("none", Updates.at_once)):
        optimizer, state, grads = small(dtypes, where)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        program = (
            jax.jit(
                functools.partial(update, Updates(optimizer, seed=5), norm=jnp.float32(3.0)),
                out_shardings=shardings,
                donate_argnums=0,
            )
            .lower(state, grads)
            .compile(QUICK_COMPILE)
        )
        for _ in range(2):
            given = jax.tree.leaves(state.opt_state)[1]
            state = program(state, grads)
            assert given.is_deleted()
        assert kinds(state.opt_state) == {"pinned_host" if where == "moments" else "device"}
        assert kinds(state.params) == {"device"}
        states.append(state)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for left, right in zip(*map(jax.tree.leaves, jax.device_get(states)), strict=True):
        assert left.dtype == right.dtype
        if dtypes:
            assert np.mean(left == right) > 0.999
        else:
            most = 1.01 * np.abs(right).max() + 0.1
            np.testing.assert_allclose(left, right, rtol=0, atol=2 * 8 * EPS / 2 * most)


def test_a_first_state_is_the_optimizers_own():
    optimizer, state, _ = small(BF16, "moments")
    expected = optimizer.init(state.params)
    assert kinds(state.opt_state) == {"pinned_host"}
    for left, right in zip(*map(jax.tree.leaves, (state.opt_state, expected)), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("saved,restored", [("moments", "none"), ("none", "moments")])
def test_a_checkpoint_written_with_one_is_resumed_with_the_other(tmp_path, saved, restored):
    """And goes on as the run that was not interrupted, bit for bit but for the order of sums."""
    options = dict(layerwise=True, **BF16)
    step, state, batch = prepare(offload=saved, **options)
    state, _ = step(state, batch)
    with Checkpoints(tmp_path / "c", keep=1, seed=5) as checkpoints:
        checkpoints.save(1, state.params, state.opt_state)
        kept = jax.device_get((state.params, state.opt_state))
        step(state, batch)  # overwrites what is being saved
    step, like, _ = prepare(offload=restored, **options)
    with Checkpoints(tmp_path / "c", keep=1, seed=5) as checkpoints:
        found = checkpoints.restore(1, params=like.params, opt_state=like.opt_state)
    for left, right in zip(*map(jax.tree.leaves, (tuple(found.values()), kept)), strict=True):
        np.testing.assert_array_equal(left, right)
    assert kinds(found["opt_state"]) == kinds(like.opt_state)
    again = TrainState(step=jax.device_put(jnp.int32(1), like.step.sharding), **found)
    step(again, batch)
    assert step._cache_size() == 1


def test_what_is_saved_is_a_copy():
    """Of what is on the host: numpy would share its memory with the next step."""
    _, state, _ = small({}, "moments")
    moment = jax.tree.leaves(state.opt_state)[1]
    (copy,) = jax.tree.leaves(offload.copied([moment]))
    assert copy.sharding == moment.sharding
    assert copy.unsafe_buffer_pointer() != moment.unsafe_buffer_pointer()
    (parameter,) = jax.tree.leaves(offload.copied(jax.tree.leaves(state.params)[:1]))
    assert parameter is jax.tree.leaves(state.params)[0]


def test_a_host_without_room_is_refused_in_one_line(monkeypatch):
    _, state, _ = small({}, "moments")
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    counters = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if not leaf.ndim)
    need = offload.host_bytes(state.params, state.opt_state)
    assert need == {"moments": 2 * params, "checkpoint": 3 * params + counters}
    monkeypatch.setattr(offload, "available_memory", lambda: sum(need.values()))
    offload.check_host_memory(state.params, state.opt_state)
    monkeypatch.setattr(offload, "available_memory", lambda: sum(need.values()) - 1)
    with pytest.raises(UserError, match=r"of moments \+ .* of checkpoint.*offload none") as refusal:
        offload.check_host_memory(state.params, state.opt_state)
    assert "\n" not in str(refusal.value)
    on_device = small({}, "none")[1]
    assert offload.host_bytes(on_device.params, on_device.opt_state) == {}


def test_offload_is_a_matter_of_where_alone():
    """Shapes, dtypes and specs of the shardings are those without it."""
    optimizer, state, _ = small(BF16, "none")
    model = Decoder(model_config(num_hidden_layers=3), rngs=nnx.Rngs(0))
    mesh = state.step.sharding.mesh
    nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), state.step.sharding))
    shapes = [
        state_shapes(model, optimizer, mesh, offload=where)[1] for where in ("moments", "none")
    ]
    for left, right in zip(*map(jax.tree.leaves, shapes), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert left.sharding.spec == right.sharding.spec
