"""Continuations with a cache are those without one, for what every family's layers have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill.model import (
    Decoder,
    KeyValues,
    ModelConfig,
    RopeConfig,
    continue_greedily,
    read_tokens,
)
from jax_distill.model_test import CONFIG

YARN = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.1)
KINDS = ("sliding_attention", "full_attention")
FAMILIES = {
    "llama": CONFIG,
    "mistral": dataclasses.replace(CONFIG, layer_types=KINDS[:1] * 2, sliding_window=3),
    "qwen2": dataclasses.replace(
        CONFIG, attention_bias=True, layer_types=KINDS[::-1], sliding_window=3
    ),
    "qwen3": dataclasses.replace(CONFIG, qk_norm=True, head_dim=16, tie_word_embeddings=True),
    "seed_oss": dataclasses.replace(CONFIG, attention_bias=True, output_bias=True, mlp_bias=True),
    "gpt_oss": dataclasses.replace(
        CONFIG, attention_bias=True, output_bias=True, layer_types=KINDS, sliding_window=3,
        attention_sinks=True, num_local_experts=4, num_experts_per_tok=2, rope=YARN,
    ),
}  # fmt: skip
VOCAB_SIZE, LENGTH, NEW = 57, 12, 8
EPSILON = 2.0**-23


def random_model(config: ModelConfig) -> Decoder:
    """Sinks and biases that are not 0."""
    model = Decoder(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("sinks", "bias"):
            value = jnp.asarray(rng.normal(0, 0.3, parameter.shape), jnp.float32)
            parameter.set_value(value)
            nnx.update(model, nnx.from_flat_state([(path, parameter)]))
    return model


def prompts() -> dict[str, np.ndarray]:
    """[3,T]: one document; two, of which the second goes on; a short one after padding."""
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, LENGTH)).astype(np.int32)
    segment_ids, positions = (
        np.ones_like(tokens),
        np.tile(np.arange(LENGTH, dtype=np.int32), (3, 1)),
    )
    segment_ids[1, 5:], positions[1, 5:] = 2, np.arange(LENGTH - 5)
    segment_ids[2, :7], positions[2] = 0, np.maximum(np.arange(LENGTH) - 7, 0)
    return {"tokens": tokens, "segment_ids": segment_ids, "positions": positions}


quick_read = jax.jit(read_tokens)


@jax.jit
def logits_of(model: Decoder, tokens, segment_ids, positions) -> jax.Array:
    return model.hidden_states(tokens, segment_ids, positions) @ model.lm_head_weight().T


def with_next(rows: dict[str, np.ndarray], token: np.ndarray) -> dict[str, np.ndarray]:
    more = {
        "tokens": token,
        "segment_ids": rows["segment_ids"][:, -1],
        "positions": rows["positions"][:, -1] + 1,
    }
    return {name: np.column_stack([x, more[name]]) for name, x in rows.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logits_are_those_without_a_cache(name):
    """The definition: all of the row again for every token. Then the logits, the row read in two
    halves."""
    model, rows = random_model(FAMILIES[name]), prompts()
    made = continue_greedily(model, **rows, new_tokens=NEW, vocab_size=VOCAB_SIZE)
    whole = rows
    for _ in range(NEW):
        # Causal: what fills the row up to one length, so that one program does for all, is unseen.
        width = LENGTH + NEW - whole["tokens"].shape[1]
        filled = {key: np.pad(x, ((0, 0), (0, width))) for key, x in whole.items()}
        last = logits_of(model, **filled)[:, -width - 1, :VOCAB_SIZE]
        whole = with_next(whole, np.asarray(last.argmax(axis=-1), np.int32))
    np.testing.assert_array_equal(made, whole["tokens"][:, LENGTH:])
    assert len(np.unique(made)) > 4  # it does not say the same token all the time

    cache = KeyValues.empty(model, rows=3, length=LENGTH + NEW)
    parts = []
    for first, half in enumerate(np.split(whole["tokens"], 2, axis=1)):
        hidden, cache = quick_read(
            model, half, whole["segment_ids"], whole["positions"], cache, first * half.shape[1]
        )
        parts.append(hidden @ model.lm_head_weight().T)
    expected = logits_of(model, **whole)
    real = whole["segment_ids"] > 0
    # Sums of at most 48 products in other orders, in 2 layers and the head.
    np.testing.assert_allclose(
        np.concatenate(parts, axis=1)[real], np.asarray(expected)[real],
        atol=48 * 3 * EPSILON * float(jnp.abs(expected).max()),
    )  # fmt: skip


def test_dynamic_rope_counts_the_tokens_read_and_not_the_room_for_more():
    rope = RopeConfig("dynamic", factor=4.0)
    model = random_model(dataclasses.replace(CONFIG, rope=rope, max_position_embeddings=LENGTH + 1))
    rows = {key: x[:1] for key, x in prompts().items()}
    two, more = (
        continue_greedily(model, **rows, new_tokens=n, vocab_size=VOCAB_SIZE) for n in (2, 40)
    )
    np.testing.assert_array_equal(two, more[:, :2])
