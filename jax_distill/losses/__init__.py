"""The loss family of top-K distillation: hidden states, a head and a batch → LossSums.

For any JAX model; nothing of this project's model, config or training is needed:

    import jax
    import jax.numpy as jnp
    from jax_distill.batch import Batch, TopK
    from jax_distill.losses import Head, loss
    from jax_distill.objective import Execution, LossSums, Objective, TokenValues

    B, T, D, V, K = 2, 64, 32, 1000, 8
    key = jax.random.key(0)
    hidden = jax.random.normal(key, (B, T, D))                  # the model's, after its final norm
    weight = jax.random.normal(key, (V, D)) * D**-0.5           # Hugging Face's layout
    log_p = jax.nn.log_softmax(jax.random.normal(key, (B, T, V)))
    logprobs, indices = jax.lax.top_k(log_p, K)                 # a cache has these, and
    log_tail = jnp.log1p(-jnp.exp(logprobs).sum(-1))            # measured, not 1 − Σ
    batch = Batch(
        labels=jnp.zeros((B, T), jnp.int32),                    # tokens[t+1]
        mask=jnp.arange(T)[None, :] < jnp.array([[T], [T // 2]]),
        targets=TopK(indices, logprobs, log_tail, jnp.full((B, T), K), temperature=1.0),
    )

    def mean(hidden, weight):
        sums = loss(hidden, Head(weight), batch, Objective(tail="bucket"), Execution(chunk_size=32))
        return sums.loss / sums.count, sums

    step = jax.jit(jax.value_and_grad(mean, argnums=(0, 1), has_aux=True))
    (value, sums), (d_hidden, d_weight) = step(hidden, weight)

`fused`, the default, never holds more logits than a chunk of fp32 and one of bf16, and needs three
matmuls, no more than a dense loss does. A head that is not differentiated costs no gradient.
"""

from jax_distill.losses.full import FullTokenValues, full_token_values
from jax_distill.losses.head import Head, head_matmul
from jax_distill.losses.hidden import hidden_sum
from jax_distill.losses.interface import kl_and_grads, loss, token_values
from jax_distill.losses.layout import Layout
from jax_distill.losses.values import add_sums, zero_sums
from jax_distill.objective import LossSums, TokenValues

__all__ = [
    "FullTokenValues",
    "Head",
    "Layout",
    "LossSums",
    "TokenValues",
    "add_sums",
    "full_token_values",
    "head_matmul",
    "hidden_sum",
    "kl_and_grads",
    "loss",
    "token_values",
    "zero_sums",
]
