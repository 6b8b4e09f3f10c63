"""Small random models, rows and caches that both backends read: the fixtures of the ladder."""

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

from jax_distill.batch import Batch
from jax_distill.cache import Cache, Manifest, create, teacher_fingerprint
from jax_distill.config import LossConfig
from jax_distill.hf import weight_table
from jax_distill.loop import MACHINE
from jax_distill.model import Decoder, ModelConfig
from jax_distill.run import read_metrics
from jax_distill.training.step import LossTask
from torch_ref import step as torch_step
from torch_ref.losses import LossSums
from torch_ref.model import load_model
from torch_ref.teacher import write_cache

torch.set_num_threads(1)  # tests share their cores; torch's threads would wait for each other
VOCAB_SIZE = 300  # the tokenizer's length
HEAD_ROWS = 320  # of the head: the rest is padding


def model_folder(folder: Path, family: str, seed: int = 0, **fields: Any) -> Path:
    """A random float32 model of a family (its `model_type`) with a WordLevel tokenizer, saved by
    transformers. Its head is large enough for logits to differ (spread about 2)."""
    sizes = dict(
        vocab_size=HEAD_ROWS,
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
    config = transformers.AutoConfig.for_model(family, **{**sizes, **fields})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3.0)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)
            if "router" in name:  # far apart, so that rounding does not choose other experts
                parameter.mul_(10)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def llama_folder(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """`model_folder` of a Llama."""
    return model_folder(folder, "llama", seed, **fields)


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json of VOCAB_SIZE words `w0`, `w1`, … beside a model."""
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "w1", "eos_token": "w2", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def packed_rows(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """[N,T] arrays of a cache: documents of 1 to 40 random ids, packed, some rows with padding."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.zeros((rows, length), np.int32) for name in ("tokens", "segment_ids", "positions")
    }
    for row in range(rows):
        end, segment = 0, 0
        while end < length - rng.integers(0, 8):
            size = min(int(rng.integers(1, 41)), length - end)
            document, segment = slice(end, end + size), segment + 1
            arrays["tokens"][row, document] = rng.integers(3, VOCAB_SIZE, size)
            arrays["segment_ids"][row, document] = segment
            arrays["positions"][row, document] = np.arange(size)
            end += size
    segment_ids = arrays["segment_ids"]
    mask = np.zeros((rows, length), np.uint8)
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    mask[:, :-1] = same & (rng.random(same.shape) < 0.85)
    return arrays | {"loss_mask": mask}


def manifest(length: int, **fields: Any) -> Manifest:
    """Of rows alone, made with the tokenizer of `llama_folder`."""
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    values = dict(
        sequence_length=length, shard_rows=4, vocab_size=VOCAB_SIZE, vocabulary=vocabulary
    )
    return Manifest(**{**values, **fields})


def rows_cache(path: Path, rows: dict[str, np.ndarray]) -> Cache:
    """A cache without a teacher."""
    made = manifest(rows["tokens"].shape[1])
    with create(str(path), made, len(rows["tokens"])) as writer:
        for shard, first, last in writer.missing_shards():
            writer.write(shard, {name: x[first : last + 1] for name, x in rows.items()})
    return Cache.open(str(path))


def taught_cache(path: Path, rows: Cache, teacher: Path, **fields: Any) -> Cache:
    """The rows with the targets of a float32 teacher, written by torch_ref."""
    model = load_model(str(teacher), dtype="float32")
    made = dataclasses.replace(
        rows.manifest,
        **{
            "top_k": 12,
            "temperatures": (1.0, 2.0),
            "teacher_fingerprint": teacher_fingerprint(teacher),
            "teacher_dtype": "float32",
        }
        | fields,
    )
    return write_cache(str(path), made, rows, model, batch_size=4, chunk_size=64)


def by_hf_name(params: nnx.State, config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters (or gradients) of the JAX model under their Hugging Face keys, one a layer."""
    leaves = {path: np.asarray(p.get_value()) for path, p in nnx.to_flat_state(params)}
    return {
        key: leaves[slot.path] if slot.layer is None else leaves[slot.path][slot.layer]
        for key, slot in weight_table(config).items()
    }


def jax_task(loss: LossConfig, vocab_size: int = VOCAB_SIZE) -> LossTask:
    """The loss as configured, for the JAX model's step."""
    return LossTask(loss.objective(), loss.execution(), vocab_size)


def torch_task(
    loss: LossConfig, vocab_size: int = VOCAB_SIZE, compute_dtype: torch.dtype = torch.float32
) -> torch_step.LossTask:
    """The same for torch_ref's."""
    return torch_step.LossTask(loss.objective(), loss.execution(), vocab_size, compute_dtype)


def torch_gradients(
    model: torch.nn.Module, batch: Batch, task: torch_step.LossTask, micro_batch_size: int
) -> tuple[dict[str, torch.Tensor], LossSums]:
    """Gradients of torch_ref's mean loss by parameter name, and the sums."""
    sums = torch_step.backward(model, batch, task, micro_batch_size=micro_batch_size)
    return {name: p.grad for name, p in model.named_parameters()}, sums.loss


def one_device() -> Mesh:
    """A mesh of the first device, however many a test's machine pretends to have."""
    axes = ("data", "fsdp")
    return jax.make_mesh((1, 1), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])


def model_by_hf_name(model: Decoder) -> dict[str, np.ndarray]:
    """`by_hf_name` of a whole model."""
    return by_hf_name(nnx.state(model, nnx.Param), model.config)


def numbers(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the machine."""
    records = read_metrics(run / "metrics.jsonl")
    return [
        {k: v for k, v in r.items() if "per_second" not in k and k not in MACHINE} for r in records
    ]
