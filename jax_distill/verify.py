"""The one check that a cache holds a teacher's targets: before training, and in `audit`.

B rows, T positions.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from jax_distill.base.errors import RunError
from jax_distill.batch import Batch
from jax_distill.cache import Cache, Verdict, judge
from jax_distill.losses import Head, token_values
from jax_distill.model import Decoder
from jax_distill.objective import Execution
from jax_distill.sharding import own_rows, row_shards, shard_batch, to_host

CHUNK_SIZE = 1024  # tokens per device whose logits are in memory at a time


@jax.jit
def _hidden_states(model: Decoder, batch: Batch) -> jax.Array:
    return model.hidden_states(batch.tokens, batch.segment_ids, batch.positions)


@partial(jax.jit, static_argnames=("vocab_size", "execution"))
def _divergence(
    model: Decoder, hidden: jax.Array, batch: Batch, *, vocab_size: int, execution: Execution
) -> jax.Array:
    """KL(stored ‖ model) over the K+1 outcomes at each position: [B,T], nats, 0 where masked."""
    head = Head(model.lm_head_weight(), vocab_size=vocab_size)
    return token_values(hidden, head, batch, execution=execution).kl


def check_cache(
    model: Decoder,
    cache: Cache,
    *,
    rows: int,
    temperature: float,
    mesh: Mesh | None = None,
    seed: int = 0,
) -> Verdict:
    """Run the live teacher over `rows` random committed rows that have something to predict, and
    compare it with what the cache holds of them. Logits are made CHUNK_SIZE tokens at a time.

    Args:
        model: the teacher, in the dtype that the manifest names. mesh: where it lies; the
            rows are split over it, some of them twice where they do not divide.

    Returns:
        `cache.judge`'s verdict, its line naming the rows and the worst position.

    Raises:
        RunError: no committed row has anything to predict.
    """
    chosen = _rows_with_targets(cache, rows, seed)
    shards = 1 if mesh is None else row_shards(mesh)
    size = -(-len(chosen) // shards) * shards
    execution = Execution(chunk_size=CHUNK_SIZE, row_shards=shards)
    vocab_size = cache.manifest.vocab_size
    divergence = partial(_divergence, vocab_size=vocab_size, execution=execution)

    def on_device(batch: Batch) -> Batch:
        if mesh is None:
            return batch
        own = own_rows(mesh, size)
        return shard_batch(mesh, batch.map(lambda x: x[own]))

    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for first in range(0, len(chosen), size):
        part = chosen[first : first + size]
        pair = _as_stored_and_shifted(cache.read(np.resize(part, size), temperature=temperature))
        hidden = _hidden_states(model, on_device(pair[0]))
        # One after the other: in one program their loops' collectives can meet in different orders
        # on a CPU's devices, and wait for each other.
        kl, shifted = (to_host(divergence(model, hidden, on_device(each))) for each in pair)
        found.append((kl[: len(part)], shifted[: len(part)], pair[0].mask[: len(part)]))
    kl, shifted, mask = (np.concatenate(each) for each in zip(*found, strict=True))
    dtype = cache.manifest.teacher_dtype or "float32"
    verdict = judge(kl[mask], shifted[mask], dtype=dtype, temperature=temperature)
    row, position = np.unravel_index(np.argmax(np.where(mask, kl, -1.0)), kl.shape)
    where = f" ({len(chosen)} rows; the worst is row {chosen[row]}, position {position})"
    return verdict._replace(line=verdict.line + where)


def _as_stored_and_shifted(batch: Batch) -> tuple[Batch, Batch]:
    """The batch, and the same with each position's targets at the next one."""
    assert batch.targets is not None
    # What is stored of ids drawn at random is compared as that of any others: their bucket.
    targets = dataclasses.replace(batch.targets, draws=None)
    late = targets.map(lambda x: np.roll(x, 1, axis=1))
    return dataclasses.replace(batch, targets=targets), dataclasses.replace(batch, targets=late)


def require_match(verdict: Verdict, cache: Cache) -> None:
    """Raises RunError where the cache is not this teacher's: what differs, and what to do."""
    if not verdict.matches:
        raise RunError(
            f"{verdict.line}; set teacher.path to the teacher that wrote {cache.path}, or choose "
            "another cache.path to write one with this teacher"
        )


def _rows_with_targets(cache: Cache, count: int, seed: int) -> np.ndarray:
    """Chat data may have rows whose every target was cut away."""
    committed = [cache.rows_of(shard) for shard in cache.commits]
    order = np.random.default_rng(seed).permutation(np.concatenate([*committed, np.arange(0)]))
    chosen: list[int] = []
    for first in range(0, len(order), count):
        part = np.sort(order[first : first + count].astype(np.int64))
        chosen += part[cache.read(part, targets=False).mask.any(axis=1)].tolist()
        if len(chosen) >= count:
            break
    if not chosen:
        raise RunError(
            f"cache check: expected a row with something to predict in {cache.path}, got none; "
            "check the loss mask of the data"
        )
    return np.sort(np.array(chosen[:count], np.int64))
