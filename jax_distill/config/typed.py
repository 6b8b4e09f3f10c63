"""Plain values, as YAML gives them, into the types of the schema."""

import dataclasses
import types
import typing
from typing import Any, Literal

from jax_distill.base.errors import UserError, shown
from jax_distill.config.schema import Config


def field_names(cls: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, nested dataclasses included (`loss.temperature`)."""
    names = []
    for f in dataclasses.fields(cls):
        inner = dataclass_in(f.type)
        names.append(prefix + f.name)
        if inner is not None:
            names += field_names(inner, f"{prefix}{f.name}.")
    return names


def dataclass_in(annotation: Any) -> type | None:
    """The dataclass that a field holds, alone or beside None; None for plain values and lists."""
    options = getattr(annotation, "__args__", (annotation,))
    if getattr(annotation, "__origin__", None) is list:
        return None
    return next((t for t in options if dataclasses.is_dataclass(t)), None)  # type: ignore[return-value]


def annotation_of(key: str) -> Any:
    """The type of a dotted key of the schema."""
    found: Any = Config
    for name in key.split("."):
        inner = dataclass_in(found)
        assert inner is not None
        found = typing.get_type_hints(inner)[name]
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings by dotted keys; an empty one has none."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, itself."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def from_mapping(cls: type, tree: dict, prefix: str) -> Any:
    """A dataclass of the schema from a mapping.

    Raises:
        UserError: a value of the wrong type, an unknown key or a missing one, named.
    """
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            raise UserError(
                f"expected {', '.join(hints)} in {prefix.removesuffix('.')}, got {key[:60]}; "
                "correct it"
            )
    for each in dataclasses.fields(cls):
        factory = each.default_factory is not dataclasses.MISSING
        if each.default is dataclasses.MISSING and not factory and each.name not in tree:
            raise UserError(f"expected {prefix}{each.name}, got none; add it")
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
    raise UserError(f"expected {key} as {type_names(annotation)}, got {shown(value)}; correct it")


def type_names(annotation: Any) -> str:
    """A key's type in words."""
    return " or ".join(_type_name(option) for option in alternatives(annotation))


def _type_name(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(typing.get_args(annotation))
    if is_list(annotation):
        (inner,) = typing.get_args(annotation)
        return "a list of " + {int: "whole numbers", float: "numbers", list[int]: "pairs"}.get(
            inner, "mappings"
        )
    if dataclasses.is_dataclass(annotation):
        return "a mapping of " + ", ".join(each.name for each in dataclasses.fields(annotation))
    return _TYPE_NAMES[annotation]


def _fit(option: Any, value: Any, key: str) -> Any:
    """The value as one of a key's types, or _MISFIT. A float without a fraction is a whole number:
    1e3 steps are 1000."""
    if typing.get_origin(option) is Literal:
        return value if value in typing.get_args(option) else _MISFIT
    if is_list(option):
        if not isinstance(value, list):
            return _MISFIT
        (inner,) = typing.get_args(option)
        return [_value(inner, each, f"{key}[{i}]") for i, each in enumerate(value)]
    if dataclasses.is_dataclass(option):
        is_mapping = isinstance(value, dict)
        return from_mapping(typing.cast(type, option), value, f"{key}.") if is_mapping else _MISFIT
    if isinstance(value, bool) and option is not bool:
        return _MISFIT
    if option is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if option is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, option) else _MISFIT
