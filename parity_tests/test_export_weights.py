"""Rung "exported weights": what save_weights writes is a folder that transformers loads in silence,
with nothing missing and nothing extra, and with our logits."""

import logging
import shutil

import jax
import jax.numpy as jnp
import pytest
import tiny
import torch
import transformers
from flax import nnx
from ladder import assert_close
from safetensors.torch import load_file
from test_logits import LENGTH, MODELS, ROWS, our_logits, their_logits

from jax_distill.hf import load_model, save_weights


def trained(model):
    """Every parameter moved, so that nothing of the first folder can stand in for it."""
    graphdef, params = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, params))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("kind", MODELS)
def test_loads_without_a_warning_and_with_equal_logits(tmp_path, caplog, kind, max_shard_bytes):
    """Case 38, the weights' part."""
    start = tiny.llama_folder(tmp_path / "start", **MODELS[kind])
    model = trained(load_model(start))
    export = tmp_path / "export"
    export.mkdir()
    shutil.copy(start / "config.json", export)
    files = save_weights(export, model, model.config, max_shard_bytes=max_shard_bytes)
    assert (len(files) > 1) == (max_shard_bytes == 20_000)
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        _, info = transformers.LlamaForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not caplog.records
    assert not any(info.values()), info
    rows = tiny.packed_rows(ROWS, LENGTH)
    names = ("tokens", "segment_ids", "positions")
    ours = our_logits(model, *(jnp.asarray(rows[name]) for name in names))
    assert_close("exported weights", kind, ours, their_logits(export, rows), 4e-6)


def test_in_bf16_every_tensor_is_the_rounded_parameter(tmp_path):
    start = tiny.llama_folder(tmp_path / "start")
    model = trained(load_model(start))
    export = tmp_path / "export"
    save_weights(export, model, model.config, dtype=jnp.bfloat16)
    shutil.copy(start / "config.json", export)
    theirs = transformers.LlamaForCausalLM.from_pretrained(export, dtype="bfloat16").state_dict()
    assert {tensor.dtype for tensor in load_file(export / "model.safetensors").values()} == {
        torch.bfloat16
    }
    ours = tiny.by_hf_name(nnx.state(model, nnx.Param), model.config)
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert torch.equal(tensor, torch.tensor(ours[key]).to(tensor.dtype)), key
