"""Small random models, rows and stores that both backends read: the fixtures of the ladder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
import torch
import transformers
from flax import nnx
from jax.sharding import AxisType, Mesh

from jax_distill.cache import Manifest, Store, create, teacher_fingerprint
from jax_distill.hf import weight_table
from jax_distill.model import Decoder, ModelConfig
from torch_ref.model import load_model
from torch_ref.teacher import write_store

torch.set_num_threads(1)  # tests share their cores; torch's threads would wait for each other
WORDS = 300  # the tokenizer's length
# Many small programs: compiling them well would take longer than running them badly.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COLUMNS = 320  # the head's width: the rest is padding


def llama_folder(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """A random float32 Llama with a WordLevel tokenizer, saved by transformers. Its head
    is large enough for logits to differ (spread about 2)."""
    sizes = dict(
        vocab_size=COLUMNS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = transformers.LlamaConfig(**{**sizes, **fields})
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3.0)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json of WORDS words `w0`, `w1`, … beside a model."""
    words = {f"w{i}": i for i in range(WORDS)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "w1", "eos_token": "w2", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def packed_rows(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """[N,T] arrays of a store: documents of 1 to 40 random ids, packed, some rows with padding."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.zeros((rows, length), np.int32) for name in ("tokens", "segment_ids", "positions")
    }
    for row in range(rows):
        end, segment = 0, 0
        while end < length - rng.integers(0, 8):
            size = min(int(rng.integers(1, 41)), length - end)
            place, segment = slice(end, end + size), segment + 1
            arrays["tokens"][row, place] = rng.integers(3, WORDS, size)
            arrays["segment_ids"][row, place] = segment
            arrays["positions"][row, place] = np.arange(size)
            end += size
    segment_ids = arrays["segment_ids"]
    mask = np.zeros((rows, length), np.uint8)
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    mask[:, :-1] = same & (rng.random(same.shape) < 0.85)
    return arrays | {"loss_mask": mask}


def manifest(length: int, **fields: Any) -> Manifest:
    """Of rows alone, made with the tokenizer of `llama_folder`."""
    vocabulary = {f"w{i}": i for i in range(WORDS)}
    values = dict(sequence_length=length, shard_rows=4, vocab_size=WORDS, vocabulary=vocabulary)
    return Manifest(**{**values, **fields})


def rows_store(path: Path, rows: dict[str, np.ndarray]) -> Store:
    """A store without a teacher."""
    wanted = manifest(rows["tokens"].shape[1])
    with create(str(path), wanted, len(rows["tokens"])) as writer:
        for shard, first, last in writer.missing_shards():
            writer.write(shard, {name: x[first : last + 1] for name, x in rows.items()})
    return Store.open(str(path))


def taught_store(path: Path, rows: Store, teacher: Path, **fields: Any) -> Store:
    """The rows with the targets of a float32 teacher, written by torch_ref."""
    model = load_model(str(teacher), dtype="float32")
    wanted = dataclasses.replace(
        rows.manifest,
        **{
            "top_k": 12,
            "temperatures": (1.0, 2.0),
            "teacher_fingerprint": teacher_fingerprint(teacher),
            "teacher_dtype": "float32",
        }
        | fields,
    )
    return write_store(str(path), wanted, rows, model, batch_size=4, chunk_size=64)


def by_hf_name(params: nnx.State, config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters (or gradients) of the JAX model under their Hugging Face keys, one a layer."""
    leaves = {path: np.asarray(p.get_value()) for path, p in nnx.to_flat_state(params)}
    return {
        key: leaves[slot.path] if slot.layer is None else leaves[slot.path][slot.layer]
        for key, slot in weight_table(config).items()
    }


def one_device() -> Mesh:
    """A mesh of the first device, however many a test's machine pretends to have."""
    axes = ("data", "fsdp")
    return jax.make_mesh((1, 1), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])


def model_by_hf_name(model: Decoder) -> dict[str, np.ndarray]:
    """`by_hf_name` of a whole model."""
    return by_hf_name(nnx.state(model, nnx.Param), model.config)
