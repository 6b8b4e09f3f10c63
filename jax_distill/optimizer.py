"""Optimizers and learning-rate schedules, by name, from optax.

Steps are optimizer steps, never micro-batches. The step that makes the parameters of step s+1 out
of those of step s uses the learning rate of s (0-based), as optax counts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def learning_rate_schedule(
    kind: str, *, learning_rate: float, final: float, warmup_steps: int, steps: int
) -> optax.Schedule:
    """step → learning rate.

    For s < w (warm-up): peak·(s+1)/(w+1), so the first step already moves. Then with
    x = (s − w)/(steps − w): `constant` peak; `linear` peak + (final − peak)·x;
    `cosine` final + (peak − final)·(1 + cos(π·x))/2.
    """
    span = max(steps - warmup_steps, 1)

    def schedule(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = learning_rate * (step + 1.0) / (warmup_steps + 1.0)
        x = jnp.clip((step - warmup_steps) / span, 0.0, 1.0)
        if kind == "cosine":
            main = final + (learning_rate - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * x))
        elif kind == "linear":
            main = learning_rate + (final - learning_rate) * x
        else:
            main = jnp.full_like(x, learning_rate)
        return jnp.where(step < warmup_steps, warm, main)

    return schedule


def decayed(params: Any) -> Any:
    """True for the leaves that weight decay touches: every weight but norms and biases."""

    def is_matrix(path: tuple, _: Any) -> bool:
        names = [str(getattr(key, "key", key)) for key in path]
        return not any("norm" in name or name == "bias" for name in names)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    *,
    b1: float,
    b2: float,
    weight_decay: float,
    clip_norm: float | None,
) -> optax.GradientTransformation:
    """`adamw` (eps 1e-8, decoupled decay), `sgd` (momentum b1) or `adafactor` (optax's defaults).

    Clipping, where asked for, scales the whole gradient to at most `clip_norm` before the update.
    """
    if name == "adamw":
        core = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed)
    elif name == "sgd":
        core = optax.chain(
            optax.add_decayed_weights(weight_decay, mask=decayed),
            optax.sgd(schedule, momentum=b1 or None),
        )
    else:
        decay = {"weight_decay_rate": weight_decay or None, "weight_decay_mask": decayed}
        core = optax.adafactor(schedule, **decay)
    if clip_norm is None:
        return core
    return optax.chain(optax.clip_by_global_norm(clip_norm), core)
