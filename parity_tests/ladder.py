"""How every rung compares and how to read a failure, and what the rungs below the loss share.

The first broken rung names the culprit: norm, rotary, attention, layer, logits, loss, gradients,
optimizer, steps, resumed run, exported folder.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_distill.batch import Batch
from jax_distill.devices import QUICK_COMPILE

# Largest difference allowed, as a part of the largest entry: a few roundings of the dtype.
FP32, BF16 = 2e-6, 2e-2
# What rounding makes of a gradient (rung "gradients"), as a part of the largest entry G of its
# tensor: at most WORST·G, and a few roundings, FP32·G, on average over the tensor.
WORST = 1e-5
# Of a run's numbers, those that are means of many and keep 1e-6; a norm and the masses of
# probability are what a gradient is to a loss, and get 1e-5.
MEANS = (
    "loss",
    "kl",
    "cross_entropy",
    "learning_rate",
    "valid_tokens",
    "top1_agreement",
    "hidden_loss",
)
TIGHT = dict.fromkeys([*MEANS, *(f"val_{name}" for name in MEANS)], 1e-6)


def as_numpy(tensor: Any) -> np.ndarray:
    """A jax, torch or numpy array, or a number, in float32 or wider."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
    array = np.asarray(tensor)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def assert_close(
    rung: str,
    name: str,
    ours: Any,
    theirs: Any,
    tolerance: float = FP32,
    *,
    unit: float | np.ndarray | None = None,
    mean: float | None = None,
) -> None:
    """|ours − theirs| ≤ tolerance · unit everywhere, and ≤ mean · unit on average where `mean` is
    given; `unit` is max |theirs| where it is not, and may be one of each entry. Equal infinities
    are no difference; not finite where theirs is finite fails, and so does NaN. A failure says
    rung, tensor, largest and mean difference, where the largest is and what stands there (with
    units of the entries, where it is furthest beyond what is allowed)."""
    ours, theirs = as_numpy(ours), as_numpy(theirs)
    assert ours.shape == theirs.shape, f"{rung}: {name} {ours.shape} against {theirs.shape}"
    with np.errstate(invalid="ignore"):
        difference = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
    difference[np.isnan(difference)] = np.inf
    if unit is None:
        unit = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
    units = np.broadcast_to(unit, difference.shape)
    beyond = difference - tolerance * units
    where = tuple(map(int, np.unravel_index(beyond.argmax(), difference.shape)))
    average = np.inf if mean is None else mean * units.mean()
    assert beyond.max() <= 0 and difference.mean() <= average, (
        f"{rung}: {name} differs by {difference[where]:.3g} at {where} (ours {ours[where]:.8g}, "
        f"theirs {theirs[where]:.8g}), {difference.mean():.3g} on average; allowed "
        f"{tolerance * units[where]:.3g} ({tolerance:g} of {units[where]:.3g})"
        + ("" if mean is None else f" and {average:.3g} on average")
    )


