"""The student's folders, before and after: cut from its teacher by dropping layers as
`jax_distill.student` does, and exported as `jax_distill.export` does."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.config import Config, FromTeacher
from jax_distill.data.gguf import gguf_metadata, open_gguf, write_tokenizer
from jax_distill.model_folder import (
    EXPORT_MARKS,
    STUDENT_MARKS,
    check_new_folder,
    collect_text_files,
    copy_tokenizer,
    kept_layers,
    new_folder,
    text_files,
    write_config,
)
from torch_ref.model import Model, load_model, local_path


def prepare_student(
    config: Config, run: Path, teacher: str | None, *, trained: bool
) -> tuple[str, Path]:
    """(path of the first weights, `<run>/student`). The latter has the tokenizer that the export
    will have (see `collect_text_files`), and config.json if there is one. `teacher`: its path where
    it is here. What a run that has `trained` began with stays as it is.

    Raises:
        UserError: see `cut_student` and `collect_text_files`; no tokenizer's folder at hand.
    """
    inside = run / "student"
    if config.student.from_teacher is not None:
        if trained and (inside / "config.json").is_file():
            return str(inside), inside
        cut_student(config.teacher.path, inside, config.student.from_teacher)
        return str(inside), inside
    start = local_path(config.student.path)
    if start.resolve() == inside.resolve():
        return str(inside), inside
    inside.mkdir(exist_ok=True)
    with _with_tokenizer(start) as own, _with_tokenizer(tokenizer_folder(config, teacher)) as text:
        collect_text_files(own, text, inside)
    if (start / "config.json").is_file():
        shutil.copyfile(start / "config.json", inside / "config.json")
    return config.student.path, inside


def tokenizer_folder(config: Config, teacher: str | None) -> Path:
    """Whose tokenizer the rows were made with: `data.tokenizer`, else the teacher's, else the
    student's."""
    name = config.data.tokenizer
    if name.startswith("bpe:"):
        return Path(config.cache.path) / f"tokenizer_bpe_{name.removeprefix('bpe:')}"
    if Path(name).name == "tokenizer.json":
        return Path(find_path(name)).parent
    return local_path(name or teacher or config.student.path)


def cut_student(teacher: str, out: Path, cut: FromTeacher) -> Path:
    """Write the student's HF folder, anew, from the teacher's.

    Raises:
        UserError: not exactly one of layers and parameters; a layer the teacher lacks; an `out`
            that is neither free nor a student cut before.
    """
    start = local_path(teacher)
    check_new_folder(out, marks=STUDENT_MARKS, apart=[start], names=text_files(start))
    model = load_model(teacher, dtype="auto")
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UserError(f"expected a teacher with `layers` to cut, got {type(model).__name__}")
    depth = len(decoder.layers)
    layer = count_parameters(decoder.layers[0])
    outside = count_parameters(model) - depth * layer
    layers = kept_layers(
        depth, layers=cut.layers, parameters=cut.parameters, layer=layer, outside=outside
    )
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


@contextlib.contextmanager
def _with_tokenizer(model: Path) -> Iterator[Path]:
    """A model's folder; of a GGUF file, a folder for the time being with its text files.

    Raises:
        UserError: neither.
    """
    if model.suffix != ".gguf":
        if not model.is_dir():
            raise UserError(
                f"expected a folder with a tokenizer, got {model}, which is missing; check the path"
            )
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), gguf_metadata(open_gguf(model)))
        yield Path(folder)


def export(model: Model, student: Path, out: Path, *, card: str) -> None:
    """An HF folder of the trained student: its weights; config.json (transformers' own where it has
    none), tokenizer, chat template and generation config as they are in `<run>/student`, spelled
    as `write_config` does; `card` is its README.md."""
    config = student if (student / "config.json").is_file() else None
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
    """Written whole beside its path, then renamed. config.json is that of the folder `config_of`,
    or transformers' own; README.md is the card."""
    names = text_files(start)
    with new_folder(out, marks=marks, apart=[start], names=names) as partial:
        model.save_pretrained(partial)
        (partial / "generation_config.json").unlink(missing_ok=True)  # if any, the start's own
        with _with_tokenizer(start) as folder:
            copy_tokenizer(folder, partial)
        dtype = str(model.dtype).removeprefix("torch.")
        write_config(config_of or partial, partial, dtype=dtype, quantization_config=None)
        (partial / "README.md").write_text(card, "utf-8")
