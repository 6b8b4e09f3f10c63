"""Which keys a query may see, as a value that is made once and passed to every layer.

Letters: B rows, T query positions, S key positions.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["segment_ids"], meta_fields=["window"])
@dataclasses.dataclass(frozen=True)
class Mask:
    """Causal inside each segment; with a window, no further back than its length.

    Attributes:
        segment_ids: int32 [B,T]. Padding (id 0) is a segment like any other, so that no softmax is
            over nothing.
        window: w, each query sees the w latest keys up to its own; None: all of them.
    """

    segment_ids: jax.Array
    window: int | None = None

    def same_segment(self) -> jax.Array:
        """bool [B,T,S]."""
        return self.segment_ids[:, :, None] == self.segment_ids[:, None, :]

    def allowed(self) -> jax.Array:
        """bool [B,T,S]: whether query t sees key s, t − w < s ≤ t in one segment."""
        position = jnp.arange(self.segment_ids.shape[1])
        distance = position[:, None] - position[None, :]
        near = distance >= 0
        if self.window is not None:
            near &= distance < self.window
        return self.same_segment() & near[None]
