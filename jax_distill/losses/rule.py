"""One chunk of logits → its terms and its dlogits. The gradient rule that every objective shares.

At one temperature every objective depends on the logits z only through the G gathered ones and the
logsumexp of the rest. So `token_terms` is a small function f(z_g, lse_rest) and autodiff of it
gives ∂f/∂z_g and a = ∂f/∂lse_rest; then dz = a·exp(z − lse_rest) outside the gathered columns,
which are SET to ∂f/∂z_g. A second temperature (cross-entropy at τ ≠ 1) is a second lse_rest.

Where the head is split over its vocabulary (`axis`, a mesh axis under shard_map) each device holds
its columns; the G gathered logits and the sums of the rest are all that travels.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_distill.losses.objectives import Columns, Objective, Terms, log_add, terms_of


class Reading(NamedTuple):
    """What is read off a chunk of logits, and the buffer that is left.

    rest fp32 [B,C,V]: z with −inf in the gathered columns, so that one logsumexp of it is lse_rest.
    local_ids int32 [B,C,G]: the gathered columns within this device's V; V where not here.
    z_g fp32 [B,C,G]: 0 where a column takes no part. largest [B,C]: over all columns;
    largest_rest [B,C]: outside the gathered ones, −inf where nothing is.
    log_rest, log_rest_one [B,C]: log Σ exp((rest − largest_rest)/τ), and at τ = 1.
    """

    rest: jax.Array
    local_ids: jax.Array
    z_g: jax.Array
    largest: jax.Array
    largest_rest: jax.Array
    log_rest: jax.Array
    log_rest_one: jax.Array

    def lse_rest(self, temperature: float) -> tuple[jax.Array, jax.Array]:
        """Logsumexp of (rest − largest)/τ, and at τ = 1; −inf where nothing is."""
        behind = self.largest_rest - self.largest
        return behind / temperature + self.log_rest, behind + self.log_rest_one


def read_logits(
    z: jax.Array, columns: Columns, *, vocab_size: int, temperature: float, axis: str | None = None
) -> Reading:
    """Gather, blank and reduce z fp32 [B,C,V]: the buffer is updated in place and read once."""
    width = z.shape[-1]
    first = jnp.int32(0) if axis is None else jax.lax.axis_index(axis) * jnp.int32(width)
    active = columns.ids < vocab_size
    here = active & (columns.ids >= first) & (columns.ids < first + width)
    local_ids = jnp.where(here, columns.ids - first, width)
    gathered = jnp.take_along_axis(z, jnp.minimum(local_ids, width - 1), axis=-1)
    z_g = jnp.where(here, gathered, 0.0)

    # Read, then overwritten: without an order XLA may copy the whole buffer for the scatter.
    z, z_g = jax.lax.optimization_barrier((z, z_g))
    rest = set_columns(z, local_ids, jnp.full_like(z_g, -jnp.inf))
    if axis is not None or vocab_size < width:
        column = first + jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
        rest = jnp.where(column < vocab_size, rest, -jnp.inf)
    largest_rest, total, total_one = logsumexp_parts(rest, temperature)
    if axis is not None:
        z_g = jax.lax.psum(z_g, axis)
        local_largest = largest_rest
        largest_rest = jax.lax.pmax(largest_rest, axis)
        behind = jnp.where(local_largest > -jnp.inf, local_largest - largest_rest, -jnp.inf)
        total = jax.lax.psum(total * jnp.exp(behind / temperature), axis)
        total_one = jax.lax.psum(total_one * jnp.exp(behind), axis)
    largest = jnp.maximum(largest_rest, jnp.max(jnp.where(active, z_g, -jnp.inf), axis=-1))
    log_rest, log_rest_one = jnp.log(total), jnp.log(total_one)
    return Reading(rest, local_ids, z_g, largest, largest_rest, log_rest, log_rest_one)


def set_columns(buffer: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """buffer [B,C,V] with the columns ids [B,C,G] set; ids ≥ V are dropped."""
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
    """The running pair (m, Σ), rescaled whenever two parts of a row meet."""
    taus = (temperature,) if temperature == 1.0 else (temperature, 1.0)

    def meet(left, right):
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
    m, *sums = jax.lax.reduce((x, *ones), start, meet, (x.ndim - 1,))
    return m, sums[0], sums[-1]


def token_terms(
    z_g: jax.Array,
    lse_rest: jax.Array,
    lse_rest_one: jax.Array,
    *,
    reading: Reading,
    columns: Columns,
    vocab_size: int,
    objective: Objective,
) -> Terms:
    """f: every objective as a function of the gathered logits and the logsumexps of the rest."""
    active = columns.ids < vocab_size
    relative = z_g - reading.largest[..., None]

    def log_sum(tau, lse_rest):
        """Logsumexp over all columns; the largest is 0, so the sum is between 1 and V."""
        gathered = jnp.exp(jnp.where(active, relative / tau, -jnp.inf))
        return jnp.log(jnp.sum(gathered, axis=-1) + jnp.exp(lse_rest))

    tau = objective.temperature
    lse, lse_one = log_sum(tau, lse_rest), log_sum(1.0, lse_rest_one)
    label_outside = jnp.where(active[..., -1], relative[..., -1] / tau, -jnp.inf)
    log_q_tail = log_add(lse_rest, label_outside) - lse
    top = jnp.max(jnp.where(columns.top_slot, z_g[..., :-1], -jnp.inf), axis=-1, initial=-jnp.inf)
    is_top = jnp.concatenate([columns.top_slot, jnp.zeros_like(active[..., -1:])], axis=-1)
    others = jnp.max(jnp.where(active & ~is_top, z_g, -jnp.inf), axis=-1)
    label_z = jnp.sum(jnp.where(columns.label_slot, relative, 0.0), axis=-1)
    has_label = jnp.any(columns.label_slot, axis=-1)
    return terms_of(
        columns,
        log_q=relative[..., :-1] / tau - lse[..., None],
        log_q_tail=log_q_tail,
        cross_entropy=jnp.where(has_label, lse_one - label_z, jnp.inf),
        log_normaliser=lse_one + reading.largest,
        agrees=top > jnp.maximum(others, reading.largest_rest),
        objective=objective,
    )


class TokenGradients(NamedTuple):
    """∂loss/∂ of one token's z_g [B,C,G], lse_rest and lse_rest_one [B,C]."""

    z_g: jax.Array
    lse_rest: jax.Array
    lse_rest_one: jax.Array


