"""Greedy continuations with a cache of keys and values.

Letters: B rows, T positions read at once, S positions of the cache; D hidden, V vocabulary; L
layers, G key/value heads, Q head dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_distill.attention import attend_to
from jax_distill.losses.head import head_matmul
from jax_distill.model.decoder import Decoder
from jax_distill.model.layers import Layer, LayerInputs
from jax_distill.model.rotary import rotate

Made = tuple[jax.Array, "KeyValues"]


class KeyValues(NamedTuple):
    """What a model keeps of the positions that it has read: [L,B,S,G,Q] in the compute dtype, keys
    rotated."""

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, model: Decoder, rows: int, length: int) -> "KeyValues":
        """For so many rows of at most `length` positions."""
        config = model.config
        heads = (config.num_key_value_heads, config.head_dim)
        zeros = jnp.zeros((config.num_hidden_layers, rows, length, *heads), model.compute_dtype)
        return cls(zeros, zeros)


def _layer_step(
    layer: Layer, x: jax.Array, inputs: LayerInputs, cache: KeyValues, start: jax.Array
) -> tuple[jax.Array, KeyValues]:
    """`Layer.__call__` of x [B·T,D], positions `start` … of rows whose earlier ones are in `cache`,
    of this layer: [B,S,G,Q]. `inputs` are of all S positions."""
    rows = cache.keys.shape[0]
    query, key, value = layer.self_attn.project(layer.input_layernorm(x), rows=rows)

    def own(of_all: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(of_all, start, query.shape[1], axis=1)

    def turned(x: jax.Array) -> jax.Array:
        return rotate(x, own(inputs.cos), own(inputs.sin))

    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
    cache = KeyValues(put(cache.keys, turned(key)), put(cache.values, value))
    allowed = [mask.allowed_to(start, query.shape[1]) for mask in inputs.masks]
    sinks = layer.self_attn.sinks
    mixed = attend_to(
        turned(query),
        cache.keys,
        cache.values,
        jax.lax.select_n(inputs.kind, *allowed) if len(allowed) > 1 else allowed[0],
        sinks=None if sinks is None else sinks[...],
    )
    mixed = layer.self_attn.o_proj(mixed.reshape(x.shape[0], -1))
    x, _ = layer.after_attention(x, mixed, own(inputs.masks[0].segment_ids))
    return x, cache


def read_tokens(
    model: Decoder,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    cache: KeyValues,
    start: jax.Array,
) -> tuple[jax.Array, KeyValues]:
    """Hidden states [B,T,D] of the T next tokens of B rows, as `hidden_states` of the whole rows
    has them there, and the cache with them.

    Attention takes T·S in memory and reads all S keys, whatever a layer's window. With dynamic rope
    a document that outgrows the context is turned by other angles from then on; what was read
    before stays as it was, as in transformers' cache.

    Args:
        tokens: int32 [B,T], from position `start` of the rows on.
        segment_ids, positions: int32 [B,S]; what they say of the rows after `start` + T − 1 is
            read by nothing but dynamic rope, which takes a document's length from them.
        cache: of the tokens before `start`.
    """
    inputs = model.layer_inputs(segment_ids, positions)
    graphdef, stacked = nnx.split(model.layers)

    def step(
        x: jax.Array, turn: tuple[jax.Array, nnx.State, KeyValues]
    ) -> tuple[jax.Array, KeyValues]:
        kind, weights, of_layer = turn
        layer = nnx.merge(graphdef, weights)
        return _layer_step(layer, x, inputs._replace(kind=kind), of_layer, start)

    x, cache = jax.lax.scan(step, model.embed(tokens), (inputs.kind, stacked, cache))
    none = jnp.zeros((0, *x.shape), x.dtype)
    return model.output(x, none, (), rows=tokens.shape[0]).hidden, cache


@partial(jax.jit, static_argnames=("new_tokens", "vocab_size"))
def continue_greedily(
    model: Decoder,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    *,
    new_tokens: int,
    vocab_size: int,
) -> jax.Array:
    """int32 [B,new_tokens]: how the model goes on after the last token of each row [B,T], its most
    likely token each time (of equals the lowest id), of the first `vocab_size`.

    Rows may hold several documents and padding (segment 0) before the last one, which is continued:
    shorter prompts are padded on the left. It does not stop at an end of text. Each row takes
    2·L·S·G·Q numbers of cache at S = T + new_tokens.
    """
    rows, length = tokens.shape
    total = length + new_tokens

    def longer(x: jax.Array, more: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.broadcast_to(more, (rows, new_tokens))], axis=1)

    segments = longer(segment_ids, segment_ids[:, -1:])
    ahead = longer(positions, positions[:, -1:] + jnp.arange(1, new_tokens + 1)[None])

    def next_token(tokens: jax.Array, cache: KeyValues, start: jax.Array) -> Made:
        here = jnp.arange(total)[None] < start + tokens.shape[1]
        # Positions not reached yet would make the document longer for dynamic rope.
        hidden, cache = read_tokens(
            model, tokens, segments, jnp.where(here, ahead, 0), cache, start
        )
        logits = head_matmul(hidden[:, -1:], model.lm_head_weight()[:vocab_size])
        return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache

    def step(carry: Made, start: jax.Array) -> tuple[Made, jax.Array]:
        token, cache = carry
        following, cache = next_token(token[:, None], cache, start)
        return (following, cache), token

    first = next_token(tokens, KeyValues.empty(model, rows, total), jnp.int32(0))
    starts = length + jnp.arange(new_tokens - 1, dtype=jnp.int32)
    (last, _), made = jax.lax.scan(step, first, starts)
    made = jnp.concatenate([made, last[None]]).T
    if (split := model.layers.row_sharding) is not None:  # every process reads all of it
        made = jax.lax.with_sharding_constraint(made, NamedSharding(split.mesh, PartitionSpec()))
    return made
