"""The student's folder before training. One that is cut from its teacher keeps some of its layers;
everything else is the teacher's own.

`python -m jax_distill.student --teacher DIR --out DIR (--layers 0,5 | --parameters N)
[--importance CACHE]`
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jax_distill import hf, model_folder
from jax_distill.base.command import CommandLine, above_zero, run_command
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path, sha256_of, write_json
from jax_distill.base.json_object import read_json_object
from jax_distill.cache import Cache, teacher_fingerprint, vocabulary_conflict
from jax_distill.config import Config
from jax_distill.data import vocabulary_of
from jax_distill.hf.locate import Architecture, find_architecture
from jax_distill.hf.tensor_files import INDEX, opened, weight_files, weights_written
from jax_distill.importance import layer_importance, most_important
from jax_distill.model import ModelConfig, count_parameters
from jax_distill.model_folder import (
    STUDENT_MARKS,
    check_new_folder,
    collect_text_files,
    copy_tokenizer,
    new_folder,
    text_files,
    write_config,
)
from jax_distill.run import STUDENT_FOLDER
from jax_distill.teacher.caches import tokenizer_folder

LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
# In a cut folder: what it was cut from and how, and the sha256 of each file as it was written.
RECORD = "student_cut.json"
FORM = 1  # of a cut; one of an older form is made again


def planned_architecture(config: Config) -> Architecture:
    """The student's before its weights exist: of its own config.json, or cut from its teacher's.

    Raises:
        UserError: no config.json at hand, nothing to cut from.
    """
    cut = config.student.from_teacher
    if cut is None:
        return find_architecture(config.student.path, "student.path")
    if not config.teacher.path:
        raise UserError("expected teacher.path for student.from_teacher, got none; name a teacher")
    model, vocab_size = find_architecture(config.teacher.path, "teacher.path")
    layers = kept_layers(model, layers=cut.layers, parameters=cut.parameters)
    return Architecture(model.with_layers(layers), vocab_size)


def kept_layers(
    config: ModelConfig, *, layers: Sequence[int] | None, parameters: int | None
) -> list[int]:
    """The teacher's layers that a student keeps; raises as `model_folder.kept_layers` does."""
    depth = config.num_hidden_layers
    slots = hf.weight_table(config).values()
    layer = sum(math.prod(slot.shape) for slot in slots if slot.layer == 0)
    outside = count_parameters(config) - layer * depth
    return model_folder.kept_layers(
        depth, layers=layers, parameters=parameters, layer=layer, outside=outside
    )


def make_student(
    teacher: Path, out: Path, *, layers: Sequence[int] | None, parameters: int | None
) -> Path:
    """Write the student's HF folder: the kept layers renumbered, tensors as they were, bit by bit.

    One file's tensors are in memory at a time. An `out` that was cut like this from this very
    teacher, and whose files are as they were written, is kept; else it is written again, whole or
    not at all. A line says which. Raises UserError as `kept_layers` and `new_folder` do.
    """
    raw = hf.read_config(teacher)
    config = hf.model_config(raw)
    layers = kept_layers(config, layers=layers, parameters=parameters)
    names = text_files(teacher)
    guard: dict[str, Any] = {"marks": STUDENT_MARKS, "apart": [teacher], "names": names}
    check_new_folder(out, **guard)
    source = {
        "form": FORM,
        "layers": layers,
        "teacher": teacher_fingerprint(teacher),
        "text_files": {name: sha256_of(teacher / name) for name in names},
    }
    size = f"{len(layers)} layers of {teacher}"
    if (out / RECORD).is_file():
        record = read_json_object(out / RECORD, cure="delete the folder")
        if record.get("source") == source and not changed_files(out):
            say(f"kept {out}: {size}, cut before")
            return out
    with new_folder(out, **guard) as partial:
        copy_tokenizer(teacher, partial)
        weights = weight_files(teacher)
        if weights:
            _copy_weights(weights, partial, {old: new for new, old in enumerate(layers)})
        changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
        if raw.get("layer_types") or len(config.kinds) > 1:  # by their old numbers
            changes["layer_types"] = list(config.with_layers(layers).layer_types)
        write_config(teacher, partial, **changes)
        (partial / "README.md").write_text(student_card(str(teacher), layers), "utf-8")
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


def student_card(teacher: str, layers: Sequence[int]) -> str:
    """README.md of a student's folder: what it is. By it the command knows its own folders."""
    kept = ", ".join(map(str, layers))
    what = f"Layers {kept} of `{teacher}`, cut by jax_distill.student."
    return f"# A student before training\n\n{what}\n"


def _copy_weights(weights: dict[str, Path], out: Path, renumbered: dict[int, int]) -> None:
    kept: dict[Path, dict[str, str]] = {}
    for key, path in weights.items():
        match = LAYER.fullmatch(key)
        if match and int(match[2]) not in renumbered:
            continue
        name = f"{match[1]}{renumbered[int(match[2])]}{match[3]}" if match else key
        kept.setdefault(path, {})[key] = name
    index = {}
    for number, (path, names) in enumerate(kept.items(), 1):
        file = f"model-{number:05d}-of-{len(kept):05d}.safetensors"
        with opened(path) as tensors:
            part = {new: np.asarray(tensors.get_tensor(old)) for old, new in names.items()}
        index.update(dict.fromkeys(part, file))
        with weights_written(out / file) as target:
            save_file(part, target, metadata={"format": "pt"})
    listing = {"metadata": {}, "weight_map": index}
    (out / INDEX).write_text(json.dumps(listing, indent=2), "utf-8")


