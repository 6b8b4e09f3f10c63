"""Safetensors files of a folder, one tensor in memory at a time: which file holds a key, a slice of
a tensor, and the sharded layout in which Hugging Face stores weights."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_distill.config import Refusal

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Key → the safetensors file that holds it; empty where the folder has no weights.

    `model.safetensors` goes before an index, as in transformers. Raises Refusal, naming the file,
    for a broken file and for an index that disagrees with its files.
    """
    folder = Path(folder)
    listed: set[str] | None = None
    paths = [folder / WHOLE]
    if not paths[0].is_file():
        if not (folder / INDEX).is_file():
            return {}
        weight_map = _index(folder / INDEX)
        listed = set(weight_map)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    found: dict[str, Path] = {}
    for path in paths:
        with opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    for key in sorted((listed if listed is not None else set(found)) ^ set(found)):
        raise Refusal(
            f"expected {folder / INDEX} to list what its files hold, got a difference at {key!r}; "
            "do fetch the folder again"
        )
    return found


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"expected a weight_map in {path}, got {error!r}; do fetch it") from error


def opened(path: Path) -> Any:
    """A safetensors file, its header read. Raises Refusal where it is missing or broken."""
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise Refusal(f"expected a safetensors file {path}, got {error}; do fetch it") from error


def shape_and_dtype(path: Path, key: str) -> tuple[tuple[int, ...], str]:
    """From the header alone; the dtype in safetensors' spelling, such as BF16."""
    with opened(path) as file:
        view = file.get_slice(key)
        return tuple(view.get_shape()), view.get_dtype()


def read_slice(path: Path, key: str, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of one tensor, in the dtype of the file."""
    # Opened anew for each tensor: a file that stays open keeps every page read from it mapped.
    with opened(path) as file:
        return file.get_slice(key)[index]


def equal_tensors(files: Mapping[str, Path], key: str, other: str, *, rows: int = 1024) -> bool:
    """Whether two tensors hold the same numbers; compared row block by row block."""
    shape = shape_and_dtype(files[key], key)[0]
    if shape != shape_and_dtype(files[other], other)[0]:
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
    of this one are removed. Returns what was written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(shapes, itemsize, max_shard_bytes))
    total = len(shards)
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    names = names if total > 1 else [WHOLE]
    for name, keys in zip(names, shards, strict=True):
        part = folder / f"{name}.part"
        save_file({key: tensor(key) for key in keys}, part, metadata={"format": "pt"})
        os.replace(part, folder / name)
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / WHOLE, folder / INDEX]:
        if old.name not in names:
            old.unlink(missing_ok=True)
    if total > 1:
        pairs = zip(names, shards, strict=True)
        weight_map = {key: name for name, keys in pairs for key in keys}
        size = sum(math.prod(shape) for shape in shapes.values()) * itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        part = folder / f"{INDEX}.part"
        part.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        os.replace(part, folder / INDEX)
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
