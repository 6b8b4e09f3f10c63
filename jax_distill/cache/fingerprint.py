"""What a store's manifest calls its teacher: the content of the files it was run from."""

import hashlib
import json
from pathlib import Path

from jax_distill.config import Refusal

# In the order in which transformers looks for them.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def teacher_fingerprint(place: Path) -> str:
    """sha256, in hex, of a teacher's content; both backends name it so.

    Args:
        place: a `.gguf` file, of which it is the plain sha256 (whatever it is converted to or
            called); or a model folder: over the names and bytes of config.json and the weight
            files, in order.

    Raises:
        Refusal: no config.json there, or an index that is broken or lists a missing file.
    """
    if place.suffix == ".gguf":
        return _digest(place)
    digest = hashlib.sha256()
    for file in sorted({place / "config.json", *_weight_files(place)}):
        if not file.is_file():
            raise Refusal(f"expected {file}, got nothing there; fetch the folder again")
        digest.update(f"{file.name} {_digest(file)}\n".encode())
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                return [folder / name for name in names]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Refusal(
                    f"expected a weight_map in {index}, got {error!r}; fetch it"
                ) from error
    return []


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
