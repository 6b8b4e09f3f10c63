"""torch's own AdamW and SGD with optax's settings, optax's adafactor, the learning-rate schedule.

Steps are optimizer steps, counted from 0 for the learning rate.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from jax_distill.config import OptimizerConfig

LAYER = re.compile(r"\blayers\.\d+\.")
SMALLEST_SCALE, SMALLEST_FACTORED = 1e-3, 128  # adafactor


def learning_rate_schedule(
    kind: str, *, learning_rate: float, final: float, warmup_steps: int, steps: int
) -> Callable[[int], float]:
    """step → learning rate.

    For s < w (warm-up): peak·(s+1)/(w+1). Then with x = (s − w)/(steps − w): `constant` peak;
    `linear` peak + (final − peak)·x; `cosine` final + (peak − final)·(1 + cos(π·x))/2.
    """

    def schedule(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / (warmup_steps + 1)
        x = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
        if kind == "cosine":
            return final + (learning_rate - final) * 0.5 * (1 + math.cos(math.pi * x))
        if kind == "linear":
            return learning_rate + (final - learning_rate) * x
        return learning_rate

    return schedule


def decayed(name: str) -> bool:
    """Whether weight decay applies to a parameter: every weight but norms and biases."""
    return not any("norm" in part or part == "bias" for part in name.split("."))


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float | None) -> Tensor:
    """Scale every `.grad` so that their norm is at most `clip_norm`; returns the norm before.

    √Σ g² by sums: torch's own norm adds float32 numbers one by one on a CPU (relative error
    measured: 1e-5 at 10⁶ numbers, 4e-4 at 10⁷).
    """
    clipped = [p for p in parameters if p.grad is not None]
    squares = [p.grad.float().square().sum() for p in clipped if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt()
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(clipped, clip_norm, norm)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """For the next steps, of every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def make_optimizer(
    name: str, parameters: dict[str, Tensor], *, b1: float, b2: float, weight_decay: float
) -> torch.optim.Optimizer:
    """`adamw` (eps 1e-8, decoupled decay), `sgd` (momentum b1) or `adafactor` (optax's defaults),
    over the `.grad` of parameters by name; the learning rate is set before every step."""
    groups = [
        {
            "params": [(key, p) for key, p in parameters.items() if decayed(key) == decays],
            "weight_decay": weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw":
        return torch.optim.AdamW(groups, betas=(b1, b2), eps=1e-8)
    if name == "sgd":
        return torch.optim.SGD(groups, momentum=b1)
    return Adafactor(groups)


def optimizer_of(
    config: OptimizerConfig, parameters: dict[str, Tensor], *, steps: int
) -> tuple[torch.optim.Optimizer, Callable[[int], float]]:
    """The optimizer and its learning-rate schedule over `steps`, as configured."""
    schedule = learning_rate_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        final=config.final_learning_rate,
        warmup_steps=config.warmup_steps,
        steps=steps,
    )
    decay = config.weight_decay
    optimizer = make_optimizer(
        config.name, parameters, b1=config.b1, b2=config.b2, weight_decay=decay
    )
    return optimizer, schedule


def stacks(names: list[str]) -> list[list[str]]:
    """The names of each array of the stacked model, by layer."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(LAYER.sub("layers.", name), []).append(name)
    return list(found.values())


class Adafactor(torch.optim.Optimizer):
    """Shazeer et al. 2018 (arXiv 1804.04235) as optax has it: torch's own differs (relative step
    sizes, the order of decay). The decay is not scaled by the learning rate.

    The JAX model keeps the weights of its layers stacked, so what is measured over a whole array
    (root mean square of an update or a parameter, the two largest axes) is measured over the stack
    here, too; the first layer's parameter holds the state of the stack.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from every parameter's `.grad`."""
        for group in self.param_groups:
            parameters = dict(zip(group["param_names"], group["params"], strict=True))
            for names in stacks(group["param_names"]):
                layers = [parameters[name] for name in names]
                p = torch.stack([x.detach() for x in layers])
                g = torch.stack([x.grad for x in layers if x.grad is not None])
                if not LAYER.search(names[0]):
                    p, g = p[0], g[0]
                u = self._unit_update(self.state[layers[0]], g)
                u = u / u.square().mean().sqrt().clamp_min(1.0)
                u = u * group["lr"] * p.square().mean().sqrt().clamp_min(SMALLEST_SCALE)
                moved = p - (u + group["weight_decay"] * p)
                moved = moved.view(len(layers), *layers[0].shape)
                for layer, value in zip(layers, moved, strict=True):
                    layer.copy_(value)

    def _unit_update(self, state: dict[str, Any], g: Tensor) -> Tensor:
        """g/√v, v factored into a row and a column mean where two axes have 128 at least."""
        state["step"] = state.get("step", 0) + 1
        decay = 1 - state["step"] ** -0.8
        square = g.square() + 1e-30

        def mean(name: str, new: Tensor) -> Tensor:
            state[name] = decay * state[name] + (1 - decay) * new if name in state else new
            return state[name]

        order = sorted(range(g.ndim), key=lambda axis: g.shape[axis])
        if g.ndim < 2 or g.shape[order[-2]] < SMALLEST_FACTORED:
            return g / mean("v", square).sqrt()
        small, large = order[-2:]
        row, column = mean("row", square.mean(large)), mean("column", square.mean(small))
        axis = small - 1 if small > large else small
        row_factor = (row / row.mean(axis, keepdim=True)).rsqrt()
        return g * row_factor.unsqueeze(large) * column.rsqrt().unsqueeze(small)
