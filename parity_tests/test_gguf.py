"""Rung "teacher", out of a GGUF file: transformers reads the file itself, JAX a folder converted
from it. Proves: both call the store by the same name and hold the same targets, each accepts and
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
from jax_distill.cache import Store
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
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("gguf")
        patch.setenv("XDG_CACHE_HOME", str(path / "user_cache"))
        tensors = {name: 0.2 * x for name, x in known_tensors().items()}
        write_gguf(path / "teacher.gguf", tensors=tensors)
        rng = np.random.default_rng(0)
        texts = ("".join(rng.choice(list("abc12 ."), rng.integers(5, 60))) for _ in range(60))
        (path / "text.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in texts))
        yield path


def settings(place: Path, store: str, **fields) -> Config:
    return Config(
        output_dir=str(place / "run"),
        teacher=TeacherConfig(path=str(place / "teacher.gguf"), dtype="float32", batch_size=8),
        student=StudentConfig(from_teacher=FromTeacher(layers=[1])),
        data=DataConfig(
            path=str(place / "text.jsonl"),
            format="jsonl",
            sequence_length=24,
            heldout_fraction=0.2,
            tokenizer=str(place / "teacher.gguf") if store == "rows" else "",
        ),
        cache=CacheConfig(path=str(place / store), top_k=5, shard_rows=16),
        **fields,
    )


@pytest.fixture(scope="module")
def stores(place) -> dict[str, Store]:
    """The training store by backend."""
    bare = Config(**{**vars(settings(place, "rows")), "teacher": TeacherConfig()})
    teacher.write_stores(bare)
    rows = str(place / "rows")
    by_torch = torch_ref.teacher.write_stores(settings(place, "torch"), rows, device="cpu")
    by_jax = teacher.write_stores(settings(place, "jax"))
    return {"torch": by_torch[0], "jax": by_jax[0]}


def test_the_name_of_the_teacher_is_the_files_content(place, tmp_path):
    file = place / "teacher.gguf"
    again = shutil.copy(file, tmp_path / "another name.gguf")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    for path in (file, again):
        found = teacher.find_teacher(str(path)).place
        assert teacher.teacher_fingerprint(found) == expected
        assert teacher.teacher_fingerprint(torch_model.place_of(str(path))) == expected


def test_both_backends_write_the_same_store(stores):
    ours, theirs = stores["jax"], stores["torch"]
    assert ours.manifest.identity() == theirs.manifest.identity()
    assert_same_targets("GGUF store", *(store.read(range(store.rows)) for store in (ours, theirs)))


def test_each_accepts_and_checks_the_others_store(place, stores, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("a finished store needs no work")

    file = str(place / "teacher.gguf")
    before = {f: f.read_bytes() for f in (place / "jax").rglob("*") if f.is_file()}
    torch_ref.teacher.write_stores(settings(place, "jax"), str(place / "rows"), device="cpu")
    assert {f: f.read_bytes() for f in before} == before
    with monkeypatch.context() as patch:
        patch.setattr(teacher.stores, "pack", never)
        assert teacher.write_stores(settings(place, "torch"))[0].complete
    capsys.readouterr()
    torch_ref.audit.main([stores["jax"].path, "--teacher", file, "--spot_check", "3"])
    assert audit.main([stores["torch"].path, "--teacher", file, "--spot_check", "3"]) == 0
    said = capsys.readouterr().out
    assert "is not the teacher" not in said and ": right" in said


def test_a_student_cut_from_the_file_is_the_same(place, stores, tmp_path):
    """Weights bit by bit, architecture, and the tokenizer's files byte by byte, also once exported
    by torch_ref."""
    folder = hf.local_folder(place / "teacher.gguf")
    by_jax = student.make_student(folder, tmp_path / "jax", layers=[1], parameters=None)
    (tmp_path / "run").mkdir()
    config = settings(place, "jax")
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


def test_a_student_that_is_a_gguf_file_is_trained_and_exported_with_its_tokenizer(place, tmp_path):
    config = settings(place, "jax")
    start = str(place / "teacher.gguf")
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
