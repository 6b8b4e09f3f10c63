"""The student's folder before training. One that is cut from its teacher keeps some of its layers;
everything else is the teacher's own.

`python -m jax_distill.student --teacher DIR --out DIR (--layers 0,5 | --parameters N)`
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jax_distill import hf
from jax_distill.cache import Store, vocabulary_conflict
from jax_distill.config import (
    STUDENT_MARKS,
    CommandLine,
    Config,
    Refusal,
    above_zero,
    check_new_folder,
    find_path,
    new_folder,
    run_command,
)
from jax_distill.data import vocabulary_of
from jax_distill.hf.weights import weight_files
from jax_distill.model import ModelConfig
from jax_distill.run import say
from jax_distill.teacher import tokenizer_folder

STUDENT_FOLDER = "student"  # in the run folder: what training began with
LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


def count_parameters(config: ModelConfig) -> int:
    """Numbers in the weights; a tied head counts once."""
    return sum(math.prod(slot.shape) for slot in hf.weight_table(config).values())


def layers_for(config: ModelConfig, parameters: int) -> list[int]:
    """The most layers that fit into `parameters`; the ones that leave stand in the middle.

    The first and last layers matter most: on SmolLM2-135M dropping 6 of 30 in the middle starts at
    KL 0.98, keeping every third at 12.4.

    Raises:
        Refusal: not even two layers fit; says the smallest size that does.
    """
    table = hf.weight_table(config)
    layer = sum(math.prod(slot.shape) for slot in table.values() if slot.layer == 0)
    outside = count_parameters(config) - layer * config.num_hidden_layers
    keep = min((parameters - outside) // layer, config.num_hidden_layers)
    if keep < 2:
        raise Refusal(
            f"expected student.from_teacher.parameters of {outside + 2 * layer:,} at least "
            f"(embeddings and two layers), got {parameters:,}"
        )
    first = (keep + 1) // 2
    last = config.num_hidden_layers - (keep - first)
    return [*range(first), *range(last, config.num_hidden_layers)]


def kept_layers(
    config: ModelConfig, *, layers: Sequence[int] | None, parameters: int | None
) -> list[int]:
    """The teacher's layers that a student keeps: those named, or as many as `parameters` allow.

    Raises:
        Refusal: not exactly one of layers and parameters; a layer the teacher lacks.
    """
    if (layers is None) == (parameters is None):
        raise Refusal("expected one of student.from_teacher.layers and .parameters; set one")
    if layers is None:
        return layers_for(config, parameters or 0)
    depth = config.num_hidden_layers
    wrong = [x for x in layers if not 0 <= x < depth]
    if wrong or sorted(set(layers)) != list(layers):
        raise Refusal(f"expected layers from 0 to {depth - 1}, rising, got {list(layers)}")
    return list(layers)


def make_student(
    teacher: Path, out: Path, *, layers: Sequence[int] | None, parameters: int | None
) -> Path:
    """Write the student's HF folder: the kept layers renumbered, tensors as they were, bit by bit.

    One file's tensors are in memory at a time. An `out` that is finished is left as it is; it
    appears whole or not at all. Raises Refusal as `kept_layers` and `new_folder` do.
    """
    raw = hf.read_config(teacher)
    layers = kept_layers(hf.model_config(raw), layers=layers, parameters=parameters)
    student = {**raw, "num_hidden_layers": len(layers)}
    if raw.get("layer_types"):
        student["layer_types"] = [raw["layer_types"][x] for x in layers]
    text = json.dumps(student, indent=2) + "\n"
    card = student_card(str(teacher), layers)
    guard: dict[str, Any] = {
        "marks": STUDENT_MARKS,
        "apart": [teacher],
        "names": text_files(teacher),
    }
    check_new_folder(out, **guard)
    if _reads(out / "config.json") == text and _reads(out / "README.md") == card:
        return out
    with new_folder(out, **guard) as partial:
        copy_tokenizer(teacher, partial)
        weights = weight_files(teacher)
        if weights:
            _copy_weights(weights, partial, {old: new for new, old in enumerate(layers)})
        (partial / "config.json").write_text(text, "utf-8")
        (partial / "README.md").write_text(card, "utf-8")
    return out


def student_card(teacher: str, layers: Sequence[int]) -> str:
    """README.md of a student's folder: what it is. By it the command knows its own folders."""
    kept = ", ".join(map(str, layers))
    what = f"Layers {kept} of `{teacher}`, cut by jax_distill.student."
    return f"# A student before training\n\n{what}\n"


