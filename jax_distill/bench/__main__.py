"""`python -m jax_distill.bench NAME …`: which measurement."""

from collections.abc import Sequence

from jax_distill.base.command import run_command
from jax_distill.base.errors import UserError
from jax_distill.bench import cache, gpu_check, head, peers, rows, step

BENCHMARKS = {
    "cache": cache.main,
    "head": head.main,
    "peers": peers.main,
    "rows": rows.main,
    "gpu_check": gpu_check.main,
    "step": step.main,
}


def main(argv: Sequence[str]) -> int:
    """Hand the rest of the command line to the benchmark it names."""
    if argv[:1] in (["--help"], ["-h"]):
        print(f"usage: python -m jax_distill.bench {{{','.join(BENCHMARKS)}}} …   (NAME --help)")
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        got = repr(argv[0]) if argv else "nothing"
        raise UserError(f"expected a benchmark of {', '.join(BENCHMARKS)}, got {got}; name one")
    return BENCHMARKS[argv[0]](argv[1:])


if __name__ == "__main__":
    run_command(main)
