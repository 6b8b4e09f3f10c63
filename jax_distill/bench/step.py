"""`bench step`: whole optimizer steps of a configuration, one loss implementation after the other.

The step that training compiles, on the device that is here: random weights of the student's
architecture, a batch of random rows as a store gives them. Each setup has a process of its own, so
that a peak is its own. Beside the measured peak stands XLA's plan of the very program that ran.

    python -m jax_distill.bench step --config configs/llama31_8b_to_3b_8k.yaml \
        --setups dense,forward_chunked,fused_chunked,fused --steps 5

Measured peak: on a GPU the allocator's highest mark, of one device; on a CPU the resident memory
above what the process held beside state and batch when the steps began, of all devices together.
The plan is of one device. A CPU's matrix products allocate for themselves beside it: the quickstart
takes 82, 162 and 411 MB with 2, 8 and 32 rows where 34, 77 and 249 are planned.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_distill import devices, losses
from jax_distill.bench import process
from jax_distill.config import CommandLine, Config, Failure, Refusal, check_new_file, load
from jax_distill.model import ModelConfig
from jax_distill.plan.program import Program, make_program, student_columns
from jax_distill.plan.target import Target, ask_for_cpus, find_target
from jax_distill.rounding import key_of, random_bits
from jax_distill.step import TrainState

CPU_OPERATIONS = 2e13
"""More than this a step on a CPU is minutes to hours: refused."""


class Paper(NamedTuple):
    """One row of arXiv 2608.03796: a 3.2B Llama at 8K on one H200."""

    gb: float
    seconds: float
    tflops: float


PAPER = {
    "dense": Paper(78.3, 18.5, 331.0),
    "forward_chunked": Paper(61.8, 18.4, 335.0),
    "fused_chunked": Paper(58.3, 20.2, 304.0),
}
PAPER_SHAPE = (28, 3072, 8192)
"""Layers and width of Llama 3.2 3B, and the sequence length."""


def state_like(shapes: TrainState, seed: int) -> TrainState:
    """A state of these placed shapes: matrices of deviation 0.02, norms 1, moments 0."""

    def weight(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)

        def draw() -> jax.Array:
            if "norm" in name:
                return jnp.ones(leaf.shape, leaf.dtype)
            bits = random_bits(key_of(seed, 0, name, "weight"), leaf.shape)
            uniform = bits.astype(jnp.float32) * 2.0**-32 - 0.5
            return (0.02 * 12**0.5 * uniform).astype(leaf.dtype)

        return jax.jit(draw, out_shardings=leaf.sharding)()

    def zero(leaf: Any) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    params = jax.tree_util.tree_map_with_path(weight, shapes.params)
    return TrainState(params, jax.tree.map(zero, shapes.opt_state), zero(shapes.step))


def batch_like(
    shapes: dict[str, jax.ShapeDtypeStruct], *, vocab_size: int, seed: int
) -> dict[str, jax.Array]:
    """A batch [A,B,T] of these placed shapes: one document a row, every position valid, K unique
    ids at each with 90 % of the probability."""
    rng = np.random.default_rng(seed)
    grid = shapes["tokens"].shape
    tokens = rng.integers(0, vocab_size, grid, dtype=np.int32)
    values: dict[str, np.ndarray] = {
        "tokens": tokens,
        "labels": np.roll(tokens, -1, axis=-1),
        "segment_ids": np.ones(grid, np.int32),
        "positions": np.broadcast_to(np.arange(grid[-1], dtype=np.int32), grid),
        "mask": np.ones(grid, bool),
    }
    if "teacher_indices" in shapes:
        top_k = shapes["teacher_indices"].shape[-1]
        spread = np.arange(top_k, dtype=np.int32) * (vocab_size // top_k)
        first = rng.integers(0, vocab_size, (*grid, 1), dtype=np.int32)
        falling = -0.1 * np.arange(top_k, dtype=np.float32)
        logprobs = falling - np.log(np.exp(falling).sum()) + np.log(0.9)
        values["teacher_indices"] = (first + spread) % vocab_size
        values["teacher_logprobs"] = np.broadcast_to(logprobs, (*grid, top_k)).astype(np.float32)
        values["teacher_log_tail"] = np.full(grid, np.log(0.1), np.float32)
        values["teacher_count"] = np.full(grid, top_k, np.int32)
    return {name: jax.device_put(values[name], shape.sharding) for name, shape in shapes.items()}


def paper_of(setup: str, model: ModelConfig, sequence_length: int) -> Paper | None:
    """The paper's row, where it has one for this model and length."""
    shape = (model.num_hidden_layers, model.hidden_size, sequence_length)
    return PAPER.get(setup) if shape == PAPER_SHAPE else None


def local_target(count: int) -> Target:
    """The devices that are here. To be called before JAX first looks for them."""
    ask_for_cpus(count)
    platform = jax.local_devices()[0].platform
    return find_target("cpu" if platform == "cpu" else "local", count)


