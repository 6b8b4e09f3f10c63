"""Weights of a Hugging Face folder ↔ the decoder's parameters: one table, both directions.

A parameter's path is its HF key: `model.` is left out and the layer's number becomes the leading
index of the stacked leaf. Layouts are HF's own, so nothing is transposed.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_distill.config import Refusal
from jax_distill.hf.architecture import model_config, read_config
from jax_distill.model import Decoder, ModelConfig

# Buffers that old checkpoints stored and every reader recomputes.
DEAD_KEYS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
FLOATS = ("F64", "F32", "F16", "BF16")


class Slot(NamedTuple):
    """Where one HF tensor lives: the parameter's path, its layer (None: not stacked), its shape."""

    path: tuple[str, ...]
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


def abstract_parameters(config: ModelConfig, **knobs: Any) -> dict[tuple[str, ...], nnx.Param]:
    """Path → Param holding a ShapeDtypeStruct and its `logical_axes`. Nothing is allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **knobs))
    return dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def load_model(
    folder: str | Path,
    *,
    param_dtype=jnp.float32,
    compute_dtype=jnp.float32,
    remat: str = "none",
    shardings: Callable[[nnx.Param], Sharding] | nnx.State | None = None,
    seed: int | None = None,
    attention: str | None = None,
) -> Decoder:
    """The folder's model, its weights cast to param_dtype and placed leaf by leaf.

    One tensor is read at a time and only the slices that this process's devices hold; the host
    keeps one stacked leaf beside what is already placed. `shardings`: a function of the abstract
    Param (`.shape`, `.dtype`, `.logical_axes`) or a State of shardings; None is the first device.
    A folder without weights gives normal(0, initializer_range) weights if `seed` is given.
    Raises Refusal for missing, extra or misshaped tensors, naming the key.
    """
    folder = Path(folder)
    config = model_config(read_config(folder))

    def build() -> Decoder:
        return Decoder(
            config,
            rngs=nnx.Rngs(seed or 0),
            param_dtype=param_dtype,
            compute_dtype=compute_dtype,
            remat=remat,
            attention=attention,
        )

    graphdef, abstract = nnx.split(nnx.eval_shape(build))
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
    out = nnx.from_flat_state(placement)
    return nnx.merge(graphdef, jax.jit(lambda: nnx.state(build()), out_shardings=out)())


def _placement(shardings: Any, params: dict) -> dict[tuple[str, ...], Sharding]:
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


# ---- reading ------------------------------------------------------------------------------------


def weight_files(folder: str | Path) -> dict[str, Path]:
    """HF key → the safetensors file that holds it; empty where the folder has no weights.

    Refuses an index that disagrees with its files, and a broken file, naming it.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = [folder / name for name in sorted(set(listed.values()))]
    else:
        listed = None
        paths = [path for path in [folder / "model.safetensors"] if path.is_file()]
    found: dict[str, Path] = {}
    for path in paths:
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    if listed is not None:
        for key in sorted(set(listed) ^ set(found)):
            raise Refusal(
                f"expected {index.name} to list what its files hold, got a difference at {key!r}; "
                "do fetch the folder again"
            )
    return found


