"""Hugging Face model folders: config.json, weights and GGUF files, in and out."""

from jax_distill.hf.architecture import model_config, read_config
from jax_distill.hf.folder import local_folder
from jax_distill.hf.tensor_files import weight_files
from jax_distill.hf.weights import Slot, load_model, save_weights, send_weights, weight_table

__all__ = [
    "Slot",
    "load_model",
    "local_folder",
    "model_config",
    "read_config",
    "save_weights",
    "send_weights",
    "weight_files",
    "weight_table",
]
