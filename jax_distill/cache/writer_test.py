"""Refusals, commits, kills and damage: nothing that is missing, torn or another's is ever read."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_distill.cache import Manifest, Store, create, shard_file
from jax_distill.cache_test import folder_bytes, small
from jax_distill.config import Failure, Refusal

# ---- refusals -----------------------------------------------------------------------------------


def test_a_temperature_that_is_not_stored_is_refused(tmp_path):
    """Case 22, the store's part."""
    store, _, _ = small(tmp_path)
    with pytest.raises(Refusal, match=r"\[1.0, 2.0\].*got 4.0"):
        store.read([0], temperature=4.0)


def test_more_of_the_k_than_stored_is_refused(tmp_path):
    store, _, _ = small(tmp_path)
    with pytest.raises(Refusal, match="read_top_k from 1 to the stored 5, got 6"):
        store.read([0], top_k=6)


def test_a_row_beyond_the_store_is_an_error_not_zeros(tmp_path):
    store, _, _ = small(tmp_path)
    for row in (-1, 10):
        with pytest.raises(IndexError):
            store.read([row])


def test_where_no_store_is_the_refusal_says_how_to_write_one(tmp_path):
    with pytest.raises(Refusal, match="jax_distill.teacher --config"):
        Store.open(str(tmp_path / "nothing"))


@pytest.mark.parametrize("top_k", [51, 70000])
def test_a_k_above_the_vocabulary_or_the_format_is_refused(tmp_path, top_k):
    manifest = Manifest(
        sequence_length=4,
        shard_rows=1,
        vocab_size=50 if top_k == 51 else 80000,
        top_k=top_k,
        temperatures=(1.0,),
    )
    with pytest.raises(Refusal, match="cache.top_k"):
        create(str(tmp_path), manifest, 1)


@pytest.mark.parametrize("below", ["", "/train"])
def test_a_place_that_is_no_folder_is_refused_before_anything_is_written(tmp_path, below):
    store, _, _ = small(tmp_path / "a")
    (tmp_path / "file").write_text("t")
    with pytest.raises(Refusal, match="expected cache.path to be a folder .*Not a directory"):
        create(f"{tmp_path}/file{below}", store.manifest, 10)
    assert (tmp_path / "file").read_text() == "t"


