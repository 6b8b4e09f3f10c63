"""Safetensors files of a folder, one tensor in memory at a time: which file holds a key, a slice of
a tensor, and the sharded layout in which Hugging Face caches weights."""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_distill.base.errors import RunError, UserError
from jax_distill.base.json_object import DAMAGE, one_line, read_json_object, shown

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FILE_NAME = re.compile(r"(?!\.+$)[\w.+@= -]{1,255}")  # no path, not only dots, one line
# Suffixes of files that hold weights, in any format; an index promises some.
WEIGHT_SUFFIXES = tuple(
    """.safetensors .safetensors.index.json .bin .bin.index.json .pt .pth .ckpt .msgpack
    .msgpack.index.json .h5 .h5.index.json .gguf .ggml .npz .onnx .distcp .pkl""".split()
)


def unread_weights(folder: str | Path) -> list[str]:
    """Names in the folder that hold or promise weights and that `weight_files` does not read."""
    names = sorted(path.name for path in Path(folder).iterdir())
    return [
        name
        for name in names
        if name not in (WHOLE, INDEX)
        and name.lower().removesuffix(".part").endswith(WEIGHT_SUFFIXES)
    ]


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Key → the safetensors file that holds it; empty where the folder has no weights of any kind.

    `model.safetensors` goes before an index, as in transformers. Raises UserError, naming the file,
    for a broken file, an index that disagrees with its files, weights in another format or under
    another name, and an adapter, which transformers would add to the weights.
    """
    folder = Path(folder)
    unread = unread_weights(folder)
    adapter = [name for name in unread if name.startswith("adapter_model.")]
    if adapter:
        raise UserError(
            f"expected a model without an adapter in {folder}, got {adapter[0]}; merge it into the "
            "weights, or move it away"
        )
    listed: set[str] | None = None
    paths = [folder / WHOLE]
    if not os.path.lexists(paths[0]):
        if not os.path.lexists(folder / INDEX):
            if unread:
                raise UserError(
                    f"expected {WHOLE} or {INDEX} in {folder}, got {unread[0]}; save the model as "
                    "safetensors, or move the file away to start from random weights"
                )
            return {}
        weight_map = _index(folder / INDEX)
        listed = set(weight_map)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    found: dict[str, Path] = {}
    for path in paths:
        with opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    for key in sorted((listed if listed is not None else set(found)) ^ set(found)):
        raise UserError(
            f"expected {folder / INDEX} to list what its files hold, got a difference at "
            f"{shown(key)}; re-download it"
        )
    if not found:  # weights that lost their tensors are no model without weights
        raise UserError(
            f"expected tensors in {[*paths, folder / INDEX][0]}, got none; re-download it"
        )
    return found


def _index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"expected a weight_map in {path}, got {shown(weight_map)}; re-download it")
    for key, name in weight_map.items():
        # A name, not a path: what the index lists is in its own folder, and nowhere else.
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise UserError(
                f"expected names of files beside {path}, got {shown(name)} for {shown(key)}; "
                "re-download it"
            )
    return weight_map


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, its header read. Raises UserError where it is missing or broken."""
    try:
        if not path.is_file():
            raise ValueError("no file there")
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, *DAMAGE) as error:
        raise UserError(
            f"expected a safetensors file {path}, got {one_line(error)}; re-download it"
        ) from error


@contextlib.contextmanager
def weights_written(path: Path) -> Iterator[Path]:
    """A path to write that becomes `path` at the end, whole or not at all.

    Raises:
        RunError: the disk would not take it (safetensors has an exception of its own for that).
    """
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"expected to write {path}, got: {one_line(error)}; make room there, and run it again"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def shape_and_dtype(path: Path, key: str) -> tuple[tuple[int, ...], str]:
    """From the header alone; the dtype in safetensors' spelling, such as BF16."""
    with opened(path) as file:
        view = file.get_slice(key)
        return tuple(view.get_shape()), view.get_dtype()


def read_slice(path: Path, key: str, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of one tensor, in the dtype of the file."""
    # Reopened for each tensor: a file that stays open keeps every page read from it mapped.
    with opened(path) as file:
        return file.get_slice(key)[index]


def equal_tensors(files: Mapping[str, Path], key: str, other: str, *, rows: int = 1024) -> bool:
    """Whether two tensors hold the same numbers; compared row block by row block."""
    shape = shape_and_dtype(files[key], key)[0]
    if not shape or shape != shape_and_dtype(files[other], other)[0]:
        return False
    starts = range(0, shape[0], rows)
    blocks = ((slice(start, min(start + rows, shape[0])),) for start in starts)
    return all(
        np.array_equal(read_slice(files[key], key, block), read_slice(files[other], other, block))
        for block in blocks
    )


def write_tensors(
    folder: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str], np.ndarray],
    *,
    itemsize: int,
    max_shard_bytes: int,
) -> list[Path]:
    """Write `tensor(key)` for every key: one `model.safetensors`, or numbered files and an index
    where the tensors exceed max_shard_bytes. One file's tensors are in memory at a time; a file
    appears whole or not at all, the index last. Weight files of an earlier write that are not part
    of this one are removed. Returns what was written; raises RunError where the disk is full."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(shapes, itemsize, max_shard_bytes))
    total = len(shards)
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    names = names if total > 1 else [WHOLE]
    for name, keys in zip(names, shards, strict=True):
        tensors = {key: tensor(key) for key in keys}
        with weights_written(folder / name) as part:
            save_file(tensors, part, metadata={"format": "pt"})
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / WHOLE, folder / INDEX]:
        if old.name not in names:
            old.unlink(missing_ok=True)
    if total > 1:
        pairs = zip(names, shards, strict=True)
        weight_map = {key: name for name, keys in pairs for key in keys}
        size = sum(math.prod(shape) for shape in shapes.values()) * itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        with weights_written(folder / INDEX) as part:
            part.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return [folder / name for name in names]


def _shards(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int
) -> Iterator[list[str]]:
    keys: list[str] = []
    size = 0
    for key, shape in shapes.items():
        here = math.prod(shape) * itemsize
        if keys and size + here > limit:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += here
    yield keys
