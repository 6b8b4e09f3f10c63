"""From hidden states to what the store keeps, chunk by chunk.

B rows, T positions, D hidden, V vocabulary, K stored tokens, S temperatures, C positions of a
chunk in one row.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_distill.losses.logits import fp32_product
from jax_distill.model import Decoder
from jax_distill.sharding import batch_sharding

LARGEST_GAP = 65504.0  # float16's largest; exp(-65504) is 0 all the same


@jax.named_scope("targets")  # profiles and plans find its buffers by this name
def topk_targets(
    hidden: jax.Array,
    lm_head: jax.Array,
    *,
    vocab_size: int,
    top_k: int,
    temperatures: Sequence[float],
    chunk_size: int,
) -> dict[str, jax.Array]:
    """The teacher's distribution at each position, of which at most `chunk_size` at a time have
    their logits in memory.

    z = hidden · lm_headᵀ in fp32 over the first `vocab_size` columns. Per position: the K largest
    (by value descending, ties by id ascending); gaps max(z) − z_k; per temperature τ
    log_z = logsumexp(z/τ) − max(z)/τ; and log_tail = logsumexp(z/τ outside the K) − logsumexp(z/τ),
    −inf at K = V. Where the K hold less than half, log(1 − Σ p_k) is the exacter form of log_tail.

    Args:
        hidden: [B,T,D], after the final norm.
        lm_head: [V,D]; columns from vocab_size on are padding.

    Returns:
        indices int32 and gaps float16 [B,T,K]; log_z and log_tail fp32 [B,T,S], nats; finite bool
        [B,T]: whether every logit that counts is a number.
    """
    batch, length, width = hidden.shape
    chunk = min(max(chunk_size // batch, 1), length)  # positions per row
    padded = jnp.pad(hidden, ((0, 0), (0, -length % chunk), (0, 0)))
    chunks = jnp.moveaxis(padded.reshape(batch, -1, chunk, width), 1, 0)

    def targets(x: jax.Array) -> dict[str, jax.Array]:
        z = fp32_product(x, lm_head)
        return _chunk_targets(z, vocab_size=vocab_size, top_k=top_k, temperatures=temperatures)

    found = jax.lax.map(targets, chunks)

    def rows(x: jax.Array) -> jax.Array:
        """[T/C,B,C,…] → [B,T,…]."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, -1, *x.shape[3:])[:, :length]

    return jax.tree.map(rows, found)


def _chunk_targets(
    z: jax.Array, *, vocab_size: int, top_k: int, temperatures: Sequence[float]
) -> dict[str, jax.Array]:
    """`topk_targets` of logits z fp32 [B,C,V]."""
    if vocab_size < z.shape[-1]:
        column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 2)
        z = jnp.where(column < vocab_size, z, -jnp.inf)
    values, indices = jax.lax.top_k(z, top_k)
    # Not values[:, :, :1]: a slice of top_k's result makes XLA on CPU sort all V, 75 × slower.
    largest = jnp.max(values, axis=-1, keepdims=True)
    row, position = jnp.indices(indices.shape[:2], jnp.int32)
    place = (row[:, :, None], position[:, :, None], indices)
    rest = z.at[place].set(-jnp.inf, unique_indices=True)
    rest_largest = jnp.max(rest, axis=-1, keepdims=True)
    rest_largest = jnp.where(rest_largest == -jnp.inf, largest, rest_largest)  # K = V
    log_z, log_tail = [], []
    for temperature in temperatures:
        inside = jnp.sum(jnp.exp((values - largest) / temperature), axis=-1)
        outside = jnp.sum(jnp.exp((rest - rest_largest) / temperature), axis=-1)
        distance = (rest_largest - largest)[:, :, 0] / temperature
        total = inside + jnp.exp(distance) * outside
        far = jnp.log(outside) + distance - jnp.log(total)
        mass = inside / total
        log_z.append(jnp.log(total))
        log_tail.append(jnp.where(mass < 0.5, jnp.log1p(-jnp.minimum(mass, 0.5)), far))
    stacked = {"log_z": jnp.stack(log_z, axis=-1), "log_tail": jnp.stack(log_tail, axis=-1)}
    gaps = largest - values
    return {
        "indices": indices,
        "gaps": jnp.minimum(gaps, LARGEST_GAP).astype(jnp.float16),
        "finite": jnp.all(jnp.isfinite(stacked["log_z"]), axis=-1)
        & ~jnp.any(jnp.isnan(stacked["log_tail"]), axis=-1)
        & jnp.all(jnp.isfinite(gaps), axis=-1),
        **stacked,
    }


@partial(jax.jit, static_argnames=("mesh", "vocab_size", "top_k", "temperatures", "chunk_size"))
def capture(
    model: Decoder,
    batch: dict[str, jax.Array],
    *,
    mesh: Mesh,
    vocab_size: int,
    top_k: int,
    temperatures: tuple[float, ...],
    chunk_size: int,
) -> dict[str, jax.Array]:
    """The store's teacher arrays of a batch of rows [B,T] (ids still int32), and `finite` [B].

    The rows lie split over the mesh; each device finds the top K of its own, `chunk_size` positions
    at a time. Padding has count 0 and log_tail 0: all probability lies in the tail.
    """
    segment_ids = batch["segment_ids"]
    hidden = model.hidden_states(batch["tokens"], segment_ids, batch["positions"])
    targets = partial(
        topk_targets,
        vocab_size=vocab_size,
        top_k=top_k,
        temperatures=temperatures,
        chunk_size=chunk_size,
    )
    # Left to itself the compiler gathers every row's logits on every device for top_k.
    rows = batch_sharding(mesh).spec
    targets = jax.shard_map(targets, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    found = targets(hidden, model.lm_head_weight())
    real = segment_ids > 0
    finite = jnp.all(found.pop("finite") | ~real, axis=1)
    kept = {
        f"teacher_{name}": jnp.where(real[:, :, None], x, jnp.zeros_like(x))
        for name, x in found.items()
    }
    count = jnp.where(real, top_k, 0).astype(jnp.uint16)
    return {**kept, "teacher_count": count, "finite": finite}
