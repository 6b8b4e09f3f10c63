"""What a manifest calls its teacher and its tokenizer: by their content."""

import hashlib
import json
import re
from pathlib import Path

from jax_distill.base.errors import UserError, shown
from jax_distill.base.files import sha256_of
from jax_distill.base.json_object import read_json_object

# In the order in which transformers looks for them.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FILE_NAME = re.compile(r"(?!\.+$)[\w.+@= -]{1,255}")  # no path, not only dots, one line


def vocabulary_fingerprint(vocabulary: dict[str, int]) -> str:
    """sha256, in hex, of a token → id map, by id: `data.Tokenizer.fingerprint` is the same."""
    ordered = sorted((number, token) for token, number in vocabulary.items())
    return hashlib.sha256(json.dumps(ordered, ensure_ascii=True).encode()).hexdigest()


def vocabulary_conflict(ours: dict[str, int], other: dict[str, int]) -> tuple[int, str, str] | None:
    """(id, our token, the other's) of the smallest id that two tokenizers give to different tokens.

    Only ids that both have are compared: padded heads and tokens added at the end are no conflict.
    """
    mine = {i: token for token, i in ours.items()}
    theirs = {i: token for token, i in other.items()}
    conflicts = [i for i in mine.keys() & theirs.keys() if mine[i] != theirs[i]]
    return (min(conflicts), mine[min(conflicts)], theirs[min(conflicts)]) if conflicts else None


def teacher_fingerprint(path: Path) -> str:
    """sha256, in hex, of a teacher's content; both backends name it so.

    Args:
        path: a `.gguf` file, of which it is the plain sha256 (whatever it is converted to or
            called); or a model folder: over the names and bytes of config.json and the weight
            files, in order.

    Raises:
        UserError: no config.json there, or an index that is broken or lists a missing file.
    """
    if path.suffix == ".gguf":
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted({path / "config.json", *_weight_files(path)}):
        if not file.is_file():
            raise UserError(f"expected {file}, got nothing there; download the folder again")
        digest.update(f"{file.name} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(
                    f"expected a weight_map in {index}, got {shown(weight_map)}; re-download it"
                )
            for file in weight_map.values():
                # A name, not a path: what the index lists is in its own folder, and nowhere else.
                if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
                    raise UserError(
                        f"expected names of files beside {index}, got {shown(file)}; re-download it"
                    )
            return [folder / file for file in weight_map.values()]
    return []
