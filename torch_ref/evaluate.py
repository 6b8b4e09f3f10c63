"""What a student is worth on held-out text, over the full vocabulary, as `jax_distill.evaluate`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jax_distill.base.errors import RunError
from jax_distill.batch import Batch
from jax_distill.cache import CALIBRATION_BINS, Cache, check_targets, table_of
from jax_distill.model_folder import model_name
from torch_ref.losses import logits
from torch_ref.model import Model, head, hidden_states

MEASURED = ("kl", "cross_entropy", "top1_agreement", "acceptance_rate")
COUNT = len(MEASURED)


@torch.no_grad()
def compare(
    models: Mapping[str, Model], batch: Batch, *, vocab_size: int, chunk_size: int
) -> dict[str, np.ndarray]:
    """Sums over the valid tokens of a numpy batch [B,T]: name → (KL from the teacher's full
    distribution, cross-entropy, top-1 agreement with the teacher, acceptance rate Σ min(p, q), then
    in each of the CALIBRATION_BINS of its confidence the sum of (confidence − correct)), float64
    [19]. `models["teacher"]` is the teacher; at most `chunk_size` tokens have their logits at a
    time."""
    batch = batch.map(lambda x: torch.from_numpy(x).to(models["teacher"].device))
    labels = batch.labels[batch.mask].long()
    inputs = (batch.tokens, batch.segment_ids, batch.positions)
    rows = {name: hidden_states(model, *inputs)[batch.mask] for name, model in models.items()}
    heads = {name: head(model)._replace(vocab_size=vocab_size) for name, model in models.items()}
    sums = {name: np.zeros(COUNT + CALIBRATION_BINS) for name in models}
    for first in range(0, len(labels), chunk_size):
        part = slice(first, first + chunk_size)
        log_p = logits(rows["teacher"][part], heads["teacher"]).log_softmax(-1)
        for name in models:
            log_q = logits(rows[name][part], heads[name]).log_softmax(-1)
            values = (
                (log_p.exp() * (log_p - log_q)).sum(),
                -log_q.gather(1, labels[part, None]).sum(),
                (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
                torch.minimum(log_p.exp(), log_q.exp()).sum(),
            )
            confidence, best = log_q.exp().max(-1)
            bins = (confidence.nan_to_num(0.0) * CALIBRATION_BINS).long()
            bins = bins.clamp_max(CALIBRATION_BINS - 1)
            off = confidence.new_zeros(CALIBRATION_BINS)
            off.scatter_add_(0, bins, confidence - (best == labels[part]).to(confidence.dtype))
            sums[name] += np.array([*map(float, values), *off.tolist()])
    return sums


def test_table(
    models: Mapping[str, Model],
    cache: Cache,
    rows: np.ndarray,
    *,
    batch_size: int,
    chunk_size: int,
) -> dict[str, dict[str, float]]:
    """Means per valid token over `rows`: kl, cross_entropy (nats), perplexity, top1_agreement,
    acceptance_rate; and the calibration_error (`cache.table_of`).

    Raises:
        UserError: the rows hold no valid token.
        RunError: a model has logits that are not finite; it and the rows are named.
    """
    check_targets(cache, rows)
    total = {name: np.zeros(COUNT + CALIBRATION_BINS) for name in models}
    tokens = 0
    for first in range(0, len(rows), batch_size):
        chosen = rows[first : first + batch_size]
        batch = cache.read(chosen, targets=False)
        tokens += int(batch.mask.sum())
        vocab_size = cache.manifest.vocab_size
        sums = compare(models, batch, vocab_size=vocab_size, chunk_size=chunk_size)
        for name, values in sums.items():  # a logit that is not finite makes a sum NaN
            if not np.isfinite(values).all():
                raise RunError(
                    f"expected finite logits of {model_name(name)}, got NaN or infinity in rows "
                    f"{chosen[0]} to {chosen[-1]} of {cache.path}; look at its weights, or compute "
                    "in float32"
                )
        total = {name: total[name] + sums[name] for name in models}
    named: dict[str, dict[str, Any]] = {
        name: dict(zip(MEASURED, x[:COUNT].tolist(), strict=True))
        | {"miscalibration": x[COUNT:].tolist()}
        for name, x in total.items()
    }
    return table_of(named, tokens)
