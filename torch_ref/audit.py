"""`python -m torch_ref.audit STORE --teacher DIR`: does the store hold this teacher's targets?

Random rows of the store are run through the live teacher; the divergence from what is stored is 0
where all is well, and large once the targets are shifted by one position. Whichever backend wrote
the store, the other's audit passes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from jax_distill.cache import Store, teacher_fingerprint
from jax_distill.config import CommandLine, Failure, Refusal, above_zero, run_command
from jax_distill.run import say
from torch_ref.losses import fused_chunked
from torch_ref.model import Model, device_named, head, hidden_states, load_model, place_of

TEACHER = ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count")


class SpotCheck(NamedTuple):
    """Mean KL(stored ‖ live teacher) in nats per valid token; the worst row's mean; the mean once
    the stored targets are shifted by one position."""

    kl: float
    worst_row: float
    shifted: float


@torch.no_grad()
def spot_check(
    store: Store, model: Model, rows: np.ndarray, *, temperature: float = 1.0, chunk_size: int = 512
) -> SpotCheck:
    """Compare stored rows (one at a time) with the live teacher, over the K+1 outcomes.

    Raises:
        Refusal: the rows hold no valid token.
    """
    full = head(model)
    straight: list[float] = []
    shifted: list[float] = []
    counts: list[float] = []
    for row in rows:
        stored = store.read([row], temperature=temperature)
        batch = {name: torch.tensor(value, device=model.device) for name, value in stored.items()}
        hidden = hidden_states(model, batch["tokens"], batch["segment_ids"], batch["positions"])
        moved = {name: batch[name].roll(1, 1) for name in TEACHER}
        for teacher, into in (({k: batch[k] for k in TEACHER}, straight), (moved, shifted)):
            sums = fused_chunked(
                hidden,
                full.weight,
                batch["labels"],
                batch["mask"],
                *teacher.values(),
                vocab_size=store.manifest.vocab_size,
                temperature=temperature,
                chunk_size=chunk_size,
                bias=full.bias,
                soft_cap=full.soft_cap,
                logit_scale=full.logit_scale,
            )
            into.append(sums.kl.item())
        counts.append(sums.count.item())
    if not sum(counts):
        raise Refusal(f"expected valid tokens in rows {rows.tolist()}, got none; check more rows")
    worst = max(kl / count for kl, count in zip(straight, counts, strict=True) if count)
    return SpotCheck(sum(straight) / sum(counts), worst, sum(shifted) / sum(counts))


def main(argv: Sequence[str]) -> None:
    """Exit code 1 where the store is not this teacher's."""
    parser = CommandLine("torch_ref.audit")
    parser.add_argument("store", help="e.g. cache/train")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--spot_check", type=above_zero, default=8, help="rows, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", type=device_named, default="cpu", help="cpu or cuda")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats per valid token")
    options = parser.parse_args(argv)
    store = Store.open(options.store)
    store.require_complete()
    if not store.manifest.top_k:
        raise Refusal(f"expected a store with a teacher at {options.store}, got rows alone")
    model = load_model(options.teacher, dtype=options.dtype, device=options.device)
    place = place_of(options.teacher)
    if teacher_fingerprint(place) != store.manifest.teacher_fingerprint:
        say(f"{place} is not the teacher that the store was made with, by its fingerprint")
    rng = np.random.default_rng(options.seed)
    rows = np.sort(rng.permutation(store.rows)[: options.spot_check])
    found = spot_check(store, model, rows, temperature=store.manifest.temperatures[0])
    line = (
        f"{len(rows)} rows: KL {found.kl:.3g} (worst row {found.worst_row:.3g}), "
        f"shifted by one {found.shifted:.3g}"
    )
    if found.worst_row > options.tolerance or found.shifted < 10 * options.tolerance:
        raise Failure(f"expected the targets of {options.teacher} in {options.store}, got {line}")
    say(line)


if __name__ == "__main__":
    run_command(main)
