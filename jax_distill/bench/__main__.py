"""`python -m jax_distill.bench NAME …`: which measurement."""

from collections.abc import Sequence

from jax_distill.bench import gpu_check, head, peers, step
from jax_distill.config import Refusal, run_command

BENCHMARKS = {
    "head": head.main,
    "peers": peers.main,
    "gpu_check": gpu_check.main,
    "step": step.main,
}


def main(argv: Sequence[str]) -> int:
    """Hand the rest of the command line to the benchmark it names."""
    if not argv or argv[0] not in BENCHMARKS:
        got = repr(argv[0]) if argv else "nothing"
        raise Refusal(f"expected a benchmark of {', '.join(BENCHMARKS)}, got {got}; name one")
    return BENCHMARKS[argv[0]](argv[1:])


if __name__ == "__main__":
    run_command(main)
