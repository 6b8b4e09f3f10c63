"""Gradients to new parameters: all at once, or slice by slice for moments in the host's memory."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_distill.training.gradients import STACK, ParameterSlice, replace_counters
from jax_distill.training.optimizer import apply_updates
from jax_distill.training.state import TrainState


def update_at_once(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: nnx.State,
    norm: jax.Array,
    *,
    seed: int,
) -> TrainState:
    """The state after gradients of this global norm, but for its step."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, gradient_norm=norm)
    params = apply_updates(state.params, updates, seed=seed, step=state.step)
    return TrainState(params, opt_state, state.step)


def update_by_slices(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: nnx.State,
    norm: jax.Array,
    *,
    seed: int,
    whole: bool = False,
) -> TrainState:
    """As `update_at_once`, slice after slice, so that the moments of no more than one are on the
    device: a layer of the stack, a block of rows of another matrix.

    whole: matrices outside of the stack are not cut, since their rows are split over devices.
    """
    state = update_modules(optimizer, state, grads, norm, seed=seed, whole=whole)
    return advance(optimizer, state)


def update_modules(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: nnx.State,
    norm: jax.Array | None,
    *,
    seed: int,
    whole: bool = False,
) -> TrainState:
    """`update_by_slices` of the modules that `grads` has; counters stay as they were.
    norm: None for an optimizer that does not clip."""
    # Nothing else would keep XLA from fetching moments long before their gradients are there.
    grads, state = jax.lax.optimization_barrier((grads, state))
    for name, module in grads.items():
        first, *others = jax.tree.leaves(module)
        count = first.shape[0] if name == STACK else _block_count(first.shape[0])
        if name != STACK and (others or first.ndim < 2 or whole):
            some = ParameterSlice((name,))
            state = update_slice(optimizer, some, state, some.read(grads), norm, seed=seed)
            continue
        rows = first.shape[0] // count

        def update(
            index: jax.Array, state: TrainState, name: str = name, rows: int = rows
        ) -> TrainState:
            some = ParameterSlice((name,), index * rows, rows)
            return update_slice(optimizer, some, state, some.read(grads), norm, seed=seed)

        state = jax.lax.fori_loop(0, count, update, state)
    return state


BLOCKS = 32
"""Into how many blocks of rows a matrix is cut at most, as many as a model has layers."""


def _block_count(rows: int) -> int:
    return next(count for count in range(BLOCKS, 0, -1) if rows % count == 0)


def update_slice(
    optimizer: optax.GradientTransformationExtraArgs,
    some: ParameterSlice,
    state: TrainState,
    grads: nnx.State,
    norm: jax.Array | None,
    *,
    seed: int,
) -> TrainState:
    """The state with one slice updated, its counters and step as they were.

    grads: the slice's; norm: of the whole gradient, for an optimizer that clips.
    """
    params, opt_state, step = state
    old = some.read(params)
    updates, moments = optimizer.update(
        grads, some.read(opt_state), old, first_row=some.first_row, gradient_norm=norm
    )
    new = apply_updates(old, updates, seed=seed, step=step, first_row=some.first_row)
    return TrainState(some.write(params, new), some.write(opt_state, moments), step)


def advance(optimizer: optax.GradientTransformationExtraArgs, state: TrainState) -> TrainState:
    """The state with the optimizer's counters advanced, once every slice is updated."""
    nothing = ParameterSlice(())  # an update of no parameter advances the counters
    none = nothing.read(state.params)
    old = nothing.read(state.opt_state)
    _, advanced = optimizer.update(none, old, none, gradient_norm=jnp.float32(0))
    return state._replace(opt_state=replace_counters(state.opt_state, advanced))
