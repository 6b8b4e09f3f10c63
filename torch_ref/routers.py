"""How many tokens a router sends to each expert, and the load-balancing term.

Letters: N = B·T tokens, E experts, k of them a token, L layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from jax_distill.base.errors import UserError
from torch_ref.model import Model


class RouterLoad(NamedTuple):
    """Of the real tokens, by layer and expert, fp32 [L,E]: how many were sent to it, and the sum of
    the probabilities that a softmax over all experts gives it."""

    assigned: Tensor
    probability: Tensor

    def balance(self) -> Tensor:
        """E · Σ_e f_e · P_e, the mean over the layers; f the share of what was sent, P the mean
        probability (Switch Transformer, arXiv 2101.03961, eqs. 4–6)."""
        share = self.assigned / self.assigned.sum(-1, keepdim=True).clamp(min=1)
        mean = self.probability / self.probability.detach().sum(-1, keepdim=True).clamp(min=1)
        return (share.shape[-1] * (share * mean).sum(-1)).mean()


class Routers:
    """Watches the routers of a gpt-oss; other models have none. `load` is that of a forward pass,
    `total` the sum since `clear`.

    Raises:
        UserError: none to watch where `weight`, that of the load-balancing term, is not 0.
    """

    def __init__(self, model: Model, weight: float):
        self.total: RouterLoad | None = None
        self.weight = weight
        self._logits: list[Tensor] = []
        routers = [m for m in model.modules() if isinstance(m, GptOssTopKRouter)]
        if weight and not routers:
            raise UserError(
                f"expected a student with experts for loss.router_weight {weight}, got "
                f"{type(model).__name__}; set it to 0"
            )
        self.top_k = [int(router.top_k) for router in routers]  # type: ignore[arg-type]
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, router: Any, inputs: Any, output: Any) -> None:
        self._logits.append(output[0])

    def clear(self) -> None:
        """Before the first micro-batch of a step."""
        self.total = None

    def begin(self) -> None:
        """Before a forward pass (recomputed layers are noted again, in the backward)."""
        self._logits.clear()

    def load(self, real: Tensor) -> RouterLoad | None:
        """Of the forward pass since `begin`; real [B,T] bool, not padding. None without experts."""
        if not self.top_k:
            return None
        found = [_load(*each, real) for each in zip(self._logits, self.top_k, strict=True)]
        load = RouterLoad(*map(torch.stack, zip(*found, strict=True)))
        more = RouterLoad(*(x.detach() for x in load))
        self.total = more if self.total is None else RouterLoad(*map(torch.add, self.total, more))
        return load

    def metrics(self) -> dict[str, float]:
        """`router_balance` and `router_largest_share` of `total`, as the JAX step logs them."""
        if self.total is None:
            return {}
        sent = self.total.assigned
        share = sent / sent.sum(-1, keepdim=True).clamp(min=1)
        balance = self.total.balance().item()
        return {"router_balance": balance, "router_largest_share": share.max().item()}


def _load(logits: Tensor, top_k: int, real: Tensor) -> RouterLoad:
    """Of one layer [E]."""
    logits = logits.reshape(-1, logits.shape[-1])[real.reshape(-1)].float()
    chosen = logits.topk(top_k, dim=-1).indices.reshape(-1)
    assigned = torch.bincount(chosen, minlength=logits.shape[-1]).float()
    return RouterLoad(assigned, logits.softmax(-1).sum(0))
