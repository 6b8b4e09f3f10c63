"""Every attention of this device against float64, forward and backward (a part of `gpu_check`).

The definition is numpy's, from the formula; inputs are rounded to the dtype first, so that it sees
what the implementations see. One row of one document, one of three and padding; with and without a
window and sinks.

Letters: T positions, H query heads, G key/value heads, R = H/G, Q head dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill.attention import (
    ATTENTION_IMPLEMENTATIONS,
    Implementation,
    Mask,
    attention,
    cudnn_takes,
    hopper_refuses,
)
from jax_distill.bench.peers import norm_error
from jax_distill.devices import QUICK_COMPILE
from jax_distill.doctor import LIMITS

DTYPES = ("float32", "bfloat16")
NAMES = ("query", "key", "value", "sinks")


class Size(NamedTuple):
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int


REAL = Size(1024, 8, 2, 128, 128)
TOY = Size(48, 4, 2, 16, 9)


def definition(
    arrays: dict[str, np.ndarray],
    cotangent: np.ndarray,
    segments: np.ndarray,
    window: int | None,
    with_sinks: bool,
) -> dict[str, np.ndarray]:
    """output [T,H,Q] and the gradients of Σ output·cotangent; all float64. arrays: query [T,H,Q],
    key and value [T,G,Q], sinks [H]; segments [T]."""
    ratio = arrays["query"].shape[1] // arrays["key"].shape[1]
    query = arrays["query"].transpose(1, 0, 2) / np.sqrt(arrays["query"].shape[-1])
    key, value = (np.repeat(arrays[n].transpose(1, 0, 2), ratio, 0) for n in ("key", "value"))
    distance = np.subtract.outer(np.arange(len(segments)), np.arange(len(segments)))
    seen = (distance >= 0) & (distance < (window or len(segments)))
    seen &= segments[:, None] == segments[None, :]
    logits = np.where(seen, query @ key.transpose(0, 2, 1), -np.inf)  # [H,T,T]
    sinks = arrays["sinks"] if with_sinks else np.full(len(query), -np.inf)
    largest = np.maximum(logits.max(-1, keepdims=True), sinks[:, None, None])
    weights = np.exp(logits - largest)
    sink = np.exp(sinks[:, None, None] - largest)
    total = weights.sum(-1, keepdims=True) + sink
    weights, sink = weights / total, sink / total
    output = weights @ value

    d_output = cotangent.transpose(1, 0, 2)
    delta = (d_output * output).sum(-1, keepdims=True)
    d_logits = weights * (d_output @ value.transpose(0, 2, 1) - delta)

    def by_group(d: np.ndarray) -> np.ndarray:
        return d.reshape(-1, ratio, *d.shape[1:]).sum(1).transpose(1, 0, 2)

    found = {
        "output": output.transpose(1, 0, 2),
        "d_query": (d_logits @ key).transpose(1, 0, 2) / np.sqrt(query.shape[-1]),
        "d_key": by_group(d_logits.transpose(0, 2, 1) @ query),
        "d_value": by_group(weights.transpose(0, 2, 1) @ d_output),
    }
    return found | ({"d_sinks": -(sink * delta).sum((1, 2))} if with_sinks else {})


def of_device(dtype: str, size: Size) -> tuple[list[Implementation], list[str]]:
    """The implementations that take the input on this device, and why others do not."""
    device, kind = jax.local_devices()[0], jnp.dtype(dtype)
    found = list(ATTENTION_IMPLEMENTATIONS)
    left_out = []
    if not cudnn_takes(kind, size.length, size.head_dim, device):
        found.remove("cudnn")
        left_out.append(f"cudnn in {dtype}: not on {device.device_kind}")
    if refused := hopper_refuses(kind, size.head_dim, device):
        found.remove("hopper")
        left_out.append("hopper in {}: expected {}, got {}".format(dtype, *refused))
    return found, left_out


def check(size: Size, on_row: Callable[[dict[str, Any]], None]) -> None:
    """A row for each implementation, dtype and mask: relative errors, and whether they are right.
    All masks of one implementation and dtype are one program."""
    rng = np.random.default_rng(0)
    shapes = [(size.length, n, size.head_dim) for n in (size.heads, *[size.kv_heads] * 2)]
    drawn = [rng.normal(size=shape) for shape in (*shapes, (size.heads,), shapes[0])]
    third, end = size.length // 3, size.length - size.length // 8
    packed = np.repeat([1, 2, 3, 0], [third, third, end - 2 * third, size.length - end])
    rows = {"one document": np.ones(size.length, np.int32), "packed": packed.astype(np.int32)}
    masks = [(window, sinks) for window in (None, size.window) for sinks in (False, True)]
    for dtype in DTYPES:
        rounded = [jnp.asarray(array, dtype) for array in drawn]
        *exact, cotangent = (np.asarray(array.astype(jnp.float32), np.float64) for array in rounded)
        arrays = dict(zip(NAMES, exact, strict=True))
        right = {
            (row, mask): definition(arrays, cotangent, segments, *mask)
            for row, segments in rows.items()
            for mask in masks
        }
        names, left_out = of_device(dtype, size)
        for words in left_out:
            print(f"attention: left out {words}", flush=True)
        for name in names:
            inputs = {row: (*rounded, jnp.asarray(ids)[None]) for row, ids in rows.items()}
            with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                lowered = jax.jit(_program(name, masks)).lower(*inputs["packed"])
            on_cpu = jax.local_devices()[0].platform == "cpu"
            program = lowered.compile(compiler_options=QUICK_COMPILE if on_cpu else None)
            for row in rows:
                got = jax.device_get(program(*inputs[row]))
                for mask, results in zip(masks, got, strict=True):
                    answer = right[row, mask]
                    errors = {key: norm_error(results[key], answer[key]) for key in answer}
                    # A sink's gradient is a sum over T whose terms cancel.
                    worst = max(e / (3 if key == "d_sinks" else 1) for key, e in errors.items())
                    on_row(
                        {
                            "implementation": name,
                            "dtype": dtype,
                            "row": row,
                            "window": mask[0],
                            "sinks": mask[1],
                            **{f"{key}_error": float(f"{e:.2g}") for key, e in errors.items()},
                            "right": worst <= LIMITS[dtype],
                        }
                    )


def _program(name: Implementation, masks: list[tuple[int | None, bool]]) -> Callable[..., Any]:
    def results(query, key, value, sinks, cotangent, segments):
        found = []
        for window, with_sinks in masks:

            def attend(query, key, value, sinks, window=window, with_sinks=with_sinks):
                one = (x[None] for x in (query, key, value))
                mask, sink = Mask(segments, window), sinks if with_sinks else None
                return attention(*one, mask, sinks=sink, implementation=name)[0]

            output, pullback = jax.vjp(attend, query, key, value, sinks)
            gradients = zip(NAMES, pullback(cotangent), strict=True)
            found.append({"output": output} | {f"d_{key}": d for key, d in gradients})
        return found

    return results
