"""The loss family of top-K distillation: hidden states, a head and a store's arrays → LossSums."""

from jax_distill.losses.interface import (
    IMPLEMENTATIONS,
    dense,
    forward_chunked,
    fused,
    fused_chunked,
    loss_sums,
)
from jax_distill.losses.objectives import DIVERGENCES, LOG_FLOOR, TAILS, Objective
from jax_distill.losses.sums import LossSums

__all__ = [
    "DIVERGENCES",
    "IMPLEMENTATIONS",
    "LOG_FLOOR",
    "TAILS",
    "LossSums",
    "Objective",
    "dense",
    "forward_chunked",
    "fused",
    "fused_chunked",
    "loss_sums",
]
