"""Forward, loss and backward of one batch, the backward written out one layer at a time.

`jax.grad` returns all gradients at once, so they all exist at once: 4 bytes a parameter, and as
much again where they are added to those of other micro-batches. Here the caller's `on_gradient`
takes each slice of the gradient when it is ready and changes its carry in place: it assigns the
slice, adds it to an fp32 accumulator, or updates those parameters at once (LOMO, arXiv 2306.09782).
The step's three ways of using a gradient (step.py) differ in nothing else.

Order: what follows the layers (final norm, untied head), each layer from the last to the first, the
embedding (with the head where the two are tied).

The 3.2B student at 8K, one row at a time, as planned for an H200 (GB, cuDNN's workspace apart): one
row a step 54.5, with an update in the backward 43.2; 16 rows a step 56.4, where `jax.grad` and a
sum take 67.5. XLA updates the stacks [L,…] in place, since a loop carries them and a turn reads its
layer before it writes it. The peak is then in the loss (its chunk, a bf16 copy of the head, the
head's fp32 gradient, the layers' inputs), not in a layer's backward pass.

Letters: B rows, T positions, N = B·T; D hidden, L layers, S chosen layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive

from jax_distill.batch import Batch
from jax_distill.model import Aux, Decoder, LayerInputs, Output
from jax_distill.training.offload import fetched, returned
from jax_distill.training.vjp import Pullback, pull_back, vjp_without_arguments

STACK, EMBEDDING = "layers", "embed_tokens"
Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
Stats = TypeVar("Stats")


class ParameterSlice(NamedTuple):
    """Some of the parameters: whole leaves by their module, or some of their rows, such as one
    layer of the stack.

    names: keys of the parameter tree. first: the first row, or None for whole leaves. rows: how
    many.
    """

    names: tuple[str, ...]
    first: jax.Array | None = None
    rows: int = 1

    @property
    def first_row(self) -> jax.Array | int:
        """Where the slice's leaves begin in the whole ones."""
        return 0 if self.first is None else self.first

    def read(self, tree: Tree) -> Tree:
        """The slice of every parameter-like tree (an nnx.State) in `tree`, on the device; other
        leaves as they are. A layer's leaves keep their axis in front, of 1."""

        def cut(leaf: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(leaf, self.first_row, self.rows)

        def take(node: object) -> object:
            if not isinstance(node, nnx.State):
                return node
            some = nnx.State({name: node.raw_mapping[name] for name in self.names})
            return fetched(some if self.first is None else jax.tree.map(cut, some))

        return jax.tree.map(take, tree, is_leaf=_is_state)

    def write(self, tree: Tree, new: Tree) -> Tree:
        """`tree` with its slice replaced by `new`, in the memory where it was; leaves outside of
        nnx.States stay."""

        def put(leaf: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, rows, self.first_row, 0)

        def replace(node: object, some: nnx.State) -> object:
            if not isinstance(node, nnx.State):
                return node
            old = nnx.State({name: node.raw_mapping[name] for name in self.names})
            some = returned(some, old)
            if self.first is not None:
                some = jax.tree.map(put, old, some)
            return nnx.State({**node.raw_mapping, **some.raw_mapping})

        return jax.tree.map(replace, tree, new, is_leaf=_is_state)


def _is_state(node: object) -> bool:
    return isinstance(node, nnx.State)


def replace_counters(tree: Tree, updated: Tree) -> Tree:
    """The nnx.States of `tree`, and all that stands outside of them from `updated`."""

    def choose(node: object, other: object) -> object:
        return node if isinstance(node, nnx.State) else other

    return jax.tree.map(choose, tree, updated, is_leaf=_is_state)


def _save_all_but_casts(primitive: Primitive, *_: object, **__: object) -> bool:
    """What remat "none" saves here: not the weights' casts and transposes, [L,…] copies of them."""
    return primitive.name not in ("convert_element_type", "transpose")


def backward(
    graphdef: nnx.GraphDef[Decoder],
    params: nnx.State,
    batch: Batch,
    *,
    loss_fn: Callable[[Decoder, Output], tuple[jax.Array, Stats]],
    carry: Carry,
    on_gradient: Callable[[Carry, ParameterSlice, nnx.State], Carry],
    params_of: Callable[[Carry], nnx.State] | None = None,
    hidden_layers: Sequence[int] = (),
) -> tuple[Carry, Stats]:
    """One batch forward and backward; (carry, what `loss_fn` returned beside the loss).

    Args:
        graphdef, params: the Decoder's.
        batch: tokens, segment_ids, positions [B,T].
        loss_fn: (model, its Output) → (loss, statistics). Gradients flow back through all of the
            Output: the hidden states, the outputs of `hidden_layers`, the layers' aux.
        carry: what `on_gradient` changes.
        on_gradient: (carry, slice, the slice's gradient in its parameters' dtype) → carry.
        params_of: carry → parameters, where these are in the carry and change under way. A slice
            is read a last time before its gradient is given away.
        hidden_layers: the layers whose outputs `loss_fn` reads. These are in memory already, as
            inputs of the layers above.
    """

    def model_with(*slices: nnx.State) -> Decoder:
        new = {name: value for some in slices for name, value in some.raw_mapping.items()}
        return nnx.merge(graphdef, nnx.State({**params.raw_mapping, **new}))

    model = model_with()
    depth, slots = model.config.num_hidden_layers, model.layer_slots(hidden_layers)
    inputs = model.layer_inputs(batch.segment_ids, batch.positions)

    def end(
        x: jax.Array, chosen: jax.Array, aux: Aux, rest: nnx.State, embedding: nnx.State
    ) -> tuple[jax.Array, Stats]:
        model = model_with(rest, embedding)
        return loss_fn(model, model.output(x, chosen, aux, rows=batch.tokens.shape[0]))

    after_layers = tuple(name for name in params if name not in (STACK, EMBEDDING))
    rest, embedding = ParameterSlice(after_layers), ParameterSlice((EMBEDDING,))
    x, pull_embed = jax.vjp(lambda own: model_with(own).embed(batch.tokens), embedding.read(params))
    x, (layer_xs, pullbacks, aux) = _through_layers(model, x, inputs)
    outputs = [x if index == depth - 1 else layer_xs[index + 1] for index in hidden_layers]
    chosen = jnp.stack(outputs) if outputs else jnp.zeros((0, *x.shape), x.dtype)
    gradients, stats = jax.grad(end, argnums=(0, 1, 2, 3, 4), has_aux=True)(
        x, chosen, aux, rest.read(params), embedding.read(params)
    )
    d_x, d_chosen, d_aux, d_rest, d_embedding = gradients
    carry = on_gradient(carry, rest, d_rest)

    indices = jnp.arange(depth, dtype=jnp.int32)
    turns = _Turn(indices, inputs.kind, slots, layer_xs, pullbacks, d_aux)
    current = params_of or (lambda _: params)
    back = _way_back(inputs, d_chosen, on_gradient=on_gradient, params_of=current)
    (carry, d_x), _ = jax.lax.scan(back, (carry, d_x), turns, reverse=True)
    (d_lookup,) = pull_embed(d_x)
    return on_gradient(carry, embedding, jax.tree.map(jnp.add, d_embedding, d_lookup)), stats


def _through_layers(
    model: Decoder, x: jax.Array, inputs: LayerInputs
) -> tuple[jax.Array, tuple[jax.Array, Pullback, Aux]]:
    """The last layer's output; and [L,…] each one's input, pullback and aux."""
    layer, stacked = model.layer_function()
    if model.remat == "none":
        layer = jax.checkpoint(layer, prevent_cse=False, policy=_save_all_but_casts)

    def forward(
        x: jax.Array, turn: tuple[jax.Array, nnx.State]
    ) -> tuple[jax.Array, tuple[jax.Array, Pullback, Aux]]:
        kind, weights = turn
        # The arguments come again in the reverse scan; saved, they would be [L,…] copies.
        (y, aux), pullback = vjp_without_arguments(layer, x, weights, inputs._replace(kind=kind))
        return y, (x, pullback, aux)

    return jax.lax.scan(forward, x, (inputs.kind, stacked))


class _Turn(NamedTuple):
    """What the way back through a layer needs of it; of all of them [L,…].

    slot: which of the S chosen layers it is, S for none. x: its input.
    """

    number: jax.Array
    kind: jax.Array
    slot: jax.Array
    x: jax.Array
    pullback: Pullback
    d_aux: Aux


def _way_back(
    inputs: LayerInputs,
    d_chosen: jax.Array,
    *,
    on_gradient: Callable[[Carry, ParameterSlice, nnx.State], Carry],
    params_of: Callable[[Carry], nnx.State],
) -> Callable[[tuple[Carry, jax.Array], _Turn], tuple[tuple[Carry, jax.Array], None]]:
    """The body of the reverse scan: (carry, gradient of a layer's output) → (carry, gradient of its
    input). d_chosen: of the S chosen layers' outputs."""

    def step(state: tuple[Carry, jax.Array], turn: _Turn) -> tuple[tuple[Carry, jax.Array], None]:
        carry, d_y = state
        if d_chosen.shape[0]:
            d_y += jnp.where(turn.slot < d_chosen.shape[0], d_chosen[turn.slot], 0)
        this = ParameterSlice((STACK,), turn.number)
        weights = jax.tree.map(lambda leaf: leaf[0], this.read(params_of(carry))[STACK])
        arguments = (turn.x, weights, inputs._replace(kind=turn.kind))
        d_x, d_weights, _ = pull_back(turn.pullback, arguments, (d_y, turn.d_aux))
        d_stack = nnx.State({STACK: jax.tree.map(lambda leaf: leaf[None], d_weights).raw_mapping})
        return (on_gradient(carry, this, d_stack), d_x), None

    return step
