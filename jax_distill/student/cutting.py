"""The student's folder, cut from its teacher's: some layers, neurons, heads, hidden dimensions."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jax_distill import hf
from jax_distill.base.console import say
from jax_distill.base.files import sha256_of, write_json
from jax_distill.base.json_object import read_json_object
from jax_distill.cache import Cache, teacher_fingerprint
from jax_distill.config import FromTeacher
from jax_distill.hf.tensor_files import INDEX, opened, weight_files, weights_written
from jax_distill.hf.weights import EMBEDDING, HEAD
from jax_distill.model import ModelConfig, abstract_parameters
from jax_distill.model_folder import (
    STUDENT_MARKS,
    check_new_folder,
    copy_tokenizer,
    new_folder,
    text_files,
    write_config,
)
from jax_distill.student.measure import Kept, choose
from jax_distill.student.shape import student_shape

LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
# In a cut folder: what it was cut from and how, and the sha256 of each file as it was written.
RECORD = "student_cut.json"
FORM = 2  # of a cut; one of an older form is made again
NORM = "norm"  # the axis of a norm's weight over the hidden dimensions


def make_student(
    teacher: Path,
    out: Path,
    cut: FromTeacher,
    *,
    cache: Cache | None = None,
    dtype: Any = jnp.float32,
) -> Path:
    """Write the student's HF folder: the layers that stay renumbered, their tensors bit by bit as
    they were, or the parts of them that stay.

    A narrower student computes what the teacher computes where all other neurons' activations,
    heads' outputs and hidden dimensions are 0 (but for rms_norm_eps): to the norms' weights goes a
    factor √(D/D'), since their mean is now over D' dimensions. Measured with SmolLM2, 512 of 576
    dimensions: KL 0.87, without the factor 1.05.

    One file's tensors are in memory at a time. An `out` that was cut like this from this very
    teacher (and measured on this cache), and whose files are as they were written, is kept; else it
    is written again, whole or not at all. A line says which.

    Args:
        cache: whose rows show what is important, see `measure.choose`; dtype: of the teacher there.

    Raises:
        UserError: see `student_shape`, `choose` and `new_folder`.
    """
    raw = hf.read_config(teacher)
    whole = hf.model_config(raw)
    narrowed, layers = student_shape(whole, cut)
    names = text_files(teacher)
    guard: dict[str, Any] = {"marks": STUDENT_MARKS, "apart": [teacher], "names": names}
    check_new_folder(out, **guard)
    source = {
        "form": FORM,
        "cut": dataclasses.asdict(cut),
        "rows": cache.fingerprint if cache and cut.reads_rows else None,
        "teacher": teacher_fingerprint(teacher),
        "text_files": {name: sha256_of(teacher / name) for name in names},
    }
    size = f"{len(layers)} layers of {teacher}"
    if (out / RECORD).is_file():
        record = read_json_object(out / RECORD, cure="delete the folder")
        if record.get("source") == source and not changed_files(out):
            say(f"kept {out}: {size}, cut before")
            return out
    kept = choose(teacher, narrowed, layers, cut, cache=cache, dtype=dtype)
    student = narrowed.with_layers(kept.layers)
    with new_folder(out, **guard) as partial:
        copy_tokenizer(teacher, partial)
        weights = weight_files(teacher)
        if weights:
            _copy_weights(weights, partial, _Cut(whole, kept))
        write_config(teacher, partial, **config_changes(raw, whole, student))
        card = student_card(str(teacher), kept.layers, whole, student)
        (partial / "README.md").write_text(card, "utf-8")
        files = {path.name: sha256_of(path) for path in sorted(partial.iterdir())}
        write_json(partial / RECORD, {"source": source, "files": files})
    say(f"wrote {out}: {size}")
    return out


def changed_files(folder: Path) -> list[str]:
    """Names of a cut folder's files that are not as they were written; [] without a record."""
    if not (folder / RECORD).is_file():
        return []
    files = read_json_object(folder / RECORD, cure="delete the folder").get("files")
    if not isinstance(files, dict) or "config.json" not in files:
        return [RECORD]
    return sorted(
        name
        for name, digest in files.items()
        if not (folder / name).is_file() or sha256_of(folder / name) != digest
    )


def config_changes(
    raw: Mapping[str, Any], whole: ModelConfig, student: ModelConfig
) -> dict[str, Any]:
    """What the student's config.json says otherwise than its teacher's, `raw`."""
    changes: dict[str, Any] = {"num_hidden_layers": student.num_hidden_layers}
    if raw.get("layer_types") or len(whole.kinds) > 1:  # by their old numbers
        changes["layer_types"] = list(student.layer_types)
    for name in WIDTH_KEYS:
        if getattr(student, name) != getattr(whole, name):
            # Where the file does not say it, it is hidden_size / heads.
            changes |= {name: getattr(student, name), "head_dim": student.head_dim}
    return changes


WIDTH_KEYS = ("intermediate_size", "num_key_value_heads", "num_attention_heads", "hidden_size")


def student_card(teacher: str, layers: list[int], whole: ModelConfig, student: ModelConfig) -> str:
    """README.md of a student's folder: what it is. By it the command knows its own folders."""
    kept = ", ".join(map(str, layers))
    what = f"Layers {kept} of `{teacher}`, cut by jax_distill.student."
    widths = [
        f"{name} {getattr(student, name)} of {getattr(whole, name)}"
        for name in WIDTH_KEYS
        if getattr(student, name) != getattr(whole, name)
    ]
    narrow = f"\n{'; '.join(widths)}; the most important ones.\n" if widths else ""
    return f"# A student before training\n\n{what}\n{narrow}"


class _Cut:
    """Which tensors of a teacher a student has, and which part of each."""

    def __init__(self, whole: ModelConfig, kept: Kept) -> None:
        self.kept = kept
        self.numbers = {old: new for new, old in enumerate(kept.layers)}
        parameters = abstract_parameters(whole)
        self.axes = {
            key: _axes(slot.path, parameters[slot.path].logical_axes, slot.layer is not None)
            for key, slot in hf.weight_table(whole).items()
        }
        self.axes.setdefault(HEAD, self.axes[EMBEDDING])  # in files of tied models
        dim, groups = whole.head_dim, whole.num_key_value_heads
        each = whole.num_attention_heads // groups
        self.group_sizes = {"heads": each * dim, "kv_heads": dim, "sinks": each}
        self.scale = 1.0
        if kept.hidden is not None:
            self.scale = math.sqrt(whole.hidden_size / len(kept.hidden))

    def name(self, key: str) -> str | None:
        """What the tensor is called in the student; None: it has none."""
        match = LAYER.fullmatch(key)
        if match is None:
            return key
        new = self.numbers.get(int(match[2]))
        return None if new is None else f"{match[1]}{new}{match[3]}"

    def part(self, key: str, tensor: np.ndarray) -> np.ndarray:
        """What the student has of a tensor; unchanged where that is all."""
        match = LAYER.fullmatch(key)
        indices = self._indices(self.numbers[int(match[2])] if match else None)
        axes = self.axes.get(key, ())
        for axis, name in enumerate(axes):
            if name in indices:
                tensor = np.take(tensor, indices[name], axis=axis)
        if NORM in axes and NORM in indices:
            tensor = (np.float32(tensor) * np.float32(self.scale)).astype(tensor.dtype)
        return tensor

    def _indices(self, layer: int | None) -> dict[str, np.ndarray]:
        """By the name of an axis, which of it stay; of the student's layer."""
        kept = self.kept
        found: dict[str, np.ndarray] = {}
        if kept.hidden is not None:
            found |= {"embed": kept.hidden, NORM: kept.hidden}
        if layer is not None and kept.neurons is not None:
            found["mlp"] = kept.neurons[layer]
        if layer is not None and kept.kv_groups is not None:
            for name, size in self.group_sizes.items():
                within = kept.kv_groups[layer][:, None] * size + np.arange(size)
                found[name] = within.reshape(-1)
        return found


def _axes(
    path: tuple[str, ...], logical: tuple[str | None, ...], stacked: bool
) -> tuple[str | None, ...]:
    """The names of a tensor's axes: its parameter's, without the stack's, and those that have none
    there."""
    if path[-1] == "sinks":
        return ("sinks",)
    if path[-2] in ("norm", "input_layernorm", "post_attention_layernorm"):
        return (NORM,)
    return logical[1:] if stacked else logical


def _copy_weights(weights: Mapping[str, Path], out: Path, cut: _Cut) -> None:
    kept: dict[Path, dict[str, str]] = {}
    for key, path in weights.items():
        name = cut.name(key)
        if name is not None:
            kept.setdefault(path, {})[key] = name
    index = {}
    for number, (path, names) in enumerate(kept.items(), 1):
        file = f"model-{number:05d}-of-{len(kept):05d}.safetensors"
        with opened(path) as tensors:
            part = {
                new: cut.part(old, np.asarray(tensors.get_tensor(old)))
                for old, new in names.items()
            }
        index.update(dict.fromkeys(part, file))
        with weights_written(out / file) as target:
            save_file(part, target, metadata={"format": "pt"})
    listing = {"metadata": {}, "weight_map": index}
    (out / INDEX).write_text(json.dumps(listing, indent=2), "utf-8")
