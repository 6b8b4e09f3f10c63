"""The teacher reads each row once; the store keeps its top K.

`python -m jax_distill.teacher --config X.yaml` writes `<cache.path>/train` and
`<cache.path>/heldout`. The same command goes on after a kill, and does nothing where both are
finished.
"""

from jax_distill.teacher.capture import capture, topk_targets
from jax_distill.teacher.stores import main, teacher_fingerprint, tokenizer_folder, write_stores
from jax_distill.teacher.writing import expected_bytes, write_store

__all__ = [
    "capture",
    "expected_bytes",
    "main",
    "teacher_fingerprint",
    "tokenizer_folder",
    "topk_targets",
    "write_store",
    "write_stores",
]
