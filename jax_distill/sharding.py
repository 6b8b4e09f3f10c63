"""Where arrays live: the mesh, and ONE table from logical axes to mesh axes.

Mesh axes: `data` (copies of the model, each with its own rows) and `fsdp` (rows and parameters
split together). A parameter names its logical axes where it is made (`model.py`); a batch is split
by rows over both. On one device all of this is the identity.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_distill.config import Refusal

LOGICAL_AXES: dict[str | None, str | None] = {
    "layers": None,
    "vocab": "fsdp",
    "embed": None,
    "heads": "fsdp",
    "kv_heads": "fsdp",
    "mlp": "fsdp",
    None: None,
}


def make_mesh(*, data: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (None: those there are); −1 takes what the other axis leaves.

    Raises:
        Refusal: the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    for name, given in {"data": data, "fsdp": fsdp}.items():
        if -1 in (data, fsdp) and given != -1 and (given < 1 or count % given):
            raise Refusal(
                f"expected mesh.{name} to divide the devices here, {count}, got {given}; "
                "set another"
            )
    if data == -1 and fsdp == -1:
        data, fsdp = count, 1
    elif data == -1:
        data = count // fsdp
    elif fsdp == -1:
        fsdp = count // data
    if data * fsdp != count:
        raise Refusal(
            f"expected mesh.data·mesh.fsdp = {count} (the devices here), got {data}·{fsdp}; "
            "set one of them to -1"
        )
    # Explicit axes refuse an embedding gather on sharded ids; the compiler decides instead.
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=kinds, devices=devices)


def parameter_sharding(
    mesh: Mesh, logical_axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """A parameter's place. An axis that the mesh does not divide stays whole."""
    spec = []
    for name, size in zip(logical_axes, shape, strict=True):
        axis = LOGICAL_AXES[name]
        divides = axis is not None and size % mesh.shape[axis] == 0
        spec.append(axis if divides and axis not in spec else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Rows over all devices; `leading` axes before them (micro-batches) stay whole."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, ("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_rows(mesh: Mesh, rows: int, key: str) -> None:
    """Refuse a batch that the devices cannot share evenly."""
    if rows % mesh.size:
        raise Refusal(
            f"expected {key} to be a multiple of the {mesh.size} devices, got {rows}; "
            f"the next that fits is {-(-rows // mesh.size) * mesh.size}"
        )


def place_batch(mesh: Mesh, batch: dict[str, np.ndarray], *, leading: int = 0) -> dict[str, Any]:
    """The one boundary where store arrays leave numpy."""
    sharding = batch_sharding(mesh, leading=leading)
    return {key: jax.device_put(value, sharding) for key, value in batch.items()}