class Drift:
    """How far one parameter of two runs of an optimizer may be apart, when rounding alone differs.

    `worst` is by entry, `usual` by entry what the average over the tensor goes by, `noise` the
    entries that have no say in this average. Adam moves an entry by lr·m̂/√v̂ whatever its gradient's
    size, so an entry whose gradient is not above the rounding error of its computation moves by a
    full learning rate in a direction that rounding chose, another one on another processor; and one
    such entry of 32 is more than all the others together. `worst` allows for it, entry by entry; on
    average, each other entry counts in units of its own `usual`.
    """

    def __init__(self) -> None:
        self.worst: Any = 0.0
        self.usual: Any = 0.0
        self.noise: Any = False
        self._largest: list[float] = []
        self._m: Any = 0.0

    def largest(self, g: Any) -> float:
        """G of this step's gradient or, where it was larger, of one before."""
        self._largest.append(float(np.abs(as_numpy(g)).max()))
        return max(self._largest)

    def add(self, rounding: Any, moved: Any, *, scale: float, turned: float) -> None:
        """One step more. rounding: of the step's own arithmetic. The update is scale · u; moved: by
        how much u differs at most, for each 1 by which gradients differ; at most by `turned`, when
        it points the other way."""
        self.noise = self.noise | (WORST * moved >= turned)
        self.worst = self.worst + rounding + scale * np.minimum(WORST * moved, turned)
        self.usual = self.usual + rounding + scale * np.minimum(FP32 * moved, turned)

    def adamw(self, m: Any, v: Any, weights: Any, rate: float, *, b1: float, b2: float) -> None:
        """One step of AdamW, from its moments (without bias correction) and weights after it.

        m̂ and v̂ are means of g and g² with weights c and d, of sum 1, over the steps so far. So by
        Cauchy and Schwarz |m̂|/√v̂ ≤ C = √Σ c²/d; and where gradients differ by at most x·G, m̂
        differs by x·Σ c·G, √v̂ (a norm of g) by x·√Σ d·G². With r = √v̂ + 1e-8,
        u' − u = (m̂' − m̂ − u'·(r' − r))/r, hence at most x·(Σ c·G + C·√Σ d·G²)/r, or 2·C.

        The step's own rounding: a half ulp of the weight in JAX and two in torch, which decays it
        first; and, of the update, each
        1 − bᵗ in float32 (a rounding of b, t times over, and two of the power, beside what is left
        of 1), and of each moment a rounding a step, of which the last 1/(1 − b) steps' remain.
        """
        m, v, weights = map(as_numpy, (m, v, weights))
        self.largest((m - b1 * self._m) / (1 - b1))
        self._m = m
        time, largest = len(self._largest), np.array(self._largest)
        ages = np.arange(time)[::-1]
        c, d = ((1 - b) / (1 - b**time) * b**ages for b in (b1, b2))
        steepest = np.sqrt((c**2 / d).sum())
        root = np.sqrt(v / (1 - b2**time)) + 1e-8
        eps = float(np.finfo(np.float32).eps)
        first, second = (
            (2 + time / 2) * b**time / (1 - b**time) + min(time, 1 / (1 - b)) for b in (b1, b2)
        )
        rounding = eps * (1.5 * np.abs(weights) + rate * steepest * (4 + first + second / 2))
        moved = c @ largest + steepest * np.sqrt(d @ largest**2)
        moved = np.where(v > 0, moved / root, 0.0)  # unseen tokens, padding: no gradient in either
        self.add(rounding, moved, scale=rate, turned=2 * steepest)


def assert_drift(rung: str, name: str, ours: Any, theirs: Any, drift: Drift) -> None:
    """Two runs' parameter is apart by what rounding explains: every entry by at most its `worst`,
    and those that are not noise by at most their `usual` on average.

    Noise is rare: a gradient within WORST·G of 0, where G is about three deviations, is one of
    40,000. So it is at most one entry of a small tensor, a run's chance of two in one of 32 being
    1e-5, and never what a comparison lives on: one in a hundred of a large one.
    """
    assert_close(rung, name, ours, theirs, 1.0, unit=drift.worst)
    share = max(0.01, 1 / np.size(drift.noise))
    assert_rare(rung, f"a gradient of {name} is noise", drift.noise, share)
    clear = ~np.broadcast_to(drift.noise, np.shape(as_numpy(theirs)))
    parts = np.abs(as_numpy(ours) - as_numpy(theirs)) / drift.usual
    average = parts[clear].mean() if clear.any() else 0.0
    assert average <= 1, (
        f"{rung}: {name} differs by {average:.3g} of what rounding explains, on average over the "
        f"{clear.sum()} of {clear.size} entries whose gradients are above it"
    )


def assert_numbers(
    rung: str,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    tolerance: float,
    **others: float,
) -> None:
    """`assert_close` of every number by its name, each relative to its own size; `others` are the
    tolerances of those that have one of their own."""
    assert ours.keys() == theirs.keys(), f"{rung}: {sorted(ours)} against {sorted(theirs)}"
    for name, value in theirs.items():
        assert_close(rung, name, ours[name], value, others.get(name, tolerance))


def assert_same(rung: str, name: str, ours: Any, theirs: Any, *, free: Any = False) -> None:
    """Equal bit for bit (but for 0 and −0), where `free` is not true. A failure says rung, tensor,
    how many entries differ, where the first is and what stands there."""
    ours, theirs = (
        x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in (ours, theirs)
    )
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, f"{rung}: {name} {ours.shape} against {theirs.shape}"
    wrong = (ours != theirs) & ~np.broadcast_to(free, ours.shape)
    where = tuple(map(int, np.unravel_index(wrong.argmax(), wrong.shape)))
    assert not wrong.any(), (
        f"{rung}: {name} differs in {wrong.sum()} of {wrong.size} entries, first at {where} "
        f"(ours {ours[where]}, theirs {theirs[where]})"
    )


