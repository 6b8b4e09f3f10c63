"""How arrays are sharded: the mesh, and the tables from logical axes to mesh axes.

Mesh axes: `data` (copies of the model, each with its own rows), `fsdp` (rows and parameters split
together), `expert` (rows split; each device has some of the experts, and is one more of fsdp to all
other parameters) and `tensor` (the same rows; each device has some heads, some of the MLP's width
and of the vocabulary). A parameter names its logical axes where it is made (model/layers.py), a
moment is sharded as its parameter. On one device all of this is the identity.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_distill.base.errors import UserError
from jax_distill.batch import Batch

AnyMesh: TypeAlias = Mesh | AbstractMesh
MESH_AXES = ("data", "fsdp", "expert", "tensor")
"""Neighbours in `tensor`, which exchange most, are neighbouring devices."""
ROW_AXES = ("data", "fsdp", "expert")
"""The mesh axes that split the rows of a batch."""

_SPLIT = ("tensor", "fsdp", "expert")
LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": _SPLIT,
    "embed": (),
    "heads": _SPLIT,
    "kv_heads": _SPLIT,
    "mlp": _SPLIT,
    "experts": ("expert",),
    "teacher_embed": _SPLIT,
}
"""The mesh axes that split each logical axis of a parameter; `tensor` first, so that what is left
after gathering over the others is one stretch of it."""

ACTIVATION_AXES: dict[str, tuple[str, ...]] = {
    "rows": ROW_AXES,
    "heads": ("tensor",),
    "mlp": ("tensor",),
}
"""The same of an activation."""


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over `devices` (None: those there are). One size may be −1, what the others leave;
    `data`, where another is −1 too, is 1 then.

    Raises:
        UserError: the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    sizes = dict(zip(MESH_AXES, (data, fsdp, expert, tensor), strict=True))
    given = {name: size for name, size in sizes.items() if size != -1}
    free = [name for name in sizes if name not in given]
    product = math.prod(given.values())
    for name, size in given.items():
        if free and (size < 1 or count % size):
            raise UserError(
                f"expected mesh.{name} to divide the devices here, {count}, got {size}; set another"
            )
    if count % product or (not free and product != count):
        got = " · ".join(f"mesh.{name} {size}" for name, size in sizes.items() if size != 1)
        raise UserError(
            f"expected the product of the mesh's sizes to be {count}, the devices here, got {got}; "
            "set mesh.data to -1"
        )
    sizes |= dict.fromkeys(free, 1) | ({free[0]: count // product} if free else {})
    # Explicit axes refuse an embedding gather on sharded ids; the compiler decides instead.
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=kinds, devices=devices)


def axis_size(mesh: AnyMesh, axes: Iterable[str]) -> int:
    """Among how many devices these mesh axes split; an axis that the mesh lacks is 1."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def _spec(mesh: AnyMesh, axes: Sequence[Sequence[str]], shape: Sequence[int]) -> PartitionSpec:
    """Each dimension over as many of its mesh axes as divide it and split no earlier one."""
    used: set[str] = set()
    spec: list[tuple[str, ...] | None] = []
    for wanted, size in zip(axes, shape, strict=True):
        chosen: tuple[str, ...] = ()
        for axis in wanted:
            fits = size % axis_size(mesh, (*chosen, axis)) == 0
            if axis in mesh.axis_names and axis not in used and fits:
                chosen += (axis,)
        used |= set(chosen)
        spec.append(chosen or None)
    return PartitionSpec(*spec)


def parameter_sharding(
    mesh: Mesh, logical_axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """How a parameter is split: each dimension over as many mesh axes of its logical one as divide
    it and split no earlier dimension; otherwise it stays whole."""
    axes = [() if name is None else LOGICAL_AXES[name] for name in logical_axes]
    return NamedSharding(mesh, _spec(mesh, axes, shape))


def activation_sharding(
    mesh: AnyMesh, logical_axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """The same of an activation, by ACTIVATION_AXES."""
    axes = [() if name is None else ACTIVATION_AXES[name] for name in logical_axes]
    return NamedSharding(mesh, _spec(mesh, axes, shape))


def row_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Those of ROW_AXES that the mesh has."""
    return tuple(axis for axis in ROW_AXES if axis in mesh.axis_names)


def row_shards(mesh: AnyMesh) -> int:
    """Among how many devices the rows of a batch are split."""
    return axis_size(mesh, ROW_AXES)


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Rows over ROW_AXES; `leading` axes before them (micro-batches) stay whole."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, row_axes(mesh)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(mesh: Mesh, rows: int, key: str) -> None:
    """Refuse a batch that the devices cannot share evenly."""
    if rows % row_shards(mesh):
        shards = row_shards(mesh)
        raise UserError(
            f"expected {key} to be a multiple of the {shards} devices that split rows, got {rows}; "
            f"the next that fits is {-(-rows // shards) * shards}"
        )


def shard_rows(mesh: Mesh, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Numpy arrays [B,..] on the devices, split by rows."""
    sharding = batch_sharding(mesh)
    return {name: jax.device_put(value, sharding) for name, value in rows.items()}


def shard_batch(mesh: Mesh, batch: Batch, *, leading: int = 0) -> Batch:
    """A numpy batch on the devices: the one boundary where cache arrays leave numpy."""
    sharding = batch_sharding(mesh, leading=leading)
    return batch.map(lambda x: jax.device_put(x, sharding))
