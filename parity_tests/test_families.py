"""Every family but Llama, on the rungs "layer", "logits", "gradients" and "exported folder": what a
folder of transformers' says is what this model computes, and what it writes transformers reads.

(The rungs "norm", "rotary" and "attention", and Llama on all of them, have files of their own.)
"""

import copy
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers
from ladder import assert_close
from safetensors.numpy import load_file, save_file
from test_export_folder import CHANGED
from test_export_weights import trained
from test_gradients import GRADIENT_TOLERANCE, LOSS_TOLERANCE, jax_gradients
from test_logits import FP32, logits_of
from transformers.models.gpt_oss.modeling_gpt_oss import load_balancing_loss_func

import torch_ref.losses
import torch_ref.model
import torch_ref.student
from jax_distill.cache import Cache
from jax_distill.config import FromTeacher, LossConfig
from jax_distill.export import write_folder
from jax_distill.hf import load_model, model_config
from jax_distill.student import make_student

LENGTH, ROWS = 48, 4
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=7)
SLIDING = dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)
# name → (model_type, what differs from tiny.model_folder).
FAMILIES = {
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3, sliding, biases": ("qwen3", dict(head_dim=16, attention_bias=True, **SLIDING)),
    "qwen3, yarn": ("qwen3", dict(head_dim=32, rope_parameters=YARN)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2, sliding": ("qwen2", dict(num_key_value_heads=1, **SLIDING)),
    "mistral": ("mistral", dict(sliding_window=7)),
    "mistral, no window": ("mistral", dict(sliding_window=None, head_dim=16)),
    "seed_oss": ("seed_oss", dict(head_dim=16)),
    "seed_oss, all biases": ("seed_oss", dict(attention_out_bias=True, mlp_bias=True)),
    "gpt_oss": ("gpt_oss", dict(**EXPERTS, rope_parameters=YARN | dict(truncate=False))),
    "gpt_oss, tied": (
        "gpt_oss",
        dict(**EXPERTS, rope_parameters=YARN, tie_word_embeddings=True, swiglu_limit=0.5),
    ),
}
# The routers here have logits up to 30 (`tiny.model_folder`); their rounding is that of the weights
# by which the experts' outputs are added up.
ROUTED = 10
every_family = pytest.mark.parametrize("name", FAMILIES)


def routed(name: str) -> int:
    return ROUTED if name.startswith("gpt_oss") else 1


def family_folder(path, name: str, seed: int = 0):
    family, fields = FAMILIES[name]
    return tiny.model_folder(path, family, seed, **{"num_hidden_layers": 3, **fields})


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    path = tmp_path_factory.mktemp("cache")
    rows = tiny.rows_cache(path / "rows", tiny.packed_rows(ROWS, LENGTH))
    return tiny.taught_cache(path / "taught", rows, tiny.llama_folder(path / "teacher", seed=9))


@torch.no_grad()
def packed_logits(folder, rows):
    """Transformers' logits of packed rows, by torch_ref's masks. Where there are routers, none is
    near a tie between the last expert that it chooses and the first that it does not."""
    model = torch_ref.model.load_model(str(folder), dtype="float32")
    margins = []

    def note(router, _, output):
        largest = output[0].sort(dim=-1, descending=True).values
        margins.append((largest[:, router.top_k - 1] - largest[:, router.top_k]).min().item())

    for key, module in model.named_modules():
        if key.endswith("router"):
            module.register_forward_hook(note)
    names = ("tokens", "segment_ids", "positions")
    inputs = (torch.tensor(rows[name]).long() for name in names)
    hidden = torch_ref.model.hidden_states(model, *inputs)
    assert min(margins, default=1.0) > 5e-4, margins
    return torch_ref.losses.logits(hidden, torch_ref.model.head(model))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "seed_oss", "gpt_oss"])
@pytest.mark.parametrize(
    "more",
    [{}, {"sliding_window": None}, {"use_sliding_window": True, "max_window_layers": 3}],
    ids=str,
)
def test_what_a_config_leaves_out_is_what_transformers_takes(family, more):
    """config.json with the sizes alone, and as transformers writes it in full."""
    if family in ("mistral", "gpt_oss"):
        more = {key: value for key, value in more.items() if key == "sliding_window"}
    if family == "seed_oss":
        more = {}  # no layer slides
    if family == "gpt_oss":
        more = {}  # layers slide whatever it says; without a window that is refused
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=32, num_hidden_layers=5)
    sizes |= {"num_attention_heads": 64, **more}
    config = transformers.AutoConfig.for_model(family, **sizes)
    name = type(transformers.AutoModelForCausalLM.from_config(config)).__name__
    whole = config.to_dict() | {"architectures": [name]}
    assert model_config(sizes | {"model_type": family}) == model_config(whole)


