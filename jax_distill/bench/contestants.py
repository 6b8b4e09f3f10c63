"""Our implementations as contestants of `bench peers`; see `process`."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill import losses
from jax_distill.bench.process import Outcome, run_contestant


def contestant(
    implementation: str,
    *,
    hidden: np.ndarray,
    lm_head: np.ndarray,
    labels: np.ndarray,
    teacher_indices: np.ndarray,
    teacher_logprobs: np.ndarray,
    teacher_log_tail: np.ndarray,
    chunk_size: np.ndarray,
    **_: np.ndarray,
) -> Callable[[], Outcome]:
    """Compiled before it is measured: hidden [T,D] and targets [T,K] become a batch of one row."""
    loss = losses.IMPLEMENTATIONS[implementation]
    batch = [jnp.asarray(x)[None] for x in (labels, np.ones(labels.shape, bool))]
    batch += [jnp.asarray(x)[None] for x in (teacher_indices, teacher_logprobs, teacher_log_tail)]
    batch.append(jnp.full((1, *labels.shape), teacher_indices.shape[-1], jnp.int32))

    def total(hidden, lm_head, *batch):
        return loss(hidden, lm_head, *batch, chunk_size=int(chunk_size)).loss

    inputs = [jnp.asarray(hidden)[None], jnp.asarray(lm_head), *batch]
    program = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*inputs).compile()

    def call() -> Outcome:
        value, (d_hidden, d_lm_head) = jax.block_until_ready(program(*inputs))
        return Outcome(float(value), np.asarray(d_hidden)[0], np.asarray(d_lm_head))

    return call


if __name__ == "__main__":
    run_contestant({name: partial(contestant, name) for name in losses.IMPLEMENTATIONS})
