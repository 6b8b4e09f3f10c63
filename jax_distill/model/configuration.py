"""The architecture as plain numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies, all of HF's Llama types. A type looks only at the fields it knows.

    `factor` stretches the context: linear divides every frequency by it, dynamic raises theta with
    the length of the document, yarn and llama3 blend θ_i and θ_i/factor by wavelength.
    `attention_factor` multiplies cos and sin (yarn; 1 elsewhere).
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture in the field names of HF's config.json. Hashable, so jit can compare it."""

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
