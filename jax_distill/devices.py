"""GPUs as facts, and XLA's plan for one that is not here.

XLA compiles a program for a GPU described in text, and its buffer assignment is the real one for
that GPU. Needed: jax's CUDA plugin of jax's own version (the extra `plan`), no driver, no GPU. What
such a plan cannot show is time.
"""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jax_distill.config import Refusal


@dataclass(frozen=True)
class Gpu:
    """What XLA wants to know of a card.

    Attributes:
        name: as the driver reports it.
        capability: CUDA compute capability; `accelerated` where it has arch-specific features.
        cores: streaming multiprocessors.
        fpus_per_core: fp32 lanes of one.
        threads_per_core: resident at most.
        shared_per_core, shared_opt_in: bytes of shared memory, and the most one block can ask for.
        l2_bytes: second-level cache.
        clock_ghz: boost clock.
        bandwidth: of the memory, bytes/s.
        memory_bytes: as the driver reports it.
    """

    name: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_per_core: int
    shared_opt_in: int
    l2_bytes: int
    clock_ghz: float
    bandwidth: int
    memory_bytes: int


def _ampere(name: str, bandwidth: int, memory_bytes: int) -> Gpu:
    shared = (167936, 166912)
    return Gpu(name, (8, 0), False, 108, 64, 2048, *shared, 41943040, 1.41, bandwidth, memory_bytes)


def _hopper(name: str, bandwidth: int, memory_bytes: int) -> Gpu:
    shared = (233472, 232448)
    return Gpu(name, (9, 0), True, 132, 128, 2048, *shared, 52428800, 1.98, bandwidth, memory_bytes)


def _ada(name: str, cores: int, l2_bytes: int, bandwidth: int, memory_bytes: int) -> Gpu:
    shared = (102400, 101376)
    return Gpu(
        name, (8, 9), False, cores, 128, 1536, *shared, l2_bytes, 2.52, bandwidth, memory_bytes
    )


GPUS: dict[str, Gpu] = {
    "a100-40": _ampere("NVIDIA A100-SXM4-40GB", 1555200000000, 42331013120),
    "a100-80": _ampere("NVIDIA A100-SXM4-80GB", 2039040000000, 85100068864),
    "h100": _hopper("NVIDIA H100 80GB HBM3", 3352320000000, 84942979072),
    "h200": _hopper("NVIDIA H200", 4800000000000, 151397597184),
    "b200": Gpu(
        "NVIDIA B200",
        (10, 0),
        True,
        148,
        128,
        2048,
        233472,
        232448,
        132644864,
        1.965,
        7672320000000,
        191514411008,
    ),
    "rtx4090": _ada("NVIDIA GeForce RTX 4090", 128, 75497472, 1008096000000, 25386352640),
    "rtx6000pro": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell",
        (12, 0),
        False,
        188,
        128,
        1536,
        131072,
        101376,
        134217728,
        2.6,
        1792000000000,
        102641958912,
    ),
    "l40s": _ada("NVIDIA L40S", 142, 100663296, 864000000000, 47670000000),
}

NO_AUTOTUNING = {"xla_gpu_autotune_level": 0}
"""Autotuning runs kernels, and there is no GPU to run them on."""

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
        Refusal: no such card.
    """
    if key not in GPUS:
        raise Refusal(f"expected a device of {', '.join(GPUS)}, got {key!r}; choose one of them")
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


def planned_devices(gpu: Gpu, count: int = 1) -> list[Any]:
    """`count` devices of one host that are not there, to shard shapes over.

    To be called before JAX first looks for devices, unless `jax_platforms` is `cpu` already: a
    process that plans runs on the CPU and leaves an attached GPU alone.

    Raises:
        Refusal: jax's CUDA plugin is missing or of another version.
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
        raise Refusal(
            f"expected jax's CUDA plugin {version} to plan for {gpu.name}, got none; "
            "do pip install 'jax_distill[plan]'"
        ) from error
    return list(topology.devices)


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


def compile_for_gpu(jitted: Any, *shapes: Any) -> Any:
    """A jitted function compiled for the planned devices that its shapes are sharded over."""
    return compile_ahead(jitted, *shapes, planned=True)


def memory_of(compiled: Any) -> Memory:
    """What a compiled program (planned or real) takes of one device."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temps=stats.temp_size_in_bytes,
        aliases=stats.alias_size_in_bytes,
    )


# Dense bf16 products with fp32 accumulation, TFLOP/s, from the makers' data sheets.
BF16_TFLOPS = {
    "a100-40": 312.0,
    "a100-80": 312.0,
    "h100": 989.4,
    "h200": 989.4,
    "b200": 2250.0,
    "rtx4090": 165.2,
    "rtx6000pro": 503.8,
    "l40s": 362.0,
}


# What the driver adds to a name without a change of speed.
EDITIONS = (" Workstation Edition", " Server Edition")


def peak_bf16_flops(device_kind: str) -> float | None:
    """FLOP/s that a card's data sheet promises, by the name the driver reports; None if unknown.

    The whole name counts: an H20 is no H200, and a laptop's RTX 4090 not the desktop's.
    """
    for edition in EDITIONS:
        device_kind = device_kind.removesuffix(edition)
    for key, gpu in GPUS.items():
        if device_kind == gpu.name:
            return BF16_TFLOPS[key] * 1e12
    return None
