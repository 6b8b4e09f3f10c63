"""Weights of a folder: what lies there is loaded or refused by name, never passed over."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_distill import hf
from jax_distill.base.errors import RunError, UserError
from jax_distill.hf import folder as hf_folder
from jax_distill.hf.tensor_files import write_tensors
from jax_distill.hf_test import RAW, parameters, random_tensors, write_folder

TIED = RAW | {"tie_word_embeddings": True}


def refusal(folder, **options) -> str:
    with pytest.raises(UserError) as refused:
        hf.load_model(folder, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "name",
    """pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json
    model-00001-of-00002.safetensors weights.safetensors MODEL.SAFETENSORS consolidated.00.pth
    model.pt last.ckpt flax_model.msgpack tf_model.h5 model-q8_0.gguf model.safetensors.part
    params.npz""".split(),
)
def test_weights_of_another_kind_are_refused_by_name_not_replaced_by_random_ones(tmp_path, name):
    """Case 40, and its kind: any file that holds weights."""
    folder = write_folder(tmp_path / "model")
    (folder / name).write_bytes(b"weights")
    assert name in refusal(folder, seed=0)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("what", ["a folder", "a link to nothing", "empty", "a git-lfs pointer"])
def test_what_is_no_weight_file_under_its_name_is_refused(tmp_path, name, what):
    folder = write_folder(tmp_path / "model")
    if what == "a folder":
        (folder / name).mkdir()
    elif what == "a link to nothing":
        (folder / name).symlink_to(tmp_path / "nothing")
    else:
        (folder / name).write_text("" if what == "empty" else "version https://git-lfs\noid 1\n")
    assert name in refusal(folder, seed=0)


def test_weights_without_a_tensor_are_no_model_without_weights(tmp_path):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert "tensors in" in refusal(folder, seed=0)
    save_file({}, folder / "model.safetensors")
    assert "model.safetensors, got none" in refusal(folder, seed=0)


def test_a_random_start_says_so_in_one_line(tmp_path, capsys):
    hf.load_model(write_folder(tmp_path / "model"), seed=3)
    assert (
        capsys.readouterr().out == f"{tmp_path}/model has no weights: they are random, of seed 3\n"
    )
    hf.load_model(write_folder(tmp_path / "model", tensors=random_tensors()), seed=3)
    assert capsys.readouterr().out == ""


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    """transformers would add it; a leftover adapter_config.json alone says nothing."""
    folder = write_folder(tmp_path / "model", tensors=random_tensors())
    (folder / "adapter_config.json").write_text("{}")
    hf.load_model(folder)
    save_file(random_tensors(), folder / "adapter_model.safetensors")
    assert "adapter_model.safetensors; merge it" in refusal(folder)


def test_a_tied_model_whose_file_has_only_the_head_loads(tmp_path):
    """Case 48."""
    tensors = random_tensors(TIED)
    whole = hf.load_model(write_folder(tmp_path / "whole", TIED, tensors))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    model = hf.load_model(write_folder(tmp_path / "head", TIED, tensors))
    expected = parameters(whole)
    got = parameters(model)
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[path], expected[path]) for path in got)
    assert "embed_tokens" in refusal(write_folder(tmp_path / "untied", RAW, tensors))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    assert "'lm_head.weight' of shape (61, 32)" in refusal(
        write_folder(tmp_path / "short", TIED, tensors)
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, "bfloat16"])
def test_numbers_that_are_not_finite_are_refused_by_tensor(tmp_path, value, dtype):
    tensors = random_tensors(dtype=np.dtype(dtype))
    assert hf.load_model(write_folder(tmp_path / "whole", tensors=tensors))
    for key in ("model.layers.2.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        broken = {name: tensor.copy() for name, tensor in tensors.items()}
        broken[key].reshape(-1)[-1] = value
        assert f"{key!r} of" in refusal(write_folder(tmp_path / "broken", tensors=broken))


def test_numbers_beyond_the_wanted_dtype_are_refused_and_fit_a_larger_one(tmp_path):
    tensors = random_tensors()
    tensors["model.norm.weight"][3] = 1e30
    folder = write_folder(tmp_path / "model", tensors=tensors)
    assert "infinity as float16" in refusal(folder, param_dtype=np.float16)
    hf.load_model(folder)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "{outside}", "below/x.safetensors", "..\\x", "a\0b", "", "..", 5],
)
def test_an_index_names_files_beside_it_and_nothing_else(tmp_path, name):
    folder = write_folder(tmp_path / "model")
    save_file(random_tensors(), tmp_path / "outside.safetensors")
    if isinstance(name, str):
        name = name.format(outside=tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(random_tensors(), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names of files beside" in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"weight_map": []}', "\xff", "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(text, "latin-1")
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim"])
def test_sizes_are_held_against_the_tensors_before_anything_is_allocated(tmp_path, key):
    folder = write_folder(tmp_path / "model", RAW | {"head_dim": 8}, random_tensors())
    for size in (2**31, 2**63, 4 * RAW.get(key, 8)):
        (folder / "config.json").write_text(json.dumps(RAW | {key: size}))
        line = refusal(folder, seed=0)
        assert key in line or "tensor 'model.layers.1" in line or "of shape" in line, line


def test_a_full_disk_ends_in_one_line_and_leaves_nothing_half_written(small_disk):
    tensors = {f"{i}": np.ones((2**20,), np.float32) for i in range(4)}
    shapes = {key: value.shape for key, value in tensors.items()}
    for limit in (10**9, 2**22):
        folder = small_disk / str(limit)
        with pytest.raises(RunError, match="expected to write .*make room there"):
            write_tensors(folder, shapes, tensors.get, itemsize=4, max_shard_bytes=limit)
        for path in folder.iterdir():  # whole ones only
            load_file(path)


def test_a_hub_model_without_safetensors_is_no_model_without_weights(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    fetched = write_folder(tmp_path / "snapshot")
    listed = ["config.json", "pytorch_model.bin"]
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(fetched))
    monkeypatch.setattr(hub, "list_repo_files", lambda _: listed)
    with pytest.raises(UserError, match=r"owner/name .*got pytorch_model\.bin"):
        hf.local_folder("owner/name")
    listed.remove("pytorch_model.bin")
    assert hf.local_folder("owner/name") == fetched
    listed[:] = ["pytorch_model.bin"]
    save_file(random_tensors(), fetched / "model.safetensors")
    assert hf.local_folder("owner/name") == fetched


@pytest.mark.parametrize(
    "path", ["runs/x", "./x", "../x", "~/x", "/a/b", "here/x", "x.gguf/y", "a b/c", "", "a\\b/c"]
)
def test_what_looks_like_a_path_is_never_looked_up_on_the_hub(path, tmp_path, monkeypatch):
    def never(_):
        raise AssertionError("asked the hub")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "x.gguf").mkdir()
    monkeypatch.setattr(hf_folder, "_snapshot", never)
    with pytest.raises(UserError, match="expected teacher.path to be a model folder, a .gguf file"):
        hf.local_folder(path, key="teacher.path")
