"""Loss AND both gradients in one loop over chunks: three products, nothing recomputed.

A loss is a scalar, so its gradients are known up to one factor before the backward begins. The loop
makes them while a chunk's logits are there: fp32 logits, one read for the logsumexps, dlogits
written once in the inputs' dtype, two products. It holds one chunk of each. A chunk of d_hidden is
written over the chunk of hidden it came from, and the head's gradient is summed in fp32.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_distill.losses.chunks import Chunk, valid_first_order
from jax_distill.losses.layout import Layout
from jax_distill.losses.logits import Head, fp32_product, head_gradient, hidden_gradient
from jax_distill.losses.objectives import Columns, Objective, Targets, Terms, clean
from jax_distill.losses.rule import (
    Reading,
    TokenGradients,
    dz_outside,
    read_logits,
    set_columns,
    terms_and_gradients,
)
from jax_distill.losses.sums import LossSums, add_sums, sum_terms, zero_sums


class Wanted(NamedTuple):
    """Which gradients the loop makes; what is not wanted costs nothing."""

    hidden: bool
    lm_head: bool
    bias: bool


class Carry(NamedTuple):
    """The loop's state. hidden [B,T,D] turns chunk by chunk into d_hidden, where that is wanted."""

    sums: LossSums
    hidden: jax.Array
    d_lm_head: jax.Array | None
    d_bias: jax.Array | None


def read_chunk(
    z: jax.Array, columns: Columns, *, head: Head, objective: Objective, axis: str | None
) -> tuple[Reading, Terms, TokenGradients]:
    """What one chunk of finished logits costs, token by token, and the derivatives of that."""
    reading = read_logits(
        z,
        columns,
        vocab_size=head.vocab_size,
        temperature=objective.temperature,
        axis=axis,
    )
    terms, gradients = terms_and_gradients(
        reading, columns, vocab_size=head.vocab_size, objective=objective
    )
    return reading, terms, gradients


def narrow_dlogits(
    reading: Reading,
    gradients: TokenGradients,
    dtype: jnp.dtype,
    *,
    head: Head,
    objective: Objective,
) -> jax.Array:
    """[B,C,V] in `dtype`, the gradient of the head's product; the only write of that size."""
    dz = dz_outside(reading, gradients, objective)
    at_columns = gradients.z_g
    if head.bends:
        dz = jnp.where(reading.rest > -jnp.inf, dz * head.slope(reading.rest), 0.0)
        at_columns = at_columns * head.slope(reading.z_g)
    return set_columns(dz.astype(dtype), reading.local_ids, at_columns.astype(dtype))


