"""The bench of caches: it writes and reads what it says, and its entropies are the definition's."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_distill.base.errors import UserError
from jax_distill.bench import cache as bench
from jax_distill.cache_test import small


def test_the_entropy_is_that_of_the_definition():
    quarters = np.array([[0, 1, 2, 3]] * 5, np.uint16)
    assert bench.entropy_bytes(quarters) == pytest.approx(2 / 8)
    thirds = np.tile(np.float16([0.5, -0.5, 0.5]), (4, 2, 1))  # [4,2,3]: three numbers a position
    bits = -(np.log2(1 / 3) / 3 + np.log2(2 / 3) * 2 / 3)
    assert bench.entropy_bytes(thirds) == pytest.approx(3 * bits / 8)


def test_the_table_has_every_setting_and_reads_every_row_once(tmp_path, monkeypatch, capsys):
    made, *_ = small(tmp_path / "cache")
    seen = []
    read = bench.Cache.read
    monkeypatch.setattr(
        bench.Cache, "read", lambda self, rows: seen.extend(rows) or read(self, rows)
    )
    out = tmp_path / "rates.json"
    words = [made.path, "--level", "1,9", "--shard_rows", "4,100", "--batch_size", "3"]
    assert bench.main([*words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    settings = [(row["level"], row["shard_rows"]) for row in found]
    assert settings == [(1, 4), (1, 10), (9, 4), (9, 10)]
    assert sorted(seen) == sorted(list(range(10)) * 4 * 3)
    rates = ["bytes_per_token", "write_tokens_per_second", "read_tokens_per_second"]
    rates += [f"read_tokens_per_second_{kind}" for kind in ("cold", "sequential")]
    assert all(row[name] > 0 for row in found for name in rates)
    assert "10 rows of 12 tokens, K = 5" in capsys.readouterr().out


def test_chunks_of_other_sizes_and_more_rows_than_the_cache_has_are_written_and_read(
    tmp_path, capsys
):
    """Of one row its chunks hold more, of repeated rows each shard what the first one did."""
    made, *_ = small(tmp_path / "cache", shard_rows=10)
    out = tmp_path / "rates.json"
    words = ["--inner_chunk", "4,12", "--rows", "30", "--json", str(out)]
    assert bench.main([made.path, *words]) == 0
    small_chunks, whole_rows = json.loads(out.read_text())
    assert (small_chunks["inner_chunk"], whole_rows["inner_chunk"]) == (4, 12)
    assert whole_rows["bytes"] == 3 * made.nbytes < small_chunks["bytes"]
    assert whole_rows["bytes_per_token"] == made.nbytes / made.tokens
    assert "30 rows of 12 tokens, K = 5" in capsys.readouterr().out
    assert bench.arrays.INNER_CHUNK == bench.INNER_CHUNK, "the format's own again"


def test_other_codecs_are_written_and_the_format_keeps_its_own(tmp_path, monkeypatch):
    made, *_ = small(tmp_path / "cache", shard_rows=10)
    written, opened = [], bench.Cache.open

    def noting(folder):
        if (file := Path(folder) / "tokens/zarr.json").is_file():
            inner = json.loads(file.read_text())["codecs"][0]["configuration"]["codecs"]
            blosc = next(each["configuration"] for each in inner if each["name"] == "blosc")
            written.append(f"{blosc['cname']}:{blosc['shuffle']}")
        return opened(folder)

    monkeypatch.setattr(bench.Cache, "open", noting)
    wanted = ["zstd:shuffle", "zlib:bitshuffle", "lz4:noshuffle"]
    assert bench.main([made.path, "--codec", ",".join(wanted)]) == 0
    assert written[1:] == wanted, "the first is the cache itself"
    assert bench.arrays.BLOSC["cname"] == "zstd" and bench.arrays.BLOSC["shuffle"] == "shuffle"
    with pytest.raises(UserError, match="snappy"):
        bench.main([made.path, "--codec", "snappy:shuffle"])


def test_rows_alone_are_refused(tmp_path):
    made, *_ = small(tmp_path, top_k=0)
    with pytest.raises(UserError, match="expected a cache with a teacher, got rows alone"):
        bench.main([made.path])
