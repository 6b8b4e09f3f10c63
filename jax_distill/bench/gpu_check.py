"""`bench gpu_check`: are loss and attention right on this device, how fast is the loss, and did the
plan hold?

Correctness: every implementation of both against float64 (numpy, from the formula) in fp32 at full
matmul precision and in bf16, attention at T = 1,024; the experts against `blocks` in fp32. Then
`bench head` over 8K and 256K tokens with C = 2048, what fits, planned beside measured peak. Rows
are written as they come, and after `--seconds` none of the table is begun; `--toy` is the same at
a CPU's size. `.ci/gpu_check.sh` runs it and, after it, JAX against torch, a step of a 3.2B student
and torch_ref's rows, each in a process of its own.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill.attention import hopper_refuses
from jax_distill.base.command import CommandLine, above_zero, run_command
from jax_distill.base.errors import RunError
from jax_distill.base.files import check_new_file, write_json
from jax_distill.bench import MATMULS, attention_check, head, peers
from jax_distill.devices import NO_AUTOTUNING
from jax_distill.doctor import LIMITS as EXPERTS_LIMITS
from jax_distill.doctor import compare_experts
from jax_distill.model import ModelConfig
from jax_distill.synthetic import LossInputs, loss_inputs

LIMITS = {"float32": 2e-5, "bfloat16": 4e-3}
"""Relative error of value and gradients: fp32 sums of 16k terms; bf16 dlogits and results."""

CHECKS = ("correctness", "attention", "experts")
TOY = {"length": 64, "width": 64, "vocab_size": 2048, "top_k": 20}
REAL = {"length": 512, "width": 512, "vocab_size": 16384, "top_k": 100}
TOY_CASES = head.Case("", 0, 32, 1024, 16, 0, "float32")
REAL_CASES = head.Case("", 0, 4096, 131072, 100, 0, "bfloat16")


def errors_of(implementation: str, dtype: str, inputs: LossInputs) -> dict[str, float]:
    """Relative errors of loss, d_hidden and d_weight against float64 of the same inputs."""
    tokens = inputs.hidden.shape[1]
    function = head.function_of(implementation, chunk_size=tokens // 8)
    arguments = (
        jnp.asarray(inputs.hidden, dtype),
        jnp.asarray(inputs.weight, dtype),
        inputs.batch.map(jnp.asarray),
    )
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        compiled = function.lower(*arguments).compile(compiler_options=NO_AUTOTUNING)
        value, (d_hidden, d_weight) = compiled(*arguments)
    count = 1 if implementation == "kl_and_grads" else tokens  # it sums, the others average
    exact = peers.float64_answer(inputs)
    answer = {name: value / count for name, value in exact.items()}
    got = {"loss": value, "d_hidden": d_hidden, "d_weight": d_weight}
    return peers.errors_of(got, answer)


def correctness(size: dict[str, Any], on_row: Callable[[dict[str, Any]], None]) -> None:
    """Rows of errors; inputs are rounded to the dtype first, so that float64 sees the same."""
    inputs = loss_inputs(1, **size)
    for dtype, limit in LIMITS.items():
        hidden, weight = (
            np.asarray(jnp.asarray(array, dtype), np.float32)
            for array in (inputs.hidden, inputs.weight)
        )
        rounded = inputs._replace(hidden=hidden, weight=weight)
        for implementation in MATMULS:
            errors = errors_of(implementation, dtype, rounded)
            named = {"implementation": implementation, "dtype": dtype}
            on_row({**named, **errors, "right": max(errors.values()) < limit})


def experts(on_row: Callable[[dict[str, Any]], None]) -> None:
    """The experts' matmuls, gpt-oss's gate and top-4 of 8, against `blocks` in fp32."""
    model = ModelConfig(
        vocab_size=1024,
        hidden_size=320,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=4,
    )
    for dtype, limit in EXPERTS_LIMITS.items():
        refused = hopper_refuses(jnp.dtype(dtype), None, jax.local_devices()[0])
        for name in ("blocks",) if refused else ("blocks", "hopper"):
            errors = compare_experts(model, dtype=dtype, implementation=name).errors
            worst = max(errors.values())
            row = {"implementation": f"experts {name}", "dtype": dtype, "error": worst}
            on_row({**row, "right": worst <= limit})


def cases_of(toy: bool) -> list[head.Case]:
    """Every implementation at both lengths."""
    base = TOY_CASES if toy else REAL_CASES
    lengths, chunk_size = ((32, 64), 16) if toy else ((8192, 262144), 2048)
    return [
        base._replace(implementation=name, tokens=tokens, chunk_size=chunk_size)
        for name in MATMULS
        for tokens in lengths
    ]


def main(argv: Sequence[str]) -> int:
    """Raises RunError where an implementation is wrong; the rows are written all the same."""
    parser = CommandLine("jax_distill.bench gpu_check")
    parser.add_argument("--toy", action="store_true", help="a CPU's size")
    parser.add_argument("--repeats", type=above_zero, default=3)
    parser.add_argument("--seconds", type=float, default=210.0, help="begin no case after these")
    parser.add_argument("--json", type=Path, help="write all rows here")
    options = parser.parse_args(argv)
    check_new_file(options.json, "--json")
    start = time.perf_counter()
    written: dict[str, Any] = {"jax": jax.__version__} | {kind: [] for kind in (*CHECKS, "head")}

    def keep(kind: str, row: dict[str, Any]) -> None:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        written[kind].append(row)
        if options.json:
            write_json(options.json, written)

    correctness(TOY if options.toy else REAL, partial(keep, "correctness"))
    attention_check.check(
        attention_check.TOY if options.toy else attention_check.REAL, partial(keep, "attention")
    )
    experts(partial(keep, "experts"))
    left = options.seconds - (time.perf_counter() - start)
    rows = head.measure(cases_of(options.toy), options.repeats, partial(keep, "head"), seconds=left)
    if rows:
        head.print_table(rows)
    wrong = [row for kind in CHECKS for row in written[kind] if not row["right"]]
    if wrong:
        raise RunError(f"expected errors within the limits of their dtypes, got {wrong[0]}")
    return 0


if __name__ == "__main__":  # bench's own command line wants more than a GPU's image may have
    run_command(main)
