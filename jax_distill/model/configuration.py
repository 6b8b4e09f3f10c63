"""The architecture as plain numbers."""

import dataclasses
from collections.abc import Sequence

from jax_distill.base.errors import UserError

LAYER_TYPES = ("full_attention", "sliding_attention")
"""The kinds of layers, in HF's words."""


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
    """The architecture in the field names of HF's config.json. Hashable, so jit can compare it.

    Attributes:
        attention_bias: of q, k and v; output_bias: of o.
        qk_norm: an RMS norm of each head's query and key, before the rotation (Qwen3).
        layer_types: the kind of each layer; left empty, all are "full_attention".
        sliding_window: how many keys a query of a "sliding_attention" layer sees, its own included.
        attention_sinks: a logit per head that takes part in the softmax and adds nothing.
        num_local_experts: MLPs of intermediate_size, of which the router chooses
            num_experts_per_tok for each token; 0: one MLP without a router.
        swiglu_alpha, swiglu_limit: of the experts' gate, see `experts.Gate`.
        packed_experts: the experts' matrices stay MXFP4, see `mxfp4.Packed`; for a model that is
            not trained. How the weights are held, not what they are: no config.json says it.

    Raises:
        UserError: another number of layer_types than layers, an unknown kind, sliding layers
            without a window, packed experts where there are none.
    """

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
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    rope: RopeConfig = RopeConfig()
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    attention_sinks: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    packed_experts: bool = False

    def __post_init__(self) -> None:
        kinds = self.layer_types or ("full_attention",) * self.num_hidden_layers
        object.__setattr__(self, "layer_types", kinds)
        if len(kinds) != self.num_hidden_layers:
            raise UserError(
                f"expected {self.num_hidden_layers} layer_types, one a layer, got {len(kinds)}; "
                "correct config.json"
            )
        for kind in kinds:
            if kind not in LAYER_TYPES:
                raise UserError(
                    f"expected layer_types of {', '.join(LAYER_TYPES)}, got {kind!r}; "
                    "use another model"
                )
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise UserError(
                "expected a sliding_window for layers of sliding_attention, got none; "
                "correct config.json"
            )
        if self.packed_experts and not self.num_local_experts:
            raise UserError(
                "expected a model with experts for packed_experts, got one without; "
                "set teacher.packed_experts false"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers that there are, each once."""
        return tuple(kind for kind in LAYER_TYPES if kind in self.layer_types)

    def window(self, kind: str) -> int | None:
        """How many keys a query of such a layer sees; None: all before it."""
        return self.sliding_window if kind == "sliding_attention" else None

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        """The architecture that keeps these of the layers (0-based), in this order."""
        kinds = tuple(self.layer_types[layer] for layer in kept)
        return dataclasses.replace(self, num_hidden_layers=len(kinds), layer_types=kinds)
