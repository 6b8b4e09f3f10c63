"""Rung "logits": a folder that transformers wrote gives transformers' logits.

Tied and untied heads, biases, every rope type past its borders, sharded and mixed-dtype files,
packed rows. bf16 is stated apart: our error against the fp32 logits is no larger than 1.3 times
that of transformers in bf16.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from ladder import assert_as_near, assert_close, block_causal_mask
from safetensors.torch import load_file, save_file
from test_rotary import ROPES
from transformers import LlamaForCausalLM

from jax_distill.devices import QUICK_COMPILE
from jax_distill.hf import load_model

LENGTH, ROWS = 61, 3
FP32 = 4e-6  # of the largest logit, after two layers and the head
MODELS = {
    "untied": dict(),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "wide heads": dict(head_dim=16, tie_word_embeddings=True),
    "large eps": dict(rms_norm_eps=1e-2),
}


@functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
def our_logits(model, tokens, segment_ids, positions):
    hidden = model.hidden_states(tokens, segment_ids, positions)
    head = model.lm_head_weight().astype(hidden.dtype)
    return jnp.matmul(hidden, head.T, preferred_element_type=jnp.float32)


def logits_of(folder, rows, **options):
    names = ("tokens", "segment_ids", "positions")
    return our_logits(load_model(folder, **options), *(jnp.asarray(rows[name]) for name in names))


def their_logits(folder, rows, dtype="float32"):
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    mask = block_causal_mask(rows["segment_ids"]).to(model.dtype)
    with torch.no_grad():
        return model(
            torch.tensor(rows["tokens"]).long(),
            attention_mask=mask,
            position_ids=torch.tensor(rows["positions"]).long(),
        ).logits


@pytest.mark.parametrize("kind", MODELS)
def test_of_packed_rows(tmp_path, kind):
    folder = tiny.llama_folder(tmp_path, **MODELS[kind])
    rows = tiny.packed_rows(ROWS, LENGTH)
    assert_close("logits", kind, logits_of(folder, rows), their_logits(folder, rows), FP32)


@pytest.mark.parametrize("rope", ROPES)
def test_past_the_borders_of_every_rope_type(tmp_path, rope):
    """One document of 600: past 512, the original context, and (dynamic) past the context."""
    parameters = ROPES[rope] | dict(rope_theta=10000.0)
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 64
    folder = tiny.llama_folder(tmp_path, rope_parameters=parameters, head_dim=32)
    tokens = np.random.default_rng(0).integers(3, tiny.VOCAB_SIZE, (1, 600)).astype(np.int32)
    rows = {
        "tokens": tokens,
        "segment_ids": np.ones_like(tokens),
        "positions": np.arange(600, dtype=np.int32)[None],
    }
    # An angle of 600 rad is known to 6e-5 in fp32.
    assert_close("logits", rope, logits_of(folder, rows), their_logits(folder, rows), 1e-4)


def test_of_mixed_dtypes_in_several_files(tmp_path):
    folder = tiny.llama_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    mixed = {key: x.to(kinds[i % 3]) for i, (key, x) in enumerate(sorted(tensors.items()))}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained(folder, dtype="float32")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    rows = tiny.packed_rows(ROWS, LENGTH)
    expected = their_logits(folder / "sharded", rows)
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 3
    assert_close("logits", "mixed dtypes", logits_of(folder, rows), expected, FP32)
    assert_close("logits", "sharded", logits_of(folder / "sharded", rows), expected, FP32)


def test_in_bf16_is_as_near_to_fp32_as_transformers_is(tmp_path):
    folder = tiny.llama_folder(tmp_path)
    rows = tiny.packed_rows(ROWS, LENGTH)
    exact = their_logits(folder, rows)
    ours = logits_of(folder, rows, compute_dtype=jnp.bfloat16)
    theirs = their_logits(folder, rows, dtype="bfloat16")
    assert_as_near("logits", "bf16", ours, theirs, exact, factor=1.3)
