"""YAML and the command line into a `Config`."""

import difflib
import importlib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jax_distill.base.command import run_command
from jax_distill.base.errors import UserError
from jax_distill.config.checks import derived
from jax_distill.config.describe import help_lines
from jax_distill.config.schema import Config, as_dict
from jax_distill.config.typed import (
    alternatives,
    annotation_of,
    field_names,
    from_mapping,
    is_list,
)
from jax_distill.config.yaml_text import check_text, dump, parse, read_mapping


def _check_key(key: str, where: str) -> None:
    known = field_names()
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1)
    near = near or [name for name in known if name.endswith(f".{key}")]
    cure = f"the nearest is {near[0]}" if near else "--help shows all keys"
    raise UserError(f"{where}: no such key {key[:60]}; {cure}")


def _flat_keys(tree: dict, prefix: str = "") -> list[str]:
    keys = []
    for key, value in tree.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _flat_keys(value, f"{prefix}{key}.")
    return keys


def read_yaml(path: str) -> dict:
    """The mapping in a YAML file, as `read_mapping`; unknown keys are refused by name."""
    tree = read_mapping(path, "--config")
    for key in _flat_keys(tree):
        _check_key(key, path)
    return tree


def load(argv: Sequence[str], prog: str = "jax_distill") -> Config:
    """The configuration that a command line asks for.

    `--config FILE` is applied first wherever it stands, `--key value` on top.

    Raises:
        UserError: no `--config`, unknown key (a near one is named), wrong type, conflicting values.
        SystemExit: for --help and --print_config, with 0.
    """
    files, rest = _take_config_files(list(argv))
    if "--help" in rest or "-h" in rest:
        print("\n".join(help_lines(prog)))
        raise SystemExit(0)
    wants_print = "--print_config" in rest
    rest = [word for word in rest if word != "--print_config"]
    if not files:
        raise UserError(
            f"expected python -m {prog} --config FILE [--KEY VALUE …], got no --config; "
            "try --config configs/quickstart.yaml, or see --help"
        )
    (file,) = files
    tree = read_yaml(file)
    for key, value in _options(rest):
        # A section on the command line overrides the file key by key, as single keys do.
        parts = {f"{key}.{name}": inner for name, inner in _mapping(key, value).items()}
        for part, inner in (parts or {key: value}).items():
            _put(tree, part, inner)
    config = derived(from_mapping(Config, tree, ""), Path(file).stem)
    if wants_print:
        print(dump(as_dict(config)), end="")
        raise SystemExit(0)
    return config


def _options(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(key, value) of each `--key value` or `--key=value`. A value is read as the YAML would be,
    but where text is meant it is the word as it stands."""
    left = iter(words)
    for word in left:
        if not word.startswith("--"):
            raise UserError(
                f"command line: expected --key value, got {word}; put its key before it"
            )
        key, equals, text = word[2:].partition("=")
        _check_key(key, "command line")
        if not equals:
            value = next(left, None)
            if value is None or value.startswith("--"):
                raise UserError(f"--{key}: expected a value, got {value or 'nothing'}; give one")
            text = value
        try:
            yield key, _word(text, annotation_of(key))
        except UserError as refusal:
            raise UserError(f"--{key}: {refusal}") from None


def _mapping(key: str, value: Any) -> dict:
    """The keys that a whole section on the command line sets; {} where it is no section."""
    if not isinstance(value, dict):
        return {}
    for inner in _flat_keys(value, f"{key}."):
        _check_key(inner, "command line")
    return value if "." not in key else {}


def _word(text: str, annotation: Any) -> Any:
    options = alternatives(annotation)
    is_text = str in options or any(typing.get_origin(each) is Literal for each in options)
    is_null = text == "null" and type(None) in options
    if not is_text or is_null or (text.startswith("[") and any(map(is_list, options))):
        return parse(text)
    check_text(text)
    return text


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
                raise UserError("--config: expected a file, got nothing; name a YAML file")
            files.append(value)
        elif word.startswith("--config="):
            files.append(word.split("=", 1)[1])
        else:
            rest.append(word)
    if len(files) > 1:
        raise UserError(f"expected one --config, got {len(files)}: {', '.join(files)}")
    return files, rest


def run_configured(prog: str, module: str) -> None:
    """Run `module`.main(config) as the command `prog`. The module, and JAX with it, is imported
    once the options are read: a wrong one is refused at once."""

    def main(argv: Sequence[str]) -> None:
        config = load(argv, prog)
        importlib.import_module(module).main(config)

    run_command(main)
