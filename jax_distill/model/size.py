"""What a model counts: its parameters, and the floating-point operations of a token.

Letters: T positions, H query heads, Q head dim, L layers.
"""

import math

from flax import nnx

from jax_distill.model.configuration import ModelConfig
from jax_distill.model.decoder import Decoder


def abstract_parameters(config: ModelConfig) -> dict[tuple[str, ...], nnx.Param]:
    """Path → Param holding a ShapeDtypeStruct and its tags. Nothing is allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return {
        tuple(map(str, path)): param
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def count_parameters(config: ModelConfig) -> int:
    """Numbers in the weights; a tied head counts once."""
    return sum(math.prod(param.shape) for param in abstract_parameters(config).values())


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward per token: 6·P + 12·H·Q·Σ_layers S.

    P: parameters of the layers' linears (of a token's own experts) and of the head (the embedding
    is a lookup, norms are nothing); a matmul of n parameters costs 2n forward and 4n backward.
    Attention: two matmuls of 2·H·Q·S per token and layer, three passes, over the S keys that a
    query sees on average: T/2 by causality, with a window w below T: w − w²/2T. Recomputation is
    not counted (PaLM, arXiv 2204.02311, appendix B, with the causal half).
    """
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    attention = 2 * config.hidden_size * (heads + kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    if config.num_local_experts:
        mlp = config.num_experts_per_tok * mlp + config.num_local_experts * config.hidden_size
    layers = config.num_hidden_layers
    matmuls = layers * (attention + mlp) + config.vocab_size * config.hidden_size
    windows = [config.window(kind) or sequence_length for kind in config.layer_types]
    seen = [min(w, sequence_length) for w in windows]
    keys = sum(w - w**2 / (2 * sequence_length) for w in seen)
    return 6.0 * matmuls + 12.0 * heads * keys
