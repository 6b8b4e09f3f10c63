"""`python -m torch_ref.audit CACHE --teacher DIR`: does the cache hold this teacher's targets?

Random rows of the cache are run through the live teacher; the divergence from what is stored is 0
where all is well, and large once the targets are shifted by one position. Whichever backend wrote
the cache, the other's audit passes.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from jax_distill.base.command import CommandLine, above_zero, run_command
from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache, judge, teacher_fingerprint
from jax_distill.objective import Execution
from torch_ref.losses import token_values
from torch_ref.model import Model, device_named, head, hidden_states, load_model, local_path


@torch.no_grad()
def spot_check(
    cache: Cache,
    model: Model,
    rows: np.ndarray,
    *,
    temperature: float = 1.0,
    chunk_size: int = 512,
) -> tuple[np.ndarray, np.ndarray]:
    """KL(stored ‖ live teacher) at τ over the K+1 outcomes at every valid position of `rows`, and
    the same with the stored targets shifted by one position: two arrays [P], nats.

    Raises:
        UserError: the rows hold no valid token.
    """
    teacher_head = head(model)._replace(vocab_size=cache.manifest.vocab_size)
    execution = Execution(chunk_size=chunk_size)
    found: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for row in rows:
        stored = cache.read([row], temperature=temperature)
        batch = stored.map(lambda x: torch.tensor(x, device=model.device))
        hidden = hidden_states(model, batch.tokens, batch.segment_ids, batch.positions)
        assert batch.targets is not None
        # What is stored of ids drawn at random is compared as that of any others: their bucket.
        batch = replace(batch, targets=replace(batch.targets, draws=None))
        assert batch.targets is not None
        shifted = replace(batch, targets=batch.targets.map(lambda x: x.roll(1, 1)))
        for against, kl in zip((batch, shifted), found, strict=True):
            values = token_values(hidden, teacher_head, against, execution=execution)
            kl.append(values.kl[batch.mask].cpu().numpy())
    measured, shifted_kl = map(np.concatenate, found)
    if not measured.size:
        raise UserError(f"expected valid tokens in rows {rows.tolist()}, got none; check more rows")
    return measured, shifted_kl


def main(argv: Sequence[str]) -> None:
    """Exit code 1 where the cache is not this teacher's."""
    parser = CommandLine("torch_ref.audit")
    parser.add_argument("cache", help="e.g. cache/train")
    parser.add_argument("--teacher", required=True, help="HF folder, GGUF file or hub id")
    parser.add_argument("--spot_check", type=above_zero, default=8, help="rows, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=device_named, default="cpu", help="cpu or cuda")
    options = parser.parse_args(argv)
    cache = Cache.open(options.cache)
    cache.require_complete()
    if not cache.manifest.top_k:
        raise UserError(f"expected a cache with a teacher at {options.cache}, got rows alone")
    dtype = cache.manifest.teacher_dtype or "float32"
    model = load_model(options.teacher, dtype=dtype, device=options.device)
    path = local_path(options.teacher)
    if teacher_fingerprint(path) != cache.manifest.teacher_fingerprint:
        say(f"{path} is not the teacher that the cache was made with, by its fingerprint")
    rng = np.random.default_rng(options.seed)
    rows = np.sort(rng.permutation(cache.rows)[: options.spot_check])
    temperature = cache.manifest.temperatures[0]
    kl, shifted = spot_check(cache, model, rows, temperature=temperature)
    verdict = judge(kl, shifted, dtype=dtype, temperature=temperature)
    if not verdict.matches:
        raise RunError(
            f"expected the targets of {options.teacher} in {options.cache}, got {verdict.line}; "
            "give the --teacher that wrote it"
        )
    say(f"{len(rows)} rows: {verdict.line}")
    if verdict.warning:
        say(verdict.warning)


if __name__ == "__main__":
    run_command(main)
