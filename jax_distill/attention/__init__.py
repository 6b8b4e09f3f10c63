"""Causal attention that keeps documents apart: one function, an implementation per file.

| implementation | memory in T | where it runs by default |
|---|---|---|
| `cudnn` | linear, and 2·T² bytes of bias | NVIDIA GPUs and inputs that `cudnn_takes` names |
| `grouped` | quadratic | rows of at most 2,048 positions elsewhere |
| `hopper` | linear | longer ones, where its extra is installed and `hopper_refuses` nothing |
| `blockwise` | linear | everything else |
| `reference` | quadratic | nowhere: it is the definition, for tests |

Each takes windows and sinks. Nothing is silently quadratic: what no kernel takes runs blockwise.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jax_distill import devices
from jax_distill.attention.blockwise import blockwise_attention
from jax_distill.attention.cudnn import backward_workspace, cudnn_attention, cudnn_takes
from jax_distill.attention.grouped import LONGEST, grouped_attention
from jax_distill.attention.hopper import hopper_attention, hopper_refuses
from jax_distill.attention.mask import Mask
from jax_distill.attention.reference import attend_to, reference_attention

__all__ = [
    "ATTENTION_IMPLEMENTATIONS",
    "Implementation",
    "Mask",
    "attend_to",
    "attention",
    "backward_workspace",
    "cudnn_takes",
    "default_attention",
    "hopper_refuses",
]

Implementation = Literal["cudnn", "grouped", "hopper", "blockwise", "reference"]
ATTENTION_IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
_FUNCTIONS: dict[Implementation, Callable[..., jax.Array]] = {
    "cudnn": cudnn_attention,
    "grouped": grouped_attention,
    "hopper": hopper_attention,
    "blockwise": blockwise_attention,
    "reference": reference_attention,
}


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Softmax attention over what `mask` allows: [B,T,H,Q], twice [B,T,G,Q] → [B,T,H,Q].

    Scale 1/√Q; softmax in fp32. B rows, T positions, H query heads, G key/value heads, Q head dim.

    Args:
        sinks: [H], a logit per head that takes part in the softmax and adds nothing.
        implementation: None takes `default_attention`'s choice.
    """
    _, length, _, head_dim = query.shape
    chosen = implementation or default_attention(query.dtype, length, head_dim)
    return _FUNCTIONS[chosen](query, key, value, mask, sinks=sinks)


def default_attention(
    dtype: jnp.dtype, length: int, head_dim: int, *, device: jax.Device | None = None
) -> Implementation:
    """The implementation for a device (None: the one that is traced for), see the table above."""
    device = devices.traced_device() if device is None else device
    if cudnn_takes(dtype, length, head_dim, device):
        return "cudnn"
    if length <= LONGEST:
        return "grouped"
    return "hopper" if hopper_refuses(dtype, head_dim, device) is None else "blockwise"
