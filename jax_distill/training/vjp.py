"""`jax.vjp` that does not hold its arguments: the one place that uses `args_res` of JAX's VJP.

`args_res` is not documented. Tried with JAX 0.10.2, 0.11.x and 0.12.0.1; a JAX without it is
refused here, and gradients_test.py compares every number with `jax.grad`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jax_distill.base.errors import RunError

Out = TypeVar("Out")
Pullback = Any
"""What a function saved for its backward pass, a pytree: JAX's VJP, whose class is not public."""


def vjp_without_arguments(function: Callable[..., Out], *arguments: object) -> tuple[Out, Pullback]:
    """function(*arguments), and its pullback, to be used with `pull_back`.

    Raises:
        RunError: a JAX whose VJP has no `args_res`.
    """
    out, pullback = jax.vjp(function, *arguments)
    kept = getattr(pullback, "args_res", None)
    if not isinstance(kept, list) or len(kept) != len(arguments):
        raise RunError(
            f"expected JAX 0.10.2, 0.11 or 0.12, whose VJP has args_res, got {jax.__version__}; "
            "install one of these"
        )
    pullback.args_res = [None] * len(kept)  # type: ignore[attr-defined]
    return out, pullback


def pull_back(
    pullback: Pullback, arguments: tuple[object, ...], cotangent: object
) -> tuple[Any, ...]:
    """Cotangents of the arguments, which are the forward pass's own (float0 for integers)."""
    pullback.args_res = list(arguments)
    return tuple(pullback(cotangent))
