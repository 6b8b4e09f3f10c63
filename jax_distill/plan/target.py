"""What is planned for: devices to shard shapes over, and the bytes a process gets of each."""

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any

import jax

from jax_distill import devices
from jax_distill.base.errors import UserError
from jax_distill.base.process import machine_memory

POOL_FRACTION = 0.75
"""Of a GPU's memory that JAX takes when it starts, unless the environment says otherwise."""
FRACTION_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
RESERVE = 0.03
"""Share of the pool left for what no plan sees (`Target.unseen`). Stated, not measured."""


@dataclass(frozen=True)
class Target:
    """Devices of one kind.

    Attributes:
        name: of one device.
        devices: jax devices, there or planned.
        device_bytes: memory of one device (of a CPU: the machine's, shared by its devices).
        pool_bytes: what one process gets of it; pool_note: why that much.
        planned: the devices are not there.
    """

    name: str
    devices: list[Any]
    device_bytes: int
    pool_bytes: int
    pool_note: str
    planned: bool

    @property
    def on_gpu(self) -> bool:
        return self.devices[0].platform != "cpu"

    @property
    def unseen(self) -> str:
        """What the reserve is for."""
        if not self.on_gpu:
            return "Python, the compiler and its code, scratch memory of the matmuls"
        libraries = "cuBLAS's workspaces, NCCL's buffers" if self.planned else "NCCL"
        return f"{libraries}, gaps between the allocator's blocks"


def find_target(key: str, count: int, *, fraction: float | None = None) -> Target:
    """`cpu`, `local` (the GPU that is here) or a name of `devices.GPUS`, which need not be here.

    fraction: of the device's memory that a process gets; None is what JAX would take, as the
    environment says. To be called before JAX first looks for devices.

    Raises:
        UserError: no such device, not so many of them, no plugin to plan with.
    """
    if count < 1:
        raise UserError(f"expected --devices of at least 1, got {count}")
    if fraction is not None and not 0 < fraction <= 1:
        raise UserError(f"expected --memory_fraction in (0, 1], got {fraction}")
    if key == "cpu":
        return _cpu(count, fraction)
    if key == "local":
        return _local(count, fraction)
    if key not in devices.GPUS:
        known = ", ".join(("cpu", "local", *devices.GPUS))
        raise UserError(f"expected --device of {known}, got {key!r}; choose one of them")
    gpu, (share, note) = devices.GPUS[key], _pool(fraction)
    there = devices.planned_devices(gpu, count)
    pool = int(gpu.memory_bytes * share)
    return Target(gpu.name, there, gpu.memory_bytes, pool, note, planned=True)


def _pool(fraction: float | None) -> tuple[float, str]:
    """The share of a GPU that JAX takes, and where that comes from."""
    if fraction is not None:
        return fraction, f"--memory_fraction {fraction}"
    for variable in FRACTION_VARIABLES:
        text = os.environ.get(variable, "")
        if text:
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if not 0 < share <= 1:
                raise UserError(
                    f"expected {variable} in (0, 1], a share of the GPU, got {text!r}; "
                    "correct or unset it"
                )
            return share, f"{variable}={text}"
    return POOL_FRACTION, f"JAX takes {POOL_FRACTION:.0%} of a GPU by default"


def _cpu(count: int, fraction: float | None) -> Target:
    jax.config.update("jax_platforms", "cpu")
    found = devices.local_devices(count, "cpu")
    memory = machine_memory() // count
    note = "the machine's memory" + ("" if count == 1 else f", shared by {count} devices")
    return Target("CPU", found, memory, int(memory * (fraction or 1.0)), note, planned=False)


def _local(count: int, fraction: float | None) -> Target:
    # The plan allocates nothing; a job that is running on the card keeps its memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if jax.local_devices()[0].platform == "cpu":
        raise UserError(
            "expected a GPU here for --device local, got only a CPU; name a GPU "
            f"({', '.join(devices.GPUS)}), or use --device cpu"
        )
    found = devices.local_devices(count)
    name, (share, note) = found[0].device_kind, _pool(fraction)
    limit = (found[0].memory_stats() or {}).get("bytes_limit", 0)
    known = next((gpu.memory_bytes for gpu in devices.GPUS.values() if gpu.name == name), 0)
    total = known or int(limit / share)
    pool = int(total * share) if fraction or not limit else limit
    return Target(name, found, total, pool, note, planned=False)


def need_cudnn(target: Target) -> None:
    """Refuse to plan cuDNN's attention for a GPU that is not here where its library is missing."""
    parent = importlib.util.find_spec("nvidia")
    if target.planned and not (parent and importlib.util.find_spec("nvidia.cudnn")):
        raise UserError(
            f"expected cuDNN's library to plan the attention of {target.name}, got none; "
            "run pip install 'jax_distill[plan]'"
        )
