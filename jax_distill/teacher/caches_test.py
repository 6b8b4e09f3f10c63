"""Both caches of a configuration: made once, found again, refused where something differs."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_distill import distil, hf, teacher
from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache, shard_file
from jax_distill.config import Config, StudentConfig, TeacherConfig, load
from jax_distill.teacher_test import (
    COLUMNS,
    VOCAB,
    config,
    folder_bytes,
    hf_folder,
    model_config,
    random_model,
    text_file,
    word_tokenizer,
)

__all__ = ["config"]


def test_caches_are_made_once_and_then_found_without_reading_text_or_weights(
    config, monkeypatch, capsys
):
    train, heldout = teacher.write_caches(config)
    assert train.complete and heldout.complete and heldout.rows > 1
    assert train.manifest.vocab_size == VOCAB and train.manifest.top_k == 8
    assert train.manifest.vocabulary["w7"] == 7
    said = " ".join(capsys.readouterr().out.split())
    assert f"train: {train.rows} rows of 32: {train.tokens:,} tokens" in said
    assert f"documents of {train.tokens:,} tokens to train on" in said
    assert "free" in said and "more tokens take about" in said and "bytes a token" in said
    before = folder_bytes(Path(config.cache.path))

    def never(*_, **__):
        raise AssertionError("a finished cache needs no work")

    monkeypatch.setattr(teacher.caches.data, "Corpus", never)
    monkeypatch.setattr(teacher.caches.hf, "load_model", never)
    again, _ = teacher.write_caches(config)
    assert again.rows == train.rows
    assert folder_bytes(Path(config.cache.path)) == before
    assert "is there" in capsys.readouterr().out


def change_teacher(config: Config) -> Config:
    hf.save_weights(config.teacher.path, random_model(5), model_config())
    return config


def change_tokenizer(config: Config) -> Config:
    words = [f"w{i}" for i in range(VOCAB)]
    words[3], words[9] = words[9], words[3]
    word_tokenizer(Path(config.teacher.path), words)
    return config


def change_text(config: Config) -> Config:
    """Case 8: one token of one document."""
    path = Path(str(config.data.path))
    first, *rest = path.read_text().splitlines()
    word, *words = json.loads(first)["text"].split()
    other = "w7" if word != "w7" else "w8"
    path.write_text("\n".join([json.dumps({"text": " ".join([other, *words])}), *rest]))
    return config


def change_packing(config: Config) -> Config:
    return replace(config, data=replace(config.data, packing=False))


def change_dtype(config: Config) -> Config:
    return replace(config, teacher=replace(config.teacher, dtype="bfloat16"))


def change_top_k(config: Config) -> Config:
    return replace(config, cache=replace(config.cache, top_k=9))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_teacher, "teacher_fingerprint"),
        (change_tokenizer, "tokenizer_fingerprint"),
        (change_text, "data_fingerprint"),
        (change_packing, "data.packing: stored True, wanted False; set --data.packing true"),
        (change_dtype, "teacher_dtype: .*set --teacher.dtype float32, or choose another"),
        (change_top_k, "top_k: stored 8, wanted 9; set --cache.top_k 8, or choose another"),
    ],
)
def test_an_old_cache_is_refused_by_the_name_of_what_changed(config, change, named):
    """Case 36."""
    teacher.write_caches(config)
    before = folder_bytes(Path(config.cache.path))
    with pytest.raises(UserError, match=named):
        teacher.write_caches(change(config))
    assert folder_bytes(Path(config.cache.path)) == before


def test_data_with_a_tokenizer_that_is_not_the_teachers_is_refused(config, tmp_path):
    """Case 3, before anything is stored."""
    words = [f"w{i}" for i in range(VOCAB)]
    words[3], words[9] = words[9], words[3]
    word_tokenizer(tmp_path / "other", words)
    other = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "other")))
    with pytest.raises(UserError, match="id 3 to 'w3' as the teacher's own does, got 'w9'"):
        teacher.write_caches(other)
    assert not Path(config.cache.path).exists()


def test_ids_beyond_the_teachers_head_are_refused(config):
    word_tokenizer(Path(config.teacher.path), [f"w{i}" for i in range(COLUMNS + 5)])
    line = " ".join(f"w{i}" for i in range(COLUMNS + 5))
    path = Path(str(config.data.path))
    path.write_text(path.read_text() + "\n" + json.dumps({"text": line}))
    with pytest.raises(UserError, match=f"ids from 0 to {COLUMNS - 1}.*got {COLUMNS + 4}"):
        teacher.write_caches(config)


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**32 + 5, True, "7"])
@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_special_id_that_is_no_id_of_the_vocabulary_is_refused_by_name(config, name, wrong):
    file = Path(config.teacher.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {f"{name}_token_id": wrong}))
    with pytest.raises(UserError, match=f"{name}_token_id to be ids from 0 to 299, got '?{wrong}"):
        teacher.write_caches(config)
    assert not Path(config.cache.path).exists()


def test_a_damaged_cache_is_refused_before_it_is_used(config):
    """Two shard files swapped: each would read, at the wrong rows."""
    cache, _ = teacher.write_caches(config)
    first, second = (
        Path(cache.path) / shard_file(cache.manifest, "teacher_codes", shard) for shard in (0, 1)
    )
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(RunError, match=r"teacher_codes/c/0/0/0 \(rows 0 to 15\)"):
        teacher.write_caches(config)


def test_without_a_teacher_the_caches_hold_rows_alone(config):
    train, heldout = teacher.write_caches(replace(config, teacher=TeacherConfig()))
    assert train.manifest.top_k == 0 and heldout.complete
    assert train.read([0]).targets is None
    assert not list(Path(config.cache.path).rglob("teacher_*"))


def test_a_tokenizer_is_trained_on_the_text_once(config):
    bpe = replace(config.data, tokenizer="bpe:280", format="jsonl")
    bare = replace(config, data=bpe, teacher=TeacherConfig())
    train, _ = teacher.write_caches(bare)
    folder = teacher.tokenizer_folder(bare, None)
    assert (folder / "tokenizer.json").is_file()
    assert train.manifest.vocab_size <= 280
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    teacher.write_caches(bare)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp


def test_rows_are_those_of_the_whole_text_though_less_is_tokenized(config, capsys, monkeypatch):
    """1,500 documents, of which 9 and 3 rows are wanted: the first of all of them."""
    text_file(Path(str(config.data.path)), documents=1500)
    whole = {split: Cache.open(each.path) for split, each in made(config).items()}
    assert "not read further" not in capsys.readouterr().out
    few = replace(config.data, max_rows=9, max_heldout_rows=3)
    cut = made(replace(config, data=few, cache=replace(config.cache, path=f"{config.cache.path}2")))
    said = " ".join(capsys.readouterr().out.split())
    assert "documents not read further" in said
    for split, rows in (("train", 9), ("heldout", 3)):
        first, cache = whole[split].read(range(rows)), cut[split].read(range(cut[split].rows))
        assert cut[split].rows == rows
        for name in ("tokens", "segment_ids", "positions", "mask"):
            np.testing.assert_array_equal(getattr(first, name), getattr(cache, name))


def made(config: Config) -> dict[str, Cache]:
    """Both caches of rows alone."""
    bare = replace(config, teacher=TeacherConfig())
    return dict(zip(("train", "heldout"), teacher.write_caches(bare), strict=True))


def with_context(folder: str, limit: int) -> None:
    file = Path(folder) / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"max_position_embeddings": limit}))


def test_segments_beyond_the_teachers_context_are_refused_before_it_runs(config, monkeypatch):
    monkeypatch.setattr(teacher.caches.hf, "load_model", None)
    with_context(config.teacher.path, 31)
    refused = r"at most 31 tokens, got (\d+) longer .*; lower data.sequence_length to 31, or set "
    with pytest.raises(UserError, match=refused):
        teacher.write_caches(config)
    assert not Path(config.cache.path).exists()


def test_segments_beyond_the_teachers_context_are_said_where_they_are_allowed(config, capsys):
    with_context(config.teacher.path, 31)
    allowed = replace(config.teacher, beyond_context="allow")
    assert teacher.write_caches(replace(config, teacher=allowed))[0].complete
    said = " ".join(capsys.readouterr().out.split())
    assert "longer than the teacher's max_position_embeddings of 31" in said


def test_segments_beyond_the_students_context_are_counted_in_one_line(config, tmp_path, capsys):
    student = hf_folder(tmp_path / "student")
    with_context(str(student), 20)
    config = replace(config, student=StudentConfig(path=str(student)))
    train, heldout = teacher.write_caches(config)
    longer = 0
    for cache in (train, heldout):
        batch = cache.read(range(cache.rows))
        for row in batch.segment_ids:
            longer += int((np.bincount(row)[1:] > 20).sum())
    assert longer > 0
    said = capsys.readouterr().out
    assert f"{longer:,} longer than the student's max_position_embeddings of 20" in said
    assert "teacher's max_position" not in said


@pytest.mark.parametrize("command", ["teacher", "train"])
@pytest.mark.parametrize("path", ["runs/teecher", "./teecher", "configs/teecher/x"])
def test_a_mistyped_teacher_is_named_by_its_option_and_nothing_is_looked_up(
    tmp_path, monkeypatch, command, path
):
    """The quickstart's student has no tokenizer of its own: it is not what is missing."""
    monkeypatch.setattr(hf.folder, "_snapshot", None)
    monkeypatch.chdir(tmp_path)
    argv = ["--config", "configs/quickstart_teacher.yaml", "--teacher.path", path]
    argv += ["--data.tokenizer", "", "--loss.kl_weight", "1", "--output_dir", "out"]
    wanted = load(argv, f"jax_distill.{command}")
    with pytest.raises(UserError, match=rf"expected teacher.path to be .*, got {path}, where"):
        (distil if command == "train" else teacher).main(wanted)
    assert not Path("out/cache").exists() and not Path("out/student").exists()


