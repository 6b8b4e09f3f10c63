"""`check=True`: what in the targets the formulas do not foresee, in one line."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill.losses.objectives import Targets


def report(targets: Targets, *, vocab_size: int) -> None:
    """Print to stderr how many valid labels and real teacher ids [B,T,K] are out of range or twice
    in their row, and where the first of each stands. Works inside jit. Silent where all is well."""
    mask, real = targets.mask, targets.stored()
    faults = {"labels out of range": mask & ~in_range(targets.labels, vocab_size)}
    if targets.teacher is not None:
        ids = targets.teacher.indices
        out = jnp.any(real & ~in_range(ids, vocab_size), axis=-1)
        faults["rows of teacher ids out of range (folded into the tail)"] = out
        faults["rows of teacher ids with duplicates (counted twice)"] = duplicated(ids, real)
    jax.debug.callback(partial(_print, list(faults), vocab_size), *faults.values())


def in_range(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Columns of the head."""
    return (ids >= 0) & (ids < vocab_size)


def duplicated(ids: jax.Array, real: jax.Array) -> jax.Array:
    """bool [B,T]: some id of [B,T,K] stands twice among the real ones."""
    # What is not real gets a value of its own, below every id.
    lowest = jnp.iinfo(jnp.int32).min
    own = lowest + jnp.arange(real.shape[-1], dtype=jnp.int32)[None, None, :]
    ids = jnp.sort(jnp.where(real, ids.astype(jnp.int32), own), axis=-1)
    return jnp.any(ids[..., 1:] == ids[..., :-1], axis=-1)


def _print(names: list[str], vocab_size: int, *faults: np.ndarray) -> None:
    for name, where in zip(names, faults, strict=True):
        if not where.any():
            continue
        row, position = np.argwhere(where)[0]
        print(
            f"jax_distill.losses: {int(where.sum())} {name}, vocab_size {vocab_size}; "
            f"first at row {row}, position {position}",
            file=sys.stderr,
        )
