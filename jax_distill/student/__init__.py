"""The student before training: cut from its teacher in depth and width, or as its folder has it.

`python -m jax_distill.student --teacher DIR --out DIR (--layers 0,5 | --parameters N | WIDTHS)
[--importance CACHE]`
"""

from jax_distill.student.command import main
from jax_distill.student.cutting import RECORD, changed_files, make_student
from jax_distill.student.shape import kept_layers, planned_architecture, student_shape
from jax_distill.student.start import check_tokenizers, prepare, vocabulary_size

__all__ = [
    "RECORD",
    "changed_files",
    "check_tokenizers",
    "kept_layers",
    "main",
    "make_student",
    "planned_architecture",
    "prepare",
    "student_shape",
    "vocabulary_size",
]
