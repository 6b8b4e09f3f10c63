"""Mixture of experts: which experts a token goes to, and the sum of what they make of it.

The k·N pairs of token and expert are sorted by expert; each expert takes its own in blocks of C
rows, the last block partly empty: gathered from x, two dense matmuls, added to the output rows. No
array has k·N rows but indices, no copy of all experts' weights exists, and the gradient of an
expert's weights is summed in fp32 for that expert alone. With C = 512 at 32K tokens × top-4 of 32
experts at most 12.5 % of the rows are empty, 6 % on average. (`jax.lax.ragged_dot` has no grouped
kernel on XLA's GPUs: for gpt-oss it plans 45 GiB of temporaries at 8K tokens.)

Sums of a token over its experts go in the order of the experts: the same numbers at every run.

Letters: N tokens, D hidden, E experts, k of them a token, F their width, C rows of a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jax_distill.base.errors import UserError
from jax_distill.model.expert_mesh import ExpertSplit, mix_on_mesh, on_cpu
from jax_distill.model.grouped_experts import grouped_mix
from jax_distill.model.mxfp4 import Packed, decode
from jax_distill.sharding import row_shards

ExpertsImplementation = Literal["blocks", "hopper", "ragged"]
BLOCK = 512  # rows; fewer where an expert has fewer
Carry = TypeVar("Carry")


class Gate(NamedTuple):
    """(up + 1) · gate · σ(alpha · gate), gate at most `limit`, up within ±`limit` (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate_up: jax.Array) -> jax.Array:
        """[C,2F], gate and up in turn → [C,F]."""
        gate = jnp.minimum(gate_up[:, ::2], self.limit)
        up = jnp.clip(gate_up[:, 1::2], -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class ExpertWeights(NamedTuple):
    """gate_up [E,D,2F] and its bias [E,2F], down [E,F,D] and its bias [E,D]. Packed matrices are
    decoded one expert at a time and have no gradient."""

    gate_up: jax.Array | Packed
    gate_up_bias: jax.Array
    down: jax.Array | Packed
    down_bias: jax.Array

    @property
    def is_packed(self) -> bool:
        return isinstance(self.down, Packed)


class RouterLoad(NamedTuple):
    """Of the real tokens, by expert, fp32 [..,E]: how many were sent to it, and the sum of the
    probabilities that a softmax over all experts gives it."""

    assigned: jax.Array
    probability: jax.Array

    def balance(self) -> jax.Array:
        """The load-balancing term, a scalar: E · Σ_e f_e · P_e, the mean over the leading axes; f
        the share of what was sent, P the mean probability; 1 where all experts get the same.
        Gradients flow through P (Switch Transformer, arXiv 2101.03961, eqs. 4–6)."""
        share = self.assigned / jnp.maximum(self.assigned.sum(-1, keepdims=True), 1.0)
        tokens = jnp.maximum(self.probability.sum(-1, keepdims=True), 1.0)
        mean = self.probability / jax.lax.stop_gradient(tokens)
        return jnp.mean(share.shape[-1] * jnp.sum(share * mean, axis=-1))


def route(
    logits: jax.Array, real: jax.Array, *, top_k: int
) -> tuple[jax.Array, jax.Array, RouterLoad]:
    """Router logits fp32 [N,E], real [N] bool → the k largest's experts int32 [N,k], their weights
    fp32 [N,k], a softmax over these k alone, and the load of the real tokens."""
    values, experts = jax.lax.top_k(logits, top_k)
    count = logits.shape[-1]
    sent = jnp.where(real[:, None], experts, count)  # padding: dropped
    assigned = jnp.zeros(count, jnp.float32).at[sent.reshape(-1)].add(1.0, mode="drop")
    probability = jnp.where(real[:, None], jax.nn.softmax(logits, axis=-1), 0.0).sum(axis=0)
    return experts, jax.nn.softmax(values, axis=-1), RouterLoad(assigned, probability)


def mix_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    parameters: ExpertWeights,
    *,
    gate: Gate,
    block: int | None = None,
    row_sharding: NamedSharding | None = None,
    implementation: ExpertsImplementation = "blocks",
) -> jax.Array:
    """Σ_k weights · (down(gate(gate_up(x))) of the token's experts): [N,D] → [N,D] in x's dtype.

    Matmuls take x's dtype and accumulate in fp32; all else is fp32 (float64 for float64).

    Args:
        experts: int32 [N,k], different ones for each token.
        weights: [N,k].
        block: C; None is at most BLOCK, and about an expert's share.
        row_sharding: how the N rows are split; the mesh's `expert` splits E and `tensor` splits F
            where they divide them, see `expert_mesh.py`.
        implementation: `blocks`, this file, or `hopper`, the kernels of grouped_experts.py
            (packed matrices run in blocks all the same: the kernels do not decode them);
            `ragged` is `blocks`, with the rows of an `expert` group sent by ragged_exchange.py.

    Raises:
        UserError: `hopper` with E split: its kernel has no rows without an expert. `ragged` with E
            split over CPUs.
    """
    mesh = None if row_sharding is None else row_sharding.mesh
    if mesh is not None and (mesh.size == 1 or x.shape[0] % row_shards(mesh)):
        mesh = None
    count, inner = parameters.down_bias.shape[0], parameters.gate_up_bias.shape[1] // 2
    split = ExpertSplit.of(mesh, experts=count, widths=1 if parameters.is_packed else inner)
    refused = implementation == "hopper" or (implementation == "ragged" and on_cpu(mesh))
    if refused and split.group:
        raise UserError(
            "expected train.experts blocks where mesh.expert splits a layer's experts (ragged "
            f"needs GPUs), got {implementation}; set mesh.expert 1, or train.experts blocks"
        )
    split = split._replace(ragged=implementation == "ragged")
    if block is None:
        shards = 1 if mesh is None else row_shards(mesh) // split.group_size
        share = experts.size // shards // count
        block = min(BLOCK, max(8, 1 << max(share.bit_length() - 1, 0)))

    def mix(*inputs: Any) -> jax.Array:
        if implementation == "hopper" and not parameters.is_packed:
            return grouped_mix(*inputs, gate=gate)
        return _mix(*inputs, gate, block)

    if mesh is None:
        return mix(x, experts, weights, parameters)
    return mix_on_mesh(mix, split, x, experts, weights, parameters)


