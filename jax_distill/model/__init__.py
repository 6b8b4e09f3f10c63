"""One decoder-only transformer for the Llama family.

Alphabet of all shapes here: B rows, T positions, D hidden, V vocabulary; H query heads, G key/value
heads, Q head width, F MLP width, L layers.
"""

from jax_distill.model.attention import ATTENTION_IMPLEMENTATIONS, Implementation
from jax_distill.model.configuration import ModelConfig, RopeConfig
from jax_distill.model.decoder import REMAT, Decoder

__all__ = [
    "ATTENTION_IMPLEMENTATIONS",
    "REMAT",
    "Decoder",
    "Implementation",
    "ModelConfig",
    "RopeConfig",
]
