"""What is planned for: devices to shard shapes over, and the bytes a process gets of each."""

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_distill import devices
from jax_distill.config import Refusal

POOL_FRACTION = 0.75
"""Of a GPU's memory that JAX takes when it starts, unless the environment says otherwise."""
FRACTION_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
CPUS_FLAG = "xla_force_host_platform_device_count"
RESERVE = 0.03
"""Share of the pool left for what no plan sees (`Target.unseen`). Stated, not measured."""


@dataclass(frozen=True)
class Target:
    """Devices of one kind.

    Attributes:
        name: of one device.
        devices: jax devices, there or planned.
        device_bytes: memory of one device (of a CPU: the machine's, shared by its devices).
        pool_bytes: what one process gets of it.
        pool_note: why that much.
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
            return "Python, the compiler and its code, scratch of the matrix products"
        seen_later = "cuDNN's and cuBLAS's workspaces, NCCL's buffers" if self.planned else "NCCL"
        return f"{seen_later}, gaps between the allocator's blocks"


def find_target(key: str, count: int, *, fraction: float | None = None) -> Target:
    """`cpu`, `local` (the GPU that is here) or a name of `devices.GPUS`, which need not be here.

    fraction: of the device's memory that a process gets; None is what JAX would take, as the
    environment says. To be called before JAX first looks for devices.

    Raises:
        Refusal: no such device, not so many of them, no plugin to plan with.
    """
    if count < 1:
        raise Refusal(f"expected --devices of 1 at least, got {count}")
    if fraction is not None and not 0 < fraction <= 1:
        raise Refusal(f"expected --memory_fraction in (0, 1], got {fraction}")
    if key == "cpu":
        return _cpu(count, fraction)
    if key == "local":
        return _local(count, fraction)
    if key not in devices.GPUS:
        known = ", ".join(("cpu", "local", *devices.GPUS))
        raise Refusal(f"expected --device of {known}, got {key!r}; choose one of them")
    gpu = devices.find_gpu(key)
    share, note = _pool(fraction)
    return Target(
        name=gpu.name,
        devices=devices.planned_devices(gpu, count),
        device_bytes=gpu.memory_bytes,
        pool_bytes=int(gpu.memory_bytes * share),
        pool_note=note,
        planned=True,
    )


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
                raise Refusal(
                    f"expected {variable} in (0, 1], a share of the GPU, got {text!r}; "
                    "correct or unset it"
                )
            return share, f"{variable}={text}"
    return POOL_FRACTION, f"JAX takes {POOL_FRACTION:.0%} of a GPU unless told otherwise"


def ask_for_cpus(count: int) -> None:
    """Have JAX find `count` devices on the CPU, unless it has looked or XLA_FLAGS says how many."""
    if count > 1 and CPUS_FLAG not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has looked already: what it found has to do
            pass


def _cpu(count: int, fraction: float | None) -> Target:
    jax.config.update("jax_platforms", "cpu")
    ask_for_cpus(count)
    found = jax.devices("cpu")
    if len(found) < count:
        cure = "ask before JAX first looks for devices"
        if CPUS_FLAG in os.environ.get("XLA_FLAGS", ""):
            cure = f"raise {CPUS_FLAG} in XLA_FLAGS, or leave it out"
        raise Refusal(f"expected {count} CPU devices, got {len(found)}; {cure}")
    memory = machine_memory() // count
    note = "the machine's memory" + ("" if count == 1 else f", shared by {count} devices")
    return Target(
        name="CPU",
        devices=found[:count],
        device_bytes=memory,
        pool_bytes=int(memory * (fraction or 1.0)),
        pool_note=note,
        planned=False,
    )


def machine_memory() -> int:
    """Bytes of this machine, or of the control group that this process may fill."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(memory, int(text)) if text.isdecimal() else memory


def _local(count: int, fraction: float | None) -> Target:
    # The plan allocates nothing; a job that is running on the card keeps its memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    found = jax.local_devices()
    if found[0].platform == "cpu":
        raise Refusal(
            "expected a GPU here for --device local, got only a CPU; name a card "
            f"({', '.join(devices.GPUS)}), or use --device cpu"
        )
    if len(found) < count:
        raise Refusal(f"expected {count} GPUs here, got {len(found)}; lower --devices")
    limit = (found[0].memory_stats() or {}).get("bytes_limit", 0)
    known = next((g for g in devices.GPUS.values() if g.name == found[0].device_kind), None)
    share, note = _pool(fraction)
    total = known.memory_bytes if known else int(limit / share)
    return Target(
        name=found[0].device_kind,
        devices=found[:count],
        device_bytes=total,
        pool_bytes=int(total * share) if fraction or not limit else limit,
        pool_note=note,
        planned=False,
    )


def need_cudnn(target: Target) -> None:
    """Refuse to plan cuDNN's attention for a GPU that is not here where its library is missing."""
    parent = importlib.util.find_spec("nvidia")
    if target.planned and not (parent and importlib.util.find_spec("nvidia.cudnn")):
        raise Refusal(
            f"expected cuDNN's library to plan the attention of {target.name}, got none; "
            "do pip install 'jax_distill[plan]'"
        )
