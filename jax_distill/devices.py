"""GPUs as facts, and XLA's plan for one that is not here.

XLA compiles a program for a GPU described in text, and its buffer assignment is the real one for
that GPU. Needed: jax's CUDA plugin of jax's own version (the extra `plan`), no driver, no GPU. What
such a plan cannot show is time.
"""

import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jax_distill.base.errors import UserError

QUICK_COMPILE: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options for what runs once: it takes longer to compile well than to run badly."""


@dataclass(frozen=True)
class Gpu:
    """What XLA asks of a card, and what its data sheet promises."""

    name: str  # as the driver reports it
    capability: tuple[int, int]  # CUDA compute capability
    accelerated: bool  # whether it has arch-specific features
    fpus_per_core: int  # fp32 lanes of one streaming multiprocessor
    threads_per_core: int  # resident at most
    shared_per_core: int  # bytes of shared memory
    shared_opt_in: int  # the most of it that one block can ask for
    links: int  # NVLink to the other cards, bytes/s each way; PCIe where there is none
    pcie: int  # to the host, bytes/s each way
    cores: int  # streaming multiprocessors
    l2_bytes: int
    clock_ghz: float  # boost
    bandwidth: int  # of the memory, bytes/s
    memory_bytes: int  # as the driver reports it
    bf16_tflops: float  # dense matmuls with fp32 accumulation, TFLOP/s


def _card(
    name: str,
    chip: Any,
    cores: int,
    l2_mib: float,
    ghz: float,
    gb_s: float,
    memory: int,
    tflops: float,
) -> Gpu:
    facts = (cores, int(l2_mib * 2**20), ghz, round(gb_s * 1e9), memory, tflops)
    return Gpu(*(name, *chip, *facts))


_PCIE_4, _PCIE_5 = 32 * 10**9, 64 * 10**9  # 16 lanes
# capability … pcie of a Gpu
_AMPERE = ((8, 0), False, 64, 2048, 167936, 166912, 300 * 10**9, _PCIE_4)
_ADA = ((8, 9), False, 128, 1536, 102400, 101376, _PCIE_4, _PCIE_4)
_HOPPER = ((9, 0), True, 128, 2048, 233472, 232448, 450 * 10**9, _PCIE_5)
_B200 = ((10, 0), True, 128, 2048, 233472, 232448, 900 * 10**9, _PCIE_5)
_RTX_PRO = ((12, 0), False, 128, 1536, 131072, 101376, _PCIE_5, _PCIE_5)
GPUS = {
    "a100-40": _card("NVIDIA A100-SXM4-40GB", _AMPERE, 108, 40, 1.41, 1555.2, 42331013120, 312.0),
    "a100-80": _card("NVIDIA A100-SXM4-80GB", _AMPERE, 108, 40, 1.41, 2039.04, 85100068864, 312.0),
    "h100": _card("NVIDIA H100 80GB HBM3", _HOPPER, 132, 50, 1.98, 3352.32, 84942979072, 989.4),
    "h200": _card("NVIDIA H200", _HOPPER, 132, 50, 1.98, 4800, 151397597184, 989.4),
    "b200": _card("NVIDIA B200", _B200, 148, 126.5, 1.965, 7672.32, 191514411008, 2250.0),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", _ADA, 128, 72, 2.52, 1008.096, 25386352640, 165.2),
    "rtx6000pro": _card(
        "NVIDIA RTX PRO 6000 Blackwell", _RTX_PRO, 188, 128, 2.6, 1792, 102641958912, 503.8
    ),
    "l40s": _card("NVIDIA L40S", _ADA, 142, 96, 2.52, 864, 47670000000, 362.0),
}

NO_AUTOTUNING = {"xla_gpu_autotune_level": 0}
"""Autotuning runs kernels, and there is no GPU to run them on."""

CPUS_FLAG = "xla_force_host_platform_device_count"
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one device that a compiled program needs, by XLA's own buffer assignment."""

    arguments: int
    outputs: int
    temps: int
    aliases: int

    @property
    def peak(self) -> int:
        """Arguments + outputs + temps − what outputs share with donated arguments."""
        return self.arguments + self.outputs + self.temps - self.aliases


