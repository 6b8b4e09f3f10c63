"""One chunk of logits → its token values and dlogits: the gradient rule that all objectives share.

At one temperature every objective depends on the logits z only through the G gathered ones and the
logsumexp of the rest, lse_rest. So a token's values are a small function f(z_gathered, lse_rest),
autodiff of it gives ∂f/∂z_gathered and a = ∂f/∂lse_rest, and then dz = a·exp(z − lse_rest) in the
rest, while the gathered entries of dz are SET to ∂f/∂z_gathered (docs/LOSS.md). A second
temperature (cross-entropy at τ ≠ 1) is a second lse_rest.

Where the head is split over its vocabulary (`axis`, a mesh axis under shard_map) each device holds
its part of V; the G gathered logits and the sums of the rest are all that travels.

Letters: B rows, C positions of a chunk, V vocabulary, K stored tokens, G = K + 1 gathered tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.batch import Batch
from jax_distill.losses.divergences import values_from_logprobs
from jax_distill.losses.head import Head
from jax_distill.losses.live import live_values
from jax_distill.losses.outcomes import Outcomes, log_add, select_outcomes
from jax_distill.objective import Objective, TokenValues


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "rest",
        "local_ids",
        "z_gathered",
        "largest",
        "largest_rest",
        "log_sum",
        "log_sum_one",
    ],
    meta_fields=["temperature"],
)
@dataclass(frozen=True)
class LogitSummary:
    """What an objective at τ needs of a chunk of logits, and the buffer that is left.

    Attributes:
        rest: fp32 [B,C,V], z with −inf in the gathered entries and in padding: one logsumexp of it
            is lse_rest.
        local_ids: int32 [B,C,G], the gathered ids within this device's V; V where not here.
        z_gathered: fp32 [B,C,G], 0 where an entry takes no part.
        largest: fp32 [B,C], of all logits; largest_rest: of the rest, −inf where nothing is.
        log_sum, log_sum_one: fp32 [B,C], log Σ exp((rest − largest_rest)/τ), and at τ = 1.
    """

    rest: jax.Array
    local_ids: jax.Array
    z_gathered: jax.Array
    largest: jax.Array
    largest_rest: jax.Array
    log_sum: jax.Array
    log_sum_one: jax.Array
    temperature: float

    def lse_rest(self) -> tuple[jax.Array, jax.Array]:
        """Logsumexp of (rest − largest)/τ, and at τ = 1; −inf where nothing is."""
        distance = self.largest_rest - self.largest
        return distance / self.temperature + self.log_sum, distance + self.log_sum_one


def summarize_logits(z: jax.Array, outcomes: Outcomes, axis: str | None = None) -> LogitSummary:
    """Gather, overwrite and reduce z fp32 [B,C,V]: the buffer is updated in place, read once."""
    vocab_size, temperature, local_size = outcomes.vocab_size, outcomes.temperature, z.shape[-1]
    first = jnp.int32(0) if axis is None else jax.lax.axis_index(axis) * jnp.int32(local_size)
    active = outcomes.ids < vocab_size
    here = active & (outcomes.ids >= first) & (outcomes.ids < first + local_size)
    local_ids = jnp.where(here, outcomes.ids - first, local_size)
    gathered = jnp.take_along_axis(z, jnp.minimum(local_ids, local_size - 1), axis=-1)
    z_gathered = jnp.where(here, gathered, 0.0)

    # Read, then overwritten: without an order XLA may copy the whole buffer for the scatter.
    z, z_gathered = jax.lax.optimization_barrier((z, z_gathered))
    rest = set_entries(z, local_ids, jnp.full_like(z_gathered, -jnp.inf))
    if axis is not None or vocab_size < local_size:
        token = first + jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
        rest = jnp.where(token < vocab_size, rest, -jnp.inf)
    largest_rest, total, total_one = logsumexp_parts(rest, temperature)
    if axis is not None:
        z_gathered = jax.lax.psum(z_gathered, axis)
        local_largest = largest_rest
        largest_rest = jax.lax.pmax(largest_rest, axis)
        distance = jnp.where(local_largest > -jnp.inf, local_largest - largest_rest, -jnp.inf)
        total = jax.lax.psum(total * jnp.exp(distance / temperature), axis)
        total_one = jax.lax.psum(total_one * jnp.exp(distance), axis)
    largest_gathered = jnp.max(jnp.where(active, z_gathered, -jnp.inf), axis=-1)
    return LogitSummary(
        rest=rest,
        local_ids=local_ids,
        z_gathered=z_gathered,
        largest=jnp.maximum(largest_rest, largest_gathered),
        largest_rest=largest_rest,
        log_sum=jnp.log(total),
        log_sum_one=jnp.log(total_one),
        temperature=temperature,
    )


def set_entries(buffer: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """buffer [B,C,V] with the entries ids [B,C,G] set to values [B,C,G]; ids ≥ V are dropped."""
    # vmap keeps B and C batch axes of the scatter, which the partitioner then leaves in place.
    set_one = jax.vmap(jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop")))
    return set_one(buffer, ids, values)


def logsumexp_parts(x: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """m = max x, Σ exp((x−m)/τ) and Σ exp(x−m) over the last axis; m = −inf where all x are.

    An accelerator is bound by memory here and reads x once. A CPU is bound by exp, of which that
    takes twice as many: it reads x twice (1.2–1.3 × faster there).
    """
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: _two_passes(x, temperature),
        default=lambda x: _one_pass(x, temperature),
    )


def _two_passes(x: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    largest = jnp.max(x, axis=-1)
    relative = x - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None]
    total = jnp.sum(jnp.exp(relative / temperature), axis=-1)
    total_one = total if temperature == 1.0 else jnp.sum(jnp.exp(relative), axis=-1)
    return largest, total, total_one


def _one_pass(x: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The running pair (m, Σ), rescaled whenever two parts of a row are combined
    (arXiv 1805.02867)."""
    taus = (temperature,) if temperature == 1.0 else (temperature, 1.0)

    def combine(left, right):
        m = jnp.maximum(left[0], right[0])
        safe = jnp.where(m == -jnp.inf, 0.0, m)
        sums = [
            a * jnp.exp((left[0] - safe) / tau) + b * jnp.exp((right[0] - safe) / tau)
            for a, b, tau in zip(left[1:], right[1:], taus, strict=True)
        ]
        return (m, *sums)

    ones = [jnp.ones_like(x) for _ in taus]
    zeros = [jnp.zeros((), x.dtype) for _ in taus]
    start = (jnp.full((), -jnp.inf, x.dtype), *zeros)
    m, *sums = jax.lax.reduce((x, *ones), start, combine, (x.ndim - 1,))
    return m, sums[0], sums[-1]


