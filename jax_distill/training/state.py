"""What a step changes: parameters, optimizer state, step; its shapes and shardings, its start."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, Sharding

from jax_distill import sharding
from jax_distill.model import Decoder
from jax_distill.training.offload import check_host_memory, on_host


class TrainState(NamedTuple):
    """All that a step changes. `step` counts finished optimizer steps."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array


def state_shapes(
    model: Decoder, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: str = "none"
) -> tuple[nnx.GraphDef[Decoder], TrainState]:
    """The model's graph, and its training state as ShapeDtypeStructs with shardings.

    `model` has arrays or sharded shapes. A moment is sharded as its parameter is; what has another
    shape (counters, adafactor's factors) is replicated. `offload`: `moments` keeps those that are
    sharded as parameters in the host's memory.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    replicated = sharding.replicated(mesh)
    moments = jax.eval_shape(optimizer.init, params)

    def as_parameter(leaf: jax.ShapeDtypeStruct, param: jax.Array) -> Sharding:
        if leaf.shape != param.shape:
            return replicated
        return on_host(param.sharding) if offload == "moments" else param.sharding

    def with_sharding(
        leaf: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    shardings = optax.tree_map_params(
        optimizer, as_parameter, moments, params, transform_non_params=lambda _: replicated
    )
    return graphdef, TrainState(
        params=jax.tree.map(lambda leaf: with_sharding(leaf, leaf.sharding), params),
        opt_state=jax.tree.map(with_sharding, moments, shardings),
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),  # type: ignore[arg-type]
    )


def make_state(
    model: Decoder, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: str = "none"
) -> tuple[nnx.GraphDef[Decoder], TrainState]:
    """The model's graph, and its first state, every leaf sharded as `state_shapes` says.

    Raises:
        UserError: the host has no memory for what is offloaded.
    """
    graphdef, shapes = state_shapes(model, optimizer, mesh, offload=offload)
    check_host_memory(shapes.params, shapes.opt_state)
    params = nnx.state(model, nnx.Param)

    leaves, tree = jax.tree.flatten(shapes.opt_state)

    def start(*indices: int) -> list[jax.Array]:
        def init(params: nnx.State) -> list[jax.Array]:
            made = jax.tree.leaves(optimizer.init(params))
            return [made[index] for index in indices]

        return jax.jit(init, out_shardings=[leaves[index].sharding for index in indices])(params)

    # What goes to the host goes there one by one: it must not be on the device all at once.
    every = range(len(leaves))
    groups = [every] if offload == "none" else [[index] for index in every]
    opt_state = jax.tree.unflatten(tree, [leaf for group in groups for leaf in start(*group)])
    step = jax.device_put(np.int32(0), shapes.step.sharding)
    return graphdef, TrainState(params, opt_state, step)
