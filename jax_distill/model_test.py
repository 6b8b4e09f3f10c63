"""The decoder by itself: documents kept apart, padding, causality, remat, dtypes, placement.

What its numbers must be is proven against transformers in parity_tests.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_distill.config import Refusal
from jax_distill.model import Decoder, ModelConfig, RopeConfig
from jax_distill.model.attention import attention, fast_attention

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
ON_CPU = ["products", "xla"]
# Many small programs: compiling them well would take longer than running them badly.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


def decoder(config: ModelConfig = CONFIG, **knobs) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0), **knobs)


@quick_jit
def logits(model, tokens, segment_ids, positions):
    hidden = model.hidden_states(tokens, segment_ids, positions)
    return hidden @ model.lm_head_weight().astype(hidden.dtype).T


def packed(*documents: list[int], length: int) -> dict[str, jax.Array]:
    """One row of the documents in order, then padding."""
    row = np.zeros((3, 1, length), np.int32)
    start = 0
    for segment, document in enumerate(documents, start=1):
        place = slice(start, start + len(document))
        row[0, 0, place] = document
        row[1, 0, place] = segment
        row[2, 0, place] = range(len(document))
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
    for document, place in ((A, slice(0, 7)), (B, slice(7, 12))):
        alone = logits(model, **packed(document, length=len(document)))[0]
        np.testing.assert_allclose(both[place], alone, atol=1e-5)


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


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_implementations_of_attention_agree(groups, dtype):
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 9, 4, 8), "key": (2, 9, groups, 8), "value": (2, 9, groups, 8)}
    inputs = {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9], jnp.int32)

    def squares(inputs, implementation):
        mixed = attention(**inputs, segment_ids=segment_ids, implementation=implementation)
        assert mixed.dtype == dtype
        return jnp.square(mixed.astype(jnp.float32)).sum()

    program = quick_jit(jax.value_and_grad(squares), static_argnums=1)
    with jax.numpy_dtype_promotion("standard"):  # jax.nn's own arithmetic in bf16
        ours, theirs = (program(inputs, name) for name in ON_CPU)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        left, right = (np.asarray(x, np.float32) for x in (left, right))
        np.testing.assert_allclose(left, right, atol=tolerance * np.abs(right).max())


def test_large_logits_do_not_leak_across_documents():
    """The mask is added to the logits: it must outweigh any of them."""
    query = jnp.full((1, 4, 1, 8), 1e4, jnp.float32)
    value = jnp.asarray([1.0, 1.0, 5.0, 5.0])[None, :, None, None] * jnp.ones((1, 4, 1, 8))
    segment_ids = jnp.asarray([[1, 1, 2, 2]], jnp.int32)
    mixed = attention(query, query, value, segment_ids, implementation="products")
    assert np.array_equal(mixed, value)


@pytest.mark.parametrize(
    "device,dtype,length,head_dim,expected",
    [
        (("cpu", None), jnp.bfloat16, 8, 64, "products"),
        (("gpu", "9.0"), jnp.bfloat16, 8, 64, "cudnn"),
        (("gpu", "8.0"), jnp.float16, 8, 128, "cudnn"),
        (("gpu", "9.0"), jnp.float32, 8, 64, "xla"),
        (("gpu", "9.0"), jnp.bfloat16, 7, 64, "xla"),
        (("gpu", "9.0"), jnp.bfloat16, 8, 192, "xla"),
        (("gpu", "9.0"), jnp.bfloat16, 8, 36, "xla"),
        (("gpu", "7.5"), jnp.bfloat16, 8, 64, "xla"),
        (("gpu", "gfx942"), jnp.bfloat16, 8, 64, "xla"),
        (("tpu", None), jnp.bfloat16, 8, 64, "xla"),
    ],
)
def test_cudnn_is_chosen_where_its_kernel_takes_the_input(
    monkeypatch, device, dtype, length, head_dim, expected
):
    platform, capability = device
    fake = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [fake])
    assert fast_attention(dtype, length, head_dim) == expected


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
    with pytest.raises(Refusal, match="got 'full'"):
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
    products = [line for line in text.splitlines() if " dot_general[" in line]
    assert products and not any(":f32[2,16]" in line for line in products)


def test_bf16_parameters():
    model = decoder(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    assert model.lm_head_weight().dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(logits(model, **packed(A, length=8)), np.float32)).all()


def test_a_tied_model_has_one_table():
    model = decoder(ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": True}))
    paths = {path[0] for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert paths == {"embed_tokens", "layers", "norm"}
    assert model.lm_head_weight() is model.embed_tokens.weight[...]


def test_every_parameter_names_its_axes():
    model = decoder(ModelConfig(**{**vars(CONFIG), "attention_bias": True, "mlp_bias": True}))
    known = {"layers", "vocab", "embed", "heads", "kv_heads", "mlp", None}
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert len(flat) == 3 + 2 + 7 + 7
    for path, param in flat.items():
        assert len(param.logical_axes) == len(param.shape), path
        assert set(param.logical_axes) <= known, path
        assert (param.logical_axes[0] == "layers") == (path[0] == "layers"), path


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
