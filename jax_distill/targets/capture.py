"""From hidden states to what the cache keeps, chunk by chunk.

B rows (of one device), T positions, D hidden, V vocabulary, K stored tokens, S temperatures, C
positions of a chunk in one row, M draws.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_distill import processes
from jax_distill.batch import EncodedTopK
from jax_distill.cache.manifest import HIDDEN_PREFIX
from jax_distill.cache.writer import LARGEST_GAP
from jax_distill.losses import head_matmul
from jax_distill.losses.chunks import split_chunks
from jax_distill.model import Decoder
from jax_distill.objective import positions_per_chunk
from jax_distill.sharding import batch_sharding
from jax_distill.targets.sampling import Chosen, most_likely, sampled


@jax.named_scope("targets")  # profiles and plans find its buffers by this name
def topk_targets(
    hidden: jax.Array,
    lm_head: jax.Array,
    uniforms: jax.Array | None = None,
    *,
    vocab_size: int,
    top_k: int,
    temperatures: Sequence[float],
    chunk_size: int,
    top_p: float | None = None,
) -> tuple[EncodedTopK, jax.Array]:
    """The teacher's distribution at each position of one device's rows; the logits of at most
    `chunk_size` tokens are in memory at a time.

    z = hidden · lm_headᵀ in fp32 over the first `vocab_size` ids. Per position: the K largest
    (by value descending, ties by id ascending); gaps max(z) − z_k; per temperature τ
    log_z = logsumexp(z/τ) − max(z)/τ; and log_tail = logsumexp(z/τ outside the K) − logsumexp(z/τ),
    −inf at K = V. Where the K hold less than half, log(1 − Σ p_k) is the exacter form of log_tail.
    With `top_p` a position keeps as many of the K as reach that probability at the first τ, one at
    least; with `uniforms` the K are the distinct ones of M = K ids drawn from the teacher at the
    first τ, and how often each was (`sampling.py`). What lies beyond `count` is 0.
    Gaps beyond float16's largest are clamped to it; `cache.Writer` counts them, and refuses them
    where they would matter.

    Args:
        hidden: [B,T,D], after the final norm.
        lm_head: [V,D]; rows from vocab_size on are padding.
        uniforms: fp32 [B,T,M,2] in [0, 1), `cache.row_uniforms`; None for the K most likely.

    Returns:
        the targets [B,T,..] (ids int32), and bool [B,T]: whether every logit that counts is finite.
    """
    batch, length = hidden.shape[:2]
    chunk = positions_per_chunk(chunk_size, batch, length)

    def targets(part: tuple[jax.Array, jax.Array | None]) -> tuple[EncodedTopK, jax.Array]:
        x, uniforms = part
        z = head_matmul(x, lm_head)
        if vocab_size < z.shape[-1]:
            token_id = jax.lax.broadcasted_iota(jnp.int32, z.shape, 2)
            z = jnp.where(token_id < vocab_size, z, -jnp.inf)
        if uniforms is not None:
            chosen = sampled(z, uniforms, temperatures[0])
        else:
            chosen = most_likely(z, top_k, top_p, temperatures[0])
        return _encode(z, chosen, temperatures)

    chunks = jax.tree.map(lambda x: split_chunks(x, chunk), (hidden, uniforms))
    found = jax.lax.map(targets, chunks)

    def rows(x: jax.Array) -> jax.Array:
        """[T/C,B,C,…] → [B,T,…]."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, -1, *x.shape[3:])[:, :length]

    return jax.tree.map(rows, found)


