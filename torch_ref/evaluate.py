"""What a student is worth on held-out text, over the full vocabulary, as `jax_distill.evaluate`.

The held-out store's first half is looked at while training, the second half only by the table.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

from jax_distill.cache import Store
from jax_distill.config import Refusal
from torch_ref.model import Model, head, hidden_states, logits


def validation_rows(store: Store) -> np.ndarray:
    """The rows of a held-out store that choices are made on: its first half."""
    return np.arange(store.rows // 2)


def table_rows(store: Store) -> np.ndarray:
    """The rows of a held-out store that only the final table reads: its second half."""
    return np.arange(store.rows // 2, store.rows)


@torch.no_grad()
def compare(
    models: Mapping[str, Model], batch: dict[str, np.ndarray], *, vocab_size: int, chunk_size: int
) -> dict[str, np.ndarray]:
    """Sums over the valid tokens of a batch [B,T]: name → (KL from the teacher's full distribution,
    cross-entropy, top-1 agreement with the teacher), float64 [3]. `models["teacher"]` is it."""
    mask = torch.from_numpy(batch["mask"])
    labels = torch.from_numpy(batch["labels"])[mask].long()
    rows = {}
    for name, model in models.items():
        place = (torch.from_numpy(batch[k]) for k in ("tokens", "segment_ids", "positions"))
        hidden = hidden_states(model, *(x.to(model.device) for x in place))
        rows[name] = hidden[mask.to(hidden.device)]
    sums = {name: np.zeros(3) for name in models}
    for first in range(0, len(labels), chunk_size):
        part = slice(first, first + chunk_size)
        label = labels[part].to(rows["teacher"].device)
        goal = logits(rows["teacher"][part], head(models["teacher"]))[:, :vocab_size]
        goal = goal.log_softmax(-1)
        for name, model in models.items():
            got = logits(rows[name][part], head(model))[:, :vocab_size].log_softmax(-1)
            values = (
                (goal.exp() * (goal - got)).sum(),
                -got.gather(1, label[:, None]).sum(),
                (goal.argmax(-1) == got.argmax(-1)).sum(),
            )
            sums[name] += np.array([float(value) for value in values])
    return sums


def heldout_table(
    models: Mapping[str, Model],
    store: Store,
    rows: np.ndarray,
    *,
    batch_size: int,
    chunk_size: int,
) -> dict[str, dict[str, float]]:
    """Means per valid token over `rows`: kl, cross_entropy (nats), perplexity, top1_agreement.

    Raises:
        Refusal: the rows hold no valid token.
    """
    total = {name: np.zeros(3) for name in models}
    tokens = 0
    for first in range(0, len(rows), batch_size):
        batch = store.read(rows[first : first + batch_size], targets=False)
        tokens += int(batch["mask"].sum())
        vocab_size = store.manifest.vocab_size
        sums = compare(models, batch, vocab_size=vocab_size, chunk_size=chunk_size)
        total = {name: total[name] + sums[name] for name in models}
    if not tokens:
        raise Refusal(
            "expected held-out text for the table, got no valid token; raise data.heldout_fraction"
        )
    table = {}
    for name, values in total.items():
        kl, cross_entropy, agreement = (float(x) for x in values / tokens)
        table[name] = {
            "kl": kl,
            "cross_entropy": cross_entropy,
            "top1_agreement": agreement,
            "perplexity": math.exp(min(cross_entropy, 700.0)),
        }
    return table
