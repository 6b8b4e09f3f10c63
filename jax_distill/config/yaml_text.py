"""YAML as configurations are written: text in, plain values out, and back.

A subset of YAML 1.1 without its traps: no anchors and aliases (a kilobyte of them can stand for
gigabytes), no tags, no dates, no `010` for 8, no `1:30` for 90; a key stands once, and 1e-4 is a
number.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from jax_distill.base.errors import UserError, shown
from jax_distill.base.files import find_path

MAX_BYTES = 1_000_000  # of a file; a configuration that means something has a few thousand
_MAX_DEPTH = 20
_TAG = "tag:yaml.org,2002:"
# What a plain scalar is by its form; whatever matches nothing is text.
_FORMS = (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    (
        "bool",
        r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)",
        list("yYnNtTfFoO"),
    ),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+)", list("-+0123456789")),
    (
        "float",
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    """Raises UserError for what this subset leaves out."""

    yaml_implicit_resolvers: dict = {}
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        line = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise UserError(f"{line}: expected no anchors (&x) and aliases (*x); write values out")
        if getattr(event, "tag", None) not in (None, "!"):
            raise UserError(f"{line}: expected no tags, got {event.tag}; leave it out")
        if self.depth == _MAX_DEPTH:
            raise UserError(f"{line}: expected at most {_MAX_DEPTH} brackets within each other")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(f"line {line}: expected keys that are text, got {shown(key)}")
            if key in seen:
                raise UserError(
                    f"expected each key once, got {key!r} in lines {seen[key]} and {line}; keep one"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        text = self.construct_scalar(node)
        check_text(text)
        return text

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A float, or a whole number below 2^63: `int` itself refuses 5,000 digits."""
        digits = self.construct_scalar(node).replace("_", "")
        is_whole = node.tag == f"{_TAG}int"
        number = int(digits, 0) if is_whole and len(digits) <= 70 else float("inf")
        if is_whole and abs(number) >= 2**63:
            raise UserError(
                f"line {node.start_mark.line + 1}: expected whole numbers below 2^63, "
                f"got {shown(digits)}"
            )
        return number if is_whole else self.construct_yaml_float(node)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would read as something else."""

    yaml_implicit_resolvers: dict = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """PyYAML writes U+0085, a line break, as it is between single quotes and reads a space."""
        return self.represent_scalar(f"{_TAG}str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)
for _name, _form, _first in _FORMS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"^{_form}$"), _first)
_Loader.add_constructor(f"{_TAG}str", _Loader.construct_text)
for _name in ("int", "float"):
    _Loader.add_constructor(f"{_TAG}{_name}", _Loader.construct_number)


def check_text(text: str) -> None:
    """Refuse text that no file name and no UTF-8 file can hold."""
    bad = re.search("[\0\ud800-\udfff]", text)
    if bad:
        raise UserError(f"expected Unicode text, got {bad[0]!a} in {text[:60]!a}; remove it")


def parse(text: str) -> Any:
    """The value of YAML text: null, bool, int, float, str, lists and dicts of them.

    Raises:
        UserError: no YAML, or what this subset leaves out, in one line.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(f"expected YAML, got {problem}; correct it") from None


def dump(value: Any) -> str:
    """YAML text of a value; `parse` gives the value back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_mapping(path: str | Path, what: str = "file") -> dict[str, Any]:
    """The mapping in a YAML file of at most 1 MB; {} for an empty one.

    Args:
        what: the word for it in a refusal, for example the option that named it.

    Raises:
        UserError: it cannot be read, or is no such mapping; the file is named.
    """
    where = f"{what} {path}"
    try:
        with open(find_path(str(path)), "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"expected at most {MAX_BYTES:,} bytes, got more; name a YAML file")
        tree = parse(data.decode("utf-8"))
        if not isinstance(tree, dict | None):
            raise UserError(f"expected a mapping of keys, got {shown(tree)}; correct the file")
    except OSError as error:
        raise UserError(
            f"{where}: expected a readable file, got {error.strerror}; name a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise UserError(
            f"{where}: expected YAML in UTF-8, got other bytes; name a YAML file"
        ) from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return tree or {}
