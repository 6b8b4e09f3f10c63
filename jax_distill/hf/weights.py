"""Weights of a Hugging Face folder ↔ the decoder's parameters: one table, both directions.

A parameter's path is its HF key: `model.` is left out and the layer's number becomes the leading
index of the stacked leaf. Layouts are HF's own, so nothing is transposed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jax_distill.config import Refusal
from jax_distill.hf.architecture import model_config, read_config
from jax_distill.hf.tensor_files import (
    equal_tensors,
    read_slice,
    shape_and_dtype,
    weight_files,
    write_tensors,
)
from jax_distill.model import Decoder, Implementation, ModelConfig

# Buffers that old checkpoints stored and every reader recomputes.
DEAD_KEYS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
ParameterPath = tuple[Any, ...]
FLOATS = ("F64", "F32", "F16", "BF16")


class Slot(NamedTuple):
    """Where one HF tensor lives: the parameter's path, its layer (None: not stacked), its shape."""

    path: ParameterPath
    layer: int | None
    shape: tuple[int, ...]


def weight_table(config: ModelConfig) -> dict[str, Slot]:
    """HF key → Slot for every tensor of the architecture, in the model's order. A tied model has
    no lm_head."""
    table = {}
    for path, param in abstract_parameters(config).items():
        if path[0] != "layers":
            prefix = () if path[0] == "lm_head" else ("model",)
            table[".".join((*prefix, *path))] = Slot(path, None, param.shape)
            continue
        for layer in range(config.num_hidden_layers):
            key = ".".join(("model", "layers", str(layer), *path[1:]))
            table[key] = Slot(path, layer, param.shape[1:])
    return table


def abstract_parameters(config: ModelConfig, **knobs: Any) -> dict[ParameterPath, nnx.Param]:
    """Path → Param holding a ShapeDtypeStruct and its `logical_axes`. Nothing is allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **knobs))
    return {path: param for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def load_model(
    folder: str | Path,
    *,
    param_dtype: Any = jnp.float32,
    compute_dtype: Any = jnp.float32,
    remat: str = "none",
    shardings: Callable[[nnx.Param], Sharding] | nnx.State | None = None,
    seed: int | None = None,
    attention: Implementation | None = None,
    rows: NamedSharding | None = None,
) -> Decoder:
    """The folder's model, its weights cast to param_dtype and placed leaf by leaf.

    One tensor is read at a time and only the slices that this process's devices hold; the host
    keeps one stacked leaf beside what is already placed. `shardings`: a function of the abstract
    Param (`.shape`, `.dtype`, `.logical_axes`) or a State of shardings; None is the first device.
    A folder without weights gives normal(0, initializer_range) weights if `seed` is given.
    attention, rows: the Decoder's.
    Raises Refusal for missing, extra or misshaped tensors, naming the key.
    """
    folder = Path(folder)
    config = model_config(read_config(folder))

    def build(key: jax.Array) -> Decoder:
        return Decoder(
            config,
            rngs=nnx.Rngs(key),
            param_dtype=param_dtype,
            compute_dtype=compute_dtype,
            remat=remat,
            attention=attention,
            rows=rows,
        )

    graphdef, abstract = nnx.split(nnx.eval_shape(build, jax.random.key(0)))
    params = dict(nnx.to_flat_state(abstract))
    placement = _placement(shardings, params)
    files = weight_files(folder)
    if files:
        keys = _checked_keys(files, weight_table(config), tied=config.tie_word_embeddings)
        leaves = {
            path: param.replace(_read_leaf(files, keys[path], param, placement[path]))
            for path, param in params.items()
        }
        return nnx.merge(graphdef, nnx.from_flat_state(leaves))
    if seed is None:
        raise Refusal(
            f"expected *.safetensors in {folder}, got none; do convert the weights to safetensors, "
            "or give a seed where random weights are meant"
        )
    out: nnx.State = nnx.from_flat_state(placement)
    fresh = jax.jit(lambda key: nnx.state(build(key)), out_shardings=out)
    return nnx.merge(graphdef, fresh(jax.random.key(seed)))


def _placement(shardings: Any, params: dict) -> dict[ParameterPath, Sharding]:
    if shardings is None:
        first = SingleDeviceSharding(jax.local_devices()[0])
        return dict.fromkeys(params, first)
    if callable(shardings):
        return {path: shardings(param) for path, param in params.items()}
    given = dict(nnx.to_flat_state(shardings))
    return {
        path: given[path].get_value() if isinstance(given[path], nnx.Variable) else given[path]
        for path in params
    }


def _checked_keys(
    files: dict[str, Path], table: dict[str, Slot], *, tied: bool
) -> dict[ParameterPath, list[str]]:
    """Parameter path → its HF keys, by layer. Refuses any difference between files and table."""
    extra = {key for key in files if key not in table and not DEAD_KEYS.fullmatch(key)}
    if tied and "lm_head.weight" in extra:
        if not equal_tensors(files, "lm_head.weight", "model.embed_tokens.weight"):
            raise Refusal(
                "expected 'lm_head.weight' to equal 'model.embed_tokens.weight' in a tied model, "
                "got a difference; do set tie_word_embeddings to false in config.json"
            )
        extra.remove("lm_head.weight")
    folder = next(iter(files.values())).parent
    for key in sorted(set(table) - set(files)):
        raise Refusal(f"expected the tensor {key!r} in {folder}, got none; do fetch it again")
    for key in sorted(extra):
        raise Refusal(
            f"expected no tensor {key!r}, got it in {files[key]}; do use the config.json that "
            "belongs to these weights"
        )
    keys: dict[ParameterPath, list[str]] = {}
    for key, slot in table.items():
        shape, dtype = shape_and_dtype(files[key], key)
        if shape != slot.shape or dtype not in FLOATS:
            raise Refusal(
                f"expected {key!r} of shape {slot.shape} in one of {', '.join(FLOATS)}, got "
                f"{shape} in {dtype}; do use weights that are not quantised and belong to this "
                "config.json"
            )
        keys.setdefault(slot.path, []).append(key)
    return keys


def _read_leaf(
    files: dict[str, Path], keys: list[str], param: nnx.Param, sharding: Sharding
) -> jax.Array:
    """One parameter from its tensors (one a layer), cast, each device's part read for itself."""
    parts: dict[str, np.ndarray] = {}  # devices that hold the same part share one

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = _read_part(files, keys, param, index)
        return parts[str(index)]

    return jax.make_array_from_callback(param.shape, sharding, part).block_until_ready()


