"""`bench rows`: how quickly text becomes rows, and in how much memory.

    python -m jax_distill.bench rows --gigabytes 0.01,0.1 --tokenizer bpe:2048

Of each size, text is written to a file (paragraphs drawn from the sentences of builtin:english, so
that none repeats), and `python -m jax_distill.teacher --teacher.path ''` makes rows of it in a
process of its own, whose memory is looked at as it runs. The rate counts the whole process, its
start and both passes over the text among it.
"""

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jax_distill.base.charts import draw_lines
from jax_distill.base.command import CommandLine, above_zero, positive_decimals
from jax_distill.base.console import console, say
from jax_distill.base.errors import RunError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.cache import Cache
from jax_distill.data import read_texts, train_tokenizer

_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def write_text(file: Path, size: float) -> None:
    """JSONL documents of 3 to 12 paragraphs of 3 to 8 sentences, `size` bytes of text in all."""
    text = "\n".join(read_texts("builtin:english", heldout_fraction=0.0))
    sentences = [each for each in _SENTENCE.split(text) if 20 < len(each) < 300]
    draw, written = random.Random(0), 0
    with file.open("w", encoding="utf-8") as stream:
        while written < size:
            paragraphs = [
                " ".join(draw.choices(sentences, k=draw.randint(3, 8)))
                for _ in range(draw.randint(3, 12))
            ]
            document = "\n\n".join(paragraphs)
            written += len(document.encode())
            stream.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")


def measure(text: Path, tokenizer: Path, folder: Path, *, sequence_length: int) -> dict[str, Any]:
    """One row of the table.

    Raises:
        RunError: the command failed.
    """
    settings = {
        "output_dir": str(folder),
        "teacher": {"path": ""},
        "student": {"path": str(tokenizer)},
        "loss": {"kl_weight": 0.0, "ce_weight": 1.0},
        "data": {
            "path": str(text),
            "format": "jsonl",
            "tokenizer": str(tokenizer),
            "sequence_length": sequence_length,
        },
    }
    file = folder.with_suffix(".yaml")
    write_json(file, settings)  # YAML, too
    command = [sys.executable, "-m", "jax_distill.teacher", "--config", str(file)]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident(process.pid))
        time.sleep(0.2)
    seconds = time.perf_counter() - begin
    if process.returncode:
        raise RunError(
            f"expected rows of {text}, got exit code {process.returncode} of the teacher"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    caches = [Cache.open(f"{folder}/cache/{split}") for split in ("train", "heldout")]
    tokens = sum(cache.tokens for cache in caches)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "gigabytes": text.stat().st_size / 1e9,
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "peak_resident_bytes": peak,
        "cache_bytes": sum(cache.nbytes for cache in caches),
    }


def _resident(pid: int) -> int:
    """Bytes that a process holds now; 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def print_table(rows: list[dict[str, Any]]) -> None:
    """The sizes below each other."""
    table = Table("text", "tokens", "seconds", "tokens/s", "tokens/s of processor time", "peak RSS")
    for row in rows:
        table.add_row(
            f"{row['gigabytes']:.3g} GB",
            f"{row['tokens']:,}",
            f"{row['seconds']:,.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_cpu_second']:,.0f}",
            f"{row['peak_resident_bytes'] / 2**20:,.0f} MiB",
        )
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line above."""
    parser = CommandLine("jax_distill.bench rows", description=__doc__)
    parser.add_argument("--gigabytes", type=positive_decimals, default=[0.01], help="sizes of text")
    parser.add_argument("--tokenizer", default="bpe:2048", help="a folder, or bpe:N")
    parser.add_argument("--sequence_length", type=above_zero, default=1024, help="T")
    parser.add_argument("--json", help="write the table here")
    parser.add_argument("--figure", help="draw peak memory over size here (PNG)")
    options = parser.parse_args(argv)
    for name in ("json", "figure"):
        check_new_file(getattr(options, name), f"--{name}")
    return options


def main(argv: Sequence[str]) -> int:
    """Prints the table; 0."""
    options = parse(argv)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(options.tokenizer)
        if options.tokenizer.startswith("bpe:"):
            tokenizer = Path(folder) / "tokenizer"
            texts = read_texts("builtin:english", heldout_fraction=0.0)
            train_tokenizer(texts, int(options.tokenizer.removeprefix("bpe:")), tokenizer)
        for number, gigabytes in enumerate(options.gigabytes):
            text = Path(folder) / "text.jsonl"
            write_text(text, gigabytes * 1e9)
            say(f"{gigabytes:g} GB of text, {os.cpu_count()} processors")
            found.append(
                measure(
                    text,
                    tokenizer,
                    Path(folder) / f"run{number}",
                    sequence_length=options.sequence_length,
                )
            )
    print_table(found)
    if options.json:
        write_json(Path(options.json), found)
    if options.figure:
        points = [
            (float(f"{row['gigabytes']:.2g}"), row["peak_resident_bytes"] / 2**30) for row in found
        ]
        draw_lines(
            Path(options.figure),
            {"rows alone (teacher.path '')": points},
            title="Memory of making rows of text",
            labels=("GB of text", "peak resident memory, GiB"),
        )
    return 0
