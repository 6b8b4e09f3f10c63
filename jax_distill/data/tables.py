"""Rows of Parquet and Arrow files, a batch at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_distill.base.errors import UserError
from jax_distill.base.json_object import one_line, read_json_object
from jax_distill.data.files import arrow_library

SUFFIXES = (".parquet", ".arrow")
_ROWS = 1000  # in memory at once


def table_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Each row as column → value.

    Raises:
        UserError: a file that does not read, or no pyarrow.
    """
    arrow = arrow_library(str(file))
    try:
        for batch in _batches(file):
            for first in range(0, batch.num_rows, _ROWS):
                yield from batch.slice(first, _ROWS).to_pylist()
    except (
        arrow.ArrowException,
        OSError,
    ) as error:
        raise UserError(
            f"{file}: expected a {file.suffix[1:]} file, got: {one_line(error)[:200]}; "
            "re-download it or save it again"
        ) from None


def _batches(file: Path) -> Iterator[Any]:
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=_ROWS)
        return
    import pyarrow as arrow

    with arrow.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":  # the form that can be read at random
            reader = arrow.ipc.open_file(source)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from arrow.ipc.open_stream(source)


def files_of_data_sets(files: list[Path]) -> list[Path]:
    """Without what `datasets` leaves beside the files of a saved data set (its state.json says
    which those are): results of earlier map calls."""
    return [file for file in files if _belongs(file)]


def _belongs(file: Path) -> bool:
    state = file.with_name("state.json")
    if file.suffix.lower() != ".arrow" or not state.is_file():
        return True
    listed = read_json_object(state, cure="restore the file").get("_data_files")
    names = [each.get("filename") for each in listed or () if isinstance(each, dict)]
    return not names or file.name in names
