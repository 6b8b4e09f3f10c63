"""`bench head`: memory and time of the loss alone, hidden states and head to both gradients.

On whatever device is there, or with `--plan h200` as XLA plans it for a GPU that is not (peak =
arguments + outputs + temps − aliases; no time). Every row is one jitted function of its own:
`kl_and_grads` with hidden donated, the others `value_and_grad` of loss/count by hidden and lm_head.

Letters: T tokens (B = 1), D hidden, V vocabulary, K top_k, C chunk_size.

What was tried, as planned for an H200 (D = 4096, V = 131072, K = 100, bf16; GiB at 32K tokens, of
which inputs, d_hidden over hidden and an fp32 d_lm_head are 3.27):

    kl_and_grads, C = 1024, hidden donated                            4.03 (256K: 5.96)
      the same, hidden kept                                           4.28
      C = 256, 512, 2048, 4096                                        3.47, 3.65, 4.79, 6.31
      C = 256, 512, 2048, 4096 at 256K                                5.39, 5.58, 6.72, 8.24
      maximum and sum in two passes, not one running pair             4.03, one more read of a chunk
      dlogits in fp32, to bf16 inside both products                   4.28, so no bf16 copy is saved
      fp32 logits by quarters of a chunk, one bf16 chunk of dlogits   3.66; C = 2048: 4.05
      T no multiple of C (32000)                                      4.03: the last chunk overlaps
      padding columns, soft-cap, τ = 2 with cross-entropy             4.03 each
      B = 8, T = 4096, C = 128                                        4.03
    fused, through value_and_grad of loss/count, C = 1024             4.78 (256K: 8.46)
      C = 512, 2048, 4096                                             4.66, 5.04, 6.57
      C = 512, 2048, 4096 at 256K                                     8.33, 8.72, 10.24
      d_hidden in fp16 with a scale per row, not bf16                 4.78; error 2.4e-3, not 3.0e-3
    forward_chunked, C = 1024                                         20.80 (256K: 136.65)
      masked rows and their [T,D] mask kept for the backward          21.18 (256K: 139.15)

In XLA's program for a chunk of `kl_and_grads` what is [C,V] wide is touched so: the product writes
fp32; a gather reads the K columns; a scatter blanks them in place; one reduction reads it; one loop
reads it and writes bf16; a scatter sets the K columns in place; two products read bf16, the head's
gradient being added inside the second. That is one fp32 and one bf16 chunk, 18 bytes moved for each
of its logits in eight of some 27 kernels. Fewer passes would need what XLA does not do: a sum over
columns inside the product that makes them, or a loop inside the product that reads them. The fp32
head gradient is read and written once a chunk (4 GiB at these sizes, more than the 2.3 of the chunk
itself), which a larger C pays for. Logits made by quarters let C = 1024 do with what C = 512 needs,
at half of that traffic and four times as many small kernels: whether that pays only a GPU can tell,
so it is not in the code.
"""

import argparse
import json
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
from jax_distill.bench import process
from jax_distill.bench.head_plot import draw
from jax_distill.config import FIGURES, CommandLine, Refusal, check_new_file

PRODUCTS = {
    "dense": 3,
    "forward_chunked": 3,
    "fused_chunked": 4,
    "fused": 3,
    "kl_and_grads": 3,
}
"""T·D·V matrix products of each: the logits, d_hidden, d_lm_head, and what is made again."""

PAPER_GIB = {
    ("dense", 32768): 85.2,
    ("fused_chunked", 32768): 5.45,
    ("forward_chunked", 262144): 134.2,
    ("fused_chunked", 262144): 11.6,
}
"""arXiv 2608.03796, D = 4096, V = 131072, measured on one H200."""
PAPER_SHAPE = (4096, 131072)

SPARE = 0.03
"""Of a planned card's memory, left for what no plan sees: the context, cuBLAS, the allocator."""

CPU_OPERATIONS = 2e13
"""More than this on a CPU is minutes to hours: refused."""


class Case(NamedTuple):
    """One row to be measured."""

    implementation: str
    tokens: int
    hidden: int
    vocab: int
    top_k: int
    chunk_size: int
    dtype: str

    @property
    def operations(self) -> float:
        """Floating-point operations of its products."""
        return 2.0 * PRODUCTS[self.implementation] * self.tokens * self.hidden * self.vocab

    @property
    def floor(self) -> int:
        """Bytes that no implementation can do without: inputs, and gradients (the head's in fp32).

        `kl_and_grads` writes d_hidden over hidden.
        """
        width = jnp.dtype(self.dtype).itemsize
        rows = (
            self.tokens * self.hidden * width * (1 if self.implementation == "kl_and_grads" else 2)
        )
        targets = self.tokens * (self.top_k * 8 + 13)
        return rows + self.vocab * self.hidden * (width + 4) + targets

    @property
    def expected(self) -> int:
        """About the bytes it will need, to run the leanest first: the floor and its logits."""
        chunk = 6 * min(self.chunk_size, self.tokens)
        held = {"dense": 8 * self.tokens, "forward_chunked": 4 * self.tokens + chunk}
        return self.floor + self.vocab * held.get(self.implementation, chunk)


