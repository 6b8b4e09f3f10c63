"""How rows and vocabulary are split over a mesh explicitly, not left to the compiler."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh


@dataclass(frozen=True)
class Layout:
    """How `fused` is split under shard_map.

    Plain jit splits every implementation too, on a GPU as well as this does; here the weight's
    gradient is summed over the rows' devices once, after the loop, on any backend. Communicated are
    per chunk the G gathered logits and the sums of each token and d_hidden [B,C,D]; once the sums
    and d_weight. Nothing V wide.

    Attributes:
        mesh: with automatic axes.
        rows: mesh axes that split B, for hidden and the batch.
        vocabulary: the mesh axis that splits V, for the head's weight and bias; None: whole.
    """

    mesh: Mesh
    rows: tuple[str, ...] = ()
    vocabulary: str | None = None

    @property
    def row_shards(self) -> int:
        """Among how many devices the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)
