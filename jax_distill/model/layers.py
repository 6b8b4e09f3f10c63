"""The modules of a decoder: linear, RMS norm, grouped-query attention, gated MLP and experts,
layer, embedding.

Modules and parameters have the names and the layout of Hugging Face's Llama
(`layers.self_attn.q_proj.weight` is [out, in]); a layer's weights are stacked with a leading L.
Every parameter carries two tags: `logical_axes`, what its axes are (layers, vocab, embed, heads
(H·Q), kv_heads (G·Q), mlp, experts, or None), and `weight_decay`, whether the optimizer decays it.

Numbers: a matmul casts its weight to the compute dtype at the moment of use and accumulates in
fp32; norm statistics, rotary angles and softmax are fp32 whatever the compute dtype.

Letters: B rows, T positions, N = B·T; D hidden, V vocabulary, F MLP width, L layers, E experts; H
query heads, G key/value heads, Q head dim.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_distill.attention import Implementation, Mask, attention
from jax_distill.model.configuration import ModelConfig
from jax_distill.model.experts import (
    ExpertsImplementation,
    ExpertWeights,
    Gate,
    RouterLoad,
    mix_experts,
    route,
)
from jax_distill.model.mxfp4 import Packed, packed_shapes
from jax_distill.model.rotary import rotate
from jax_distill.sharding import activation_sharding, row_axes, row_shards

Axes = tuple[str | None, ...]
Aux = Any
"""A pytree of floating arrays that a layer returns beside its output."""


@dataclasses.dataclass(frozen=True)
class Initializer:
    """Makes the parameters of a new model: normal(0, deviation), ones or zeros, in `dtype`.

    Matrices are decayed, norms and biases (ones and zeros) are not.
    """

    rngs: nnx.Rngs
    deviation: float
    dtype: jnp.dtype

    def normal(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param[jax.Array]:
        draw = jax.random.normal(self.rngs.params(), shape, jnp.float32) * self.deviation
        return nnx.Param(draw.astype(self.dtype), logical_axes=axes, weight_decay=True)

    def ones(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param[jax.Array]:
        return nnx.Param(jnp.ones(shape, self.dtype), logical_axes=axes, weight_decay=False)

    def zeros(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param[jax.Array]:
        return nnx.Param(jnp.zeros(shape, self.dtype), logical_axes=axes, weight_decay=False)

    def packed(self, shape: tuple[int, ...], axes: Axes) -> Iterator[nnx.Param[jax.Array]]:
        """Zeros [..,in,out] as MXFP4: the blocks, then the scales (`mxfp4.Packed`)."""
        *stack, rows, columns = shape
        *stack_axes, _, out = axes
        for part in packed_shapes(rows, columns):
            whole = (*stack_axes, out, *[None] * (len(part) - 1))
            zeros = jnp.zeros((*stack, *part), jnp.uint8)
            yield nnx.Param(zeros, logical_axes=whole, weight_decay=False)


class LayerInputs(NamedTuple):
    """What a layer reads beside its input.

    Attributes:
        cos, sin: fp32 [B,T,Q/2].
        masks: one for each kind of layer that the model has.
        kind: int32, the layer's index into them; of all layers, [L].
    """

    cos: jax.Array
    sin: jax.Array
    masks: tuple[Mask, ...]
    kind: jax.Array


def constrain_rows(
    x: jax.Array, row_sharding: NamedSharding | None, *axes: str | None
) -> jax.Array:
    """x [B,..] or [N,..], constrained to be split by rows, and its further dimensions by the
    logical axes named (`ACTIVATION_AXES`). Left to itself (None) the compiler splits attention by
    heads where the weights are split. What the devices cannot share evenly is left to it too."""
    if row_sharding is None or x.shape[0] % row_shards(row_sharding.mesh):
        return x
    names = ("rows", *axes, *[None] * (x.ndim - 1 - len(axes)))
    split = activation_sharding(row_sharding.mesh, names, x.shape)
    return jax.lax.with_sharding_constraint(x, split)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None,
    implementation: Implementation | None,
    row_sharding: NamedSharding | None,
) -> jax.Array:
    """`attention`, each device on its own rows and its own heads: where `tensor` divides the
    key/value heads, a share of these and of the query heads that read them; else all.

    Under shard_map, since a kernel knows nothing of meshes, and blocks that one device's documents
    make empty are skipped there whatever the others' do.
    """

    def local(query, key, value, segment_ids, sinks):
        own = dataclasses.replace(mask, segment_ids=segment_ids)
        return attention(query, key, value, own, sinks=sinks, implementation=implementation)

    mesh = None if row_sharding is None else row_sharding.mesh
    if mesh is not None and mesh.size > 1 and query.shape[0] % row_shards(mesh) == 0:
        rows = row_axes(mesh)
        heads = activation_sharding(mesh, (None, None, "heads", None), key.shape).spec[2]
        split = PartitionSpec(rows, None, heads)
        specs = (split, split, split, PartitionSpec(rows), PartitionSpec(heads))
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return local(query, key, value, mask.segment_ids, sinks)


class Linear(nnx.Module):
    """x·weightᵀ + bias for x [N,in]. Holds [L,out,in]; in the scan it is one layer's [out,in]."""

    def __init__(self, init: Initializer, shape: tuple[int, int, int], axes: Axes, *, bias: bool):
        self.weight = init.normal(shape, ("layers", *axes))
        self.bias = init.zeros(shape[:2], ("layers", axes[0])) if bias else None

    def __call__(self, x: jax.Array, *, accumulate: DTypeLike | None = None) -> jax.Array:
        """In the dtype `accumulate`, or x's."""
        y = jnp.matmul(x, self.weight[...].astype(x.dtype).T, preferred_element_type=accumulate)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)[None, :]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight for x [..,D], in fp32, returned in x's dtype."""

    def __init__(self, init: Initializer, shape: tuple[int, ...], axes: Axes, *, eps: float):
        self.weight = init.ones(shape, axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Projections, norms of the heads (`qk_norm`), rotary positions and `attention` of one layer;
    weights of all L."""

    def __init__(
        self,
        init: Initializer,
        config: ModelConfig,
        *,
        implementation: Implementation | None,
        row_sharding: NamedSharding | None,
    ):
        layers, width = config.num_hidden_layers, config.hidden_size
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(init, (layers, heads, width), ("heads", "embed"), bias=bias)
        self.k_proj = Linear(init, (layers, kv_heads, width), ("kv_heads", "embed"), bias=bias)
        self.v_proj = Linear(init, (layers, kv_heads, width), ("kv_heads", "embed"), bias=bias)
        self.o_proj = Linear(
            init, (layers, width, heads), ("embed", "heads"), bias=config.output_bias
        )

        def norm() -> RMSNorm | None:
            shape, axes = (layers, config.head_dim), ("layers", None)
            return RMSNorm(init, shape, axes, eps=config.rms_norm_eps) if config.qk_norm else None

        self.q_norm, self.k_norm = norm(), norm()
        shape = (layers, config.num_attention_heads)
        self.sinks = init.zeros(shape, ("layers", None)) if config.attention_sinks else None
        self.head_dim = config.head_dim
        self.implementation = implementation
        self.row_sharding = row_sharding

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """x [N,D] → [N,D]."""
        return self.o_proj(self.mixed(x, inputs))

    def mixed(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """x [N,D] → [N,H·Q], what the heads say before `o_proj`."""
        cos, sin, masks, kind = inputs
        query, key, value = self.project(x, rows=cos.shape[0])
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        sinks = None if self.sinks is None else self.sinks[...]

        def attend_by(
            mask: Mask, sinks: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array
        ) -> jax.Array:
            kernel, rows = self.implementation, self.row_sharding
            return attend(q, k, v, mask, sinks=sinks, implementation=kernel, row_sharding=rows)

        # Only the layer's own kind runs; a model of one kind has no choice in its program.
        kinds = [partial(attend_by, mask) for mask in masks]
        mixed = jax.lax.switch(kind, kinds, sinks, query, key, value)
        return mixed.reshape(x.shape[0], -1)

    def project(self, x: jax.Array, *, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [N,D] → query [B,T,H,Q], key and value [B,T,G,Q], normed but not rotated."""

        def by_head(x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
            x = x.reshape(rows, -1, x.shape[-1] // self.head_dim, self.head_dim)
            return x if norm is None else norm(x)

        query = by_head(self.q_proj(x), self.q_norm)
        key = by_head(self.k_proj(x), self.k_norm)
        return query, key, by_head(self.v_proj(x))


class MLP(nnx.Module):
    """down(silu(gate(x)) · up(x)) for x [N,D]."""

    def __init__(self, init: Initializer, config: ModelConfig, row_sharding: NamedSharding | None):
        layers, width = config.num_hidden_layers, config.hidden_size
        inner, bias = config.intermediate_size, config.mlp_bias
        self.row_sharding = row_sharding
        self.gate_proj = Linear(init, (layers, inner, width), ("mlp", "embed"), bias=bias)
        self.up_proj = Linear(init, (layers, inner, width), ("mlp", "embed"), bias=bias)
        self.down_proj = Linear(init, (layers, width, inner), ("embed", "mlp"), bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.neurons(x))

    def neurons(self, x: jax.Array) -> jax.Array:
        """x [N,D] → [N,F], silu(gate(x)) · up(x)."""
        gate, up = (
            constrain_rows(proj(x), self.row_sharding, "mlp")
            for proj in (self.gate_proj, self.up_proj)
        )
        return jax.nn.silu(gate) * up


class Experts(nnx.Module):
    """The weights of E experts, gate and up interleaved; [L,E,in,out], biases [L,E,out]. Packed
    matrices are two parameters each, under the names that they have in MXFP4 files."""

    def __init__(self, init: Initializer, config: ModelConfig):
        layers, width, inner = (
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
        )
        stack = (layers, config.num_local_experts)
        axes = ("layers", "experts")
        gate_up = (*stack, width, 2 * inner), (*axes, "embed", "mlp")
        down = (*stack, inner, width), (*axes, "mlp", "embed")
        if config.packed_experts:
            self.gate_up_proj_blocks, self.gate_up_proj_scales = init.packed(*gate_up)
            self.down_proj_blocks, self.down_proj_scales = init.packed(*down)
        else:
            self.gate_up_proj, self.down_proj = init.normal(*gate_up), init.normal(*down)
        self.gate_up_proj_bias = init.zeros((*stack, 2 * inner), (*axes, "mlp"))
        self.down_proj_bias = init.zeros((*stack, width), (*axes, "embed"))
        self.packed = config.packed_experts

    def weights(self) -> ExpertWeights:
        """In the scan, one layer's."""
        if self.packed:
            gate_up = Packed(self.gate_up_proj_blocks[...], self.gate_up_proj_scales[...])
            down = Packed(self.down_proj_blocks[...], self.down_proj_scales[...])
            return ExpertWeights(
                gate_up, self.gate_up_proj_bias[...], down, self.down_proj_bias[...]
            )
        return ExpertWeights(
            self.gate_up_proj[...],
            self.gate_up_proj_bias[...],
            self.down_proj[...],
            self.down_proj_bias[...],
        )


class ExpertMLP(nnx.Module):
    """The experts that the router chooses for each token, weighted; see experts.py. The router's
    logits are fp32."""

    def __init__(
        self,
        init: Initializer,
        config: ModelConfig,
        *,
        implementation: ExpertsImplementation,
        row_sharding: NamedSharding | None,
    ):
        shape = (config.num_hidden_layers, config.num_local_experts, config.hidden_size)
        self.router = Linear(init, shape, ("experts", "embed"), bias=True)
        self.experts = Experts(init, config)
        self.top_k = config.num_experts_per_tok
        self.activation = Gate(config.swiglu_alpha, config.swiglu_limit)
        self.implementation = implementation
        self.row_sharding = row_sharding

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, RouterLoad]:
        """x [N,D], real [N] bool (not padding) → [N,D], the load of the real tokens."""
        logits = self.router(x, accumulate=jnp.float32)
        chosen, weights, load = route(logits, real, top_k=self.top_k)
        parameters = self.experts.weights()
        mixed = mix_experts(
            x,
            chosen,
            weights,
            parameters,
            gate=self.activation,
            row_sharding=self.row_sharding,
            implementation=self.implementation,
        )
        return mixed, load


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Holds the weights of all L layers; the scan
    of `Decoder` calls it with one layer's slice.

    It returns x and what else the loss wants of a layer, a pytree of floating arrays: its router's
    load, or nothing.
    """

    def __init__(
        self,
        init: Initializer,
        config: ModelConfig,
        *,
        implementation: Implementation | None,
        experts: ExpertsImplementation,
        row_sharding: NamedSharding | None,
    ):
        shape, axes = (config.num_hidden_layers, config.hidden_size), ("layers", None)
        self.input_layernorm = RMSNorm(init, shape, axes, eps=config.rms_norm_eps)
        self.self_attn = Attention(
            init, config, implementation=implementation, row_sharding=row_sharding
        )
        self.post_attention_layernorm = RMSNorm(init, shape, axes, eps=config.rms_norm_eps)
        self.mlp = (
            ExpertMLP(init, config, implementation=experts, row_sharding=row_sharding)
            if config.num_local_experts
            else MLP(init, config, row_sharding)
        )
        self.row_sharding = row_sharding

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        mixed = self.self_attn(self.input_layernorm(x), inputs)
        return self.after_attention(x, mixed, inputs.masks[0].segment_ids)

    def after_attention(
        self, x: jax.Array, mixed: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, Aux]:
        """x [N,D] and what attention made of it [N,D], segment_ids [B,T] → as `__call__`."""
        x = constrain_rows(x + mixed, self.row_sharding)
        inner = self.post_attention_layernorm(x)
        aux: Aux = ()
        if isinstance(self.mlp, ExpertMLP):
            real = segment_ids.reshape(-1) > 0
            mixed, aux = self.mlp(inner, real)
        else:
            mixed = self.mlp(inner)
        return constrain_rows(x + mixed, self.row_sharding), aux


class Embedding(nnx.Module):
    """A [V,D] table: of input vectors (`embed_tokens`) or of the output matmul (`lm_head`)."""

    def __init__(self, init: Initializer, config: ModelConfig):
        self.weight = init.normal((config.vocab_size, config.hidden_size), ("vocab", "embed"))
