"""The rungs below the loss: one tensor of ours against one of transformers', and how to read a
failure. The first broken rung names the culprit: norm, rotary, attention, layer, logits."""

import functools
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
    """A jax, torch or numpy array in float32 or wider."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
    array = np.asarray(tensor)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def assert_close(rung: str, name: str, ours: Any, theirs: Any, tolerance: float = FP32) -> None:
    """|ours − theirs| ≤ tolerance · max |theirs| everywhere; not finite where theirs is finite
    fails. A failure says rung, tensor, largest and mean difference and where the largest is."""
    ours, theirs = as_numpy(ours), as_numpy(theirs)
    assert ours.shape == theirs.shape, f"{rung}: {name} {ours.shape} against {theirs.shape}"
    difference = np.abs(ours - theirs)
    difference[np.isnan(difference)] = np.inf
    largest = np.abs(theirs).max()
    where = tuple(map(int, np.unravel_index(difference.argmax(), difference.shape)))
    assert difference.max() <= tolerance * largest, (
        f"{rung}: {name} differs by {difference.max():.3g} at {where} (ours {ours[where]:.8g}, "
        f"theirs {theirs[where]:.8g}; mean {difference.mean():.3g}; allowed "
        f"{tolerance * largest:.3g}, {tolerance:g} of the largest entry)"
    )


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
