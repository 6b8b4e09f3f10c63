"""Rung "attention": projections, rotary positions and softmax of one layer are transformers'.

Grouped heads of every ratio, biases, a head width of its own, packed rows with padding, on every
implementation that a CPU has. transformers gets the same documents as an explicit 4-D mask.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from ladder import assert_close, block_causal_mask, run_layer
from transformers import LlamaForCausalLM

from jax_distill.attention import Mask
from jax_distill.hf import load_model
from jax_distill.model.layers import LayerInputs
from jax_distill.model.rotary import rotary_angles

LENGTH, ROWS = 37, 3
HEADS = {
    "one kv head a head": dict(num_key_value_heads=4),
    "two heads a kv head": dict(num_key_value_heads=2),
    "one kv head": dict(num_key_value_heads=1),
    "biases": dict(num_key_value_heads=2, attention_bias=True),
    "wide heads": dict(num_key_value_heads=2, head_dim=16),
}


@pytest.mark.parametrize("implementation", ["grouped", "reference"])
@pytest.mark.parametrize("heads", HEADS)
def test_packed_rows(tmp_path, heads, implementation):
    folder = tiny.llama_folder(tmp_path, **HEADS[heads])
    theirs = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").model
    ours = load_model(folder, attention=implementation)
    rows = tiny.packed_rows(ROWS, LENGTH)
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 32)).astype(np.float32)
    config = ours.config
    cos, sin = rotary_angles(
        config.rope,
        jnp.asarray(rows["positions"]),
        jnp.asarray(rows["segment_ids"]),
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
    )
    with torch.no_grad():
        angles = theirs.rotary_emb(torch.tensor(x), torch.tensor(rows["positions"]).long())
        mask = block_causal_mask(rows["segment_ids"])
        for layer in range(config.num_hidden_layers):
            expected = theirs.layers[layer].self_attn(torch.tensor(x), angles, mask)[0]
            inputs = LayerInputs(cos, sin, (Mask(rows["segment_ids"]),), 0)
            got = run_layer(ours.layers.self_attn, layer, x.reshape(-1, 32), inputs)
            assert_close("attention", f"{heads}, layer {layer}", got.reshape(x.shape), expected)