def _reads(path: Path) -> str | None:
    return path.read_text("utf-8") if path.is_file() else None


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
        with safe_open(path, framework="numpy") as tensors:
            part = {new: np.asarray(tensors.get_tensor(old)) for old, new in names.items()}
        index.update(dict.fromkeys(part, file))
        save_file(part, out / file, metadata={"format": "pt"})
    listing = {"metadata": {}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2), "utf-8")


def text_files(folder: Path) -> list[str]:
    """Names of what an HF folder holds besides weights and config.json: tokenizer, chat template,
    generation config."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in (".json", ".jinja", ".txt", ".model")
        and path.name != "config.json"
        and not path.name.endswith(".index.json")
    )


def copy_tokenizer(source: Path, out: Path) -> None:
    """The text files of an HF folder, unchanged."""
    for name in text_files(source):
        shutil.copyfile(source / name, out / name)


def prepare(
    config: Config, run: Path, teacher_folder: Path | None, *, trained: bool
) -> tuple[Path, Path]:
    """(folder of the first weights, `<run>/student`): the latter has at least the student's
    config.json and tokenizer, so that the run folder alone can be exported. What a run that has
    `trained` began with is left as it is."""
    inside = run / STUDENT_FOLDER
    if config.student.from_teacher is None:
        start = hf.local_folder(find_path(config.student.path))
        inside.mkdir(exist_ok=True)
        if not (start / "tokenizer.json").exists():
            copy_tokenizer(tokenizer_folder(config, teacher_folder), inside)
        copy_tokenizer(start, inside)
        if teacher_folder is not None:
            check_tokenizers(inside, tokenizer_folder(config, teacher_folder))
        shutil.copyfile(start / "config.json", inside / "config.json")
        return start, inside
    if trained and (inside / "config.json").is_file():
        return inside, inside
    if teacher_folder is None:
        raise Refusal("expected teacher.path for student.from_teacher, got none; name a teacher")
    knobs = config.student.from_teacher
    make_student(teacher_folder, inside, layers=knobs.layers, parameters=knobs.parameters)
    return inside, inside


def check_tokenizers(student_folder: Path, text_folder: Path) -> None:
    """Refuse, before the teacher runs, a student that reads the text's ids differently."""
    conflict = vocabulary_conflict(vocabulary_of(text_folder), vocabulary_of(student_folder))
    if conflict:
        first, wanted, got = conflict
        raise Refusal(
            f"expected the student's tokenizer to give id {first} to {wanted!r} as the teacher's "
            f"does, got {got!r}; use the teacher's tokenizer"
        )


def vocabulary_size(folder: Path, store: Store) -> int:
    """Real columns of the student's head, and one line where either side lacks ids of the other;
    raises as `Store.student_length` does."""
    columns = hf.model_config(hf.read_config(folder)).vocab_size
    length = store.student_length(columns, vocabulary_of(folder), str(folder))
    if length < store.manifest.vocab_size:
        say(f"the student lacks ids {length}…{store.manifest.vocab_size - 1}: they join the tail")
    elif length > store.manifest.vocab_size:
        say(f"the teacher lacks ids {store.manifest.vocab_size}…{length - 1}: they join the tail")
    return min(length, columns)


def main(argv: Sequence[str]) -> None:
    """Command line of `make_student`."""
    parser = CommandLine("jax_distill.student")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--out", required=True, help="the student's folder")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--layers", help="the teacher's layers that stay, e.g. 0,5")
    size.add_argument("--parameters", type=above_zero, help="at most this many")
    options = parser.parse_args(argv)
    layers = None
    if options.layers is not None:
        try:
            layers = [int(x) for x in options.layers.split(",")]
        except ValueError:
            raise Refusal(
                f"expected --layers as numbers like 0,5, got {options.layers}; write them so"
            ) from None
    teacher = hf.local_folder(find_path(options.teacher))
    out = make_student(teacher, Path(options.out), layers=layers, parameters=options.parameters)
    config = hf.model_config(hf.read_config(out))
    say(f"wrote {out}: {config.num_hidden_layers} layers, {count_parameters(config):,} parameters")


if __name__ == "__main__":
    run_command(main)