def prepare(
    config: Config, run: Path, teacher_folder: Path | None, *, trained: bool
) -> tuple[Path, Path]:
    """(folder of the first weights, `<run>/student`): the latter has at least the student's
    config.json and tokenizer, so that the run folder alone can be exported. What a run that has
    `trained` began with is left as it is, and refused where it is damaged.

    Raises:
        UserError: see `make_student`, `check_tokenizers` and `collect_text_files`.
    """
    inside = run / STUDENT_FOLDER
    if config.student.from_teacher is None:
        start = hf.local_folder(find_path(config.student.path), key="student.path")
        hf.model_config(hf.read_config(start))
        if start.resolve() == inside.resolve():
            return start, inside
        text = tokenizer_folder(config, teacher_folder)
        text = text.parent if text.name == "tokenizer.json" else text
        check_tokenizers(start, text)
        inside.mkdir(exist_ok=True)
        collect_text_files(start, text, inside)
        shutil.copyfile(start / "config.json", inside / "config.json")
        return start, inside
    if trained and (inside / "config.json").is_file():
        changed = changed_files(inside)
        if changed:
            raise UserError(
                f"expected {inside} as this run began with it, got another {changed[0]}; restore "
                "it, or set another --output_dir"
            )
        return inside, inside
    if teacher_folder is None:
        raise UserError("expected teacher.path for student.from_teacher, got none; name a teacher")
    cut = config.student.from_teacher
    make_student(teacher_folder, inside, layers=cut.layers, parameters=cut.parameters)
    return inside, inside


def check_tokenizers(student_folder: Path, text_folder: Path) -> None:
    """Refuse, before the teacher runs, a student that reads the text's ids differently."""
    conflict = student_folder.resolve() != text_folder.resolve() and vocabulary_conflict(
        vocabulary_of(text_folder), vocabulary_of(student_folder)
    )
    if conflict:
        first, expected, got = conflict
        raise UserError(
            f"expected the student's tokenizer to give id {first} to {expected!r} as the teacher's "
            f"does, got {got!r}; use the teacher's tokenizer"
        )


def vocabulary_size(folder: Path, cache: Cache) -> int:
    """The student's vocab_size without padding; one line where either side lacks ids of the other.
    Raises as `Cache.student_length` does."""
    head_rows = hf.model_config(hf.read_config(folder)).vocab_size
    length = cache.student_length(head_rows, vocabulary_of(folder), str(folder))
    if length < cache.manifest.vocab_size:
        say(f"the student lacks ids {length}…{cache.manifest.vocab_size - 1}: they join the tail")
    elif length > cache.manifest.vocab_size:
        say(f"the teacher lacks ids {cache.manifest.vocab_size}…{length - 1}: they join the tail")
    return min(length, head_rows)


def important_layers(teacher: Path, cache: Cache, parameters: int, *, rows: int) -> list[int]:
    """As many layers as fit into `parameters`, those of largest `layer_importance` over the first
    `rows` of the cache. A line says them, as student.from_teacher.layers takes them.

    Raises:
        UserError: see `kept_layers` and `layer_importance`; another tokenizer's cache.
    """
    config = hf.model_config(hf.read_config(teacher))
    count = len(kept_layers(config, layers=None, parameters=parameters))
    cache.require_complete()
    cache.student_length(config.vocab_size, vocabulary_of(teacher), str(teacher))
    model = hf.load_model(teacher, remat="none")
    importance = layer_importance(model, cache, np.arange(min(rows, cache.rows)))
    shown = ", ".join(f"{layer}: {value:.3f}" for layer, value in enumerate(importance))
    say(f"importance of layers (mean of 1 - cosine of input and output): {shown}")
    kept = most_important(importance, count)
    say(f"kept: --student.from_teacher.layers '{kept}'")
    return kept


def main(argv: Sequence[str]) -> None:
    """Command line of `make_student`."""
    parser = CommandLine("jax_distill.student")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--out", required=True, help="the student's folder")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--layers", help="the teacher's layers that stay, e.g. 0,5")
    size.add_argument("--parameters", type=above_zero, help="at most this many")
    parser.add_argument(
        "--importance",
        metavar="CACHE",
        help="with --parameters: keep the layers that change the hidden states of this cache's "
        "rows most, instead of the first and the last ones",
    )
    parser.add_argument("--rows", type=above_zero, default=16, help="of that cache, at most")
    options = parser.parse_args(argv)
    layers = None
    if options.layers is not None:
        try:
            layers = [int(x) for x in options.layers.split(",")]
        except ValueError:
            raise UserError(
                f"expected --layers as numbers like 0,5, got {options.layers}; write them so"
            ) from None
    if options.importance and not options.parameters:
        raise UserError(
            "expected --parameters with --importance, got --layers; leave out --importance"
        )
    teacher = hf.local_folder(find_path(options.teacher), key="--teacher")
    if options.importance:
        layers = important_layers(
            teacher, Cache.open(options.importance), options.parameters, rows=options.rows
        )
        options.parameters = None
    out = make_student(teacher, Path(options.out), layers=layers, parameters=options.parameters)
    config = hf.model_config(hf.read_config(out))
    say(f"{out} has {count_parameters(config):,} parameters")


if __name__ == "__main__":
    run_command(main)