def values_from_logits(
    z_gathered: jax.Array,
    lse_rest: jax.Array,
    lse_rest_one: jax.Array,
    *,
    summary: LogitSummary,
    outcomes: Outcomes,
    objective: Objective,
) -> TokenValues:
    """f: every objective as a function of the gathered logits and the logsumexps of the rest."""
    active = outcomes.ids < outcomes.vocab_size
    relative = z_gathered - summary.largest[..., None]

    def log_sum(tau, lse_rest):
        """Logsumexp over all tokens; the largest term is 1, so the sum is between 1 and V."""
        gathered = jnp.exp(jnp.where(active, relative / tau, -jnp.inf))
        return jnp.log(jnp.sum(gathered, axis=-1) + jnp.exp(lse_rest))

    tau = outcomes.temperature
    lse, lse_one = log_sum(tau, lse_rest), log_sum(1.0, lse_rest_one)
    label_outside = jnp.where(active[..., -1], relative[..., -1] / tau, -jnp.inf)
    log_q_tail = log_add(lse_rest, label_outside) - lse
    is_top = outcomes.is_teacher_top
    top = jnp.max(jnp.where(is_top, z_gathered[..., :-1], -jnp.inf), axis=-1, initial=-jnp.inf)
    is_top = jnp.concatenate([is_top, jnp.zeros_like(active[..., -1:])], axis=-1)
    others = jnp.max(jnp.where(active & ~is_top, z_gathered, -jnp.inf), axis=-1)
    label_z = jnp.sum(jnp.where(outcomes.is_label, relative, 0.0), axis=-1)
    has_label = jnp.any(outcomes.is_label, axis=-1)
    return values_from_logprobs(
        outcomes,
        log_q=relative[..., :-1] / tau - lse[..., None],
        log_q_tail=log_q_tail,
        cross_entropy=jnp.where(has_label, lse_one - label_z, jnp.inf),
        log_normalizer=lse_one + summary.largest,
        top1_agrees=top > jnp.maximum(others, summary.largest_rest),
        objective=objective,
    )


