"""Places on disk: what a path of the configuration names, and what a command may write over."""

import contextlib
import errno
import fnmatch
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from jax_distill.config.refusal import Failure, Refusal


def find_path(path: str) -> str:
    """The file or folder that a path of the configuration names.

    `package:DIST:FILE` is FILE inside the installed distribution DIST. A relative path that does
    not exist but stands among the shipped `configs/` is that one, so the quickstart runs from any
    folder. Everything else is returned as it came, relative to the working directory.

    Raises:
        Refusal: the distribution, or the file in it, is missing.
    """
    if path.startswith("package:"):
        _, distribution, file = (*path.split(":", 2), "")[:3]
        if not distribution or not file:
            raise Refusal(f"expected package:DISTRIBUTION:FILE, got {path}; name both")
        try:
            found = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
        except importlib.metadata.PackageNotFoundError:
            raise Refusal(
                f"expected the package {distribution} to be installed, it is not; "
                f"run: pip install --no-deps {distribution}"
            ) from None
        if not found.exists():
            raise Refusal(
                f"expected {file} in the package {distribution}, got nothing there; "
                f"see what it has: pip show --files {distribution}"
            )
        return str(found)
    if not Path(path).exists() and Path(path).parts[:1] == ("configs",):
        package = Path(__file__).parent.parent
        for root in (package, package.parent):  # installed; a checkout
            if (root / path).exists():
                return str(root / path)
    return path


def cache_folder() -> Path:
    """Where things that can be made again are kept: `$XDG_CACHE_HOME/jax_distill`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jax_distill"


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


FIGURES = (".png", ".pdf", ".svg")  # suffixes of figures


def check_new_file(path: str | Path | None, option: str, suffixes: Collection[str] = ()) -> None:
    """Refuse, before any work, a file that could not be written at its end; its folder is made.
    None: nothing is to be written."""
    if path is None:
        return
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise Refusal(f"expected {option} to end in {', '.join(suffixes)}, got {path}; name it so")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = path.exists()
        path.open("ab").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise Refusal(
            f"expected {option} to be a file that can be written, got {path} ({error.strerror}); "
            "name another"
        ) from None


def check_writable(folder: str | Path, key: str) -> None:
    """Refuse, before any work, a folder that cannot be made, or not be written into."""
    place = Path(folder).absolute()
    try:
        while not place.exists():
            place = place.parent
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=place))
    except OSError as error:
        if error.errno in DISK_FULL:
            return  # whoever writes there says so, and how to go on
        raise Refusal(
            f"expected {key} to be a folder that can be written, got {folder} "
            f"({place}: {error.strerror}); name another"
        ) from None


# What README.md says in the folders that `student` and `export` of either backend wrote, and what
# stands in them beside the text files of their source.
STUDENT_MARKS = ("cut by jax_distill", "cut by torch_ref")


EXPORT_MARKS = ("Trained with jax_distill", "unfinished run of jax_distill")


MODEL_FILES = "README.md *.json *.jinja *.model *.safetensors merges.txt vocab.txt".split()


def check_new_folder(
    out: Path, *, marks: Sequence[str], apart: Iterable[Path], names: Collection[str] = ()
) -> None:
    """Refuse, before any work, to write the model folder `out` where something would be lost.

    Free is a place where nothing is, an empty folder, or one that the same command wrote: its
    README.md has one of `marks`, and beside it are only model files and files called as in `names`.

    Raises:
        Refusal: the place is not free, holds one of `apart` (what the command reads), is the
            working directory, or cannot be written.
    """
    place = out.resolve()
    for source in (Path.cwd(), *apart):
        source = source.resolve()
        if place == source or place in source.parents:
            raise Refusal(
                f"expected a new folder to write, got {out}, which is or holds {source}; "
                "name another"
            )
    check_writable(place, "the folder to write")
    if not place.exists() or not any(place.iterdir()):
        return
    card = place / "README.md"
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    known = [*MODEL_FILES, *names]
    foreign = [
        entry.name
        for entry in sorted(place.iterdir())
        if entry.is_dir() or not any(fnmatch.fnmatchcase(entry.name, name) for name in known)
    ]
    if foreign or not any(mark in text for mark in marks):
        what = foreign[0] if foreign else "files that this command did not write"
        raise Refusal(
            f"expected an empty folder, or one that this command wrote, got {out} with {what}; "
            "name another, or move it away"
        )


@contextlib.contextmanager
def new_folder(
    out: Path, *, marks: Sequence[str], apart: Iterable[Path], names: Collection[str] = ()
) -> Iterator[Path]:
    """A folder to fill that becomes `out` at the end, whole or not at all.

    Raises:
        Refusal: see `check_new_folder`.
        Failure: the disk would not take it; what was at `out` is there as before.
    """
    check_new_folder(out, marks=marks, apart=apart, names=names)
    place = out.resolve()
    partial, old = (place.with_name(f".{place.name}.{end}") for end in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            place.rename(old)
        partial.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise Failure(
            f"expected to write {out}, got: {error}; make room there, and run it again"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