@every_family
def test_layers_and_logits_of_a_document_past_window_and_original_context(tmp_path, name):
    """One document of 300 tokens, transformers' own masks: past a window of 7, past 64 (YaRN) and
    past the context of 256."""
    folder = family_folder(tmp_path, name)
    tokens = np.random.default_rng(0).integers(3, tiny.VOCAB_SIZE, (1, 300)).astype(np.int32)
    rows = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
    rows["positions"] = np.arange(300, dtype=np.int32)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        theirs = model(torch.tensor(tokens).long(), output_hidden_states=True)
    ours = load_model(folder)
    found = ours.apply(**{k: jnp.asarray(v) for k, v in rows.items()}, hidden_layers=(0, 1))
    # An angle of 300 rad is known to 3e-5 in fp32.
    for layer, (got, expected) in enumerate(
        zip(found.layers, theirs.hidden_states[1:], strict=False)
    ):
        assert_close("layer", f"{name}, layer {layer}", got, expected, 5e-5)
    assert_close("logits", name, logits_of(folder, rows), theirs.logits, 5e-5)


@every_family
def test_logits_and_gradients_of_packed_rows(cache, tmp_path, name):
    folder = family_folder(tmp_path, name)
    rows = tiny.packed_rows(ROWS, LENGTH)
    tolerance = FP32 * routed(name)
    assert_close("logits", name, logits_of(folder, rows), packed_logits(folder, rows), tolerance)
    loss = LossConfig(chunk_size=16 * ROWS, ce_weight=0.3)
    batch = cache.read(range(ROWS))
    model = torch_ref.model.load_model(str(folder), dtype="float32")
    expected, sums = tiny.torch_gradients(model, batch, tiny.torch_task(loss), ROWS)
    expected = {key: gradient.clone() for key, gradient in expected.items()}
    value, got = jax_gradients(folder, batch, loss)
    assert_close(f"gradients, {name}", "loss", value, sums.loss / sums.count, LOSS_TOLERANCE)
    moved = [gradients_of_rounded_weights(model, batch, loss, draw) for draw in range(DRAWS)]
    assert got.keys() == expected.keys()
    for key, gradient in expected.items():
        furthest = max((each[key] - gradient).abs().max() for each in moved)
        condition = float(furthest / gradient.abs().max())
        assert condition < 1e-3, f"{name}, {key}: an expert was exchanged; choose another seed"
        tolerance = max(GRADIENT_TOLERANCE, 8 * condition)
        assert_close(f"gradients, {name}", key, got[key], gradient, tolerance)


DRAWS = 4  # one alone may leave a tensor of few entries where it was


def gradients_of_rounded_weights(
    model, batch, loss: LossConfig, draw: int
) -> dict[str, torch.Tensor]:
    """With each weight moved by −1, 0 or 1 unit in its last place, at random: how well the
    gradients are determined at all. That rounds each term of a sum once; a backend rounds the
    partial sums, too, in an order of its own for each vector width, and is up to 8 of these off."""
    generator, before = torch.Generator().manual_seed(draw), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 2.0**-23 * torch.randint(-1, 2, weight.shape, generator=generator))
    model.zero_grad()
    found = tiny.torch_gradients(model, batch, tiny.torch_task(loss), ROWS)[0]
    model.load_state_dict(before)
    return {key: gradient.clone() for key, gradient in found.items()}


@every_family
def test_the_export_is_the_familys_and_loads_in_silence(tmp_path, caplog, name):
    start = family_folder(tmp_path / "start", name)
    model, out = trained(load_model(start)), tmp_path / "out"
    write_folder(out, model, student=start, dtype="float32", card="Card")
    before, after = (json.loads((x / "config.json").read_text()) for x in (start, out))
    assert {k: v for k, v in after.items() if k not in CHANGED} == {
        k: v for k, v in before.items() if k not in CHANGED
    }
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True
        )
    assert not caplog.records and not any(info.values()), info
    assert type(theirs).__name__ == before["architectures"][0]
    rows = tiny.packed_rows(ROWS, LENGTH)
    tolerance, got = FP32 * routed(name), logits_of(out, rows)
    assert_close("exported folder", name, got, packed_logits(out, rows), tolerance)
    assert np.abs(got - logits_of(start, rows)).max() > 0.1


@every_family
def test_a_student_cut_from_it_is_the_same_model_in_both(tmp_path, name):
    """The first and the last of three layers, each of its own kind."""
    teacher = family_folder(tmp_path / "teacher", name)
    cut = FromTeacher(layers=[0, 2])
    ours = make_student(teacher, tmp_path / "ours", cut)
    theirs = torch_ref.student.cut_student(str(teacher), tmp_path / "theirs", cut)
    whole = load_model(teacher).config
    assert load_model(ours).config == load_model(theirs).config == whole.with_layers([0, 2])
    rows = tiny.packed_rows(ROWS, LENGTH)
    expected, tolerance = packed_logits(ours, rows), FP32 * routed(name)
    assert_close("student", name, logits_of(ours, rows), expected, tolerance)
    assert_close("student", f"{name}, torch_ref's", logits_of(theirs, rows), expected, tolerance)


