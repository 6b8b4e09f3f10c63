"""Where the student's folders may be written, what they say, and which weights are refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from jax_distill.base.errors import UserError
from jax_distill.config import Config, FromTeacher, StudentConfig
from torch_ref.model import load_model
from torch_ref.student import cut_student, export, prepare_student


def llama(folder: Path, *, eos: str = "b", **fields: object) -> Path:
    """A tiny Llama of four tokens a, b, c, d whose text ends with `eos`."""
    sizes = dict(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**sizes, **heads, "initializer_range": 0.5, **fields})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {name: i for i, name in enumerate("abcd")}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "a", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_with_something_to_lose_is_refused_before_the_teacher_is_loaded(tmp_path: Path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")  # no model at all: loading it would fail otherwise
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("t")
    (tmp_path / "file").write_text("t")
    for out in ("precious", "teacher", "file", "file/below", "."):
        with pytest.raises(UserError, match="expected .*folder.*got .*; name another"):
            cut_student(str(teacher), tmp_path / out, FromTeacher(layers=[0]))
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "t"
    assert (teacher / "config.json").read_text() == "{}"


def change_weights(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def test_a_tied_model_whose_file_has_another_head_is_refused(tmp_path: Path):
    folder = llama(tmp_path / "tied", tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, **{"lm_head.weight": embedding.clone()})  # as some programs save it
    assert load_model(str(folder), dtype="float32").get_output_embeddings() is not None
    embedding[3, 1] += 0.001
    change_weights(folder, **{"lm_head.weight": embedding})
    with pytest.raises(UserError, match="tied model .*set tie_word_embeddings to false"):
        load_model(str(folder), dtype="float32")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3.4e38])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float):
    folder = llama(tmp_path / "model")
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    norm[2] = value
    change_weights(folder, **{"model.norm.weight": norm})
    with pytest.raises(UserError, match="finite numbers in 'model.norm.weight'.* as bfloat16"):
        load_model(str(folder), dtype="bfloat16")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_folder_with_an_adapter_is_refused(tmp_path: Path, name: str):
    folder = llama(tmp_path / "model")
    (folder / name).write_text("{}")
    with pytest.raises(UserError, match=f"without an adapter in .*got {name}; merge"):
        load_model(str(folder), dtype="float32")


def test_shards_without_their_index_are_refused(tmp_path: Path):
    folder = llama(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="expected a model at"):
        load_model(str(folder), dtype="float32")


def test_an_export_ends_as_its_text_does_and_both_generations_read_it(tmp_path: Path):
    """The student's own tokenizer ends with b, the text's with c."""
    start, text = llama(tmp_path / "start"), llama(tmp_path / "text", eos="c")
    (start / "notes.json").write_text("{}")  # nothing that a model folder needs
    (start / "LICENSE").write_text("free")
    (tmp_path / "run").mkdir()
    config = Config(student=StudentConfig(path=str(start)))
    path, inside = prepare_student(config, tmp_path / "run", str(text), trained=False)
    export(load_model(path, dtype="bfloat16"), inside, tmp_path / "export", card="Card")
    names = {each.name for each in (tmp_path / "export").iterdir()}
    assert "LICENSE" in names and "notes.json" not in names
    jsons = [each for each in names if each.endswith(".json")]
    read = {each: json.loads((tmp_path / "export" / each).read_text()) for each in jsons}
    assert read["tokenizer_config.json"]["eos_token"] == "c"
    assert read["config.json"]["eos_token_id"] == [1, 2]
    assert read["generation_config.json"]["eos_token_id"] == [1, 2]
    assert read["config.json"]["dtype"] == read["config.json"]["torch_dtype"] == "bfloat16"
    theta = read["config.json"]["rope_theta"]
    assert theta == read["config.json"]["rope_parameters"]["rope_theta"] == 10000.0


def test_a_cut_student_is_spelled_for_both_generations(tmp_path: Path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    teacher = llama(tmp_path / "teacher", rope_parameters=rope)
    cut_student(str(teacher), tmp_path / "cut", FromTeacher(layers=[0]))
    raw = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert raw["rope_theta"] == 5000.0 and raw["rope_parameters"] == rope
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert raw["num_hidden_layers"] == 1 and raw["torch_dtype"] == raw["dtype"] == "float32"


def test_text_outside_the_folder_is_not_published(tmp_path: Path):
    start = llama(tmp_path / "start")
    (tmp_path / "secret").write_text("s")
    (start / "LICENSE").symlink_to(tmp_path / "secret")
    (tmp_path / "run").mkdir()
    config = Config(student=StudentConfig(path=str(start)))
    with pytest.raises(UserError, match="LICENSE to be in"):
        prepare_student(config, tmp_path / "run", None, trained=False)
