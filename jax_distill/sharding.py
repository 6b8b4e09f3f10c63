"""How arrays are sharded: the mesh, and the tables from logical axes to mesh axes.

Mesh axes: `data` (copies of the model, each with its own rows), `fsdp` (rows and parameters split
together), `expert` (rows split; each device has some of the experts, and is one more of fsdp to all
other parameters) and `tensor` (the same rows; each device has some heads, some of the MLP's width
and of the vocabulary). A parameter names its logical axes where it is made (model/layers.py), a
moment is sharded as its parameter. On one device all of this is the identity.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
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


def own_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """Which of `rows` rows, split by `batch_sharding`, this process's devices hold, ascending: all
    of them where it is the only process."""
    parts = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    return np.unique(np.concatenate([np.arange(rows)[part] for part in parts if part is not None]))


class RowShare(NamedTuple):
    """Which of `parts` equal parts of a batch's rows a process holds, and whether it is the first
    that holds it (of those whose devices split more than rows)."""

    number: int
    parts: int
    is_first: bool


def row_share(mesh: Mesh) -> RowShare:
    """This process's part of every batch; raises as `share_of` does."""
    shards = row_shards(mesh)
    holds: dict[int, set[int]] = {}
    devices: dict[Any, Any] = dict(batch_sharding(mesh).devices_indices_map((shards,)))
    for device, index in devices.items():
        holds.setdefault(device.process_index, set()).add(index[0].start or 0)
    return share_of(holds, jax.process_index())


def share_of(holds: Mapping[int, set[int]], process: int) -> RowShare:
    """The part of `process`, of processes that hold these row shards.

    Raises:
        UserError: the shards of two processes overlap without being the same, or are not as many.
    """
    shares = sorted({tuple(sorted(shards)) for shards in holds.values()})
    if sum(map(len, shares)) != len(set().union(*shares)) or len({*map(len, shares)}) > 1:
        raise UserError(
            f"expected {len(holds)} processes to hold equal parts of the rows, got "
            f"{[sorted(shards) for shards in holds.values()]}; set mesh.tensor to what divides a "
            "process's devices, or to a multiple of them"
        )
    first = min(other for other, shards in holds.items() if shards == holds[process])
    share = shares.index(tuple(sorted(holds[process])))
    return RowShare(share, len(shares), first == process)


def _put(mesh: Mesh, sharding: NamedSharding, value: np.ndarray, axis: int) -> jax.Array:
    """On the devices; along `axis` the rows are this process's own."""
    if not mesh.is_multi_process:
        return jax.device_put(value, sharding)
    shards = row_shards(mesh)
    own = len(own_rows(mesh, shards))
    shape = (*value.shape[:axis], value.shape[axis] * shards // own, *value.shape[axis + 1 :])
    return jax.make_array_from_process_local_data(sharding, value, shape)


def shard_rows(mesh: Mesh, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Numpy arrays [B,..] on the devices, split by rows; of several processes each gives its
    `own_rows`."""
    sharding = batch_sharding(mesh)
    return {name: _put(mesh, sharding, value, 0) for name, value in rows.items()}


def shard_batch(mesh: Mesh, batch: Batch, *, leading: int = 0) -> Batch:
    """A numpy batch on the devices: the one boundary where cache arrays leave numpy. Of several
    processes each gives its `own_rows`."""
    sharding = batch_sharding(mesh, leading=leading)
    return batch.map(lambda x: _put(mesh, sharding, x, leading))


def to_host(tree: Any) -> Any:
    """Arrays as numpy, whole in every process, whose other ones must call this too."""

    def fetch(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return jax.tree.map(fetch, tree)


def own_part(tree: Any) -> Any:
    """Of arrays [B,..] split by `batch_sharding` the `own_rows`, as numpy."""

    def fetch(x: jax.Array) -> np.ndarray:
        parts = {each.index[0].start or 0: each.data for each in x.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return jax.tree.map(fetch, tree)
