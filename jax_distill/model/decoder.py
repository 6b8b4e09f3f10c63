"""One decoder-only transformer: grouped-query attention, rotary positions, RMS norm, gated MLP.

Modules and parameters have the names and the layout of Hugging Face's Llama
(`layers.self_attn.q_proj.weight` is [out, in]); the layers' weights are stacked with a leading L
and the layers run under `jax.lax.scan`. Every parameter says in `logical_axes` what its axes are:
layers, vocab, embed, heads (H·Q), kv_heads (G·Q), mlp, or None.

Numbers: a matrix product casts its weight to `compute_dtype` at the moment of use and accumulates
in fp32; norm statistics, rotary angles and softmax are fp32 whatever the compute dtype.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jax_distill.config import Refusal
from jax_distill.model.attention import Implementation, attention
from jax_distill.model.configuration import ModelConfig
from jax_distill.model.rotary import rotary_angles, rotate

REMAT_POLICIES = {
    "layer": None,  # keep only each layer's input
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the linears' outputs
}
REMAT = ("none", *REMAT_POLICIES)

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Makes the parameters of a new model: normal(0, deviation), ones or zeros, in `dtype`."""

    rngs: nnx.Rngs
    deviation: float
    dtype: Any

    def normal(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        draw = jax.random.normal(self.rngs.params(), shape, jnp.float32) * self.deviation
        return nnx.Param(draw.astype(self.dtype), logical_axes=axes)

    def ones(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self.dtype), logical_axes=axes)

    def zeros(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        return nnx.Param(jnp.zeros(shape, self.dtype), logical_axes=axes)


def on_rows(x: jax.Array, rows: NamedSharding | None) -> jax.Array:
    """x [B,..] or [B·T,..] split by rows. Left to itself (None) the compiler splits attention by
    heads where the weights are split, which cuDNN refuses beside a mask split by rows. What the
    devices cannot share evenly is left to it too."""
    if rows is None or x.shape[0] % rows.mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, rows)


class Linear(nnx.Module):
    """x·weightᵀ + bias for x [N,in]. Holds [L,out,in]; in the scan it is one layer's [out,in]."""

    def __init__(self, fresh: Fresh, shape: tuple[int, int, int], axes: Axes, *, bias: bool):
        self.weight = fresh.normal(shape, ("layers", *axes))
        self.bias = fresh.zeros(shape[:2], ("layers", axes[0])) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...].astype(x.dtype).T
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, :]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight for x [N,D], in fp32, returned in x's dtype."""

    def __init__(self, fresh: Fresh, shape: tuple[int, ...], axes: Axes, *, eps: float):
        self.weight = fresh.ones(shape, axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...].astype(jnp.float32)[None, :]).astype(x.dtype)