def test_heldout_rows_without_a_target_are_refused_before_the_teacher_runs(config):
    """Of the held-out document only the first token of its second piece is learned, and no position
    of that piece predicts it."""
    documents = np.random.default_rng(1).integers(1, VOCAB, (20, 9)).astype("<i4")
    held_out = min(range(20), key=lambda i: hashlib.sha256(documents[i].tobytes()).digest())
    lines = [
        {"tokens": tokens.tolist(), "targets": [0] * 8 + [1] if i == held_out else [1] * 9}
        for i, tokens in enumerate(documents)
    ]
    Path(str(config.data.path)).write_text("\n".join(map(json.dumps, lines)))
    few = replace(config.data, format="tokens", sequence_length=8, heldout_fraction=1e-9)
    config = replace(config, data=few)
    with pytest.raises(UserError, match="heldout text with tokens to predict"):
        teacher.write_caches(config)
    assert not Path(config.cache.path).exists()
    bare = replace(config, teacher=TeacherConfig())
    assert teacher.write_caches(bare)[1].targets == 0  # no table, nothing to refuse


def test_a_second_half_without_a_target_is_refused_and_few_targets_are_said(config, capsys):
    """The test table reads the second half of the held-out rows alone."""
    documents = np.random.default_rng(1).integers(1, VOCAB, (20, 9)).astype("<i4")
    ranked = sorted(range(20), key=lambda i: hashlib.sha256(documents[i].tobytes()).digest())
    digest = hashlib.sha256(documents[ranked[2]].tobytes()).digest()
    two = int.from_bytes(digest[:8]) / 2.0**64
    few = replace(
        config.data, format="tokens", sequence_length=16, packing=False, heldout_fraction=two
    )
    config = replace(config, data=few)

    def write(without: int) -> None:
        lines = [
            {"tokens": tokens.tolist(), "targets": [int(i != without)] * 9}
            for i, tokens in enumerate(documents)
        ]
        Path(str(config.data.path)).write_text("\n".join(map(json.dumps, lines)))

    write(without=ranked[1])
    with pytest.raises(UserError, match="heldout text with tokens to predict"):
        teacher.write_caches(config)
    assert not Path(config.cache.path).exists()
    write(without=ranked[0])
    assert teacher.write_caches(config)[1].targets == 8
    assert "WARNING: the test table will be of 8 tokens" in " ".join(
        capsys.readouterr().out.split()
    )


def test_no_heldout_text_is_refused(config):
    with pytest.raises(UserError, match="expected heldout text"):
        teacher.write_caches(replace(config, data=replace(config.data, heldout_fraction=0.0)))
