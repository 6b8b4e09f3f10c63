"""A student cut from its teacher by dropping layers, as `jax_distill.student` does."""

import json
import shutil
from pathlib import Path

import torch
import transformers

from jax_distill.config import FromTeacher, Refusal
from torch_ref.model import load_model, source


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
        Refusal: not exactly one of layers and parameters; a layer the teacher lacks.
    """
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
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # the weights of a GGUF file are plain by now
        quantizer.remove_quantization_config(model)
    half_made = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    copy_tokenizer(teacher, half_made)
    shutil.rmtree(out, ignore_errors=True)
    half_made.rename(out)
    return out


def count_parameters(module: torch.nn.Module) -> int:
    """Numbers in the weights; a tied head counts once."""
    return sum(p.numel() for p in module.parameters())


def copy_tokenizer(start: str, out: Path) -> None:
    """What a model folder holds besides weights and config.json; of a GGUF file or a hub id, what
    transformers makes of its tokenizer."""
    place = source(start)
    folder = Path(place["pretrained_model_name_or_path"])
    if "gguf_file" in place or not folder.is_dir():
        transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(out)
        return
    for path in folder.iterdir():
        text = path.suffix in (".json", ".jinja", ".txt", ".model")
        if text and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)


def export(model: transformers.PreTrainedModel, start: str, out: Path) -> None:
    """An HF folder of the trained student: its weights; config.json (but for the dtype), tokenizer,
    chat template and generation config as they were in the folder that it started from."""
    half_made = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(half_made, ignore_errors=True)
    model.save_pretrained(half_made)
    copy_tokenizer(start, half_made)
    config = Path(source(start)["pretrained_model_name_or_path"]) / "config.json"
    if config.is_file() and "gguf_file" not in source(start):
        raw = json.loads(config.read_text(encoding="utf-8"))
        raw.pop("torch_dtype", None)
        raw["dtype"] = str(model.dtype).removeprefix("torch.")
        (half_made / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
    shutil.rmtree(out, ignore_errors=True)
    half_made.rename(out)