class Attention(nnx.Module):
    """Projections, rotary positions and `attention` of one layer; weights of all L."""

    def __init__(
        self,
        fresh: Fresh,
        config: ModelConfig,
        *,
        implementation: Implementation | None,
        rows: NamedSharding | None,
    ):
        layers, width = config.num_hidden_layers, config.hidden_size
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(fresh, (layers, heads, width), ("heads", "embed"), bias=bias)
        self.k_proj = Linear(fresh, (layers, kv_heads, width), ("kv_heads", "embed"), bias=bias)
        self.v_proj = Linear(fresh, (layers, kv_heads, width), ("kv_heads", "embed"), bias=bias)
        self.o_proj = Linear(fresh, (layers, width, heads), ("embed", "heads"), bias=bias)
        self.head_dim = config.head_dim
        self.implementation = implementation
        self.rows = rows

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """x [B·T,D] → [B·T,D]; cos, sin [B,T,Q/2]; segment_ids [B,T]."""
        by_head = (*segment_ids.shape, -1, self.head_dim)
        query = on_rows(rotate(self.q_proj(x).reshape(by_head), cos, sin), self.rows)
        key = on_rows(rotate(self.k_proj(x).reshape(by_head), cos, sin), self.rows)
        value = on_rows(self.v_proj(x).reshape(by_head), self.rows)
        mixed = attention(query, key, value, segment_ids, implementation=self.implementation)
        return self.o_proj(mixed.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    """down(silu(gate(x)) · up(x)) for x [N,D]."""

    def __init__(self, fresh: Fresh, config: ModelConfig):
        layers, width = config.num_hidden_layers, config.hidden_size
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(fresh, (layers, inner, width), ("mlp", "embed"), bias=bias)
        self.up_proj = Linear(fresh, (layers, inner, width), ("mlp", "embed"), bias=bias)
        self.down_proj = Linear(fresh, (layers, width, inner), ("embed", "mlp"), bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Holds the weights of all L layers; the scan
    of `Decoder` calls it with one layer's slice."""

    def __init__(
        self,
        fresh: Fresh,
        config: ModelConfig,
        *,
        implementation: Implementation | None,
        rows: NamedSharding | None,
    ):
        shape, axes = (config.num_hidden_layers, config.hidden_size), ("layers", None)
        self.input_layernorm = RMSNorm(fresh, shape, axes, eps=config.rms_norm_eps)
        self.self_attn = Attention(fresh, config, implementation=implementation, rows=rows)
        self.post_attention_layernorm = RMSNorm(fresh, shape, axes, eps=config.rms_norm_eps)
        self.mlp = MLP(fresh, config)
        self.rows = rows

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        x = on_rows(x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids), self.rows)
        return on_rows(x + self.mlp(self.post_attention_layernorm(x)), self.rows)


class Embedding(nnx.Module):
    """A [V,D] table: of input vectors (`embed_tokens`) or of output columns (`lm_head`)."""

    def __init__(self, fresh: Fresh, config: ModelConfig):
        self.weight = fresh.normal((config.vocab_size, config.hidden_size), ("vocab", "embed"))


class Decoder(nnx.Module):
    """The model, with fresh weights (`rngs` are not kept). Hashable but for its parameters, so
    `nnx.split` gives a graphdef that jit can compare.

    `remat`: "none" keeps every intermediate for the backward pass, "dots" keeps the outputs of the
    linears, "layer" only the input of each layer. On a CPU to recompute is faster than to store
    (two cores, 6 layers of width 192, 16 rows of 256: none 865, dots 765, layer 720 ms; 24 layers
    of width 576, 4 rows of 256: none 5.1, dots 4.1, layer 4.6 s). `attention`: see the function of
    that name. `rows`: how a mesh splits them, see `on_rows`. Raises Refusal for another remat.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
        compute_dtype: Any = jnp.float32,
        remat: str = "none",
        attention: Implementation | None = None,
        rows: NamedSharding | None = None,
    ):
        if remat not in REMAT:
            raise Refusal(f"expected remat {', '.join(REMAT)}, got {remat!r}; do choose one")
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        fresh = Fresh(rngs, config.initializer_range, jnp.dtype(param_dtype))
        self.embed_tokens = Embedding(fresh, config)
        self.layers = Layer(fresh, config, implementation=attention, rows=rows)
        self.norm = RMSNorm(fresh, (config.hidden_size,), (None,), eps=config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Embedding(fresh, config)

    def hidden_states(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """int32 [B,T] three times → [B,T,D] in compute_dtype, after the final norm.

        Segment id 0 is padding. Ids outside the vocabulary take the nearest row (they can only
        stand in padding or masked cells). Logits are `hidden @ lm_head_weight().T`.
        """
        context = self.context(segment_ids, positions)
        layer, stacked = self.layer_function()

        def step(x: jax.Array, weights: nnx.State) -> tuple[jax.Array, None]:
            return layer(x, weights, *context), None

        x, _ = jax.lax.scan(step, self.embed(tokens), stacked)
        return self.norm(x).reshape(*tokens.shape, -1)

    def context(self, segment_ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        """What every layer sees beside its input: cos, sin [B,T,Q/2] and segment_ids."""
        cos, sin = rotary_angles(
            self.config.rope,
            positions,
            segment_ids,
            head_dim=self.config.head_dim,
            max_position_embeddings=self.config.max_position_embeddings,
        )
        return cos, sin, segment_ids

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [B,T] → [B·T,D] in compute_dtype, the first layer's input."""
        x = jnp.take(self.embed_tokens.weight[...], tokens.reshape(-1), axis=0, mode="clip")
        return x.astype(self.compute_dtype)

    def layer_function(self) -> tuple[Callable[..., jax.Array], nnx.State]:
        """(x, one layer's weights, *context) → x under `remat`, and the weights of all L."""
        graphdef, stacked = nnx.split(self.layers)

        def layer(x: jax.Array, weights: nnx.State, *context: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, weights)(x, *context)

        if self.remat != "none":
            layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[self.remat])
        return layer, stacked

    def lm_head_weight(self) -> jax.Array:
        """[V,D] in the parameters' dtype: `lm_head`, or `embed_tokens` where the two are tied."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.weight[...]