def _opened(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise Refusal(f"expected a safetensors file {path}, got {error}; do fetch it") from error


def _checked_keys(
    files: dict[str, Path], table: dict[str, Slot], *, tied: bool
) -> dict[tuple[str, ...], list[str]]:
    """Parameter path → its HF keys, by layer. Refuses any difference between files and table."""
    extra = {key for key in files if key not in table and not DEAD_KEYS.fullmatch(key)}
    if tied and "lm_head.weight" in extra:
        _expect_equal(files, "lm_head.weight", "model.embed_tokens.weight")
        extra.remove("lm_head.weight")
    for key in sorted(set(table) - set(files)):
        raise Refusal(f"expected the tensor {key!r}, got none in {_where(files)}; do fetch it")
    for key in sorted(extra):
        raise Refusal(
            f"expected no tensor {key!r}, got it in {files[key]}; do use a config.json that fits"
        )
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, slot in table.items():
        with _opened(files[key]) as file:
            view = file.get_slice(key)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if shape != slot.shape or dtype not in FLOATS:
            raise Refusal(
                f"expected {key!r} of shape {slot.shape} in one of {', '.join(FLOATS)}, got "
                f"{shape} in {dtype}; do use weights and config.json of one model, not quantised"
            )
        keys.setdefault(slot.path, []).append(key)
    return keys


def _where(files: dict[str, Path]) -> str:
    return str(next(iter(files.values())).parent)


def _expect_equal(files: dict[str, Path], key: str, other: str) -> None:
    """Row block by row block, so that two heads are never in memory."""
    with _opened(files[key]) as file, _opened(files[other]) as other_file:
        left, right = file.get_slice(key), other_file.get_slice(other)
        rows = left.get_shape()[0]
        same = left.get_shape() == right.get_shape() and all(
            np.array_equal(left[row : row + 1024], right[row : row + 1024])
            for row in range(0, rows, 1024)
        )
    if not same:
        raise Refusal(
            f"expected {key!r} to equal {other!r} in a tied model, got a difference; "
            "do set tie_word_embeddings to false in config.json, or take one of them out"
        )


def _read_leaf(
    files: dict[str, Path], keys: list[str], param: nnx.Param, sharding: Sharding
) -> jax.Array:
    """One parameter from its tensors (one a layer), cast, each device's part read for itself."""
    stacked = param.logical_axes[0] == "layers"

    def part(index: tuple[slice, ...]) -> np.ndarray:
        if not stacked:
            return _read(files, keys[0], index).astype(param.dtype)
        wanted, rest = keys[index[0]], index[1:]
        first = _read(files, wanted[0], rest)
        leaf = np.empty((len(wanted), *first.shape), param.dtype)
        leaf[0] = first
        for layer, key in enumerate(wanted[1:], start=1):
            leaf[layer] = _read(files, key, rest)
        return leaf

    return jax.make_array_from_callback(param.shape, sharding, part).block_until_ready()


def _read(files: dict[str, Path], key: str, index: tuple[slice, ...]) -> np.ndarray:
    # Opened anew for each tensor: a file that stays open keeps every page read from it mapped.
    with _opened(files[key]) as file:
        return file.get_slice(key)[index]


# ---- writing ------------------------------------------------------------------------------------


def save_weights(
    folder: str | Path,
    params: Decoder | nnx.State,
    config: ModelConfig,
    *,
    dtype=None,
    max_shard_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write HF's safetensors layout: `model.safetensors`, or numbered files with an index when the
    tensors exceed max_shard_bytes. `dtype` None keeps the parameters' own. Each file appears whole
    or not at all. Returns the files written. config.json is the caller's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = nnx.state(params, nnx.Param) if isinstance(params, Decoder) else params
    values = {path: param.get_value() for path, param in nnx.to_flat_state(state)}
    table = weight_table(config)
    _check_params(values, table)
    width = jnp.dtype(dtype or next(iter(values.values())).dtype).itemsize
    shards = list(_shards(table, width, max_shard_bytes))
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        total = len(shards)
        names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    for name, keys in zip(names, shards, strict=True):
        tensors = {key: _host_tensor(values, table[key], dtype) for key in keys}
        save_file(tensors, folder / f"{name}.part", metadata={"format": "pt"})
        os.replace(folder / f"{name}.part", folder / name)
    written = [folder / name for name in names]
    if len(shards) > 1:
        written.append(_write_index(folder, names, shards, table, width))
    return written


def _shards(table: dict[str, Slot], width: int, limit: int) -> Iterator[list[str]]:
    keys: list[str] = []
    size = 0
    for key, slot in table.items():
        bytes_here = int(np.prod(slot.shape)) * width
        if keys and size + bytes_here > limit:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += bytes_here
    yield keys


def _host_tensor(values: dict, slot: Slot, dtype) -> np.ndarray:
    leaf = values[slot.path]
    tensor = np.asarray(leaf if slot.layer is None else leaf[slot.layer])
    return np.ascontiguousarray(tensor.astype(dtype or tensor.dtype))


def _check_params(values: dict, table: dict[str, Slot]) -> None:
    expected = {slot.path for slot in table.values()}
    for path in sorted(set(values) ^ expected):
        raise Refusal(f"expected the parameters of this config, got a difference at {path}")


def _write_index(folder, names, shards, table, width) -> Path:
    index = {
        "metadata": {"total_size": sum(int(np.prod(s.shape)) for s in table.values()) * width},
        "weight_map": {
            key: name for name, keys in zip(names, shards, strict=True) for key in keys
        },
    }
    path = folder / "model.safetensors.index.json"
    path.with_suffix(".part").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".part"), path)
    return path
