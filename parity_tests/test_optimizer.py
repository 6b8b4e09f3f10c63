"""Rung "optimizer": from the same gradients, both backends make the same parameters.

Every optimizer under every schedule, with and without clipping, decay and momentum, for gradients
from tiny to large; the schedules are also optax's own, joined. float32: a parameter may differ by a
few roundings of itself and 1e-5 of what it has moved; where b2 is near 1, by what optax loses in
1 − b2^t, which float32 knows to 2⁻²⁴/(1 − b2) (torch_ref takes it in float64).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from ladder import assert_close

from jax_distill.devices import QUICK_COMPILE
from jax_distill.training.optimizer import learning_rate_schedule, make_optimizer
from torch_ref import optimizer as torch_optimizer

STEPS, KINDS = 7, ("cosine", "linear", "constant")
RATE = dict(learning_rate=3e-2, final=2e-3, warmup_steps=2, steps=STEPS - 1)
# One of each kind that the rules tell apart: stacked and alone, matrix, norm, bias, and sizes on
# both sides of adafactor's 128.
SHAPES = {
    "model.embed_tokens.weight": (150, 130),
    "model.layers.{}.self_attn.q_proj.weight": (130, 140),
    "model.layers.{}.self_attn.q_proj.bias": (130,),
    "model.layers.{}.mlp.down_proj.weight": (130, 7),
    "model.layers.{}.input_layernorm.weight": (130,),
    "model.norm.weight": (130,),
    "lm_head.weight": (150, 130),
}
LAYERS = 2


def random_stacks(seed: int) -> dict[str, np.ndarray]:
    """Name with `{}` → array, the layers stacked; sizes from 1e-4 to 10."""
    rng = np.random.default_rng(seed)
    stacks = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        shape = (LAYERS, *shape) if "{}" in name else shape
        stacks[name] = (rng.normal(size=shape) * 10.0 ** (index % 6 - 4)).astype(np.float32)
    return stacks


def by_layer(stacks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers names them."""
    found = {}
    for name, array in stacks.items():
        parts = enumerate(array) if "{}" in name else [(0, array)]
        found |= {name.format(layer): part for layer, part in parts}
    return found


def as_tree(stacks: dict[str, np.ndarray]) -> dict:
    """As the JAX model nests them."""
    tree: dict = {}
    for name, array in stacks.items():
        *path, leaf = name.removeprefix("model.").replace("{}.", "").split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        decayed = leaf == "weight" and "norm" not in name
        inner[leaf] = nnx.Param(jnp.asarray(array), weight_decay=decayed)
    return tree


def from_tree(tree: dict) -> dict[str, np.ndarray]:
    stacks = {}
    for name in SHAPES:
        leaf = tree
        for part in name.removeprefix("model.").replace("{}.", "").split("."):
            leaf = leaf[part]
        stacks[name] = np.asarray(leaf[...])
    return by_layer(stacks)


SETTINGS = [
    dict(b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=0.5),
    dict(b1=0.0, b2=0.999, weight_decay=0.0, clip_norm=None),
    dict(b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=1e9),
]


@pytest.mark.parametrize("kind,options", list(zip(KINDS, SETTINGS, strict=True)), ids=KINDS)
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_parameters_after_every_step(name, kind, options):
    start = random_stacks(0)
    schedule = learning_rate_schedule(kind, **RATE)
    optimizer = make_optimizer(name, schedule, **options)
    rate = torch_optimizer.learning_rate_schedule(kind, **RATE)
    parameters = {k: torch.tensor(v) for k, v in by_layer(start).items()}
    clip_norm = options["clip_norm"]
    options = {k: v for k, v in options.items() if k != "clip_norm"}
    theirs = torch_optimizer.make_optimizer(name, parameters, **options)

    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # optax mixes ints and floats
        params = as_tree(start)
        state = optimizer.init(params)
        program = jax.jit(update).lower(params, state, params).compile(QUICK_COMPILE)
        way = dict.fromkeys(parameters, 0.0)  # the largest moves so far, summed
        for step in range(STEPS):
            gradients = random_stacks(step + 1)
            params, state = program(params, state, as_tree(gradients))
            before = {k: p.clone() for k, p in parameters.items()}
            for key, g in by_layer(gradients).items():
                parameters[key].grad = torch.tensor(g)
            torch_optimizer.clip_gradients(parameters.values(), clip_norm)
            torch_optimizer.set_learning_rate(theirs, rate(step))
            theirs.step()
            for key, got in from_tree(params).items():
                way[key] += (parameters[key] - before[key]).abs().max().item()
                assert way[key] > 0
                rounding = 2.0**-23 * (step + 1) * parameters[key].abs().max().item()
                allowed = rounding + (1e-5 + 2.0**-24 / (1 - options["b2"])) * way[key]
                rung = f"optimizer {name}, {kind}, step {step + 1}"
                assert_close(rung, key, got, parameters[key], 1.0, unit=allowed)


def optax_schedule(kind: str, *, learning_rate, final, warmup_steps, steps):
    """Out of optax's own: a linear warm-up from peak/(w+1), then the main part."""
    span = steps - warmup_steps
    main = {
        "cosine": lambda: optax.cosine_decay_schedule(learning_rate, span, final / learning_rate),
        "linear": lambda: optax.linear_schedule(learning_rate, final, span),
        "constant": lambda: optax.constant_schedule(learning_rate),
    }[kind]()
    if not warmup_steps:
        return main
    first = learning_rate / (warmup_steps + 1)
    warm = optax.linear_schedule(first, learning_rate, warmup_steps)
    return optax.join_schedules([warm, main], [warmup_steps])


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_are_optaxs_own(kind, warmup_steps):
    options = dict(learning_rate=3e-3, final=4e-4, warmup_steps=warmup_steps, steps=20)
    ours = learning_rate_schedule(kind, **options)
    theirs = torch_optimizer.learning_rate_schedule(kind, **options)
    steps = np.arange(25)
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.vmap(optax_schedule(kind, **options))(steps)
        in_jax = jax.vmap(ours)(steps)
    rung = f"schedule {kind}, warm-up {warmup_steps}"
    assert_close(rung, "JAX", in_jax, expected, 5e-7)
    assert_close(rung, "torch", np.array([theirs(int(s)) for s in steps]), expected, 5e-7)
    assert np.unique(np.asarray(expected)).size > 1 or (kind, warmup_steps) == ("constant", 0)
