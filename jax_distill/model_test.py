"""The decoder by itself: documents kept apart, padding, causality, remat, dtypes, placement.

What its numbers must be is proven against transformers in parity_tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_distill.base.errors import UserError
from jax_distill.devices import QUICK_COMPILE
from jax_distill.model import (
    Decoder,
    ModelConfig,
    RopeConfig,
    count_parameters,
    train_flops_per_token,
)

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
)
BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
ON_CPU = ["grouped", "reference"]
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


def decoder(config: ModelConfig = CONFIG, **options) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0), **options)


@quick_jit
def logits(model, tokens, segment_ids, positions):
    hidden = model.hidden_states(tokens, segment_ids, positions)
    return hidden @ model.lm_head_weight().astype(hidden.dtype).T


def packed(*documents: list[int], length: int) -> dict[str, jax.Array]:
    """One row of the documents in order, then padding."""
    row = np.zeros((3, 1, length), np.int32)
    start = 0
    for segment, document in enumerate(documents, start=1):
        where = slice(start, start + len(document))
        row[0, 0, where] = document
        row[1, 0, where] = segment
        row[2, 0, where] = range(len(document))
        start += len(document)
    return {
        name: jnp.asarray(array)
        for name, array in zip(("tokens", "segment_ids", "positions"), row, strict=True)
    }


A, B = [5, 9, 2, 44, 13, 7, 30], [8, 8, 51, 3, 17]


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
@pytest.mark.parametrize("implementation", ON_CPU)
def test_a_document_in_a_pack_has_the_logits_it_has_alone(implementation, rope_type):
    """Case 14. The dynamic type too, whose frequencies depend on a document's length."""
    config = ModelConfig(
        **{**vars(CONFIG), "rope": RopeConfig(rope_type, factor=2.0), "max_position_embeddings": 4}
    )
    model = decoder(config, attention=implementation)
    both = logits(model, **packed(A, B, length=16))[0]
    for document, where in ((A, slice(0, 7)), (B, slice(7, 12))):
        alone = logits(model, **packed(document, length=len(document)))[0]
        np.testing.assert_allclose(both[where], alone, atol=1e-5)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_a_token_changed_in_one_document_moves_no_logit_of_another(implementation):
    """Case 14, bit for bit."""
    model = decoder(attention=implementation)
    before = logits(model, **packed(A, B, length=16))[0]
    after = logits(model, **packed([60, *A[1:]], B, length=16))[0]
    assert np.all(before[7:] == after[7:])
    assert np.abs(before[:7] - after[:7]).max(axis=-1).min() > 1e-3


@pytest.mark.parametrize("implementation", ON_CPU)
def test_no_token_sees_a_later_one(implementation):
    model = decoder(attention=implementation)
    before = logits(model, **packed(A, length=7))[0]
    after = logits(model, **packed([*A[:-1], 60], length=7))[0]
    assert np.all(before[:-1] == after[:-1])


@pytest.mark.parametrize("implementation", ON_CPU)
def test_padding_is_finite_forward_and_backward(implementation):
    model = decoder(attention=implementation)
    graphdef, params = nnx.split(model)
    rows = {
        name: jnp.concatenate([row, jnp.zeros_like(row)])
        for name, row in packed(A, length=16).items()
    }

    def total(params):
        return nnx.merge(graphdef, params).hidden_states(**rows).sum()

    value, gradients = quick_jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_ids_outside_the_vocabulary_stay_finite():
    """Case 13: masked cells may hold anything."""
    model = decoder()
    rows = packed([5, 1000, -3, 7], length=4)
    assert np.isfinite(logits(model, **rows)).all()


@pytest.mark.parametrize("remat", ["layer", "dots"])
def test_remat_changes_no_number_but_recomputes(remat):
    rows = packed(A, B, length=16)

    def loss_and_gradients(remat):
        graphdef, params = nnx.split(decoder(remat=remat))

        def total(params):
            return jnp.square(nnx.merge(graphdef, params).hidden_states(**rows)).sum()

        program = quick_jit(jax.value_and_grad(total))
        return program(params), str(jax.make_jaxpr(jax.grad(total))(params))

    (plain, plain_text), (saved, text) = loss_and_gradients("none"), loss_and_gradients(remat)
    for left, right in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    assert "remat" in text and "remat" not in plain_text


