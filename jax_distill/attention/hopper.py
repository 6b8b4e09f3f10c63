"""The Hopper attention kernels of jax-linear-attention (extra `hopper`), called directly.

They take documents, windows, grouped heads and sinks, and are linear in T: forward and backward
keep the output and the logsumexp, and skip blocks that causality, the window or a document empties.
The package (import name `jla`) is imported when the kernels are first asked for. Its own dispatcher
is never used: it answers what its kernels refuse with an implementation that is quadratic in T.

A plan traces for a device that is not there, while the kernels ask JAX which device is:
`devices.tracing_for` says so, and `hopper_refuses` asks the planned device in their stead.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jax_distill import devices
from jax_distill.attention.mask import Mask
from jax_distill.base.errors import UserError

TRIED = "0.11.2"
"""The release of JAX that the package pins, and that this file was compiled with."""
HEAD_DIMS = (64, 128)
NOT_INSTALLED = "none"


def hopper_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`reference_attention` by the kernels; bf16 or fp16. The backward is reproducible bit for bit.

    Raises:
        UserError: the package, the GPU, the dtype or the head dim is not what they take.
    """
    require_hopper("train.attention", "blockwise", query.dtype, query.shape[-1])
    with hopper_kernels("attention", "supported", None) as kernels:
        mixed: jax.Array = kernels.flash_attention(
            query,
            key,
            value,
            segment_ids=mask.segment_ids,
            sliding_window=mask.window,
            sinks=sinks,
        )
    return mixed


def hopper_refuses(
    dtype: jnp.dtype, head_dim: int | None, device: jax.Device
) -> tuple[str, str] | None:
    """What the kernels expect and what came; None where they take the input. head_dim None: of
    kernels that have none."""
    if importlib.util.find_spec("jla") is None:
        return "the package jax-linear-attention (Python 3.12 or newer)", NOT_INSTALLED
    if jax.__version__ != TRIED:
        return f"JAX {TRIED}", jax.__version__
    if getattr(device, "compute_capability", None) != "9.0" or device.platform != "gpu":
        return "a Hopper GPU (compute capability 9.0)", device.device_kind
    if dtype not in (jnp.bfloat16, jnp.float16):
        return "bfloat16 or float16", jnp.dtype(dtype).name
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return "a head dim of 64 or 128", str(head_dim)
    return None


def require_hopper(option: str, other: str, dtype: jnp.dtype, head_dim: int | None = None) -> None:
    """Raises UserError, with what else to set `option` to, where the kernels refuse."""
    refused = hopper_refuses(dtype, head_dim, devices.traced_device())
    if refused is not None:
        expected, got = refused
        install = "run pip install 'jax_distill[hopper]', or " if got == NOT_INSTALLED else ""
        raise UserError(
            f"expected {expected} for {option} hopper, got {got}; {install}set --{option} {other}"
        )


@contextmanager
def hopper_kernels(module: str, check: str, answer: object) -> Iterator[Any]:
    """A module of the package's kernels. Where a plan traces, its function `check` of the device
    that is there is answered in its stead."""
    kernels = importlib.import_module(f"jla.ops.mosaic_gpu.{module}")
    if not devices.is_planning():
        yield kernels
        return
    asks = getattr(kernels, check)
    setattr(kernels, check, lambda *_: answer)
    try:
        yield kernels
    finally:
        setattr(kernels, check, asks)
