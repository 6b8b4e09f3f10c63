"""Our losses as processes of `bench peers`; see `base.process`."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill import losses
from jax_distill.base.process import Outcome, run_peer
from jax_distill.batch import Batch, TopK
from jax_distill.objective import IMPLEMENTATIONS, Execution, Objective


def compiled(
    implementation: str,
    *,
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    indices: np.ndarray,
    logprobs: np.ndarray,
    log_tail: np.ndarray,
    chunk_size: np.ndarray,
    **_: np.ndarray,
) -> Callable[[], Outcome]:
    """Value and gradients of the sum over hidden [1,T,D] and targets [1,T,K]; compiled before it is
    measured."""
    execution = Execution(implementation, chunk_size=int(chunk_size))
    count = np.full(labels.shape, indices.shape[-1], np.int32)
    targets = TopK(indices, logprobs, log_tail, count)
    batch = Batch(labels, np.ones(labels.shape, bool), targets).map(jnp.asarray)

    def total(hidden: jax.Array, weight: jax.Array, batch: Batch) -> jax.Array:
        return losses.loss(hidden, losses.Head(weight), batch, Objective(), execution).loss

    inputs = (jnp.asarray(hidden), jnp.asarray(weight), batch)
    program = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*inputs).compile()

    def call() -> Outcome:
        value, (d_hidden, d_weight) = jax.block_until_ready(program(*inputs))
        return Outcome(float(value), np.asarray(d_hidden)[0], np.asarray(d_weight))

    return call


if __name__ == "__main__":
    run_peer({name: partial(compiled, name) for name in IMPLEMENTATIONS})