class _Rows(NamedTuple):
    """The rows of a block: tokens and pairs [C]; of rows past the end, each a number of its own
    that is none of them."""

    tokens: jax.Array
    pairs: jax.Array


def _sorted_pairs(experts: jax.Array, count: int, block: int) -> tuple[jax.Array, ...]:
    """The pairs' numbers (token · k + which) by expert [k·N + C], and where each expert's begin and
    end [E] twice; ids outside of 0…E−1 are other devices' experts."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    bounds = jnp.searchsorted(flat[order], jnp.arange(count + 1, dtype=flat.dtype))
    bounds = bounds.astype(jnp.int32)
    return jnp.pad(order, (0, block)), bounds[:-1], bounds[1:]


def _block_rows(
    order: jax.Array, first: jax.Array, end: jax.Array, *, shape: tuple[int, int], block: int
) -> _Rows:
    tokens, top_k = shape
    row = jnp.arange(block, dtype=jnp.int32)
    pairs = jax.lax.dynamic_slice_in_dim(order, first, block)
    real = first + row < end
    return _Rows(
        jnp.where(real, pairs // top_k, tokens + row),
        jnp.where(real, pairs, tokens * top_k + row),
    )


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


def _add(x: jax.Array, index: jax.Array, more: jax.Array) -> jax.Array:
    return x.at[index].add(more, mode="drop", unique_indices=True)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _matmul(left: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    right = right.T if transposed else right
    return jnp.matmul(left, right, preferred_element_type=_wide(right.dtype))


def _dense(weight: jax.Array | Packed, dtype: jnp.dtype) -> jax.Array:
    return (decode(weight) if isinstance(weight, Packed) else weight).astype(dtype)


def _each_block(
    begin: jax.Array,
    end: jax.Array,
    block: int,
    turn: Callable[[jax.Array, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`turn(first row, carry)` for each block of the rows begin…end−1 of one expert."""
    count = (end - begin + block - 1) // block
    return jax.lax.fori_loop(0, count, lambda i, carry: turn(begin + i * block, carry), carry)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _mix(x, experts, weights, parameters, gate, block):
    order, *bounds = _sorted_pairs(experts, parameters.down_bias.shape[0], block)
    wide = _wide(x.dtype)
    # Transposed only where the matmul can read it so: before the loop over blocks XLA would rather
    # transpose the packed weights of all layers, into a copy.
    matmul = partial(_matmul, transposed=isinstance(parameters.down, Packed))

    def expert(out: jax.Array, turn: tuple) -> tuple[jax.Array, None]:
        begin, end, own = turn
        gate_up, bias, down, down_bias = (_dense(w, x.dtype) for w in own)

        def add_block(first: jax.Array, out: jax.Array) -> jax.Array:
            rows = _block_rows(order, first, end, shape=experts.shape, block=block)
            inner = gate(matmul(_take(x, rows.tokens), gate_up) + bias.astype(wide)[None])
            y = matmul(inner.astype(x.dtype), down) + down_bias.astype(wide)[None]
            weight = _take(weights.reshape(-1), rows.pairs).astype(wide)
            return _add(out, rows.tokens, y * weight[:, None])

        return _each_block(begin, end, block, add_block, out), None

    out, _ = jax.lax.scan(expert, jnp.zeros(x.shape, wide), (*bounds, parameters))
    return out.astype(x.dtype)


