"""GGUF file → Hugging Face folder, once.

The folder lies under the user's cache directory, named after the file's content: config.json,
model.safetensors (fp32, the exact values that the quantized blocks stand for), tokenizer.json,
tokenizer_config.json and generation_config.json. Everything comes from the file; what cannot be
carried over is refused by name.
"""

import functools
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import sha256_of, user_cache_folder
from jax_distill.base.hashes import first_change, write_hashes
from jax_distill.base.json_object import one_line, shown
from jax_distill.data.gguf import (
    GgufTensor,
    gguf_errors,
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

    It appears whole or not at all: written beside it, then renamed. Its name is a hash of
    the file, so a changed file is converted again and two processes agree. The hashes of what was
    written stand beside it: a folder that is no longer so is converted again, too. Raises UserError
    without the extra `gguf`, and for a file that is broken or holds what the decoder does not have;
    RunError where the disk would not take the folder.
    """
    path = Path(path)
    with gguf_errors(path):
        digest = sha256_of(path)
    folder = user_cache_folder() / "gguf" / f"{path.stem}-{FORM}-{digest[:16]}"
    record = folder.with_name(f"{folder.name}.sha256.json")
    if folder.is_dir():
        change = _change(folder, record, _stamp(folder))
        if not change:
            return folder
        say(f"{folder}: {change}; converting {path} again")
        shutil.rmtree(folder, ignore_errors=True)
    part = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        _convert(path, part)
        part.chmod(0o755)
        write_hashes(part, record)
        os.rename(part, folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first with the same content
            raise RunError(
                f"expected to write {folder}, got: {one_line(error)}; make room there, and run it "
                "again"
            ) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    found = [(file.name, file.stat()) for file in folder.iterdir()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


@functools.cache  # a process asks for a folder several times
def _change(folder: Path, record: Path, stamp: tuple[tuple[str, int, int], ...]) -> str | None:
    """What is other than it was written; None where all is the same."""
    try:
        return first_change(folder, record) if record.is_file() else "no record of its hashes"
    except (ValueError, OSError) as error:
        return one_line(error)


def _convert(path: Path, folder: Path) -> None:
    file = open_gguf(path)
    metadata = file.metadata
    tensors = {_hf_name(tensor.name): tensor for tensor in file.tensors}
    raw = _config(metadata, tied="lm_head.weight" not in tensors, source=path)
    config = model_config(raw)
    table = weight_table(config)
    for key in sorted(set(table) ^ set(tensors)):
        raise UserError(f"expected the tensors of a Llama in {path}, got a difference at {key!r}")

    def tensor(key: str) -> np.ndarray:
        with gguf_errors(path):
            values = _dequantized(tensors[key])
        if values.shape != table[key].shape:
            raise UserError(
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
    raise UserError(
        f"expected the tensors of a Llama without biases, got {shown(name)}; use the model's "
        "Hugging Face folder"
    )


def _config(metadata: dict[str, Any], *, tied: bool, source: Path) -> dict[str, Any]:
    """config.json as transformers would have it, both rope spellings."""
    if metadata.get("general.architecture") != "llama":
        raise UserError(
            f"expected general.architecture 'llama' in {source}, got "
            f"{shown(metadata.get('general.architecture'))}; use another model"
        )
    values = {k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}
    for key in sorted(set(values) - LLAMA_METADATA):
        raise UserError(
            f"expected no {shown('llama.' + key)} in {source}, got {shown(values[key])}; use the "
            "model's Hugging Face folder"
        )

    def whole(key: str, default: int | None = None) -> int:
        found = required(metadata, f"llama.{key}") if default is None else values.get(key, default)
        if type(found) is not int or found < 1:
            raise UserError(
                f"expected a positive whole number for 'llama.{key}' in {source}, got "
                f"{shown(found)}; use the model's Hugging Face folder"
            )
        return found

    heads = whole("attention.head_count")
    head_dim = whole("attention.key_length", max(whole("embedding_length") // heads, 1))
    same = {whole(k, head_dim) for k in ("rope.dimension_count", "attention.value_length")}
    if same != {head_dim}:
        raise UserError(f"expected one head width {head_dim} in {source}, got {sorted(same)}")
    theta = _shortest(values.get("rope.freq_base", 10000.0), "rope.freq_base")
    epsilon = required(metadata, "llama.attention.layer_norm_rms_epsilon")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": whole("vocab_size", len(required(metadata, "tokenizer.ggml.tokens"))),
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": _shortest(epsilon, "attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }
    return raw | special_ids(metadata)


def _shortest(value: Any, key: str) -> float:
    """GGUF keeps fp32; the shortest decimal that reads back as the same fp32 is what was meant."""
    if type(value) is not float:
        raise UserError(f"expected a number for 'llama.{key}', got {shown(value)}; re-download it")
    with np.errstate(over="ignore"):  # refused as infinity where config.json is read
        return float(str(np.float32(value)))


def _dequantized(tensor: GgufTensor) -> np.ndarray:
    """fp32 [out,in]; norms [D]."""
    from gguf import dequantize

    try:
        with np.errstate(all="ignore"):  # what is not finite is refused where weights are loaded
            values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UserError(
            f"expected {tensor.name!r} in a type that gguf can read, got "
            f"{tensor.tensor_type.name}; use another quantization"
        ) from error
    return np.asarray(values, np.float32)


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H·Q,D] as llama.cpp caches q and k → as HF does. llama.cpp turns neighbours (2i, 2i+1),
    HF turns (i, i+Q/2): rows [H, Q/2, 2, D] become [H, 2, Q/2, D]."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))
