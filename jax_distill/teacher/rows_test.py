"""Rows made as they are asked for are those of all the text, from wherever they begin again."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_distill import data, teacher
from jax_distill.base.errors import RunError
from jax_distill.cache import Manifest
from jax_distill.config import Source, TeacherConfig
from jax_distill.data import tokenizing
from jax_distill.packing import pack
from jax_distill.teacher.rows import KnownRows, Mark, TextRows
from jax_distill.teacher_test import config, folder_bytes, word_tokenizer

__all__ = ["config"]
LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> data.Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer(folder, [f"w{i}" for i in range(300)])
    return data.Tokenizer.load(folder)


def token_file(file: Path, documents: int, seed: int) -> str:
    """Documents of 0 to 90 tokens: none, several in a row, several rows long."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 5, 9, 16, 33, 90], documents)
    rows = [{"tokens": rng.integers(0, 300, n).tolist()} for n in lengths]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def text_rows(
    corpus: data.Corpus, shard_rows: int, *, packing: bool, start=None, max_rows=None
) -> TextRows:
    manifest = Manifest(
        sequence_length=LENGTH,
        shard_rows=shard_rows,
        vocab_size=300,
        data={"split": "train", "max_rows": max_rows},
    )
    return TextRows(
        corpus,
        "train",
        manifest,
        options={"packing": packing, "separate_documents": True},
        start=start,
        contexts={},
        refuse_teacher=False,
        has_table=False,
        stamps={},
    )