def measure(config: Config, *, steps: int, count: int) -> dict[str, Any]:
    """The row of one setup, run in this process.

    Raises:
        Refusal: too much work for a CPU. Failure: it does not fit, or the loss is not finite.
    """
    target = local_target(count)
    program = make_program(config, target, "train")
    if not target.on_gpu and program.flops > CPU_OPERATIONS:
        raise Refusal(
            f"expected at most {CPU_OPERATIONS:.0e} operations a step on a CPU, got "
            f"{program.flops:.0e}; lower data.sequence_length or train.batch_size, or plan it: "
            "python -m jax_distill.plan"
        )
    compiled = devices.compile_ahead(program.jitted, *program.arguments, planned=False)
    planned = devices.memory_of(compiled).peak
    if target.on_gpu and planned > target.pool_bytes:
        raise Failure(
            f"expected at most {target.pool_bytes / 1e9:.1f} GB, which this process may take of "
            f"{target.name}, got a plan of {planned / 1e9:.1f} GB; see python -m jax_distill.plan"
        )
    columns = student_columns(config, program.model)
    seconds, peak, loss = run_steps(
        program, compiled, target, steps=steps, seed=config.seed, vocab_size=columns
    )
    paper = paper_of(config.loss.implementation, program.model, config.data.sequence_length)
    return {
        "setup": config.loss.implementation,
        "device": target.name,
        "devices": count,
        "sequence_length": config.data.sequence_length,
        "batch_size": config.train.batch_size,
        "micro_batch_size": config.train.micro_batch_size or config.train.batch_size,
        "optimizer": dataclasses.asdict(config.optimizer),
        "train": dataclasses.asdict(config.train),
        "seconds": seconds,
        "tokens_per_second": program.tokens / seconds,
        "tflops": program.flops / seconds / 1e12,
        "peak_bytes": peak,
        "planned_bytes": planned,
        "loss": loss,
        "paper": paper and paper._asdict(),
    }


def run_steps(
    program: Program, compiled: Any, target: Target, *, steps: int, seed: int, vocab_size: int
) -> tuple[float, int | None, float]:
    """Median seconds of `steps` steps after one, the peak in bytes, the last loss."""
    shapes, batch_shapes = program.arguments
    state = state_like(shapes, seed)
    batch = batch_like(batch_shapes, vocab_size=vocab_size, seed=seed)
    on_cpu, before = not target.on_gpu, 0
    if on_cpu and process.tells_memory():
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, batch)))
        before = process.settle() - held
    times, metrics = [], {}
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        times.append(time.perf_counter() - start)
    loss = float(metrics["loss"])
    if not np.isfinite(loss):
        raise Failure(f"expected a finite loss of random weights, got {loss}")
    peak: int | None = None
    if on_cpu and process.tells_memory():
        peak = process.peak_bytes() - before
    elif target.on_gpu:
        peak = (target.devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    return float(np.median(times[1:])), peak, loss


def run_setup(setup: str, options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """The row of one setup, from a process of its own; {"setup", "failed"} where it died."""
    with tempfile.TemporaryDirectory() as folder:
        rows_at = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "jax_distill.bench", "step", "--in_process"]
        command += ["--setups", setup, "--steps", str(options.steps), "--json", str(rows_at)]
        command += ["--devices", str(options.devices), *rest]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        if done.returncode == 2:
            raise Refusal(lines[-1].removeprefix("error: "))
        if done.returncode:
            return {"setup": setup, "failed": lines[-1].removeprefix("failed: ")}
        rows: list[dict[str, Any]] = json.loads(rows_at.read_text(encoding="utf-8"))
        return rows[0]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as they go into the README. GB are 1e9 bytes."""
    ran = [row for row in rows if "failed" not in row]
    if ran:
        title = f"{ran[0]['batch_size']} × {ran[0]['sequence_length']} tokens a step"
        names = "setup|s/step|tokens/s|TFLOP/s|peak GB|planned GB|paper: GB|s/step|TFLOP/s"
        table = Table(*names.split("|"), title=f"{title}, {ran[0]['device']}")
        for row in ran:
            measured = row["peak_bytes"]
            paper = row["paper"]
            table.add_row(
                row["setup"],
                f"{row['seconds']:.3g}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tflops']:.3g}",
                "" if measured is None else f"{measured / 1e9:.4g}",
                f"{row['planned_bytes'] / 1e9:.4g}",
                *(["", "", ""] if paper is None else [f"{value:g}" for value in paper.values()]),
            )
        Console(width=120).print(table)
    for row in rows:
        if "failed" in row:
            print(f"{row['setup']}: {row['failed']}", flush=True)


def read_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Our own options, the setups, and what is left for the configuration."""
    parser = CommandLine(
        "jax_distill.bench step",
        epilog="every other --key value is the configuration's, as for jax_distill.train",
    )
    names = ",".join(losses.IMPLEMENTATIONS)
    parser.add_argument("--setups", default=names, help="loss implementations, with commas")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, the median counts")
    parser.add_argument("--devices", type=int, default=1, help="how many of those here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--in_process", action="store_true", help="measure in this process")
    options, rest = parser.parse_known_args(argv)
    setups = options.setups.split(",")
    for setup in setups:
        if setup == "online":
            raise Refusal(
                f"expected --setups of {names}, got online; training beside a live teacher is not "
                "there yet, leave it out"
            )
        if setup not in losses.IMPLEMENTATIONS:
            raise Refusal(f"expected --setups of {names}, got {setup!r}; correct it")
    if options.steps < 1:
        raise Refusal(f"expected --steps of 1 at least, got {options.steps}")
    if options.in_process and len(setups) > 1:
        raise Refusal(f"expected one setup with --in_process, got {options.setups}; name one")
    check_new_file(options.json, "--json")
    return options, setups, rest


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, write what was asked for; 1 where a setup failed."""
    options, setups, rest = read_options(argv)
    config = load(rest, "jax_distill.bench step")
    if options.in_process:
        chosen: Any = setups[0]
        loss = dataclasses.replace(config.loss, implementation=chosen)
        config = dataclasses.replace(config, loss=loss)
        rows = [measure(config, steps=options.steps, count=options.devices)]
    else:
        rows = [run_setup(setup, options, rest) for setup in setups]
        print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in row for row in rows))
