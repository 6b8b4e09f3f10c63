"""The configuration: frozen dataclasses, read from YAML and the command line, by both backends.

One schema serves every entry point. Architecture is not here: it comes from Hugging Face's
config.json. A field that no code reads is an error (a test looks for each of them).
"""

from jax_distill.config.checks import (
    check_optimizer,
)
from jax_distill.config.loading import (
    load,
    read_yaml,
)
from jax_distill.config.places import (
    DISK_FULL,
    EXPORT_MARKS,
    FIGURES,
    STUDENT_MARKS,
    cache_folder,
    check_new_file,
    check_new_folder,
    check_writable,
    find_path,
    new_folder,
)
from jax_distill.config.refusal import (
    CommandLine,
    Failure,
    Refusal,
    above_zero,
    run_command,
)
from jax_distill.config.schema import (
    CacheConfig,
    Config,
    DataConfig,
    FromTeacher,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    Source,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    as_dict,
    field_names,
    save,
    without_teacher,
)

__all__ = [
    "CacheConfig",
    "CommandLine",
    "Config",
    "DISK_FULL",
    "DataConfig",
    "EXPORT_MARKS",
    "FIGURES",
    "Failure",
    "FromTeacher",
    "LossConfig",
    "MeshConfig",
    "OptimizerConfig",
    "Refusal",
    "STUDENT_MARKS",
    "Source",
    "StudentConfig",
    "TeacherConfig",
    "TrainConfig",
    "above_zero",
    "as_dict",
    "cache_folder",
    "check_new_file",
    "check_new_folder",
    "check_optimizer",
    "check_writable",
    "field_names",
    "find_path",
    "load",
    "new_folder",
    "read_yaml",
    "run_command",
    "save",
    "without_teacher",
]
