"""The head alone in PyTorch: time and peak memory of torch_ref's losses, as `bench head` has ours.

`python -m torch_ref.head --tokens 8192,32768 --chunk_size 1024 …`; CUDA where there is one.
Letters: T tokens (B = 1), D hidden, V vocabulary, K top_k, C chunk_size.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_distill.bench import process
from jax_distill.config import CommandLine, Refusal, check_new_file, run_command
from torch_ref.losses import IMPLEMENTATIONS

GIB = 2**30


def inputs_of(options: argparse.Namespace, tokens: int, device: str) -> list[Tensor]:
    """hidden [1,T,D], lm_head [V,D], labels, mask, indices, logprobs, log_tail, count."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, k = getattr(torch, options.dtype), options.top_k

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    hidden = normal(1, tokens, options.hidden, dtype=dtype).requires_grad_()
    lm_head = normal(options.vocab, options.hidden, dtype=dtype) * (2.0 / options.hidden**0.5)
    first = torch.randint(options.vocab, (1, tokens, 1), generator=generator, device=device)
    stride = torch.arange(k, device=device) * (options.vocab // k)
    indices = ((first + stride) % options.vocab).int()
    logprobs = (2.0 * normal(1, tokens, k)).log_softmax(-1) + float(np.log(0.9))
    return [
        hidden,
        lm_head.detach().requires_grad_(),
        indices[..., 0],
        torch.ones(1, tokens, dtype=torch.bool, device=device),
        indices,
        logprobs.sort(-1, descending=True).values,
        torch.full((1, tokens), float(np.log(0.1)), device=device),
        torch.full((1, tokens), k, dtype=torch.int32, device=device),
    ]


def run(
    implementation: str, options: argparse.Namespace, tokens: int, chunk_size: int, device: str
) -> tuple[float | None, float | None]:
    """Median seconds of forward and backward, and their peak in GiB, inputs included.

    None for both: out of memory. On a CPU the peak is what the process took beside what it held.
    """
    cuda, resident = device == "cuda", device == "cpu" and process.tells_memory()
    seconds, held = [], 0
    try:
        if cuda:
            torch.cuda.empty_cache()
        hidden, lm_head, *targets = inputs_of(options, tokens, device)
        if cuda:  # what making them took is not the loss's
            torch.cuda.reset_peak_memory_stats()
        for turn in range(options.repeats + 1):
            if turn == 1 and resident:
                held = process.settle() - sum(x.nbytes for x in (hidden, lm_head, *targets))
            start = time.perf_counter()
            sums = IMPLEMENTATIONS[implementation](hidden, lm_head, *targets, chunk_size=chunk_size)
            gradients = torch.autograd.grad(sums.loss / sums.count, (hidden, lm_head))
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            del sums, gradients
    except torch.OutOfMemoryError:
        return None, None
    peak = None
    if cuda:
        peak = torch.cuda.max_memory_allocated() / GIB
    elif resident:
        peak = (process.peak_bytes() - held) / GIB
    return float(np.median(seconds[1:])), peak


def cases_of(options: argparse.Namespace) -> list[tuple[int, str, int]]:
    """(tokens, implementation, C); `dense` has no chunks."""
    return [
        (tokens, implementation, chunk_size)
        for tokens in map(int, options.tokens.split(","))
        for implementation in options.implementation.split(",")
        for n, chunk_size in enumerate(map(int, options.chunk_size.split(",")))
        if n == 0 or implementation != "dense"
    ]


def measure(options: argparse.Namespace, on_row: Callable[[dict[str, Any]], None]) -> None:
    """One row a case; seconds null where memory ran out. After options.seconds none is begun."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    cases, start = cases_of(options), time.perf_counter()
    for done, (tokens, implementation, chunk_size) in enumerate(cases):
        if time.perf_counter() - start > options.seconds:
            print(f"time is up: {len(cases) - done} of {len(cases)} cases not begun")
            break
        seconds, peak = run(implementation, options, tokens, chunk_size, device)
        row = {
            "implementation": f"torch_ref {implementation}",
            "tokens": tokens,
            "hidden": options.hidden,
            "vocab": options.vocab,
            "top_k": options.top_k,
            "chunk_size": chunk_size,
            "dtype": options.dtype,
            "device": name,
            "measured_gib": peak,
            "seconds": seconds,
        }
        on_row(row)


def main(argv: Sequence[str]) -> int:
    """Measure, print and write the rows."""
    parser = CommandLine("torch_ref.head")
    parser.add_argument("--tokens", default="8192,32768", help="T, several with commas")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--top_k", type=int, default=100)
    parser.add_argument("--chunk_size", default="1024", help="C, several with commas")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementation", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin none after these"
    )
    parser.add_argument("--json", type=Path, help="write the rows here, as they come")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.implementation.split(",")) - set(IMPLEMENTATIONS)):
        raise Refusal(
            f"expected --implementation of {', '.join(IMPLEMENTATIONS)}, got {unknown[0]}"
        )
    check_new_file(options.json, "--json")
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    measure(options, keep)
    return 0


if __name__ == "__main__":
    run_command(main)
