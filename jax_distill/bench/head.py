"""`bench head`: memory and time of the loss alone, hidden states and head to both gradients.

On the device that is here, or with `--plan h200` as XLA plans it for a GPU that is not (peak =
arguments + outputs + temps − aliases; no time). Every row is one jitted function of its own:
`kl_and_grads` with hidden donated, the others `value_and_grad` of loss/count by hidden and weight.
`× matmuls` of a plan is computed, not measured: `plan.roofline.Roofline.loss_ratio`.

Letters: T tokens (B = 1), D hidden_size, V vocab_size, K top_k, C chunk_size.
Variants that were tried, with their memory: docs/LOSS.md.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from jax_distill import devices, losses
from jax_distill.base import process
from jax_distill.base.charts import Limit, Mark, draw_lines
from jax_distill.base.command import CommandLine, above_zero, positive_numbers
from jax_distill.base.errors import UserError
from jax_distill.base.files import FIGURES, check_new_file, write_json
from jax_distill.batch import Batch
from jax_distill.bench import CPU_FLOPS, MATMULS
from jax_distill.objective import Execution, Objective
from jax_distill.plan.hlo import read_hlo
from jax_distill.plan.roofline import make_roofline, rates_of
from jax_distill.synthetic import random_targets

PAPER_GIB = {
    ("dense", 32768): 85.2,
    ("fused_chunked", 32768): 5.45,
    ("forward_chunked", 262144): 134.2,
    ("fused_chunked", 262144): 11.6,
}
"""arXiv 2608.03796, D = 4096, V = 131072, measured on one H200."""
PAPER_SHAPE = (4096, 131072)

MERGING = ("fused", "kl_and_grads")
"""Those that `gradient_chunks` changes."""
SPARE = 0.03
"""Of a planned card's memory, left for what no plan sees: the context, cuBLAS, the allocator."""


class Case(NamedTuple):
    """One row to be measured."""

    implementation: str
    tokens: int
    hidden_size: int
    vocab_size: int
    top_k: int
    chunk_size: int
    dtype: str
    gradient_chunks: int = 1

    @property
    def flops(self) -> float:
        """Of its matmuls."""
        matmul = 2.0 * self.tokens * self.hidden_size * self.vocab_size
        return MATMULS[self.implementation] * matmul

    @property
    def floor(self) -> int:
        """Bytes that no implementation can do without: inputs, and gradients (d_weight in fp32).

        `kl_and_grads` writes d_hidden over hidden.
        """
        width = jnp.dtype(self.dtype).itemsize
        copies = 1 if self.implementation == "kl_and_grads" else 2
        hidden = copies * self.tokens * self.hidden_size * width
        targets = self.tokens * (self.top_k * 8 + 13)
        return hidden + self.vocab_size * self.hidden_size * (width + 4) + targets

    @property
    def expected(self) -> int:
        """About the bytes it will need, to run the leanest first: the floor and its logits."""
        chunk = (4 + 2 * self.gradient_chunks) * min(self.chunk_size, self.tokens)
        held = {"dense": 8 * self.tokens, "forward_chunked": 4 * self.tokens + chunk}
        return self.floor + self.vocab_size * held.get(self.implementation, chunk)


def function_of(implementation: str, chunk_size: int, gradient_chunks: int = 1) -> Any:
    """The jitted function of a row: (hidden, weight, batch) → loss and both gradients; of
    `kl_and_grads` of the sum, hidden donated, else of the mean."""
    if implementation == "kl_and_grads":
        execution = Execution(chunk_size=chunk_size, gradient_chunks=gradient_chunks)

        def core(hidden: jax.Array, weight: jax.Array, batch: Batch) -> Any:
            head = losses.Head(weight)
            sums, *grads = losses.kl_and_grads(hidden, head, batch, Objective(), execution)
            return sums.loss, grads

        return jax.jit(core, donate_argnums=0)
    execution = Execution(implementation, chunk_size, gradient_chunks)

    def mean(hidden: jax.Array, weight: jax.Array, batch: Batch) -> jax.Array:
        sums = losses.loss(hidden, losses.Head(weight), batch, Objective(), execution)
        return sums.loss / jnp.maximum(sums.count, 1.0)

    return jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))