def function_of(case: Case) -> Any:
    """The jitted function of a row: inputs → loss and both gradients."""
    if case.implementation == "kl_and_grads":
        core = partial(losses.kl_and_grads, chunk_size=case.chunk_size)
        return jax.jit(lambda *inputs: core(*inputs), donate_argnums=0)
    loss = losses.IMPLEMENTATIONS[case.implementation]

    def mean(hidden: jax.Array, lm_head: jax.Array, *targets: jax.Array) -> jax.Array:
        sums = loss(hidden, lm_head, *targets, chunk_size=case.chunk_size)
        return sums.loss / jnp.maximum(sums.count, 1.0)

    return jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))


def shapes_of(case: Case, sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
    """hidden, lm_head, labels, mask and the teacher's arrays, as the store gives them."""
    rows, k, dtype = (1, case.tokens), case.top_k, jnp.dtype(case.dtype)
    layout = [
        ((*rows, case.hidden), dtype),
        ((case.vocab, case.hidden), dtype),
        (rows, jnp.int32),
        (rows, jnp.bool_),
        ((*rows, k), jnp.int32),
        ((*rows, k), jnp.float32),
        (rows, jnp.float32),
        (rows, jnp.int32),
    ]
    return [jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for shape, kind in layout]


@partial(jax.jit, static_argnums=(1, 2, 3))
def normal_rows(key: jax.Array, rows: int, width: int, dtype: str) -> jax.Array:
    """[rows,width], made block by block: making it must not be what the peak is of."""
    shape = (math.gcd(rows, 1024), width)
    keys = jax.random.split(key, rows // shape[0])
    blocks = jax.lax.map(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)), keys)
    return blocks.reshape(rows, width)


