"""`python -m torch_ref.teacher --config X.yaml --rows ROWS`: transformers writes the cache.

Any causal language model that transformers loads teaches, so an architecture that the JAX model
does not have can do so too. The rows come from caches without a teacher (`ROWS/train`,
`ROWS/heldout`), which this command makes:

    python -m jax_distill.teacher --config X.yaml --cache.path ROWS \\
        --teacher.path '' --loss.kl_weight 0 --loss.ce_weight 1 --data.tokenizer TEACHER

`<cache.path>/train` and `<cache.path>/heldout` then hold what `jax_distill.teacher` would have
written from the same weights. After a kill, re-run the same command to resume.

B rows, T positions, D hidden, V vocabulary, K stored tokens, S temperatures, N positions.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import StepProgress, say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.versions import git_revision, versions
from jax_distill.batch import ENCODED_FIELDS, TEACHER_PREFIX, Batch, EncodedTopK
from jax_distill.cache import Cache, Location, Manifest, create, row_uniforms, teacher_fingerprint
from jax_distill.cache.draws import GROUP
from jax_distill.cache.manifest import HIDDEN_PREFIX
from jax_distill.cache.writer import LARGEST_GAP
from jax_distill.config import Config, load
from jax_distill.data import check_context, segments_beyond
from jax_distill.hidden_layers import cached_layers, hidden_arrays
from torch_ref.losses import logits
from torch_ref.model import (
    Model,
    device_named,
    head,
    hidden_states,
    layer_outputs,
    load_model,
    local_path,
)


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


def drawn_ids(z: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """[N,M] ids drawn from softmax(z/τ), z [N,V], by `cache.row_uniforms` [N,M,2]: the first of two
    numbers chooses a group of ids by its probability, the second an id within it."""
    weights = (z / temperature).softmax(-1)
    grid = torch.nn.functional.pad(weights, (0, -z.shape[1] % GROUP)).unflatten(1, (-1, GROUP))

    def inverse(weights: Tensor, u: Tensor) -> Tensor:
        sums = weights.cumsum(-1)
        last = (sums < sums[..., -1:]).sum(-1, keepdim=True)
        return torch.searchsorted(sums, u * sums[..., -1:], right=True).minimum(last)

    group = inverse(grid.sum(-1), uniforms[..., 0].contiguous())
    within = grid.gather(1, group[..., None].expand(*group.shape, GROUP))
    return group * GROUP + inverse(within, uniforms[..., 1:])[..., 0]


def chosen_ids(
    z: Tensor, uniforms: Tensor | None, *, top_k: int, top_p: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of z [N,V]: the ids kept [N,K] by logit descending, how many of them are real [N], and of a
    random sample how often each was drawn [N,K]."""
    if uniforms is None:
        values, ids = top_k_of(z, top_k)
        count = torch.full(ids.shape[:1], top_k, dtype=torch.int32, device=z.device)
        if top_p is not None:
            p = ((values / temperature) - (z / temperature).logsumexp(-1, keepdim=True)).exp()
            count = (p.cumsum(-1) - p < top_p).sum(-1, dtype=torch.int32).clamp_min(1)
        return ids, count, None
    drawn = drawn_ids(z, uniforms, temperature)
    draws = torch.zeros_like(z, dtype=torch.int32)
    draws.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.int32))
    _, ids = top_k_of(torch.where(draws > 0, z, -torch.inf), top_k)
    found = draws.gather(1, ids)
    return ids, (found > 0).sum(-1, dtype=torch.int32), found


