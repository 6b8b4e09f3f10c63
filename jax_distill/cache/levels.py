"""What zstd's levels cost and save on the first shard of a cache:

python -m jax_distill.cache.levels runs/quickstart/cache/train
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

from jax_distill.base.command import CommandLine, run_command
from jax_distill.cache.reader import Cache
from jax_distill.cache.writer import create


def main(argv: Sequence[str]) -> None:
    """Writes the shard again at each level, twice; the smaller time counts."""
    parser = CommandLine("jax_distill.cache.levels", description=__doc__)
    parser.add_argument("cache", help="its folder")
    cache = Cache.open(parser.parse_args(argv).cache)
    cache.require_complete()
    rows = min(cache.manifest.shard_rows, cache.rows)
    manifest = replace(cache.manifest, shard_rows=rows)
    arrays = {name: cache._arrays[name][:rows].read().result() for name in manifest.array_shapes()}
    print(f"{rows} rows of {cache.sequence_length}, {os.cpu_count()} processors")
    for level in range(1, 10):
        taken = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                with create(folder, manifest, rows, level=level) as writer:
                    begin = time.perf_counter(), time.process_time()
                    writer.write(0, arrays)
                    taken.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
                written = Cache.open(folder)
        seconds, processor = (written.tokens / min(each) for each in zip(*taken, strict=True))
        print(
            f"level {level}: {written.nbytes / written.tokens:.1f} bytes a token, {seconds:,.0f} "
            f"tokens/s, {processor:,.0f} per second of processor time"
        )


if __name__ == "__main__":
    run_command(main)