def inputs_of(case: Case, seed: int = 0) -> tuple[Callable[[], jax.Array], list[jax.Array]]:
    """What makes hidden, and the other inputs: |logit| of a few, K unique ids a row, 90 % of the
    mass on the K."""
    rows, k = (1, case.tokens), case.top_k
    keys = jax.random.split(jax.random.key(seed), 4)
    stride = jnp.arange(k, dtype=jnp.int32) * (case.vocab // k)
    first = jax.random.randint(keys[2], (*rows, 1), 0, case.vocab)
    indices = (first + stride[None, None, :]) % case.vocab
    logprobs = jax.nn.log_softmax(2.0 * jax.random.normal(keys[3], (*rows, k))) + jnp.log(0.9)
    targets = [
        indices[..., 0],
        jnp.ones(rows, bool),
        indices,
        -jnp.sort(-logprobs, axis=-1),
        jnp.full(rows, jnp.log(0.1), jnp.float32),
        jnp.full(rows, k, jnp.int32),
    ]
    lm_head = normal_rows(keys[1], case.vocab, case.hidden, case.dtype)
    scale = jax.jit(lambda x: x * jnp.asarray(2.0 / case.hidden**0.5, x.dtype), donate_argnums=0)

    def hidden() -> jax.Array:
        return normal_rows(keys[0], case.tokens, case.hidden, case.dtype)[None]

    return hidden, [scale(lm_head), *targets]


def row_of(case: Case, device: str, memory: devices.Memory) -> dict[str, Any]:
    """What is known of a case without running it."""
    known = (case.hidden, case.vocab) == PAPER_SHAPE
    return {
        **case._asdict(),
        "device": device,
        "peak_gib": memory.peak / devices.GIB,
        "floor_gib": case.floor / devices.GIB,
        "paper_gib": PAPER_GIB.get((case.implementation, case.tokens)) if known else None,
        "products": PRODUCTS[case.implementation],
        "measured_gib": None,
        "seconds": None,
        "tflops": None,
    }


def plan(cases: Sequence[Case], gpu: devices.Gpu, on_row: Callable) -> list[dict[str, Any]]:
    """Each case as XLA plans it for a GPU that is not here."""
    mesh = Mesh(np.array(devices.planned_devices(gpu)), ("data",))
    here = NamedSharding(mesh, PartitionSpec())
    rows = []
    for case in cases:
        compiled = devices.compile_for_gpu(function_of(case), *shapes_of(case, here))
        row = row_of(case, f"{gpu.name}, planned", devices.memory_of(compiled))
        row["fits"] = row["peak_gib"] * devices.GIB < gpu.memory_bytes * (1 - SPARE)
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
    if device.platform == "cpu":
        slow = max(cases, key=lambda case: case.operations)
        if slow.operations > CPU_OPERATIONS:
            raise Refusal(
                f"expected at most {CPU_OPERATIONS:.0e} operations on a CPU, got "
                f"{slow.operations:.0e} ({slow.implementation}, {slow.tokens} tokens); lower "
                "--tokens, --hidden or --vocab, or use --plan h200"
            )
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for case in sorted(cases, key=lambda case: case.expected):
        if time.perf_counter() - start > seconds:
            print(f"time is up: {len(cases) - len(rows)} of {len(cases)} cases not begun")
            break
        program = function_of(case).lower(*shapes_of(case)).compile()
        row = row_of(case, device.device_kind, devices.memory_of(program))
        limit = (device.memory_stats() or {}).get("bytes_limit")
        row["fits"] = limit is None or row["peak_gib"] * devices.GIB < limit
        if row["fits"]:
            row["seconds"], row["measured_gib"] = run(case, program, device, repeats)
            row["tflops"] = case.operations / row["seconds"] / 1e12
        rows.append(row)
        on_row(row)
    return rows


def run(case: Case, program: Any, device: Any, repeats: int) -> tuple[float, float | None]:
    """Median seconds of a run, and its peak in GiB where the device tells it, inputs included.

    A GPU tells a new highest peak only; on a CPU it is what the process took beside what it held.
    """
    resident = device.platform == "cpu" and process.tells_memory()
    highest = peak_in_use(device)
    hidden, rest = inputs_of(case)
    seconds, held = [], 0
    for turn in range(repeats + 1):
        if turn == 1 and resident:  # what the first run compiled and loaded is not the loss's
            held = process.settle() - sum(x.nbytes for x in rest)
        given = jax.block_until_ready(hidden())  # kl_and_grads takes its hidden away
        start = time.perf_counter()
        jax.block_until_ready(program(given, *rest))
        seconds.append(time.perf_counter() - start)
        del given
    peak = process.peak_bytes() - held if resident else peak_in_use(device)
    told = resident or peak > highest
    return float(np.median(seconds[1:])), peak / devices.GIB if told else None


def peak_in_use(device: Any) -> int:
    """Bytes, the most since the process began; 0 where a device does not tell."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)


COLUMNS = (
    "implementation",
    "tokens",
    "C",
    "products",
    "peak GiB",
    "floor",
    "paper",
    "measured",
    "seconds",
    "TFLOP/s",
)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as they go into the README."""
    table = Table(*COLUMNS, title=f"the head alone, {rows[0]['device']}")
    for row in rows:
        table.add_row(
            row["implementation"],
            f"{row['tokens']:,}",
            "" if row["implementation"] == "dense" else f"{row['chunk_size']:,}",
            str(row["products"]),
            f"{row['peak_gib']:.2f}" + ("" if row["fits"] else " (does not fit)"),
            f"{row['floor_gib']:.2f}",
            *[
                "" if row[key] is None else f"{row[key]:{form}}"
                for key, form in (
                    ("paper_gib", ".2f"),
                    ("measured_gib", ".2f"),
                    ("seconds", ".4f"),
                    ("tflops", ".3g"),
                )
            ],
        )
    Console(width=120).print(table)


def numbers(text: str) -> list[int]:
    """`8192,32768` → [8192, 32768].

    Raises:
        Refusal: something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise Refusal(f"expected positive numbers with commas between, got {text!r}")
    return [int(part) for part in parts]


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    """The command line and the cases it asks for."""
    parser = CommandLine("jax_distill.bench head")
    parser.add_argument("--tokens", default="32768,262144", help="T, several with commas")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--chunk_size", default="1024", help="C, several with commas")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementation", default=",".join(PRODUCTS), help="several with commas")
    parser.add_argument("--plan", metavar="GPU", help=f"one of {', '.join(devices.GPUS)}")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, the median counts")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--plot", type=Path, help=f"draw it here ({', '.join(FIGURES)})")
    options = parser.parse_args(argv)
    names = options.implementation.split(",")
    if unknown := sorted(set(names) - set(PRODUCTS)):
        raise Refusal(f"expected --implementation of {', '.join(PRODUCTS)}, got {unknown[0]!r}")
    if options.top_k > options.vocab:
        raise Refusal(f"expected --top_k at most --vocab {options.vocab}, got {options.top_k}")
    shape = (options.hidden, options.vocab, options.top_k)
    cases = [
        Case(name, tokens, *shape, chunk_size, options.dtype)
        for tokens in numbers(options.tokens)
        for name in names
        for chunk_size in numbers(options.chunk_size)
    ]
    check_new_file(options.json, "--json")
    check_new_file(options.plot, "--plot", FIGURES)
    return options, list(dict.fromkeys(cases))


def main(argv: Sequence[str]) -> int:
    """Measure or plan, print the table, write what was asked for."""
    options, cases = read_options(argv)

    def tell(row: dict[str, Any]) -> None:
        print(f"{row['implementation']} {row['tokens']}: {row['peak_gib']:.3f} GiB", flush=True)

    if options.plan:
        rows = plan(cases, devices.find_gpu(options.plan), tell)
    else:
        rows = measure(cases, options.repeats, tell)
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        limit = devices.find_gpu(options.plan).memory_bytes / devices.GIB if options.plan else None
        draw(rows, PAPER_GIB, options.plot, limit_gib=limit)
    return 0
