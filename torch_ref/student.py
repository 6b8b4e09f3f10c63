"""The student's folders, before and after: cut from its teacher by dropping layers as
`jax_distill.student` does, and exported as `jax_distill.export` does."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from jax_distill.card import generation_config
from jax_distill.config import (
    EXPORT_MARKS,
    STUDENT_MARKS,
    Config,
    FromTeacher,
    Refusal,
    check_new_folder,
    new_folder,
)
from jax_distill.data.gguf import gguf_metadata, open_gguf, write_tokenizer
from torch_ref.model import Model, load_model, place_of


def prepare_student(
    config: Config, run: Path, teacher: str | None, *, trained: bool
) -> tuple[str, Path]:
    """(path of the first weights, `<run>/student`). The latter has the tokenizer that the export
    will have (the text's own where the student's folder has none), and config.json if there is one.
    `teacher`: its path where it is here. What a run that has `trained` began with stays as it is.
    """
    inside = run / "student"
    if config.student.from_teacher is not None:
        if trained and (inside / "config.json").is_file():
            return str(inside), inside
        cut_student(config.teacher.path, inside, config.student.from_teacher)
        return str(inside), inside
    start = place_of(config.student.path)
    inside.mkdir(exist_ok=True)
    if start.is_dir() and not (start / "tokenizer.json").exists():
        copy_tokenizer(tokenizer_place(config, teacher), inside)
    copy_tokenizer(start, inside)
    if (start / "config.json").is_file():
        shutil.copyfile(start / "config.json", inside / "config.json")
    return config.student.path, inside


def tokenizer_place(config: Config, teacher: str | None) -> Path:
    """Whose tokenizer the rows were made with: `data.tokenizer`, else the teacher's, else the
    student's."""
    name = config.data.tokenizer
    if name.startswith("bpe:"):
        return Path(config.cache.path) / f"tokenizer_bpe_{name.removeprefix('bpe:')}"
    place = place_of(name or teacher or config.student.path)
    return place.parent if place.name == "tokenizer.json" else place


def layers_for(depth: int, layer: int, outside: int, parameters: int) -> list[int]:
    """The most of `depth` layers, of `layer` parameters each beside `outside` others, that fit into
    `parameters`; the ones that leave stand in the middle."""
    keep = min((parameters - outside) // layer, depth)
    if keep < 2:
        raise Refusal(
            f"expected student.from_teacher.parameters of {outside + 2 * layer:,} at least "
            f"(embeddings and two layers), got {parameters:,}"
        )
    first = (keep + 1) // 2
    return [*range(first), *range(depth - keep + first, depth)]


def cut_student(teacher: str, out: Path, wanted: FromTeacher) -> Path:
    """Write the student's HF folder, anew, from the teacher's.

    Raises:
        Refusal: not exactly one of layers and parameters; a layer the teacher lacks; an `out` that
            is neither free nor a student cut before.
    """
    start = place_of(teacher)
    check_new_folder(out, marks=STUDENT_MARKS, apart=[start], names=text_files(start))
    model = load_model(teacher, dtype="auto")
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise Refusal(f"expected a teacher with `layers` to cut, got {type(model).__name__}")
    depth = len(decoder.layers)
    if (wanted.layers is None) == (wanted.parameters is None):
        raise Refusal("expected one of student.from_teacher.layers and .parameters; set one")
    layers = wanted.layers
    if wanted.parameters is not None:
        layer = count_parameters(decoder.layers[0])
        outside = count_parameters(model) - depth * layer
        layers = layers_for(depth, layer, outside, wanted.parameters)
    assert layers is not None
    if sorted(set(layers)) != list(layers) or not all(0 <= x < depth for x in layers):
        raise Refusal(f"expected layers from 0 to {depth - 1}, rising, got {list(layers)}")
    decoder.layers = torch.nn.ModuleList([decoder.layers[x] for x in layers])
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[x] for x in layers]
    card = (
        f"# A student before training\n\nLayers {', '.join(map(str, layers))} of `{teacher}`, "
        "cut by torch_ref.\n"
    )
    _write_folder(model, start, out, config_of=None, marks=STUDENT_MARKS, card=card)
    return out


def count_parameters(module: torch.nn.Module) -> int:
    """Numbers in the weights; a tied head counts once."""
    return sum(p.numel() for p in module.parameters())


def copy_tokenizer(start: Path, out: Path) -> None:
    """What a model folder holds besides weights and config.json: tokenizer, chat template,
    generation config; the same files out of a GGUF file."""
    if start.suffix == ".gguf":
        write_tokenizer(out, gguf_metadata(open_gguf(start)))
        return
    if not start.is_dir():
        raise Refusal(f"expected a folder with a tokenizer, got {start}, which is missing")
    for name in text_files(start):
        shutil.copyfile(start / name, out / name)


def text_files(start: Path) -> list[str]:
    """Names of the text files that `copy_tokenizer` takes along; a GGUF file is no folder."""
    return [
        path.name
        for path in (start.iterdir() if start.is_dir() else ())
        if path.suffix in (".json", ".jinja", ".txt", ".model")
        and path.name != "config.json"
        and not path.name.endswith(".index.json")
    ]


def export(model: Model, student: Path, out: Path, *, card: str) -> None:
    """An HF folder of the trained student: its weights; config.json (but for the dtype), tokenizer,
    chat template and generation config as they are in `<run>/student`; `card` is its README.md."""
    config = student / "config.json"
    _write_folder(model, student, out, config_of=config, marks=EXPORT_MARKS, card=card)


def _write_folder(
    model: Model,
    start: Path,
    out: Path,
    *,
    config_of: Path | None,
    marks: Sequence[str],
    card: str,
) -> None:
    """Written whole beside its place, then renamed. config.json is transformers' own, or that of
    `config_of` if there is such a file; README.md is the card."""
    with new_folder(out, marks=marks, apart=[start], names=text_files(start)) as partial:
        model.save_pretrained(partial)
        (partial / "generation_config.json").unlink(missing_ok=True)  # if any, the start's own
        copy_tokenizer(start, partial)
        if config_of is not None and config_of.is_file():
            raw = json.loads(config_of.read_text(encoding="utf-8"))
            for key in ("dtype", "torch_dtype"):
                raw[key] = str(model.dtype).removeprefix("torch.")
            (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
            if not (partial / "generation_config.json").exists():
                (partial / "generation_config.json").write_text(generation_config(raw), "utf-8")
        (partial / "README.md").write_text(card, "utf-8")
