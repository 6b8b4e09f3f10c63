"""Files a piece at a time: compressed text, big paragraphs, Parquet and Arrow."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from jax_distill.base.errors import UserError
from jax_distill.data import files
from jax_distill.data.readers import read_raw

PARAGRAPHS = ["Erste Zeile ä", "", "zwei\nZeilen 😀", "\nleading", "x" * 70, "end\n"]
TEXT = "\n\n".join(PARAGRAPHS)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_paragraphs_are_those_of_the_whole_text(tmp_path, monkeypatch, piece, ends):
    """Wherever the pieces that are read end: in a character, in a line end, in an empty line."""
    monkeypatch.setattr(files, "_PIECE", piece)
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", ends).encode())
    assert list(files.paragraphs(file)) == TEXT.split("\n\n")


def test_a_lone_carriage_return_is_left_and_a_broken_byte_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 4)
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\rb\r")
    assert list(files.paragraphs(file)) == ["a\rb\r"]
    for data, line in ((b"one\ntwo\nthr\xe9e\n", 3), (b"one\n\n\nfour \xc3", 4)):
        file.write_bytes(data)
        with pytest.raises(UserError, match=rf"a.txt:{line}: expected UTF-8, got byte 0x"):
            list(files.paragraphs(file))


def test_a_paragraph_without_end_is_cut_at_the_end_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 16)
    monkeypatch.setattr(files, "_LONGEST", 100)
    file = tmp_path / "a.txt"
    lines = [f"line {i} of a paragraph\n" for i in range(40)]
    file.write_text("".join(lines) + "y" * 350)
    found = list(files.paragraphs(file))
    assert "".join(found) == file.read_text() and max(map(len, found)) <= 100
    assert all(piece.endswith("\n") for piece in found[:8])


def test_a_big_file_of_a_folder_is_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_distill.data.readers._WHOLE_CHARACTERS", 200)
    monkeypatch.setattr("jax_distill.data.readers._BLOCK_CHARACTERS", 100)
    for name, count in (("small", 3), ("large", 30)):
        text = "\n\n".join(f"{name} paragraph {i}, twenty" for i in range(count))
        (tmp_path / f"{name}.txt").write_text(text)
    raws = list(read_raw(str(tmp_path), format="auto"))
    small = [raw for raw in raws if "small" in raw.where]
    large = [raw for raw in raws if "large" in raw.where]
    assert len(small) == 1 and small[0].content == (tmp_path / "small.txt").read_text()
    assert len(large) > 4
    assert "\n\n".join(raw.content for raw in large) == (tmp_path / "large.txt").read_text()


def rows() -> list[dict]:
    return [{"text": f"document {i} ünï", "id": i} for i in range(25)]


def contents(path: Path, format: str = "auto") -> list:
    return [raw.content for raw in read_raw(str(path), format=format)]


def compressed(file: Path, data: bytes) -> None:
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(data))
    else:
        arrow = pytest.importorskip("pyarrow")
        with arrow.output_stream(str(file), compression="zstd") as stream:
            stream.write(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_are_read_as_what_they_hold(tmp_path, suffix):
    lines = "".join(json.dumps(row) + "\n" for row in rows()).encode()
    compressed(tmp_path / f"a.jsonl{suffix}", lines)
    compressed(tmp_path / f"b.txt{suffix}", TEXT.encode())
    expected = [row["text"] for row in rows()]
    assert contents(tmp_path / f"a.jsonl{suffix}") == expected
    assert contents(tmp_path) == [*expected, TEXT]
    for name in ("a.jsonl", "b.txt"):
        file = tmp_path / f"{name}{suffix}"
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"no such thing", whole[:9] + b"\xff" * 30):
            file.write_bytes(damaged)
            with pytest.raises(UserError, match="expected a file that decompresses.*re-download"):
                contents(file)


def write_tables(folder: Path, table) -> dict[str, Path]:
    import pyarrow
    import pyarrow.parquet

    found = {name: folder / name / f"data{ends}" for name, ends in (
        ("parquet", ".parquet"), ("stream", ".arrow"), ("file", ".arrow"),
    )}  # fmt: skip
    for path in found.values():
        path.parent.mkdir()
    pyarrow.parquet.write_table(table, found["parquet"], row_group_size=7)
    with pyarrow.ipc.new_stream(str(found["stream"]), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    with pyarrow.ipc.new_file(str(found["file"]), table.schema) as writer:
        writer.write_table(table)
    return found


def test_parquet_and_arrow_are_read_row_by_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    texts = [row["text"] for row in rows()]
    messages = [[{"role": "user", "content": text}] for text in texts]
    tokens = [[1, i] for i in range(25)]
    for kind, column in (("text", texts), ("messages", messages), ("tokens", tokens)):
        (tmp_path / kind).mkdir()
        table = arrow.table({"id": list(range(25)), kind: column})
        for path in write_tables(tmp_path / kind, table).values():
            for source in (path, path.parent):
                found = contents(source)
                for got, expected in zip(found, column, strict=True):
                    assert np.array_equal(got, expected) if kind == "tokens" else got == expected
    path = tmp_path / "text" / "parquet" / "data.parquet"
    whole = path.read_bytes()
    for damaged in (whole[:50], b"PAR1" + whole[4:200], whole[:-20] + bytes(20)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="data.parquet: expected a parquet file, got"):
            contents(path)
    (tmp_path / "other").mkdir()
    other = write_tables(tmp_path / "other", arrow.table({"words": texts}))["stream"]
    with pytest.raises(UserError, match="row 0: expected the key text, messages or tokens, got w"):
        contents(other)


def test_a_saved_data_set_is_a_folder_like_any_other(tmp_path):
    """`datasets`' own form on disk, without the files that its map calls leave there."""
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(rows())
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    (tmp_path / "one" / "cache-1234.arrow").write_bytes(b"left by a map call")
    assert sorted(contents(tmp_path / "one")) == sorted(row["text"] for row in rows())
    datasets.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "two"))
    assert sorted(contents(tmp_path / "two")) == sorted(row["text"] for row in rows())
