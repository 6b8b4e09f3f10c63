"""Where a model is on this disk: a folder, a GGUF file, or a hub id."""

import re
from pathlib import Path

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import one_line
from jax_distill.hf.gguf import converted_folder
from jax_distill.hf.tensor_files import WEIGHT_SUFFIXES

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# First parts of relative paths, where this program's own outputs lie; no owner on the hub.
FOLDERS = ("runs", "configs", "checkpoints", "outputs", "exports", "caches")
HUB_FILES = "*.json *.safetensors *.jinja *.txt *.model LICENSE* LICENCE* NOTICE*".split()


def local_folder(path: str | Path, *, key: str = "") -> Path:
    """A folder with config.json. A `.gguf` file is converted once into the user's cache folder;
    `owner/name` is fetched from the Hugging Face hub (extra `hub`), once.

    Args:
        key: the option that named the path, for the message.

    Raises:
        UserError: nothing there. What looks like a path is never looked up on the hub.
    """
    text = str(path) if isinstance(path, str) else path.as_posix()
    wanted = f"{key} to be a model folder" if key else "a model folder"
    if not text:
        raise UserError(f"expected {wanted}, a .gguf file or a hub id owner/name, got none")
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        if not folder.is_file():
            raise UserError(f"expected a GGUF file, got {path}, which is missing; check the path")
        return converted_folder(folder)
    if folder.exists() or not _is_hub_id(text):
        raise UserError(
            f"expected {wanted}, a .gguf file or a hub id owner/name, got {text}, where nothing "
            "of the kind is; check the path"
        )
    return _snapshot(text)


def _is_hub_id(text: str) -> bool:
    """`owner/name`, and no path: neither below a folder that is here nor below one of ours."""
    first = text.split("/")[0]
    return bool(HUB_ID.fullmatch(text)) and first not in FOLDERS and not Path(first).exists()


def _snapshot(hub_id: str) -> Path:
    try:
        from huggingface_hub import list_repo_files, snapshot_download
    except ImportError as error:
        raise UserError(
            f"expected the folder {hub_id}, got nothing there and no huggingface_hub to fetch it; "
            "pip install 'jax-distill[hub]'"
        ) from error
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
        # Weights of a kind that is not fetched must not look like none at all.
        lies_there = any(folder.glob("*.safetensors"))
        names = [] if lies_there else list_repo_files(hub_id)
    except Exception as error:  # every network and hub failure ends in the same one line
        raise UserError(
            f"expected the folder or hub id {hub_id}, got {type(error).__name__}: "
            f"{one_line(error)}; check the path, or the connection"
        ) from error
    for name in names:
        if name.lower().endswith(WEIGHT_SUFFIXES):
            raise UserError(
                f"expected {hub_id} to have its weights as safetensors, got {name}; "
                "convert them, or use another model"
            )
    return folder
