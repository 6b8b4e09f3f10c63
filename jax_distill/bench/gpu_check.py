"""`bench gpu_check`: is the loss right on this device, how fast is it, and did the plan hold?

Correctness: every implementation against float64 (numpy, from the formula) in fp32 at full matmul
precision and in bf16. Then `bench head` over 8K, 32K and 256K tokens and C of 1024, 2048 and 4096,
what fits, planned beside measured peak. Rows are written as they come, and after `--seconds` none
is begun; `--toy` is the same at a CPU's size. `.ci/gpu_check.sh` runs it and, after it, torch_ref's
rows in a process of their own.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill import losses
from jax_distill.bench import head, peers
from jax_distill.config import CommandLine, Failure, check_new_file, run_command
from jax_distill.devices import NO_AUTOTUNING

LIMITS = {"float32": 2e-5, "bfloat16": 4e-3}
"""Relative error of value and gradients: fp32 sums of 16k terms; bf16 dlogits and results."""

TOY = {"tokens": 64, "hidden": 64, "vocab": 2048, "top_k": 20}
REAL = {"tokens": 512, "hidden": 512, "vocab": 16384, "top_k": 100}
TOY_CASES = head.Case("", 0, 32, 1024, 16, 0, "float32")
REAL_CASES = head.Case("", 0, 4096, 131072, 100, 0, "bfloat16")


def errors_of(implementation: str, dtype: str, inputs: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative errors of loss, d_hidden and d_lm_head against float64 of the same inputs."""
    answer = peers.float64_answer(inputs, "bucket")
    names = ("labels", "teacher_indices", "teacher_logprobs", "teacher_log_tail")
    labels, *teacher = [jnp.asarray(inputs[name])[None] for name in names]
    targets = [labels, jnp.ones(labels.shape, bool), *teacher]
    targets.append(jnp.full(labels.shape, teacher[0].shape[-1], jnp.int32))
    chunk_size = int(inputs["chunk_size"])

    def total(hidden, lm_head):
        loss = losses.IMPLEMENTATIONS[implementation]
        return loss(hidden, lm_head, *targets, chunk_size=chunk_size).loss

    def core(hidden, lm_head):
        (loss, _), *gradients = losses.kl_and_grads(
            hidden, lm_head, *targets, chunk_size=chunk_size
        )
        return loss, gradients

    function = core if implementation == "kl_and_grads" else jax.value_and_grad(total, (0, 1))
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        value, gradients = jax.jit(function, compiler_options=NO_AUTOTUNING)(
            jnp.asarray(inputs["hidden"], dtype)[None], jnp.asarray(inputs["lm_head"], dtype)
        )
    errors = {"value": abs(float(value) / float(answer["loss"]) - 1.0)}
    for name, gradient in zip(("d_hidden", "d_lm_head"), gradients, strict=True):
        got = np.asarray(gradient, np.float64).reshape(answer[name].shape)
        errors[name] = float(np.linalg.norm(got - answer[name]) / np.linalg.norm(answer[name]))
    return errors


def correctness(size: dict[str, int], on_row: Callable[[dict[str, Any]], None]) -> None:
    """Rows of errors; inputs are rounded to the dtype first, so that float64 sees the same."""
    exact = peers.make_inputs(argparse.Namespace(**size, chunk_size=size["tokens"] // 8))
    for dtype, limit in LIMITS.items():
        narrow = {
            name: np.asarray(jnp.asarray(exact[name], dtype), np.float32)
            for name in ("hidden", "lm_head")
        }
        for implementation in head.PRODUCTS:
            errors = errors_of(implementation, dtype, exact | narrow)
            named = {"implementation": implementation, "dtype": dtype}
            on_row({**named, **errors, "right": max(errors.values()) < limit})


def cases_of(toy: bool) -> list[head.Case]:
    """Every implementation at every length; dense has no C."""
    base = TOY_CASES if toy else REAL_CASES
    lengths, chunks = ((32, 64), (8, 16)) if toy else ((8192, 32768, 262144), (1024, 2048, 4096))
    return [
        base._replace(implementation=name, tokens=tokens, chunk_size=chunk_size)
        for name in head.PRODUCTS
        for tokens in lengths
        for chunk_size in (chunks[:1] if name == "dense" else chunks)
    ]


def main(argv: Sequence[str]) -> int:
    """Raises Failure where an implementation is wrong; the rows are written all the same."""
    parser = CommandLine("jax_distill.bench gpu_check")
    parser.add_argument("--toy", action="store_true", help="a CPU's size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=210.0, help="begin no case after these")
    parser.add_argument("--json", type=Path, help="write all rows here")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    start = time.perf_counter()
    written: dict[str, Any] = {"jax": jax.__version__, "correctness": [], "head": []}

    def keep(kind: str, row: dict[str, Any]) -> None:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        written[kind].append(row)
        if options.json:
            options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")

    correctness(TOY if options.toy else REAL, partial(keep, "correctness"))
    left = options.seconds - (time.perf_counter() - start)
    cases = cases_of(options.toy)
    rows = head.measure(cases, options.repeats, partial(keep, "head"), seconds=left)
    head.print_table(rows)
    wrong = [row for row in written["correctness"] if not row["right"]]
    if wrong:
        raise Failure(f"expected errors below {LIMITS}, got {wrong[0]}")
    return 0


if __name__ == "__main__":  # bench's own command line wants more than a GPU's image may have
    run_command(main)