def find_gpu(key: str) -> Gpu:
    """The card called `key` in GPUS.

    Raises:
        UserError: no such card.
    """
    if key not in GPUS:
        raise UserError(f"expected a device of {', '.join(GPUS)}, got {key!r}; choose one of them")
    return GPUS[key]


def target_config(gpu: Gpu) -> str:
    """The text proto (XLA's GpuTargetConfigProto) that stands for the card."""
    major, minor = gpu.capability
    feature = "ACCELERATED_FEATURES" if gpu.accelerated else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  shared_memory_per_block_optin: {gpu.shared_opt_in}
  threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  name: "{gpu.name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


def local_devices(count: int, platform: str | None = None) -> list[Any]:
    """The first `count` devices that are here. A CPU becomes as many as are asked for, unless JAX
    has looked for devices already or XLA_FLAGS says how many.

    Raises:
        UserError: there are fewer.
    """
    in_flags = CPUS_FLAG in os.environ.get("XLA_FLAGS", "")
    if count > 1 and not in_flags:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has looked: what it found is all there is
            pass
    found = jax.local_devices(backend=platform)
    if len(found) >= count:
        return found[:count]
    kind = "CPU devices" if found[0].platform == "cpu" else "GPUs"
    cure = f"raise {CPUS_FLAG} in XLA_FLAGS, or remove it" if in_flags else "lower --devices"
    raise UserError(f"expected {count} {kind} here, got {len(found)}; {cure}")


def planned_devices(gpu: Gpu, count: int = 1) -> list[Any]:
    """`count` devices of one host that are not there, to shard shapes over.

    To be called before JAX first looks for devices, unless `jax_platforms` is `cpu` already: a
    process that plans runs on the CPU and leaves an attached GPU alone.

    Raises:
        UserError: jax's CUDA plugin is missing or of another version.
    """
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no driver, no cuDNN: only the compiler
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x1x{count}",
            target_config=target_config(gpu),
        )
    except NotImplementedError as error:
        version = importlib.metadata.version("jax")
        raise UserError(
            f"expected jax's CUDA plugin {version} to plan for {gpu.name}, got none; "
            "run pip install 'jax_distill[plan]'"
        ) from error
    return list(topology.devices)


_planned: ContextVar[Any] = ContextVar("planned", default=None)


@contextmanager
def tracing_for(device: Any) -> Iterator[None]:
    """What is traced inside is for `device`, which need not be here."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)


def is_planning() -> bool:
    """Whether this is inside `tracing_for`."""
    return _planned.get() is not None


def traced_device() -> Any:
    """The device that a function is traced for: `tracing_for`'s, or the first one here."""
    return _planned.get() or jax.local_devices()[0]


def compile_ahead(
    jitted: Any,
    *shapes: Any,
    planned: bool,
    options: Mapping[str, Any] | None = None,
    **static: Any,
) -> Any:
    """A jitted function compiled for the devices that its shapes are sharded over.

    shapes: trees of jax.ShapeDtypeStruct with shardings; static: the function's static arguments.
    planned: the devices are `planned_devices`. options: of XLA, by their flags' names.
    """
    options = dict(options or {})
    traced = jitted.trace(*shapes, **static)
    if not planned:
        return traced.lower().compile(compiler_options=options)
    return traced.lower(lowering_platforms=("cuda",)).compile(
        compiler_options=NO_AUTOTUNING | options
    )


def memory_of(compiled: Any) -> Memory:
    """What a compiled program (planned or real) takes of one device."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temps=stats.temp_size_in_bytes,
        aliases=stats.alias_size_in_bytes,
    )


EDITIONS = (" Workstation Edition", " Server Edition")
"""What the driver adds to a name without a change of speed."""


def peak_bf16_flops(device_kind: str) -> float | None:
    """FLOP/s that a card's data sheet promises, by the name the driver reports; None if unknown.

    The whole name counts: an H20 is no H200, and a laptop's RTX 4090 not the desktop's.
    """
    for edition in EDITIONS:
        device_kind = device_kind.removesuffix(edition)
    known = {gpu.name: gpu.bf16_tflops * 1e12 for gpu in GPUS.values()}
    return known.get(device_kind)
