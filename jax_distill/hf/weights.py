"""Weights of a Hugging Face folder ↔ the decoder's parameters: one table, both directions.

A parameter's path is its HF key: `model.` is left out and the layer's number becomes the leading
index of the stacked leaf. Layouts are HF's own, so nothing is transposed.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.json_object import shown
from jax_distill.hf.architecture import ignored_keys, model_config, read_config
from jax_distill.hf.mxfp4 import LARGEST_SCALE, PARTS, is_packed, packed_shape, read_packed
from jax_distill.hf.tensor_files import (
    equal_tensors,
    read_slice,
    shape_and_dtype,
    weight_files,
    write_tensors,
)
from jax_distill.model import (
    Decoder,
    ExpertsImplementation,
    Implementation,
    ModelConfig,
    abstract_parameters,
)
from jax_distill.sharding import to_host

# Buffers that old checkpoints stored and every reader recomputes.
DEAD_KEYS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
ParameterPath = tuple[Any, ...]
FLOATS = ("F64", "F32", "F16", "BF16")
STREAMED = 2**30  # bytes; a larger stack comes to the devices layer by layer
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_say_once = functools.cache(say)  # a folder is loaded several times in a run


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


def load_model(
    folder: str | Path,
    *,
    param_dtype: Any = jnp.float32,
    compute_dtype: Any = jnp.float32,
    remat: str = "none",
    shardings: Callable[[nnx.Param], Sharding] | nnx.State | None = None,
    seed: int | None = None,
    attention: Implementation | None = None,
    experts: ExpertsImplementation = "blocks",
    row_sharding: NamedSharding | None = None,
    packed_experts: bool = False,
) -> Decoder:
    """The folder's model, its weights cast to param_dtype and placed leaf by leaf.

    One tensor is read at a time and only the slices that this process's devices hold; the host
    keeps one stacked leaf, or one layer of it, beside what is already placed. `shardings`: a
    function of the abstract Param (`.shape`, `.dtype`, `.logical_axes`) or a State of shardings;
    None is the first device. A folder without a weight file of any kind gives
    normal(0, initializer_range) weights if `seed` is given, and says so. attention, experts,
    row_sharding: the Decoder's. packed_experts: ModelConfig's; wants a folder of MXFP4. Raises
    UserError for missing, extra, misshaped tensors and ones that are not finite, naming the key.
    """
    folder = Path(folder)
    raw = read_config(folder)
    config = dataclasses.replace(model_config(raw), packed_experts=packed_experts)
    if ignored := ignored_keys(raw):
        _say_once(f"{folder}/config.json: ignored, as transformers does: {', '.join(ignored)}")
    files = weight_files(folder)
    if packed_experts and not any(key.endswith(PARTS[0]) for key in files):
        raise UserError(
            f"expected experts in MXFP4 in {folder} for packed_experts, got none; set "
            "teacher.packed_experts false"
        )
    # Before anything is built: the sizes of config.json are those of the tensors.
    keys = _checked_keys(files, weight_table(config), tied=config.tie_word_embeddings)

    def build(key: jax.Array) -> Decoder:
        return Decoder(
            config,
            rngs=nnx.Rngs(key),
            param_dtype=param_dtype,
            compute_dtype=compute_dtype,
            remat=remat,
            attention=attention,
            experts=experts,
            row_sharding=row_sharding,
        )

    graphdef, abstract = nnx.split(nnx.eval_shape(build, jax.random.key(0)))
    params = dict(nnx.to_flat_state(abstract))
    placement = _placement(shardings, params)
    if not files:
        return nnx.merge(graphdef, _random_weights(folder, build, placement, seed))
    leaves = {
        path: param.replace(_read_leaf(files, keys[path], param, placement[path]))
        for path, param in params.items()
    }
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


def _random_weights(
    folder: Path,
    build: Callable[[jax.Array], Decoder],
    placement: dict[ParameterPath, Sharding],
    seed: int | None,
) -> nnx.State:
    if seed is None:
        raise UserError(
            f"expected *.safetensors in {folder}, got none; convert the weights to safetensors, "
            "or give a seed where random weights are meant"
        )
    say(f"{folder} has no weights: they are random, of seed {seed}")
    out: nnx.State = nnx.from_flat_state(placement)
    return jax.jit(lambda key: nnx.state(build(key)), out_shardings=out)(jax.random.key(seed))


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
    """Parameter path → its keys in the files, by layer. Refuses any difference between files and
    table. A tied model's matrix may stand under the head's name alone, as in transformers."""
    if not files:
        return {}
    packed = {key for key in table if is_packed(files, key)}
    parts = {key + part for key in packed for part in PARTS}
    extra = {key for key in set(files) - set(table) - parts if not DEAD_KEYS.fullmatch(key)}
    renamed: dict[str, str] = {}
    if tied and HEAD in extra:
        if EMBEDDING not in files:
            renamed[EMBEDDING] = HEAD
        elif not equal_tensors(files, HEAD, EMBEDDING):
            raise UserError(
                f"expected {HEAD!r} to equal {EMBEDDING!r} in a tied model, "
                "got a difference; set tie_word_embeddings to false in config.json"
            )
        extra.remove(HEAD)
    folder = next(iter(files.values())).parent
    for key in sorted(set(table) - set(files) - set(renamed) - packed):
        raise UserError(f"expected the tensor {shown(key)} in {folder}, got none; re-download it")
    for key in sorted(extra):
        raise UserError(
            f"expected no tensor {shown(key)}, got it in {files[key]}; use the config.json that "
            "belongs to these weights"
        )
    keys: dict[ParameterPath, list[str]] = {}
    for name, slot in table.items():
        key = renamed.get(name, name)
        if key in packed:
            shape, dtype = packed_shape(files, key), FLOATS[-1]
        else:
            shape, dtype = shape_and_dtype(files[key], key)
        dtypes: tuple[str, ...] = ("U8",)
        wanted, cure = "U8", "re-download it"
        if not key.endswith(PARTS):
            dtypes, wanted = FLOATS, f"one of {', '.join(FLOATS)}"
            cure = "use weights that are not quantized and belong to this config.json"
        if shape != slot.shape or dtype not in dtypes:
            raise UserError(
                f"expected {key!r} of shape {slot.shape} in {wanted}, got {shape} in {dtype}; "
                f"{cure}"
            )
        keys.setdefault(slot.path, []).append(key)
    return keys


def _read_leaf(
    files: dict[str, Path], keys: list[str], param: nnx.Param, sharding: Sharding
) -> jax.Array:
    """One parameter from its tensors (one a layer), cast, each device's part read for itself; a
    large stack layer by layer, so that the host has one layer of it."""
    layer_sharding = _of_a_layer(param, sharding)
    if layer_sharding is None:
        return _read_array(files, keys, param, param.shape, sharding)
    zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
    put = jax.jit(_put_layer, donate_argnums=0, out_shardings=sharding)
    stack = zeros(param.shape, param.dtype)
    for layer, key in enumerate(keys):
        part = _read_array(files, [key], param, (1, *param.shape[1:]), layer_sharding)
        stack = put(stack, part, np.int32(layer)).block_until_ready()
    return stack


def _put_layer(stack: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stack, part, layer, 0)


def _of_a_layer(param: nnx.Param, sharding: Sharding) -> Sharding | None:
    """The sharding of one layer [1,…] of a stack; None where the parameter is read whole: it is no
    stack, is small, or its layers are split."""
    stacked = param.logical_axes[0] == "layers" and param.size * param.dtype.itemsize > STREAMED
    if stacked and isinstance(sharding, SingleDeviceSharding):
        return sharding
    if stacked and isinstance(sharding, NamedSharding) and not (*sharding.spec, None)[0]:
        return sharding
    return None


def _read_array(
    files: dict[str, Path],
    keys: list[str],
    param: nnx.Param,
    shape: tuple[int, ...],
    sharding: Sharding,
) -> jax.Array:
    """The array of `shape` of the tensors `keys`, on the devices."""
    parts: dict[str, np.ndarray] = {}  # devices that hold the same part share one

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = _read_part(files, keys, param, shape, index)
        return parts[str(index)]

    return jax.make_array_from_callback(shape, sharding, part).block_until_ready()


def _read_part(
    files: dict[str, Path],
    keys: list[str],
    param: nnx.Param,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
) -> np.ndarray:
    def read(key: str, cut: tuple[slice, ...]) -> np.ndarray:
        packed = is_packed(files, key)
        with np.errstate(over="ignore"):  # said below
            found = read_packed(files, key, cut) if packed else read_slice(files[key], key, cut)
            values = found.astype(param.dtype, copy=False)
        if values.dtype == np.uint8:
            _check_scales(values, key, files[key])
        elif not _all_finite(values):
            where = files[key + PARTS[0] if packed else key]
            raise UserError(
                f"expected finite numbers in {key!r} of {where}, got NaN or infinity as "
                f"{values.dtype}; re-download it, or load it in float32"
            )
        return values

    if param.logical_axes[0] != "layers":
        return read(keys[0], index)
    sizes = [len(range(*cut.indices(n))) for cut, n in zip(index, shape, strict=True)]
    stacked = np.empty(sizes, param.dtype)
    for layer, key in enumerate(keys[index[0]]):
        stacked[layer] = read(key, index[1:])
    return stacked


def _check_scales(values: np.ndarray, key: str, path: Path) -> None:
    """Refuse MXFP4's scales (the blocks may be any bytes) with which bf16 may overflow."""
    if key.endswith(PARTS[1]) and values.size and values.max() > LARGEST_SCALE:
        raise UserError(
            f"expected exponents of at most {LARGEST_SCALE} in {key!r} of {path}, got "
            f"{values.max()}; re-download it"
        )


