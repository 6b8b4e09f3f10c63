"""Experts over a mesh: E over its axis `expert`, F over `tensor`, rows over ROW_AXES.

No token is dropped, and no shape depends on what the router does: each device of an `expert` group
gathers the group's rows, adds up what its own E/e experts make of them (with its share of F, summed
over `tensor`), and the sums are scattered back to the rows' devices. Backward the same two the
other way round. The other axes of the mesh, `fsdp` among them, gather these experts' weights as
they do other weights.

Letters: N tokens, D hidden, E experts, k of them a token, F their width; e devices of a group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_distill.model.ragged_exchange import give_back, make_route, send, send_rows
from jax_distill.sharding import AnyMesh, axis_size, row_axes


class ExpertSplit(NamedTuple):
    """The mesh axes that split E (`group`) and F (`widths`), each None where it does not; `ragged`:
    the rows of a group are exchanged by ragged_exchange.py."""

    mesh: AnyMesh | None
    group: str | None
    widths: str | None
    ragged: bool = False

    @classmethod
    def of(cls, mesh: AnyMesh | None, *, experts: int, widths: int) -> Self:
        """What divides `experts` and `widths`."""

        def divisor(axis: str, size: int) -> str | None:
            devices = 1 if mesh is None else axis_size(mesh, (axis,))
            return axis if devices > 1 and size % devices == 0 else None

        return cls(mesh, divisor("expert", experts), divisor("tensor", widths))

    @property
    def group_size(self) -> int:
        """e, 1 where E is whole."""
        return axis_size(self.mesh, (self.group,)) if self.mesh and self.group else 1

    def specs(self, parameters: Any) -> Any:
        """Of ExpertWeights, packed ones too: their F is whole."""
        group, widths = self.group, self.widths
        gate_up, down = PartitionSpec(group, None, widths), PartitionSpec(group, widths)
        return type(parameters)(gate_up, PartitionSpec(group, widths), down, PartitionSpec(group))


def on_cpu(mesh: AnyMesh | None) -> bool:
    """Whether the mesh's devices are known to be CPUs."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def mix_on_mesh(
    mix: Callable[..., jax.Array],
    split: ExpertSplit,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    parameters: Any,
) -> jax.Array:
    """`mix` of one device (x [N,D], experts [N,k], weights [N,k], ExpertWeights) over the mesh. It
    leaves out ids outside of its own 0…E/e−1."""
    group, widths = split.group, split.widths

    def local(x: jax.Array, experts: jax.Array, weights: jax.Array, parameters: Any) -> jax.Array:
        count, way = parameters.down_bias.shape[0], None
        if group and split.ragged:
            way = make_route(experts, count, group)
            x, weights = send(x, way, group), send(weights, way, group)
            experts = send_rows(experts, way, group, fill=split.group_size * count)
        elif group:
            x, experts, weights = (
                jax.lax.all_gather(part, group, tiled=True) for part in (x, experts, weights)
            )
        if group:
            experts = experts - jax.lax.axis_index(group) * jnp.int32(count)
        if widths:  # one of them adds the bias
            bias = jnp.where(jax.lax.axis_index(widths) == 0, parameters.down_bias, 0)
            parameters = parameters._replace(down_bias=bias)
        out = mix(x, experts, weights, parameters)
        if group:
            scattered = partial(jax.lax.psum_scatter, axis_name=group, tiled=True)
            out = scattered(out) if way is None else give_back(out, way, group)
        return jax.lax.psum(out, widths) if widths else out

    def narrow(weight: jax.Array) -> jax.Array:
        return weight.astype(x.dtype) if jnp.issubdtype(weight.dtype, jnp.floating) else weight

    assert split.mesh is not None
    rows = PartitionSpec(row_axes(split.mesh))
    # check_vma: the loops of `mix` begin with zeros that do not vary over devices.
    spread = jax.shard_map(
        local,
        mesh=split.mesh,
        in_specs=(rows, rows, rows, split.specs(parameters)),
        out_specs=rows,
        check_vma=False,
    )
    return spread(x, experts, weights, jax.tree.map(narrow, parameters))
