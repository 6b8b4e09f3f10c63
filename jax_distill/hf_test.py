"""Hugging Face folders without torch: config.json, the weight table both ways, refusals, placement,
memory, GGUF. Equality with transformers is proven in parity_tests."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jax_distill import hf
from jax_distill.base.errors import UserError

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def random_tensors(raw=RAW, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    table = hf.weight_table(hf.model_config(raw))
    return {key: rng.normal(size=slot.shape).astype(dtype) for key, slot in table.items()}


def write_folder(folder, raw=RAW, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def parameters(model) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(p[...]) for path, p in nnx.to_flat_state(nnx.state(model))}


# ---- config.json --------------------------------------------------------------------------------


# ---- weights ------------------------------------------------------------------------------------


def test_the_table_has_every_tensor_of_a_llama():
    table = hf.weight_table(hf.model_config(RAW | {"attention_bias": True}))
    assert len(table) == 3 + 3 * (9 + 4)
    slot = table["model.layers.2.self_attn.k_proj.weight"]
    assert slot == (("layers", "self_attn", "k_proj", "weight"), 2, (16, 32))
    assert table["lm_head.weight"] == (("lm_head", "weight"), None, (61, 32))
    assert "lm_head.weight" not in hf.weight_table(
        hf.model_config(RAW | {"tie_word_embeddings": True})
    )


@pytest.mark.parametrize("max_shard_bytes", [10**9, 9000])
def test_saved_and_loaded_again_every_tensor_is_the_same(tmp_path, max_shard_bytes):
    tensors = random_tensors()
    model = hf.load_model(write_folder(tmp_path / "in", tensors=tensors))
    out = write_folder(tmp_path / "out")
    files = hf.save_weights(out, model, model.config, max_shard_bytes=max_shard_bytes)
    assert sorted(files) == sorted(path for path in out.iterdir() if path.name != "config.json")
    written = {k: v for f in files if f.suffix == ".safetensors" for k, v in load_file(f).items()}
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[key], tensors[key]) for key in tensors)
    again = parameters(hf.load_model(out))
    assert all(np.array_equal(again[path], leaf) for path, leaf in parameters(model).items())


def test_a_sharded_write_respects_the_limit_and_removes_an_earlier_form(tmp_path):
    folder = write_folder(tmp_path, tensors=random_tensors())
    model = hf.load_model(folder)
    hf.save_weights(folder, model, model.config, max_shard_bytes=9000)
    assert not (folder / "model.safetensors").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in random_tensors().values())
    for name in set(index["weight_map"].values()):
        tensors = load_file(folder / name)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 9000
    hf.save_weights(folder, model, model.config)
    assert [path.name for path in folder.glob("*model*")] == ["model.safetensors"]


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_a_difference_between_config_and_file_is_refused_naming_the_key(tmp_path, change):
    tensors = random_tensors()
    key = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[key]
    if change == "extra":
        key = "model.layers.3.mlp.up_proj.weight"
        tensors[key] = np.zeros((48, 32), np.float32)
    if change == "shape":
        tensors[key] = tensors[key].T.copy()
    if change == "dtype":
        tensors[key] = tensors[key].astype(np.int8)
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        hf.load_model(write_folder(tmp_path, tensors=tensors))


def test_known_dead_buffers_are_tolerated(tmp_path):
    tensors = random_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    hf.load_model(write_folder(tmp_path, tensors=tensors))


def test_the_head_of_a_tied_model_is_tolerated_only_where_it_is_the_embedding(tmp_path):
    raw = RAW | {"tie_word_embeddings": True}
    tensors = random_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    model = hf.load_model(write_folder(tmp_path, raw, tensors))
    assert np.array_equal(model.lm_head_weight(), tensors["lm_head.weight"])
    tensors["lm_head.weight"][60, 31] += 1
    with pytest.raises(UserError, match="lm_head"):
        hf.load_model(write_folder(tmp_path, raw, tensors))


def test_a_broken_file_and_a_wrong_index_are_refused(tmp_path):
    tensors = random_tensors()
    folder = write_folder(tmp_path, tensors=tensors)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        hf.load_model(folder)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00001-of-00001"):
        hf.load_model(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        hf.load_model(folder)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_every_stored_dtype_is_cast_once(tmp_path, stored, wanted):
    tensors = random_tensors(dtype=stored)
    model = hf.load_model(write_folder(tmp_path, tensors=tensors), param_dtype=wanted)
    leaf = np.asarray(model.layers.mlp.up_proj.weight[...])
    assert leaf.dtype == wanted
    for layer in range(3):
        expected = tensors[f"model.layers.{layer}.mlp.up_proj.weight"].astype(wanted)
        assert np.array_equal(leaf[layer], expected)


def test_parameters_of_another_config_are_not_saved(tmp_path):
    model = hf.load_model(write_folder(tmp_path / "in", tensors=random_tensors()))
    with pytest.raises(UserError, match="lm_head"):
        hf.save_weights(tmp_path, model, hf.model_config(RAW | {"tie_word_embeddings": True}))


def test_without_weights_a_seed_is_needed_and_decides_everything(tmp_path):
    folder = write_folder(tmp_path)
    with pytest.raises(UserError, match="safetensors"):
        hf.load_model(folder)
    one, same, other = (parameters(hf.load_model(folder, seed=seed)) for seed in (1, 1, 2))
    path = ("layers", "self_attn", "q_proj", "weight")
    assert all(np.array_equal(one[p], same[p]) for p in one)
    assert not np.array_equal(one[path], other[path])
    assert one[path].std() == pytest.approx(0.02, rel=0.1)
    assert np.all(one[("norm", "weight")] == 1)


# ---- placement and memory -----------------------------------------------------------------------


@pytest.mark.parametrize("as_state,with_weights", [(True, True), (False, True), (False, False)])
def test_each_leaf_lies_where_its_sharding_says(tmp_path, as_state, with_weights):
    """Function or State, loaded or random: the same numbers as on one device."""
    folder = write_folder(tmp_path, tensors=random_tensors() if with_weights else None)
    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    axes = {"embed": "fsdp", "mlp": "tensor", "heads": "tensor"}

    def sharding(param):
        return NamedSharding(mesh, PartitionSpec(*map(axes.get, param.logical_axes)))

    one = hf.load_model(folder, seed=0)
    wanted = sharding
    if as_state:
        is_param = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
        wanted = jax.tree.map(sharding, nnx.state(one, nnx.Param), is_leaf=is_param)
    model = hf.load_model(folder, seed=0, shardings=wanted)
    leaf = model.layers.mlp.down_proj.weight[...]
    assert leaf.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert leaf.addressable_shards[0].data.shape == (3, 16, 12)
    single, split = parameters(one), parameters(model)
    assert all(np.array_equal(single[path], split[path]) for path in single)


MEMORY = """
import pathlib, sys
from jax_distill import hf
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
hf.load_model(sys.argv[1])  # the machinery
before = peak()
hf.load_model(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_loading_takes_the_memory_of_the_model_and_of_one_leaf(tmp_path):
    """Never two models: the peak of a fresh process, above what loading a tiny model took."""
    raw = RAW | dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    raw |= dict(num_attention_heads=8, num_key_value_heads=8, vocab_size=4096)
    config = hf.model_config(raw)
    shapes = {key: slot.shape for key, slot in hf.weight_table(config).items()}
    tensors = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    largest = 12 * 512 * 2048 * 4
    big = write_folder(tmp_path / "big", raw, tensors)
    small = write_folder(tmp_path / "small", tensors=random_tensors())
    program = [sys.executable, "-c", MEMORY, str(small), str(big)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert size * 0.9 < int(done.stdout) < size + 1.5 * largest < 1.6 * size


# ---- places -------------------------------------------------------------------------------------


def test_a_folder_is_itself_and_what_is_nowhere_is_refused(tmp_path):
    assert hf.local_folder(tmp_path) == tmp_path
    (tmp_path / "notes.txt").write_text("")
    for place in (tmp_path / "no" / "such", tmp_path / "notes.txt", "a/b/c", "./a/b", "name"):
        with pytest.raises(UserError, match="expected a model folder"):
            hf.local_folder(place)
    with pytest.raises(UserError, match="missing"):
        hf.local_folder(tmp_path / "model.gguf")


def test_a_hub_id_without_the_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"jax-distill\[hub\]"):
        hf.local_folder("owner/name")
