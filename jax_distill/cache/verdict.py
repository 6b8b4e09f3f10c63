"""Do a cache's targets come from this teacher, in these positions? The verdict, from numbers alone.

Both backends run the live teacher over some rows and hand its divergences to `judge`. P valid
positions; τ the temperature.

How far a correct cache may be off: let the live teacher's logits differ from those that were
captured by an error of standard deviation e. Then, to second order,
KL = ½ Var_p(error/τ) ≤ ½ (e/τ)² at each position, whatever the distribution. e is the relative
rounding of what the teacher computes in, times the size of its logits:

    float32   2^-11 · 32   matmuls of a GPU that round operands to TF32 (10 bits); sums in another
                           order and float16 gaps are less
    bfloat16  2^-8 · 32    8 bits of hidden states, which round otherwise in batches of another
                           shape

32 is the size of a language model's largest logits. A position's error is 4 e at most: 16 times
the KL. float16 gaps add at most CODING_FLOOR, at any τ.
"""

from typing import NamedTuple

import numpy as np

RELATIVE_ERROR = {"float32": 2.0**-11, "bfloat16": 2.0**-8}
LARGE_LOGIT = 32.0
WORST_POSITION = 4.0  # standard deviations
# Σ p (x·2^-12)²/2 with x = gap/τ: E[x²] is below (ln V)² < 150, V up to 200k ids.
CODING_FLOOR = 5e-6
ALIGNED = 10.0  # how many times the KL a shift by one must cost to prove the alignment


class Verdict(NamedTuple):
    """What `judge` says.

    Attributes:
        matches: whether the stored targets are this teacher's, as far as the numbers tell.
        warning: "" or what the numbers cannot tell, in one line.
        line: the numbers and the verdict, in one line: "cache check: …".
    """

    matches: bool
    warning: str
    line: str


def tolerances(dtype: str, temperature: float) -> tuple[float, float]:
    """(mean, at the worst position): the KL in nats up to which a cache is this teacher's."""
    error = RELATIVE_ERROR[dtype] * LARGE_LOGIT / temperature
    mean = error**2 / 2
    return mean + CODING_FLOOR, WORST_POSITION**2 * mean + CODING_FLOOR


def judge(kl: np.ndarray, shifted: np.ndarray, *, dtype: str, temperature: float) -> Verdict:
    """Whether stored targets are a live teacher's.

    Args:
        kl: [P], KL(stored ‖ live teacher) over the K+1 outcomes at τ, nats per valid position.
        shifted: [P], the same with the stored targets one position late. It proves alignment where
            it is large beside `kl` at the same τ; where it is not (a teacher that says nearly the
            same everywhere: random weights, one token repeated, a large τ), nothing can.
        dtype: the teacher's, `float32` or `bfloat16`.
    """
    kl, shifted = (np.asarray(x, np.float64).ravel() for x in (kl, shifted))
    if not kl.size:
        return Verdict(True, "cache check: nothing to predict, so nothing was compared", "")
    mean, worst, late = float(kl.mean()), float(kl.max()), float(shifted.mean())
    mean_limit, worst_limit = tolerances(dtype, temperature)
    # NaN compares as False: it does not match.
    matches = mean <= mean_limit and worst <= worst_limit
    numbers = (
        f"KL to the live teacher {mean:.2g} nats (at most {mean_limit:.2g}), "
        f"worst position {worst:.2g} (at most {worst_limit:.2g}), shifted by one {late:.2g}"
    )
    warning = ""
    if matches and not late > ALIGNED * max(mean, CODING_FLOOR):
        warning = (
            "cache check: the teacher's distributions hardly differ from one position to the next, "
            f"so that a shift by one would not show (KL {late:.2g} beside {mean:.2g})"
        )
    if matches:
        return Verdict(True, warning, f"cache check: {numbers}: the targets are this teacher's")
    early = late <= mean_limit
    reason = (
        "the targets stand one position too early"
        if early
        else "the targets are another teacher's, or stand in other positions"
    )
    return Verdict(False, "", f"cache check: {numbers}: {reason}")
