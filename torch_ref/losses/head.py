"""A language-model head and its logits.

Letters: N positions, D hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Head(NamedTuple):
    """z = soft_cap·tanh(logit_scale·(hidden·weightᵀ + bias)/soft_cap).

    weight [V,D]; bias [V] or None; rows at and beyond vocab_size are padding and take no part
    (None: V); soft_cap and logit_scale are None where the model has none.
    """

    weight: Tensor
    bias: Tensor | None = None
    vocab_size: int | None = None
    soft_cap: float | None = None
    logit_scale: float | None = None

    def without_padding(self) -> "Head":
        """The first vocab_size rows."""
        if self.vocab_size in (None, len(self.weight)):
            return self
        bias = None if self.bias is None else self.bias[: self.vocab_size]
        return self._replace(weight=self.weight[: self.vocab_size], bias=bias, vocab_size=None)

    def finish(self, product: Tensor) -> Tensor:
        """hidden·weightᵀ [N,V] → z: bias, then scale, then soft-cap."""
        z = product
        if self.bias is not None:
            z = z + self.bias.to(z.dtype)
        if self.logit_scale is not None:
            z = z * self.logit_scale
        return z if self.soft_cap is None else self.soft_cap * torch.tanh(z / self.soft_cap)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [N,M]·b [M,P] with a result of at least float32; only CUDA multiplies low precision so."""
    if a.dtype not in LOW_PRECISION:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class _Project(torch.autograd.Function):
    """hidden [N,D], weight [V,D] → hidden·weightᵀ [N,V], at least float32; every matmul, of the
    backward too, has its operands in hidden's dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return matmul(hidden, weight.to(hidden.dtype).T)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        d_logits = d_logits.to(hidden.dtype)
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            d_hidden = matmul(d_logits, weight.to(hidden.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = matmul(d_logits.T, hidden).to(weight.dtype)
        return d_hidden, d_weight


def logits(hidden: Tensor, head: Head) -> Tensor:
    """[N,D] → z [N, vocab_size], at least float32; the weight is rounded to hidden's dtype."""
    head = head.without_padding()
    return head.finish(_Project.apply(hidden, head.weight))
