"""One decoder-only transformer, its layers stacked with a leading L and run by `jax.lax.scan`.

Letters: B rows, T positions, N = B·T; D hidden, V vocabulary; L layers, S chosen; Q head dim.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jax_distill.attention import Implementation, Mask
from jax_distill.base.errors import UserError
from jax_distill.model.configuration import ModelConfig
from jax_distill.model.experts import ExpertsImplementation
from jax_distill.model.layers import Aux, Embedding, Initializer, Layer, LayerInputs, RMSNorm
from jax_distill.model.rotary import rotary_angles

REMAT_POLICIES = {
    "layer": None,  # keep only each layer's input
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the linears' outputs
}
REMAT = ("none", *REMAT_POLICIES)


class Output(NamedTuple):
    """What a loss reads of a model.

    Attributes:
        hidden: [B,T,D] in compute_dtype, after the final norm; logits are `hidden @
            lm_head_weight().T`.
        layers: [S,B,T,D], the outputs of the layers asked for, in that order, before any norm.
        aux: what the layers return beside them, each leaf [L,…]: a RouterLoad, or nothing.
    """

    hidden: jax.Array
    layers: jax.Array
    aux: Aux


class Decoder(nnx.Module):
    """The model, with fresh weights (`rngs` are not kept). Hashable but for its parameters, so
    `nnx.split` gives a graphdef that jit can compare.

    `remat`: "none" keeps every intermediate for the backward pass, "dots" keeps the outputs of the
    linears, "layer" only the input of each layer. On a CPU to recompute is faster than to store
    (two cores, 6 layers of width 192, 16 rows of 256: none 865, dots 765, layer 720 ms; 24 layers
    of width 576, 4 rows of 256: none 5.1, dots 4.1, layer 4.6 s). `attention`: see the function of
    that name; `experts`: `mix_experts`. `row_sharding`: see `constrain_rows`. Raises UserError for
    another remat.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        attention: Implementation | None = None,
        experts: ExpertsImplementation = "blocks",
        row_sharding: NamedSharding | None = None,
    ):
        if remat not in REMAT:
            raise UserError(f"expected remat {', '.join(REMAT)}, got {remat!r}; choose one of them")
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        init = Initializer(rngs, config.initializer_range, jnp.dtype(param_dtype))
        self.embed_tokens = Embedding(init, config)
        self.layers = Layer(
            init, config, implementation=attention, experts=experts, row_sharding=row_sharding
        )
        self.norm = RMSNorm(init, (config.hidden_size,), (None,), eps=config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Embedding(init, config)

    def apply(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        *,
        hidden_layers: Sequence[int] = (),
    ) -> Output:
        """int32 [B,T] three times → Output, with the outputs of `hidden_layers` (0 is the first).

        Segment id 0 is padding. Ids outside the vocabulary take the nearest row (they can only
        stand in padding or masked cells).
        """
        inputs = self.layer_inputs(segment_ids, positions)
        layer, stacked = self.layer_function()
        slots = self.layer_slots(hidden_layers)

        def step(
            carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array, nnx.State]
        ) -> tuple[tuple[jax.Array, jax.Array], Aux]:
            (x, chosen), (slot, kind, weights) = carry, xs
            x, aux = layer(x, weights, inputs._replace(kind=kind))
            if hidden_layers:
                chosen = chosen.at[slot].set(x, mode="drop")
            return (x, chosen), aux

        x = self.embed(tokens)
        chosen = jnp.zeros((len(hidden_layers), *x.shape), x.dtype)
        (x, chosen), aux = jax.lax.scan(step, (x, chosen), (slots, inputs.kind, stacked))
        return self.output(x, chosen, aux, rows=tokens.shape[0])

    def hidden_states(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """`apply(…).hidden`."""
        return self.apply(tokens, segment_ids, positions).hidden

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [B,T] → [N,D] in compute_dtype, the first layer's input."""
        x = jnp.take(self.embed_tokens.weight[...], tokens.reshape(-1), axis=0, mode="clip")
        return x.astype(self.compute_dtype)

    def layer_inputs(self, segment_ids: jax.Array, positions: jax.Array) -> LayerInputs:
        """What the layers read beside their inputs, made once; int32 [B,T] twice. A layer takes its
        own `kind` of it."""
        cos, sin = rotary_angles(
            self.config.rope,
            positions,
            segment_ids,
            head_dim=self.config.head_dim,
            max_position_embeddings=self.config.max_position_embeddings,
        )
        kinds = self.config.kinds
        masks = tuple(Mask(segment_ids, self.config.window(kind)) for kind in kinds)
        kind = jnp.array([kinds.index(kind) for kind in self.config.layer_types], jnp.int32)
        return LayerInputs(cos, sin, masks, kind)

    def layer_function(
        self,
    ) -> tuple[Callable[[jax.Array, nnx.State, LayerInputs], tuple[jax.Array, Aux]], nnx.State]:
        """(x [N,D], one layer's weights, inputs) → (x, aux) under `remat`; the weights of all L."""
        graphdef, stacked = nnx.split(self.layers)

        def layer(x: jax.Array, weights: nnx.State, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
            return nnx.merge(graphdef, weights)(x, inputs)

        if self.remat != "none":
            layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[self.remat])
        return layer, stacked

    def layer_slots(self, hidden_layers: Sequence[int]) -> jax.Array:
        """int32 [L]: where in `hidden_layers` each layer stands; S for those that do not."""
        count = len(hidden_layers)
        slots = {layer: slot for slot, layer in enumerate(hidden_layers)}
        depth = self.config.num_hidden_layers
        if len(slots) != count or not set(slots) <= set(range(depth)):
            raise ValueError(
                f"expected different hidden_layers from 0 to {depth - 1}, "
                f"got {list(hidden_layers)}; correct them"
            )
        return jnp.array([slots.get(layer, count) for layer in range(depth)], jnp.int32)

    def output(self, x: jax.Array, chosen: jax.Array, aux: Aux, *, rows: int) -> Output:
        """What follows the layers: x [N,D] the last one's output, `chosen` [S,N,D]."""
        width = x.shape[-1]
        hidden = self.norm(x).reshape(rows, -1, width)
        return Output(hidden, chosen.reshape(-1, *hidden.shape), aux)

    def lm_head_weight(self) -> jax.Array:
        """[V,D] in the parameters' dtype: `lm_head`, or `embed_tokens` where the two are tied."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.weight[...]
