"""What a student would learn from less than the teacher's whole distribution, without training it:

    python -m jax_distill.bench.targets CACHE --teacher DIR --student DIR

On the rows of the test table: the KL that a loss sees, and how far its gradient in the logits is
from that of the KL over the whole vocabulary, ‖g − g_full‖ / ‖g_full‖ over all valid tokens, at
τ = 1; by tail and K, by top_p, and for random samples.

B rows, T positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_distill import hf
from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import say
from jax_distill.base.files import find_path
from jax_distill.batch import Batch, LiveTeacher, TopK
from jax_distill.cache import Cache, row_uniforms, table_rows
from jax_distill.losses import Head, head_matmul
from jax_distill.losses.gradient import values_of_chunk
from jax_distill.model import Decoder
from jax_distill.objective import TAILS, Objective
from jax_distill.targets import topk_targets

SIZES = (8, 32, 100)  # K
REACH = (0.5, 0.7, 0.8, 0.9, 0.95)  # top_p, of the largest K
SAMPLES = (12, 50, 200)


class Case(NamedTuple):
    """Targets by name, and the tail of their loss."""

    name: str
    tail: str
    targets: TopK


def cases(
    hidden: jax.Array, weight: jax.Array, vocab_size: int, rows: np.ndarray
) -> Iterator[Case]:
    """Of the teacher's hidden states [B,T,D] and head [V,D]."""
    options = {"vocab_size": vocab_size, "temperatures": (1.0,), "chunk_size": 256}
    make = jax.jit(topk_targets, static_argnames=("top_k", "top_p", *options))

    def made(top_k: int, uniforms: np.ndarray | None = None, top_p: float | None = None) -> TopK:
        found, _ = make(hidden, weight, uniforms, top_k=top_k, top_p=top_p, **options)
        return jax.device_get(found).decode(1.0)

    sizes = [k for k in SIZES if k < vocab_size]
    for top_k in sizes:
        stored = made(top_k)
        for tail in TAILS:
            yield Case(f"K {top_k}", tail, stored)
    for top_p in REACH:
        yield Case(f"top_p {top_p} of {sizes[-1]}", "bucket", made(sizes[-1], top_p=top_p))
    for samples in SAMPLES:
        uniforms = row_uniforms(map(int, rows), hidden.shape[1], samples)
        yield Case(f"{samples} draws", "none", made(samples, uniforms))


@partial(jax.jit, static_argnames=("objective", "head"))
def kl_and_gradient(
    z: jax.Array, batch: Batch, objective: Objective, head: int
) -> tuple[jax.Array, jax.Array]:
    """The KL summed over valid tokens, and ∂(that)/∂z [B,T,V]; head: its real vocabulary."""

    def total(z: jax.Array) -> jax.Array:
        identity = Head(jnp.zeros((z.shape[-1], 1)), vocab_size=head)
        return jnp.sum(values_of_chunk(z, batch, identity, objective).loss)

    return jax.value_and_grad(total)(z)


def measure(
    teacher: Decoder, student: Decoder, cache: Cache
) -> Iterator[tuple[str, str, float, float, float]]:
    """(targets, tail, ids a position, KL per token, gradient's relative error); the first is the
    whole vocabulary."""
    rows, vocab_size = table_rows(cache), cache.manifest.vocab_size
    batch = cache.read(rows, targets=False)
    mask = batch.mask
    inputs = (batch.tokens, batch.segment_ids, batch.positions)
    run = jax.jit(lambda model, *inputs: model.hidden_states(*inputs))
    hidden = run(teacher, *inputs)
    weight = teacher.lm_head_weight()
    z = jax.jit(head_matmul)(run(student, *inputs), student.lm_head_weight())
    live = LiveTeacher(hidden, Head(weight, vocab_size=vocab_size))
    read = Batch(batch.labels, mask)
    count = int(mask.sum())
    kl, full = kl_and_gradient(z, replace(read, teacher=live), Objective(), vocab_size)
    yield "whole vocabulary", "none", float(vocab_size), float(kl) / count, 0.0
    for name, tail, targets in cases(hidden, weight, vocab_size, rows):
        objective = Objective(tail="bucket" if tail == "none" else tail)
        kl, found = kl_and_gradient(z, replace(read, targets=targets), objective, vocab_size)
        error = float(jnp.linalg.norm(found - full) / jnp.linalg.norm(full))
        yield name, tail, float(targets.count[mask].mean()), float(kl) / count, error


def main(argv: Sequence[str]) -> None:
    """One line a case."""
    parser = CommandLine("jax_distill.bench.targets")
    parser.add_argument("cache", help="a held-out cache, e.g. cache/heldout")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--student", required=True, help="HF folder")
    options = parser.parse_args(argv)

    def load(path: str) -> Decoder:
        folder = hf.local_folder(find_path(path))
        return hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)

    cache = Cache.open(options.cache)
    cache.require_complete()
    for name, tail, ids, kl, error in measure(load(options.teacher), load(options.student), cache):
        say(f"{name:<20} tail {tail:<12} ids {ids:9.1f}  KL {kl:.4f}  gradient error {error:.4f}")


if __name__ == "__main__":
    run_command(main)
