"""`bench peers`: our losses beside other people's, same inputs, on a CPU, each in its own process.

Agreement is against float64: value and both gradients of the bucket over the K+1 outcomes, or of
the KL over all of V for a loss that computes that. Peak memory is what the process held beyond its
inputs (resident set). Time is the fastest call, beside the processor time of all its threads, which
says the same where other programs share the cores. Losses that are not installed are named and left
out: `pip install trl && pip install --no-deps liger-kernel` (whose kernels want a triton that its
pure-torch losses do without).
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jax_distill.base.command import CommandLine, above_zero
from jax_distill.base.errors import RunError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.bench import MATMULS
from jax_distill.objective import IMPLEMENTATIONS
from jax_distill.synthetic import LossInputs, loss_inputs


class Peer(NamedTuple):
    """A loss: the process that runs it, what it computes, its matmuls of T·D·V."""

    label: str
    module: str
    name: str
    computes: str
    matmuls: int


JAX, TORCH = "jax_distill.bench.peer", "torch_ref.peers"
PEERS = (
    *(Peer(f"jax_distill {name}", JAX, name, "bucket", MATMULS[name]) for name in IMPLEMENTATIONS),
    Peer("torch, log_softmax of everything", TORCH, "torch", "bucket", 3),
    *(Peer(f"torch_ref {name}", TORCH, name, "bucket", MATMULS[name]) for name in IMPLEMENTATIONS),
    Peer("liger-kernel, chunked pure torch", TORCH, "liger", "full KL", 4),
    Peer("TRL, chunked sparse", TORCH, "trl", "bucket", 4),
)
ERRORS = ("value_error", "d_hidden_error", "d_weight_error")


def write_inputs(path: Path, inputs: LossInputs, *, chunk_size: int) -> None:
    """The arrays that every process loads, by name; all with B = 1."""
    targets = inputs.batch.targets
    assert targets is not None  # loss_inputs makes them
    arrays: dict[str, Any] = {
        "hidden": inputs.hidden,
        "weight": inputs.weight,
        "labels": inputs.batch.labels,
        "indices": targets.indices,
        "logprobs": targets.logprobs,
        "log_tail": targets.log_tail,
        "teacher_hidden": inputs.teacher_hidden,
        "teacher_weight": inputs.teacher_weight,
        "chunk_size": np.array(chunk_size),
    }
    np.savez(path, **arrays)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def float64_answer(inputs: LossInputs, computes: str = "bucket") -> dict[str, Any]:
    """Loss and gradients of the sum over all positions, from the formula."""
    hidden, weight = inputs.hidden.astype(np.float64), inputs.weight.astype(np.float64)
    log_q = log_softmax(hidden @ weight.T)
    q = np.exp(log_q)
    if computes == "full KL":
        log_p = log_softmax(inputs.teacher_logits)
        loss, d_z = np.sum(np.exp(log_p) * (log_p - log_q)), q - np.exp(log_p)
    else:
        targets = inputs.batch.targets
        assert targets is not None  # loss_inputs makes them
        log_p, log_tail = targets.logprobs.astype(np.float64), targets.log_tail.astype(np.float64)
        p, p_tail = np.exp(log_p), np.exp(log_tail)
        total = p.sum(axis=-1) + p_tail
        log_q_k = np.take_along_axis(log_q, targets.indices, axis=-1)
        rest = q.copy()
        np.put_along_axis(rest, targets.indices, 0.0, axis=-1)
        q_tail = rest.sum(axis=-1)
        loss = np.sum(p * (log_p - log_q_k)) + np.sum(p_tail * (log_tail - np.log(q_tail)))
        d_z = rest * (total - p_tail / q_tail)[..., None]
        np.put_along_axis(d_z, targets.indices, np.exp(log_q_k) * total[..., None] - p, axis=-1)
    return {
        "loss": loss,
        "d_hidden": d_z @ weight,
        "d_weight": d_z[0].T @ hidden[0],
    }


def errors_of(got: Any, answer: dict[str, Any]) -> dict[str, float]:
    """Relative errors of loss, d_hidden and d_weight; gradients by their norm."""
    errors = {"value_error": abs(float(got["loss"]) / float(answer["loss"]) - 1.0)}
    for name in ("d_hidden", "d_weight"):
        errors[f"{name}_error"] = norm_error(got[name], answer[name])
    return errors


def norm_error(got: Any, exact: np.ndarray) -> float:
    """|got − exact| / |exact|, Frobenius norms in float64; 0 / 0 is 0."""
    difference = np.asarray(got).astype(np.float64).reshape(exact.shape) - exact
    return float(np.linalg.norm(difference) / (np.linalg.norm(exact) or 1.0))


def run_peer(peer: Peer, inputs: Path, answer: dict[str, Any], repeats: int) -> dict[str, Any]:
    """One loss's row; its numbers are null where it is not installed.

    Raises:
        RunError: it is installed and broke.
    """
    output = inputs.with_name("output.npz")
    command = [sys.executable, "-m", peer.module, peer.name, str(inputs), str(output), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    missing = done.stderr.strip() if done.returncode == 3 else None
    row: dict[str, Any] = {**peer._asdict(), "missing": missing}
    if missing:
        return row | dict.fromkeys((*ERRORS, "seconds", "cpu_seconds", "peak_mib"))
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise RunError(f"expected {peer.label} to run, got {' '.join(last)}")
    got = np.load(output)
    times = {name: float(got[name]) for name in ("seconds", "cpu_seconds")}
    return row | errors_of(got, answer) | times | {"peak_mib": float(got["peak_bytes"]) / 2**20}


HEADS = "loss|computes|matmuls|value error|d_hidden error|d_weight error|seconds|CPU s|peak MiB"


def print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    """The rows as they go into the README."""
    table = Table(*HEADS.split("|"), title=title)
    for row in rows:
        cells = [row["missing"]]
        if not row["missing"]:
            cells = [f"{row[name]:.1e}" for name in ERRORS]
            cells += [
                f"{row['seconds']:.2f}",
                f"{row['cpu_seconds']:.2f}",
                f"{row['peak_mib']:.0f}",
            ]
        table.add_row(row["label"], row["computes"], str(row["matmuls"]), *cells)
    Console(width=140).print(table)


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandLine("jax_distill.bench peers")
    sizes = {"tokens": 1024, "hidden_size": 256, "vocab_size": 32768, "top_k": 100}
    for name, default in (sizes | {"chunk_size": 128, "repeats": 3}).items():
        parser.add_argument(f"--{name}", type=above_zero, default=default)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    return options


def main(argv: Sequence[str]) -> int:
    """Make the inputs, run every loss on them, print the table."""
    options = read_options(argv)
    inputs = loss_inputs(
        1,
        options.tokens,
        width=options.hidden_size,
        vocab_size=options.vocab_size,
        top_k=options.top_k,
    )
    answers = {kind: float64_answer(inputs, kind) for kind in {peer.computes for peer in PEERS}}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.npz"
        write_inputs(path, inputs, chunk_size=options.chunk_size)
        for peer in PEERS:
            rows.append(run_peer(peer, path, answers[peer.computes], options.repeats))
            print(f"{peer.label}: {rows[-1]['seconds']}", flush=True)
    print_table(
        rows,
        f"T={options.tokens} D={options.hidden_size} V={options.vocab_size} "
        f"K={options.top_k} C={options.chunk_size}, fp32, CPU",
    )
    if options.json:
        write_json(options.json, rows)
    return 0