def run_chunks(
    hidden: jax.Array,
    lm_head: jax.Array,
    bias: jax.Array | None,
    targets: Targets,
    *,
    head: Head,
    objective: Objective,
    chunk_size: int,
    valid_first: bool,
    wanted: Wanted,
    axis: str | None = None,
) -> Carry:
    """The loop. d_lm_head and d_bias fp32, d_hidden in hidden's dtype, None where not wanted.

    `axis`: the mesh axis that splits lm_head [V/n,D] and bias [V/n], inside shard_map.
    """
    positions = hidden.shape[1]
    size = min(chunk_size, positions)
    narrow_head = lm_head.astype(hidden.dtype)
    if valid_first:
        order = valid_first_order(targets.mask)
        longest = jnp.max(jnp.sum(targets.mask, axis=1, dtype=jnp.int32))
        count = -(-longest // jnp.int32(size))
    else:
        order, count = None, -(-positions // size)

    def step(index, carry: Carry) -> Carry:
        chunk = Chunk(jnp.asarray(index, jnp.int32), size, positions, order)
        part = jax.tree.map(chunk.take, targets)
        part = part._replace(mask=part.mask & chunk.fresh[None, :])
        columns = clean(part, vocab_size=head.vocab_size)
        raw = chunk.take(carry.hidden if wanted.hidden else hidden)
        rows = jnp.where(columns.mask[..., None], raw, jnp.zeros((), raw.dtype))
        z = head.finish(fp32_product(rows, narrow_head), bias)
        reading, terms, gradients = read_chunk(
            z, columns, head=head, objective=objective, axis=axis
        )
        sums = add_sums(carry.sums, sum_terms(terms, columns.mask))
        carry = carry._replace(sums=sums)
        if not any(wanted):
            return carry
        dlogits = narrow_dlogits(reading, gradients, rows.dtype, head=head, objective=objective)
        if wanted.hidden:
            d_rows = hidden_gradient(dlogits, narrow_head)
            if axis is not None:
                d_rows = jax.lax.psum(d_rows, axis)
            d_rows = jnp.where(chunk.fresh[None, :, None], d_rows.astype(rows.dtype), raw)
            carry = carry._replace(hidden=chunk.put(carry.hidden, d_rows))
        if carry.d_lm_head is not None:
            carry = carry._replace(d_lm_head=carry.d_lm_head + head_gradient(dlogits, rows))
        if carry.d_bias is not None:
            d_bias = jnp.sum(dlogits, axis=(0, 1), dtype=jnp.float32)
            carry = carry._replace(d_bias=carry.d_bias + d_bias)
        return carry

    start = Carry(
        zero_sums(),
        hidden,
        jnp.zeros(lm_head.shape, jnp.float32) if wanted.lm_head else None,
        jnp.zeros(lm_head.shape[:1], jnp.float32) if wanted.bias else None,
    )
    end = jax.lax.fori_loop(0, count, step, start)
    if valid_first and wanted.hidden:  # chunks that never ran still hold hidden
        zero = jnp.zeros((), hidden.dtype)
        end = end._replace(hidden=jnp.where(targets.mask[..., None], end.hidden, zero))
    return end


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def fused_sums(
    hidden: jax.Array,
    lm_head: jax.Array,
    bias: jax.Array | None,
    targets: Targets,
    head: Head,
    objective: Objective,
    chunk_size: int,
    valid_first: bool,
    layout: Layout | None,
) -> LossSums:
    """The sums; where nothing is differentiated only the forward runs."""
    loop = _loop(Wanted(False, False, False), head, objective, chunk_size, valid_first, layout)
    return loop(hidden, lm_head, bias, targets)[0]


def _loop(wanted, head, objective, chunk_size, valid_first, layout):
    """run_chunks with everything but the arrays filled in: → sums, d_hidden, d_lm_head, d_bias."""

    def loop(hidden, lm_head, bias, targets, axis=None):
        end = run_chunks(
            hidden,
            lm_head,
            bias,
            targets,
            head=head,
            objective=objective,
            chunk_size=chunk_size,
            valid_first=valid_first,
            wanted=wanted,
            axis=axis,
        )
        return end._replace(hidden=end.hidden if wanted.hidden else None)

    return loop if layout is None else layout.split(loop)


def _fused_forward(hidden, lm_head, bias, targets, *static):
    # `perturbed` says which inputs are being differentiated: a frozen head makes no gradient.
    wanted = Wanted(hidden.perturbed, lm_head.perturbed, bias is not None and bias.perturbed)
    values = jax.tree.map(lambda leaf: leaf.value, (hidden, lm_head, bias, targets))
    sums, *gradients = _loop(wanted, *static)(*values)
    dtypes = [None if x is None else jnp.zeros((0,), x.dtype) for x in values[:3]]
    return sums, (gradients, dtypes)


def _fused_backward(head, objective, chunk_size, valid_first, layout, saved, cotangent):
    gradients, dtypes = saved
    if isinstance(cotangent.loss, SymbolicZero):
        return None, None, None, None
    scaled = []
    for gradient, primal in zip(gradients, dtypes, strict=True):
        if gradient is not None:
            gradient = (gradient.astype(jnp.float32) * cotangent.loss).astype(primal.dtype)
        scaled.append(gradient)
    return *scaled, None


fused_sums.defvjp(_fused_forward, _fused_backward, symbolic_zeros=True)
