"""The public functions: what does not fit is refused, then one of four implementations runs.

Letters: B rows, T positions, D hidden, V vocabulary, K stored tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from jax_distill.batch import Batch, TopK, check_loss_inputs
from jax_distill.objective import Execution, LossSums, Objective, TokenValues
from torch_ref.losses.chunked import Chunked, Saved, chunk_bounds, positions_of
from torch_ref.losses.dense import dense_values
from torch_ref.losses.head import Head, logits
from torch_ref.losses.objectives import sum_values

SAVES: dict[str, Saved] = {
    "forward_chunked": "logits",
    "fused_chunked": "nothing",
    "fused": "gradients",
}


def loss(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Objective = Objective(),
    execution: Execution = Execution(),
) -> LossSums:
    """Sums of the loss and its metrics over the valid tokens of a batch; nats.

    Args:
        hidden: [B,T,D], after the final norm; its dtype is that of the matmuls' operands, which
            accumulate in float32.
        head: the gradient of its weight has the weight's dtype and is accumulated in float32.
        batch: labels, mask, targets [B,T,..] of tensors, or a live teacher in their stead; neither
            with objective.kl_weight 0.
        objective: what is computed. execution: how; valid_first, row_shards and layout are JAX's.

    Raises:
        ValueError: what does not fit together, or a divergence without targets.
    """
    check_loss_inputs(hidden, head, batch, objective)
    head, batch = head.without_padding(), with_distribution(batch)
    if execution.implementation == "dense":
        return sum_values(dense_values(hidden, head, batch, objective), batch.mask)
    if not torch.is_grad_enabled():  # an autograd function cannot see that by itself
        hidden = hidden.detach()
        bias = None if head.bias is None else head.bias.detach()
        head = head._replace(weight=head.weight.detach(), bias=bias)
    size = execution.positions_per_chunk(*batch.mask.shape)
    saves = SAVES[execution.implementation]
    value, metrics = Chunked.apply(
        hidden, head.weight, head.bias, head, batch, objective, size, saves
    )
    return LossSums(value, *metrics)


def with_distribution(batch: Batch) -> Batch:
    """A live teacher's distribution as the K = V targets that it is; other batches as they are."""
    teacher = batch.teacher
    if teacher is None:
        return batch
    with torch.no_grad():
        real = torch.where(batch.mask[..., None], teacher.hidden, 0.0)
        z = logits(real.flatten(0, 1), teacher.head.without_padding())
        log_p = torch.log_softmax(z / teacher.temperature, -1).unflatten(0, batch.mask.shape)
    grid, size = batch.mask.shape, log_p.shape[-1]
    targets = TopK(
        indices=torch.arange(size, device=log_p.device).expand(*grid, size),
        logprobs=log_p,
        log_tail=log_p.new_full(grid, -torch.inf),
        count=torch.full(grid, size, device=log_p.device),
        temperature=teacher.temperature,
    )
    return replace(batch, targets=targets, teacher=None)


def token_values(
    hidden: Tensor,
    head: Head,
    batch: Batch,
    objective: Objective = Objective(),
    execution: Execution = Execution(),
) -> TokenValues:
    """Every token's loss and metrics [B,T], 0 where masked, by the definition, chunk by chunk;
    arguments and errors as `loss` has them."""
    check_loss_inputs(hidden, head, batch, objective)
    head, batch = head.without_padding(), with_distribution(batch)
    parts = [
        dense_values(hidden[:, chunk], head, positions_of(batch, chunk), objective)
        for chunk in chunk_bounds(batch, execution.positions_per_chunk(*batch.mask.shape))
    ]
    return TokenValues(*(torch.cat(values, 1) for values in zip(*parts, strict=True)))
