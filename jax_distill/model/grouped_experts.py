"""Experts by grouped matmuls: `mix_experts` with a kernel that takes all experts at once.

The k·N pairs of token and expert are sorted by expert, and two matmuls run over all of them, each
row by its own expert's matrix. Unlike in `experts.py` the k·N rows exist, [k·N, 2F] the largest.
The kernel is `ragged_dot` of jax-linear-attention (extra `hopper`); it wants widths that 128
divides, so rows and matrices are padded with zeros, gpt-oss's 2880 to 2944. One of the added inputs
is 1 and its weights are the bias: the kernel adds it, and its gradient comes with the matrix's.

Nothing is scattered: to permute rows back is a gather by the inverse, so a token's sum over its
experts has one order, and the numbers are the same at every run.

Letters: N tokens, D hidden, E experts, k of them a token, F their width, M = k·N.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_distill.attention.hopper import hopper_kernels, require_hopper

WIDTH = 128
"""What the kernel's widths must be multiples of."""
ROWS = 128
"""M at least."""


def hopper_ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """[M,A], [E,A,B], int32 [E] that add up to M → [M,B]: the rows of each expert, one after the
    other, by its matrix. bf16 or fp16; A and B multiples of WIDTH.

    Raises:
        UserError: the package, the GPU or the dtype is not what the kernel takes.
    """
    require_hopper("train.experts", "blocks", rows.dtype)
    with hopper_kernels("ragged_dot", "supports", True) as kernels:
        out: jax.Array = kernels.ragged_dot(rows, weights, sizes, full_groups=True)
    return out


def grouped_mix(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    parameters: Any,
    *,
    gate: Any,
    ragged_dot: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = hopper_ragged_dot,
) -> jax.Array:
    """`mix_experts` of one device: [N,D], int32 [N,k], [N,k], ExpertWeights → [N,D] in x's dtype.

    Results of the matmuls are rounded to x's dtype, where `experts.py` keeps fp32.
    """
    tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    turn = order, jnp.argsort(order).astype(jnp.int32)
    # The kernel wants ROWS at least: rows of zeros at the end, which the last expert gets.
    missing = max(ROWS - flat.size, 0)
    sizes = jnp.bincount(flat, length=parameters.down.shape[0]).astype(jnp.int32)
    sizes = sizes.at[-1].add(missing)
    wide = _wide(x.dtype)

    def matmul(rows: jax.Array, matrix: jax.Array, bias: jax.Array) -> jax.Array:
        inner, outer = (-(-n // WIDTH) * WIDTH for n in (matrix.shape[1] + 1, matrix.shape[2]))
        more, beside = inner - matrix.shape[1] - 1, outer - matrix.shape[2]
        stack = jnp.concatenate([matrix, bias[:, None]], axis=1).astype(x.dtype)
        stack = jnp.pad(stack, ((0, 0), (0, more), (0, beside)))
        one = jnp.ones((rows.shape[0], 1), x.dtype)
        rows = jnp.concatenate([rows.astype(x.dtype), one], axis=1)
        out = ragged_dot(jnp.pad(rows, ((0, missing), (0, more))), stack, sizes)
        return out[: flat.size, : matrix.shape[2]].astype(wide)

    rows = _spread(x, *turn, top_k)
    inner = gate(matmul(rows, parameters.gate_up, parameters.gate_up_bias))
    y = matmul(inner, parameters.down, parameters.down_bias)
    y = _permute(y.astype(x.dtype), turn[1], turn[0]).reshape(tokens, top_k, -1).astype(wide)
    return jnp.sum(y * weights.astype(wide)[:, :, None], axis=1).astype(x.dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@jax.custom_vjp
def _permute(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows[order]; backward the gather by the inverse."""
    return rows[order]


_permute.defvjp(
    lambda rows, order, inverse: (rows[order], inverse),
    lambda inverse, d_rows: (d_rows[inverse], None, None),
)


def _spread(x: jax.Array, order: jax.Array, inverse: jax.Array, top_k: int) -> jax.Array:
    """[N,D] → [k·N,D], the token of each sorted pair; backward a token's sum over its k in fp32."""

    @jax.custom_vjp
    def spread(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
        return x[order // top_k]

    def backward(inverse: jax.Array, d_rows: jax.Array) -> tuple[jax.Array, None, None]:
        by_token = d_rows[inverse].reshape(-1, top_k, d_rows.shape[-1])
        return (
            jnp.sum(by_token.astype(_wide(d_rows.dtype)), axis=1).astype(d_rows.dtype),
            None,
            None,
        )

    spread.defvjp(lambda x, order, inverse: (x[order // top_k], inverse), backward)
    return spread(x, order, inverse)
