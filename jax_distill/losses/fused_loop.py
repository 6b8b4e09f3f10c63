"""Loss AND both gradients in one loop over chunks: three products, nothing recomputed.

A loss is a scalar, so its gradients are known up to one factor before the backward begins. The loop
makes them while a chunk's logits are there: fp32 logits, one read for the logsumexps, dlogits
written once in the inputs' dtype, two products. It holds one chunk of each. A chunk of d_hidden is
written over the chunk of hidden it came from, and the head's gradient is summed in fp32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_distill.losses.carry import Carry, Wanted, pack_rows, unpack_rows
from jax_distill.losses.chunks import Chunk, valid_first_order
from jax_distill.losses.layout import Layout
from jax_distill.losses.logits import (
    Head,
    fp32_product,
    head_gradient,
    hidden_gradient,
    select_rows,
)
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


def add_gradients(
    carry: Carry,
    chunk: Chunk,
    dlogits: jax.Array,
    rows: jax.Array,
    narrow_head: jax.Array,
    *,
    wanted: Wanted,
    axis: str | None,
) -> Carry:
    """The two products of a chunk: d_hidden into the place of hidden, the head's share added."""
    if wanted.hidden:
        d_rows = hidden_gradient(dlogits, narrow_head)
        if axis is not None:
            d_rows = jax.lax.psum(d_rows, axis)
        if carry.row_scale is None:
            new = d_rows.astype(rows.dtype)
        else:
            new, scale = pack_rows(d_rows)
            carry = carry._replace(row_scale=chunk.put_fresh(carry.row_scale, scale))
        carry = carry._replace(rows=chunk.put_fresh(carry.rows, new))
    if carry.d_lm_head is not None:
        carry = carry._replace(d_lm_head=carry.d_lm_head + head_gradient(dlogits, rows))
    if carry.d_bias is not None:
        d_bias = jnp.sum(dlogits, axis=(0, 1), dtype=jnp.float32)
        carry = carry._replace(d_bias=carry.d_bias + d_bias)
    return carry


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
    """The loop. d_lm_head and d_bias fp32; None where not wanted.

    `axis`: the mesh axis that splits lm_head [V/n,D] and bias [V/n], inside shard_map.
    """
    positions, dtype = hidden.shape[1], hidden.dtype
    size = min(chunk_size, positions)
    narrow_head = lm_head.astype(dtype)
    packed = wanted.hidden and wanted.packed and dtype == jnp.bfloat16
    order, count = None, -(-positions // size)
    if valid_first:
        order = valid_first_order(targets.mask)
        longest = jnp.max(jnp.sum(targets.mask, axis=1, dtype=jnp.int32))
        count = -(-longest // jnp.int32(size))

    def step(index, carry: Carry) -> Carry:
        chunk = Chunk(jnp.asarray(index, jnp.int32), size, positions, order)
        part = jax.tree.map(chunk.take, targets)
        part = part._replace(mask=part.mask & chunk.fresh[None, :])
        columns = clean(part, vocab_size=head.vocab_size)
        rows = chunk.take(carry.rows)
        if packed:
            rows = jax.lax.bitcast_convert_type(rows, dtype)
        rows = select_rows(rows, columns.mask)
        z = head.finish(fp32_product(rows, narrow_head), bias)
        reading, terms, gradients = read_chunk(
            z, columns, head=head, objective=objective, axis=axis
        )
        carry = carry._replace(sums=add_sums(carry.sums, sum_terms(terms, columns.mask)))
        if not (wanted.hidden or wanted.lm_head or wanted.bias):
            return carry
        dlogits = narrow_dlogits(reading, gradients, dtype, head=head, objective=objective)
        return add_gradients(carry, chunk, dlogits, rows, narrow_head, wanted=wanted, axis=axis)

    start = Carry(
        zero_sums(),
        jax.lax.bitcast_convert_type(hidden, jnp.uint16) if packed else hidden,
        jnp.ones(hidden.shape[:2], jnp.float32) if packed else None,
        jnp.zeros(lm_head.shape, jnp.float32) if wanted.lm_head else None,
        jnp.zeros(lm_head.shape[:1], jnp.float32) if wanted.bias else None,
    )
    end = jax.lax.fori_loop(0, count, step, start)
    if valid_first and wanted.hidden:  # chunks that never ran still hold hidden
        nothing = jnp.zeros((), end.rows.dtype)
        end = end._replace(rows=jnp.where(targets.mask[..., None], end.rows, nothing))
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
    nothing = Wanted(hidden=False, lm_head=False, bias=False)
    loop = _loop(nothing, head, objective, chunk_size, valid_first, layout)
    return loop(hidden, lm_head, bias, targets).sums


def _loop(wanted, head, objective, chunk_size, valid_first, layout):
    """run_chunks with everything but the arrays filled in."""

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
        return end._replace(rows=end.rows if wanted.hidden else None)

    return loop if layout is None else layout.split(loop)


def _fused_forward(hidden, lm_head, bias, targets, *static):
    # `perturbed` says which inputs are being differentiated: a frozen head makes no gradient.
    perturbed = [x is not None and x.perturbed for x in (hidden, lm_head, bias)]
    values = jax.tree.map(lambda leaf: leaf.value, (hidden, lm_head, bias, targets))
    end = _loop(Wanted(*perturbed, packed=True), *static)(*values)
    dtypes = [None if x is None else jnp.zeros((0,), x.dtype) for x in values[:3]]
    return end.sums, (end._replace(sums=None), dtypes)


def _fused_backward(head, objective, chunk_size, valid_first, layout, saved, cotangent):
    end, dtypes = saved
    if isinstance(cotangent.loss, SymbolicZero):
        return None, None, None, None
    d_hidden = end.rows if end.row_scale is None else unpack_rows(end.rows, end.row_scale)
    scaled = []
    for gradient, primal in zip((d_hidden, end.d_lm_head, end.d_bias), dtypes, strict=True):
        if gradient is not None:
            gradient = (gradient.astype(jnp.float32) * cotangent.loss).astype(primal.dtype)
        scaled.append(gradient)
    return *scaled, None


fused_sums.defvjp(_fused_forward, _fused_backward, symbolic_zeros=True)
