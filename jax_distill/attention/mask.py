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
        return self.same_segment() & self._near(jnp.arange(self.segment_ids.shape[1]))[None]

    def allowed_to(self, query: jax.Array, count: int) -> jax.Array:
        """`allowed` of the queries `query` … `query` + `count` − 1 alone: bool [B,count,S]."""
        own = jax.lax.dynamic_slice_in_dim(self.segment_ids, query, count, axis=1)
        same = own[:, :, None] == self.segment_ids[:, None, :]
        return same & self._near(query + jnp.arange(count))[None]

    def _near(self, query: jax.Array) -> jax.Array:
        """bool [T,S]: whether a key s is neither after nor too far before each query [T]."""
        distance = query[:, None] - jnp.arange(self.segment_ids.shape[1])[None, :]
        near = distance >= 0
        return near if self.window is None else near & (distance < self.window)
