"""Where a model lies on this disk: a folder, a GGUF file, or a hub id."""

from pathlib import Path

from jax_distill.config import Refusal
from jax_distill.hf.gguf import converted_folder


def local_folder(path: str | Path) -> Path:
    """A folder with config.json. A `.gguf` file is converted once into the user's cache folder;
    `owner/name` is fetched from the Hugging Face hub (extra `hub`), once. Raises Refusal."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.suffix == ".gguf":
        if not place.is_file():
            raise Refusal(f"expected a GGUF file, got {path}, which is missing; do check the path")
        return converted_folder(place)
    text = str(path)
    if place.exists() or text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise Refusal(
            f"expected a model folder, a .gguf file or a hub id owner/name, got {text}; "
            "do check the path"
        )
    return _snapshot(text)


def _snapshot(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise Refusal(
            f"expected the folder {hub_id}, got nothing there and no huggingface_hub to fetch it; "
            "do pip install 'jax-distill[hub]'"
        ) from error
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # every network and hub failure ends in the same one line
        reason = " ".join(str(error).split())[:200]
        raise Refusal(
            f"expected the folder or hub id {hub_id}, got {type(error).__name__}: {reason}; "
            "do check the path, or the connection"
        ) from error