def test_an_unknown_remat_is_refused_by_name():
    with pytest.raises(UserError, match="got 'full'"):
        decoder(remat="full")


def test_bf16_compute_keeps_fp32_parameters_and_fp32_statistics():
    model = decoder(compute_dtype=jnp.bfloat16)
    rows = packed(A, length=8)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {np.dtype("float32")}
    text = str(jax.make_jaxpr(lambda: model.hidden_states(**rows))())
    assert logits(model, **rows).dtype == jnp.bfloat16
    for statistic in (" exp ", " rsqrt ", " cos "):
        lines = [line for line in text.splitlines() if statistic in line]
        assert lines and all(":f32[" in line for line in lines), statistic
    matmuls = [line for line in text.splitlines() if " dot_general[" in line]
    assert matmuls and not any(":f32[2,16]" in line for line in matmuls)


def test_bf16_parameters():
    model = decoder(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    assert model.lm_head_weight().dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(logits(model, **packed(A, length=8)), np.float32)).all()


def test_a_tied_model_has_one_table():
    model = decoder(ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": True}))
    paths = {path[0] for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert paths == {"embed_tokens", "layers", "norm"}
    assert model.lm_head_weight() is model.embed_tokens.weight[...]


def test_every_parameter_says_its_axes_and_whether_it_decays():
    model = decoder(ModelConfig(**{**vars(CONFIG), **BIASES}))
    known = {"layers", "vocab", "embed", "heads", "kv_heads", "mlp", None}
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert len(flat) == 3 + 2 + 7 + 7
    for path, param in flat.items():
        assert len(param.logical_axes) == len(param.shape), path
        assert set(param.logical_axes) <= known, path
        assert (param.logical_axes[0] == "layers") == (path[0] == "layers"), path
        is_norm = any("norm" in name for name in path)
        assert param.weight_decay == (path[-1] == "weight" and not is_norm), path


def test_of_experts_the_matrices_decay_and_biases_and_sinks_do_not():
    routed = {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_sinks": True}
    config = ModelConfig(**{**vars(CONFIG), **BIASES, **routed, "qk_norm": True})
    flat = dict(nnx.to_flat_state(nnx.state(decoder(config), nnx.Param)))
    assert len(flat) == 3 + 2 + 2 + 8 + 1 + 2 + 4
    matrices = ("gate_up_proj", "down_proj")
    for path, param in flat.items():
        assert len(param.logical_axes) == len(param.shape), path
        is_norm = any("norm" in name for name in path)
        decays = path[-1] in matrices or (path[-1] == "weight" and not is_norm)
        assert param.weight_decay == decays, path
    dense = 6 * (2 * (2 * 32 * 48 + 2 * 3 * 32 * 48 + 3 * 32) + 61 * 32)
    assert train_flops_per_token(config, 24) - 6 * 2 * 32 * 24 == dense


def test_sharded_parameters_and_rows_give_the_same_hidden_states():
    """Heads, MLP and vocabulary split four ways (two kv heads two ways), rows two ways."""
    model = decoder()
    rows = {name: jnp.tile(row, (2, 1)) for name, row in packed(A, B, length=16).items()}
    mesh = jax.make_mesh((2, 2, 2), ("data", "a", "b"), axis_types=(AxisType.Auto,) * 3)
    table = {"heads": ("a", "b"), "mlp": ("a", "b"), "vocab": ("a",), "kv_heads": ("a",)}
    table["vocab"] = None  # 61 words do not divide
    graphdef, params = nnx.split(model)

    def place(param):
        axes = [table.get(name) for name in param.logical_axes]
        return param.replace(jax.device_put(param[...], NamedSharding(mesh, PartitionSpec(*axes))))

    is_param = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    placed = nnx.merge(graphdef, jax.tree.map(place, params, is_leaf=is_param))
    split = NamedSharding(mesh, PartitionSpec("data"))
    rows_placed = {name: jax.device_put(row, split) for name, row in rows.items()}
    np.testing.assert_allclose(logits(placed, **rows_placed), logits(model, **rows), atol=1e-5)


def test_two_models_of_one_config_compile_once():
    """jit compares the graphdef: a config, dtypes and names, no object identity."""
    first, second = (nnx.split(decoder())[0] for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != nnx.split(decoder(remat="layer"))[0]


def test_layer_types_are_one_a_layer_and_known():
    assert CONFIG.layer_types == ("full_attention",) * 2
    assert CONFIG.with_layers([1]).num_hidden_layers == 1
    with pytest.raises(UserError, match="expected 2 layer_types, .*got 1"):
        ModelConfig(**{**vars(CONFIG), "layer_types": ("full_attention",)})
    with pytest.raises(UserError, match="got 'linear_attention'"):
        ModelConfig(**{**vars(CONFIG), "layer_types": ("full_attention", "linear_attention")})
    mixed = {**vars(CONFIG), "layer_types": ("full_attention", "sliding_attention")}
    with pytest.raises(UserError, match="expected a sliding_window .*got none"):
        ModelConfig(**mixed)
    config = ModelConfig(**(mixed | {"sliding_window": 3}))
    assert config.with_layers([1]).kinds == ("sliding_attention",)


def test_apply_gives_the_outputs_of_the_layers_asked_for():
    """Against models cut after each layer: the final norm of a layer's output is their hidden."""
    config = ModelConfig(**{**vars(CONFIG), "num_hidden_layers": 3, "layer_types": ()})
    model, rows = decoder(config), packed(A, B, length=16)
    output = quick_jit(lambda m: m.apply(**rows, hidden_layers=(2, 0)))(model)
    np.testing.assert_array_equal(
        output.hidden, quick_jit(lambda m: m.hidden_states(**rows))(model)
    )
    assert output.layers.shape == (2, *output.hidden.shape)
    for layer, found in zip((2, 0), output.layers, strict=True):
        cut = decoder(config.with_layers(range(layer + 1)))
        params = nnx.state(model)
        params["layers"] = jax.tree.map(lambda x, n=layer + 1: x[:n], params["layers"])
        nnx.update(cut, params)
        hidden = quick_jit(lambda m: m.hidden_states(**rows))(cut)
        np.testing.assert_allclose(model.norm(found[0])[None], hidden, atol=1e-5)
    assert output.aux == ()
    assert model.apply(**rows).layers.shape == (0, *output.hidden.shape)


@pytest.mark.parametrize("layers", [(3,), (-1,), (0, 0)])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(ValueError, match="hidden_layers from 0 to 1"):
        decoder().layer_slots(layers)


def test_counted_parameters_and_flops_are_the_formula():
    tied = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": True})
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    assert count_parameters(tied) == 61 * 32 + 2 * (layer + 2 * 32) + 32
    assert count_parameters(CONFIG) == count_parameters(tied) + 61 * 32
    leaves = jax.tree.leaves(nnx.state(decoder(), nnx.Param))
    assert count_parameters(CONFIG) == sum(leaf.size for leaf in leaves)
    expected = 6 * (2 * layer + 61 * 32) + 6 * 2 * 32 * 24
    assert train_flops_per_token(CONFIG, 24) == expected
    windowed = {**vars(CONFIG), "sliding_window": 6, "layer_types": ("sliding_attention",) * 2}
    seen = sum(min(t, 6) for t in range(1, 25)) / 24  # keys of a query, on average
    found = train_flops_per_token(ModelConfig(**windowed), 24) - 6 * (2 * layer + 61 * 32)
    # As T/2 stands for (T + 1)/2: w/2T keys fewer.
    assert found == pytest.approx(12 * 2 * 32 * (seen - 6 / 48))
