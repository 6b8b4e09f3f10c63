"""One decoder-only transformer: grouped-query attention, rotary positions, RMS norm, gated MLP.

Shapes: B rows, T positions, D hidden, V vocabulary; H query heads, G key/value heads, Q head width,
F MLP width, L layers. Modules and parameters have the names and the layout of Hugging Face's
Llama (`layers.self_attn.q_proj.weight` is [out, in]); the weights of the layers are stacked with a
leading L and the layers run under `jax.lax.scan`.

Numbers: a matrix product casts its weight to `compute_dtype` at the moment of use and accumulates
in fp32; norm statistics, rotary angles and softmax are fp32 whatever the compute dtype.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_distill.config import Refusal


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies, all of HF's Llama types. Fields a type does not use stay at None.

    `factor` stretches the context: linear divides every frequency by it, dynamic raises theta with
    the length of the document, yarn and llama3 blend θ_i and θ_i/factor by wavelength.
    `attention_factor` multiplies cos and sin (yarn; 1 elsewhere).
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture, in the field names of HF's config.json. Hashable: jit and NNX compare it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    rope: RopeConfig = RopeConfig()


REMAT_POLICIES = {
    "layer": None,  # keep only each layer's input
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the linears' outputs
}


# ---- rotary positions ---------------------------------------------------------------------------


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, fp32 [Q/2], for a document within the context.

    default: theta^(-2i/Q). The intermediate roundings to fp32 are those of transformers
    (modeling_rope_utils), because a last-bit difference grows with the position. The dynamic type
    equals the default until a document outgrows the context: see `rotary_angles`.
    Sources: YaRN, arXiv 2309.00071 §3; Llama 3.1's released configuration.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wave = np.power(rope.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1.0) / wave
    if rope.rope_type in ("default", "dynamic"):
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, wave, head_dim)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    raise Refusal(
        f"expected rope_type default, linear, dynamic, yarn or llama3, got {rope.rope_type!r}; "
        "do use a model with one of these"
    )


def _yarn_frequencies(rope: RopeConfig, wave: np.ndarray, head_dim: int) -> np.ndarray:
    """Pairs that turn more than beta_fast times in the original context keep their frequency,
    those that turn less than beta_slow times are divided by factor, a linear ramp lies between."""

    def pair_with_rotations(rotations: float) -> float:
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (
            2 * math.log(rope.rope_theta)
        )

    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    kept = np.float32(1.0) - ramp.astype(np.float32)
    stretched = np.float32(1.0) / (np.float32(rope.factor) * wave)
    return stretched * (np.float32(1.0) - kept) + (np.float32(1.0) / wave) * kept


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Wavelengths above context/low_freq_factor are stretched by factor, those below
    context/high_freq_factor are kept, between them the two are blended."""
    context = rope.original_max_position_embeddings
    wavelengths = np.float32(2 * math.pi) / frequencies
    stretched = frequencies / np.float32(rope.factor)
    smooth = (np.float32(context) / wavelengths - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (np.float32(1.0) - smooth) * stretched + smooth * frequencies
    result = np.where(wavelengths > context / rope.low_freq_factor, stretched, blended)
    return np.where(wavelengths < context / rope.high_freq_factor, frequencies, result)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's factor on cos and sin: 0.1·m·ln(factor) + 1 with m = 1; with both mscales given
    (DeepSeek's form) the quotient of that at m = mscale and at m = mscale_all_dim."""

    def at(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    return at(mscale) / at(mscale_all_dim) if mscale and mscale_all_dim else at(1.0)


def rotary_angles(
    config: ModelConfig, positions: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · frequency, times attention_factor: two fp32 arrays [B,T,Q/2].

    dynamic (NTK): with n the length of the token's own document (largest position + 1) and m the
    context, theta becomes theta · (factor·n/m − factor + 1)^(Q/(Q−2)) once n > m. transformers
    takes the longest row of the batch for n; the document's own n is the same for a document
    alone and keeps documents apart in a packed row.
    """
    rope, head_dim = config.rope, config.head_dim
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies
    if rope.rope_type == "dynamic":
        context = config.max_position_embeddings
        length = jnp.maximum(_document_lengths(positions, segment_ids), context)
        growth = length.astype(jnp.float32) * (rope.factor / context) - (rope.factor - 1.0)
        theta = rope.rope_theta * growth ** (head_dim / (head_dim - 2))
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        angles = positions.astype(jnp.float32)[:, :, None] / (
            theta[:, :, None] ** exponents[None, None, :]
        )
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def _document_lengths(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[B,T] → [B,T]: one more than the largest position in each token's segment."""

    def row(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        _, dense = jnp.unique(segment_ids, size=segment_ids.shape[0], return_inverse=True)
        last = jax.ops.segment_max(positions, dense, num_segments=segment_ids.shape[0])
        return last[dense] + 1

    return jax.vmap(row)(positions, segment_ids)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (x_i, x_{i+Q/2}) of x [B,T,H,Q] by the angles [B,T,Q/2]; fp32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


# ---- attention ----------------------------------------------------------------------------------


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Causal softmax attention inside each segment: [B,T,H,Q], [B,T,G,Q] twice, [B,T] → [B,T,H,Q].

    Token t sees token s iff s ≤ t and both have the same segment id; so padding (id 0) sees padding
    and itself, and no row of the softmax is empty. Scale 1/sqrt(Q); softmax in fp32.
    `implementation`: "cudnn" or "xla"; None takes cuDNN where it can run (`fast_attention`).
    """
    mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        implementation=implementation or fast_attention(query.dtype, query.shape[-1]),
    )


def fast_attention(dtype: jnp.dtype, head_dim: int) -> str:
    """ "cudnn" on an NVIDIA GPU of the Ampere generation or later in bf16 or fp16 with head width
    at most 128 and a multiple of 8, which is what cuDNN's kernel takes; else "xla"."""
    device = jax.local_devices()[0]
    capability = float(getattr(device, "compute_capability", 0) or 0)
    half = dtype in (jnp.bfloat16, jnp.float16)
    cuda = device.platform == "gpu" and capability >= 8.0
    return "cudnn" if cuda and half and head_dim <= 128 and head_dim % 8 == 0 else "xla"


# ---- modules ------------------------------------------------------------------------------------


class Linear(nnx.Module):
    """y = x·weightᵀ + bias for x [N,in]; weight [L,out,in], stacked; inside the scan [out,in]."""

    def __init__(self, layers, out_size, in_size, *, axes, bias, init, rngs, dtype):
        weight = init(rngs.params(), (layers, out_size, in_size), dtype)
        self.weight = nnx.Param(weight, logical_axes=("layers", *axes))
        zeros = jnp.zeros((layers, out_size), dtype)
        self.bias = nnx.Param(zeros, logical_axes=("layers", axes[0])) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...].astype(x.dtype).T
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, :]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in fp32, returned in x's dtype."""

    def __init__(self, shape, *, eps, dtype, logical_axes):
        self.weight = nnx.Param(jnp.ones(shape, dtype), logical_axes=logical_axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...].astype(jnp.float32)[None, :]).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, implementation, **knobs):
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        layers, width = config.num_hidden_layers, config.hidden_size
        knobs["bias"] = config.attention_bias
        self.q_proj = Linear(layers, heads, width, axes=("heads", "embed"), **knobs)
        self.k_proj = Linear(layers, kv_heads, width, axes=("kv_heads", "embed"), **knobs)
        self.v_proj = Linear(layers, kv_heads, width, axes=("kv_heads", "embed"), **knobs)
        self.o_proj = Linear(layers, width, heads, axes=("embed", "heads"), **knobs)
        self.head_dim = config.head_dim
        self.implementation = implementation

    def __call__(self, x, cos, sin, segment_ids) -> jax.Array:
        """x [B·T,D] → [B·T,D]; cos, sin [B,T,Q/2]."""
        by_head = (*segment_ids.shape, -1, self.head_dim)
        query = rotate(self.q_proj(x).reshape(by_head), cos, sin)
        key = rotate(self.k_proj(x).reshape(by_head), cos, sin)
        value = self.v_proj(x).reshape(by_head)
        mixed = attention(query, key, value, segment_ids, implementation=self.implementation)
        return self.o_proj(mixed.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, **knobs):
        layers, width, inner = (
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
        )
        knobs["bias"] = config.mlp_bias
        self.gate_proj = Linear(layers, inner, width, axes=("mlp", "embed"), **knobs)
        self.up_proj = Linear(layers, inner, width, axes=("mlp", "embed"), **knobs)
        self.down_proj = Linear(layers, width, inner, axes=("embed", "mlp"), **knobs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Holds all L layers' weights, stacked; the
    scan of `Decoder` calls it with one layer's slice."""

    def __init__(self, config: ModelConfig, *, implementation, **knobs):
        norm = dict(
            shape=(config.num_hidden_layers, config.hidden_size),
            eps=config.rms_norm_eps,
            dtype=knobs["dtype"],
            logical_axes=("layers", None),
        )
        self.input_layernorm = RMSNorm(**norm)
        self.self_attn = Attention(config, implementation=implementation, **knobs)
        self.post_attention_layernorm = RMSNorm(**norm)
        self.mlp = MLP(config, **knobs)

    def __call__(self, x, cos, sin, segment_ids) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nnx.Module):
    """A [V,D] table: of input vectors (`embed_tokens`) or of output columns (`lm_head`)."""

    def __init__(self, vocab_size, width, *, init, rngs, dtype):
        table = init(rngs.params(), (vocab_size, width), dtype)
        self.weight = nnx.Param(table, logical_axes=("vocab", "embed"))


class Decoder(nnx.Module):
    """The model. `rngs` are used here only, for normal(0, initializer_range) weights."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        remat: str = "none",
        attention: str | None = None,
    ):
        if remat != "none" and remat not in REMAT_POLICIES:
            raise Refusal(f"expected remat none, layer or dots, got {remat!r}; do choose one")
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        init = jax.nn.initializers.normal(config.initializer_range)
        knobs = dict(init=init, rngs=rngs, dtype=jnp.dtype(param_dtype))
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **knobs)
        self.layers = Layer(config, implementation=attention, **knobs)
        self.norm = RMSNorm(
            (config.hidden_size,),
            eps=config.rms_norm_eps,
            dtype=knobs["dtype"],
            logical_axes=(None,),
        )
        tied = config.tie_word_embeddings
        shape = config.vocab_size, config.hidden_size
        self.lm_head = None if tied else Embedding(*shape, **knobs)

    def hidden_states(
        self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array
    ) -> jax.Array:
        """int32 [B,T] three times → [B,T,D] in compute_dtype, after the final norm.

        Segment id 0 is padding. Ids outside the vocabulary take the nearest row (they can only
        stand in padding or masked cells). Logits are `hidden @ lm_head_weight().T`.
        """
        cos, sin = rotary_angles(self.config, positions, segment_ids)
        x = jnp.take(self.embed_tokens.weight[...], tokens.reshape(-1), axis=0, mode="clip")
        graphdef, stacked = nnx.split(self.layers)

        def layer(x, weights):
            return nnx.merge(graphdef, weights)(x, cos, sin, segment_ids), None

        if self.remat != "none":
            layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[self.remat])
        x, _ = jax.lax.scan(layer, x.astype(self.compute_dtype), stacked)
        return self.norm(x).reshape(*tokens.shape, -1)

    def lm_head_weight(self) -> jax.Array:
        """[V,D] in the parameters' dtype: `lm_head`, or `embed_tokens` where the two are tied."""
        return (self.lm_head or self.embed_tokens).weight[...]
