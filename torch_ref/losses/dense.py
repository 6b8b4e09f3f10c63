"""The definition: all N = B·T positions at once, differentiated by autograd."""

import math

import torch
from torch import Tensor

from jax_distill.batch import Batch
from jax_distill.objective import Objective, TokenValues
from torch_ref.losses.head import Head, logits
from torch_ref.losses.objectives import label_logit, read_targets, values_of


def dense_values(hidden: Tensor, head: Head, batch: Batch, objective: Objective) -> TokenValues:
    """[B,T] values from hidden [B,T,D]; the head without padding."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    targets = read_targets(batch, len(head.weight), dtype)
    z = logits(torch.where(targets.mask[:, None], hidden.flatten(0, 1), 0.0), head)
    log_q = torch.log_softmax(z / targets.temperature, -1)
    hits = torch.zeros(z.shape, dtype=torch.int8, device=z.device)
    inside = hits.scatter_add_(1, targets.ids, targets.real.to(torch.int8)) > 0
    values = values_of(
        targets,
        objective,
        log_q=torch.where(targets.real, log_q.gather(1, targets.ids), -math.inf),
        log_q_tail=log_q.masked_fill(inside, -math.inf).logsumexp(-1),
        log_z=z.logsumexp(-1),
        z_label=label_logit(z, targets.labels),
        student_top1=z.argmax(-1),
    )
    return TokenValues(*(x.unflatten(0, hidden.shape[:2]) for x in values))
