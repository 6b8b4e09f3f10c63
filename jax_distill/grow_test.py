"""A cache that grows: what was there stays as it was, and the rest comes behind it."""

import hashlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_distill import audit, teacher
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache, writer
from jax_distill.cache.layout import Layout
from jax_distill.config import Config, TeacherConfig
from jax_distill.grow import grow
from jax_distill.teacher_test import config, folder_bytes

__all__ = ["config"]


def more_text(folder: Path, seed: int, documents: int = 60) -> str:
    rng = np.random.default_rng(seed)
    lines = [
        " ".join(f"w{i}" for i in rng.integers(1, 300, rng.integers(5, 60)))
        for _ in range(documents)
    ]
    file = folder / f"more{seed}.jsonl"
    file.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return str(file)


def alone(config: Config, more: str) -> Cache:
    """A cache of the new text by itself."""
    other = replace(
        config,
        data=replace(config.data, path=more, max_heldout_rows=2),
        cache=replace(config.cache, path=f"{config.cache.path}_{Path(more).stem}"),
    )
    return teacher.write_caches(other)[0]


def assert_same_rows(ours, theirs) -> None:
    for name in ("tokens", "segment_ids", "positions", "mask"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    if theirs.targets is not None:
        np.testing.assert_array_equal(ours.targets.indices, theirs.targets.indices)
        np.testing.assert_array_equal(ours.targets.logprobs, theirs.targets.logprobs)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("grown", [[], [7], [8], [3, 10], [5, 13, 21]])
def test_rows_stand_where_counting_finds_them(grown, size):
    """Shard by shard, with what a short one lacks left out."""
    parts = [*grown, grown[-1] + 9 if grown else 11]
    rows, begin = [], 0
    for end in parts:
        begin = -(-begin // size) * size
        assert end > begin, "a growth has rows"
        rows += range(begin, end)
        begin = end
    layout = Layout(parts[-1], grown, size)
    assert layout.rows == len(rows)
    np.testing.assert_array_equal(layout.positions(np.arange(len(rows))), rows)
    for shard in range(-(-parts[-1] // size)):
        stands = [row for row in rows if row // size == shard]
        if shard in layout.short:
            assert len(stands) == layout.short[shard]
        found = layout.rows_between(stands[0], stands[-1])
        assert [rows[row] for row in found] == stands


def test_a_grown_cache_has_the_rows_of_both_texts(config, tmp_path, capsys):
    """Twice; the last shards are short both times."""
    cache, heldout = teacher.write_caches(config)
    assert cache.fingerprint == cache.manifest.fingerprint
    names = {cache.fingerprint}
    assert cache.rows % config.cache.shard_rows
    parts, texts = [cache.read(range(cache.rows))], [more_text(tmp_path, seed) for seed in (1, 2)]
    for text in texts:
        before = cache.rows
        cache = grow(config, text)
        expected = alone(config, text)
        assert cache.rows == before + expected.rows and cache.complete
        parts.append(expected.read(range(expected.rows)))
        names.add(cache.fingerprint)
    assert len(names) == 3  # a run that was begun on fewer rows is not resumed on more
    first = 0
    for part in parts:
        count = len(part.tokens)
        assert_same_rows(cache.read(range(first, first + count)), part)
        first += count
    order = np.random.default_rng(0).permutation(cache.rows)
    whole = np.concatenate([part.tokens for part in parts])
    np.testing.assert_array_equal(cache.read(order).tokens, whole[order])
    with pytest.raises(IndexError):
        cache.read([cache.rows])
    assert cache.tokens == int((np.concatenate([p.segment_ids for p in parts]) > 0).sum())
    words = [cache.path, "--verify", "--spot_check", "40", "--teacher", config.teacher.path]
    assert audit.main(words) == 0
    capsys.readouterr()
    before = folder_bytes(Path(config.cache.path))
    assert grow(config, texts[0]).rows == cache.rows  # it has that
    again, same = teacher.write_caches(config)
    assert again.rows == cache.rows and same.rows == heldout.rows
    assert "has the rows of" in capsys.readouterr().out
    assert folder_bytes(Path(config.cache.path)) == before


def test_what_a_growth_has_lost_is_written_again_by_the_same_command(config, tmp_path):
    """Of the first of two growths, and of the text before them."""
    config = replace(config, teacher=TeacherConfig())
    teacher.write_caches(config)
    texts = [more_text(tmp_path, seed, documents=200) for seed in (1, 2)]
    ends = [grow(config, text).layout.extent for text in texts]
    before, path = folder_bytes(Path(config.cache.path)), Path(config.cache.path) / "train"
    last = ends[0] // config.cache.shard_rows  # of the first growth
    for shard, again in ((last, lambda: grow(config, texts[0])), (0, None)):
        (path / f"commits/{shard:06d}.json").unlink()
        (path / f"tokens/c/{shard}/0").write_bytes(b"damaged")
        with pytest.raises(UserError, match="re-run the command that wrote it"):
            grow(config, texts[1])
        again() if again else teacher.write_caches(config)
        assert folder_bytes(Path(config.cache.path)) == before


def test_one_document_is_enough(config, tmp_path):
    """Whether it is held out is the hash's to say: it must not be, as the only one."""
    config = replace(config, teacher=TeacherConfig())
    cache, _ = teacher.write_caches(config)
    rows = [
        grow(config, more_text(tmp_path, seed, documents=1)).rows
        for seed in range(1, 9)
        if not held_out(more_text(tmp_path, seed, documents=1), config.data.heldout_fraction)
    ]
    assert len(rows) >= 3 and np.diff([cache.rows, *rows]).min() >= 1
    held = next(
        text
        for seed in range(20, 60)
        if held_out(text := more_text(tmp_path, seed, 1), config.data.heldout_fraction)
    )
    with pytest.raises(UserError, match="expected train text, got none"):
        grow(config, held)


def held_out(file: str, fraction: float) -> bool:
    text = json.loads(Path(file).read_text())["text"]
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < fraction * 2**64


def test_what_is_not_there_or_not_new_is_refused(config, tmp_path):
    with pytest.raises(UserError, match="expected a cache at .*train"):
        grow(config, more_text(tmp_path, 1))
    teacher.write_caches(config)
    with pytest.raises(UserError, match="expected other text than"):
        grow(config, str(config.data.path))
    other = replace(config, cache=replace(config.cache, top_k=7))
    with pytest.raises(UserError, match="top_k: stored 8, wanted 7"):
        grow(other, more_text(tmp_path, 1))


class Stopped(Exception):
    """In place of a kill."""


def stopping(monkeypatch, owner, name: str, at: int) -> None:
    """Raise in place of the call number `at`."""
    function, calls = getattr(owner, name), itertools.count()

    def stopped(*args, **options):
        if next(calls) == at:
            raise Stopped
        return function(*args, **options)

    monkeypatch.setattr(owner, name, stopped)


@pytest.mark.parametrize(
    ("name", "at"),
    [("write", 0), ("write", 2), ("_describe_file", 5), ("finish", 0), ("_write_head", 0)],
)
def test_a_growth_that_was_stopped_leaves_the_cache_as_it_was_and_resumes(
    config, tmp_path, monkeypatch, name, at
):
    """Also where the arrays are longer already and the head is not; and after another text was
    begun and given up."""
    config = replace(config, teacher=TeacherConfig())
    cache, _ = teacher.write_caches(config)
    rows = cache.read(range(cache.rows))
    text, other = more_text(tmp_path, 1, documents=200), more_text(tmp_path, 2, documents=90)
    copy = replace(config, cache=replace(config.cache, path=f"{config.cache.path}_copy"))
    shutil.copytree(config.cache.path, copy.cache.path)
    whole = grow(copy, text)
    for begun in (other, text):
        with monkeypatch.context() as patch:
            stopping(patch, writer.Writer, name, at)
            with pytest.raises(Stopped):
                grow(config, begun)
        same = Cache.open(cache.path)
        same.require_complete()
        assert same.rows == len(rows.tokens)
        assert_same_rows(same.read(range(same.rows)), rows)
        assert audit.main([cache.path, "--verify"]) == 0
    grown = grow(config, text)
    assert grown.rows == whole.rows
    found, expected = (folder_bytes(Path(each.path)) for each in (grown, whole))
    assert found.keys() == expected.keys()
    assert not [key for key in found if found[key] != expected[key] and "lock" not in key]
