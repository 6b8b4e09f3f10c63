"""`fused`: loss AND both gradients in one loop over chunks: three matmuls, nothing recomputed.

A loss is a scalar, so its gradients are known up to one factor before the backward begins
(gradients in the forward: Liger-Kernel, arXiv 2410.10989; Cut Cross-Entropy, arXiv 2411.09009).
The loop computes them while a chunk's logits are there: fp32 logits, one read for the logsumexps,
dlogits written once in the inputs' dtype, two matmuls. It holds one chunk of fp32 logits and the
dlogits of `merged` chunks, a group, whose gradients are one matmul each: d_weight is read and
written once a group. d_hidden is written over the hidden it came from; d_weight is fp32.

Letters: B rows, T positions, C positions of each row in one chunk, M of each in one group, D
hidden, V vocabulary, G gathered logits of a token.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from jax_distill.batch import Batch
from jax_distill.losses.chunks import Chunk, Cut, valid_first_order
from jax_distill.losses.dlogits import chunk_gradient, group_gradient
from jax_distill.losses.gradient import set_entries
from jax_distill.losses.head import Head, hidden_gradient, weight_gradient, zero_masked
from jax_distill.losses.layout import Layout
from jax_distill.losses.values import add_sums, sum_values, zero_sums
from jax_distill.objective import LossSums, Objective


class GradientRequest(NamedTuple):
    """Which gradients the loop computes; what is not requested costs nothing.

    pack_hidden: d_hidden of bf16 inputs is left in fp16 with a scale per token, for a backward that
    still has to multiply it. Rounded to bf16 here and once more there, it would lose half a digit:
    error 3.0e-3 where 2.4e-3 is what bf16 dlogits and one bf16 result cost.
    """

    hidden: bool
    weight: bool
    bias: bool
    pack_hidden: bool = False


class LoopState(NamedTuple):
    """The loop's carry.

    hidden [B,T,D] turns group by group into d_hidden, where that is requested; packed, it is both
    as uint16 bits, and hidden_scale fp32 [B,T] stands beside it. d_weight [V,D], d_bias [V] fp32.
    dlogits: the memory of a group's, [B,M,V], where a group is several chunks.
    """

    sums: LossSums
    hidden: jax.Array
    hidden_scale: jax.Array | None
    d_weight: jax.Array | None
    d_bias: jax.Array | None
    dlogits: jax.Array | None = None


def pack_fp16(d_hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """fp32 [..,D] → the bits of fp16 [..,D] between −1 and 1, and the scale [..] of each token."""
    largest = jnp.max(jnp.abs(d_hidden), axis=-1)
    scale = jnp.where(largest == 0.0, 1.0, largest)
    halves = (d_hidden / scale[..., None]).astype(jnp.float16)
    return jax.lax.bitcast_convert_type(halves, jnp.uint16), scale


def unpack_fp16(bits: jax.Array, scale: jax.Array) -> jax.Array:
    """fp32 [..,D], what `pack_fp16` was given to 11 bits."""
    halves = jax.lax.bitcast_convert_type(bits, jnp.float16)
    return halves.astype(jnp.float32) * scale[..., None]


def add_gradients(
    state: LoopState,
    chunk: Chunk,
    dlogits: jax.Array,
    hidden: jax.Array,
    weight: jax.Array,
    *,
    request: GradientRequest,
    axis: str | None,
) -> LoopState:
    """The two matmuls of a group: d_hidden over hidden, the group's share of d_weight added."""
    if request.hidden:
        d_hidden = hidden_gradient(dlogits, weight)
        if axis is not None:
            d_hidden = jax.lax.psum(d_hidden, axis)
        if state.hidden_scale is None:
            new = d_hidden.astype(hidden.dtype)
        else:
            new, scale = pack_fp16(d_hidden)
            state = state._replace(hidden_scale=chunk.write(state.hidden_scale, scale))
        state = state._replace(hidden=chunk.write(state.hidden, new))
    if state.d_weight is not None:
        state = state._replace(d_weight=state.d_weight + weight_gradient(dlogits, hidden))
    if state.d_bias is not None:
        d_bias = jnp.sum(dlogits, axis=(0, 1), dtype=jnp.float32)
        state = state._replace(d_bias=state.d_bias + d_bias)
    return state


