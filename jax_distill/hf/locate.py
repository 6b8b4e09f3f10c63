"""A model's architecture where its weights need not be: config.json is enough."""

from pathlib import Path
from typing import NamedTuple

from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.data import Tokenizer
from jax_distill.hf.architecture import model_config, read_config
from jax_distill.hf.folder import local_folder
from jax_distill.model import ModelConfig


class Architecture(NamedTuple):
    """model: as config.json says. vocab_size: rows of the head that stand for a token: as many as
    the tokenizer beside config.json has, or all."""

    model: ModelConfig
    vocab_size: int


def find_architecture(path: str, key: str) -> Architecture:
    """Of a folder with config.json, a GGUF file, or a hub id whose config.json is among the shipped
    `configs/` (it names the model) or in the hub's cache. Nothing is downloaded.

    Raises:
        UserError: none of these; names `key`, the configuration's.
    """
    folder = _folder(path, key)
    model = model_config(read_config(folder))
    if not (folder / "tokenizer.json").is_file():
        return Architecture(model, model.vocab_size)
    return Architecture(model, min(Tokenizer.load(folder).length, model.vocab_size))


def _folder(path: str, key: str) -> Path:
    named = Path(find_path(path)).expanduser()
    if named.is_dir():
        return named
    if named.suffix == ".gguf":
        return local_folder(named)
    for config in sorted(Path(find_path("configs")).glob("*/config.json")):
        if read_config(config.parent).get("_name_or_path") == path:
            return config.parent
    if cached := _hub_cache(path):
        return cached
    raise UserError(
        f"expected a folder with config.json for {key}, got {path}, which is not on this disk; "
        f"pass --{key} FOLDER (its config.json is enough)"
    )


def _hub_cache(hub_id: str) -> Path | None:
    """The folder of the hub's cache that holds the model's config.json."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except ValueError:  # no hub id at all
        return None
    return Path(found).parent if isinstance(found, str) else None
