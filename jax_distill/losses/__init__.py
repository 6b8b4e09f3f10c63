"""The loss family of top-K distillation: hidden states, a head and a store's arrays → LossSums.

For any JAX model; nothing of this project's model, config or training is needed:

    import jax
    import jax.numpy as jnp
    from jax_distill.losses import fused

    B, T, D, V, K = 2, 64, 32, 1000, 8
    key = jax.random.key(0)
    hidden = jax.random.normal(key, (B, T, D))                  # the model's, after its final norm
    lm_head = jax.random.normal(key, (V, D)) * D**-0.5          # Hugging Face's layout
    labels = jnp.zeros((B, T), jnp.int32)                       # tokens[t+1]
    mask = jnp.arange(T)[None, :] < jnp.array([[T], [T // 2]])  # is predicting it asked for?
    log_p = jax.nn.log_softmax(jax.random.normal(key, (B, T, V)))
    teacher_logprobs, teacher_indices = jax.lax.top_k(log_p, K)  # a store has these, and
    teacher_log_tail = jnp.log1p(-jnp.exp(teacher_logprobs).sum(-1))  # measured, not 1 − Σ
    teacher_count = jnp.full((B, T), K)

    def loss(hidden, lm_head):
        sums = fused(
            hidden, lm_head, labels, mask, teacher_indices, teacher_logprobs,
            teacher_log_tail, teacher_count, tail="bucket", chunk_size=16,
        )
        return sums.loss / sums.count, sums

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, sums), (d_hidden, d_lm_head) = step(hidden, lm_head)

`fused` never holds more logits than a chunk of fp32 and one of bf16, and makes three products, no
more than a dense loss does. A head that is not differentiated costs no gradient.
"""

from jax_distill.losses.interface import (
    IMPLEMENTATIONS,
    dense,
    forward_chunked,
    fused,
    fused_chunked,
    kl_and_grads,
    loss_sums,
)
from jax_distill.losses.layout import Layout
from jax_distill.losses.objectives import DIVERGENCES, LOG_FLOOR, TAILS, Objective
from jax_distill.losses.sums import LossSums

__all__ = [
    "DIVERGENCES",
    "IMPLEMENTATIONS",
    "LOG_FLOOR",
    "TAILS",
    "Layout",
    "LossSums",
    "Objective",
    "dense",
    "forward_chunked",
    "fused",
    "fused_chunked",
    "kl_and_grads",
    "loss_sums",
]