def _all_finite(values: np.ndarray, block: int = 2**20) -> bool:
    """Whether no number is NaN or infinite. By the exponent's bits, block by block: in bf16 six
    times as fast as np.isfinite, and no copy of a whole tensor."""
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[values.dtype.itemsize]
    infinity = np.array(np.inf, values.dtype).view(bits)
    flat = np.ascontiguousarray(values).reshape(-1).view(bits)
    starts = range(0, flat.size, block)
    return all(not ((flat[i : i + block] & infinity) == infinity).any() for i in starts)


def _whole(values: Mapping[ParameterPath, jax.Array], slot: Slot) -> np.ndarray:
    """A tensor on the host; of one whose parts several processes have, all must ask for it."""
    leaf = values[slot.path]
    return to_host(leaf if slot.layer is None else leaf[slot.layer])


def send_weights(params: Decoder) -> None:
    """What the other processes do while the first one calls `save_weights`: give it their parts."""
    values = {p: v.get_value() for p, v in nnx.to_flat_state(nnx.state(params, nnx.Param))}
    for slot in weight_table(params.config).values():
        _whole(values, slot)


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
    raises UserError where the parameters are not those of the config."""
    if config.packed_experts:
        raise ValueError("expected decoded experts to save, got packed ones; load them decoded")
    state = nnx.state(params, nnx.Param) if isinstance(params, Decoder) else params
    values = {path: param.get_value() for path, param in nnx.to_flat_state(state)}
    table = weight_table(config)
    for path in sorted(set(values) ^ {slot.path for slot in table.values()}):
        raise UserError(f"expected the parameters of the config, got a difference at {path}")
    dtype = np.dtype(dtype or next(iter(values.values())).dtype)

    def tensor(key: str) -> np.ndarray:
        return _whole(values, table[key]).astype(dtype, copy=False)

    shapes = {key: slot.shape for key, slot in table.items()}
    return write_tensors(
        folder, shapes, tensor, itemsize=dtype.itemsize, max_shard_bytes=max_shard_bytes
    )
