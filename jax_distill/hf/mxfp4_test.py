"""MXFP4 tensors: decoded by the definition, loaded as what they stand for, refused where broken."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_distill import hf, sharding
from jax_distill.base.errors import UserError
from jax_distill.hf import mxfp4, weights
from jax_distill.hf_test import RAW, parameters
from jax_distill.model.mxfp4 import Packed, decode

GPT_OSS = {key: value for key, value in RAW.items() if key not in ("rope_theta",)} | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 8,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def packed_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Of `GPT_OSS`, the experts' matrices as random blocks and scales."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for key, slot in hf.weight_table(hf.model_config(GPT_OSS)).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            count, rows, width = slot.shape
            shape = (count, width, rows // 32)
            tensors[f"{key}_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
            tensors[f"{key}_scales"] = rng.integers(110, 130, shape).astype(np.uint8)
        else:
            tensors[key] = rng.normal(size=slot.shape).astype(np.float32)
    return tensors


def write(folder, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    save_file(tensors, folder / "model.safetensors")
    return folder


def definition(blocks, scales):
    """[E,in,out] in float64: sign, two exponent bits, one of mantissa (E2M1); exponent E8M0."""
    experts, width, groups, _ = blocks.shape
    out = np.empty((experts, groups * 32, width))
    for e, o, g, byte in np.ndindex(blocks.shape):
        for half, code in enumerate((blocks[e, o, g, byte] & 15, blocks[e, o, g, byte] >> 4)):
            exponent, mantissa = int(code >> 1 & 3), int(code & 1)
            size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
            value = (-size if code & 8 else size) * 2.0 ** (int(scales[e, o, g]) - 127)
            out[e, g * 32 + 2 * byte + half, o] = value
    return out


def test_every_number_is_the_definitions_and_any_slice_of_it(tmp_path):
    tensors = packed_tensors()
    write(tmp_path / "model", tensors)
    files = dict.fromkeys(tensors, tmp_path / "model/model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.1.mlp.experts.{name}"
        expected = definition(tensors[f"{key}_blocks"], tensors[f"{key}_scales"])
        shape = mxfp4.packed_shape(files, key)
        whole = mxfp4.read_packed(files, key, (slice(None),) * 3)
        assert whole.dtype == ml_dtypes.bfloat16 and whole.shape == shape == expected.shape
        assert np.array_equal(whole.astype(np.float64), expected)
        cut = (slice(1, 3), slice(3, 21), slice(8, 16))
        assert np.array_equal(mxfp4.read_packed(files, key, cut), whole[cut])


@pytest.mark.parametrize("streamed", [2**30, 0])
def test_a_packed_folder_is_the_model_that_it_stands_for_and_is_saved_unpacked(
    tmp_path, monkeypatch, streamed
):
    """Read whole, and layer by layer."""
    monkeypatch.setattr(weights, "STREAMED", streamed)
    tensors = packed_tensors()
    model = hf.load_model(write(tmp_path / "packed", tensors), param_dtype=ml_dtypes.bfloat16)
    (out,) = hf.save_weights(tmp_path / "out", model, model.config)
    plain = load_file(out)
    assert plain.keys() == hf.weight_table(model.config).keys()
    for key, tensor in plain.items():
        if key in tensors:
            assert np.array_equal(tensor, tensors[key].astype(ml_dtypes.bfloat16)), key
        else:
            expected = definition(tensors[f"{key}_blocks"], tensors[f"{key}_scales"])
            assert np.array_equal(tensor.astype(np.float64), expected), key
    again = hf.load_model(write(tmp_path / "plain", plain), param_dtype=ml_dtypes.bfloat16)
    ours, theirs = parameters(model), parameters(again)
    assert all(np.array_equal(ours[path], theirs[path]) for path in theirs)


def test_the_device_decodes_every_code_at_every_scale_to_the_same_bits():
    """Both halves of a byte; the smallest are subnormal in bf16."""
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.arange(mxfp4.LARGEST_SCALE + 1, dtype=np.uint8)
    blocks = np.broadcast_to(blocks, (len(scales), 3, 16, 16))
    scales = np.broadcast_to(scales[:, None, None], blocks.shape[:-1])
    got = np.asarray(jax.jit(decode)(Packed(jnp.asarray(blocks), jnp.asarray(scales))))
    expected = mxfp4.decode(blocks, scales)
    assert np.isfinite(expected.astype(np.float32)).all()
    assert np.array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-4), (jnp.bfloat16, 2**-5)])
def test_a_model_that_stays_packed_is_the_decoded_one(tmp_path, monkeypatch, dtype, tolerance):
    """The weights are, bit for bit (above); sums may be added up in another order, and the weights
    of experts, exponentials of the routers' logits, multiply that rounding by some ten. Also read
    layer by layer, and split over two devices."""
    folder = write(tmp_path / "model", packed_tensors())
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, GPT_OSS["vocab_size"], (2, 40)), jnp.int32)
    inputs = (
        tokens,
        jnp.ones_like(tokens),
        jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32), (2, 40)),
    )

    def hidden(**options):
        model = hf.load_model(folder, param_dtype=dtype, compute_dtype=dtype, **options)
        return np.asarray(nnx.jit(lambda model: model.hidden_states(*inputs))(model), np.float32)

    def assert_alike(packed, plain):
        largest = np.abs(plain).max()
        assert np.isfinite(plain).all() and largest > 0.1
        np.testing.assert_allclose(packed, plain, rtol=0, atol=tolerance * largest)

    assert_alike(hidden(packed_experts=True), hidden())
    monkeypatch.setattr(weights, "STREAMED", 0)
    mesh = sharding.make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    placed = lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape)  # noqa: E731
    on_mesh = dict(shardings=placed, row_sharding=sharding.batch_sharding(mesh))
    assert_alike(hidden(packed_experts=True, **on_mesh), hidden(**on_mesh))


def test_what_cannot_stay_packed_is_refused(tmp_path):
    tensors = packed_tensors()
    model = hf.load_model(write(tmp_path / "packed", tensors), packed_experts=True)
    held = parameters(model)["layers", "mlp", "experts", "gate_up_proj_scales"]
    assert held.dtype == np.uint8 and held.shape == (3, 3, 64, 1)  # L, E, 2F, D/32
    with pytest.raises(ValueError, match="decoded experts to save"):
        hf.save_weights(tmp_path / "saved", model, model.config)
    plain = hf.load_model(tmp_path / "packed")
    (tmp_path / "plain").mkdir()
    hf.save_weights(tmp_path / "plain", plain, plain.config)
    (tmp_path / "plain/config.json").write_text(json.dumps(GPT_OSS))
    with pytest.raises(UserError, match="experts in MXFP4 in .*plain.*packed_experts false"):
        hf.load_model(tmp_path / "plain", packed_experts=True)
    (tmp_path / "plain/config.json").write_text(json.dumps(RAW))
    with pytest.raises(UserError, match="a model with experts.*packed_experts false"):
        hf.load_model(tmp_path / "plain", packed_experts=True)


def broken(tensors, key):
    name = f"model.layers.0.mlp.experts.{key}"
    if key.endswith("_scales"):
        del tensors[name]
    elif key.endswith("_blocks"):
        tensors[name] = tensors[name][..., :8].copy()
    else:
        tensors[f"{name}_scales"] = np.full_like(tensors[f"{name}_scales"], 255)


GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


@pytest.mark.parametrize(
    "key,decoded,packed",
    [
        ("gate_up_proj_scales", f"the tensor '{GATE_UP}'", f"the tensor '{GATE_UP}_scales'"),
        ("down_proj_blocks", "blocks' U8 .*re-download", "blocks' of shape .*U8.*re-download"),
        ("down_proj", f"finite numbers in '{DOWN}'", f"at most 252 in '{DOWN}_scales'.*got 255"),
    ],
)
def test_a_part_that_is_missing_misshaped_or_overflows_is_refused(tmp_path, key, decoded, packed):
    tensors = packed_tensors()
    broken(tensors, key)
    write(tmp_path / "model", tensors)
    with pytest.raises(UserError, match=decoded):
        hf.load_model(tmp_path / "model")
    with pytest.raises(UserError, match=packed):
        hf.load_model(tmp_path / "model", packed_experts=True)
