"""The values of a sweep: `KEY=V1,V2` words, for `plan` and `train`."""

import re
from collections.abc import Sequence

from jax_distill.base.errors import UserError


def read_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """`key=a,b key2=[c,d],e` → {key: [a, b], key2: [[c,d], e]}, as text. A comma in brackets
    belongs to a list.

    Raises:
        UserError: no word, a word that is no `KEY=V1,V2`, a key or a value twice.
    """
    if not words:
        raise UserError("--sweep: expected KEY=V1,V2, got nothing; e.g. loss.tail=bucket,truncate")
    grid: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = re.split(r",(?![^\[]*\])", text)
        if not equals or not all(values):
            raise UserError(f"--sweep: expected KEY=V1,V2, got {word}; name a key and its values")
        if key in grid or len(set(values)) < len(values):
            raise UserError(f"--sweep: expected each key and value once, got {word}; drop one")
        grid[key] = values
    return grid
