"""Rung "exported folder", its documents: what transformers makes of tokenizer, chat template,
generation config and config.json is what it makes of the folder that training began with."""

import json
import logging

import numpy as np
import pytest
import tiny
import transformers
from safetensors.torch import load_file
from test_chat import CHATML_MARKED, TALKS
from test_chat import folder as tokenizer_folder
from test_export_weights import trained

from jax_distill.export import write_folder
from jax_distill.hf import load_model

__all__ = ["tokenizer_folder"]
GENERATION = {
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": [0, 321],
    "temperature": 0.6,
    "top_p": 0.9,
}
WRITTEN = {"model.safetensors", "config.json", "README.md"}  # all else is the student's own
# Keys of config.json: spelled for readers of both generations, see test_export_spelling.
CHANGED = {"dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}


@pytest.fixture(scope="module")
def start(tokenizer_folder, tmp_path_factory):
    """A student as transformers saves it: with a chat template, a generation config of its own,
    and keys in config.json that change no number."""
    start = tiny.llama_folder(
        tmp_path_factory.mktemp("documents") / "start",
        vocab_size=328,
        bos_token_id=0,
        eos_token_id=0,
    )
    (tokenizer_folder / "chat_template.jinja").write_text(CHATML_MARKED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"pad_token": "<|im_end|>"})
    tokenizer.save_pretrained(start)
    transformers.GenerationConfig(**GENERATION).save_pretrained(start)
    raw = json.loads((start / "config.json").read_text())
    raw |= {"pretraining_tp": 1, "_made_for": {"us": ["and", 1e-6]}}
    (start / "config.json").write_text(json.dumps(raw))
    return start


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def export(start, request):
    """What `export` and `train` write."""
    out = start.parent / request.param
    write_folder(out, trained(load_model(start)), student=start, dtype=request.param, card="Card")
    return out


def test_the_students_files_are_unchanged_but_for_listed_keys(start, export):
    """Case 38."""
    names = {path.name for path in start.iterdir()}
    expected = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert expected | {"generation_config.json"} <= names
    assert {path.name for path in export.iterdir()} == names | WRITTEN
    for name in names - WRITTEN:
        assert (export / name).read_bytes() == (start / name).read_bytes(), name
    before, after = (json.loads((x / "config.json").read_text()) for x in (start, export))
    assert {k: v for k, v in after.items() if k not in CHANGED} == {
        k: v for k, v in before.items() if k not in CHANGED
    }
    assert after["dtype"] == after["torch_dtype"] == export.name


def test_transformers_reads_the_same_tokenizer_and_chats_alike(start, export):
    before, after = (transformers.AutoTokenizer.from_pretrained(x) for x in (start, export))
    assert type(after) is type(before) and after.get_vocab() == before.get_vocab()
    assert after.special_tokens_map == before.special_tokens_map
    for message in TALKS[0]:
        ids = after(message["content"])["input_ids"]
        assert ids == before(message["content"])["input_ids"]
        assert after.decode(ids) == before.decode(ids)
    for talk in TALKS:
        for prompt in (False, True):
            options = dict(add_generation_prompt=prompt, tokenize=False)
            text = after.apply_chat_template(talk, **options)
            assert text == before.apply_chat_template(talk, **options)
            assert talk[0]["content"] in text
            options = dict(add_generation_prompt=prompt, return_dict=True)
            ids = [x.apply_chat_template(talk, **options)["input_ids"] for x in (after, before)]
            assert ids[0] == ids[1]


def test_transformers_loads_the_folder_in_silence_and_generates_with_its_settings(
    start, export, caplog
):
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            export, output_loading_info=True
        )
        settings = transformers.GenerationConfig.from_pretrained(export)
    assert not caplog.records and not any(info.values()), info
    assert str(model.dtype) == f"torch.{export.name}"
    expected = transformers.GenerationConfig.from_pretrained(start).to_dict()
    assert settings.to_dict() == model.generation_config.to_dict() == expected
    assert {key: expected[key] for key in GENERATION} == GENERATION
    tensors = load_file(export / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{export.name}"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = tokenizer.apply_chat_template(TALKS[1][:1], **options)
    said = model.generate(**prompt, do_sample=False, temperature=None, top_p=None, max_new_tokens=2)
    assert np.array_equal(said[0, : prompt["input_ids"].shape[1]], prompt["input_ids"][0])
