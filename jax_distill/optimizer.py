"""Optimizers and learning-rate schedules, by name, from optax.

Steps are optimizer steps, never micro-batches. The step that makes the parameters of step s+1 out
of those of step s uses the learning rate of s (0-based), as optax counts. What is computed between
gradients, moments and parameters is fp32, whatever dtype these are kept in.

Moments in bf16 (`state_dtype`): the second is rounded stochastically (rounding.py), the first to
nearest. To nearest, the second cannot follow: at b2 = 0.999 it would have to move by 1e-3 of itself
where bf16 has steps of 4e-3 to 8e-3. Measured, 4096 weights with normal gradients, the root of the
second moment over fp32's after 4000 steps (median; 1 is right), gradients ten times smaller in the
last 2000, or all alike:

    b2       to nearest            stochastically
    0.999    2.88, or 1.20         1.00 (1st to 99th percentile 0.89 to 1.11), or 1.00
    0.99     1.00, or 1.02         1.00 (0.98 to 1.02), or 1.00
    0.95     1.00, or 1.00         1.00 (0.99 to 1.01), or 1.00

The first moment moves by a tenth of itself and needs no chance: error 3.8e-3 to nearest, 5.4e-3
stochastically (b1 = 0.9; 1.2e-2 and 1.7e-2 at 0.99), no bias in either.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_distill.config import OptimizerConfig, check_optimizer
from jax_distill.rounding import Integer, round_tree


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
    state_dtype: str = "float32",
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """`adamw` (eps 1e-8, decoupled decay), `sgd` (momentum b1) or `adafactor` (optax's defaults).

    Clipping, where asked for, scales the whole gradient to at most `clip_norm` before the update.
    `state_dtype` is that of the moments, whatever the parameters' (adafactor's stay fp32); updates
    come out in fp32. `seed` is for what is rounded by chance. `update` also takes `first_row`, the
    place of the leaves' first rows in their stacks.
    """
    if name == "adamw":
        core = optax.chain(
            scale_by_adam(b1, b2, dtype=jnp.dtype(state_dtype), seed=seed),
            optax.add_decayed_weights(weight_decay, mask=decayed),
            optax.scale_by_learning_rate(schedule),
        )
    elif name == "sgd":
        core = optax.chain(
            optax.add_decayed_weights(weight_decay, mask=decayed),
            optax.sgd(schedule, momentum=b1 or None, accumulator_dtype=jnp.dtype(state_dtype)),
        )
    else:
        decay = {"weight_decay_rate": weight_decay or None, "weight_decay_mask": decayed}
        core = optax.adafactor(schedule, **decay)
    if clip_norm is not None:
        core = optax.chain(optax.clip_by_global_norm(clip_norm), core)
    return _in_float32(core)


def scale_by_adam(
    b1: float, b2: float, *, dtype: Any, seed: int
) -> optax.GradientTransformationExtraArgs:
    """g → m̂/(√v̂ + 1e-8): m and v the decaying means of g and g², hats their bias correction.

    `optax.scale_by_adam` with both moments kept in `dtype`: see the top of the file.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = [jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params) for _ in range(2)]
        return optax.ScaleByAdamState(jnp.int32(0), *zeros)

    def update(
        grads: Any, state: Any, params: Any = None, *, first_row: Integer = 0, **_: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        def mean(decay: float, moment: jax.Array, new: jax.Array) -> jax.Array:
            return decay * moment.astype(jnp.float32) + (1.0 - decay) * new

        count = state.count + 1
        time = count.astype(jnp.float32)
        mu = jax.tree.map(lambda m, g: mean(b1, m, g), state.mu, grads)
        nu = jax.tree.map(lambda v, g: mean(b2, v, g * g), state.nu, grads)
        m_bias, v_bias = 1.0 - b1**time, 1.0 - b2**time
        updates = jax.tree.map(lambda m, v: m / m_bias / (jnp.sqrt(v / v_bias) + 1e-8), mu, nu)
        mu = jax.tree.map(lambda m: m.astype(dtype), mu)
        knobs: dict[str, Any] = {"seed": seed, "step": state.count, "first_row": first_row}
        nu = round_tree(nu, state.nu, purpose="nu", **knobs)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` given gradients and parameters in fp32."""
    inner = optax.with_extra_args_support(inner)

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> Any:
        return inner.init(wide(params))

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return inner.update(wide(grads), state, wide(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(
    params: Any, updates: Any, *, seed: int, step: Integer, first_row: Integer = 0
) -> Any:
    """params + updates (fp32) in the dtypes of params; bf16 by chance, the same chance for the same
    (seed, step, leaf). `first_row`: see `make_optimizer`."""
    moved = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, updates)
    knobs: dict[str, Any] = {"seed": seed, "step": step, "first_row": first_row}
    return round_tree(moved, params, purpose="parameter", **knobs)


def optimizer_of(
    config: OptimizerConfig, *, steps: int, seed: int
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """The optimizer and its learning-rate schedule over `steps`, as configured.

    Raises:
        Refusal: see `config.check_optimizer`.
    """
    check_optimizer(config)
    schedule = learning_rate_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        final=config.final_learning_rate,
        warmup_steps=config.warmup_steps,
        steps=steps,
    )
    optimizer = make_optimizer(
        config.name,
        schedule,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        state_dtype=config.state_dtype,
        seed=seed,
    )
    return optimizer, schedule
