"""The preview shows the rows that a cache of the same configuration has, and what is learned."""

import re
import subprocess
import sys

import numpy as np
import pytest
import yaml

from jax_distill import preview
from jax_distill.base.errors import UserError
from jax_distill.config import load
from jax_distill.teacher_test import hf_folder, text_file


@pytest.fixture(scope="module")
def argv(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("preview")
    hf_folder(folder / "teacher")
    text_file(folder / "text.jsonl", documents=60)
    settings = {
        "teacher": {"path": str(folder / "teacher")},
        "student": {"from_teacher": {"layers": [0]}},
        "data": {"path": str(folder / "text.jsonl"), "format": "jsonl", "sequence_length": 24},
    }
    file = folder / "x.yaml"
    file.write_text(yaml.safe_dump(settings))
    return ["--config", str(file)]


def test_runs_are_the_stretches_of_one_document_and_one_mask():
    segments = np.array([1, 1, 1, 2, 2, 3, 3, 0, 0])
    learned = np.array([0, 1, 1, 0, 1, 1, 1, 0, 0])
    found = [(where.start, where.stop, *rest) for where, *rest in preview.runs(segments, learned)]
    assert found == [
        (0, 1, 1, False),
        (1, 3, 1, True),
        (3, 4, 2, False),
        (4, 5, 2, True),
        (5, 7, 3, True),
    ]


def test_a_row_reads_as_its_tokens_with_what_is_not_learned_marked(argv):
    tokenizer, rows = preview.first_rows(load(argv), 2)
    assert len(rows) == 2
    row = {name: array[0] for name, array in rows.arrays.items()}
    text = preview.row_text(row, tokenizer).plain
    words = tokenizer.decode(row["tokens"][row["segment_ids"] > 0]).split()
    assert re.sub(r"\[\d+\]|[‹›]", " ", text).split() == words
    marked = " ".join(re.findall("‹(.*?)›", text)).split()
    # The first token of each document has none before it that predicts it.
    assert len(marked) == row["segment_ids"].max() == text.count("[")
    assert marked[0] == words[0]


def test_the_command_shows_rows_and_writes_nothing(argv, tmp_path):
    command = [sys.executable, "-m", "jax_distill.data", *argv, "--rows", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "text: " in done.stdout and "row 1: " in done.stdout and "row 2: " not in done.stdout
    assert not list(tmp_path.iterdir())


def test_an_absent_teacher_is_named_as_such(argv):
    with pytest.raises(UserError, match="expected teacher.path .*nowhere"):
        preview.first_rows(load([*argv, "--teacher.path", "./nowhere"]), 1)
