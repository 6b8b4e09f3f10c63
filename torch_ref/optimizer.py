"""Optimizers and learning-rate schedules by the closed forms that optax has.

Steps are optimizer steps, counted from 0 for the learning rate. The JAX model keeps the weights of
its layers stacked, so what adafactor measures over a whole array (the root mean square of an update
or a parameter, the two largest axes) is measured over the stack here, too.
"""

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

LAYER = re.compile(r"\blayers\.\d+\.")
EPSILON = 1e-8  # adamw
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
    """Whether weight decay touches a parameter: every weight but norms and biases."""
    return not any("norm" in part or part == "bias" for part in name.split("."))


def global_norm(gradients: dict[str, Tensor]) -> Tensor:
    """√Σ g² over every gradient, in float32."""
    return torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()


class Optimizer:
    """`adamw` (eps 1e-8, decoupled decay), `sgd` (momentum b1) or `adafactor` (optax's defaults).

    `clip_norm` scales the whole gradient to at most that norm before the update. `state` holds
    tensors by parameter name, and with `count`, the steps taken, is all that a resumption needs.
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, Tensor],
        *,
        b1: float,
        b2: float,
        weight_decay: float,
        clip_norm: float | None,
    ) -> None:
        self.name, self.parameters = name, parameters
        self.b1, self.b2, self.weight_decay, self.clip_norm = b1, b2, weight_decay, clip_norm
        self.count = 0
        self.state: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], learning_rate: float) -> None:
        """Change the parameters in place by one update from gradients of their dtype."""
        if self.clip_norm is not None:
            norm = global_norm(gradients)
            factor = torch.where(norm < self.clip_norm, 1.0, self.clip_norm / norm)
            gradients = {name: g * factor.to(g.dtype) for name, g in gradients.items()}
        if self.name == "adafactor":
            updates = self._adafactor(gradients, learning_rate)
        else:
            rule = self._adamw if self.name == "adamw" else self._sgd
            updates = {name: rule(name, g) * learning_rate for name, g in gradients.items()}
        for name, update in updates.items():
            self.parameters[name].sub_(update)
        self.count += 1

    def _moment(self, name: str, kind: str, like: Tensor) -> Tensor:
        """The tensor `kind` of a parameter's state, zeros at first."""
        mine = self.state.setdefault(name, {})
        if kind not in mine:
            mine[kind] = torch.zeros_like(like)
        return mine[kind]

    def _decay(self, name: str) -> Tensor | float:
        if not self.weight_decay or not decayed(name):
            return 0.0
        return self.weight_decay * self.parameters[name]

    def _adamw(self, name: str, g: Tensor) -> Tensor:
        """m̂/(√v̂ + ε) + λ·p, m and v the decaying means of g and g², hats their bias correction."""
        m, v = self._moment(name, "m", g), self._moment(name, "v", g)
        m.mul_(self.b1).add_(g, alpha=1 - self.b1)
        v.mul_(self.b2).addcmul_(g, g, value=1 - self.b2)
        time = self.count + 1
        unbiased = m / (1 - self.b1**time)
        scale = (v / (1 - self.b2**time)).sqrt_().add_(EPSILON)
        return unbiased / scale + self._decay(name)

    def _sgd(self, name: str, g: Tensor) -> Tensor:
        """The trace t ← g + λ·p + b1·t, not a mean."""
        g = g + self._decay(name)
        return self._moment(name, "trace", g).mul_(self.b1).add_(g)

    def _adafactor(self, gradients: dict[str, Tensor], learning_rate: float) -> dict[str, Tensor]:
        """Shazeer et al. 2018, per array of the stacked model; the decay is not scaled by the
        learning rate, as in optax."""
        updates = {}
        for array, names in stacks(gradients).items():
            stacked = "layers" in array.split(".")
            parts = [gradients[name] for name in names]
            g = torch.stack(parts) if stacked else parts[0]
            values = [self.parameters[name] for name in names]
            p = torch.stack(values) if stacked else values[0]
            u = self._unit_update(array, g)
            u = u / (u.square().mean().sqrt()).clamp_min(1.0)
            u = u * learning_rate * p.square().mean().sqrt().clamp_min(SMALLEST_SCALE)
            for name, update in zip(names, u if stacked else [u], strict=True):
                updates[name] = update + self._decay(name)
        return updates

    def _unit_update(self, array: str, g: Tensor) -> Tensor:
        """g/√v, v factored into a row and a column mean where two axes have 128 at least."""
        decay = 1 - (self.count + 1) ** -0.8
        square = g.square() + 1e-30
        order = sorted(range(g.ndim), key=lambda axis: g.shape[axis])
        if g.ndim < 2 or g.shape[order[-2]] < SMALLEST_FACTORED:
            v = self._moment(array, "v", g)
            v.mul_(decay).add_(square, alpha=1 - decay)
            return g / v.sqrt()
        small, large = order[-2:]
        row = self._moment(array, "row", square.mean(large))
        column = self._moment(array, "column", square.mean(small))
        row.mul_(decay).add_(square.mean(large), alpha=1 - decay)
        column.mul_(decay).add_(square.mean(small), alpha=1 - decay)
        axis = small - 1 if small > large else small
        row_factor = (row / row.mean(axis, keepdim=True)).rsqrt()
        return g * row_factor.unsqueeze(large) * column.rsqrt().unsqueeze(small)


def stacks(gradients: dict[str, Tensor]) -> dict[str, list[str]]:
    """Name of the stacked array → its parameters, by layer."""
    found: dict[str, list[str]] = {}
    for name in gradients:
        found.setdefault(LAYER.sub("layers.", name), []).append(name)
    return found
