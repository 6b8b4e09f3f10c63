"""The files of a configuration's teacher, whether the decoder can run it, and the model itself."""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jax_distill import hf, sharding
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.cache import read_manifest
from jax_distill.config import Config
from jax_distill.model import Decoder, ModelConfig


class TeacherFiles(NamedTuple):
    """What was found of a teacher.

    Attributes:
        source: what the fingerprint is of, a model folder or a GGUF file; None: not here.
        folder: the model folder (a GGUF file's converted one), if there is one.
        model: None where the decoder cannot run it.
        problem: why not, as an error message.
    """

    source: Path | None
    folder: Path | None
    model: ModelConfig | None
    problem: str = ""

    def require_model(self, *, other: str) -> tuple[Path, ModelConfig]:
        """(folder, model). Raises UserError naming the problem and `other`, the module of torch_ref
        that does the same with any model that transformers loads."""
        if self.source is None:
            raise UserError(self.problem)
        if self.folder is None or self.model is None:
            raise UserError(f"{self.problem}; or use python -m torch_ref.{other}")
        return self.folder, self.model

    def require_caches(self, config: Config) -> None:
        """Refuse a teacher that the decoder cannot run where a cache of its numbers is missing."""
        splits = (f"{config.cache.path}/{split}" for split in ("train", "heldout"))
        if any(read_manifest(path) is None for path in splits):
            self.require_model(other="teacher")


def find_teacher(path: str, *, key: str = "teacher.path") -> TeacherFiles:
    """Of an HF folder, GGUF file or hub id. Whatever is wrong with it stands in `problem`; `key` is
    the option that named it (the student's files are found alike)."""
    try:
        named = find_path(path)
        source = Path(named).expanduser()
    except UserError as error:
        return TeacherFiles(None, None, None, str(error))
    is_gguf = source.suffix == ".gguf" and source.is_file()
    try:
        folder = hf.local_folder(named, key=key)
    except UserError as error:
        return TeacherFiles(source if is_gguf else None, None, None, str(error))
    source = source if is_gguf else folder
    try:
        return TeacherFiles(source, folder, hf.model_config(hf.read_config(folder)))
    except UserError as error:
        return TeacherFiles(source, folder, None, str(error))


def teacher_folders(config: Config) -> tuple[Path | None, Path | None]:
    """(the teacher's folder, the same if the decoder can run it). Where it is not here, or is of
    another architecture, what the live teacher does is left out, and one line says so.

    Raises:
        UserError: the student is to be cut from a teacher that is not here, or there are no caches
            to train from without it.
    """
    if not config.teacher.path:
        return None, None
    found = find_teacher(config.teacher.path)
    if found.model is not None:
        return found.folder, found.folder
    if found.folder is None and config.student.from_teacher is not None:
        raise UserError(found.problem)
    found.require_caches(config)
    say(
        "training from the cache alone, without cache check and test table, which need the live "
        f"teacher: {found.problem}"
    )
    return found.folder, None


def load_teacher(folder: Path, config: Config, mesh: Mesh) -> Decoder:
    """The teacher in its own dtype, as its caches are made and checked with it."""
    dtype = jnp.dtype(config.teacher.dtype)
    return hf.load_model(
        folder,
        param_dtype=dtype,
        compute_dtype=dtype,
        attention=config.train.attention_implementation,
        experts=config.train.experts,
        shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
        row_sharding=sharding.batch_sharding(mesh),
        packed_experts=config.teacher.packed_experts,
    )
