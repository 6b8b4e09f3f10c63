"""`bench step`: whole optimizer steps of a configuration, one loss implementation after the other.

The step that training compiles, on the device that is here: random weights of the student's
architecture, a batch of random rows as a cache gives them. Each setup has a process of its own, so
that a peak is its own. Beside the measured peak stands XLA's plan of the very program that ran.

    python -m jax_distill.bench step --config configs/llama31_8b_to_3b_8k.yaml \
        --setups online,dense,forward_chunked,fused_chunked,fused --steps 5

Measured peak: on a GPU the allocator's highest mark, of one device; on a CPU the resident memory
above what the process held beside state and batch when the steps began, of all devices together.
The plan is of one device. A CPU's matmuls allocate for themselves beside it: the quickstart takes
82, 162 and 411 MB with 2, 8 and 32 rows where 34, 77 and 249 are planned.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_distill import devices, sharding, student
from jax_distill.base import process
from jax_distill.base.command import CommandLine, above_zero
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.batch import Batch
from jax_distill.bench import CPU_FLOPS
from jax_distill.config import Config, load
from jax_distill.hf.locate import find_architecture
from jax_distill.model import ModelConfig
from jax_distill.objective import IMPLEMENTATIONS
from jax_distill.synthetic import random_targets
from jax_distill.training.program import TrainProgram, train_program
from jax_distill.training.state import TrainState


class Paper(NamedTuple):
    """One row of arXiv 2608.03796: a 3.2B Llama at 8K on one H200."""

    gb: float
    seconds: float
    tflops: float


ONLINE = {
    "online": ("online", "dense"),
    "online_fused": ("online", "fused"),
    "online_top_k": ("online_top_k", "fused"),
}
"""Setups beside a live teacher: teacher.mode and loss.implementation. The others are
implementations, with the teacher as configured."""
SETUPS = (*IMPLEMENTATIONS, *ONLINE)
PAPER = {
    "online": Paper(102.8, 25.9, 237.0),
    "dense": Paper(78.3, 18.5, 331.0),
    "forward_chunked": Paper(61.8, 18.4, 335.0),
    "fused_chunked": Paper(58.3, 20.2, 304.0),
}
PAPER_SHAPE = (28, 3072, 8192)
"""Layers and width of Llama 3.2 3B, and the sequence length."""


def random_weights(shapes: Any, seed: int) -> Any:
    """Parameters of these shapes, under their shardings: matrices of deviation 0.02, norms 1."""

    def weight(path: tuple, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding)
        draw = jax.jit(
            lambda key: 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype),
            out_shardings=leaf.sharding,
        )
        return draw(key)

    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.tree.unflatten(tree, list(jax.random.split(jax.random.key(seed), len(leaves))))
    return jax.tree_util.tree_map_with_path(weight, shapes, keys)


def random_state(shapes: TrainState, seed: int) -> TrainState:
    """Of these shapes, under their shardings: random weights, moments 0."""

    def zero(leaf: Any) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    params = random_weights(shapes.params, seed)
    return TrainState(params, jax.tree.map(zero, shapes.opt_state), zero(shapes.step))


def random_batch(shapes: Batch, *, vocab_size: int, seed: int) -> Batch:
    """Random rows of these shapes [A,B,T], under their shardings."""
    micros, rows, length = shapes.labels.shape
    top_k = shapes.targets.top_k if shapes.targets else 1
    made = random_targets(micros * rows, length, vocab_size=vocab_size, top_k=top_k, seed=seed)
    targets = None
    if made.targets and shapes.targets:
        temperature = shapes.targets.temperature
        targets = dataclasses.replace(made.targets, temperature=temperature)
    batch = dataclasses.replace(made, targets=targets).micro_batches(rows)
    if shapes.teacher_layers is not None:
        drawn = np.random.default_rng(seed).normal(size=shapes.teacher_layers.shape)
        states = drawn.astype(shapes.teacher_layers.dtype)
        batch = dataclasses.replace(batch, teacher_layers=states)
    return batch.map(lambda x: jax.device_put(x, shapes.labels.sharding))


def paper_of(setup: str, model: ModelConfig, sequence_length: int) -> Paper | None:
    """The paper's row, where it has one for this model and length."""
    shape = (model.num_hidden_layers, model.hidden_size, sequence_length)
    return PAPER.get(setup) if shape == PAPER_SHAPE else None


def options_of(setup: str) -> list[str]:
    """What a setup adds to the command line."""
    mode, implementation = ONLINE.get(setup, (None, setup))
    return [f"--loss.implementation={implementation}"] + (
        [f"--teacher.mode={mode}"] if mode else []
    )