def fused_loop(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    *,
    objective: Objective,
    cut: Cut,
    request: GradientRequest,
    axis: str | None = None,
) -> LoopState:
    """The loop over groups of `cut.merged` chunks of C positions.

    `axis`: the mesh axis that splits the head's weight [V/n,D] and bias [V/n], inside shard_map.
    """
    length, dtype = hidden.shape[1], hidden.dtype
    # The cast and the zeros depend on nothing else: XLA would make them before the model's layers.
    zero = jnp.zeros((), jnp.float32)
    hidden, table, zero = jax.lax.optimization_barrier((hidden, head.weight, zero))
    weight = table.astype(dtype)
    packed = request.hidden and request.pack_hidden and dtype == jnp.bfloat16
    trained = request.hidden or request.weight or request.bias
    group = min(cut.size * cut.merged, length) if trained else cut.size
    order, iterations = _turns(batch.mask, group, valid_first=cut.valid_first)
    gradient_of = partial(chunk_gradient, head=head, weight=weight, objective=objective, axis=axis)

    def step(index, state: LoopState) -> LoopState:
        here = Chunk(jnp.asarray(index, jnp.int32), group, length, order)
        part = batch.map(here.read)
        part = replace(part, mask=part.mask & here.is_new[None, :])

        def rows_of(hidden: jax.Array) -> jax.Array:
            rows = here.read(hidden)
            rows = jax.lax.bitcast_convert_type(rows, dtype) if packed else rows
            return zero_masked(rows, part.mask)

        if state.dlogits is None:
            rows = rows_of(state.hidden)
            values, made = gradient_of(rows, part)
            sums = sum_values(values, part.mask)
        else:
            source = partial(rows_of, state.hidden)
            sums, made = group_gradient(source, part, cut.size, gradient_of, buffer=state.dlogits)
            # The group's rows are for its matmuls: not needed beside the last chunk's logits.
            made, again = jax.lax.optimization_barrier((made, state.hidden))
            state, rows = state._replace(hidden=again), rows_of(again)
        state = state._replace(sums=add_sums(state.sums, sums))
        if not trained:
            return state
        dlogits = set_entries(*made)
        if state.dlogits is not None:
            state = state._replace(dlogits=dlogits)
        return add_gradients(state, here, dlogits, rows, weight, request=request, axis=axis)

    merged = group if group > cut.size else 0
    start = _start(hidden, weight, zero, request, packed=packed, group=merged)
    end = jax.lax.fori_loop(0, iterations, step, start)._replace(dlogits=None)
    if cut.valid_first and request.hidden:  # chunks that never ran still hold hidden
        nothing = jnp.zeros((), end.hidden.dtype)
        end = end._replace(hidden=jnp.where(batch.mask[..., None], end.hidden, nothing))
    return end


