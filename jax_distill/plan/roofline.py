"""How long a step takes at stated rates: computed from XLA's program, not measured.

A resource's time is what the program asks of it over its rate. The step takes at least the longest
of them and, where none overlaps another, at most their sum; kernels that do not reach the rates,
and the gaps between them, come on top.
"""

import dataclasses
import re

from jax_distill.devices import GPUS
from jax_distill.plan.hlo import Hlo, Instruction, matmul_flops, sources, totals
from jax_distill.plan.overlap import find_overlap
from jax_distill.plan.traffic import host_bytes, link_bytes, memory_traffic

MATMUL_SHARE = 0.8
"""Of a data sheet's dense bf16 rate that matmuls reach: 790 of 989 TFLOP/s measured on an H200."""
MEMORY_SHARE = 0.9
"""Of a data sheet's memory bandwidth. Assumed."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one device does in a second, of a resource that nothing else uses: bf16 FLOPs with fp32
    accumulation, bytes of its memory, bytes to the other devices and to the host each way."""

    flops: float
    memory: float
    links: float
    pcie: float


def rates_of(device: str) -> Rates | None:
    """Of a card by the name that its driver reports; None for what is not in `devices.GPUS`."""
    for gpu in GPUS.values():
        if gpu.name == device:
            flops, memory = gpu.bf16_tflops * 1e12, float(gpu.bandwidth)
            return Rates(
                flops * MATMUL_SHARE, memory * MEMORY_SHARE, float(gpu.links), float(gpu.pcie)
            )
    return None


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Of one device and one step; bytes and FLOPs of XLA's program, seconds at `rates`.

    Attributes:
        flops: of all matmuls, recomputed ones too. memory_bytes: of all kernels.
        link_bytes: sent to other devices.
        overlapped_link_bytes: of these what XLA's schedule sends beside other kernels, by the rule
            of overlap.py.
        to_host_bytes, to_device_bytes: over PCIe.
        loss_flops: of the loss's matmuls.
        loss_bytes: of its other kernels, the logits' passes.
        loss_sum_bytes: of fp32 sums that its matmuls add to: the head's gradient.
        loss_matmul_bytes: of their other operands and results.
        loss_ratio: the loss over its matmuls alone, its other kernels and the fp32 sums' traffic
            not overlapped, the matmuls' other traffic hidden; 0 without a loss.
        seconds: by resource: matmuls, memory, links, pcie (the busier way).
    """

    rates: Rates
    flops: float
    memory_bytes: float
    link_bytes: float
    overlapped_link_bytes: float
    to_host_bytes: float
    to_device_bytes: float
    loss_flops: float
    loss_bytes: float
    loss_sum_bytes: float
    loss_matmul_bytes: float
    loss_ratio: float
    seconds: dict[str, float]


def make_roofline(hlo: Hlo, rates: Rates, *, devices: int, in_loss: set[str]) -> Roofline:
    """Of a compiled program that runs on each of `devices`. in_loss: the names of the instructions
    that belong to the loss."""

    def part_of(instruction: Instruction) -> str:
        return "loss" if instruction.name in in_loss else "rest"

    def loss_matmuls(instruction: Instruction, around: dict[str, Instruction]) -> dict[str, float]:
        return matmul_flops(instruction, around) if instruction.name in in_loss else {}

    traffic = totals(hlo, memory_traffic(hlo, part_of))
    flops = totals(hlo, matmul_flops).get("flops", 0.0)
    links = totals(hlo, link_bytes(devices)).get("links", 0.0)
    host = {"to host": 0.0, "to device": 0.0} | totals(hlo, host_bytes)
    memory = sum(traffic.values())
    loss_flops = totals(hlo, loss_matmuls).get("flops", 0.0)
    passes, summed = traffic.get("loss other", 0.0), traffic.get("loss sum", 0.0)
    matmul_seconds = loss_flops / rates.flops
    exposed = (passes + summed) / rates.memory
    overlap = find_overlap(
        hlo, devices=devices, flops=rates.flops, memory=rates.memory, links=rates.links
    )
    return Roofline(
        rates=rates,
        flops=flops,
        memory_bytes=memory,
        link_bytes=links,
        overlapped_link_bytes=overlap.hidden * rates.links,
        to_host_bytes=host["to host"],
        to_device_bytes=host["to device"],
        loss_flops=loss_flops,
        loss_bytes=passes,
        loss_sum_bytes=summed,
        loss_matmul_bytes=traffic.get("loss matmul", 0.0),
        loss_ratio=1.0 + exposed / matmul_seconds if loss_flops else 0.0,
        seconds={
            "matmuls": flops / rates.flops,
            "memory": memory / rates.memory,
            "links": links / rates.links,
            "pcie": max(host.values()) / rates.pcie,
        },
    )


def instructions_of(hlo: Hlo, scope: str) -> set[str]:
    """The names of the instructions that JAX made under the name `scope`."""
    found = sources(hlo).items()
    return {name for name, source in found if scope in re.split(r"[/()]", source)}
