"""Where the rows of a cache stand in its arrays, also once it has grown."""

from collections.abc import Sequence

import numpy as np


class Layout:
    """Where a cache's rows stand in its arrays.

    Growth begins at a shard of its own, so that nothing that is there is touched: the last shard
    before it stays as short as it was, and what it lacks is no row. Letters: N `rows`, of which the
    arrays have `extent`, gaps among it; `grown`: the extents at which growth began.
    """

    def __init__(self, extent: int, grown: Sequence[int], shard_rows: int):
        self.extent = extent
        ends = np.array(grown, np.int64)
        gaps = -ends % shard_rows
        self._after = np.cumsum(gaps)  # gaps up to each, itself among them
        self._ends = ends - (self._after - gaps)  # as rows
        self._extents = ends
        self.rows = extent - int(gaps.sum())
        self.short = {
            int(end) // shard_rows: int(end) % shard_rows for end in ends if end % shard_rows
        }

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """Of rows, where they stand in the arrays."""
        if not len(self._ends):
            return rows
        before = np.concatenate([[0], self._after])
        return rows + before[np.searchsorted(self._ends, rows, side="right")]

    def rows_between(self, first: int, last: int) -> np.ndarray:
        """The rows of a shard that stands in the arrays from `first` to `last`."""
        earlier = int((self._extents <= first).sum())
        gap = int(self._after[earlier - 1]) if earlier else 0
        return np.arange(first, last + 1) - gap