def targets_of(case: Case, tokens: int) -> Batch:
    """Random labels, mask and targets [1,tokens,..], numpy: what a loss reads of a batch."""
    batch = random_targets(1, tokens, vocab_size=case.vocab_size, top_k=case.top_k)
    return Batch(batch.labels, batch.mask, batch.targets)


def shapes_of(case: Case, sharding: Any = None) -> tuple[Any, ...]:
    """hidden, weight and batch."""

    def shape(kind: Any, *axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, kind, sharding=sharding)

    dtype = jnp.dtype(case.dtype)
    hidden = shape(dtype, 1, case.tokens, case.hidden_size)
    weight = shape(dtype, case.vocab_size, case.hidden_size)
    batch = targets_of(case, 1).map(lambda x: shape(x.dtype, 1, case.tokens, *x.shape[2:]))
    return hidden, weight, batch


@partial(jax.jit, static_argnums=(1, 2, 3))
def normal_rows(key: jax.Array, rows: int, width: int, dtype: str) -> jax.Array:
    """[rows,width], made block by block: making it must not be what the peak is of."""
    shape = (math.gcd(rows, 1024), width)
    keys = jax.random.split(key, rows // shape[0])
    blocks = jax.lax.map(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)), keys)
    return blocks.reshape(rows, width)


def inputs_of(case: Case, seed: int = 0) -> tuple[Callable[[], jax.Array], jax.Array, Batch]:
    """What makes hidden on the device, weight and batch: logits of deviation 2."""
    keys = jax.random.split(jax.random.key(seed), 2)
    scale = jax.jit(
        lambda x: x * jnp.asarray(2.0 / case.hidden_size**0.5, x.dtype), donate_argnums=0
    )
    weight = scale(normal_rows(keys[1], case.vocab_size, case.hidden_size, case.dtype))

    def hidden() -> jax.Array:
        return normal_rows(keys[0], case.tokens, case.hidden_size, case.dtype)[None]

    return hidden, weight, targets_of(case, case.tokens).map(jnp.asarray)


def row_of(case: Case, device: str, memory: devices.Memory) -> dict[str, Any]:
    """What is known of a case without running it."""
    known = (case.hidden_size, case.vocab_size) == PAPER_SHAPE
    return {
        **case._asdict(),
        "device": device,
        "peak_gib": memory.peak / devices.GIB,
        "floor_gib": case.floor / devices.GIB,
        "paper_gib": PAPER_GIB.get((case.implementation, case.tokens)) if known else None,
        "matmuls": MATMULS[case.implementation],
        "ratio": None,
        "measured_gib": None,
        "seconds": None,
        "tflops": None,
    }


