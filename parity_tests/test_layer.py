"""Rung "layer": one whole decoder layer, and the MLP within it, are transformers'.

What the rungs below leave open: the order of norms and residual sums, and the gated MLP.
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

LENGTH, ROWS = 29, 2


@pytest.mark.parametrize("bias", [False, True])
def test_each_layer(tmp_path, bias):
    folder = tiny.llama_folder(tmp_path, attention_bias=bias, mlp_bias=bias)
    theirs = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").model
    ours = load_model(folder)
    rows = tiny.packed_rows(ROWS, LENGTH)
    segment_ids = jnp.asarray(rows["segment_ids"])
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 32)).astype(np.float32)
    flat = jnp.asarray(x.reshape(-1, 32))
    cos, sin = rotary_angles(
        ours.config.rope,
        jnp.asarray(rows["positions"]),
        segment_ids,
        head_dim=ours.config.head_dim,
        max_position_embeddings=ours.config.max_position_embeddings,
    )
    with torch.no_grad():
        angles = theirs.rotary_emb(torch.tensor(x), torch.tensor(rows["positions"]).long())
        mask = block_causal_mask(rows["segment_ids"])
        for layer in range(ours.config.num_hidden_layers):
            expected = theirs.layers[layer].mlp(torch.tensor(x))
            got = run_layer(ours.layers.mlp, layer, flat).reshape(x.shape)
            assert_close("layer", f"mlp {layer}", got, expected)
            expected = theirs.layers[layer](
                torch.tensor(x), attention_mask=mask, position_embeddings=angles
            )
            inputs = LayerInputs(cos, sin, (Mask(segment_ids),), 0)
            got, _ = run_layer(ours.layers, layer, flat, inputs)
            assert_close("layer", f"layer {layer}", got.reshape(x.shape), expected)
