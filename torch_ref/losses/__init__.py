"""The distillation losses again, in PyTorch, written from the formula.

`loss(hidden, head, batch, objective, execution)` takes what `jax_distill.losses.loss` takes and
returns the same sums, so the two packages can be held against each other. `dense` is the
definition, differentiated by autograd. `forward_chunked`, `fused_chunked` (the paper's method,
arXiv 2608.03796) and `fused` are one autograd function around one chunk of positions; they differ
in what the forward leaves for the backward: the logits, nothing (the projection is recomputed), or
the finished gradients.

    z = soft_cap·tanh(logit_scale·(hidden·weightᵀ + bias) / soft_cap),    q = softmax(z/τ)
    loss = Σ_valid kl_weight·τ²·D(p, q) + ce_weight·(lse(z) − z_label) + z_loss_weight·lse(z)²
"""

from jax_distill.objective import LossSums, TokenValues
from torch_ref.losses.head import Head, logits
from torch_ref.losses.hidden import hidden_sum
from torch_ref.losses.interface import loss, token_values

__all__ = ["Head", "LossSums", "TokenValues", "hidden_sum", "logits", "loss", "token_values"]