def targets_of(
    z: Tensor,
    uniforms: Tensor | None = None,
    *,
    top_k: int,
    temperatures: Sequence[float],
    top_p: float | None = None,
) -> tuple[EncodedTopK, Tensor]:
    """What the cache keeps of float32 logits z [N,V] without padding: of the K most likely ids, of
    as many of them as reach `top_p` at the first τ, or, by `uniforms` [N,K,2], of a random sample.

    gaps max(z) − z_k; per τ, log_z = logsumexp(z/τ) − max(z)/τ and log_tail = logsumexp(z/τ outside
    the K) − logsumexp(z/τ), −inf at K = V; log(1 − Σ p_k) where the K hold less than half.

    Returns:
        the targets [N,..] (ids int64, counts int32), and bool [N]: whether every logit that counts
        is finite.
    """
    ids, count, draws = chosen_ids(
        z, uniforms, top_k=top_k, top_p=top_p, temperature=temperatures[0]
    )
    real = torch.arange(top_k, device=z.device) < count[:, None]
    relative = z - z.amax(-1, keepdim=True)
    inside = torch.where(real, relative.gather(1, ids), -torch.inf)
    kept_ids = torch.where(real, ids, ids[:, :1])  # the first is real always
    outside = relative.scatter(1, kept_ids, -torch.inf)
    log_z, log_tail = [], []
    for temperature in temperatures:
        kept, tail = (inside / temperature).logsumexp(-1), (outside / temperature).logsumexp(-1)
        total = torch.logaddexp(kept, tail)
        mass = (kept - total).exp()
        # A difference near 0 would lose the K's mass where they hold little.
        log_tail.append(torch.where(mass < 0.5, (-mass).log1p(), tail - total))
        log_z.append(total)
    targets = EncodedTopK(
        indices=torch.where(real, ids, 0),
        gaps=torch.where(real, -inside, 0.0).clamp_max(LARGEST_GAP).half(),
        log_z=torch.stack(log_z, -1),
        log_tail=torch.stack(log_tail, -1),
        count=count,
        temperatures=tuple(temperatures),
        draws=draws,
    )
    finite = targets.log_z.isfinite().all(-1) & ~targets.log_tail.isnan().any(-1)
    return targets, finite & (inside.isfinite() | ~real).all(-1)


