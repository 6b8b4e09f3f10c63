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

from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache, Manifest, create, shard_file
from jax_distill.cache_test import cache_of, captured, folder_bytes, random_rows, small

# ---- refusals -----------------------------------------------------------------------------------


def test_a_temperature_that_is_not_stored_is_refused(tmp_path):
    """Case 22, the cache's part."""
    cache, _, _ = small(tmp_path)
    with pytest.raises(UserError, match=r"\[1.0, 2.0\].*got 4.0"):
        cache.read([0], temperature=4.0)


def test_more_of_the_k_than_stored_is_refused(tmp_path):
    cache, _, _ = small(tmp_path)
    with pytest.raises(UserError, match="read_top_k from 1 to the stored 5, got 6"):
        cache.read([0], top_k=6)


def test_a_row_beyond_the_cache_is_an_error_not_zeros(tmp_path):
    cache, _, _ = small(tmp_path)
    for row in (-1, 10):
        with pytest.raises(IndexError):
            cache.read([row])


def test_where_no_cache_is_the_refusal_says_how_to_write_one(tmp_path):
    with pytest.raises(UserError, match="jax_distill.teacher --config"):
        Cache.open(str(tmp_path / "nothing"))


@pytest.mark.parametrize("path", ["http://x/y", "az://bucket/cache", "s3://"])
def test_a_kind_of_path_that_caches_cannot_lie_on_is_refused_in_one_line(tmp_path, path):
    cache, _, _ = small(tmp_path)
    for touch in (Cache.open, lambda path: create(path, cache.manifest, 10)):
        with pytest.raises(UserError, match=f"expected a local folder, s3://.* got {path}; give"):
            touch(path)


@pytest.mark.parametrize("top_k", [51, 70000])
def test_a_k_above_the_vocabulary_or_the_format_is_refused(tmp_path, top_k):
    manifest = Manifest(
        sequence_length=4,
        shard_rows=1,
        vocab_size=50 if top_k == 51 else 80000,
        top_k=top_k,
        temperatures=(1.0,),
    )
    with pytest.raises(UserError, match="cache.top_k"):
        create(str(tmp_path), manifest, 1)


@pytest.mark.parametrize("below", ["", "/train"])
def test_a_place_that_is_no_folder_is_refused_before_anything_is_written(tmp_path, below):
    cache, _, _ = small(tmp_path / "a")
    (tmp_path / "file").write_text("t")
    with pytest.raises(UserError, match="expected cache.path to be a folder .*Not a directory"):
        create(f"{tmp_path}/file{below}", cache.manifest, 10)
    assert (tmp_path / "file").read_text() == "t"


