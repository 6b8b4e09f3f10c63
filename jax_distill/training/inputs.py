"""What the train loop reads for its steps: batches ahead of time, and their shapes."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jax_distill import sharding
from jax_distill.batch import Batch, TopK
from jax_distill.cache import Cache
from jax_distill.config import Config
from jax_distill.data import reader_options, row_indices

READ_AHEAD = 2
"""Batches on the devices beside the one at work: of the step that is dispatched ahead, and the one
after it."""


def batches(
    cache: Cache, config: Config, mesh: Mesh, *, first: int, steps: int
) -> Iterator[tuple[int, np.ndarray, Batch]]:
    """(step, rows, batch [A,B,T] on the devices) for steps first…steps−1; one is read ahead.

    The rows of a step follow from seed and step alone, so one integer resumes. Of several
    processes each reads those of its own devices.
    """
    train = config.train
    own_rows = sharding.own_rows(mesh, train.rows_per_micro_batch)

    def read(step: int) -> tuple[int, np.ndarray, Batch]:
        rows = row_indices(step, batch_size=train.batch_size, num_rows=cache.rows, seed=config.seed)
        own = rows.reshape(-1, train.rows_per_micro_batch)[:, own_rows]
        batch = cache.read(own.reshape(-1), **reader_options(config))
        batch = batch.micro_batches(len(own_rows))
        return step, rows, sharding.shard_batch(mesh, batch, leading=1)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        depth = READ_AHEAD - 1  # the loop holds another, dispatched ahead
        soon = range(first, min(first + depth, steps))
        ahead = deque(pool.submit(read, step) for step in soon)
        for step in range(first, steps):
            ready = ahead.popleft().result()
            if step + depth < steps:
                ahead.append(pool.submit(read, step + depth))
            yield ready


def batch_shapes(config: Config, row_sharding: Sharding, *, teacher_width: int = 0) -> Batch:
    """One step's batch [A,B,T] as the cache's reader gives it: A micro-batches of B rows of T
    tokens, K targets each, and the states of width D' that a hidden-state loss reads; leaves are
    jax.ShapeDtypeStruct."""
    train = config.train
    rows = train.rows_per_micro_batch
    grid = (train.batch_size // rows, rows, config.data.sequence_length)

    def shape(dtype: jnp.dtype, *axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*grid, *axes), dtype, sharding=row_sharding)

    targets = None
    if config.teacher.path and not config.teacher.is_live:
        top_k = config.cache.read_top_k or config.cache.stored_top_k
        targets = TopK(
            indices=shape(jnp.int32, top_k),
            logprobs=shape(jnp.float32, top_k),
            log_tail=shape(jnp.float32),
            count=shape(jnp.int32),
            temperature=config.loss.temperature,
            draws=shape(jnp.int32, top_k) if config.cache.is_random else None,
        )
    hidden = None if config.teacher.is_live else config.loss.hidden_objective()
    row = shape(jnp.int32)
    return Batch(
        labels=row,
        mask=shape(jnp.bool_),
        targets=targets,
        tokens=row,
        segment_ids=row,
        positions=row,
        teacher_layers=shape(jnp.bfloat16, len(hidden.pairs), teacher_width) if hidden else None,
    )
