"""Rows and vocabulary split over a mesh by hand: what travels is written down, not found out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_distill.losses.carry import Carry


@dataclass(frozen=True)
class Layout:
    """How `fused` is split under shard_map.

    Plain jit splits every implementation too, and on a GPU as well as this; here the head's
    gradient is summed over the rows' devices once, after the loop, on any backend. Travelling:
    per chunk the G gathered logits and the sums of each token and d_hidden [B,C,D]; once the sums
    and d_lm_head. Nothing V wide.

    Attributes:
        mesh: with automatic axes.
        rows: mesh axes that split B, for hidden and the targets.
        vocabulary: the mesh axis that splits V, for lm_head and bias; None keeps them whole.
    """

    mesh: Mesh
    rows: tuple[str, ...] = ()
    vocabulary: str | None = None

    def split(self, loop: Callable[..., Any]) -> Callable[..., Any]:
        """`loop(hidden, lm_head, bias, targets, axis=)` → the same on arrays of the whole mesh.

        The loop returns a Carry: sums, rows, row_scale, d_lm_head, d_bias.
        """

        def local(hidden, lm_head, bias, targets):
            end = loop(hidden, lm_head, bias, targets, axis=self.vocabulary)
            if not self.rows:
                return end
            over_rows = (end.sums, end.d_lm_head, end.d_bias)
            sums, d_lm_head, d_bias = jax.lax.psum(over_rows, self.rows)
            return end._replace(sums=sums, d_lm_head=d_lm_head, d_bias=d_bias)

        rows, columns = P(self.rows or None), P(self.vocabulary)
        of_carry: list[Any] = [P(), rows, rows, columns, columns]
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(rows, columns, columns, rows),
            out_specs=Carry(*of_carry),
            check_vma=False,  # nothing is differentiated inside; what is equal everywhere is summed
        )
