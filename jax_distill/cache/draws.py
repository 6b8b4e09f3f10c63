"""Random samples of the teacher: the numbers that decide them, the same for every backend.

A draw takes two numbers in [0, 1): one chooses a group of consecutive ids by the groups'
probabilities, the other an id within it. One number for both would have float32's grain of 6e-8,
beside which a group of unlikely ids has few of its ids drawn.
"""

from collections.abc import Iterable

import numpy as np

GROUP = 256
"""Ids of a group; about √V, so that neither sum is long."""
_KEY = 0x7EAC4E12  # any number; the draws of a row never change


def row_uniforms(rows: Iterable[int], length: int, samples: int) -> np.ndarray:
    """float32 [B,T,M,2] in [0, 1): of the rows of a cache by number, M draws at each position.

    A function of row and position alone (Philox: Salmon et al., SC 2011), so that a cache resumed
    after a kill, or written in batches of another size, has the same draws.
    """
    made = [
        np.random.Generator(np.random.Philox(key=[_KEY, int(row)])).random(
            (length, samples, 2), dtype=np.float32
        )
        for row in rows
    ]
    return np.stack(made)
