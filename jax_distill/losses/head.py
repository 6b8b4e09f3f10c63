"""A language-model head: the fp32 matmul, its two gradients, then bias, scale and soft-cap.

Letters: B rows, C positions of a chunk, D hidden, V rows of the head.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias"],
    meta_fields=["vocab_size", "soft_cap", "logit_scale"],
)
@dataclass(frozen=True)
class Head:
    """z = soft_cap·tanh(logit_scale·(hidden·weightᵀ + bias)/soft_cap).

    A pytree whose leaves are weight and bias.

    Attributes:
        weight: [V,D], Hugging Face's layout.
        bias: [V] or None.
        vocab_size: rows of the weight at and beyond it are padding and take no part; None: V.
        soft_cap, logit_scale: None where the model has none.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    vocab_size: int | None = None
    soft_cap: float | None = None
    logit_scale: float | None = None

    @property
    def real_vocab_size(self) -> int:
        """How many rows of the weight are tokens: vocab_size, or V."""
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size

    def transform(self, z: jax.Array) -> jax.Array:
        """fp32 logits [..,V] from the matmul's result z fp32 [..,V], padding included."""
        if self.bias is not None:
            z = z + self.bias.astype(jnp.float32).reshape((1,) * (z.ndim - 1) + self.bias.shape)
        if self.logit_scale is not None:
            z = z * self.logit_scale
        if self.soft_cap is not None:
            z = self.soft_cap * jnp.tanh(z / self.soft_cap)
        return z

    @property
    def shifts_only(self) -> bool:
        """Whether `transform` has derivative 1 everywhere."""
        return self.soft_cap is None and self.logit_scale is None

    def transform_derivative(self, logits: jax.Array) -> jax.Array | float:
        """The derivative of `transform`, as a function of the logits that it returned."""
        derivative: jax.Array | float = 1.0
        if self.soft_cap is not None:
            derivative = 1.0 - jnp.square(logits / self.soft_cap)
        return derivative if self.logit_scale is None else derivative * self.logit_scale


def head_matmul(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """hidden [B,C,D] · weight [V,D] → fp32 [B,C,V], operands in hidden's dtype."""
    return jnp.einsum(
        "bcd,vd->bcv", hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32
    )


def hidden_gradient(dlogits: jax.Array, weight: jax.Array) -> jax.Array:
    """fp32 [B,C,D] from dlogits [B,C,V] and weight [V,D], operands in dlogits' dtype."""
    return jnp.einsum(
        "bcv,vd->bcd", dlogits, weight.astype(dlogits.dtype), preferred_element_type=jnp.float32
    )


def weight_gradient(dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
    """fp32 [V,D] from dlogits [B,C,V] and hidden [B,C,D]."""
    return jnp.einsum("bcv,bcd->vd", dlogits, hidden, preferred_element_type=jnp.float32)


def zero_masked(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """hidden [B,C,D], 0 where mask [B,C] is False, whatever stood there."""
    return jnp.where(mask[..., None], hidden, jnp.zeros((), hidden.dtype))


@jax.custom_vjp
def project(
    hidden: jax.Array, weight: jax.Array, weight_fp32: jax.Array, mask: jax.Array
) -> jax.Array:
    """`head_matmul` of the rows in `mask`; its backward has bf16 operands and an fp32 result.

    JAX wants a cotangent of the primal's dtype, so a bf16 weight's gradient would be summed over
    the chunks in bf16 (error 1.8e-2 at 256 chunks). The gradient therefore goes to `weight_fp32`,
    the weight in fp32, whose value is never read and so never computed. What is kept for the
    backward is hidden as it came: neither selected rows nor a mask as wide as they are.
    """
    return head_matmul(zero_masked(hidden, mask), weight)


def _project_forward(hidden, weight, weight_fp32, mask):
    return project(hidden, weight, weight_fp32, mask), (hidden, weight, mask)


def _project_backward(saved, dlogits):
    hidden, weight, mask = saved
    dlogits = dlogits.astype(hidden.dtype)
    d_hidden = hidden_gradient(dlogits, weight).astype(hidden.dtype)
    d_weight = weight_gradient(dlogits, zero_masked(hidden, mask))
    return zero_masked(d_hidden, mask), None, d_weight, None


project.defvjp(_project_forward, _project_backward)
