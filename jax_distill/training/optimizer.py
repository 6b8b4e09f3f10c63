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

The first moment moves by a tenth of itself and needs no such thing: error 3.8e-3 to nearest, 5.4e-3
stochastically (b1 = 0.9; 1.2e-2 and 1.7e-2 at 0.99), no bias in either.
"""

from typing import TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from jax_distill.config import OptimizerConfig
from jax_distill.training.rounding import Integer, round_tree


def learning_rate_schedule(
    kind: str, *, learning_rate: float, final: float, warmup_steps: int, steps: int
) -> optax.Schedule:
    """step → learning rate, of optax's own schedules.

    For s < w (warm-up): peak·(s+1)/(w+1), so the first step already moves. Then with
    x = (s − w)/(steps − w): `constant` peak; `linear` peak + (final − peak)·x;
    `cosine` final + (peak − final)·(1 + cos(π·x))/2.
    """
    span = max(steps - warmup_steps, 1)
    if kind == "cosine":
        main = optax.cosine_decay_schedule(learning_rate, span, alpha=final / learning_rate)
    elif kind == "linear":
        main = optax.linear_schedule(learning_rate, final, span)
    else:
        main = optax.constant_schedule(learning_rate)
    if not warmup_steps:
        return main
    start = learning_rate / (warmup_steps + 1)
    warm = optax.linear_schedule(start, learning_rate, warmup_steps)
    return optax.join_schedules([warm, main], [warmup_steps])


def decayed(params: optax.Params) -> optax.Params:
    """True for the leaves that weight decay touches: those whose parameter is tagged so where the
    model makes it."""

    def tag(param: nnx.Param) -> nnx.Variable:
        return param.replace(param.weight_decay)

    return jax.tree.map(tag, params, is_leaf=lambda node: isinstance(node, nnx.Param))


class RoundingKey(TypedDict):
    """What stochastic rounding depends on beside the leaf; see rounding.py."""

    seed: int
    step: Integer
    first_row: Integer


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

    Clipping, where asked for, scales the whole gradient to at most `clip_norm` before the update;
    `update` takes its norm as `gradient_norm` where it is given a slice of it.
    `state_dtype` is that of the moments, whatever the parameters' (adafactor's stay fp32); updates
    come out in fp32. `seed` is that of stochastic rounding. `update` also takes `first_row`, the
    index of the leaves' first rows in their stacks. Parameters are nnx.Params that say whether
    `weight_decay` touches them.
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
        core = optax.chain(clip_by_global_norm(clip_norm), core)
    return _in_float32(core)


def clip_by_global_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """g → g·most/|g| where the norm |g| of the whole gradient is above `most`.

    optax's, but that |g| can be given (`gradient_norm`).
    """

    def update(
        grads: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        gradient_norm: jax.Array | None = None,
        **_: object,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        norm = optax.tree.norm(grads) if gradient_norm is None else gradient_norm
        return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), grads), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def scale_by_adam(
    b1: float, b2: float, *, dtype: DTypeLike, seed: int
) -> optax.GradientTransformationExtraArgs:
    """g → m̂/(√v̂ + 1e-8): m and v the decaying means of g and g², hats their bias correction.

    `optax.scale_by_adam` with both moments kept in `dtype`: see the top of the file.
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        zeros = [jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params) for _ in range(2)]
        return optax.ScaleByAdamState(jnp.int32(0), *zeros)

    def update(
        grads: optax.Updates,
        state: optax.ScaleByAdamState,
        params: optax.Params | None = None,
        *,
        first_row: Integer = 0,
        **_: object,
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        def mean(decay: float, moment: jax.Array, new: jax.Array) -> jax.Array:
            return decay * moment.astype(jnp.float32) + (1.0 - decay) * new

        count = state.count + 1
        time = count.astype(jnp.float32)
        mu = jax.tree.map(lambda m, g: mean(b1, m, g), state.mu, grads)
        nu = jax.tree.map(lambda v, g: mean(b2, v, g * g), state.nu, grads)
        m_bias, v_bias = 1.0 - b1**time, 1.0 - b2**time
        updates = jax.tree.map(lambda m, v: m / m_bias / (jnp.sqrt(v / v_bias) + 1e-8), mu, nu)
        mu = jax.tree.map(lambda m: m.astype(dtype), mu)
        key = RoundingKey(seed=seed, step=state.count, first_row=first_row)
        nu = round_tree(nu, state.nu, purpose="nu", **key)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` given gradients and parameters in fp32."""
    inner = optax.with_extra_args_support(inner)

    def to_fp32(tree: optax.Params) -> optax.Params:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(to_fp32(params))

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        return inner.update(to_fp32(grads), state, to_fp32(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(
    params: optax.Params,
    updates: optax.Updates,
    *,
    seed: int,
    step: Integer,
    first_row: Integer = 0,
) -> optax.Params:
    """params + updates (fp32) in the dtypes of params; to bf16 by stochastic rounding, alike for
    the same (seed, step, leaf). `first_row`: see `make_optimizer`."""
    moved = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, updates)
    key = RoundingKey(seed=seed, step=step, first_row=first_row)
    return round_tree(moved, params, purpose="parameter", **key)


def optimizer_of(
    config: OptimizerConfig, *, steps: int, seed: int
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """The optimizer and its learning-rate schedule over `steps`, as configured."""
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
