"""How a cache's files hold the K entries of a position: as numbers that compress well, bit for bit.

Since format 3, instead of `teacher_indices` and `teacher_gaps`:

    teacher_frequent   [N,F]    the ids that a row's entries have most often
    teacher_codes      [N,T,K]  ids, renumbered: the F frequent ones of the row come first
    teacher_gap_steps  [N,T,K]  uint16: how many float16 values a gap is above the last

A byte-wise compressor sees no structure in an id: both its bytes vary. The high byte of a code is 0
for 256 ids that a row has often, 1 for the next 256, and so on: most of them are small. Gaps
ascend, and floats from 0 on have the order of their bits: the differences of those are small, too.
docs/CACHE.md, "Size", has what this saves.
"""

from collections.abc import Mapping

import numpy as np

from jax_distill.batch import TEACHER_PREFIX

INDICES, GAPS = f"{TEACHER_PREFIX}indices", f"{TEACHER_PREFIX}gaps"
FREQUENT, CODES = f"{TEACHER_PREFIX}frequent", f"{TEACHER_PREFIX}codes"
GAP_STEPS = f"{TEACHER_PREFIX}gap_steps"
CODED = {INDICES: (FREQUENT, CODES), GAPS: (GAP_STEPS,)}
"""In memory → in the files."""
CLASS = 256  # codes that share all bytes but the lowest


def frequent_ids(vocab_size: int, sequence_length: int, top_k: int) -> int:
    """F: 256 ids for each 8192 entries of a row, from 256 to 4096, V at most."""
    return min(vocab_size, CLASS * min(max(sequence_length * top_k // 8192, 1), 16))


def encode(arrays: Mapping[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """Arrays of rows as the files hold them; those that are not of CODED stay as they are.

    arrays: by name; [N,T,K] those of CODED. Every id is below `vocab_size`.
    """
    found = {name: array for name, array in arrays.items() if name not in CODED}
    if INDICES in arrays:
        rows, length, top_k = arrays[INDICES].shape
        size = frequent_ids(vocab_size, length, top_k)
        found[FREQUENT] = np.empty((rows, size), arrays[INDICES].dtype)
        found[CODES] = np.empty_like(arrays[INDICES])
        code_of = np.arange(vocab_size, dtype=arrays[INDICES].dtype)
        for row, ids in enumerate(arrays[INDICES]):
            found[FREQUENT][row] = _most_frequent(ids, vocab_size, size)
            changed, theirs = _renumbered(found[FREQUENT][row])
            code_of[theirs] = changed
            found[CODES][row] = code_of[ids]
            code_of[theirs] = theirs
    if GAPS in arrays:
        bits = arrays[GAPS].view(np.uint16)
        found[GAP_STEPS] = bits.copy()
        found[GAP_STEPS][..., 1:] -= bits[..., :-1]
    return found


def decode(arrays: Mapping[str, np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """The inverse of `encode`; arrays: all of it, or the names of CODED of some."""
    coded = (FREQUENT, CODES, GAP_STEPS)
    found = {name: array for name, array in arrays.items() if name not in coded}
    if CODES in arrays:
        found[INDICES] = np.empty_like(arrays[CODES])
        id_of = np.arange(vocab_size, dtype=arrays[CODES].dtype)
        for row, codes in enumerate(arrays[CODES]):
            changed, theirs = _renumbered(arrays[FREQUENT][row])
            id_of[changed] = theirs
            found[INDICES][row] = id_of[codes]
            id_of[changed] = changed
    if GAP_STEPS in arrays:
        bits = np.add.accumulate(arrays[GAP_STEPS], axis=-1, dtype=np.uint16)
        found[GAPS] = bits.view(np.float16)
    return found


def _most_frequent(ids: np.ndarray, vocab_size: int, size: int) -> np.ndarray:
    """[size]: those that `ids` has most often, and then the smallest, ascending in each class of
    256: the order within a class tells a compressor nothing."""
    count = np.bincount(ids.ravel(), minlength=vocab_size)
    found = np.flatnonzero(count)
    found = found[np.argsort(-count[found], kind="stable")][:size]
    if len(found) < size:
        found = np.concatenate([found, np.flatnonzero(count == 0)[: size - len(found)]])
    return np.concatenate([np.sort(found[at : at + CLASS]) for at in range(0, size, CLASS)])


def _renumbered(frequent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, their ids) of the ids that are not their own code, and of some that are.

    Codes below F are the frequent ids; the ids below F that are none of them have the codes which
    those would have had, both ascending.
    """
    size = len(frequent)
    is_frequent = np.zeros(size, bool)
    is_frequent[frequent[frequent < size]] = True
    moved = np.sort(frequent[frequent >= size])
    codes = np.concatenate([np.arange(size, dtype=frequent.dtype), moved])
    return codes, np.concatenate([frequent, np.flatnonzero(~is_frequent).astype(frequent.dtype)])