def plan(cases: Sequence[Case], gpu: devices.Gpu, on_row: Callable) -> list[dict[str, Any]]:
    """Each case as XLA plans it for a GPU that is not here."""
    mesh = Mesh(np.array(devices.planned_devices(gpu)), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    rows, rates = [], rates_of(gpu.name)
    for case in cases:
        function = function_of(case.implementation, case.chunk_size, case.gradient_chunks)
        program = devices.compile_ahead(function, *shapes_of(case, whole), planned=True)
        memory = devices.memory_of(program)
        row = row_of(case, f"{gpu.name}, planned", memory)
        if rates and case.dtype == "bfloat16":
            hlo = read_hlo(program.as_text())
            every = {name for instructions in hlo.computations.values() for name in instructions}
            row["ratio"] = make_roofline(hlo, rates, devices=1, in_loss=every).loss_ratio
        row["fits"] = memory.peak < gpu.memory_bytes * (1 - SPARE)
        rows.append(row)
        on_row(row)
    return rows


def measure(
    cases: Sequence[Case], repeats: int, on_row: Callable, *, seconds: float = math.inf
) -> list[dict[str, Any]]:
    """Each case compiled and run on the device that is here, the leanest first.

    A GPU remembers only its highest peak; in this order each new one belongs to the case just run.
    What it has no room for is compiled and not run. After `seconds` no further case is begun.
    """
    device = jax.local_devices()[0]
    most = max(cases, key=lambda case: case.flops)
    if device.platform == "cpu" and most.flops > CPU_FLOPS:
        raise UserError(
            f"expected at most {CPU_FLOPS:.0e} FLOPs on a CPU, got {most.flops:.0e} "
            f"({most.implementation}, {most.tokens} tokens); lower --tokens, --hidden_size or "
            "--vocab_size, or use --plan h200"
        )
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for case in sorted(cases, key=lambda case: case.expected):
        if time.perf_counter() - start > seconds:
            print(f"time is up: {len(cases) - len(rows)} of {len(cases)} cases not begun")
            break
        function = function_of(case.implementation, case.chunk_size, case.gradient_chunks)
        program = function.lower(*shapes_of(case)).compile()
        memory = devices.memory_of(program)
        row = row_of(case, device.device_kind, memory)
        row["fits"] = memory.peak < (device.memory_stats() or {}).get("bytes_limit", math.inf)
        if row["fits"]:
            row["seconds"], row["measured_gib"] = run(case, program, device, repeats)
            row["tflops"] = case.flops / row["seconds"] / 1e12
        rows.append(row)
        on_row(row)
    return rows


def run(case: Case, program: Any, device: Any, repeats: int) -> tuple[float, float | None]:
    """Median seconds of a run, and its peak in GiB where it is known, inputs included: of a GPU
    only a new highest one, of a CPU what the process took beside what it held."""
    highest = peak_in_use(device)
    hidden, *rest = inputs_of(case)
    _, measured = process.measure(
        lambda given: jax.block_until_ready(program(given, *rest)),
        repeats,
        setup=lambda: jax.block_until_ready(hidden()),  # kl_and_grads takes its hidden away
        input_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(rest)),
        first_counts=False,
    )
    peak = measured.peak_bytes
    if device.platform != "cpu":
        peak = peak_in_use(device) if peak_in_use(device) > highest else None
    return float(np.median(measured.seconds)), None if peak is None else peak / devices.GIB


