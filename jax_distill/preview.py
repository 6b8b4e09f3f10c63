"""The first rows that a configuration makes of its text, as the models will see them:

    python -m jax_distill.data --config configs/own_chats.yaml --rows 3

Each document of a row begins with its number in brackets; what is not learned stands between ‹ and
› (dim on a terminal), and the documents' colours alternate. Nothing is written.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from jax_distill import data
from jax_distill.base.command import CommandLine, above_zero, run_command
from jax_distill.base.console import console, say
from jax_distill.base.errors import UserError
from jax_distill.config import Config, load
from jax_distill.packing import Rows, pack
from jax_distill.teacher import data_path, find_teacher, tokenizer_folder

SHOWN = 2000  # characters of a row
COLOURS = ("cyan", "yellow")


def first_rows(config: Config, count: int) -> tuple[data.Tokenizer, Rows]:
    """The tokenizer, and the first `count` training rows; no more text is tokenized than they take.

    Raises:
        UserError: no tokenizer, no text, or what the text's format refuses.
    """
    found = find_teacher(config.teacher.path) if config.teacher.path else None
    if found and found.folder is None and not config.data.tokenizer:
        raise UserError(found.problem)
    tokenizer = data.Tokenizer.load(tokenizer_folder(config, found and found.folder))
    text = config.data
    corpus = data.Corpus(
        data_path(config),
        format=text.format,
        tokenizer=tokenizer,
        heldout_fraction=text.heldout_fraction,
    )
    options = {name: getattr(text, name) for name in ("packing", "separate_documents")}
    documents = (document for _, document in corpus.documents("train"))
    rows = pack(documents, sequence_length=text.sequence_length, max_rows=count, **options)
    say(f"text: {corpus.counts}")
    return tokenizer, rows


def runs(segments: np.ndarray, learned: np.ndarray) -> Iterator[tuple[slice, int, bool]]:
    """(positions, segment, whether they are learned) of a row [T], padding left out."""
    changes = np.flatnonzero((np.diff(segments) != 0) | (np.diff(learned) != 0)) + 1
    edges = [0, *changes.tolist(), len(segments)]
    for first, end in zip(edges, edges[1:], strict=False):
        if segments[first]:
            yield slice(first, end), int(segments[first]), bool(learned[first])


def row_text(row: dict[str, np.ndarray], tokenizer: data.Tokenizer) -> Text:
    """A row of a cache [T] as text. A token is learned where the one before it predicts it."""
    learned = np.concatenate([[0], row["loss_mask"][:-1]])
    text, before = Text(), 0
    for where, segment, is_learned in runs(row["segment_ids"], learned):
        if segment != before:
            text.append(f"[{segment}]", "bold")
            before = segment
        words = tokenizer.decode(row["tokens"][where])
        style = COLOURS[segment % len(COLOURS)]
        text.append(words if is_learned else f"‹{words}›", style if is_learned else f"dim {style}")
    if len(text) > SHOWN:
        left = len(text) - SHOWN
        text = text[:SHOWN].append(f" … and {left:,} characters more", "bold")
    return text


def main(argv: Sequence[str]) -> None:
    """The command line above; all options of a configuration besides."""
    parser = CommandLine("jax_distill.data", add_help=False)
    parser.add_argument("--rows", type=above_zero, default=3, help="how many rows (3)")
    options, rest = parser.parse_known_args(argv)
    if {"--help", "-h"} & set(rest):
        parser.print_help()
    config = load(rest, "jax_distill.data")
    tokenizer, rows = first_rows(config, options.rows)
    say(f"train: {rows}")
    for number in range(len(rows)):
        row = {name: array[number] for name, array in rows.arrays.items()}
        real = int((row["segment_ids"] > 0).sum())
        say(
            f"row {number}: {row['segment_ids'].max()} documents, {real:,} tokens, "
            f"{int(row['loss_mask'].sum()):,} learned, {len(row['tokens']) - real:,} padding"
        )
        console.print(row_text(row, tokenizer), soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