@pytest.mark.parametrize(
    "name", ["qwen3, sliding, biases", "qwen2", "seed_oss, all biases", "gpt_oss", "mistral"]
)
def test_a_narrow_student_is_the_same_model_in_transformers(tmp_path, cache, name):
    """Neurons, dimensions and heads, sinks among them; an ordinary folder, by its config.json."""
    teacher = family_folder(tmp_path / "teacher", name)
    widths = dict(num_key_value_heads=1)
    if name != "gpt_oss":
        widths |= dict(intermediate_size=20, hidden_size=24)
    cut = FromTeacher(layers=[0, 2], **widths)
    ours = make_student(teacher, tmp_path / "ours", cut, cache=cache)
    config = transformers.AutoConfig.from_pretrained(ours)
    assert widths == {key: getattr(config, key) for key in widths}
    rows = tiny.packed_rows(ROWS, LENGTH)
    expected, tolerance = packed_logits(ours, rows), FP32 * routed(name)
    assert_close("narrow student", name, logits_of(ours, rows), expected, tolerance)


def mxfp4_folder(path, seed: int = 0, **fields):
    """A gpt-oss whose experts' matrices are random blocks and scales."""
    sizes = dict(hidden_size=32, intermediate_size=32, dtype="bfloat16")
    tiny.model_folder(path, "gpt_oss", seed, **{**FAMILIES["gpt_oss"][1], **sizes, **fields})
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(seed)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        count, rows, width = tensors.pop(key).shape
        shape = (count, width, rows // 32)
        tensors[f"{key}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        tensors[f"{key}_scales"] = rng.integers(121, 126, shape).astype(np.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_mxfp4_is_read_as_transformers_reads_it_and_exported_without(tmp_path, caplog):
    start, out = mxfp4_folder(tmp_path / "start"), tmp_path / "out"
    model = load_model(start)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(start, dtype="float32")
    ours = tiny.model_by_hf_name(model)
    expected = theirs.state_dict()
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        assert np.array_equal(ours[key], tensor.float().numpy()), key
    write_folder(out, model, student=start, dtype="bfloat16", card="Card")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True, dtype="float32"
        )
    assert not caplog.records and not any(info.values()), info
    for key in (key for key in ours if key.endswith(("gate_up_proj", "down_proj"))):
        assert np.array_equal(ours[key], again.state_dict()[key].numpy()), key
    rows = tiny.packed_rows(2, LENGTH)
    tolerance = FP32 * ROUTED
    assert_close("mxfp4", "logits", logits_of(start, rows), packed_logits(start, rows), tolerance)


def test_a_student_cut_from_mxfp4_is_the_same_model_in_both(tmp_path):
    """Ours keeps the bytes, torch_ref's has what they stand for."""
    teacher = mxfp4_folder(tmp_path / "teacher")
    cut = FromTeacher(layers=[1])
    ours = make_student(teacher, tmp_path / "ours", cut)
    theirs = torch_ref.student.cut_student(str(teacher), tmp_path / "theirs", cut)
    left, right = (load_model(folder) for folder in (ours, theirs))
    assert left.config == right.config
    left, right = (tiny.model_by_hf_name(model) for model in (left, right))
    assert all(np.array_equal(left[key], right[key]) for key in right)


def test_the_load_balancing_term_is_that_of_transformers(tmp_path):
    """Of one layer, where theirs, too, is of that layer alone; and without the factor k."""
    family, fields = FAMILIES["gpt_oss"]
    folder = tiny.model_folder(tmp_path, family, num_hidden_layers=1, **fields)
    rows = tiny.packed_rows(ROWS, LENGTH)
    inputs = (jnp.asarray(rows[name]) for name in ("tokens", "segment_ids", "positions"))
    load = load_model(folder).apply(*inputs).aux
    model = torch_ref.model.load_model(str(folder), dtype="float32")
    logits = []
    router = model.model.layers[0].mlp.router
    router.register_forward_hook(lambda *hooked: logits.append(hooked[2][0]))
    names = ("tokens", "segment_ids", "positions")
    with torch.no_grad():
        inputs = [torch.tensor(rows[name]).long() for name in names]
        torch_ref.model.hidden_states(model, *inputs)
        theirs = load_balancing_loss_func(tuple(logits), 4, 2, (inputs[1] > 0).long())
    assert_close("load balance", "term", 2 * load.balance(), theirs, 1e-5)
