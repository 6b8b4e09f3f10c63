"""GGUF file → Hugging Face folder, once.

The folder lies under the user's cache directory, named after the file's content: config.json,
model.safetensors (fp32, the exact values that the quantised blocks stand for), tokenizer.json,
tokenizer_config.json and generation_config.json. Everything comes from the file; what cannot be
carried over is refused by name.
"""

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jax_distill.config import Refusal, cache_folder
from jax_distill.data.gguf import (
    gguf_metadata,
    open_gguf,
    required,
    special_ids,
    write_json_text,
    write_tokenizer,
)
from jax_distill.hf.architecture import model_config
from jax_distill.hf.tensor_files import write_tensors
from jax_distill.hf.weights import weight_table

FORM = 1  # part of the folder's name: a folder of an older form of this conversion is not reused

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Metadata of the llama architecture that the conversion understands; another key is refused.
LLAMA_METADATA = frozenset(
    """block_count context_length embedding_length feed_forward_length vocab_size
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count""".split()
)


def converted_folder(path: str | Path) -> Path:
    """The HF folder of a GGUF file, converted on first use.

    It appears whole or not at all: written beside its place, then renamed. Its name is a hash of
    the file, so a changed file is converted anew and two processes agree. Raises Refusal without
    the extra `gguf`, and for a file that is broken or holds what the decoder does not have.
    """
    path = Path(path)
    place = cache_folder() / "gguf" / f"{path.stem}-{FORM}-{_digest(path)[:16]}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        _convert(path, part)
        part.chmod(0o755)
        os.rename(part, place)
    except OSError:
        if not place.is_dir():  # else another process was first with the same content
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(path: Path, folder: Path) -> None:
    reader = open_gguf(path)
    metadata = gguf_metadata(reader)
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    raw = _config(metadata, tied="lm_head.weight" not in tensors, source=path)
    config = model_config(raw)
    table = weight_table(config)
    for key in sorted(set(table) ^ set(tensors)):
        raise Refusal(f"expected the tensors of a Llama in {path}, got a difference at {key!r}")

    def tensor(key: str) -> np.ndarray:
        values = _dequantised(tensors[key])
        if values.shape != table[key].shape:
            raise Refusal(
                f"expected {key!r} of shape {table[key].shape} in {path}, got {values.shape}"
            )
        if key.endswith("self_attn.q_proj.weight"):
            return _unpermuted(values, config.num_attention_heads)
        if key.endswith("self_attn.k_proj.weight"):
            return _unpermuted(values, config.num_key_value_heads)
        return values

    shapes = {key: slot.shape for key, slot in table.items()}
    write_tensors(folder, shapes, tensor, itemsize=4, max_shard_bytes=5 * 10**9)
    write_tokenizer(folder, metadata)
    write_json_text(folder / "config.json", raw)


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if name in NAMES:
        return NAMES[name]
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}"
    raise Refusal(
        f"expected the tensors of a Llama without biases, got {name!r}; do use the model's "
        "Hugging Face folder"
    )


def _config(metadata: dict[str, Any], *, tied: bool, source: Path) -> dict[str, Any]:
    """config.json as transformers would have it, both rope spellings."""
    if metadata.get("general.architecture") != "llama":
        raise Refusal(
            f"expected general.architecture 'llama' in {source}, got "
            f"{metadata.get('general.architecture')!r}; do use another model"
        )
    values = {k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}
    for key in sorted(set(values) - LLAMA_METADATA):
        raise Refusal(
            f"expected no 'llama.{key}' in {source}, got {values[key]!r}; do use the model's "
            "Hugging Face folder"
        )

    def value(key: str) -> Any:
        return required(metadata, f"llama.{key}")

    heads = value("attention.head_count")
    head_dim = values.get("attention.key_length", value("embedding_length") // heads)
    same = {values.get(k, head_dim) for k in ("rope.dimension_count", "attention.value_length")}
    if same != {head_dim}:
        raise Refusal(f"expected one head width {head_dim} in {source}, got {sorted(same)}")
    theta = _shortest(values.get("rope.freq_base", 10000.0))
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": values.get("vocab_size", len(required(metadata, "tokenizer.ggml.tokens"))),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }
    return raw | special_ids(metadata)


def _shortest(value: float) -> float:
    """GGUF keeps fp32; the shortest decimal that reads back as the same fp32 is what was meant."""
    return float(str(np.float32(value)))


def _dequantised(tensor: Any) -> np.ndarray:
    """fp32 [out,in]; norms [D]."""
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise Refusal(
            f"expected {tensor.name!r} in a type that gguf can read, got "
            f"{tensor.tensor_type.name}; do use another quantisation"
        ) from error
    return np.asarray(values, np.float32)


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H·Q,D] as llama.cpp stores q and k → as HF does. llama.cpp turns neighbours (2i, 2i+1),
    HF turns (i, i+Q/2): rows [H, Q/2, 2, D] become [H, 2, Q/2, D]."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))
