"""Rows against the length that a model was made for."""

import numpy as np

from jax_distill.base.console import say
from jax_distill.base.errors import UserError


def segments_beyond(segment_ids: np.ndarray, positions: np.ndarray, length: int) -> int:
    """How many segments of [N,T] rows have more than `length` tokens: those whose positions a model
    of that max_position_embeddings has never seen."""
    return int(np.count_nonzero((positions == length) & (segment_ids > 0)))


def check_context(count: int, limit: int, model: str, *, refuse: bool = False) -> None:
    """Say that `count` segments go beyond `limit`, the max_position_embeddings of the `model`
    (teacher or student).

    Raises:
        UserError: with `refuse`, where there are any: a teacher's targets there would be wrong.
    """
    if not count:
        return
    what = f"{count:,} longer than the {model}'s max_position_embeddings"
    if refuse:
        raise UserError(
            f"expected segments of at most {limit:,} tokens, got {what}; lower "
            f"data.sequence_length to {limit}, or set teacher.beyond_context allow"
        )
    say(f"WARNING: of the segments {what} of {limit:,}: it has never seen such positions")