def _forward(x, experts, weights, parameters, gate, block):
    return _mix(x, experts, weights, parameters, gate, block), (x, experts, weights, parameters)


def _backward(gate, block, saved, d_out):
    """Everything between x and the output is recomputed block by block. An expert's gradients are
    summed in fp32 in the carry of its blocks and leave it in the parameters' dtype."""
    x, experts, weights, parameters = saved
    order, *bounds = _sorted_pairs(experts, parameters.down_bias.shape[0], block)
    wide = _wide(x.dtype)

    def expert(carry: tuple, turn: tuple) -> tuple[tuple, ExpertWeights]:
        begin, end, own = turn
        gate_up, bias, down, down_bias = (w.astype(x.dtype) for w in own)

        def add_block(first: jax.Array, carry: tuple) -> tuple:
            d_x, d_weights, total = carry
            rows = _block_rows(order, first, end, shape=experts.shape, block=block)
            some, d_some = _take(x, rows.tokens), _take(d_out, rows.tokens)
            weight = _take(weights.reshape(-1), rows.pairs).astype(wide)
            inner, pull = jax.vjp(gate, _matmul(some, gate_up) + bias.astype(wide)[None])
            inner = inner.astype(x.dtype)
            y = _matmul(inner, down) + down_bias.astype(wide)[None]
            d_weight = jnp.sum(d_some.astype(wide) * y, axis=-1)
            d_y = d_some.astype(wide) * weight[:, None]
            (d_inner,) = pull(_matmul(d_y.astype(x.dtype), down.T))
            d_narrow = d_inner.astype(x.dtype)
            total = ExpertWeights(
                total.gate_up + _matmul(some.T, d_narrow),
                total.gate_up_bias + d_inner.sum(axis=0),
                total.down + _matmul(inner.T, d_y.astype(x.dtype)),
                total.down_bias + d_y.sum(axis=0),
            )
            d_x = _add(d_x, rows.tokens, _matmul(d_narrow, gate_up.T))
            return d_x, _add(d_weights, rows.pairs, d_weight), total

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, wide), own)
        d_x, d_weights, total = _each_block(begin, end, block, add_block, (*carry, zeros))
        return (d_x, d_weights), jax.tree.map(lambda g, w: g.astype(w.dtype), total, own)

    start = jnp.zeros(x.shape, wide), jnp.zeros(weights.size, wide)
    (d_x, d_weights), d_parameters = jax.lax.scan(expert, start, (*bounds, parameters))
    d_weights = d_weights.reshape(weights.shape).astype(weights.dtype)
    return d_x.astype(x.dtype), None, d_weights, d_parameters


_mix.defvjp(_forward, _backward)