@pytest.mark.parametrize("weights", [(None, None), (2.0, 1.0)])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shard_rows", [7, 64, 100, 1000])
def test_shards_are_the_rows_of_all_the_text_from_every_point_of_resume(
    tmp_path, tokenizer, monkeypatch, weights, packing, shard_rows
):
    monkeypatch.setattr(tokenizing, "BATCH", 10)
    paths = [token_file(tmp_path / f"{i}.jsonl", n, i) for i, n in enumerate((250, 120))]
    sources = [Source(*pair) for pair in zip(paths, weights, strict=True)]
    corpus = data.Corpus(sources, tokenizer=tokenizer, heldout_fraction=0.1)
    documents = [document for _, document in corpus.documents("train")]
    whole = pack(documents, sequence_length=LENGTH, packing=packing)
    rows = text_rows(corpus, shard_rows, packing=packing)
    shards = list(rows.shards())
    assert rows.count == len(whole) > 256
    assert [shard.number for shard in shards] == list(range(-(-len(whole) // shard_rows)))
    for name, array in whole.arrays.items():
        made = np.concatenate([shard.arrays[name] for shard in shards])
        np.testing.assert_array_equal(made, array)
    assert f"{len(whole):,} rows of 16: {whole.tokens_out:,} tokens" in str(rows)
    for shard in shards[:: max(len(shards) // 5, 1)]:
        start = json.loads(json.dumps(shard.resume))
        mark = Mark.parse(start, corpus.streams)
        end = shard.first_row + shard.rows
        assert max(0, end - 63) <= mark.row <= end
        again = text_rows(corpus, shard_rows, packing=packing, start=start)
        rest = [each for each in again.shards() if each.number > shard.number]
        assert again.count == len(whole)
        for found, expected in zip(rest, shards[shard.number + 1 :], strict=True):
            assert found.first_row == expected.first_row and found.resume == expected.resume
            for name, array in expected.arrays.items():
                np.testing.assert_array_equal(found.arrays[name], array)


@pytest.mark.parametrize("max_rows", [1, 7, 63, 64, 65, 128, 200, 5000])
def test_max_rows_are_the_first_and_no_more_text_is_tokenized(
    tmp_path, tokenizer, monkeypatch, max_rows
):
    monkeypatch.setattr(tokenizing, "BATCH", 10)
    corpus = data.Corpus(
        token_file(tmp_path / "a.jsonl", 300, 0), tokenizer=tokenizer, heldout_fraction=0.0
    )
    shards = list(text_rows(corpus, 7, packing=True).shards())
    whole, documents = sum(shard.rows for shard in shards), corpus.counts.documents
    rows = text_rows(corpus, 7, packing=True, max_rows=max_rows)
    some = list(rows.shards())
    assert rows.count == rows.expected == sum(shard.rows for shard in some) == min(max_rows, whole)
    for found, expected in zip(some, shards, strict=False):
        for name, array in found.arrays.items():
            np.testing.assert_array_equal(array, expected.arrays[name][: len(array)])
    if max_rows <= 65:  # at most three blocks of some 400 rows
        assert corpus.counts.documents < documents * 0.6


def test_how_many_rows_come_is_estimated_from_the_part_that_was_read(tmp_path, tokenizer):
    path = token_file(tmp_path / "a.jsonl", 4000, 0)
    corpus = data.Corpus(path, tokenizer=tokenizer, heldout_fraction=0.0)
    rows = text_rows(corpus, 64, packing=True)
    rows.begin()
    estimate = rows.expected
    count = sum(shard.rows for shard in rows.shards())
    assert rows.expected == count and abs(estimate / count - 1) < 0.3


@pytest.mark.parametrize(
    "damaged",
    [None, {}, {"row": 64}, {"row": 64, "documents": [1, 2], "tokens": [1, 2], "piece": 0},
     {"row": -1, "documents": [1], "tokens": [1], "piece": 0},
     {"row": 64, "documents": [True], "tokens": [1], "piece": 0},
     {"row": 64, "documents": ["1"], "tokens": [1], "piece": 0}],
)  # fmt: skip
def test_a_mark_that_makes_no_sense_is_the_beginning(damaged):
    assert Mark.parse(damaged, 1) == Mark(0, (0,), (0,), 0)


class Stopped(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("with_teacher", [True, False])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_resumed_cache_is_the_uninterrupted_one_and_tokenizes_no_text_twice(
    config, monkeypatch, after, with_teacher
):
    """File for file, wherever the writer stops: also after the last shard, before the head."""
    path = Path(str(config.data.path))
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(1, 300, 30)) for _ in range(400)]
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    if not with_teacher:
        config = replace(config, teacher=TeacherConfig())
    other = replace(config, cache=replace(config.cache, path=f"{config.cache.path}_other"))
    whole, _ = teacher.write_caches(other)
    assert whole.shards > 4
    write, shards = teacher.writing.Writer.write, itertools.count()

    def stopping(writer, shard, *rest):
        if writer.path.endswith("train") and next(shards) == after:
            raise Stopped
        return write(writer, shard, *rest)

    monkeypatch.setattr(teacher.writing.Writer, "write", stopping)
    with pytest.raises(Stopped):
        teacher.write_caches(config)
    monkeypatch.setattr(teacher.writing.Writer, "write", write)
    finish = teacher.writing.Writer.finish
    tokenized = []
    encode = data.Tokenizer.encode_batch
    monkeypatch.setattr(
        data.Tokenizer,
        "encode_batch",
        lambda self, texts: tokenized.extend(texts) or encode(self, texts),
    )
    monkeypatch.setattr(tokenizing, "BATCH", 5)

    def never(self, rows):
        raise Stopped

    monkeypatch.setattr(teacher.writing.Writer, "finish", never)
    with pytest.raises(Stopped):
        teacher.write_caches(config)
    assert len(tokenized) < 400 - after * config.cache.shard_rows + 64 + 20
    tokenized.clear()
    monkeypatch.setattr(teacher.writing.Writer, "finish", finish)
    teacher.write_caches(config)
    assert len(tokenized) <= 64 + 20  # of the last block
    found, expected = (folder_bytes(Path(each.cache.path)) for each in (config, other))
    assert found.keys() == expected.keys()
    different = [name for name in found if found[name] != expected[name]]
    assert not different


def test_text_that_changes_while_it_is_read_is_refused_and_resumes_once_it_is_back(
    config, monkeypatch
):
    """Nothing that was written of it counts as finished."""
    path = Path(str(config.data.path))
    before, stamp = path.read_text(), path.stat()
    begin = TextRows.begin

    def changing(rows):
        begin(rows)
        path.write_text(f"{before}\n{before.splitlines()[0]}")

    monkeypatch.setattr(TextRows, "begin", changing)
    with pytest.raises(RunError, match="text.jsonl as it was when it was first read .* restore it"):
        teacher.write_caches(config)
    monkeypatch.setattr(TextRows, "begin", begin)
    path.write_text(before)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert all(cache.complete for cache in teacher.write_caches(config))


def test_known_rows_come_in_shards():
    arrays = {"tokens": np.arange(20).reshape(10, 2)}
    source = KnownRows.of(arrays, 4)
    assert source.count == source.expected == 10
    assert [(s.number, s.first_row, s.rows, s.resume) for s in source.shards()] == [
        (0, 0, 4, None), (1, 4, 4, None), (2, 8, 2, None),
    ]  # fmt: skip