def assert_rare(rung: str, name: str, flags: np.ndarray, share: float) -> None:
    """At most `share` of the flags are set."""
    where = tuple(map(int, np.unravel_index(flags.argmax(), flags.shape)))
    assert flags.mean() <= share, (
        f"{rung}: {name} in {flags.sum()} of {flags.size} entries, first at {where}; allowed "
        f"{share:g} of them"
    )


def assert_as_near(
    rung: str,
    name: str,
    ours: Any,
    theirs: Any,
    exact: Any,
    *,
    factor: float,
    rounding: float = 0.0,
) -> None:
    """‖ours − exact‖ ≤ factor · ‖theirs − exact‖ + rounding · ‖exact‖, Euclidean over the tensor:
    of two that round each in its own way, ours is about as near to what neither rounds. A failure
    says where ours is furthest from exact, too."""
    ours, theirs, exact = map(as_numpy, (ours, theirs, exact))
    error, their_error = np.abs(ours - exact), np.abs(theirs - exact)
    allowed = factor * np.linalg.norm(their_error) + rounding * np.linalg.norm(exact)
    where = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    assert np.linalg.norm(error) <= allowed, (
        f"{rung}: {name} is off by {np.linalg.norm(error):.3g} (theirs by "
        f"{np.linalg.norm(their_error):.3g}), {allowed:.3g} allowed; most at {where}, by "
        f"{error[where]:.3g} (ours {ours[where]:.8g}, theirs {theirs[where]:.8g}, exact "
        f"{exact[where]:.8g}), {error.mean():.3g} on average"
    )


def assert_same_targets(
    rung: str,
    ours: Batch,
    theirs: Batch,
    tolerance: float = 1e-4,
) -> None:
    """Two caches' rows, as `Cache.read` gives them: everything of the text equal, the same ids
    wherever the logits differ by more than rounding (a tenth of the tolerance), log-probabilities
    and tail to the tolerance. A gap that rounding leaves on the other side of a float16 step
    differs by that step besides."""
    for name in ("tokens", "labels", "mask", "segment_ids", "positions"):
        assert_same(rung, name, getattr(ours, name), getattr(theirs, name))
    assert ours.targets is not None and theirs.targets is not None
    temperature = theirs.targets.temperature
    assert ours.targets.temperature == temperature, rung
    assert_same(rung, "count", ours.targets.count, theirs.targets.count)
    ids, their_ids = ours.targets.indices, theirs.targets.indices
    real = np.arange(ids.shape[-1]) < theirs.targets.count[..., None]
    log_p, got = (np.where(real, x.targets.logprobs, 0.0) for x in (theirs, ours))
    # What may be swapped: neighbours closer than rounding, and the last with the first left out.
    close = np.zeros(ids.shape, bool)
    close[..., 1:] = np.abs(np.diff(log_p, axis=-1)) < tolerance / 10
    close[..., :-1] |= close[..., 1:]
    close[..., -1] = True
    assert_same(rung, "indices", ids, their_ids, free=close | ~real)
    assert_rare(rung, "other indices", (ids != their_ids)[real], 1e-3)
    gap = (log_p[..., :1] - log_p) * temperature
    step = np.where(real, np.spacing(gap.astype(np.float16)).astype(np.float32) / temperature, 0.0)
    assert_close(rung, "logprobs", got, log_p, 1.0, unit=tolerance + step)
    assert_rare(rung, "a float16 step in logprobs", np.abs(got - log_p) > tolerance, 0.01)
    assert_close(
        rung, "log_tail", ours.targets.log_tail, theirs.targets.log_tail, tolerance, unit=1.0
    )


def run_layer(stacked: nnx.Module, layer: int, *inputs: Any) -> Any:
    """One layer's module on its inputs, out of the stacked weights of all, as the decoder's scan
    runs it."""
    graphdef, weights = nnx.split(stacked)
    weights = jax.tree.map(lambda leaf: leaf[layer], weights)
    return _run(graphdef, weights, *jax.tree.map(jnp.asarray, inputs))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK_COMPILE)
def _run(graphdef, weights, *inputs):
    return nnx.merge(graphdef, weights)(*inputs)


def block_causal_mask(segment_ids: np.ndarray) -> torch.Tensor:
    """[B,T] → [B,1,T,T] for transformers' eager attention: 0 where t sees s, else very negative."""
    length = segment_ids.shape[1]
    seen = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    seen = seen & np.tril(np.ones((length, length), bool))
    return torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)
