"""`python -m torch_ref.teacher --config X.yaml --rows STORES`: transformers writes the store.

Any causal language model that transformers loads teaches, so an architecture that the JAX model
does not have can do so too. The rows come from stores without a teacher (`STORES/train`,
`STORES/heldout`), which this command makes:

    python -m jax_distill.teacher --config X.yaml --cache.path STORES \\
        --teacher.path '' --loss.kl_weight 0 --loss.ce_weight 1 --data.tokenizer TEACHER

`<cache.path>/train` and `<cache.path>/heldout` then hold what `jax_distill.teacher` would have
written from the same weights. The same command goes on after a kill.

B rows, T positions, D hidden, V vocabulary, K stored tokens, S temperatures, N positions.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_distill.cache import Manifest, Store, create, teacher_fingerprint
from jax_distill.config import (
    CommandLine,
    Config,
    Failure,
    Refusal,
    check_writable,
    load,
    run_command,
)
from jax_distill.run import StepProgress, git_revision, say, versions
from torch_ref.model import (
    Head,
    Model,
    device_named,
    head,
    hidden_states,
    load_model,
    logits,
    place_of,
)

LARGEST_GAP = 65504.0  # float16's largest; exp(-65504) is 0 all the same
ROWS = ("tokens", "segment_ids", "positions")


def top_k_of(z: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """[N,V] → values and ids [N,K], by value descending, ties by id ascending.

    `torch.topk` picks any of equal values, so rows where the K-th is tied with one left out are
    sorted whole.
    """
    values, ids = z.topk(top_k, sorted=True)
    tied = (z >= values[:, -1:]).sum(-1) > top_k
    if tied.any():
        values[tied], ids[tied] = (
            x[:, :top_k] for x in z[tied].sort(dim=-1, descending=True, stable=True)
        )
    by_id = ids.argsort(-1)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def targets_of(z: Tensor, *, top_k: int, temperatures: Sequence[float]) -> dict[str, Tensor]:
    """What the store keeps of float32 logits z [N,V], columns of padding already cut off.

    gaps max(z) − z_k; per τ, log_z = logsumexp(z/τ) − max(z)/τ and log_tail = logsumexp(z/τ outside
    the K) − logsumexp(z/τ), −inf at K = V; log(1 − Σ p_k) where the K hold less than half.

    Returns:
        indices int64 and gaps float16 [N,K]; log_z, log_tail float32 [N,S], nats; finite bool [N].
    """
    values, ids = top_k_of(z, top_k)
    largest = values[:, :1]
    outside = (z - largest).scatter_(1, ids, -torch.inf)
    inside = values - largest
    log_z, log_tail = [], []
    for temperature in temperatures:
        kept, tail = (inside / temperature).logsumexp(-1), (outside / temperature).logsumexp(-1)
        total = torch.logaddexp(kept, tail)
        mass = (kept - total).exp()
        # A difference near 0 would lose the K's mass where they hold little.
        log_tail.append(torch.where(mass < 0.5, (-mass).log1p(), tail - total))
        log_z.append(total)
    stacked = {"log_z": torch.stack(log_z, -1), "log_tail": torch.stack(log_tail, -1)}
    gaps = -inside
    return {
        "indices": ids,
        "gaps": gaps.clamp_max(LARGEST_GAP).half(),
        "finite": stacked["log_z"].isfinite().all(-1)
        & ~stacked["log_tail"].isnan().any(-1)
        & gaps.isfinite().all(-1),
        **stacked,
    }


@torch.no_grad()
def capture(
    model: Model, rows: dict[str, np.ndarray], manifest: Manifest, *, chunk_size: int
) -> dict[str, np.ndarray]:
    """The store's teacher arrays of a batch of rows [B,T], and `finite` [B].

    The logits of at most `chunk_size` positions are in memory at a time. Padding has count 0 and
    log_tail 0: all probability lies in the tail.
    """
    tokens, segment_ids, positions = (torch.tensor(rows[k], device=model.device) for k in ROWS)
    hidden = hidden_states(model, tokens, segment_ids, positions).flatten(0, 1)
    full: Head = head(model)
    vocab_size = manifest.vocab_size
    bias = None if full.bias is None else full.bias[:vocab_size]
    real_head = full._replace(weight=full.weight[:vocab_size], bias=bias)
    knobs: dict[str, Any] = dict(top_k=manifest.top_k, temperatures=manifest.temperatures)
    parts = [targets_of(logits(part, real_head), **knobs) for part in hidden.split(chunk_size)]
    real = segment_ids > 0
    found = {k: torch.cat([part[k] for part in parts]).unflatten(0, real.shape) for k in parts[0]}
    finite = (found.pop("finite") | ~real).all(1)
    kept = {f"teacher_{k}": torch.where(real[..., None], v, 0) for k, v in found.items()}
    kept["teacher_count"] = torch.where(real, manifest.top_k, 0)
    arrays = {name: value.cpu().numpy() for name, value in kept.items()}
    types = manifest.array_shapes()
    arrays = {name: value.astype(types[name][0]) for name, value in arrays.items()}
    return arrays | {"finite": finite.cpu().numpy()}


def manifest_for(rows: Manifest, model: Model, config: Config) -> Manifest:
    """The manifest of a store with this teacher over these rows: what `jax_distill.teacher` would
    call it."""
    embedding: Any = model.get_input_embeddings()
    return dataclasses.replace(
        rows,
        top_k=config.cache.top_k,
        temperatures=tuple(config.cache.temperatures),
        vocab_size=min(rows.vocab_size, embedding.num_embeddings),
        teacher_fingerprint=teacher_fingerprint(place_of(config.teacher.path)),
        teacher_dtype=config.teacher.dtype,
        versions=versions(),
        git_revision=git_revision() or "",
    )


def write_store(
    path: str, manifest: Manifest, rows: Store, model: Model, *, batch_size: int, chunk_size: int
) -> Store:
    """Run the teacher over the rows that the store at `path` lacks, and commit shard by shard.

    Raises:
        Refusal: the store there is another's.
        Failure: a row has logits that are not finite; its number is named.
    """
    tokens = batch_size * manifest.sequence_length
    with create(path, manifest, rows.rows) as writer:
        missing = writer.missing_shards()
        total = sum(-(-(last + 1 - first) // batch_size) for _, first, last in missing)
        done = 0
        with StepProgress(Path(path).name, total=total, done=0, tokens_per_step=tokens) as bar:
            for shard, first, last in missing:
                parts = []
                for start in range(first, last + 1, batch_size):
                    chosen = np.arange(start, min(start + batch_size, last + 1))
                    batch = rows.read(chosen, targets=False)
                    part = capture(model, batch, manifest, chunk_size=chunk_size)
                    part |= {name: batch[name] for name in ROWS}
                    part["loss_mask"] = batch["mask"].astype(np.uint8)
                    bad = chosen[~part.pop("finite")]
                    if len(bad):
                        raise Failure(
                            "expected finite teacher logits, got NaN or infinity in rows "
                            f"{bad.tolist()} of {path}; look at the teacher's weights, or set "
                            "teacher.dtype float32"
                        )
                    parts.append(part)
                    done += 1
                    bar.update(done, None)
                arrays = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                writer.write(shard, arrays)
    return Store.open(path)


def write_stores(config: Config, rows: str, *, device: str) -> list[Store]:
    """`<cache.path>/train` and `/heldout` from the rows of `<rows>/train` and `/heldout`.

    Raises:
        Refusal: no finished rows there, or no teacher is named; see also `write_store`.
    """
    if not config.teacher.path:
        raise Refusal("expected teacher.path, got none; name an HF folder, GGUF file or hub id")
    splits = ("train", "heldout")
    sources = {split: Store.open(f"{rows}/{split}") for split in splits}
    for each in sources.values():
        each.require_complete()
    check_writable(config.cache.path, "cache.path")
    model = load_model(config.teacher.path, dtype=config.teacher.dtype, device=device)
    stores = []
    for split in splits:
        store = write_store(
            f"{config.cache.path}/{split}",
            manifest_for(sources[split].manifest, model, config),
            sources[split],
            model,
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
        )
        say(f"store: {store.path} holds {store.tokens:,} tokens in {store.nbytes / 1e6:,.1f} MB")
        stores.append(store)
    return stores


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: Sequence[str]) -> None:
    """`python -m torch_ref.teacher --rows STORES [--device cpu] --config X.yaml [--key value …]`"""
    parser = CommandLine("torch_ref.teacher", add_help=False)
    parser.add_argument("--rows", help="folder with the stores of rows, train and heldout")
    parser.add_argument("--device", type=device_named, default=default_device(), help="cpu or cuda")
    options, rest = parser.parse_known_args(argv)
    if "--help" in rest:
        parser.print_help()
    config = load(rest, "torch_ref.teacher")
    if not options.rows:
        raise Refusal(
            "expected --rows STORES, got none; make them with python -m jax_distill.teacher "
            "--teacher.path '' --loss.kl_weight 0 --loss.ce_weight 1 --cache.path STORES"
        )
    write_stores(config, options.rows, device=options.device)


if __name__ == "__main__":
    run_command(main)
