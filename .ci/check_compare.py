"""The README's promise: JAX and torch agree to 1e-6, relative, in every number of 20 steps.

check_compare.py RUN RUN [ALLOWED]
"""

import sys
from pathlib import Path

from jax_distill.report import largest_difference
from jax_distill.run import read_metrics

ALLOWED = 1e-6


def main(*words: str) -> int:
    runs, allowed = words[:2], float(words[2]) if len(words) > 2 else ALLOWED
    first, second = (read_metrics(Path(run) / "metrics.jsonl") for run in runs)
    found = largest_difference(first, second)
    if found is None:
        print(f"comparison: {runs[0]} and {runs[1]} have no step in common")
        return 1
    name, step, difference = found
    print(f"comparison: {name} differs most, by {difference:.2g} at step {step}; {allowed} allowed")
    return 0 if difference < allowed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