def peak_in_use(device: Any) -> int:
    """Bytes, the most since the process began; 0 where a device does not tell."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


HEADS = "implementation|tokens|C|matmuls|peak GiB|floor|paper|× matmuls|measured|seconds|TFLOP/s"
FORMATS = {
    "paper_gib": ".2f",
    "ratio": ".2f",
    "measured_gib": ".2f",
    "seconds": ".4f",
    "tflops": ".3g",
}


def chunk_of(row: dict[str, Any]) -> str:
    """C, and how many chunks' dlogits are kept where it is not one."""
    merged = row["gradient_chunks"]
    return f"{row['chunk_size']:,}" + (f" × {merged}" if merged > 1 else "")


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as they go into the README."""
    table = Table(*HEADS.split("|"), title=f"the head alone, {rows[0]['device']}")
    for row in rows:
        table.add_row(
            row["implementation"],
            f"{row['tokens']:,}",
            "" if row["implementation"] == "dense" else chunk_of(row),
            str(row["matmuls"]),
            f"{row['peak_gib']:.2f}" + ("" if row["fits"] else " (does not fit)"),
            f"{row['floor_gib']:.2f}",
            *["" if row[key] is None else f"{row[key]:{form}}" for key, form in FORMATS.items()],
        )
    Console(width=120).print(table)


def draw(rows: Sequence[dict[str, Any]], path: Path, *, limit: Limit | None) -> None:
    """Peak GiB of every row over tokens, the paper's figures beside them."""
    chunk_sizes = {chunk_of(row) for row in rows if row["implementation"] != "dense"}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = row["implementation"]
        if len(chunk_sizes) > 1 and label != "dense":
            label += f", C = {chunk_of(row)}"
        lines.setdefault(label, []).append((row["tokens"], row["peak_gib"]))
    floor = {row["tokens"]: row["floor_gib"] for row in sorted(rows, key=lambda r: -r["floor_gib"])}
    lines["inputs and gradients alone"] = list(floor.items())
    first = rows[0]
    shape = f"D = {first['hidden_size']:,}, V = {first['vocab_size']:,}, K = {first['top_k']:,}"
    if len(chunk_sizes) == 1:
        shape += f", C = {max(chunk_sizes)}"
    draw_lines(
        path,
        lines,
        title=f"The loss alone, forward and backward\n{first['device']}. {shape}, {first['dtype']}",
        labels=("tokens", "peak GiB"),
        limits=[limit] if limit else [],
        marks=[
            Mark(tokens, gib, f"paper, {name}: {gib:g}")
            for (name, tokens), gib in PAPER_GIB.items()
            if any(row["paper_gib"] and row["tokens"] == tokens for row in rows)
        ],
    )


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    """The command line and the cases it asks for."""
    parser = CommandLine("jax_distill.bench head")
    several = "several with commas"
    parser.add_argument("--tokens", type=positive_numbers, default="32768,262144", help=several)
    parser.add_argument("--hidden_size", type=above_zero, default=4096)
    parser.add_argument("--vocab_size", type=above_zero, default=131072)
    parser.add_argument("--top_k", type=above_zero, default=100)
    parser.add_argument("--chunk_size", type=positive_numbers, default="1024", help=several)
    parser.add_argument("--gradient_chunks", type=positive_numbers, default="1", help=several)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementation", default=",".join(MATMULS), help=several)
    parser.add_argument("--plan", metavar="GPU", help=f"one of {', '.join(devices.GPUS)}")
    parser.add_argument("--repeats", type=above_zero, default=3, help="timed runs: their median")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help=f"draw it here ({', '.join(FIGURES)})")
    options = parser.parse_args(argv)
    names = options.implementation.split(",")
    if unknown := sorted(set(names) - set(MATMULS)):
        raise UserError(f"expected --implementation of {', '.join(MATMULS)}, got {unknown[0]!r}")
    if options.top_k > options.vocab_size:
        raise UserError(
            f"expected --top_k of at most --vocab_size {options.vocab_size}, got {options.top_k}"
        )
    shape = (options.hidden_size, options.vocab_size, options.top_k)
    cases = [
        Case(name, tokens, *shape, chunk_size, options.dtype, merged if name in MERGING else 1)
        for tokens in options.tokens
        for name in names
        for chunk_size in options.chunk_size
        for merged in options.gradient_chunks
    ]
    check_new_file(options.json, "--json")
    check_new_file(options.plot, "--plot", FIGURES)
    return options, list(dict.fromkeys(cases))


def main(argv: Sequence[str]) -> int:
    """Measure or plan, print the table, write what was asked for."""
    options, cases = read_options(argv)

    def on_row(row: dict[str, Any]) -> None:
        print(f"{row['implementation']} {row['tokens']}: {row['peak_gib']:.3f} GiB", flush=True)

    limit = None
    if options.plan:
        gpu = devices.find_gpu(options.plan)
        limit = Limit(gpu.memory_bytes / devices.GIB, "memory of the device")
        rows = plan(cases, gpu, on_row)
    else:
        rows = measure(cases, options.repeats, on_row)
    print_table(rows)
    if options.json:
        write_json(options.json, rows)
    if options.plot:
        draw(rows, options.plot, limit=limit)
    return 0
