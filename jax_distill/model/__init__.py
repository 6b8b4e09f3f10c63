"""One decoder-only transformer for all families, and what it counts: parameters and FLOPs."""

from jax_distill.attention import ATTENTION_IMPLEMENTATIONS, Implementation
from jax_distill.model.configuration import LAYER_TYPES, ModelConfig, RopeConfig
from jax_distill.model.decoder import REMAT, Decoder, Output
from jax_distill.model.experts import ExpertsImplementation, RouterLoad
from jax_distill.model.generation import KeyValues, continue_greedily, read_tokens
from jax_distill.model.layers import Aux, LayerInputs
from jax_distill.model.size import abstract_parameters, count_parameters, train_flops_per_token

__all__ = [
    "ATTENTION_IMPLEMENTATIONS",
    "LAYER_TYPES",
    "REMAT",
    "Aux",
    "Decoder",
    "ExpertsImplementation",
    "Implementation",
    "KeyValues",
    "LayerInputs",
    "ModelConfig",
    "Output",
    "RopeConfig",
    "RouterLoad",
    "abstract_parameters",
    "continue_greedily",
    "count_parameters",
    "read_tokens",
    "train_flops_per_token",
]
