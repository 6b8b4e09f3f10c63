"""What is read is what was committed, where it was committed: damage of every file is refused."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache, create, integrity, shard_file
from jax_distill.cache.documents import Commit, Head, head_key
from jax_distill.cache.fingerprint import vocabulary_fingerprint
from jax_distill.cache.location import Folder
from jax_distill.cache.manifest import digest
from jax_distill.cache_test import folder_bytes, small, vocabulary
from jax_distill.data.tokenizer import Tokenizer, train_tokenizer

VOCABULARY = vocabulary(50)


def cache_in(path: Path) -> Cache:
    fingerprint = vocabulary_fingerprint(VOCABULARY)
    return small(path, vocabulary=VOCABULARY, tokenizer_fingerprint=fingerprint)[0]


def open_whole(path: Path) -> Cache:
    cache = Cache.open(str(path))
    cache.require_complete()
    return cache


# ---- shard files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["teacher_codes", "tokens"])
def test_two_swapped_shard_files_are_refused_by_name(tmp_path, name):
    """Each is whole, and of the right array: crc32c has nothing to say."""
    cache = cache_in(tmp_path)
    files = [tmp_path / shard_file(cache.manifest, name, shard) for shard in (0, 1)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    Cache.open(str(tmp_path)).read(range(10))  # reads without an error
    with pytest.raises(
        RunError, match=f"{name}/c/0/0.* .rows 0 to 3.*000000.json there and re-run"
    ):
        open_whole(tmp_path)


def test_what_was_found_right_is_not_read_again_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(integrity, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(integrity, "SETTLED_SECONDS", -1e9)
    read = []
    hashed = Folder.digest
    monkeypatch.setattr(Folder, "digest", lambda self, key: read.append(key) or hashed(self, key))
    cache = cache_in(tmp_path / "cache")
    files = [shard_file(cache.manifest, name, s) for name in cache._arrays for s in range(3)]
    for expected in (files, [], []):
        read.clear()
        open_whole(tmp_path / "cache")
        assert sorted(read) == sorted(expected)
    file = tmp_path / "cache" / files[4]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RunError, match=files[4]):
        open_whole(tmp_path / "cache")
    assert read == [files[4]]
    for bad in ("{", "[]", '{"files": 3}', "[" * 100_000):
        for memory in (tmp_path / "user").rglob("*.json"):
            memory.write_text(bad)
        with pytest.raises(RunError, match=files[4]):
            open_whole(tmp_path / "cache")


def test_a_file_that_may_still_change_under_the_same_stamp_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(integrity, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(integrity, "SETTLED_SECONDS", 1e9)
    cache_in(tmp_path / "cache")
    open_whole(tmp_path / "cache")
    (memory,) = (tmp_path / "user").rglob("*.json")
    assert json.loads(memory.read_text())["files"] == {}


def test_files_of_two_arrays_swapped_are_refused_by_a_read_too(tmp_path):
    """Whole chunks of the same dtype and shape, which crc32c has nothing against."""
    cache = cache_in(tmp_path / "cache")
    codes, steps = (
        Path(cache.path) / shard_file(cache.manifest, name, 0)
        for name in ("teacher_codes", "teacher_gap_steps")
    )
    swapped = codes.read_bytes(), steps.read_bytes()
    steps.write_bytes(swapped[0]), codes.write_bytes(swapped[1])
    with pytest.raises(RunError, match="expected ids below .*audit .* --verify names") as refusal:
        Cache.open(cache.path).read([0])
    assert "\n" not in str(refusal.value)


# ---- metadata -----------------------------------------------------------------------------------


def test_no_flipped_bit_of_any_metadata_file_is_read_as_truth(tmp_path):
    """200 of them: refused in one line, or (an older head) of no account. Never silently other
    rows, never a traceback."""
    cache_in(tmp_path / "whole")
    whole = folder_bytes(tmp_path / "whole")
    names = sorted(name for name in whole if name.endswith(".json"))
    assert len(names) == 1 + 10 + 3 + 2
    rng = random.Random(7)
    for trial in range(200):
        name = names[trial % len(names)]
        damaged = bytearray(whole[name])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        (tmp_path / "whole" / name).write_bytes(bytes(damaged))
        if name == head_key(0):
            open_whole(tmp_path / "whole")
        else:
            with pytest.raises((UserError, RunError)) as caught:
                open_whole(tmp_path / "whole")
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500
        (tmp_path / "whole" / name).write_bytes(whole[name])
    open_whole(tmp_path / "whole")


def test_a_shape_that_lost_rows_is_refused(tmp_path):
    cache_in(tmp_path)
    file = tmp_path / "tokens/zarr.json"
    assert (text := file.read_text()).count("[10,12]") == 1
    file.write_text(text.replace("[10,12]", "[8,12]"))
    with pytest.raises(
        RunError, match="whole tokens/zarr.json .* does not fit the manifest.*shape"
    ):
        Cache.open(str(tmp_path))


HOSTILE = {
    "deep": b"[" * 200_000,
    "huge number": b'{"format_version": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "not finite": b'{"format_version": NaN}',
    "true": b"true",
    "a list": b"[1]",
    "a string for a number": b'{"format_version": "2"}',
    "true for a number": b'{"format_version": true}',
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(
    "name", ["manifest.json", "commits/000001.json", "commits/head-000001.json"]
)
def test_hostile_json_ends_in_one_line_that_names_the_file(tmp_path, name, kind):
    cache_in(tmp_path)
    (tmp_path / name).write_bytes(HOSTILE[kind])
    with pytest.raises((UserError, RunError), match=name) as caught:
        open_whole(tmp_path)
    assert "\n" not in str(caught.value)


CHANGES = [
    ("largest_token", 50),
    ("largest_token", True),
    ("smallest_token", -1),
    ("smallest_token", 50),
    ("tokens", 49),
    ("tokens", 1.0),
    ("targets", -1),
    ("clamped_gaps", 1 << 20),
    ("last_row", 6),
    ("shard", 2),
    ("first_row", False),
]


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_a_commit_is_checked_by_type_and_range(tmp_path, field, value):
    """With a hash that is right: what another program, or a bug, may have written."""
    cache = cache_in(tmp_path)
    content = json.loads((tmp_path / "commits/000001.json").read_text())
    del content["sha256"]
    options = dict(key="commits/000001.json", manifest=cache.manifest, rows=10)
    for changed, is_right in ((content, True), (content | {field: value}, False)):
        text = json.dumps(changed | {"sha256": digest(changed)}).encode()
        if is_right:
            assert Commit.parse(text, **options) == cache.commits[1]
        else:
            with pytest.raises(ValueError, match=f"{field}: expected|that of shard"):
                Commit.parse(text, **options)


@pytest.mark.parametrize("change", [{"tokens": 3}, {"largest_token": 7}, {"metadata": {}}])
def test_a_head_that_does_not_count_its_commits_is_refused(tmp_path, change):
    cache = cache_in(tmp_path)
    values = vars(cache.head) | change
    if not values["metadata"]:
        values["metadata"] = {"manifest.json": cache.head.metadata["manifest.json"]}
    (tmp_path / head_key(1)).write_bytes(Head(**values).to_json())
    with pytest.raises(RunError, match="head-000001.json: its counts"):
        open_whole(tmp_path)


def test_the_stored_vocabulary_is_checked_against_its_fingerprint(tmp_path):
    """Also where no head exists yet that names the manifest's hash."""
    cache_in(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"word7": 7,', '"word_7": 7,'))
    for head in (1, 0):
        with pytest.raises(RunError, match="manifest.json .*vocabulary: expected fingerprint"):
            Cache.open(str(tmp_path))
        (tmp_path / head_key(head)).unlink()
    with pytest.raises(RunError, match="manifest.json .*vocabulary: expected fingerprint"):
        Cache.open(str(tmp_path))


def test_a_vocabularys_fingerprint_is_the_tokenizers(tmp_path):
    train_tokenizer(["ein Wort", "two words"], 260, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert vocabulary_fingerprint(tokenizer.vocab) == tokenizer.fingerprint


def test_a_changed_manifest_is_damage_not_another_cache(tmp_path):
    """It opens nothing, and a writer does not compare itself with it."""
    cache = cache_in(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text(
        file.read_text().replace('"teacher_fingerprint": "t"', '"teacher_fingerprint": "u"')
    )
    for touch in (Cache.open, lambda path: create(path, cache.manifest, 10)):
        with pytest.raises(RunError, match="whole manifest.json .* sha256 .*restore that file"):
            touch(str(tmp_path))


# ---- heads --------------------------------------------------------------------------------------


def test_a_cache_has_a_head_from_its_beginning_and_another_at_its_end(tmp_path):
    cache, arrays, _ = small(tmp_path / "whole")
    with create(str(tmp_path / "begun"), cache.manifest, 10) as writer:
        begun = Cache.open(str(tmp_path / "begun"))
        assert (begun.rows, begun.head.finished, begun.complete) == (10, False, False)
        for shard, first, last in writer.missing_shards()[:2]:
            writer.write(shard, {name: x[first : last + 1] for name, x in arrays.items()})
        part = Cache.open(str(tmp_path / "begun"))
        np.testing.assert_array_equal(part.read([5]).tokens, arrays["tokens"][[5]])
        assert not part.head.finished
    head = cache.head
    assert head.finished and (head.tokens, head.targets) == (cache.tokens, cache.targets)
    assert (head.smallest_token, head.largest_token) == (
        arrays["tokens"].min(),
        arrays["tokens"].max(),
    )
    assert sorted(head.metadata) == sorted(
        name
        for name in folder_bytes(tmp_path / "whole")
        if name.endswith(".json") and "head" not in name
    )


def test_a_writer_killed_before_its_first_head_is_resumed(tmp_path):
    cache, _, _ = small(tmp_path / "whole")
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    shutil.rmtree(killed / "commits")
    for name in cache.manifest.stored_shapes():
        shutil.rmtree(killed / name / "c")
    with pytest.raises(RunError, match="no head.*re-run the command"):
        Cache.open(str(killed))
    small(killed)
    assert folder_bytes(killed) == folder_bytes(tmp_path / "whole")


def test_a_damaged_commit_is_never_taken_into_a_new_head(tmp_path):
    """A changed count with everything else in order: its shard is written again."""
    small(tmp_path)
    before = folder_bytes(tmp_path)
    file = tmp_path / "commits/000000.json"
    content = json.loads(file.read_text()) | {"tokens": 1}
    del content["sha256"]
    file.write_text(json.dumps(content | {"sha256": digest(content)}))
    small(tmp_path)
    assert folder_bytes(tmp_path) == before