@torch.no_grad()
def capture(
    model: Model,
    batch: Batch,
    manifest: Manifest,
    *,
    chunk_size: int,
    numbers: Iterable[int] = (),
) -> tuple[EncodedTopK, np.ndarray, dict[str, np.ndarray]]:
    """The teacher's targets of a numpy batch [B,T], numpy too, `finite` [B], and the outputs of
    `manifest.hidden_layers`, bf16 [B,T,D], by their names in a cache; 0 in padding.

    The logits of at most `chunk_size` tokens are in memory at a time. `numbers`: of the rows, which
    decide the draws of a random sample. Padding has count 0 and
    log_tail 0: all probability is in the tail.
    """
    rows = batch.map(lambda x: torch.tensor(x, device=model.device))
    with layer_outputs(model, manifest.hidden_layers) as outputs:
        hidden = hidden_states(model, rows.tokens, rows.segment_ids, rows.positions).flatten(0, 1)
    real_head = head(model)._replace(vocab_size=manifest.vocab_size)
    temperatures, samples = manifest.temperatures, manifest.top_k
    uniforms: Sequence[Tensor | None] = [None] * -(-len(hidden) // chunk_size)
    if manifest.sampling == "random":
        made = row_uniforms(numbers, manifest.sequence_length, samples)
        uniforms = torch.from_numpy(made).to(model.device).flatten(0, 1).split(chunk_size)
    options: dict[str, Any] = dict(top_k=samples, temperatures=temperatures, top_p=manifest.top_p)
    parts = [
        targets_of(logits(part, real_head), u, **options)
        for part, u in zip(hidden.split(chunk_size), uniforms, strict=True)
    ]
    real = rows.segment_ids > 0

    def stored(name: str, found: Tensor) -> np.ndarray:
        kept = torch.where(real.view(*real.shape, *[1] * (found.ndim - 2)), found, 0)
        return kept.cpu().numpy().astype(manifest.array_shapes()[name][0])

    def joined(name: str) -> np.ndarray:
        found = torch.cat([getattr(part, name) for part, _ in parts]).unflatten(0, real.shape)
        return stored(f"{TEACHER_PREFIX}{name}", found)

    finite = torch.cat([finite for _, finite in parts]).unflatten(0, real.shape)
    hidden_names = [f"{HIDDEN_PREFIX}{layer}" for layer in manifest.hidden_layers]
    names = ENCODED_FIELDS + (("draws",) if manifest.sampling == "random" else ())
    targets = EncodedTopK(**{name: joined(name) for name in names}, temperatures=temperatures)
    states = {name: stored(name, x.float()) for name, x in zip(hidden_names, outputs, strict=True)}
    return targets, (finite | ~real).all(1).cpu().numpy(), states


def manifest_for(rows: Manifest, model: Model, config: Config) -> Manifest:
    """The manifest of a cache with this teacher over these rows: what `jax_distill.teacher` would
    call it."""
    embedding: Any = model.get_input_embeddings()
    targets = config.cache.stored_targets(rows.sequence_length)
    if config.cache.hidden_layers:
        sizes: Any = model.config
        layers = cached_layers(config.cache.hidden_layers, sizes.num_hidden_layers)
        targets["optional"] |= hidden_arrays(layers, rows.sequence_length, sizes.hidden_size)
    return dataclasses.replace(
        rows,
        **targets,
        vocab_size=min(rows.vocab_size, embedding.num_embeddings),
        teacher_fingerprint=teacher_fingerprint(local_path(config.teacher.path)),
        teacher_dtype=config.teacher.dtype,
        versions=versions(),
        git_revision=git_revision() or "",
    )


def rows_of(batch: Batch) -> dict[str, np.ndarray]:
    """A batch's rows as a cache stores them."""
    text = {"tokens": batch.tokens, "segment_ids": batch.segment_ids, "positions": batch.positions}
    return text | {"loss_mask": batch.mask.astype(np.uint8)}


def write_cache(
    path: str, manifest: Manifest, rows: Cache, model: Model, *, batch_size: int, chunk_size: int
) -> Cache:
    """Run the teacher over the rows that the cache at `path` lacks, and commit shard by shard.

    Raises:
        UserError: the cache there is another's.
        RunError: a row has logits that are not finite; its number is named.
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
                    targets, finite, states = capture(
                        model, batch, manifest, chunk_size=chunk_size, numbers=chosen
                    )
                    bad = chosen[~finite]
                    if len(bad):
                        raise RunError(
                            "expected finite teacher logits, got NaN or infinity in rows "
                            f"{bad.tolist()} of {path}; look at the teacher's weights, or set "
                            "teacher.dtype float32"
                        )
                    parts.append(targets.arrays() | states | rows_of(batch))
                    done += 1
                    bar.update(done, None)
                arrays = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
                writer.write(shard, arrays)
    return Cache.open(path)


def check_contexts(caches: Iterable[Cache], model: Model, config: Config) -> None:
    """Segments longer than the teacher's max_position_embeddings: see `data.check_context`."""
    limit = getattr(model.config, "max_position_embeddings", None)
    count = 0
    for cache in caches:
        if limit is None or cache.sequence_length <= limit:
            continue
        for first in range(0, cache.rows, cache.manifest.shard_rows):
            rows = np.arange(first, min(first + cache.manifest.shard_rows, cache.rows))
            batch = cache.read(rows, targets=False)
            count += segments_beyond(batch.segment_ids, batch.positions, limit)
    refuse = config.teacher.beyond_context == "refuse"
    check_context(count, limit or 0, "teacher", refuse=refuse)


def write_caches(config: Config, rows: str, *, device: str) -> list[Cache]:
    """`<cache.path>/train` and `/heldout` from the rows of `<rows>/train` and `/heldout`.

    Raises:
        UserError: no finished rows there, or no teacher is named; see also `write_cache`.
    """
    if not config.teacher.path:
        raise UserError("expected teacher.path, got none; name an HF folder, GGUF file or hub id")
    splits = ("train", "heldout")
    sources = {split: Cache.open(f"{rows}/{split}") for split in splits}
    for each in sources.values():
        each.require_complete()
    Location(config.cache.path).check_writable()
    model = load_model(config.teacher.path, dtype=config.teacher.dtype, device=device)
    check_contexts(sources.values(), model, config)
    caches = []
    for split in splits:
        cache = write_cache(
            f"{config.cache.path}/{split}",
            manifest_for(sources[split].manifest, model, config),
            sources[split],
            model,
            batch_size=config.teacher.batch_size,
            chunk_size=config.loss.chunk_size,
        )
        say(f"cache: {cache.path} holds {cache.tokens:,} tokens in {cache.nbytes / 1e6:,.1f} MB")
        caches.append(cache)
    return caches


def default_device() -> str:
    """`cuda` where there is one, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: Sequence[str]) -> None:
    """`python -m torch_ref.teacher --rows ROWS [--device cpu] --config X.yaml [--key value …]`"""
    parser = CommandLine("torch_ref.teacher", add_help=False)
    parser.add_argument("--rows", help="folder with the caches of rows, train and heldout")
    parser.add_argument("--device", type=device_named, default=default_device(), help="cpu or cuda")
    options, rest = parser.parse_known_args(argv)
    if "--help" in rest:
        parser.print_help()
    config = load(rest, "torch_ref.teacher")
    if not options.rows:
        raise UserError(
            "expected --rows ROWS, got none; make them with python -m jax_distill.teacher "
            "--teacher.path '' --loss.kl_weight 0 --loss.ce_weight 1 --cache.path ROWS"
        )
    write_caches(config, options.rows, device=options.device)


if __name__ == "__main__":
    run_command(main)
