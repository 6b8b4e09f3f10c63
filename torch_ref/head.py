"""The head alone in PyTorch: time and peak memory of torch_ref's losses, as `bench head` has ours.

`python -m torch_ref.head --tokens 8192,32768 --chunk_size 1024 …`; CUDA where there is one.
Letters: T tokens (B = 1), D hidden_size, V vocab_size, K top_k, C chunk_size.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_distill.base import process
from jax_distill.base.command import (
    CommandLine,
    above_zero,
    positive_numbers,
    run_command,
)
from jax_distill.base.errors import UserError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.batch import Batch
from jax_distill.objective import IMPLEMENTATIONS, Execution, Objective
from jax_distill.synthetic import random_targets
from torch_ref import losses

GIB = 2**30


def inputs_of(
    options: argparse.Namespace, tokens: int, device: str
) -> tuple[Tensor, Tensor, Batch]:
    """hidden [1,T,D] and weight [V,D], drawn on the device: logits of deviation 2; the batch."""
    generator = torch.Generator(device).manual_seed(0)
    kind: Any = {"generator": generator, "device": device, "dtype": getattr(torch, options.dtype)}
    hidden = torch.randn(1, tokens, options.hidden_size, **kind).requires_grad_()
    weight = torch.randn(options.vocab_size, options.hidden_size, **kind)
    weight = (weight * (2.0 / options.hidden_size**0.5)).requires_grad_()
    made = random_targets(1, tokens, vocab_size=options.vocab_size, top_k=options.top_k)
    batch = Batch(made.labels, made.mask, made.targets)
    return hidden, weight, batch.map(lambda x: torch.from_numpy(np.array(x)).to(device))


def run(
    execution: Execution, options: argparse.Namespace, tokens: int, device: str
) -> tuple[float | None, float | None]:
    """Median seconds of forward and backward, and their peak in GiB, inputs included.

    None for both: out of memory. On a CPU the peak is what the process took beside what it held.
    """
    cuda = device == "cuda"
    try:
        if cuda:
            torch.cuda.empty_cache()
        hidden, weight, batch = inputs_of(options, tokens, device)
        held = [hidden, weight]
        batch.map(held.append)
        if cuda:  # what making them took is not the loss's
            torch.cuda.reset_peak_memory_stats()

        def step(_: None) -> None:
            sums = losses.loss(hidden, losses.Head(weight), batch, Objective(), execution)
            torch.autograd.grad(sums.loss / sums.count, (hidden, weight))
            if cuda:
                torch.cuda.synchronize()

        bytes_held = sum(x.nbytes for x in held)
        _, measured = process.measure(step, options.repeats, input_bytes=bytes_held)
    except torch.OutOfMemoryError:
        return None, None
    peak = torch.cuda.max_memory_allocated() if cuda else measured.peak_bytes
    return float(np.median(measured.seconds)), None if peak is None else peak / GIB


def cases_of(options: argparse.Namespace) -> list[tuple[int, Execution]]:
    """(tokens, how); `dense` has no chunks."""
    return [
        (tokens, Execution(implementation, chunk_size))
        for tokens in options.tokens
        for implementation in options.implementation.split(",")
        for chunk_size in options.chunk_size[: 1 if implementation == "dense" else None]
    ]


def measure(options: argparse.Namespace, on_row: Callable[[dict[str, Any]], None]) -> None:
    """One row a case; seconds null where memory ran out. After options.seconds none is begun."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    cases, start = cases_of(options), time.perf_counter()
    for done, (tokens, execution) in enumerate(cases):
        if time.perf_counter() - start > options.seconds:
            print(f"time is up: {len(cases) - done} of {len(cases)} cases not begun")
            break
        seconds, peak = run(execution, options, tokens, device)
        row = {
            "implementation": f"torch_ref {execution.implementation}",
            "tokens": tokens,
            **{key: getattr(options, key) for key in ("hidden_size", "vocab_size", "top_k")},
            "chunk_size": execution.chunk_size,
            "dtype": options.dtype,
            "device": name,
            "measured_gib": peak,
            "seconds": seconds,
        }
        on_row(row)


def main(argv: Sequence[str]) -> int:
    """Measure, print and write the rows."""
    parser = CommandLine("torch_ref.head")
    several: Any = {"type": positive_numbers, "help": "several with commas"}
    parser.add_argument("--tokens", default="8192,32768", **several)
    parser.add_argument("--hidden_size", type=above_zero, default=4096)
    parser.add_argument("--vocab_size", type=above_zero, default=131072)
    parser.add_argument("--top_k", type=above_zero, default=100)
    parser.add_argument("--chunk_size", default="1024", **several)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementation", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--repeats", type=above_zero, default=3)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin none after these"
    )
    parser.add_argument("--json", type=Path, help="write the rows here, as they come")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.implementation.split(",")) - set(IMPLEMENTATIONS)):
        raise UserError(
            f"expected --implementation of {', '.join(IMPLEMENTATIONS)}, got {unknown[0]}"
        )
    check_new_file(options.json, "--json")
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
        if options.json:
            write_json(options.json, rows)

    measure(options, keep)
    return 0


if __name__ == "__main__":
    run_command(main)
