"""A narrower student against its definition, the teacher with the rest at 0; and what importance
is, from its formulas in float64."""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_distill import hf, student
from jax_distill.base.errors import UserError
from jax_distill.config import Config, FromTeacher, StudentConfig, TeacherConfig
from jax_distill.importance import layer_importance, most_important, width_importance
from jax_distill.model import Decoder, count_parameters
from jax_distill.student.command import parameter_count
from jax_distill.teacher_test import hf_folder, manifest, model_config, random_model, single_rows
from jax_distill.teacher_test import write as write_cache

LENGTH, ROWS, DEPTH = 12, 3, 3
SIZES = dict(
    num_hidden_layers=DEPTH,
    num_attention_heads=6,
    num_key_value_heads=3,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    rms_norm_eps=1e-12,  # the one part of a norm that √(D/D') does not correct
)
CUTS = {
    "intermediate_size": FromTeacher(intermediate_size=20, layers=[0, 2]),
    "num_key_value_heads": FromTeacher(num_key_value_heads=2, layers=[0, 2]),
    "hidden_size": FromTeacher(hidden_size=24, layers=[0, 2]),
    "all": FromTeacher(intermediate_size=7, num_key_value_heads=1, hidden_size=9, layers=[1, 2]),
}


def flat(model: Decoder) -> dict[str, nnx.Param]:
    found = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): param for path, param in found}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A folder whose biases and norms are not those of a fresh model."""
    folder = hf_folder(tmp_path_factory.mktemp("teacher"), **SIZES)
    model = hf.load_model(folder)
    for number, (path, param) in enumerate(flat(model).items()):
        if "bias" in path or "norm" in path:
            key = jax.random.key(number)
            param[...] = param[...] + 0.3 * jax.random.normal(key, param.shape)
    hf.save_weights(folder, model, model.config)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    place = tmp_path_factory.mktemp("cache") / "c"
    return write_cache(place, single_rows(ROWS, LENGTH), random_model(), manifest(LENGTH))


@jax.jit
def logits(model: Decoder, batch) -> jax.Array:
    hidden = model.hidden_states(batch.tokens, batch.segment_ids, batch.positions)
    return hidden @ model.lm_head_weight().T


def zeroed(model: Decoder, kept: student.measure.Kept) -> Decoder:
    """The teacher of these layers, all that does not stay at 0."""
    config, layers = model.config, np.array(kept.layers)
    fewer = config.with_layers(kept.layers)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(fewer, rngs=nnx.Rngs(0))))
    values = {path: np.array(param[...]) for path, param in flat(model).items()}
    values = {p: v[layers] if p.startswith("layers.") else v for p, v in values.items()}
    down, out = "layers.mlp.down_proj", "layers.self_attn.o_proj"
    for layer in range(len(layers)):
        if kept.neurons is not None:
            gone = np.setdiff1d(np.arange(config.intermediate_size), kept.neurons[layer])
            values[f"{down}.weight"][layer][:, gone] = 0
        if kept.kv_groups is not None:
            gone = np.setdiff1d(np.arange(config.num_key_value_heads), kept.kv_groups[layer])
            by_group = values[f"{out}.weight"][layer].reshape(config.hidden_size, 3, -1)
            by_group[:, gone] = 0
    if kept.hidden is not None:
        gone = np.setdiff1d(np.arange(config.hidden_size), kept.hidden)
        values["embed_tokens.weight"][:, gone] = 0
        for name in (down, out):
            values[f"{name}.weight"][:, gone] = 0
            values[f"{name}.bias"][:, gone] = 0
    state = {
        path: nnx.Param(jnp.asarray(values[".".join(map(str, path))]))
        for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    return nnx.merge(graphdef, nnx.from_flat_state(state))


@pytest.mark.parametrize("name", CUTS)
def test_a_narrow_student_is_the_teacher_with_the_rest_at_0(teacher, cache, tmp_path, name):
    cut = CUTS[name]
    narrowed, layers = student.student_shape(hf.model_config(hf.read_config(teacher)), cut)
    kept = student.measure.choose(teacher, narrowed, layers, cut, cache=cache)
    out = student.make_student(teacher, tmp_path / "out", cut, cache=cache)
    ours, whole = hf.load_model(out), hf.load_model(teacher)
    for key, value in cut.widths.items():
        assert getattr(ours.config, key) == value
    assert ours.config.head_dim == whole.config.head_dim
    batch = cache.read(range(ROWS), targets=False)
    got, expected = (
        np.asarray(logits(model, batch))[batch.segment_ids > 0]
        for model in (ours, zeroed(whole, kept))
    )
    # fp32, sums in another order: a few hundred roundings of numbers as large as the largest.
    np.testing.assert_allclose(got, expected, atol=2**-16 * np.abs(expected).max())
    assert np.abs(expected - np.asarray(logits(whole, batch))[batch.segment_ids > 0]).max() > 0.1


def test_importance_of_widths_is_its_definition(teacher, cache):
    """Each neuron's and each group's contribution as a vector of its own, in float64."""
    model = hf.load_model(teacher)
    found = width_importance(model, cache, np.arange(ROWS))
    config = model.config
    graphdef, stacked = nnx.split(model.layers)
    batch = cache.read(range(ROWS), targets=False)
    real = (batch.segment_ids > 0).reshape(-1)
    inputs = model.layer_inputs(batch.segment_ids, batch.positions)
    x, hidden = model.embed(batch.tokens), []

    def rms(vectors: np.ndarray) -> np.ndarray:
        return np.sqrt((np.float64(vectors) ** 2).mean(axis=0))

    layers = [jax.tree.map(lambda leaf, n=n: leaf[n], stacked) for n in range(DEPTH)]
    for number, weights in enumerate(layers):
        layer = nnx.merge(graphdef, weights)
        here = inputs._replace(kind=inputs.kind[number])
        normed = layer.input_layernorm(x)
        heads = np.float64(layer.self_attn.mixed(normed, here))[real].reshape(-1, 3, 2 * 8)
        part = np.float64(layer.self_attn.o_proj.weight[...]).reshape(config.hidden_size, 3, -1)
        added = np.linalg.norm(np.einsum("ngi,dgi->ngd", heads, part), axis=-1)
        np.testing.assert_allclose(found.kv_groups[number], rms(added), rtol=1e-5)
        middle = x + layer.self_attn(normed, here)
        inner = layer.post_attention_layernorm(middle)
        gate, up = (np.float64(p(inner)) for p in (layer.mlp.gate_proj, layer.mlp.up_proj))
        active = (gate / (1 + np.exp(-gate)) * up)[real]
        down = np.float64(layer.mlp.down_proj.weight[...])
        added = np.linalg.norm(active[:, None, :] * down[None], axis=1)
        np.testing.assert_allclose(found.neurons[number], rms(added), rtol=1e-5)
        x, _ = layer(x, here)
        hidden += [rms(np.asarray(normed)[real]), rms(np.asarray(inner)[real])]
    hidden.append(rms(np.asarray(model.norm(x))[real]))
    np.testing.assert_allclose(found.hidden, hidden, rtol=1e-5)


def test_importance_by_kl_is_that_of_models_without_the_layer(teacher, cache):
    model = hf.load_model(teacher)
    found = layer_importance(model, cache, np.arange(ROWS), by="kl", chunk_size=4)
    batch = cache.read(range(ROWS), targets=False)

    def log_p(model: Decoder) -> np.ndarray:
        z = np.float64(logits(model, batch))[batch.mask][:, : cache.manifest.vocab_size]
        z -= z.max(axis=-1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))

    whole = log_p(model)
    for layer in range(DEPTH):
        others = [other for other in range(DEPTH) if other != layer]
        without = log_p(zeroed(model, student.measure.Kept(others)))
        expected = (np.exp(whole) * (whole - without)).sum(axis=-1).mean()
        np.testing.assert_allclose(found[layer], expected, rtol=1e-4)


def test_one_rule_says_what_a_number_of_parameters_decides():
    """Layers, unless they are named; then the MLPs, in steps of 64."""
    whole = model_config(num_hidden_layers=10, intermediate_size=640)

    def shape(**cut):
        narrowed, layers = student.student_shape(whole, FromTeacher(**cut))
        return narrowed.with_layers(layers)

    narrow = dict(intermediate_size=128, num_key_value_heads=1, hidden_size=16)
    only_widths = shape(**narrow)
    assert only_widths.num_hidden_layers == 10 and only_widths.num_attention_heads == 2
    size = count_parameters(only_widths.with_layers(range(4)))
    assert shape(parameters=size, **narrow) == only_widths.with_layers(range(4))
    for width in (64, 320):
        size = count_parameters(shape(layers=[0, 9], intermediate_size=width))
        assert shape(layers=[0, 9], parameters=size).intermediate_size == width
    assert shape(layers=[0, 9], parameters=size - 1).intermediate_size == 256
    assert shape(layers=[0, 9], parameters=10 * size).intermediate_size == 640
    least = count_parameters(shape(layers=[0, 9], intermediate_size=64))
    with pytest.raises(UserError, match=f"at least {least:,} for 2 layers with 64 MLP neurons"):
        shape(layers=[0, 9], parameters=20_000)
    with pytest.raises(UserError, match="hidden_size from 1 to the teacher's 32, got 33; lower it"):
        shape(hidden_size=33)


def test_a_number_of_parameters_may_be_written_short():
    assert [*map(parameter_count, ("3.2e9", "2E6", "17"))] == [3_200_000_000, 2_000_000, 17]
    for wrong in ("1.5", "1.25e1", "0e3", "-1e3", "nan", "1e999"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number above 0"):
            parameter_count(wrong)


def test_what_experts_have_no_meaning_for_is_refused_by_name():
    whole = model_config(num_local_experts=4, num_experts_per_tok=2, attention_sinks=True)
    for name, value in (("intermediate_size", 16), ("hidden_size", 16)):
        with pytest.raises(UserError, match=f"expected {name} .* for a model with experts, got 16"):
            student.student_shape(whole, FromTeacher(**{name: value}))
    size = count_parameters(whole)
    fits, layers = student.student_shape(whole, FromTeacher(layers=[0], parameters=size))
    assert fits == whole and layers == [0]
    with pytest.raises(UserError, match="layers or .parameters for a model with experts, got both"):
        student.student_shape(whole, FromTeacher(layers=[0], parameters=1000))
    narrowed, _ = student.student_shape(whole, FromTeacher(num_key_value_heads=1))
    assert (narrowed.num_attention_heads, narrowed.num_key_value_heads) == (2, 1)


def test_the_command_measures_once_and_says_what_stays(teacher, cache, tmp_path, capsys):
    size = count_parameters(model_config(**SIZES | dict(num_hidden_layers=2, hidden_size=24)))
    words = ["--teacher", str(teacher), "--out", str(tmp_path / "s"), "--parameters", str(size)]
    words += ["--hidden_size", "24"]
    with pytest.raises(UserError, match="expected --importance CACHE, whose rows .*, got none"):
        student.main(words)
    words += ["--importance", cache.path, "--importance_by", "kl", "--rows", "2"]
    student.main(words)
    said = capsys.readouterr().out
    best = layer_importance(hf.load_model(teacher), cache, np.arange(2), by="kl")
    assert f"kept: --student.from_teacher.layers '{most_important(best, 2)}'" in said
    assert "kept: 24 of 32 hidden dimensions, " in said and f"has {size:,} parameters" in said
    student.main(words)
    said = capsys.readouterr().out
    assert said.startswith("kept ") and "importance" not in said
    student.main([*words, "--rows", "3"])
    assert "wrote" in capsys.readouterr().out
    raw = json.loads((tmp_path / "s/config.json").read_text())
    assert (raw["hidden_size"], raw["head_dim"]) == (24, 8)


def test_a_run_prepares_a_narrow_student_from_its_own_rows(teacher, cache, tmp_path):
    cut = FromTeacher(parameters=34_000, num_key_value_heads=1, importance_by="cosine")
    config = Config(
        teacher=TeacherConfig(path=str(teacher)),  # bf16, its default
        student=StudentConfig(from_teacher=cut),
    )
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="expected a cache whose rows show what is important"):
        student.prepare(config, tmp_path / "run", teacher, trained=False)
    start, inside = student.prepare(config, tmp_path / "run", teacher, trained=False, cache=cache)
    assert start == inside and hf.load_model(inside).config.num_key_value_heads == 1
    planned = student.planned_architecture(config).model
    assert hf.load_model(inside).config == dataclasses.replace(planned)
    before = {path.name: path.stat().st_mtime_ns for path in inside.iterdir()}
    student.prepare(config, tmp_path / "run", teacher, trained=True)  # as a resumed run does
    assert before == {path.name: path.stat().st_mtime_ns for path in inside.iterdir()}
