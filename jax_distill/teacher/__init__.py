"""The teacher reads each row once; the store keeps its top K.

`python -m jax_distill.teacher --config X.yaml` writes `<cache.path>/train` and
`<cache.path>/heldout`. The same command goes on after a kill, and does nothing where both are
finished.
"""

from jax_distill.cache import teacher_fingerprint
from jax_distill.teacher.capture import capture, topk_targets
from jax_distill.teacher.files import TeacherFiles, find_teacher, teacher_folders
from jax_distill.teacher.stores import main, tokenizer_folder, write_stores
from jax_distill.teacher.writing import expected_bytes, write_store

__all__ = [
    "TeacherFiles",
    "capture",
    "expected_bytes",
    "find_teacher",
    "main",
    "teacher_fingerprint",
    "teacher_folders",
    "tokenizer_folder",
    "topk_targets",
    "write_store",
    "write_stores",
]
