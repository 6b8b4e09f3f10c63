"""How T positions become chunks of C: by slices in place, by rows in another order, by a copy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Chunk:
    """Positions of one turn of the loop: C neighbours, or C rows of `order` [B,T].

    The last chunk starts early enough to be whole; what came before it already is not `fresh`.
    """

    index: jax.Array
    size: int
    positions: int
    order: jax.Array | None

    @property
    def start(self) -> jax.Array:
        return jnp.minimum(self.index * self.size, self.positions - self.size)

    @property
    def fresh(self) -> jax.Array:
        """bool [C]: not seen by an earlier turn."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32) >= self.index * self.size

    def take(self, x: jax.Array) -> jax.Array:
        """[B,C,..] of x [B,T,..]."""
        if self.order is None:
            return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis=1)
        return take_rows(x, self._chosen(self.order))

    def put_fresh(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """x [B,T,..] with this chunk's fresh places taken by part [B,C,..]."""
        fresh = self.fresh.reshape((1, -1) + (1,) * (x.ndim - 2))
        part = jnp.where(fresh, part, self.take(x))
        if self.order is None:
            return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, axis=1)
        write = jax.vmap(lambda row, chosen, new: row.at[chosen].set(new, unique_indices=True))
        return write(x, self._chosen(self.order), part)

    def _chosen(self, order: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(order, self.start, self.size, axis=1)


def valid_first_order(mask: jax.Array) -> jax.Array:
    """int32 [B,T]: the positions of each row of mask [B,T], valid ones first, order kept."""
    return jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)


def take_rows(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """x [B,T,..] at the positions chosen [B,C] of each row → [B,C,..]."""
    return jax.vmap(lambda row, at: row[at])(x, chosen)


def split_chunks(x: jax.Array, *, chunk_size: int) -> jax.Array:
    """[B,T,..] → [n,B,C,..], zeros (mask False) after the end."""
    rows, positions, *shape = x.shape
    missing = -positions % chunk_size
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(shape))
    return jnp.moveaxis(x.reshape(rows, -1, chunk_size, *shape), 1, 0)
