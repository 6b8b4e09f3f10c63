"""How every rung compares and how to read a failure, and what the rungs below the loss share.

The first broken rung names the culprit: norm, rotary, attention, layer, logits, loss, gradients,
optimizer, steps, resumed run, exported folder.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny
import torch
from flax import nnx

# Largest difference allowed, as a part of the largest entry: a few roundings of the dtype.
FP32, BF16 = 2e-6, 2e-2


def as_numpy(tensor: Any) -> np.ndarray:
    """A jax, torch or numpy array, or a number, in float32 or wider."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
    array = np.asarray(tensor)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def assert_close(
    rung: str,
    name: str,
    ours: Any,
    theirs: Any,
    tolerance: float = FP32,
    *,
    unit: float | np.ndarray | None = None,
    mean: float | None = None,
) -> None:
    """|ours − theirs| ≤ tolerance · unit everywhere, and ≤ mean · unit on average where `mean` is
    given; `unit` is max |theirs| where it is not, and may be one of each entry. Equal infinities
    are no difference; not finite where theirs is finite fails, and so does NaN. A failure says
    rung, tensor, largest and mean difference, where the largest is and what stands there (with
    units of the entries, where it is furthest beyond what is allowed)."""
    ours, theirs = as_numpy(ours), as_numpy(theirs)
    assert ours.shape == theirs.shape, f"{rung}: {name} {ours.shape} against {theirs.shape}"
    with np.errstate(invalid="ignore"):
        difference = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
    difference[np.isnan(difference)] = np.inf
    if unit is None:
        unit = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
    units = np.broadcast_to(unit, difference.shape)
    beyond = difference - tolerance * units
    where = tuple(map(int, np.unravel_index(beyond.argmax(), difference.shape)))
    average = np.inf if mean is None else mean * units.mean()
    assert beyond.max() <= 0 and difference.mean() <= average, (
        f"{rung}: {name} differs by {difference[where]:.3g} at {where} (ours {ours[where]:.8g}, "
        f"theirs {theirs[where]:.8g}), {difference.mean():.3g} on average; allowed "
        f"{tolerance * units[where]:.3g} ({tolerance:g} of {units[where]:.3g})"
        + ("" if mean is None else f" and {average:.3g} on average")
    )


def assert_numbers(
    rung: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    tolerance: float,
    **others: float,
) -> None:
    """`assert_close` of every number by its name, each relative to its own size; `others` are the
    tolerances of those that have one of their own."""
    assert ours.keys() == theirs.keys(), f"{rung}: {sorted(ours)} against {sorted(theirs)}"
    for name, value in theirs.items():
        assert_close(rung, name, ours[name], value, others.get(name, tolerance))


def run_layer(stacked: nnx.Module, layer: int, *inputs: Any) -> jax.Array:
    """One layer's module on its inputs, out of the stacked weights of all, as the decoder's scan
    runs it."""
    graphdef, weights = nnx.split(stacked)
    weights = jax.tree.map(lambda leaf: leaf[layer], weights)
    return _run(graphdef, weights, *map(jnp.asarray, inputs))


@functools.partial(jax.jit, static_argnums=0, compiler_options=tiny.QUICK_COMPILE)
def _run(graphdef, weights, *inputs):
    return nnx.merge(graphdef, weights)(*inputs)


def block_causal_mask(segment_ids: np.ndarray) -> torch.Tensor:
    """[B,T] → [B,1,T,T] for transformers' eager attention: 0 where t sees s, else very negative."""
    length = segment_ids.shape[1]
    seen = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    seen = seen & np.tril(np.ones((length, length), bool))
    return torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)
