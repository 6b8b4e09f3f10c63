"""YAML and the command line into a `Config`."""

import dataclasses
import difflib
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from jax_distill.config.checks import derived
from jax_distill.config.places import find_path
from jax_distill.config.refusal import Refusal
from jax_distill.config.schema import Config, as_dict, dataclass_in, field_names
from jax_distill.config.typed import alternatives, annotation_of, from_mapping, type_names


class _StrictLoader(yaml.SafeLoader):
    """YAML as everybody reads it, but a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise Refusal(
                    f"expected each key once, got {key!r} in lines {seen[key]} and {line}; keep one"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-4 as text; everybody who writes it means a number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _check_key(key: str, where: str) -> None:
    known = field_names()
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    raise Refusal(f"{where}: no such key {key}; the nearest is {near}")


def _flat_keys(tree: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in tree.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _flat_keys(value, f"{prefix}{key}.")
    return keys


def read_yaml(path: str) -> dict:
    """The mapping in a YAML file; duplicate keys and unknown keys are refused by name."""
    try:
        with open(find_path(path), encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_StrictLoader) or {}
    except OSError as error:
        raise Refusal(
            f"--config {path}: expected a readable file, got {error.strerror}; name a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise Refusal(
            f"--config {path}: expected YAML in UTF-8, got other bytes; name a YAML file"
        ) from None
    except Refusal as error:
        raise Refusal(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise Refusal(f"{path}: expected YAML, got {problem}; correct the file") from None
    if not isinstance(tree, dict):
        raise Refusal(
            f"{path}: expected a mapping of keys, got {type(tree).__name__}; correct the file"
        )
    for key in _flat_keys(tree):
        _check_key(key, path)
    return tree


def load(argv: Sequence[str], prog: str = "jax_distill") -> Config:
    """The configuration that a command line asks for.

    `--config FILE` is applied first wherever it stands, `--key value` on top. Without it the
    quickstart's configuration is the default.

    Raises:
        Refusal: unknown key (the nearest right one is named), wrong type, conflicting values.
        SystemExit: for --help and --print_config, with 0.
    """
    files, rest = _take_config_files(list(argv))
    if "--help" in rest or "-h" in rest:
        print("\n".join(_help(prog)))
        raise SystemExit(0)
    wants_print = "--print_config" in rest
    rest = [word for word in rest if word != "--print_config"]
    file = files[-1] if files else "configs/quickstart.yaml"
    tree = read_yaml(file)
    for key, value in _options(rest):
        # A section on the command line goes on top, key by key, as its keys alone do.
        parts = {f"{key}.{name}": inner for name, inner in _mapping(key, value).items()}
        for part, inner in (parts or {key: value}).items():
            _put(tree, part, inner)
    config = derived(from_mapping(Config, tree, ""), Path(file).stem)
    if wants_print:
        print(yaml.safe_dump(as_dict(config), sort_keys=False), end="")
        raise SystemExit(0)
    return config


def _help(prog: str) -> Iterator[str]:
    """What `--help` shows: every key with its type, its default and its words in the schema."""
    yield f"usage: python -m {prog} [--config FILE] [--print_config] [--KEY VALUE …]"
    yield "  --config FILE   YAML of these keys (configs/quickstart.yaml); the others go on top"
    yield "  --print_config  show what results, and do nothing"
    for key in field_names():
        *path, name = key.split(".")
        section = dataclass_in(annotation_of(key))
        if section:
            yield f"\n--{key}: {(section.__doc__ or '').splitlines()[0]}"
            continue
        owner: Any = dataclass_in(annotation_of(".".join(path))) if path else Config
        default = {each.name: each for each in dataclasses.fields(owner)}[name].default
        shown = "" if default is dataclasses.MISSING else f" ({json.dumps(default)})"
        yield f"  --{key}  {type_names(annotation_of(key))}{shown}"
        words = re.search(rf"^ +{name}: ((?:.|\n(?! +\w+: ))*)", owner.__doc__ or "", re.M)
        if words:
            yield textwrap.indent(textwrap.fill(" ".join(words[1].split()), 92), " " * 6)


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(key, value) of each `--key value` or `--key=value`. A value is read as the YAML would be,
    but where text is meant it is the word as it stands."""
    left = iter(words)
    for word in left:
        if not word.startswith("--"):
            raise Refusal(f"command line: expected --key value, got {word}; put its key before it")
        key, equals, text = word[2:].partition("=")
        _check_key(key, "command line")
        if not equals:
            value = next(left, None)
            if value is None or value.startswith("--"):
                raise Refusal(f"--{key}: expected a value, got {value or 'nothing'}; give one")
            text = value
        yield key, _word(text, annotation_of(key))


def _mapping(key: str, value: Any) -> dict:
    """The keys that a whole section on the command line sets; {} where it is no section."""
    if not isinstance(value, dict):
        return {}
    for inner in _flat_keys(value, f"{key}."):
        _check_key(inner, "command line")
    return value if "." not in key else {}


def _word(text: str, annotation: Any) -> Any:
    options = alternatives(annotation)
    verbatim = str in options or any(typing.get_origin(each) is Literal for each in options)
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        return text
    return text if verbatim and not isinstance(value, list) else value


def _put(tree: dict, key: str, value: Any) -> None:
    """Set a dotted key; what is null on the way becomes a mapping."""
    first, dot, rest = key.partition(".")
    if not dot:
        tree[first] = value
        return
    if tree.get(first) is None:
        tree[first] = {}
    if isinstance(tree[first], dict):  # else it is refused where it stands
        _put(tree[first], rest, value)


def _take_config_files(argv: list[str]) -> tuple[list[str], list[str]]:
    files, rest = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            value = next(words, None)
            if value is None:
                raise Refusal("--config: expected a file, got nothing; name a YAML file")
            files.append(value)
        elif word.startswith("--config="):
            files.append(word.split("=", 1)[1])
        else:
            rest.append(word)
    if len(files) > 1:
        raise Refusal(f"expected one --config, got {len(files)}: {', '.join(files)}")
    return files, rest
