"""The architecture of a student that is cut from its teacher: from numbers alone, no weights."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax_distill import hf, model_folder
from jax_distill.base.errors import UserError
from jax_distill.config import Config, FromTeacher, check_cut
from jax_distill.hf.locate import Architecture, find_architecture
from jax_distill.model import ModelConfig, count_parameters

MLP_MULTIPLE = 64
"""`intermediate_size`, where the number of parameters decides it, is a multiple of this: tiles of
tensor cores."""


def planned_architecture(config: Config) -> Architecture:
    """The student's before its weights exist: of its own config.json, or cut from its teacher's.

    Raises:
        UserError: no config.json at hand, nothing to cut from; see `student_shape`.
    """
    cut = config.student.from_teacher
    if cut is None:
        return find_architecture(config.student.path, "student.path")
    if not config.teacher.path:
        raise UserError("expected teacher.path for student.from_teacher, got none; name a teacher")
    model, vocab_size = find_architecture(config.teacher.path, "teacher.path")
    narrowed, layers = student_shape(model, cut)
    return Architecture(narrowed.with_layers(layers), vocab_size)


def student_shape(teacher: ModelConfig, cut: FromTeacher) -> tuple[ModelConfig, list[int]]:
    """(the teacher with the student's widths, still of all its layers; the layers that stay, by
    their position alone: with `importance_by` others, as many, take their part).

    Raises:
        UserError: see `check_cut` and `kept_layers`; a width that is none of the teacher's; widths
            of experts.
    """
    check_cut(cut)
    narrowed = _narrowed(teacher, cut.widths)
    if cut.layers is None and cut.parameters is None:
        return narrowed, list(range(teacher.num_hidden_layers))
    if cut.layers is None:
        return narrowed, kept_layers(narrowed, layers=None, parameters=cut.parameters)
    layers = kept_layers(narrowed, layers=cut.layers, parameters=None)
    if cut.parameters is not None:
        width = _fitting_mlp(narrowed.with_layers(layers), cut.parameters)
        if width != narrowed.intermediate_size:
            narrowed = _narrowed(narrowed, {"intermediate_size": width})
    return narrowed, layers


def kept_layers(
    config: ModelConfig, *, layers: Sequence[int] | None, parameters: int | None
) -> list[int]:
    """The teacher's layers that a student keeps; raises as `model_folder.kept_layers` does."""
    depth = config.num_hidden_layers
    slots = hf.weight_table(config).values()
    layer = sum(math.prod(slot.shape) for slot in slots if slot.layer == 0)
    outside = count_parameters(config) - layer * depth
    return model_folder.kept_layers(
        depth, layers=layers, parameters=parameters, layer=layer, outside=outside
    )


def _narrowed(teacher: ModelConfig, widths: dict[str, int]) -> ModelConfig:
    for name, width in widths.items():
        if teacher.num_local_experts and name != "num_key_value_heads":
            raise UserError(
                f"expected {name} of the teacher, {getattr(teacher, name)}, for a model with "
                f"experts, got {width}: it would have to be measured for each expert; leave it out"
            )
        if not 1 <= width <= getattr(teacher, name):
            raise UserError(
                f"expected {name} from 1 to the teacher's {getattr(teacher, name)}, got {width}; "
                "lower it"
            )
    heads = widths.get("num_key_value_heads", teacher.num_key_value_heads)
    each = teacher.num_attention_heads // teacher.num_key_value_heads
    sizes: dict[str, Any] = {**widths, "num_attention_heads": heads * each}
    return dataclasses.replace(teacher, **sizes)


def _fitting_mlp(config: ModelConfig, parameters: int) -> int:
    """The largest multiple of MLP_MULTIPLE that fits; the teacher's own width where that does."""
    own = config.intermediate_size

    def count(width: int) -> int:
        return count_parameters(_narrowed(config, {"intermediate_size": width}))

    if count_parameters(config) <= parameters:
        return own
    if config.num_local_experts:
        raise UserError(
            "expected student.from_teacher.layers or .parameters for a model with experts, got "
            "both, and parameters would narrow its MLPs; set one of them to null"
        )
    step = MLP_MULTIPLE if own > MLP_MULTIPLE else 1
    per_neuron = (count(own) - count(1)) // max(own - 1, 1)
    width = (parameters - (count(own) - own * per_neuron)) // max(per_neuron, 1) // step * step
    if width < step:
        raise UserError(
            f"expected student.from_teacher.parameters of at least {count(step):,} for "
            f"{config.num_hidden_layers} layers with {step} MLP neurons each, got {parameters:,}; "
            "raise it, or keep fewer layers"
        )
    return width