class TokenGradients(NamedTuple):
    """∂loss/∂ of one token's z_gathered [B,C,G], lse_rest and lse_rest_one [B,C]."""

    z_gathered: jax.Array
    lse_rest: jax.Array
    lse_rest_one: jax.Array


def values_and_gradients(
    summary: LogitSummary, outcomes: Outcomes, objective: Objective
) -> tuple[TokenValues, TokenGradients]:
    """f and its derivatives, by autodiff over [B,C,G] only."""

    def total(z_gathered, lse_rest, lse_rest_one):
        values = values_from_logits(
            z_gathered,
            lse_rest,
            lse_rest_one,
            summary=summary,
            outcomes=outcomes,
            objective=objective,
        )
        return jnp.sum(values.loss), values

    inputs = (summary.z_gathered, *summary.lse_rest())
    gradients, values = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
    return values, TokenGradients(*gradients)


def rest_gradient(
    summary: LogitSummary, gradients: TokenGradients, objective: Objective
) -> jax.Array:
    """fp32 [B,C,V]: a·exp(z − lse_rest), 0 in the gathered entries and in padding."""
    some = summary.largest_rest > -jnp.inf
    # Against the largest of the rest, not of all: a tail at −300 keeps its digits.
    relative = summary.rest - jnp.where(some, summary.largest_rest, 0.0)[..., None]

    def share(derivative, log_sum, tau):
        scaled = relative / tau - jnp.where(some, log_sum, 0.0)[..., None]
        return (jnp.where(some, derivative, 0.0) / tau)[..., None] * jnp.exp(scaled)

    tau = summary.temperature
    if tau == 1.0:
        return share(gradients.lse_rest + gradients.lse_rest_one, summary.log_sum, 1.0)
    dz = share(gradients.lse_rest, summary.log_sum, tau)
    if not (objective.ce_weight or objective.z_loss_weight):
        return dz
    return dz + share(gradients.lse_rest_one, summary.log_sum_one, 1.0)


def values_of_chunk(z: jax.Array, batch: Batch, head: Head, objective: Objective) -> TokenValues:
    """Values [B,C] of a chunk's logits z fp32 [B,C,V], whatever its targets are."""
    if batch.teacher is not None:
        return live_values(z, batch, batch.teacher, objective, head.real_vocab_size)
    return chunk_values(z, select_outcomes(batch, head.real_vocab_size), objective)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def chunk_values(z: jax.Array, outcomes: Outcomes, objective: Objective) -> TokenValues:
    """Values [B,C] of logits z fp32 [B,C,V]; only `loss` has a gradient, by the rule above."""
    return _chunk_values_forward(z, outcomes, objective)[0]


def _chunk_values_forward(z, outcomes, objective):
    summary = summarize_logits(z, outcomes)
    values, gradients = values_and_gradients(summary, outcomes, objective)
    return values, (summary, gradients)


def _chunk_values_backward(objective, saved, cotangent):
    summary, gradients = saved
    dz = rest_gradient(summary, gradients, objective)
    dz = set_entries(dz, summary.local_ids, gradients.z_gathered)
    return dz * cotangent.loss[..., None], None


chunk_values.defvjp(_chunk_values_forward, _chunk_values_backward)
