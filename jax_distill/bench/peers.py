"""`bench peers`: our losses beside other people's, same inputs, on a CPU, each in its own process.

Agreement is against float64: value and both gradients of the bucket over the K+1 outcomes, or of
the KL over all of V for a peer that computes that. Peak memory is what the process held beyond its
inputs (resident set). Time is the fastest call, beside the processor time of all its threads, which
says the same where other programs share the cores. Peers that are not installed are named and left
out: `pip install trl && pip install --no-deps liger-kernel` (whose kernels want a triton that its
pure-torch losses do without).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jax_distill.config import CommandLine, Failure, check_new_file


class Peer(NamedTuple):
    """A contestant: the process that runs it, what it computes, its T·D·V products."""

    label: str
    module: str
    name: str
    computes: str
    products: int


JAX, TORCH = "jax_distill.bench.contestants", "torch_ref.peers"
PEERS = (
    Peer("jax_distill dense", JAX, "dense", "bucket", 3),
    Peer("jax_distill forward_chunked", JAX, "forward_chunked", "bucket", 3),
    Peer("jax_distill fused_chunked", JAX, "fused_chunked", "bucket", 4),
    Peer("jax_distill fused", JAX, "fused", "bucket", 3),
    Peer("torch, log_softmax of everything", TORCH, "torch", "bucket", 3),
    Peer("torch_ref dense", TORCH, "dense", "bucket", 3),
    Peer("torch_ref forward_chunked", TORCH, "forward_chunked", "bucket", 3),
    Peer("torch_ref fused_chunked", TORCH, "fused_chunked", "bucket", 4),
    Peer("torch_ref fused", TORCH, "fused", "bucket", 3),
    Peer("liger-kernel, chunked pure torch", TORCH, "liger", "full KL", 4),
    Peer("TRL, chunked sparse", TORCH, "trl", "bucket", 4),
)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def make_inputs(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """fp32 arrays: a student [T,D], [V,D] and a teacher of the same shape, its top K."""
    rng = np.random.default_rng(0)
    tokens, width, vocab = options.tokens, options.hidden, options.vocab

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    teacher_hidden = normal(tokens, width, scale=3.0)
    teacher_head = normal(vocab, width, scale=width**-0.5)
    log_p = log_softmax(teacher_hidden.astype(np.float64) @ teacher_head.T)
    ids = np.argsort(-log_p, axis=-1)[:, : options.top_k]
    chosen = np.take_along_axis(log_p, ids, axis=-1)
    return {
        "hidden": teacher_hidden + normal(tokens, width),
        "lm_head": teacher_head + normal(vocab, width, scale=0.3 * width**-0.5),
        "labels": rng.integers(0, vocab, tokens).astype(np.int32),
        "teacher_indices": ids.astype(np.int32),
        "teacher_logprobs": chosen.astype(np.float32),
        "teacher_log_tail": np.log1p(-np.exp(chosen).sum(axis=-1)).astype(np.float32),
        "teacher_hidden": teacher_hidden,
        "teacher_head": teacher_head,
        "chunk_size": np.array(options.chunk_size),
    }


def float64_answer(inputs: dict[str, np.ndarray], computes: str) -> dict[str, Any]:
    """Loss and gradients of the sum, from the formula."""
    hidden, lm_head = (inputs[name].astype(np.float64) for name in ("hidden", "lm_head"))
    log_q = log_softmax(hidden @ lm_head.T)
    q = np.exp(log_q)
    if computes == "full KL":
        z = inputs["teacher_hidden"].astype(np.float64) @ inputs["teacher_head"].T
        log_p = log_softmax(z)
        loss, d_z = np.sum(np.exp(log_p) * (log_p - log_q)), q - np.exp(log_p)
    else:
        ids = inputs["teacher_indices"]
        log_p = inputs["teacher_logprobs"].astype(np.float64)
        log_tail = inputs["teacher_log_tail"].astype(np.float64)
        p, p_tail = np.exp(log_p), np.exp(log_tail)
        total = p.sum(axis=-1) + p_tail
        chosen = np.take_along_axis(log_q, ids, axis=-1)
        rest = q.copy()
        np.put_along_axis(rest, ids, 0.0, axis=-1)
        q_tail = rest.sum(axis=-1)
        loss = np.sum(p * (log_p - chosen)) + np.sum(p_tail * (log_tail - np.log(q_tail)))
        d_z = rest * (total - p_tail / q_tail)[:, None]
        np.put_along_axis(d_z, ids, np.exp(chosen) * total[:, None] - p, axis=-1)
    return {"loss": loss, "d_hidden": d_z @ lm_head, "d_lm_head": d_z.T @ hidden}


def contest(
    peer: Peer, inputs: Path, answer: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """One peer's row; its numbers are null where it is not installed.

    Raises:
        Failure: it is installed and broke.
    """
    output = inputs.with_name("output.npz")
    command = [sys.executable, "-m", peer.module, peer.name, inputs, output, options.repeats]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    missing = done.stderr.strip() if done.returncode == 3 else None
    row: dict[str, Any] = {**peer._asdict(), "missing": missing}
    errors = ("value_error", "d_hidden_error", "d_lm_head_error")
    keys = (*errors, "seconds", "cpu_seconds", "peak_mib")
    if missing:
        return row | dict.fromkeys(keys)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise Failure(f"expected {peer.label} to run, got {' '.join(last)}")
    got = np.load(output)
    row["value_error"] = abs(float(got["loss"]) / float(answer["loss"]) - 1.0)
    for name in ("d_hidden", "d_lm_head"):
        wanted = answer[name]
        error = np.linalg.norm(got[name] - wanted) / np.linalg.norm(wanted)
        row[f"{name}_error"] = float(error)
    times = {name: float(got[name]) for name in ("seconds", "cpu_seconds")}
    return row | times | {"peak_mib": float(got["peak_bytes"]) / 2**20}


def print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    """The rows as they go into the README."""
    table = Table(
        "loss",
        "computes",
        "products",
        "value error",
        "d_hidden error",
        "d_lm_head error",
        "seconds",
        "CPU s",
        "peak MiB",
        title=title,
    )
    for row in rows:
        if row["missing"]:
            table.add_row(row["label"], row["computes"], str(row["products"]), row["missing"])
            continue
        errors = (f"{row[k]:.1e}" for k in ("value_error", "d_hidden_error", "d_lm_head_error"))
        cost = (f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}", f"{row['peak_mib']:.0f}")
        table.add_row(row["label"], row["computes"], str(row["products"]), *errors, *cost)
    Console(width=140).print(table)


def main(argv: Sequence[str]) -> int:
    """Make the inputs, run every peer on them, print the table."""
    parser = CommandLine("jax_distill.bench peers")
    for name, default in (("tokens", 1024), ("hidden", 256), ("vocab", 32768), ("top_k", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunk_size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    inputs = make_inputs(options)
    answers = {kind: float64_answer(inputs, kind) for kind in {peer.computes for peer in PEERS}}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.npz"
        np.savez(path, **inputs)  # type: ignore[arg-type]
        for peer in PEERS:
            rows.append(contest(peer, path, answers[peer.computes], options))
            print(f"{peer.label}: {rows[-1]['seconds']}", flush=True)
    print_table(
        rows,
        f"T={options.tokens} D={options.hidden} V={options.vocab} "
        f"K={options.top_k} C={options.chunk_size}, fp32, CPU",
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0
