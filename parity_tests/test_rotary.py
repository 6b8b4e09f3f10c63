"""Rung "rotary": frequencies, angles and turned heads of every rope type of HF's Llama (all but
longrope, which is refused) are transformers'.

Each type is read from a config.json in both spellings (rope_parameters; rope_theta with
rope_scaling), at positions past 512, past the original context and past the context. The
frequencies agree to the last bits, because an error in them grows with the position.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ladder import assert_close
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from jax_distill.devices import QUICK_COMPILE
from jax_distill.hf import model_config
from jax_distill.model.rotary import inverse_frequencies, rotary_angles, rotate

CONTEXT, ORIGINAL = 2048, 512
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
ROPES = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=2.5),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "yarn": YARN,
    "yarn, own betas, no truncation": YARN | dict(beta_fast=16.0, beta_slow=2.0, truncate=False),
    "yarn, attention factor": YARN | dict(attention_factor=1.3),
    "yarn, mscale": YARN | dict(mscale=0.9, mscale_all_dim=0.7),
    "llama3": LLAMA3,
}
# Angles reach 2048 rad, where fp32 is 1.2e-4 apart; frequencies differ by at most one rounding.
ANGLE = 3e-4
POSITIONS = [0, 1, 2, 31, 511, 512, 513, 700, 1023, 1024, 1500, 2047]


def both_styles(rope: dict, theta: float, head_dim: int) -> tuple[dict, dict, LlamaConfig]:
    """The same model's config.json as transformers 5 and as transformers 4 wrote it."""
    sizes = dict(
        vocab_size=64,
        hidden_size=2 * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    )
    theirs = LlamaConfig(**sizes, rope_parameters=rope | dict(rope_theta=theta))
    new = theirs.to_dict() | dict(architectures=["LlamaForCausalLM"])
    scaling = None if rope["rope_type"] == "default" else dict(rope)
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    return new, old | dict(rope_theta=theta, rope_scaling=scaling), theirs


@pytest.mark.parametrize("theta,head_dim", [(10000.0, 64), (500000.0, 128), (100000.0, 80)])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_to_the_last_bits(rope, theta, head_dim):
    new, old, theirs = both_styles(ROPES[rope], theta, head_dim)
    assert model_config(new) == model_config(old)
    ours = model_config(new).rope
    embedding = LlamaRotaryEmbedding(theirs)
    got, expected = inverse_frequencies(ours, head_dim), embedding.inv_freq.numpy()
    assert_close("rotary", f"frequencies of {rope}", got, expected, 2.0, unit=np.spacing(expected))
    factors = ours.attention_factor, embedding.attention_scaling
    assert_close("rotary", f"attention factor of {rope}", *factors, 1e-12)


@pytest.mark.parametrize("rope", ROPES)
def test_angles_and_turned_heads_past_every_border(rope):
    new, _, theirs = both_styles(ROPES[rope], 10000.0, 64)
    config, embedding = model_config(new), LlamaRotaryEmbedding(theirs)
    positions = np.array([POSITIONS], np.int32)
    x = np.random.default_rng(0).normal(size=(1, len(POSITIONS), 2, 64)).astype(np.float32)
    cos, sin = our_angles(config, positions, np.ones_like(positions))
    got = rotate(jnp.asarray(x), cos, sin)
    turned = torch.tensor(x).transpose(1, 2)
    their_cos, their_sin = embedding(turned, torch.tensor(positions).long())
    expected = apply_rotary_pos_emb(turned, turned, their_cos, their_sin)[0].transpose(1, 2)
    assert_close("rotary", f"cos of {rope}", cos, their_cos[..., :32], ANGLE)
    assert_close("rotary", f"sin of {rope}", sin, their_sin[..., :32], ANGLE)
    assert_close("rotary", f"turned heads of {rope}", got, expected, ANGLE)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def our_angles(config, positions, segment_ids):
    return rotary_angles(
        config.rope,
        positions,
        segment_ids,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
    )


def test_dynamic_stretches_each_document_of_a_row_by_its_own_length():
    """Case 14 for the one type whose frequencies depend on the length: packed or alone, a document
    longer than the context turns as transformers turns it alone."""
    new, _, theirs = both_styles(dict(rope_type="dynamic", factor=4.0), 10000.0, 64)
    config = model_config(new | dict(max_position_embeddings=16))
    lengths = [24, 10, 40]
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    segment_ids = np.repeat([1, 2, 3], lengths)[None].astype(np.int32)
    cos, sin = our_angles(config, positions, segment_ids)
    theirs.max_position_embeddings = 16
    for segment, length in enumerate(lengths, start=1):
        embedding = LlamaRotaryEmbedding(theirs)
        expected = embedding(torch.zeros(1), torch.arange(length)[None])
        for name, ours, reference in zip(("cos", "sin"), (cos, sin), expected, strict=True):
            got = np.asarray(ours)[segment_ids == segment][None]
            label = f"{name} of a document of {length}"
            assert_close("rotary", label, got, reference[..., :32], 5e-6)