CHANGES = {
    "teacher_fingerprint": ("u", "teacher_fingerprint: stored 't', wanted 'u'"),
    "tokenizer_fingerprint": ("v", "tokenizer_fingerprint"),
    "data": ({"packing": False, "sources": [1, 2]}, r"data.packing: stored True, wanted False"),
    "data_fingerprint": ("e", "data_fingerprint: stored 'd', wanted 'e'"),
    "top_k": (6, "top_k: stored 5, wanted 6"),
    "temperatures": ((1.0, 3.0), "temperatures.1: stored 2.0"),
    "shard_rows": (8, "shard_rows"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_old_store_is_never_reused_for_another_teacher_tokenizer_or_data(tmp_path, name):
    """Case 36."""
    data = {"packing": True, "sources": [1, 2]}
    store, _, _ = small(tmp_path, data=data, data_fingerprint="d")
    before = folder_bytes(tmp_path)
    value, message = CHANGES[name]
    with pytest.raises(Refusal, match=message):
        create(str(tmp_path), replace(store.manifest, **{name: value}), store.rows)
    with pytest.raises(Refusal, match="10 rows.*got 11"):
        create(str(tmp_path), store.manifest, 11)
    assert folder_bytes(tmp_path) == before
    create(str(tmp_path), replace(store.manifest, git_revision="newer"), store.rows).close()


# ---- commits, kills, damage ---------------------------------------------------------------------


def test_a_shard_counts_only_once_it_is_committed(tmp_path):
    store, _, _ = small(tmp_path)
    (tmp_path / "commits/000001.json").unlink()
    store = Store.open(str(tmp_path))
    assert not store.complete
    store.read([0, 3, 8])
    with pytest.raises(Refusal, match="no commit of shard 1"):
        store.read([4])
    with pytest.raises(Refusal, match="2 of its 3 shards"):
        store.require_complete()


def test_a_store_resumed_after_torn_shards_is_byte_identical(tmp_path):
    """Case 33, without the kill: what a kill may leave is put there by hand. The last shard is a
    partial one: TensorStore would read what is there before it writes."""
    store, _, _ = small(tmp_path / "a")
    small(tmp_path / "b")
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    for shard, name in ((1, "teacher_gaps"), (2, "tokens"), (2, "teacher_indices")):
        torn = tmp_path / "b" / shard_file(store.manifest, name, shard)
        torn.write_bytes(torn.read_bytes()[:50])
        (torn.parent / f"{torn.name}.__lock").write_bytes(b"half")
        (tmp_path / f"b/commits/{shard:06d}.json").unlink(missing_ok=True)
    (tmp_path / "b/writer.lock").write_text("12345")
    small(tmp_path / "b")
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0x10
    file.write_bytes(bytes(data))


DAMAGES = {
    "deleted": lambda file: file.unlink(),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "bit flipped": flip,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["teacher_gaps", "loss_mask"])
def test_a_damaged_shard_is_named_by_a_read(tmp_path, damage, name):
    """Case 34."""
    store, _, _ = small(tmp_path)
    file = shard_file(store.manifest, name, 1)
    DAMAGES[damage](tmp_path / file)
    store = Store.open(str(tmp_path))
    store.read([0, 1, 2, 3, 8, 9])
    with pytest.raises(Failure, match=re.escape(file)):
        store.read(range(10))


def cut_short(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize("change", [cut_short, lambda _: "{}", lambda _: "[]", lambda _: ""])
@pytest.mark.parametrize("name", ["manifest.json", "commits/000001.json", "tokens/zarr.json"])
def test_a_damaged_description_is_named_and_the_cure_mends_it(tmp_path, name, change):
    """Not as a full disk, and never as a traceback."""
    store, _, _ = small(tmp_path)
    before = folder_bytes(tmp_path)
    file = tmp_path / name
    file.write_text(change(file.read_text()))
    kind = Refusal if name == "manifest.json" and change("x") == "{}" else Failure  # its version
    for touch in (Store.open, lambda path: create(path, store.manifest, 10)):
        with pytest.raises(kind) as told:
            touch(str(tmp_path))
        assert "make room" not in str(told.value) and "\n" not in str(told.value)
        if kind is Failure:
            assert re.search(f"got.*{name}|whole {name}", str(told.value))
    if "delete that file" in str(told.value):
        file.unlink()
        small(tmp_path)
        assert folder_bytes(tmp_path) == before


def test_wrong_arrays_are_not_written(tmp_path):
    store, arrays, _ = small(tmp_path / "a")
    with create(str(tmp_path / "b"), store.manifest, 10) as writer:
        part = {name: each[:4] for name, each in arrays.items()}
        for bad in (
            {**part, "teacher_gaps": part["teacher_gaps"].astype(np.float32)},
            {**part, "tokens": part["tokens"][:3]},
            {name: each for name, each in part.items() if name != "teacher_count"},
        ):
            with pytest.raises(ValueError, match="expected"):
                writer.write(0, bad)
        assert len(writer.missing_shards()) == 3


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path):
    """Case 32: rows that two processes would both write are never lost, the second one stops."""
    store, _, _ = small(tmp_path / "a")
    manifest = store.manifest
    code = (
        "import sys\n"
        "from jax_distill.cache import Manifest, create\n"
        "from jax_distill.config import Refusal\n"
        "manifest = Manifest.from_json(open(sys.argv[2], 'rb').read())\n"
        "try:\n"
        "    create(sys.argv[1], manifest, 10)\n"
        "except Refusal as refusal:\n"
        "    sys.exit(str(refusal))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "b"), str(tmp_path / "a/manifest.json")]
    with create(str(tmp_path / "b"), manifest, 10) as writer:
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 1
        assert f"got process {os.getpid()}" in result.stderr
        assert len(writer.missing_shards()) == 3
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_the_manifest_is_readable_json_and_reads_back(tmp_path):
    store, _, _ = small(
        tmp_path, vocabulary={"b": 1, "a": 0}, data={"max_rows": 3}, data_fingerprint="d"
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["top_k"] == 5 and manifest["temperatures"] == [1.0, 2.0]
    assert list(manifest["vocabulary"]) == ["a", "b"]
    assert manifest["data_fingerprint"] == store.manifest.data_fingerprint == "d"
    assert store.manifest.temperatures == (1.0, 2.0)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(Refusal, match="format version 1, got 99"):
        Store.open(str(tmp_path))
