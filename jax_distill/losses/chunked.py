"""`forward_chunked` and `fused_chunked`: two loops over chunks that JAX differentiates.

Both are of arXiv 2608.03796. `forward_chunked` keeps what the backward needs of every chunk, the
fp32 logits: [B,T,V] in all. `fused_chunked` keeps one chunk's and recomputes them in the backward,
a fourth matmul: a `jax.checkpoint`-wrapped body of a `lax.scan`.

Letters: B rows, T positions, C positions of each row in one chunk, D hidden, V vocabulary.
"""

import jax
import jax.numpy as jnp

from jax_distill.batch import Batch
from jax_distill.losses.chunks import split_chunks, take_positions, valid_first_order
from jax_distill.losses.gradient import values_of_chunk
from jax_distill.losses.head import Head, project
from jax_distill.losses.live import attach_head, detach_head
from jax_distill.losses.values import add_sums, sum_values, zero_sums
from jax_distill.objective import LossSums, Objective


def chunked_sums(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    objective: Objective,
    *,
    chunk: int,
    valid_first: bool,
    recompute: bool,
) -> LossSums:
    """`lax.scan` over chunks of C = `chunk` positions, B whole; `recompute`: under checkpoint.

    The last chunk is filled up with masked positions. `valid_first` sorts a copy of the inputs, and
    a chunk with nothing valid is skipped.
    """
    # The weight's gradient is summed over the chunks in fp32: see `project`.
    weight_fp32 = head.weight.astype(jnp.float32)
    weight = jax.lax.stop_gradient(head.weight).astype(hidden.dtype)

    batch, teacher_head = detach_head(batch)

    def chunk_sums(hidden, weight_fp32, batch):
        z = head.transform(project(hidden, weight, weight_fp32, batch.mask))
        values = values_of_chunk(z, attach_head(batch, teacher_head), head, objective)
        return sum_values(values, batch.mask)

    if recompute:
        chunk_sums = jax.checkpoint(chunk_sums, prevent_cse=False)

    def skip(*_):
        return zero_sums()

    def step(sums, inputs):
        hidden, batch = inputs
        if not valid_first:
            return add_sums(sums, chunk_sums(hidden, weight_fp32, batch)), None
        some = jnp.any(batch.mask)
        new = jax.lax.cond(some, chunk_sums, skip, hidden, weight_fp32, batch)
        return add_sums(sums, new), None

    inputs = (hidden, batch)
    if valid_first:
        order = valid_first_order(batch.mask)
        inputs = jax.tree.map(lambda x: take_positions(x, order), inputs)
    chunks = jax.tree.map(lambda x: split_chunks(x, chunk), inputs)
    return jax.lax.scan(step, zero_sums(), chunks)[0]
