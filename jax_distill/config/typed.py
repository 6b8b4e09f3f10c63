"""Plain values, as YAML gives them, into the types of the schema."""

import dataclasses
import types
import typing
from typing import Any, Literal

from jax_distill.config.refusal import Refusal
from jax_distill.config.schema import Config, dataclass_in


def annotation_of(key: str) -> Any:
    """The type of a dotted key of the schema."""
    found: Any = Config
    for name in key.split("."):
        inner = dataclass_in(found)
        assert inner is not None
        found = typing.get_type_hints(inner)[name]
    return found


def alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def from_mapping(cls: type, tree: dict, prefix: str) -> Any:
    """A dataclass of the schema from a mapping.

    Raises:
        Refusal: a value of the wrong type, an unknown key or a missing one, named.
    """
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            raise Refusal(
                f"expected {', '.join(hints)} in {prefix.removesuffix('.')}, got {key}; correct it"
            )
    for each in dataclasses.fields(cls):
        factory = each.default_factory is not dataclasses.MISSING
        if each.default is dataclasses.MISSING and not factory and each.name not in tree:
            raise Refusal(f"expected {prefix}{each.name}, got none; add it")
    return cls(**{key: _value(hints[key], tree[key], prefix + key) for key in tree})


_MISFIT = object()


_TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _value(annotation: Any, value: Any, key: str) -> Any:
    """The value of a key, as the type that the schema gives it."""
    options = alternatives(annotation)
    if value is None and dataclasses.is_dataclass(annotation):
        value = {}  # a section of which every key is a comment
    for option in options:
        fitting = _fit(option, value, key)
        if fitting is not _MISFIT:
            return fitting
    raise Refusal(f"expected {key} as {type_names(annotation)}, got {value!r}; correct it")


def type_names(annotation: Any) -> str:
    """A key's type in words."""
    return " or ".join(_type_name(option) for option in alternatives(annotation))


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        (inner,) = typing.get_args(annotation)
        return "a list of " + {int: "whole numbers", float: "numbers"}.get(inner, "mappings")
    if dataclasses.is_dataclass(annotation):
        return "a mapping of " + ", ".join(each.name for each in dataclasses.fields(annotation))
    return _TYPE_NAMES[annotation]


def _fit(option: Any, value: Any, key: str) -> Any:
    """The value as one of a key's types, or _MISFIT. A float without a fraction is a whole number:
    1e3 steps are 1000."""
    if typing.get_origin(option) is Literal:
        return value if value in typing.get_args(option) else _MISFIT
    if typing.get_origin(option) is list:
        if not isinstance(value, list):
            return _MISFIT
        (inner,) = typing.get_args(option)
        return [_value(inner, each, f"{key}[{place}]") for place, each in enumerate(value)]
    if dataclasses.is_dataclass(option):
        is_mapping = isinstance(value, dict)
        return from_mapping(typing.cast(type, option), value, f"{key}.") if is_mapping else _MISFIT
    if isinstance(value, bool) and option is not bool:
        return _MISFIT
    if option is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if option is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, option) else _MISFIT
