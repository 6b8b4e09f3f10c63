"""Rung "exported folder", its config.json: readers of both generations find the same model in it,
whichever generation the folder that training began with was written for."""

import json

import numpy as np
import pytest
import tiny
from ladder import assert_close
from test_logits import logits_of, their_logits
from test_rotary import ROPES

from jax_distill.config import FromTeacher
from jax_distill.hf import load_model, model_config, read_config
from jax_distill.model_folder import write_config
from jax_distill.student import make_student

CONTEXT, ORIGINAL, LENGTH = 256, 64, 600
NEWER = ("rope_parameters", "dtype")
OLDER = ("rope_theta", "rope_scaling", "torch_dtype")


def read_as_transformers_4(raw: dict) -> dict:
    """The config.json that says to us what transformers 4.51 makes of this one: it knows nothing
    of the newer keys, and for YaRN it takes context / original for the factor wherever
    rope_scaling names the original context (modeling_rope_utils, _compute_yarn_parameters)."""
    raw = {key: value for key, value in raw.items() if key not in NEWER}
    scaling = dict(raw.get("rope_scaling") or {})
    if scaling.get("rope_type") == "yarn" and "original_max_position_embeddings" in scaling:
        context = raw["max_position_embeddings"]
        scaling["factor"] = context / scaling["original_max_position_embeddings"]
    return raw | {"rope_scaling": scaling or None}


def as_generation(raw: dict, generation: str, rope: dict) -> dict:
    """A config.json with the keys of one generation alone."""
    raw = {key: value for key, value in raw.items() if key not in NEWER + OLDER}
    if generation == "5":
        return raw | {"rope_parameters": rope, "dtype": "float32"}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    raw |= {"rope_theta": rope["rope_theta"], "torch_dtype": "float32"}
    return raw | {"rope_scaling": None if scaling["rope_type"] == "default" else scaling}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("generation", ["4", "5"])
def test_both_generations_read_the_same_model(tmp_path, kind, generation):
    rope = ROPES[kind] | {"rope_theta": 500000.0}
    if "original_max_position_embeddings" in rope:
        rope |= {"original_max_position_embeddings": ORIGINAL, "factor": CONTEXT / ORIGINAL}
    sizes = dict(max_position_embeddings=CONTEXT, rope_parameters=dict(rope))
    start = tiny.llama_folder(tmp_path / "start", head_dim=32, **sizes)
    raw = as_generation(json.loads((start / "config.json").read_text()), generation, rope)
    (start / "config.json").write_text(json.dumps(raw))
    cut = make_student(start, tmp_path / "cut", FromTeacher(layers=[0, 1]))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").symlink_to(start / "model.safetensors")
    write_config(start, tmp_path / "export", dtype="bfloat16")
    expected = model_config(raw)
    for folder, dtype in ((cut, "float32"), (tmp_path / "export", "bfloat16")):
        raw = read_config(folder)
        assert raw["dtype"] == raw["torch_dtype"] == dtype
        for said in (
            raw,
            {key: value for key, value in raw.items() if key not in OLDER},
            {key: value for key, value in raw.items() if key not in NEWER},
            read_as_transformers_4(raw),
        ):
            assert model_config(said) == expected
    tokens = np.random.default_rng(0).integers(3, tiny.VOCAB_SIZE, (1, LENGTH)).astype(np.int32)
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    rows = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": positions}
    # An angle of 600 rad is known to 6e-5 in fp32.
    theirs = their_logits(tmp_path / "export", rows)
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "model.safetensors").symlink_to(start / "model.safetensors")
    older = read_as_transformers_4(read_config(tmp_path / "export"))
    (tmp_path / "older" / "config.json").write_text(json.dumps(older))
    for folder in (cut, tmp_path / "export", tmp_path / "older"):
        assert_close("exported config", kind, logits_of(folder, rows), theirs, 1e-4)
    assert load_model(cut).config == expected


def test_a_context_that_yarn_does_not_stretch_is_not_named_to_transformers_4(tmp_path):
    """It would take 1 for the factor."""
    start = tiny.llama_folder(
        tmp_path / "start",
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        max_position_embeddings=CONTEXT,
    )
    (tmp_path / "export").mkdir()
    write_config(start, tmp_path / "export")
    raw = read_config(tmp_path / "export")
    assert model_config(read_as_transformers_4(raw)) == model_config(raw)
    assert model_config(raw) == model_config(read_config(start))
    assert model_config(raw).rope.factor == 4.0
