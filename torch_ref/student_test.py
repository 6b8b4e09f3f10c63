"""Where the student's folders may be written."""

from pathlib import Path

import pytest

from jax_distill.config import FromTeacher, Refusal
from torch_ref.student import cut_student


def test_a_folder_with_something_to_lose_is_refused_before_the_teacher_is_loaded(tmp_path: Path):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")  # no model at all: loading it would fail otherwise
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("t")
    (tmp_path / "file").write_text("t")
    for out in ("precious", "teacher", "file", "file/below", "."):
        with pytest.raises(Refusal, match="expected .*folder.*got .*; name another"):
            cut_student(str(teacher), tmp_path / out, FromTeacher(layers=[0]))
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "t"
    assert (teacher / "config.json").read_text() == "{}"
