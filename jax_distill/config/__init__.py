"""The configuration: frozen dataclasses, read from YAML and the command line, by both backends.

One schema serves every entry point. Architecture is not here: it comes from Hugging Face's
config.json. A field that no code reads is an error (a test looks for each of them).
"""

from jax_distill.config.checks import check_cut
from jax_distill.config.describe import json_schema
from jax_distill.config.grid import read_grid
from jax_distill.config.loading import load, read_yaml, run_configured
from jax_distill.config.schema import (
    CacheConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    FromTeacher,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    Source,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    as_dict,
    save,
    without_teacher,
)
from jax_distill.config.typed import field_names, flatten
from jax_distill.config.yaml_text import parse, read_mapping

__all__ = [
    "CacheConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "FromTeacher",
    "LossConfig",
    "MeshConfig",
    "OptimizerConfig",
    "Source",
    "StudentConfig",
    "TeacherConfig",
    "TrainConfig",
    "as_dict",
    "check_cut",
    "field_names",
    "flatten",
    "json_schema",
    "load",
    "parse",
    "read_grid",
    "read_mapping",
    "read_yaml",
    "run_configured",
    "save",
    "without_teacher",
]