def measure(config: Config, setup: str, *, steps: int, count: int) -> dict[str, Any]:
    """The row of one setup, as `config` has it, run in this process on the first `count` devices.

    Raises:
        UserError: too much work for a CPU. RunError: it does not fit, or the loss is not finite.
    """
    here = devices.local_devices(count)
    mesh = sharding.make_mesh(**config.mesh.axes, devices=here)
    architecture = student.planned_architecture(config)
    teacher = None
    if config.teacher.is_live or config.loss.hidden_weight:
        teacher = find_architecture(config.teacher.path, "teacher.path")
    program = train_program(config, *architecture, mesh, teacher=teacher)
    if here[0].platform == "cpu" and program.flops > CPU_FLOPS:
        raise UserError(
            f"expected at most {CPU_FLOPS:.0e} FLOPs a step on a CPU, got {program.flops:.0e}; "
            "lower data.sequence_length or train.batch_size, or plan it: "
            "python -m jax_distill.plan"
        )
    shapes = (program.state, program.batch, program.teacher)
    compiled = devices.compile_ahead(program.step, *shapes, planned=False)
    planned = devices.memory_of(compiled).peak
    limit = (here[0].memory_stats() or {}).get("bytes_limit", planned)
    if planned > limit:
        raise RunError(
            f"expected at most {limit / 1e9:.1f} GB, which this process may take of "
            f"{here[0].device_kind}, got a plan of {planned / 1e9:.1f} GB; "
            "see python -m jax_distill.plan"
        )
    vocab_size = architecture.vocab_size
    seconds, peak, loss = run_steps(
        program, compiled, here[0], steps=steps, seed=config.seed, vocab_size=vocab_size
    )
    length = config.data.sequence_length
    paper = paper_of(setup, architecture.model, length)
    return {
        "setup": setup,
        "device": "CPU" if here[0].platform == "cpu" else here[0].device_kind,
        "devices": count,
        "sequence_length": length,
        "batch_size": config.train.batch_size,
        "micro_batch_size": config.train.rows_per_micro_batch,
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
    program: TrainProgram, compiled: Any, device: Any, *, steps: int, seed: int, vocab_size: int
) -> tuple[float, int | None, float]:
    """Median seconds of `steps` steps after one, the peak in bytes, the last loss."""
    state = random_state(program.state, seed)
    batch = random_batch(program.batch, vocab_size=vocab_size, seed=seed)
    teacher = random_weights(program.teacher, seed + 1)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, batch, teacher)))

    def step(_: None) -> jax.Array:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, batch, teacher))
        return metrics["loss"]

    last, measured = process.measure(step, steps, input_bytes=held)
    loss = float(last)
    if not np.isfinite(loss):
        raise RunError(f"expected a finite loss of random weights, got {loss}")
    peak = measured.peak_bytes
    if device.platform != "cpu":
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return float(np.median(measured.seconds)), peak, loss


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
            raise UserError(lines[-1].removeprefix("error: "))
        if done.returncode:
            return {"setup": setup, "failed": lines[-1].removeprefix("failed: ")}
        rows: list[dict[str, Any]] = json.loads(rows_at.read_text(encoding="utf-8"))
        return rows[0]


HEADS = "setup|s/step|tokens/s|TFLOP/s|peak GB|planned GB|paper: GB|s/step|TFLOP/s"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as they go into the README. GB are 1e9 bytes."""
    ran = [row for row in rows if "failed" not in row]
    if ran:
        title = f"{ran[0]['batch_size']} × {ran[0]['sequence_length']} tokens a step"
        table = Table(*HEADS.split("|"), title=f"{title}, {ran[0]['device']}")
        for row in ran:
            peak, paper = row["peak_bytes"], row["paper"] or {}
            table.add_row(
                row["setup"],
                f"{row['seconds']:.3g}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tflops']:.3g}",
                "" if peak is None else f"{peak / 1e9:.4g}",
                f"{row['planned_bytes'] / 1e9:.4g}",
                *(f"{value:g}" for value in paper.values()),
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
    names = ",".join(SETUPS)
    parser.add_argument(
        "--setups", default=",".join(IMPLEMENTATIONS), help=f"of {names}, with commas"
    )
    parser.add_argument("--steps", type=above_zero, default=5, help="timed steps: their median")
    parser.add_argument("--devices", type=above_zero, default=1, help="how many of those here")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--in_process", action="store_true", help="measure in this process")
    options, rest = parser.parse_known_args(argv)
    setups = options.setups.split(",")
    if unknown := [setup for setup in setups if setup not in SETUPS]:
        raise UserError(f"expected --setups of {names}, got {unknown[0]!r}; correct it")
    if options.in_process and len(setups) > 1:
        raise UserError(f"expected one setup with --in_process, got {options.setups}; name one")
    check_new_file(options.json, "--json")
    return options, setups, rest


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, write what was asked for; 1 where a setup failed."""
    options, setups, rest = read_options(argv)
    config = load([*rest, *(options_of(setups[0]) if options.in_process else [])])
    if options.in_process:
        rows = [measure(config, setups[0], steps=options.steps, count=options.devices)]
    else:
        rows = [run_setup(setup, options, rest) for setup in setups]
        print_table(rows)
    if options.json:
        write_json(options.json, rows)
    return int(any("failed" in row for row in rows))
