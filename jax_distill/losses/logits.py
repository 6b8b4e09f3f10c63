"""From hidden states to logits: the one fp32 product, bias, scale, soft-cap, padding columns."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Head:
    """What a head does after its product: z = soft_cap·tanh(logit_scale·(x + bias)/soft_cap).

    vocab_size: columns at or beyond it are padding and take no part.
    """

    vocab_size: int
    soft_cap: float | None = None
    logit_scale: float | None = None

    def finish(self, product: jax.Array, bias: jax.Array | None) -> jax.Array:
        """z fp32 [.., V] from the head's product, padding columns included."""
        z = product
        if bias is not None:
            z = z + bias.astype(jnp.float32).reshape((1,) * (z.ndim - 1) + bias.shape)
        if self.logit_scale is not None:
            z = z * self.logit_scale
        if self.soft_cap is not None:
            z = self.soft_cap * jnp.tanh(z / self.soft_cap)
        return z

    @property
    def bends(self) -> bool:
        """Whether dz/dproduct is anything but 1."""
        return self.soft_cap is not None or self.logit_scale is not None

    def slope(self, z: jax.Array) -> jax.Array | float:
        """dz/dproduct at a finished logit; the derivative that `finish` asks of a gradient."""
        slope: jax.Array | float = 1.0
        if self.soft_cap is not None:
            slope = 1.0 - jnp.square(z / self.soft_cap)
        return slope if self.logit_scale is None else slope * self.logit_scale


def fp32_product(hidden: jax.Array, lm_head: jax.Array) -> jax.Array:
    """hidden [B,C,D] · lm_head [V,D] → fp32 [B,C,V], operands in hidden's dtype."""
    return jnp.einsum(
        "bcd,vd->bcv", hidden, lm_head.astype(hidden.dtype), preferred_element_type=jnp.float32
    )


def hidden_gradient(dlogits: jax.Array, lm_head: jax.Array) -> jax.Array:
    """fp32 [B,C,D] from dlogits [B,C,V]."""
    return jnp.einsum(
        "bcv,vd->bcd", dlogits, lm_head.astype(dlogits.dtype), preferred_element_type=jnp.float32
    )


def head_gradient(dlogits: jax.Array, hidden: jax.Array) -> jax.Array:
    """fp32 [V,D] from dlogits [B,C,V] and hidden [B,C,D]."""
    return jnp.einsum("bcv,bcd->vd", dlogits, hidden, preferred_element_type=jnp.float32)


def select_rows(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """hidden [B,C,D], 0 where mask [B,C] is False, whatever stood there."""
    return jnp.where(mask[..., None], hidden, jnp.zeros((), hidden.dtype))


@jax.custom_vjp
def project(hidden: jax.Array, lm_head: jax.Array, wide: jax.Array, mask: jax.Array) -> jax.Array:
    """`fp32_product` of the rows in `mask`, its backward on narrow operands into an fp32 sum.

    JAX wants a cotangent of the primal's dtype, so a bf16 head would be accumulated over the
    chunks in bf16 (error 1.8e-2 at 256 chunks). The head's gradient therefore goes to `wide`, the
    head in fp32, whose value is never read and so never made. What is kept for the backward is
    hidden as it came: not selected rows, nor a mask as wide as they are.
    """
    return fp32_product(select_rows(hidden, mask), lm_head)


def _project_forward(hidden, lm_head, wide, mask):
    return project(hidden, lm_head, wide, mask), (hidden, lm_head, mask)


def _project_backward(saved, dlogits):
    hidden, lm_head, mask = saved
    narrow = dlogits.astype(hidden.dtype)
    d_hidden = hidden_gradient(narrow, lm_head).astype(hidden.dtype)
    d_lm_head = head_gradient(narrow, select_rows(hidden, mask))
    return select_rows(d_hidden, mask), None, d_lm_head, None


project.defvjp(_project_forward, _project_backward)