CHANGES = {
    "teacher_fingerprint": ("u", "teacher_fingerprint: stored 't', wanted 'u'; set teacher.path"),
    "teacher_dtype": ("bfloat16", "teacher_dtype: .*; set --teacher.dtype float32, or choose"),
    "tokenizer_fingerprint": ("v", "tokenizer_fingerprint.*; set data.tokenizer"),
    "data": (
        {"packing": False, "split": "heldout", "max_rows": 9},
        "data.packing: stored True, wanted False, data.max_rows: .* "
        "set --data.packing true and set --data.max_heldout_rows null, or",
    ),
    "data_fingerprint": ("e", "data_fingerprint: stored 'd', wanted 'e'; set data.path"),
    "top_k": (6, "top_k: stored 5, wanted 6; set --cache.top_k 5, or choose another cache.path"),
    "temperatures": ((1.0, 3.0), r"temperatures: .*; set --cache.temperatures \[1.0,2.0\], or"),
    "shard_rows": (8, "shard_rows: stored 4, wanted 8; set --cache.shard_rows 4, or"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_old_cache_is_never_reused_for_another_teacher_tokenizer_or_data(tmp_path, name):
    """Case 36; and no refusal advises to delete a cache where an option would do."""
    data = {"packing": True, "split": "heldout", "max_rows": None}
    cache, _, _ = small(tmp_path, data=data, data_fingerprint="d", teacher_dtype="float32")
    before = folder_bytes(tmp_path)
    value, message = CHANGES[name]
    with pytest.raises(UserError, match=message) as caught:
        create(str(tmp_path), replace(cache.manifest, **{name: value}), cache.rows)
    assert "delete" not in str(caught.value)
    with pytest.raises(UserError, match="10 rows.*got 11; choose another cache.path"):
        create(str(tmp_path), cache.manifest, 11)
    assert folder_bytes(tmp_path) == before
    create(str(tmp_path), replace(cache.manifest, git_revision="newer"), cache.rows).close()
    assert folder_bytes(tmp_path) == before


def test_fewer_of_the_k_are_read_from_the_cache_that_is_there(tmp_path):
    cache, _, _ = small(tmp_path)
    with pytest.raises(UserError, match="set --cache.top_k 5 --cache.read_top_k 3, or"):
        create(str(tmp_path), replace(cache.manifest, top_k=3), cache.rows)


# ---- commits, kills, damage ---------------------------------------------------------------------


def test_a_shard_counts_only_once_it_is_committed(tmp_path):
    cache, _, _ = small(tmp_path)
    (tmp_path / "commits/000001.json").unlink()
    cache = Cache.open(str(tmp_path))
    assert not cache.complete
    cache.read([0, 3, 8])
    with pytest.raises(UserError, match="no commit of shard 1"):
        cache.read([4])
    with pytest.raises(UserError, match="2 of its 3 shards; re-run the command"):
        cache.require_complete()


def test_a_cache_resumed_after_torn_shards_is_byte_identical(tmp_path):
    """Case 33, without the kill: what a kill may leave is put there by hand. The last shard is a
    partial one: TensorStore would read what is there before it writes."""
    cache, _, _ = small(tmp_path / "a")
    small(tmp_path / "b")
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    for shard, name in ((1, "teacher_gap_steps"), (2, "tokens"), (2, "teacher_codes")):
        torn = tmp_path / "b" / shard_file(cache.manifest, name, shard)
        torn.write_bytes(torn.read_bytes()[:50])
        (torn.parent / f"{torn.name}.__lock").write_bytes(b"half")
        (tmp_path / f"b/commits/{shard:06d}.json").unlink(missing_ok=True)
    small(tmp_path / "b")
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


def test_a_cache_keeps_the_level_that_it_was_begun_with(tmp_path):
    """Else what another version began could not be resumed, or would end with other bytes."""
    cache, arrays, _ = small(tmp_path / "whole")
    for name, again in (("a", ()), ("b", (1, 2))):
        with create(str(tmp_path / name), cache.manifest, 10, level=9) as writer:
            for shard, first, last in writer.missing_shards():
                writer.write(shard, {key: x[first : last + 1] for key, x in arrays.items()})
        for shard in again:
            (tmp_path / name / f"commits/{shard:06d}.json").unlink()
    small(tmp_path / "b")
    files = folder_bytes(tmp_path / "a")
    assert folder_bytes(tmp_path / "b") == files
    assert b'"clevel":9' in files["tokens/zarr.json"]
    assert b'"clevel":9' not in folder_bytes(tmp_path / "whole")["tokens/zarr.json"]
    rows = [Cache.open(str(tmp_path / name)).read([9, 0]) for name in ("whole", "b")]
    np.testing.assert_array_equal(*(each.targets.logprobs for each in rows))


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
@pytest.mark.parametrize("name", ["teacher_gap_steps", "loss_mask"])
def test_a_damaged_shard_is_named_by_a_read(tmp_path, damage, name):
    """Case 34."""
    cache, _, _ = small(tmp_path)
    file = shard_file(cache.manifest, name, 1)
    DAMAGES[damage](tmp_path / file)
    cache = Cache.open(str(tmp_path))
    cache.read([0, 1, 2, 3, 8, 9])
    with pytest.raises(RunError, match=re.escape(file)):
        cache.read(range(10))


def cut_short(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize("change", [cut_short, lambda _: "{}", lambda _: "[]", lambda _: ""])
@pytest.mark.parametrize("name", ["manifest.json", "tokens/zarr.json"])
def test_a_damaged_description_is_named_and_what_the_message_says_repairs_it(
    tmp_path, name, change
):
    """Not as a full disk, and never as a traceback."""
    cache, _, _ = small(tmp_path)
    before = folder_bytes(tmp_path)
    file = tmp_path / name
    file.write_text(change(file.read_text()))
    for touch in (Cache.open, lambda path: create(path, cache.manifest, 10)):
        with pytest.raises(RunError, match=f"whole {name}|{name} .* to fit") as caught:
            touch(str(tmp_path))
        assert "make room" not in str(caught.value) and "\n" not in str(caught.value)
    if "delete that file" in str(caught.value):
        file.unlink()
        small(tmp_path)
        assert folder_bytes(tmp_path) == before


@pytest.mark.parametrize("change", [cut_short, lambda _: "{}", lambda _: "[]", lambda _: ""])
@pytest.mark.parametrize("name", ["commits/000001.json", "commits/head-000001.json"])
def test_a_damaged_commit_or_head_does_not_count_and_the_same_command_repairs_it(
    tmp_path, name, change
):
    small(tmp_path)
    before = folder_bytes(tmp_path)
    file = tmp_path / name
    file.write_text(change(file.read_text()))
    cache = Cache.open(str(tmp_path))
    assert not cache.complete
    with pytest.raises(UserError, match=f"{name} does not read.*; re-run the command"):
        cache.require_complete()
    small(tmp_path)
    assert folder_bytes(tmp_path) == before


def test_wrong_arrays_are_not_written(tmp_path):
    cache, arrays, _ = small(tmp_path / "a")
    with create(str(tmp_path / "b"), cache.manifest, 10) as writer:
        part = {name: each[:4] for name, each in arrays.items()}
        for bad in (
            {**part, "teacher_gaps": part["teacher_gaps"].astype(np.float32)},
            {**part, "tokens": part["tokens"][:3]},
            {name: each for name, each in part.items() if name != "teacher_count"},
            {**part, "tokens": part["tokens"] + np.int32(50)},
            {**part, "tokens": part["tokens"] - np.int32(50)},
            {**part, "teacher_indices": part["teacher_indices"] + np.uint16(46)},
            {**part, "teacher_gaps": part["teacher_gaps"] + np.float16(np.inf)},
        ):
            with pytest.raises(ValueError, match="expected"):
                writer.write(0, bad)
        assert len(writer.missing_shards()) == 3


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path):
    """Case 32: rows that two processes would both write are never lost, the second one stops."""
    cache, _, _ = small(tmp_path / "a")
    manifest = cache.manifest
    code = (
        "import sys\n"
        "from jax_distill.cache import Manifest, create\n"
        "from jax_distill.base.errors import UserError\n"
        "manifest = Manifest.parse(open(sys.argv[2], 'rb').read(), '')\n"
        "try:\n"
        "    create(sys.argv[1], manifest, 10)\n"
        "except UserError as error:\n"
        "    sys.exit(str(error))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "b"), str(tmp_path / "a/manifest.json")]
    with create(str(tmp_path / "b"), manifest, 10) as writer:
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 1
        assert f"in use by process {os.getpid()}" in result.stderr
        assert len(writer.missing_shards()) == 3
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_the_manifest_is_readable_json_and_reads_back(tmp_path):
    cache, _, _ = small(
        tmp_path, vocabulary={"b": 1, "a": 0}, data={"max_rows": 3}, data_fingerprint="d"
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["top_k"] == 5 and manifest["temperatures"] == [1.0, 2.0]
    assert list(manifest["vocabulary"]) == ["a", "b"]
    assert manifest["data_fingerprint"] == cache.manifest.data_fingerprint == "d"
    assert cache.manifest.temperatures == (1.0, 2.0)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(UserError, match="format 2 or 3 .*, got format 99; install"):
        Cache.open(str(tmp_path))


# ---- gaps beyond float16 ------------------------------------------------------------------------


def with_large_gaps(path: Path, temperatures: tuple[float, ...]):
    """A cache of one row whose position 2 has two logits 100,000 below the largest."""
    logits = np.random.default_rng(0).normal(0, 1, (1, 4, 6)).astype(np.float32)
    logits[0, 2, :2] -= 1e5
    arrays = random_rows(1, 4, 6) | captured(logits, 6, temperatures)
    manifest = Manifest(
        sequence_length=4, shard_rows=1, vocab_size=6, top_k=6, temperatures=temperatures
    )
    return cache_of(path, manifest, arrays)


def test_gaps_beyond_float16_are_counted(tmp_path):
    cache = with_large_gaps(tmp_path, (1.0, 4000.0))
    assert cache.commits[0].clamped_gaps == cache.clamped_gaps == cache.head.clamped_gaps == 2


def test_gaps_beyond_float16_are_refused_where_they_would_change_the_distribution(tmp_path):
    """At τ = 20000 a clamped entry has e^-3.3 of the probability of the largest."""
    message = "temperature 20000, got larger ones at row 0, position 2 .*leave that temperature"
    with pytest.raises(RunError, match=message):
        with_large_gaps(tmp_path, (1.0, 20000.0))
    assert not Cache.open(str(tmp_path)).commits
