"""Where a configuration's teacher lies, and whether the decoder can run it."""

from pathlib import Path
from typing import NamedTuple

from jax_distill import hf
from jax_distill.config import Config, Refusal, find_path
from jax_distill.model import ModelConfig
from jax_distill.run import say


class TeacherFiles(NamedTuple):
    """place: what the fingerprint is of, a model folder or a GGUF file; None: not here. folder: the
    model folder (a GGUF file's converted one), if there is one. model: None where the decoder
    cannot run it. problem: why not, as a refusal says it."""

    place: Path | None
    folder: Path | None
    model: ModelConfig | None
    problem: str = ""

    def require_model(self, *, other: str) -> tuple[Path, ModelConfig]:
        """(folder, model). Raises Refusal naming the problem and `other`, the module of torch_ref
        that does the same with any model that transformers loads."""
        if self.place is None:
            raise Refusal(self.problem)
        if self.folder is None or self.model is None:
            raise Refusal(f"{self.problem}; or use python -m torch_ref.{other}")
        return self.folder, self.model


def find_teacher(path: str) -> TeacherFiles:
    """Of an HF folder, GGUF file or hub id. Whatever is wrong with it stands in `problem`."""
    try:
        named = find_path(path)
        place = Path(named).expanduser()
    except Refusal as refusal:
        return TeacherFiles(None, None, None, str(refusal))
    is_gguf = place.suffix == ".gguf" and place.is_file()
    try:
        folder = hf.local_folder(named)
    except Refusal as refusal:
        return TeacherFiles(place if is_gguf else None, None, None, str(refusal))
    place = place if is_gguf else folder
    try:
        return TeacherFiles(place, folder, hf.model_config(hf.read_config(folder)))
    except Refusal as refusal:
        return TeacherFiles(place, folder, None, str(refusal))


def teacher_folders(config: Config) -> tuple[Path | None, Path | None]:
    """(the teacher's folder, the same if the decoder can run it). Where it is not here, or is of
    another architecture, what the live teacher does is left out, and one line says so.

    Raises:
        Refusal: the student is to be cut from a teacher that is not here.
    """
    if not config.teacher.path:
        return None, None
    found = find_teacher(config.teacher.path)
    if found.model is not None:
        return found.folder, found.folder
    if found.folder is None and config.student.from_teacher is not None:
        raise Refusal(found.problem)
    say(
        "the store alone teaches, without gate and held-out table, which need the live teacher: "
        f"{found.problem}"
    )
    return found.folder, None