def terms_and_gradients(
    reading: Reading, columns: Columns, *, vocab_size: int, objective: Objective
) -> tuple[Terms, TokenGradients]:
    """f and its derivatives, by autodiff over [B,C,G] only."""

    def total(z_g, lse_rest, lse_rest_one):
        terms = token_terms(
            z_g,
            lse_rest,
            lse_rest_one,
            reading=reading,
            columns=columns,
            vocab_size=vocab_size,
            objective=objective,
        )
        return jnp.sum(terms.loss), terms

    inputs = (reading.z_g, *reading.lse_rest(objective.temperature))
    gradients, terms = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
    return terms, TokenGradients(*gradients)


def dz_outside(reading: Reading, gradients: TokenGradients, objective: Objective) -> jax.Array:
    """fp32 [B,C,V]: a·exp(z − lse_rest), 0 in the gathered and the padding columns."""
    some = reading.largest_rest > -jnp.inf
    # Against the largest of the rest, not of all: a tail at −300 keeps its digits.
    relative = reading.rest - jnp.where(some, reading.largest_rest, 0.0)[..., None]

    def share(slope, log_total, tau):
        scaled = relative / tau - jnp.where(some, log_total, 0.0)[..., None]
        return (jnp.where(some, slope, 0.0) / tau)[..., None] * jnp.exp(scaled)

    tau = objective.temperature
    if tau == 1.0:
        return share(gradients.lse_rest + gradients.lse_rest_one, reading.log_rest, 1.0)
    dz = share(gradients.lse_rest, reading.log_rest, tau)
    if not (objective.ce_weight or objective.z_loss_weight):
        return dz
    return dz + share(gradients.lse_rest_one, reading.log_rest_one, 1.0)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def chunk_terms(z: jax.Array, columns: Columns, vocab_size: int, objective: Objective) -> Terms:
    """Terms [B,C] of finished logits z fp32 [B,C,V]; only `loss` has a gradient, by the rule."""
    return _chunk_terms_forward(z, columns, vocab_size, objective)[0]


def _chunk_terms_forward(z, columns, vocab_size, objective):
    reading = read_logits(z, columns, vocab_size=vocab_size, temperature=objective.temperature)
    terms, gradients = terms_and_gradients(
        reading, columns, vocab_size=vocab_size, objective=objective
    )
    return terms, (reading, gradients)


def _chunk_terms_backward(vocab_size, objective, saved, cotangent):
    reading, gradients = saved
    dz = dz_outside(reading, gradients, objective)
    dz = set_columns(dz, reading.local_ids, gradients.z_g)
    return dz * cotangent.loss[..., None], None


chunk_terms.defvjp(_chunk_terms_forward, _chunk_terms_backward)
