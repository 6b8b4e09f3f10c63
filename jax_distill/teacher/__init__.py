"""The teacher reads each row once; the cache keeps its top K.

`python -m jax_distill.teacher --config X.yaml` writes `<cache.path>/train` and
`<cache.path>/heldout`. Re-run the same command to resume after a kill; it does nothing where both
are finished. The command refuses wrong options before JAX is imported, so names come on demand.
"""

import importlib
from typing import Any

_FILES = {
    "AHEAD": "writing",
    "KnownRows": "rows",
    "Shard": "rows",
    "TeacherFiles": "files",
    "data_path": "caches",
    "expected_bytes": "writing",
    "find_teacher": "files",
    "load_teacher": "files",
    "main": "caches",
    "split_manifests": "caches",
    "teacher_folders": "files",
    "tokenizer_folder": "caches",
    "write_cache": "writing",
    "write_caches": "caches",
}
__all__ = list(_FILES)


def __getattr__(name: str) -> Any:
    if name in _FILES.values():
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
