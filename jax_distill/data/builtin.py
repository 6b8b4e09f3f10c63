"""English that is there after `pip install`: docstrings and the language reference's topics.

The source files are read as text, never imported: no code of theirs runs, no GPU is looked for, and
the order is the same on every machine that has the same versions. About 11 MB in 4 seconds.
"""

import ast
import functools
import importlib.util
import inspect
import platform
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics

from jax_distill.base.errors import UserError
from jax_distill.data.document import Raw

NAMES = ("builtin:english", "builtin:pydoc_topics")
_PACKAGES = ("numpy", "jax", "scipy")
_CHARACTERS = 4000  # a document is at least this long where its file is
_NO_PROSE = {
    "tests", "test", "internal_test_util", "site-packages", "dist-packages", "pydoc_data",
    "idlelib", "_vendor", "f2py", "distutils", "mosaic",
}  # fmt: skip

# Every comment and string of a Python file, so that a quote inside one never opens another.
_STRINGS = re.compile(
    r"""
      \#[^\n]*
    | '(?:''(?:[^'\\]|\\.|'(?!''))*''' | (?:[^'\\\n]|\\.)*')
    | (?P<prefix>\b[A-Za-z]{1,2})?
      "(?:""(?P<body>(?:[^"\\]|\\.|"(?!""))*)\"""  |  (?:[^"\\\n]|\\.)*")
    """,
    re.DOTALL | re.VERBOSE,
)


@functools.lru_cache(maxsize=1)
def read_builtin(path: str) -> list[Raw]:
    """The documents behind `builtin:english` or `builtin:pydoc_topics`.

    A document is a run of whole paragraphs (topics) or whole docstrings (of one file, in its order)
    of at least 4000 characters, or what a topic or a file has.

    Raises:
        UserError: another name, or a package whose docstrings it needs is not installed.
    """
    if path not in NAMES:
        raise UserError(f"expected one of {', '.join(NAMES)}, got {path}")
    documents = []
    for name in sorted(topics):
        for text in gather(re.split(r"\n\s*\n", topics[name].strip()), _CHARACTERS):
            documents.append(Raw(text, f"{path} topic {name}"))
    if path == "builtin:english":
        for folder in [Path(ast.__file__).parent, *map(_package_folder, _PACKAGES)]:
            documents += _docstrings(folder)
    return documents


def builtin_versions() -> str:
    """The versions that the text depends on, for the data fingerprint."""
    packages = [f"{name} {version(name)}" for name in _PACKAGES]
    return " ".join([f"python {platform.python_version()}", *packages])


def gather(pieces: Iterable[str], characters: int) -> Iterator[str]:
    """Joins pieces with an empty line to texts of at least `characters`; the last may be less."""
    current: list[str] = []
    length = 0
    for piece in pieces:
        current.append(piece)
        length += len(piece)
        if length >= characters:
            yield "\n\n".join(current)
            current, length = [], 0
    if current:
        yield "\n\n".join(current)


def _package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise UserError(f"expected the package {name} for builtin:english; run: pip install {name}")
    return Path(found.origin).parent


def _docstrings(folder: Path) -> list[Raw]:
    documents = []
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        relative = file.relative_to(folder)
        if _NO_PROSE.intersection(relative.parts):
            continue
        source = file.read_text(encoding="utf-8", errors="replace")
        for text in gather(_triple_quoted(source), _CHARACTERS):
            documents.append(Raw(text, f"builtin:english {folder.name}/{relative.as_posix()}"))
    return documents


def _triple_quoted(source: str) -> list[str]:
    if '"""' not in source:
        return []
    texts = []
    for match in _STRINGS.finditer(source):
        body, prefix = match["body"], (match["prefix"] or "").lower()
        if body is None or prefix not in ("", "r", "u"):
            continue
        if prefix != "r" and "\\" in body:
            try:
                body = ast.literal_eval(match[0])
            except (SyntaxError, ValueError):
                continue  # not the string it looked like
        body = inspect.cleandoc(body)
        if body:
            texts.append(body)
    return texts