def _turns(
    mask: jax.Array, group: int, *, valid_first: bool
) -> tuple[jax.Array | None, int | jax.Array]:
    """The order of the positions [B,T], None as they stand, and how many groups the loop reads."""
    if not valid_first:
        return None, -(-mask.shape[1] // group)
    order = valid_first_order(mask)
    longest = jnp.max(jnp.sum(mask, axis=1, dtype=jnp.int32))
    return order, -(-longest // jnp.int32(group))


def _start(
    hidden: jax.Array,
    weight: jax.Array,
    zero: jax.Array,
    request: GradientRequest,
    *,
    packed: bool,
    group: int,
) -> LoopState:
    """zero: fp32, what the buffers are filled with. group: positions of each row whose dlogits are
    kept, 0 for one chunk's."""
    rows, vocab_size = hidden.shape[0], weight.shape[0]
    buffer = jnp.broadcast_to(zero.astype(hidden.dtype), (rows, group, vocab_size))
    return LoopState(
        zero_sums(),
        jax.lax.bitcast_convert_type(hidden, jnp.uint16) if packed else hidden,
        jnp.ones(hidden.shape[:2], jnp.float32) if packed else None,
        jnp.broadcast_to(zero, weight.shape) if request.weight else None,
        jnp.broadcast_to(zero, (vocab_size,)) if request.bias else None,
        buffer if group else None,
    )


def run_fused(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    request: GradientRequest,
    objective: Objective,
    cut: Cut,
    layout: Layout | None,
) -> LoopState:
    """`fused_loop`, over the devices of `layout` where there is one; hidden None where d_hidden is
    not requested."""

    def loop(hidden, head, batch, axis=None):
        end = fused_loop(
            hidden,
            head,
            batch,
            objective=objective,
            cut=cut,
            request=request,
            axis=axis,
        )
        return end._replace(hidden=end.hidden if request.hidden else None)

    if layout is not None:
        # Cast first: what is gathered of a head that is split over other axes too is narrow.
        head = replace(head, weight=head.weight.astype(hidden.dtype))
        loop = split_loop(loop, layout)
    return loop(hidden, head, batch)


def split_loop(loop: Callable[..., LoopState], layout: Layout) -> Callable[..., LoopState]:
    """`loop(hidden, head, batch, axis=)` of a device's part → the same of the whole arrays."""

    def local(hidden, head, batch):
        end = loop(hidden, head, batch, axis=layout.vocabulary)
        if not layout.rows:
            return end
        summed = jax.lax.psum((end.sums, end.d_weight, end.d_bias), layout.rows)
        sums, d_weight, d_bias = summed
        return end._replace(sums=sums, d_weight=d_weight, d_bias=d_bias)

    rows, vocabulary = P(layout.rows or None), P(layout.vocabulary)
    specs: list[Any] = [P(), rows, rows, vocabulary, vocabulary, P()]  # of LoopState's fields
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(rows, vocabulary, rows),
        out_specs=LoopState(*specs),
        check_vma=False,  # nothing is differentiated inside; what is equal everywhere is summed
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def fused_sums(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    objective: Objective,
    cut: Cut,
    layout: Layout | None,
) -> LossSums:
    """The sums; where nothing is differentiated only the forward runs."""
    nothing = GradientRequest(hidden=False, weight=False, bias=False)
    return run_fused(hidden, head, batch, nothing, objective, cut, layout).sums


def _fused_forward(hidden, head, batch, *static):
    # `perturbed` says which inputs are being differentiated: a frozen head makes no gradient.
    leaves = (hidden, head.weight, head.bias)
    perturbed = [leaf is not None and leaf.perturbed for leaf in leaves]
    values = jax.tree.map(lambda leaf: leaf.value, (hidden, head, batch))
    end = run_fused(*values, GradientRequest(*perturbed, pack_hidden=True), *static)
    like = jax.tree.map(lambda leaf: jnp.zeros((0,), leaf.dtype), values[:2])
    return end.sums, (end._replace(sums=None), like)


def _fused_backward(objective, cut, layout, saved, cotangent):
    end, (hidden, head) = saved
    if isinstance(cotangent.loss, SymbolicZero):
        return None, None, None
    d_hidden = end.hidden
    if end.hidden_scale is not None:
        d_hidden = unpack_fp16(end.hidden, end.hidden_scale)

    def scaled(gradient, primal):
        if gradient is None:
            return None
        return (gradient.astype(jnp.float32) * cotangent.loss).astype(primal.dtype)

    d_hidden = scaled(d_hidden, hidden)
    d_weight, d_bias = scaled(end.d_weight, head.weight), scaled(end.d_bias, head.bias)
    return d_hidden, replace(head, weight=d_weight, bias=d_bias), None


fused_sums.defvjp(_fused_forward, _fused_backward, symbolic_zeros=True)
