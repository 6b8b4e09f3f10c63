"""The backward pass written out, one layer at a time: a layer's gradient is used, then gone.

`jax.grad` returns all gradients at once, so they all exist at once: 4 bytes a parameter, and as
much again where they are added to those of other micro-batches. Here the caller's `use` takes each
part when it is ready and changes its carry in place: the update of that part (step.py's layerwise
step), or an accumulator's share (its ordinary step with several micro-batches).

Parts, in this order: what follows the layers (final norm, untied head), each layer from the last to
the first, the embedding (with the head where the two are tied).

The 3.2B student at 8K, one row at a time, as planned for an H200 (GB): one row a step 54.5 with
`jax.grad`, 43.2 layerwise; 16 rows a step 67.5 with `jax.grad` and a sum, 56.2 here. XLA updates
the stacks [L,…] in place, since a loop carries them and a turn reads its layer before it writes it.
The peak is then in the loss (its chunk, a narrow copy of the head, the head's fp32 gradient, the
layers' inputs), not in a layer's backward pass: what would spare memory there buys nothing.

Letters: L layers, N = B·T positions, D hidden.
"""

import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_distill.model import Decoder

STACK, EMBEDDING = "layers", "embed_tokens"


class Part(NamedTuple):
    """Some of the parameters: whole leaves by their module, or one layer of the stack.

    names: keys of the parameter tree. layer: an index, or None for whole leaves.
    """

    names: tuple[str, ...]
    layer: jax.Array | None = None

    @property
    def first_row(self) -> jax.Array | int:
        """Where the part's leaves begin in the whole ones."""
        return 0 if self.layer is None else self.layer

    def of(self, tree: Any) -> Any:
        """The part of every parameter-like tree (an nnx.State) in `tree`; other leaves as they are.

        A layer's leaves keep an axis of 1 in front.
        """

        def cut(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(leaf, self.first_row, 1)

        def take(node: Any) -> Any:
            if not isinstance(node, nnx.State):
                return node
            some = nnx.State({name: node.raw_mapping[name] for name in self.names})
            return some if self.layer is None else jax.tree.map(cut, some)

        return jax.tree.map(take, tree, is_leaf=_is_state)

    def put(self, tree: Any, new: Any) -> Any:
        """`tree` with its part replaced by `new`; leaves outside of nnx.States stay."""

        def write(leaf: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, rows, self.first_row, 0)

        def replace(node: Any, some: Any) -> Any:
            if not isinstance(node, nnx.State):
                return node
            if self.layer is not None:
                some = jax.tree.map(write, nnx.State({STACK: node.raw_mapping[STACK]}), some)
            return nnx.State({**node.raw_mapping, **some.raw_mapping})

        return jax.tree.map(replace, tree, new, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, nnx.State)


def moved_counters(tree: Any, new: Any) -> Any:
    """The nnx.States of `tree`, and all that stands outside of them from `new`."""

    def choose(node: Any, other: Any) -> Any:
        return node if isinstance(node, nnx.State) else other

    return jax.tree.map(choose, tree, new, is_leaf=_is_state)


def _keep_all_but_casts(primitive: Any, *_: Any, **__: Any) -> bool:
    """What remat "none" saves here: not the weights' casts and transposes, [L,…] copies of them."""
    return primitive.name not in ("convert_element_type", "transpose")


def backward(
    graphdef: Any,
    params: nnx.State,
    batch: dict[str, jax.Array],
    *,
    finish: Callable[[Decoder, jax.Array], tuple[jax.Array, Any]],
    carry: Any,
    use: Callable[[Any, Part, nnx.State], Any],
    params_of: Callable[[Any], nnx.State] | None = None,
) -> tuple[Any, Any]:
    """One batch forward and backward; (carry, what `finish` said beside the loss).

    Args:
        graphdef: the Decoder's.
        params: its parameters.
        batch: tokens, segment_ids, positions [B,T]; what else `finish` needs is its own affair.
        finish: (model, the last layer's output [N,D]) → (loss, anything).
        carry: what `use` changes.
        use: (carry, part, gradient of the part in its parameters' dtype) → carry.
        params_of: carry → parameters, where these are in the carry and change under way. A part is
            read a last time before it is used.
    """
    above = tuple(name for name in params if name not in (STACK, EMBEDDING))

    def model_with(*parts: Any) -> Decoder:
        new = {name: value for part in parts for name, value in part.raw_mapping.items()}
        return nnx.merge(graphdef, nnx.State({**params.raw_mapping, **new}))

    model = model_with()
    context = model.context(batch["segment_ids"], batch["positions"])
    layer, stacked = model.layer_function()
    if model.remat == "none":
        layer = jax.checkpoint(layer, prevent_cse=False, policy=_keep_all_but_casts)

    def start(embedding: nnx.State) -> jax.Array:
        return model_with(embedding).embed(batch["tokens"])

    def forward(x: jax.Array, weights: nnx.State) -> tuple[jax.Array, Any]:
        y, pull = jax.vjp(layer, x, weights, *context)
        pull = typing.cast(Any, pull)  # JAX's VJP, whose args_res may be taken out and put back
        pull.args_res = [None] * len(pull.args_res)  # else [L,…] copies of weights and context
        return y, (x, pull)

    def end(x: jax.Array, after: nnx.State, embedding: nnx.State) -> tuple[jax.Array, Any]:
        return finish(model_with(after, embedding), x)

    after, embedding = Part(above), Part((EMBEDDING,))
    x, pull_start = jax.vjp(start, embedding.of(params))
    x, saved = jax.lax.scan(forward, x, stacked)
    gradients, aux = jax.grad(end, argnums=(0, 1, 2), has_aux=True)(
        x, after.of(params), embedding.of(params)
    )
    d_x, d_after, d_embedding = gradients
    carry = use(carry, after, d_after)

    def step(state: tuple[Any, jax.Array], inputs: Any) -> tuple[Any, None]:
        carry, d_y = state
        index, (x, pull) = inputs
        part = Part((STACK,), index)
        weights = part.of(params if params_of is None else params_of(carry))[STACK]
        pull.args_res = [x, jax.tree.map(lambda leaf: leaf[0], weights), *context]
        d_x, d_weights, *_ = pull(d_y)
        d_stack = nnx.State({STACK: jax.tree.map(lambda leaf: leaf[None], d_weights).raw_mapping})
        return (use(carry, part, d_stack), d_x), None

    indices = jnp.arange(model.config.num_hidden_layers, dtype=jnp.int32)
    (carry, d_x), _ = jax.lax.scan(step, (carry, d_x), (indices, saved), reverse=True)
    (d_lookup,) = pull_start(d_x)
    return use(carry, embedding, jax.tree.map(jnp.add, d_embedding, d_lookup)), aux
