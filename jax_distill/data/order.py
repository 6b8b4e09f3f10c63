"""Which rows a step sees, a function of the step alone, so that resuming needs one integer; and
what is read of them."""

from typing import Any

import numpy as np

from jax_distill.config import Config

_ROUNDS = 8
_MASK = (1 << 64) - 1


def row_indices(step: int, *, batch_size: int, num_rows: int, seed: int) -> np.ndarray:
    """The rows of optimizer step `step`, in the order of a seeded permutation per epoch.

    The stream of rows is epoch 0's permutation of range(num_rows), then epoch 1's, and so on; step
    s takes its entries s·batch_size … (s+1)·batch_size − 1, so an epoch may end inside a batch. The
    permutation is a Feistel network over the smallest even number of bits that holds num_rows,
    keyed by (seed, epoch), walked until the value lies in range (Black & Rogaway 2002, "Ciphers
    with arbitrary finite domains"). Integer arithmetic alone: the same everywhere, for ever.

    Args:
        step: optimizer step, from 0.
        batch_size: rows per optimizer step.
        num_rows: rows of the cache, at least 1.
        seed: any integer.

    Returns:
        [batch_size] int64.

    Raises:
        ValueError: a step below 0, or a size below 1.
    """
    if step < 0 or batch_size < 1 or num_rows < 1:
        raise ValueError(f"expected step >= 0, sizes >= 1, got {step=} {batch_size=} {num_rows=}")
    rows = np.empty(batch_size, np.int64)
    first = step * batch_size
    filled = 0
    while filled < batch_size:
        epoch, start = divmod(first + filled, num_rows)
        count = min(batch_size - filled, num_rows - start)
        positions = np.arange(start, start + count, dtype=np.uint64)
        rows[filled : filled + count] = _permute(positions, num_rows, _mix(_mix(seed) + epoch))
        filled += count
    return rows


def _permute(positions: np.ndarray, num_rows: int, key: int) -> np.ndarray:
    """Maps positions in [0, num_rows) one to one onto [0, num_rows)."""
    half = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    keys = [_mix(key + round_) for round_ in range(1, _ROUNDS + 1)]
    values = _feistel(positions, half, keys)
    outside = values >= np.uint64(num_rows)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= np.uint64(num_rows)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014) after its increment."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: np.ndarray) -> np.ndarray:
    """`_mix` over a uint64 array, whose multiplications wrap by themselves."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def reader_options(config: Config) -> dict[str, Any]:
    """What `Cache.read` needs to know of the configuration, in both backends."""
    if config.teacher.is_live:
        return {"targets": False}
    hidden = config.loss.hidden_objective()
    return {
        "temperature": config.loss.temperature,
        "top_k": config.cache.read_top_k,
        "hidden_layers": hidden.teacher_layers if hidden else (),
    }
