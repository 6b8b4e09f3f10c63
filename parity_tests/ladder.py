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
import tiny
import torch
from flax import nnx

# Largest difference allowed, as a part of the largest entry: a few roundings of the dtype.
FP32, BF16 = 2e-6, 2e-2
# Of a run's numbers, those that are means of many and keep 1e-6; a norm and the masses of
# probability are what a gradient is to a loss, and get 1e-5.
MEANS = ("loss", "kl", "cross_entropy", "learning_rate", "valid_tokens", "top1_agreement")
TIGHT = dict.fromkeys([*MEANS, *(f"heldout_{name}" for name in MEANS)], 1e-6)


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
        f"{rung}: {name} in {flags.sum()} of {flags.size} places, first at {where}; allowed "
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
    ours: Mapping[str, np.ndarray],
    theirs: Mapping[str, np.ndarray],
    *,
    temperature: float = 1.0,
) -> None:
    """Two stores' rows, as `Store.read` gives them: everything of the text equal, the same ids
    wherever the logits differ by more than rounding, log-probabilities and tail to 1e-4. A gap that
    rounding leaves on the other side of a float16 step differs by that step besides."""
    for name in ("tokens", "labels", "mask", "segment_ids", "positions", "teacher_count"):
        assert_same(rung, name, ours[name], theirs[name])
    ids, their_ids = ours["teacher_indices"], theirs["teacher_indices"]
    real = np.arange(ids.shape[-1]) < theirs["teacher_count"][..., None]
    log_p, got = (np.where(real, x["teacher_logprobs"], 0.0) for x in (theirs, ours))
    # What may swap places: neighbours closer than rounding, and the last with the first left out.
    close = np.zeros(ids.shape, bool)
    close[..., 1:] = np.abs(np.diff(log_p, axis=-1)) < 1e-5
    close[..., :-1] |= close[..., 1:]
    close[..., -1] = True
    assert_same(rung, "teacher_indices", ids, their_ids, free=close | ~real)
    assert_rare(rung, "other teacher_indices", (ids != their_ids)[real], 1e-3)
    gap = (log_p[..., :1] - log_p) * temperature
    step = np.where(real, np.spacing(gap.astype(np.float16)).astype(np.float32) / temperature, 0.0)
    assert_close(rung, "teacher_logprobs", got, log_p, 1.0, unit=1e-4 + step)
    assert_rare(rung, "a float16 step in teacher_logprobs", np.abs(got - log_p) > 1e-4, 0.01)
    tails = (x["teacher_log_tail"] for x in (ours, theirs))
    assert_close(rung, "teacher_log_tail", *tails, 1e-4, unit=1.0)


def run_layer(stacked: nnx.Module, layer: int, *inputs: Any) -> jax.Array:
    """One layer's module on its inputs, out of the stacked weights of all, as the decoder's scan
    runs it."""
    graphdef, weights = nnx.split(stacked)
    weights = jax.tree.map(lambda leaf: leaf[layer], weights)
    return _run(graphdef, weights, *map(jnp.asarray, inputs))


@functools.partial(jax.jit, static_argnums=0, compiler_options=tiny.QUICK_COMPILE)
def _run(graphdef, weights, *inputs):
    return nnx.merge(graphdef, weights)(*inputs)


def block_causal_mask(segment_ids: np.ndarray) -> torch.Tensor:
    """[B,T] → [B,1,T,T] for transformers' eager attention: 0 where t sees s, else very negative."""
    length = segment_ids.shape[1]
    seen = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    seen = seen & np.tril(np.ones((length, length), bool))
    return torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)
