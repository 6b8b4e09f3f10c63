"""Text files a piece at a time, compressed or not: lines, and runs of paragraphs."""

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import one_line

COMPRESSED = (".gz", ".zst")
_PIECE = 1 << 20  # bytes read at once
_LONGEST = 1 << 24  # characters of a paragraph; a longer one is cut at the end of a line
_DAMAGE = (OSError, EOFError, zlib.error)


def data_suffix(file: Path) -> str:
    """What kind of data a file has: its suffix in lower case, that of a compression left out."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


def arrow_library(what: str) -> Any:
    """pyarrow, which reads `what`; UserError where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"expected the package pyarrow for {what}; run: pip install 'jax-distill[hub]'"
        ) from None
    return pyarrow


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The bytes of a file, decompressed by its suffix (.gz, .zst).

    Raises:
        UserError: it does not decompress, also while it is read; .zst without pyarrow.
    """
    suffix = file.suffix.lower()
    if suffix not in COMPRESSED:
        with file.open("rb") as stream:
            yield stream
        return
    try:
        if suffix == ".gz":
            with gzip.open(file, "rb") as stream:
                yield stream
        else:
            arrow = arrow_library(str(file))
            with arrow.input_stream(str(file), compression="zstd") as stream:
                yield io.BufferedReader(_Raw(stream), _PIECE)
    except _DAMAGE as error:
        raise UserError(
            f"{file}: expected a file that decompresses, got: {one_line(error)}; re-download it"
        ) from None


class _Raw(io.RawIOBase):
    """A stream of pyarrow's, which has neither lines nor a position, for io.BufferedReader."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, from 1. Bytes are split, so that U+2028 ends no line."""
    with opened(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                byte = line[error.start]
                raise UserError(
                    f"{file}:{number}: expected UTF-8, got byte 0x{byte:02x}; convert the file"
                ) from None
            if text:
                yield number, text


def paragraphs(file: Path) -> Iterator[str]:
    """What stands between empty lines, a leading BOM and CRLF line ends taken away.

    Raises:
        UserError: not UTF-8; the line and the byte are named.
    """
    rest = ""
    for piece in _decoded(file):
        *whole, rest = (rest + piece).split("\n\n")
        yield from whole
        while len(rest) > _LONGEST:
            end = rest.rfind("\n", _LONGEST // 2, _LONGEST) + 1 or _LONGEST
            yield rest[:end]
            rest = rest[end:]
    yield rest


def _decoded(file: Path) -> Iterator[str]:
    decoder, lines, carried = codecs.getincrementaldecoder("utf-8-sig")(), 1, ""
    with opened(file) as stream:
        while True:
            data = stream.read(_PIECE)
            try:
                text = carried + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = lines + error.object[: error.start].count(b"\n")
                raise UserError(
                    f"{file}:{line}: expected UTF-8, got byte 0x{error.object[error.start]:02x}; "
                    f"convert it, e.g. iconv -f latin1 -t utf-8"
                ) from None
            lines += data.count(b"\n")
            carried = "\r" if text.endswith("\r") and data else ""
            yield text.removesuffix(carried).replace("\r\n", "\n")
            if not data:
                return
