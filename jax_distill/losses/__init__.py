"""The loss family of top-K distillation: hidden states, a head and a store's arrays → LossSums."""

from jax_distill.losses.interface import (
    IMPLEMENTATIONS,
    dense,
    forward_chunked,
    fused,
    fused_chunked,
    kl_and_grads,
    loss_sums,
)
from jax_distill.losses.layout import Layout
from jax_distill.losses.objectives import DIVERGENCES, LOG_FLOOR, TAILS, Objective
from jax_distill.losses.sums import LossSums

__all__ = [
    "DIVERGENCES",
    "IMPLEMENTATIONS",
    "LOG_FLOOR",
    "TAILS",
    "Layout",
    "LossSums",
    "Objective",
    "dense",
    "forward_chunked",
    "fused",
    "fused_chunked",
    "kl_and_grads",
    "loss_sums",
]
