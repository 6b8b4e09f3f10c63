"""Rung "teacher", out of a GGUF file: transformers reads the file itself, JAX a folder converted
from it. Proves: both call the cache by the same name and hold the same targets, each accepts and
checks the other's, and a student cut by either has the same weights, architecture and tokenizer.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")

from ladder import assert_same, assert_same_targets

import torch_ref.audit
import torch_ref.student
import torch_ref.teacher
from jax_distill import audit, hf, student, teacher
from jax_distill.cache import Cache, teacher_fingerprint
from jax_distill.config import (
    CacheConfig,
    Config,
    DataConfig,
    FromTeacher,
    StudentConfig,
    TeacherConfig,
)
from jax_distill.gguf_test import known_tensors, write_gguf
from torch_ref import model as torch_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("gguf")
        patch.setenv("XDG_CACHE_HOME", str(path / "user_cache"))
        tensors = {name: 0.2 * x for name, x in known_tensors().items()}
        write_gguf(path / "teacher.gguf", tensors=tensors)
        rng = np.random.default_rng(0)
        texts = ("".join(rng.choice(list("abc12 ."), rng.integers(5, 60))) for _ in range(60))
        (path / "text.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in texts))
        yield path


def settings(root: Path, cache: str, **fields) -> Config:
    return Config(
        output_dir=str(root / "run"),
        teacher=TeacherConfig(path=str(root / "teacher.gguf"), dtype="float32", batch_size=8),
        student=StudentConfig(from_teacher=FromTeacher(layers=[1])),
        data=DataConfig(
            path=str(root / "text.jsonl"),
            format="jsonl",
            sequence_length=24,
            heldout_fraction=0.2,
            tokenizer=str(root / "teacher.gguf") if cache == "rows" else "",
        ),
        cache=CacheConfig(path=str(root / cache), top_k=5, shard_rows=16),
        **fields,
    )


@pytest.fixture(scope="module")
def caches(root) -> dict[str, Cache]:
    """The training cache by backend."""
    bare = Config(**{**vars(settings(root, "rows")), "teacher": TeacherConfig()})
    teacher.write_caches(bare)
    rows = str(root / "rows")
    by_torch = torch_ref.teacher.write_caches(settings(root, "torch"), rows, device="cpu")
    by_jax = teacher.write_caches(settings(root, "jax"))
    return {"torch": by_torch[0], "jax": by_jax[0]}


def test_the_name_of_the_teacher_is_the_files_content(root, tmp_path):
    file = root / "teacher.gguf"
    again = shutil.copy(file, tmp_path / "another name.gguf")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    for path in (file, again):
        found = teacher.find_teacher(str(path)).source
        assert teacher_fingerprint(found) == expected
        assert teacher_fingerprint(torch_model.local_path(str(path))) == expected


def test_both_backends_write_the_same_cache(caches):
    ours, theirs = caches["jax"], caches["torch"]
    assert ours.manifest.identity() == theirs.manifest.identity()
    assert_same_targets("GGUF cache", *(cache.read(range(cache.rows)) for cache in (ours, theirs)))


def test_each_accepts_and_checks_the_others_cache(root, caches, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("a finished cache needs no work")

    file = str(root / "teacher.gguf")
    before = {f: f.read_bytes() for f in (root / "jax").rglob("*") if f.is_file()}
    torch_ref.teacher.write_caches(settings(root, "jax"), str(root / "rows"), device="cpu")
    assert {f: f.read_bytes() for f in before} == before
    with monkeypatch.context() as patch:
        patch.setattr(teacher.caches.data, "Corpus", never)
        assert teacher.write_caches(settings(root, "torch"))[0].complete
    capsys.readouterr()
    torch_ref.audit.main([caches["jax"].path, "--teacher", file, "--spot_check", "3"])
    assert audit.main([caches["torch"].path, "--teacher", file, "--spot_check", "3"]) == 0
    said = capsys.readouterr().out
    assert "is not the teacher" not in said
    assert said.count("the targets are this teacher's") == 2


def test_a_student_cut_from_the_file_is_the_same(root, caches, tmp_path):
    """Weights bit by bit, architecture, and the tokenizer's files byte by byte, also once exported
    by torch_ref."""
    folder = hf.local_folder(root / "teacher.gguf")
    by_jax = student.make_student(folder, tmp_path / "jax", FromTeacher(layers=[1]))
    (tmp_path / "run").mkdir()
    config = settings(root, "jax")
    start, by_torch = torch_ref.student.prepare_student(
        config, tmp_path / "run", None, trained=False
    )
    assert Path(start) == by_torch
    ours, theirs = hf.load_model(by_jax), hf.load_model(by_torch)
    assert ours.config == theirs.config
    got, expected = tiny.model_by_hf_name(ours), tiny.model_by_hf_name(theirs)
    for name, value in expected.items():
        assert_same("student cut from GGUF", name, got[name], value)

    model = torch_model.load_model(start, dtype="float32")
    torch_ref.student.export(model, by_torch, tmp_path / "export", card="")
    for name in TOKENIZER_FILES:
        expected_bytes = (by_jax / name).read_bytes()
        assert (by_torch / name).read_bytes() == expected_bytes, name
        assert (tmp_path / "export" / name).read_bytes() == expected_bytes, name


def test_a_student_that_is_a_gguf_file_is_trained_and_exported_with_its_tokenizer(root, tmp_path):
    config = settings(root, "jax")
    start = str(root / "teacher.gguf")
    config = Config(**{**vars(config), "student": StudentConfig(path=start)})
    (tmp_path / "run").mkdir()
    _, inside = torch_ref.student.prepare_student(config, tmp_path / "run", None, trained=False)
    model = torch_model.load_model(start, dtype="float32")
    torch_ref.student.export(model, inside, tmp_path / "export", card="")
    again = hf.load_model(tmp_path / "export")
    expected = tiny.model_by_hf_name(hf.load_model(hf.local_folder(start)))
    got = tiny.model_by_hf_name(again)
    for name, value in expected.items():
        assert_same("export of a GGUF student", name, got[name], value)
    folder = hf.local_folder(start)
    for name in TOKENIZER_FILES:
        assert (tmp_path / "export" / name).read_bytes() == (folder / name).read_bytes(), name
    exported = torch_model.load_model(str(tmp_path / "export"), dtype="float32")
    heads = (x.lm_head.weight for x in (exported, model))
    assert_same("export of a GGUF student", "lm_head, read by transformers", *heads)