def _read_part(
    files: dict[str, Path], keys: list[str], param: nnx.Param, index: tuple[slice, ...]
) -> np.ndarray:
    if param.logical_axes[0] != "layers":
        return read_slice(files[keys[0]], keys[0], index).astype(param.dtype, copy=False)
    sizes = [len(range(*cut.indices(n))) for cut, n in zip(index, param.shape, strict=True)]
    stacked = np.empty(sizes, param.dtype)
    for layer, key in enumerate(keys[index[0]]):
        stacked[layer] = read_slice(files[key], key, index[1:])
    return stacked


def save_weights(
    folder: str | Path,
    params: Decoder | nnx.State,
    config: ModelConfig,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write the parameters as HF safetensors (see `write_tensors`), in `dtype`, or in the
    parameters' own where it is None. config.json is the caller's. Returns the files written;
    raises Refusal where the parameters are not those of the config."""
    state = nnx.state(params, nnx.Param) if isinstance(params, Decoder) else params
    values = {path: param.get_value() for path, param in nnx.to_flat_state(state)}
    table = weight_table(config)
    for path in sorted(set(values) ^ {slot.path for slot in table.values()}):
        raise Refusal(f"expected the parameters of the config, got a difference at {path}")
    dtype = np.dtype(dtype or next(iter(values.values())).dtype)

    def tensor(key: str) -> np.ndarray:
        leaf, layer = values[table[key].path], table[key].layer
        return np.asarray(leaf if layer is None else leaf[layer]).astype(dtype, copy=False)

    shapes = {key: slot.shape for key, slot in table.items()}
    return write_tensors(
        folder, shapes, tensor, itemsize=dtype.itemsize, max_shard_bytes=max_shard_bytes
    )
