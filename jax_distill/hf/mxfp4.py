"""MXFP4 tensors of a folder, read as what they stand for (OCP Microscaling Formats 1.0, §5.3.4).

gpt-oss keeps its experts' matrices so: for `K` [E,in,out] the file has `K_blocks` uint8
[E,out,in/32,16], two FP4 codes a byte, the lower four bits first, and `K_scales` uint8
[E,out,in/32], exponents: the value is FP4[code] · 2^(scale − 127). bf16 holds each exactly (the
largest scales but one, at which it overflows).
"""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_distill.base.errors import UserError
from jax_distill.hf.tensor_files import read_slice, shape_and_dtype
from jax_distill.model.mxfp4 import SIZE

PARTS = ("_blocks", "_scales")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LARGEST_SCALE = 252  # above it bf16 does not hold FP4's largest number, 6


def is_packed(files: Mapping[str, Path], key: str) -> bool:
    """Whether the tensor stands in the files as blocks and scales, and not as it is."""
    return key not in files and all(key + part in files for part in PARTS)


def packed_shape(files: Mapping[str, Path], key: str) -> tuple[int, ...]:
    """Of the tensor that `K_blocks` and `K_scales` stand for, [E,in,out].

    Raises:
        UserError: the two do not belong together, or are no bytes.
    """
    blocks, scales = (shape_and_dtype(files[key + part], key + part) for part in PARTS)
    if len(scales[0]) != 3 or blocks != ((*scales[0], SIZE // 2), "U8") or scales[1] != "U8":
        raise UserError(
            f"expected {key + PARTS[0]!r} U8 [E,out,in/32,16] and {key + PARTS[1]!r} U8 "
            f"[E,out,in/32], got {blocks[1]} {list(blocks[0])} and {scales[1]} {list(scales[0])}; "
            "re-download them"
        )
    count, width, groups = scales[0]
    return count, groups * SIZE, width


def read_packed(files: Mapping[str, Path], key: str, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of the tensor [E,in,out] in bf16, decoded one expert at a time."""
    count, rows, width = packed_shape(files, key)
    experts, inner, outer = index
    chosen = range(*experts.indices(count))
    sizes = [len(range(*cut.indices(n))) for cut, n in ((inner, rows), (outer, width))]
    out = np.empty((len(chosen), *sizes), ml_dtypes.bfloat16)
    for number, expert in enumerate(chosen):
        cut = (slice(expert, expert + 1), outer)
        blocks, scales = (read_slice(files[key + part], key + part, cut)[0] for part in PARTS)
        out[number] = decode(blocks, scales)[:, inner].T
    return out


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [..,n,16] and [..,n] → bf16 [..,32n]; infinite where bf16 does not hold it."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, SIZE)
    exponents = scales.astype(np.int32)[..., None] - 127
    with np.errstate(over="ignore"):
        values = np.ldexp(FP4[codes], exponents)
    return values.astype(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)
