"""What a run trains first: the student's folder inside the run's, and whether its tokenizer is the
text's."""

import shutil
from pathlib import Path

from jax_distill import hf
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.cache import Cache, vocabulary_conflict
from jax_distill.config import Config
from jax_distill.data import vocabulary_of
from jax_distill.model_folder import collect_text_files
from jax_distill.run import STUDENT_FOLDER
from jax_distill.student.cutting import changed_files, make_student
from jax_distill.teacher.caches import tokenizer_folder


def prepare(
    config: Config,
    run: Path,
    teacher_folder: Path | None,
    *,
    trained: bool,
    cache: Cache | None = None,
) -> tuple[Path, Path]:
    """(folder of the first weights, `<run>/student`): the latter has at least the student's
    config.json and tokenizer, so that the run folder alone can be exported. What a run that has
    `trained` began with is left as it is, and refused where it is damaged. cache: the rows to train
    on, for a cut by importance.

    Raises:
        UserError: see `make_student`, `check_tokenizers` and `collect_text_files`.
    """
    inside = run / STUDENT_FOLDER
    cut = config.student.from_teacher
    if cut is None:
        start = hf.local_folder(find_path(config.student.path), key="student.path")
        hf.model_config(hf.read_config(start))
        if start.resolve() == inside.resolve():
            return start, inside
        text = tokenizer_folder(config, teacher_folder)
        text = text.parent if text.name == "tokenizer.json" else text
        check_tokenizers(start, text)
        inside.mkdir(exist_ok=True)
        collect_text_files(start, text, inside)
        shutil.copyfile(start / "config.json", inside / "config.json")
        return start, inside
    if trained and (inside / "config.json").is_file():
        changed = changed_files(inside)
        if changed:
            raise UserError(
                f"expected {inside} as this run began with it, got another {changed[0]}; restore "
                "it, or set another --output_dir"
            )
        return inside, inside
    if teacher_folder is None:
        raise UserError("expected teacher.path for student.from_teacher, got none; name a teacher")
    make_student(teacher_folder, inside, cut, cache=cache, dtype=config.teacher.dtype)
    return inside, inside


def check_tokenizers(student_folder: Path, text_folder: Path) -> None:
    """Refuse, before the teacher runs, a student that reads the text's ids differently."""
    conflict = student_folder.resolve() != text_folder.resolve() and vocabulary_conflict(
        vocabulary_of(text_folder), vocabulary_of(student_folder)
    )
    if conflict:
        first, expected, got = conflict
        raise UserError(
            f"expected the student's tokenizer to give id {first} to {expected!r} as the teacher's "
            f"does, got {got!r}; use the teacher's tokenizer"
        )


def vocabulary_size(folder: Path, cache: Cache) -> int:
    """The student's vocab_size without padding; one line where either side lacks ids of the other.
    Raises as `Cache.student_length` does."""
    head_rows = hf.model_config(hf.read_config(folder)).vocab_size
    length = cache.student_length(head_rows, vocabulary_of(folder), str(folder))
    if length < cache.manifest.vocab_size:
        say(f"the student lacks ids {length}…{cache.manifest.vocab_size - 1}: they join the tail")
    elif length > cache.manifest.vocab_size:
        say(f"the teacher lacks ids {cache.manifest.vocab_size}…{length - 1}: they join the tail")
    return min(length, head_rows)