def _encode(
    z: jax.Array, chosen: Chosen, temperatures: Sequence[float]
) -> tuple[EncodedTopK, jax.Array]:
    """What `topk_targets` keeps of logits z fp32 [B,C,V], −inf in padding, and of the ids chosen
    [B,C,K]."""
    values, largest = chosen.values, chosen.largest[..., None]
    row, position = jnp.indices(values.shape[:2], jnp.int32)
    at = (row[:, :, None], position[:, :, None], chosen.scattered(z.shape[-1]))
    rest = z.at[at].set(-jnp.inf, mode="drop", unique_indices=True)
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
    gaps = jnp.where(chosen.real, largest - values, 0.0)
    encoded = EncodedTopK(
        indices=jnp.where(chosen.real, chosen.indices, 0),
        gaps=jnp.minimum(gaps, LARGEST_GAP).astype(jnp.float16),
        log_z=jnp.stack(log_z, axis=-1),
        log_tail=jnp.stack(log_tail, axis=-1),
        count=jnp.sum(chosen.real, axis=-1, dtype=jnp.uint16),
        temperatures=tuple(temperatures),
        draws=chosen.draws,
    )
    finite = (
        jnp.all(jnp.isfinite(encoded.log_z), axis=-1)
        & ~jnp.any(jnp.isnan(encoded.log_tail), axis=-1)
        & jnp.all(jnp.isfinite(gaps), axis=-1)
    )
    return encoded, finite


def batch_targets(
    hidden: jax.Array,
    lm_head: jax.Array,
    segment_ids: jax.Array,
    uniforms: jax.Array | None = None,
    *,
    mesh: Mesh,
    vocab_size: int,
    top_k: int,
    temperatures: tuple[float, ...],
    chunk_size: int,
    top_p: float | None = None,
) -> tuple[EncodedTopK, jax.Array]:
    """`topk_targets` of rows that are split over a mesh, inside jit: the targets [B,T,..], of a
    random sample where there are `uniforms` [B,T,M,2], and `finite` [B].

    Each device finds the top K of its own rows, `chunk_size` tokens at a time. Padding has count 0
    and log_tail 0: all probability is in the tail.
    """
    targets = partial(
        topk_targets,
        vocab_size=vocab_size,
        top_k=top_k,
        temperatures=temperatures,
        chunk_size=chunk_size,
        top_p=top_p,
    )
    # Left to itself the compiler gathers every row's logits on every device for top_k.
    rows = batch_sharding(mesh).spec
    specs = (rows, PartitionSpec(), rows)
    targets = jax.shard_map(targets, mesh=mesh, in_specs=specs, out_specs=rows)
    found, finite = targets(hidden, lm_head, uniforms)
    real = segment_ids > 0

    def without_padding(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(real, range(2, x.ndim)), x, jnp.zeros_like(x))

    return found.map(without_padding), jnp.all(finite | ~real, axis=1)


@partial(
    jax.jit,
    static_argnames=(
        "mesh",
        "vocab_size",
        "top_k",
        "temperatures",
        "chunk_size",
        "top_p",
        "hidden_layers",
    ),
)
def capture(
    model: Decoder,
    batch: dict[str, jax.Array],
    *,
    hidden_layers: tuple[int, ...] = (),
    **options: Any,
) -> tuple[EncodedTopK, jax.Array, dict[str, jax.Array]]:
    """The teacher's targets of a batch of rows [B,T] (ids still int32), `finite` [B], and the
    outputs of `hidden_layers`, bf16 [B,T,D], by their names in a cache; 0 in padding.

    The rows lie split over the mesh; options: those of `batch_targets`. A batch with `uniforms`
    [B,T,M,2] gives a random sample.
    """
    segment_ids = batch["segment_ids"]
    output = model.apply(
        batch["tokens"], segment_ids, batch["positions"], hidden_layers=hidden_layers
    )
    found, finite = batch_targets(
        output.hidden, model.lm_head_weight(), segment_ids, batch.get("uniforms"), **options
    )
    real = (segment_ids > 0)[..., None]
    states = jnp.where(real, output.layers, 0).astype(jnp.bfloat16)
    names = [f"{HIDDEN_PREFIX}{layer}" for layer in hidden_layers]
    outputs = found, finite, dict(zip(names, states, strict=True))
    if processes.is_several():  # each fetches its own rows
        return jax.lax.with_sharding_constraint(outputs, batch_sharding(options["mesh"]))
    return outputs
