"""Gradients to new parameters: all at once, or slice by slice for moments in the host's memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_distill.training.gradients import STACK, ParameterSlice, replace_counters
from jax_distill.training.optimizer import apply_updates
from jax_distill.training.state import TrainState

BLOCKS = 32
"""Into how many blocks of rows a matrix is cut at most, as many as a model has layers."""


def _block_count(rows: int) -> int:
    return next(count for count in range(BLOCKS, 0, -1) if rows % count == 0)


class Updates(NamedTuple):
    """An optimizer applied to a state; the state's step stays as it was.

    seed: of stochastic rounding. whole: matrices outside of the stack are not cut, since their rows
    are split over devices. `norm`, in each method: of the whole gradient, None for an optimizer
    that does not clip.
    """

    optimizer: optax.GradientTransformationExtraArgs
    seed: int
    whole: bool = False

    def at_once(self, state: TrainState, grads: nnx.State, norm: jax.Array) -> TrainState:
        """The state after these gradients."""
        updates, opt_state = self.optimizer.update(
            grads, state.opt_state, state.params, gradient_norm=norm
        )
        params = apply_updates(state.params, updates, seed=self.seed, step=state.step)
        return TrainState(params, opt_state, state.step)

    def by_slices(self, state: TrainState, grads: nnx.State, norm: jax.Array) -> TrainState:
        """As `at_once`, slice after slice, so that the moments of no more than one are on the
        device: a layer of the stack, a block of rows of another matrix."""
        return self.advance(self.modules(state, grads, norm))

    def modules(self, state: TrainState, grads: nnx.State, norm: jax.Array | None) -> TrainState:
        """`by_slices` of the modules that `grads` has; counters stay as they were."""
        # Nothing else would keep XLA from fetching moments long before their gradients are there.
        grads, state = jax.lax.optimization_barrier((grads, state))
        for name, module in grads.items():
            first, *others = jax.tree.leaves(module)
            count = first.shape[0] if name == STACK else _block_count(first.shape[0])
            if name != STACK and (others or first.ndim < 2 or self.whole):
                some = ParameterSlice((name,))
                state = self.slice(some, state, some.read(grads), norm)
                continue
            rows = first.shape[0] // count

            def update(
                index: jax.Array, state: TrainState, name: str = name, rows: int = rows
            ) -> TrainState:
                some = ParameterSlice((name,), index * rows, rows)
                return self.slice(some, state, some.read(grads), norm)

            state = jax.lax.fori_loop(0, count, update, state)
        return state

    def slice(
        self, some: ParameterSlice, state: TrainState, grads: nnx.State, norm: jax.Array | None
    ) -> TrainState:
        """The state with one slice updated, by its gradients; counters stay as they were."""
        params, opt_state, step = state
        old = some.read(params)
        updates, moments = self.optimizer.update(
            grads, some.read(opt_state), old, first_row=some.first_row, gradient_norm=norm
        )
        new = apply_updates(old, updates, seed=self.seed, step=step, first_row=some.first_row)
        return TrainState(some.write(params, new), some.write(opt_state, moments), step)

    def advance(self, state: TrainState) -> TrainState:
        """The state with the optimizer's counters advanced, once every slice is updated."""
        nothing = ParameterSlice(())  # an update of no parameter advances the counters
        none = nothing.read(state.params)
        old = nothing.read(state.opt_state)
        _, advanced = self.optimizer.update(none, old, none, gradient_norm=jnp.float32(0))
        return state._replace(opt_state=replace_counters(state.opt_state, advanced))
