"""The public functions: what does not fit together is refused, then one implementation runs.

Letters: B rows, T positions, D hidden, V vocabulary, K stored tokens.
"""

from dataclasses import replace

import jax

from jax_distill.batch import Batch, check_loss_inputs
from jax_distill.losses import pytrees as _pytrees  # noqa: F401  (registers Batch and TopK)
from jax_distill.losses.chunked import chunked_sums
from jax_distill.losses.chunks import Cut, map_chunks
from jax_distill.losses.dense import dense_values
from jax_distill.losses.fused import GradientRequest, fused_sums, run_fused
from jax_distill.losses.gradient import values_of_chunk
from jax_distill.losses.head import Head, head_matmul, zero_masked
from jax_distill.losses.layout import Layout
from jax_distill.losses.live import attach_head, detach_head
from jax_distill.losses.values import sum_values
from jax_distill.objective import Execution, LossSums, Objective, TokenValues


@jax.named_scope("loss")  # profiles and plans find its buffers by this name
def loss(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    objective: Objective = Objective(),
    execution: Execution = Execution(),
) -> LossSums:
    """Sums of the loss and of its metrics over the valid tokens of a batch, in nats.

    Per token kl_weight·τ²·divergence + ce_weight·cross-entropy + z_loss_weight·lse(z)², where
    z = head(hidden) and q = softmax(z/τ). The divergence is, unless `objective` says otherwise,

        Σ_K p_k log(p_k/q_k) + p_t log(p_t/q_t),     p_t = exp(log_tail),     q_t = 1 − Σ_K q_k

    over the K stored ids and the rest; `Objective` has the others. `sums.loss / sums.count` is the
    mean to train on: count is that of the whole optimizer step, whatever the micro-batches.

    Args:
        hidden: [B,T,D], the model's output after its final norm, fp32 or bf16. The matmuls have
            operands of this dtype and accumulate in fp32; its gradient has this dtype.
        head: weight [V,D], and perhaps bias, soft-cap, scale and padding. The weight's gradient
            has the weight's dtype and is accumulated in fp32 over the chunks; a head that is not
            differentiated costs none.
        batch: labels and mask [B,T]; targets, which carry their temperature τ, or None beside
            kl_weight 0; or a live teacher in their stead, whose divergence is over the whole
            vocabulary. A masked cell may hold anything, NaN too: it adds exactly 0 to value and
            gradients. Teacher ids that the head lacks fold into the tail; such a label has an
            infinite cross-entropy.
        objective: what is computed. Default: forward KL with the tail as one outcome (bucket).
        execution: how. Changes no result beyond rounding.

    Returns:
        fp32 scalars; `loss` is differentiable, the metrics beside it are not.

    Raises:
        ValueError: shapes that do not fit, a divergence without targets, a layout with an
            implementation that has none.
    """
    head, batch = _checked(hidden, head, batch, objective)
    layout = _layout(execution)
    if layout is not None:
        _check_split(execution, batch)
    if execution.implementation == "dense":
        return sum_values(dense_values(hidden, head, batch, objective), batch.mask)
    chunk = execution.positions_per_chunk(*batch.mask.shape)
    if execution.implementation == "fused":
        return fused_sums(hidden, head, batch, objective, _cut(execution, batch), layout)
    return chunked_sums(
        hidden,
        head,
        batch,
        objective,
        chunk=chunk,
        valid_first=execution.valid_first,
        recompute=execution.implementation == "fused_chunked",
    )


@jax.named_scope("loss")
def kl_and_grads(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    objective: Objective = Objective(),
    execution: Execution = Execution(),
) -> tuple[LossSums, jax.Array, jax.Array]:
    """The core of `fused` on its own: the sums, d_hidden and d_weight without a backward pass.

    Arguments and errors as `loss` has them; whatever execution.implementation is, this is `fused`.

    Returns:
        The sums; d_hidden [B,T,D] in hidden's dtype and, where the caller donates hidden, in its
        memory; d_weight fp32 [V,D]. Both are gradients of the loss SUM; a bias is a constant.
    """
    head, batch = _checked(hidden, head, batch, objective)
    end = run_fused(
        hidden,
        head,
        batch,
        GradientRequest(hidden=True, weight=True, bias=False),
        objective,
        _cut(execution, batch),
        _layout(execution),
    )
    assert end.d_weight is not None  # it was requested
    return end.sums, end.hidden, end.d_weight


@jax.named_scope("loss")
def token_values(
    hidden: jax.Array,
    head: Head,
    batch: Batch,
    objective: Objective = Objective(),
    execution: Execution = Execution(),
) -> TokenValues:
    """Every token's loss and metrics, fp32 [B,T], 0 where masked; `loss` returns their sums.

    Arguments and errors as `loss` has them. Logits are computed chunk by chunk, whatever
    execution.implementation is. `loss` is differentiable, at the memory of `forward_chunked`.
    """
    head, batch = _checked(hidden, head, batch, objective)

    def values(chunk: tuple[jax.Array, Batch]) -> TokenValues:
        hidden, batch = chunk
        z = head.transform(head_matmul(zero_masked(hidden, batch.mask), head.weight))
        return values_of_chunk(z, attach_head(batch, teacher_head), head, objective)

    batch, teacher_head = detach_head(batch)
    return map_chunks(values, (hidden, batch), execution.positions_per_chunk(*batch.mask.shape))


def _cut(execution: Execution, batch: Batch) -> Cut:
    size = execution.positions_per_chunk(*batch.mask.shape)
    return Cut(size, execution.gradient_chunks, execution.valid_first)


def _layout(execution: Execution) -> Layout | None:
    if not (execution.layout is None or isinstance(execution.layout, Layout)):
        raise ValueError(f"expected layout to be a Layout, got {execution.layout!r}; pass one")
    return execution.layout


def _check_split(execution: Execution, batch: Batch) -> None:
    """ValueError for a loss that has a layout and cannot be split by it."""
    if batch.teacher is not None:
        raise ValueError(
            "expected no layout with a live teacher, got one; the compiler splits that loss"
        )
    if execution.implementation != "fused":
        raise ValueError(
            f"expected no layout with implementation {execution.implementation}, got one; "
            "use implementation fused"
        )


def _checked(
    hidden: jax.Array, head: Head, batch: Batch, objective: Objective
) -> tuple[Head, Batch]:
    """The head with its vocab_size, the batch with nothing but what a loss reads; or ValueError."""
    check_loss_inputs(hidden, head, batch, objective)
    mask = batch.mask.astype(bool)
    read = Batch(batch.labels, mask, batch.targets, teacher=batch.teacher)
    return replace(head, vocab_size=head.real_vocab_size), read
