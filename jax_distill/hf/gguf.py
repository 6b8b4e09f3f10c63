from pathlib import Path


def converted_folder(path: Path) -> Path:
    raise NotImplementedError
