"""A model folder's fingerprint: its index names files beside it, or is refused by name."""

import json

import pytest

from jax_distill.base.errors import UserError
from jax_distill.cache import teacher_fingerprint
from jax_distill.cache.fingerprint import FILE_NAME, WEIGHTS
from jax_distill.hf.tensor_files import FILE_NAME as READERS_RULE

HOSTILE = {
    "not JSON": "{",
    "a list": "[]",
    "no weight_map": "{}",
    "nesting": "[" * 100_000,
    "a list as weight_map": '{"weight_map": ["a"]}',
    "a number for a name": '{"weight_map": {"x": 3}}',
    "a path": '{"weight_map": {"x": "../secret"}}',
    "an absolute path": '{"weight_map": {"x": "/etc/hostname"}}',
    "only dots": '{"weight_map": {"x": ".."}}',
    "two lines": '{"weight_map": {"x": "a\\nb"}}',
    "no name": '{"weight_map": {"x": ""}}',
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", WEIGHTS)
def test_an_index_that_names_no_files_beside_it_is_refused_in_one_line(tmp_path, name, kind):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("outside")
    (folder / "config.json").write_text("{}")
    (folder / f"{name}.index.json").write_text(HOSTILE[kind])
    with pytest.raises(UserError, match=rf"^expected .*{name}.index.json, got .*; .*$"):
        teacher_fingerprint(folder)


def test_what_the_index_lists_is_part_of_the_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"1")
    with pytest.raises(UserError, match="expected .*model-2.safetensors, got nothing there"):
        teacher_fingerprint(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"2")
    before = teacher_fingerprint(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"3")
    assert teacher_fingerprint(tmp_path) != before


def test_names_are_those_that_the_reader_of_weights_takes():
    """`cache` does not import `hf`: the rule stands in both."""

    assert FILE_NAME.pattern == READERS_RULE.pattern
