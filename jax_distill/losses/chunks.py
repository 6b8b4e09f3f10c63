"""How T positions become chunks of C: by slices in place, by gathers in another order, by a copy.

Letters: B rows, T positions, C positions of each row in one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class Cut(NamedTuple):
    """How a loop cuts its positions.

    size: C. merged: chunks of one group, whose gradients are made together. valid_first: as in
    `Execution`.
    """

    size: int
    merged: int = 1
    valid_first: bool = False


@dataclass(frozen=True)
class Chunk:
    """The positions of one iteration: C neighbours, or C entries of `order` [B,T].

    The last chunk starts early enough to have C positions; those which an earlier chunk had
    already are not `is_new`.
    """

    index: jax.Array
    size: int
    length: int
    order: jax.Array | None

    @property
    def start(self) -> jax.Array:
        """Its first position, int32."""
        return jnp.minimum(self.index * self.size, self.length - self.size)

    @property
    def is_new(self) -> jax.Array:
        """bool [C]: in no earlier chunk."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32) >= self.index * self.size

    def read(self, x: jax.Array) -> jax.Array:
        """[B,C,..] of x [B,T,..]."""
        if self.order is None:
            return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis=1)
        return take_positions(x, self._chosen(self.order))

    def write(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x [B,T,..] with this chunk's new positions set to those of part [B,C,..]."""
        is_new = self.is_new.reshape((1, -1) + (1,) * (x.ndim - 2))
        part = jnp.where(is_new, part, self.read(x))
        if self.order is None:
            return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, axis=1)
        write = jax.vmap(lambda row, chosen, new: row.at[chosen].set(new, unique_indices=True))
        return write(x, self._chosen(self.order), part)

    def put(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x [B,T,..] with all positions of this chunk, neighbours, set to part [B,C,..]."""
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, axis=1)

    def _chosen(self, order: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(order, self.start, self.size, axis=1)


def valid_first_order(mask: jax.Array) -> jax.Array:
    """int32 [B,T]: the positions of each row of mask [B,T], valid ones first, order kept."""
    return jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)


def take_positions(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """x [B,T,..] at the positions chosen [B,C] of each row → [B,C,..]."""
    return jax.vmap(lambda row, at: row[at])(x, chosen)


def split_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[B,T,..] → [n,B,C,..], zeros (mask False) after the end."""
    rows, length, *shape = x.shape
    missing = -length % chunk
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(shape))
    return jnp.moveaxis(x.reshape(rows, -1, chunk, *shape), 1, 0)


def map_chunks(function: Callable[[Inputs], Outputs], inputs: Inputs, chunk: int) -> Outputs:
    """`function` of one chunk [B,C,..] of the arrays [B,T,..] after another; its results [B,C,..]
    as arrays [B,T,..]."""
    rows, length = jax.tree.leaves(inputs)[0].shape[:2]
    results = jax.lax.map(function, jax.tree.map(lambda x: split_chunks(x, chunk), inputs))

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, -1, *x.shape[3:])[:, :length]

    return jax.tree.map(join, results)
