"""What the schema says of itself: `--help`, and a JSON Schema for completion in editors."""

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal

from jax_distill.config.schema import Config
from jax_distill.config.typed import (
    alternatives,
    annotation_of,
    dataclass_in,
    field_names,
    is_list,
    type_names,
)
from jax_distill.objective import Execution, Objective


def help_lines(prog: str) -> Iterator[str]:
    """What `--help` shows: every key with its type, its default and its words in the schema."""
    yield f"usage: python -m {prog} --config FILE [--print_config] [--KEY VALUE …]"
    yield "  --config FILE   YAML of these keys, as configs/quickstart.yaml; options override it"
    yield "  --print_config  show what results, and do nothing"
    if prog.endswith(".train"):
        yield "  --sweep KEY=V1,V2 …  one run for each combination; --print_commands shows them"
    for key in field_names():
        *path, name = key.split(".")
        section = dataclass_in(annotation_of(key))
        if section:
            yield f"\n--{key}: {(section.__doc__ or '').splitlines()[0]}"
            continue
        owner: Any = dataclass_in(annotation_of(".".join(path))) if path else Config
        default = {each.name: each for each in dataclasses.fields(owner)}[name].default
        default_text = "" if default is dataclasses.MISSING else f" ({json.dumps(default)})"
        yield f"  --{key}  {type_names(annotation_of(key))}{default_text}"
        words = _words(name, owner)
        if words:
            yield textwrap.indent(textwrap.fill(words, 92), " " * 6)


def _words(name: str, owner: type) -> str:
    """What a docstring says of a field. The loss's fields are described where they are computed."""
    for each in (owner, Objective, Execution):
        found = re.search(rf"^ +{name}: ((?:.|\n(?! +\w+: )(?!\n))*)", each.__doc__ or "", re.M)
        if found:
            return " ".join(found[1].split())
    return ""


def json_schema(annotation: Any = Config) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a configuration, or of one type in it. What is out of range, and
    keys that exclude each other, only `load` knows."""
    if dataclasses.is_dataclass(annotation):
        return _object(typing.cast(type, annotation))
    if typing.get_origin(annotation) is Literal:
        return {"enum": list(typing.get_args(annotation))}
    if is_list(annotation):
        return {"type": "array", "items": json_schema(*typing.get_args(annotation))}
    options = alternatives(annotation)
    if len(options) > 1:
        return {"anyOf": [json_schema(option) for option in options]}
    return {"type": _JSON_TYPES[annotation]}


_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _object(cls: type) -> dict[str, Any]:
    hints, properties, required = typing.get_type_hints(cls), {}, []
    for each in dataclasses.fields(cls):
        properties[each.name] = entry = json_schema(hints[each.name])
        words = _words(each.name, cls)
        if words:
            entry["description"] = words
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            required.append(each.name)
        elif isinstance(each.default, bool | int | float | str | None):
            entry["default"] = each.default
    return {
        "type": "object",
        "description": (cls.__doc__ or "").splitlines()[0],
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
