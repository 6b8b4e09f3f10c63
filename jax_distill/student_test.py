"""A student cut from its teacher, and the vocabulary that a student shares with a cache."""

import contextlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_distill import hf, student
from jax_distill.base.errors import RunError, UserError
from jax_distill.cache_test import small
from jax_distill.config import Config, FromTeacher, StudentConfig, TeacherConfig
from jax_distill.model import count_parameters
from jax_distill.teacher_test import hf_folder, model_config


def test_student_by_size_keeps_first_and_last_layers():
    config = model_config(num_hidden_layers=10)
    full = count_parameters(config)

    def kept(parameters):
        return student.kept_layers(config, layers=None, parameters=parameters)

    assert kept(full) == list(range(10))
    layer = (full - count_parameters(model_config())) // 8
    assert kept(full - 7 * layer) == [0, 1, 9]
    with pytest.raises(UserError, match="at least"):
        kept(100)


def test_student_keeps_the_chosen_layers_bit_for_bit(tmp_path):
    folder = hf_folder(tmp_path / "teacher")
    out = student.make_student(folder, tmp_path / "s", FromTeacher(layers=[1]))
    teacher, got = hf.load_model(folder), hf.load_model(out)
    np.testing.assert_array_equal(
        got.layers.mlp.up_proj.weight[...][0], teacher.layers.mlp.up_proj.weight[...][1]
    )
    with pytest.raises(UserError, match="rising"):
        student.make_student(folder, tmp_path / "t", FromTeacher(layers=[1, 0]))


@pytest.mark.parametrize(
    ("own", "real", "said"),
    [
        (50, 50, ""),
        (60, 60, "the teacher lacks ids 50…59: they join the tail\n"),
        (45, 45, "the student lacks ids 45…49: they join the tail\n"),
    ],
)
def test_ids_that_one_side_lacks_are_reported_once(tmp_path, capsys, own, real, said):
    """Case 2: real ids are those of the student's own tokenizer."""
    words = [f"w{i}" for i in range(60)]
    cache, *_ = small(tmp_path / "cache", vocabulary={w: i for i, w in enumerate(words[:50])})
    folder = hf_folder(tmp_path / "student", words=words[:own])
    assert student.vocabulary_size(folder, cache) == real
    assert capsys.readouterr().out == said


def test_an_embedding_that_lacks_ids_of_the_cache_is_refused(tmp_path):
    cache, *_ = small(tmp_path / "cache", vocab_size=400)
    folder = hf_folder(tmp_path / "student")
    with pytest.raises(UserError, match=f"largest id {cache.largest_token}, got 320 in .*student"):
        student.vocabulary_size(folder, cache)


# ---- a cut and its teacher ----------------------------------------------------------------------


def cut(teacher, out, capsys) -> str:
    """'wrote' or 'kept'."""
    capsys.readouterr()
    student.make_student(teacher, out, FromTeacher(layers=[1]))
    return capsys.readouterr().out.split()[0]


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES = {
    "its weights": lambda teacher: flip_last_byte(teacher / "model.safetensors"),
    "its config.json": lambda teacher: (teacher / "config.json").write_text(
        json.dumps(hf.read_config(teacher) | {"rms_norm_eps": 0.5})
    ),
    "its tokenizer": lambda teacher: (teacher / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "w3"})
    ),
    "its licence": lambda teacher: (teacher / "LICENSE").write_text("mine"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cut_is_made_again_where_its_teacher_changed(tmp_path, change, capsys):
    teacher = hf_folder(tmp_path / "teacher")
    out = tmp_path / "out"
    assert [cut(teacher, out, capsys) for _ in range(3)] == ["wrote", "kept", "kept"]
    teacher.rename(tmp_path / "moved")
    assert cut(tmp_path / "moved", out, capsys) == "kept"
    (tmp_path / "moved").rename(teacher)
    CHANGES[change](teacher)
    assert cut(teacher, out, capsys) == "wrote"
    fresh = student.make_student(teacher, tmp_path / "fresh", FromTeacher(layers=[1]))
    for path in fresh.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", ["weights", "config.json", "tokenizer.json", student.RECORD])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_cut_is_made_again_and_refused_by_a_run_that_began_with_it(
    tmp_path, name, damage, capsys
):
    teacher, run = hf_folder(tmp_path / "teacher"), tmp_path / "run"
    inside = run / "student"
    cut(teacher, inside, capsys)
    whole = {path.name: path.read_bytes() for path in inside.iterdir()}
    path = next(inside.glob("*.safetensors")) if name == "weights" else inside / name
    if damage == "flipped":
        flip_last_byte(path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.unlink()
    config = Config(
        teacher=TeacherConfig(path=str(teacher)),
        student=StudentConfig(from_teacher=FromTeacher(layers=[1])),
    )
    gone = damage == "gone" and name in ("config.json", student.RECORD)
    if not gone and not (name == student.RECORD and damage == "flipped"):
        with pytest.raises(UserError, match=f"{path.name}|delete the folder"):
            student.prepare(config, run, teacher, trained=True)
    if name == student.RECORD and damage != "gone":
        with pytest.raises(UserError, match="delete the folder"):
            cut(teacher, inside, capsys)
        return
    assert cut(teacher, inside, capsys) == "wrote"
    assert {path.name: path.read_bytes() for path in inside.iterdir()} == whole


def test_a_cut_of_a_tied_teacher_whose_file_has_only_the_head_loads(tmp_path):
    """Case 48."""
    teacher = hf_folder(tmp_path / "teacher")
    raw = hf.read_config(teacher) | {"tie_word_embeddings": True}
    (teacher / "config.json").write_text(json.dumps(raw))
    tensors = load_file(teacher / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, teacher / "model.safetensors")
    out = student.make_student(teacher, tmp_path / "out", FromTeacher(layers=[0]))
    got = hf.load_model(out).lm_head_weight()
    np.testing.assert_array_equal(got, tensors["lm_head.weight"])


def test_a_full_disk_while_cutting_is_one_line_and_leaves_nothing(tmp_path, small_disk):
    teacher = hf_folder(tmp_path / "teacher")
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(RunError, match="expected to write .*make room there"):
        student.make_student(teacher, small_disk / "out", FromTeacher(layers=[0]))
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_start_inside_its_own_run_is_left_as_it_is(tmp_path):
    inside = hf_folder(tmp_path / "run" / "student")
    before = {path.name: path.read_bytes() for path in inside.iterdir()}
    config = Config(student=StudentConfig(path=str(inside)))
    assert student.prepare(config, tmp_path / "run", None, trained=False) == (inside, inside)
    assert {path.name: path.read_bytes() for path in inside.iterdir()} == before
