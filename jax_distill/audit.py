"""What a cache holds, whether it is whole, and whether it is this teacher's.

`python -m jax_distill.audit CACHE [--verify] [--spot_check N --teacher DIR] [--compare OTHER]
[--repair --teacher DIR] [--png FILE]`

CACHE is one cache, or the folder with `train` and `heldout`. Exit code 1: something is wrong with
it; 2: with the command line.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from jax_distill import hf
from jax_distill.base.command import CommandLine, run_command
from jax_distill.base.console import console, say
from jax_distill.base.errors import UserError
from jax_distill.base.files import FIGURES, check_new_file
from jax_distill.cache import Cache, Manifest, commit_key, read_manifest, teacher_fingerprint
from jax_distill.compare import compare, sentence
from jax_distill.repair import repair
from jax_distill.teacher.files import find_teacher
from jax_distill.verify import check_cache

STATISTICS_TOKENS = 2_000_000  # of a larger cache, rows at even distances
READ_TOKENS = 65_536  # of a read
SMALLER_K = (1, 8, 16, 32, 64)  # that `cache.read_top_k` could take
ENOUGH, LITTLE = 0.99, 0.5  # of the probability inside the K


class Statistics(NamedTuple):
    """Of the valid positions of some rows, at the cache's first temperature.

    retained: [P], probability inside the K. entropy: [P], nats, of the K+1 outcomes: a lower bound
    of the teacher's. by_k: for some K up to the cache's own, the mean probability inside it and the
    share of positions whose label is inside; for a random sample its own alone. ids: [P], how
    many ids a position has.
    """

    retained: np.ndarray
    entropy: np.ndarray
    by_k: dict[int, tuple[float, float]]
    ids: np.ndarray


def statistics(cache: Cache, rows: np.ndarray) -> Statistics | None:
    """Read rows and describe them; None where no position of them is valid."""
    temperature = cache.manifest.temperatures[0]
    step = max(READ_TOKENS // cache.sequence_length, 1)
    top_k = cache.manifest.top_k
    smaller = () if cache.manifest.sampling == "random" else SMALLER_K
    some = np.array([k for k in smaller if k < top_k] + [top_k])
    retained, entropy, mass, found, counts = [], [], [], [], []
    for first in range(0, len(rows), step):
        batch = cache.read(rows[first : first + step], temperature=temperature)
        valid, targets = batch.mask, batch.targets
        assert targets is not None
        log_p, log_tail = targets.logprobs[valid], targets.log_tail[valid]
        outcomes = np.concatenate([log_p, log_tail[:, None]], axis=1).astype(np.float64)
        p = np.exp(outcomes)
        entropy.append(-(p * np.where(p > 0, outcomes, 0)).sum(axis=1))
        retained.append(-np.expm1(np.minimum(log_tail.astype(np.float64), 0)))
        counts.append(targets.count[valid])
        real = np.arange(log_p.shape[1]) < counts[-1][:, None]
        label = batch.labels[valid][:, None]
        is_label = (targets.indices[valid] == label) & real
        mass.append(np.cumsum(p[:, :-1], axis=1)[:, some - 1])
        found.append(np.logical_or.accumulate(is_label, axis=1)[:, some - 1])
    if not sum(map(len, found)):
        return None
    means = zip(np.concatenate(mass).mean(0), np.concatenate(found).mean(0), strict=True)
    by_k = {int(k): (float(m), float(f)) for k, (m, f) in zip(some, means, strict=True)}
    held, entropies, ids = map(np.concatenate, (retained, entropy, counts))
    return Statistics(held, entropies, by_k, ids)


def array_bytes(cache: Cache) -> dict[str, int]:
    """Bytes on disk of each array's committed shards."""
    names = cache.manifest.stored_shapes()
    commits = cache.commits.values()
    return {name: sum(commit.files[name]["bytes"] for commit in commits) for name in names}


def verify(cache: Cache) -> list[str]:
    """Read every byte again: the manifest, each zarr.json, commit and shard. One line for each that
    is missing or not as committed: the file, its rows, what is wrong."""
    metadata = cache.metadata_problems()
    problems = [f"{key}: {problem}" for key, problem in metadata.items()]
    problems += [
        f"{commit_key(shard)}: shard {shard} is not committed"
        for shard in range(cache.shards)
        if shard not in cache.commits and commit_key(shard) not in metadata
    ]
    for key, (shard, problem) in cache.shard_problems().items():
        commit = cache.commits[shard]
        problems.append(f"{key} (rows {commit.first_row}..{commit.last_row}): {problem}")
    return problems


def _verify_says_well(cache: Cache) -> bool:
    """`verify`, said line by line, and what to do; whether nothing is wrong."""
    writer = cache.location.active_writer()
    problems = verify(cache)
    if writer:  # what it has not committed yet is no damage
        problems = [each for each in problems if not each.endswith("is not committed")]
        say(
            f"{cache.path}: a writer is active ({writer}); {len(cache.commits)} of "
            f"{cache.shard_count} shards are committed so far"
        )
    for problem in problems:
        say(f"bad: {problem}")
    damaged = [each for each in problems if not each.endswith("is not committed")]
    if not problems:
        say(f"{cache.path}: every checksum of {len(cache.commits)} shards is right")
    elif not damaged:
        say(f"{cache.path}: not finished; re-run the command that wrote it")
    elif writer:
        say(f"{cache.path}: {len(problems)} problems; audit it again once the writer has finished")
    else:
        say(
            f"{cache.path}: {len(problems)} problems; restore these files from a copy, or delete "
            "them and the commits of their rows and re-run the command that wrote it"
        )
    return not problems


def draw(cache: Cache, found: Statistics) -> Figure:
    """Retained mass, entropy, and bytes a token by array."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    mass, entropy, size = figure.subplots(1, 3)
    mass.hist(found.retained, bins=np.linspace(0, 1, 41))
    mass.set_title(f"probability inside the {cache.manifest.top_k}", fontsize=10)
    entropy.hist(found.entropy, bins=40)
    entropy.set_title("entropy of the K+1 outcomes, nats", fontsize=10)
    for axes in (mass, entropy):
        axes.set_ylabel("positions", fontsize=8)
    sizes = array_bytes(cache)
    size.barh(list(sizes), [count / max(cache.tokens, 1) for count in sizes.values()])
    size.set_title("bytes a token", fontsize=10)
    size.tick_params(labelsize=7)
    return figure


def _targets_of(manifest: Manifest) -> str:
    if not manifest.top_k:
        return "no teacher"
    if manifest.sampling == "random":
        return f"the distinct ids of {manifest.top_k} draws (random)"
    return f"{manifest.top_k} ({manifest.sampling})" + (
        f", as many as reach {manifest.top_p:g}" if manifest.top_p else ""
    )


def print_facts(cache: Cache) -> None:
    """What the manifest and the commits say."""
    manifest = cache.manifest
    facts = {
        "path": cache.path,
        "format": f"{manifest.format_version}",
        "rows": f"{cache.rows:,} of {manifest.sequence_length:,} tokens",
        "committed": f"{len(cache.commits)} of {cache.shard_count} shards of "
        f"{manifest.shard_rows} rows",
        "tokens": f"{cache.tokens:,}, of which {cache.targets:,} predict",
        "finished": "yes" if cache.complete else "no",
        "vocabulary": f"{manifest.vocab_size:,}, largest id {cache.largest_token:,}",
        "top K": _targets_of(manifest),
        "temperatures": ", ".join(map(str, manifest.temperatures)),
        "clamped gaps": f"{cache.clamped_gaps:,}",
        "optional": ", ".join(manifest.optional),
        "cache": cache.fingerprint,
        "teacher": f"{manifest.teacher_fingerprint} {manifest.teacher_dtype}",
        "tokenizer": manifest.tokenizer_fingerprint,
        "data": manifest.data_fingerprint,
        "settings": ", ".join(f"{key} {value}" for key, value in manifest.data.items()),
        "made with": ", ".join(f"{key} {value}" for key, value in manifest.versions.items()),
        "git revision": manifest.git_revision,
    }
    for name, value in facts.items():
        say(f"{name:<13} {value}")
    size = Table("array", "bytes", "bytes a token", title=f"{cache.nbytes:,} bytes")
    tokens = max(cache.tokens, 1)
    for name, count in {**array_bytes(cache), "all": cache.nbytes}.items():
        size.add_row(name, f"{count:,}", f"{count / tokens:.2f}")
    console.print(size)


def print_statistics(found: Statistics) -> None:
    """Retained mass as a histogram, label rate, entropy."""
    edges = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0])
    counts, _ = np.histogram(found.retained, edges)
    shares = counts / counts.sum()
    table = Table("mass inside the K", "positions", "", title=f"{len(found.retained):,} positions")
    for low, high, share in zip(edges, edges[1:], shares, strict=False):
        table.add_row(f"{low:.2f} to {high:.2f}", f"{share:.1%}", "█" * round(40 * share))
    console.print(table)
    count = found.ids
    say(f"ids of a position: mean {count.mean():.1f}, {count.min()} to {count.max()}")
    say(f"mass inside the K: mean {found.retained.mean():.4f}, least {found.retained.min():.4f}")
    if len(found.by_k) > 1:
        choices = Table("K", "probability inside", "label inside")
        choices.title = "what a smaller K would hold"
        for k, (mass, label) in found.by_k.items():
            choices.add_row(str(k), f"{mass:.4f}", f"{label:.1%}")
        console.print(choices)
    say(f"entropy of the K+1 outcomes: mean {found.entropy.mean():.3f} nats")


def verdict(found: Statistics, sampling: str = "top_k") -> str:
    """What the statistics say about K, in one sentence; docs/ADVICE.md has the measurements."""
    *_, (top_k, (mass, label)) = found.by_k.items()
    if sampling == "random":
        return (
            f"verdict: {top_k} draws are {found.ids.mean():.1f} ids a position, with {mass:.1%} "
            "of the probability; their loss needs no tail, and more draws make it less noisy"
        )
    enough = next((k for k, (inside, _) in found.by_k.items() if inside >= ENOUGH), None)
    if enough == top_k:
        advice = "that is enough under any tail"
    elif enough:
        advice = f"cache.read_top_k {enough} would do, and reads faster"
    elif mass >= LITTLE:
        advice = "keep loss.tail bucket, which learns the rest as one outcome"
    else:
        advice = "if the teacher is a trained one, write the cache again with a larger cache.top_k"
    held = f"{mass:.1%} of the probability, {label:.1%} of the labels"
    return f"verdict: K = {top_k} holds {held}; {advice}"


def caches_at(path: str) -> list[str]:
    """The cache at `path`, or those at `path`/train and `path`/heldout.

    Raises:
        UserError: neither is there.
    """
    inside = [path, *(f"{path}/{split}" for split in ("train", "heldout"))]
    found = [each for each in inside if read_manifest(each) is not None]
    if not found:
        raise UserError(f"expected a cache at {path}, got no manifest.json there; check the path")
    return found


def audit(cache: Cache, options: argparse.Namespace) -> bool:
    """Print all that was asked about one cache; whether nothing is wrong with it."""
    if options.repair:
        cache = repair(cache, options.teacher)
    print_facts(cache)
    if options.verify and not _verify_says_well(cache):
        return False
    if options.spot_check and not cache.manifest.top_k:
        raise UserError(
            f"expected a cache with a teacher for --spot_check, got rows alone at {cache.path}; "
            "leave out --spot_check"
        )
    if not cache.manifest.top_k or not cache.commits:
        return True
    committed = [cache.rows_of(shard) for shard in cache.commits]
    rows = np.concatenate(committed)
    wanted = max(STATISTICS_TOKENS // cache.sequence_length, 1)
    rows = rows[:: max(len(rows) // wanted, 1)]
    found = statistics(cache, rows)
    if found is None:
        say(f"{cache.path}: no position predicts anything")
        return True
    print_statistics(found)
    say(f"{cache.path}: {verdict(found, cache.manifest.sampling)}")
    if options.compare:
        other = _counterpart(cache, options)
        say(f"{cache.path}: {sentence(compare(cache, other, rows), other.path)}")
    if options.png:
        draw(cache, found).savefig(_png(options.png, cache), dpi=120)
    return not options.spot_check or _spot_check_passes(cache, options)


def _counterpart(cache: Cache, options: argparse.Namespace) -> Cache:
    """The cache of --compare, of its two the one of the same name."""
    others = caches_at(options.compare)
    name = cache.location.name
    return Cache.open(next((each for each in others if each.endswith(f"/{name}")), others[0]))


def _png(path: str, cache: Cache) -> Path:
    """`cache.png`, or `cache-heldout.png` where several caches are looked at in one go."""
    file = Path(path)
    name = cache.location.name
    return file.with_name(f"{file.stem}-{name}{file.suffix}") if name == "heldout" else file


def _spot_check_passes(cache: Cache, options: argparse.Namespace) -> bool:
    """The same check as before training, on --spot_check random rows at the first temperature."""
    manifest = cache.manifest
    found = find_teacher(options.teacher, key="--teacher")
    folder, _ = found.require_model(other="audit")
    if teacher_fingerprint(found.source or folder) != manifest.teacher_fingerprint:
        say(f"{found.source} is not the teacher that the cache was made with, by its fingerprint")
    dtype = jnp.dtype(manifest.teacher_dtype or "float32")
    verdict = check_cache(
        hf.load_model(folder, param_dtype=dtype, compute_dtype=dtype),
        cache,
        rows=options.spot_check,
        temperature=manifest.temperatures[0],
        seed=options.seed,
    )
    say(verdict.line)
    if verdict.warning:
        say(verdict.warning)
    return verdict.matches


def main(argv: Sequence[str]) -> int:
    """The command line above; 0 when every cache is right, 1 when one is not."""
    parser = CommandLine("jax_distill.audit")
    parser.add_argument("cache", help="a cache, or the folder with train and heldout")
    parser.add_argument("--verify", action="store_true", help="check every file against its commit")
    parser.add_argument("--spot_check", type=int, metavar="N", help="run N random rows again")
    parser.add_argument(
        "--repair", action="store_true", help="write damaged shards again with --teacher"
    )
    parser.add_argument("--teacher", help="HF folder, GGUF file or hub id")
    parser.add_argument("--seed", type=int, default=0, help="of the rows of --spot_check")
    parser.add_argument("--compare", metavar="OTHER", help="another cache of the same rows")
    parser.add_argument("--png", help="draw the statistics here")
    options = parser.parse_args(argv)
    if options.spot_check is not None and options.spot_check < 1:
        raise UserError(
            f"expected --spot_check of at least 1 row, got {options.spot_check}; raise it"
        )
    if options.seed < 0:
        raise UserError(f"expected --seed of at least 0, got {options.seed}; raise it")
    check_new_file(options.png, "--png", FIGURES)
    if (options.spot_check or options.repair) and not options.teacher:
        wants = "--repair" if options.repair else "--spot_check"
        raise UserError(f"expected --teacher DIR with {wants}, got none; name the teacher")
    return 0 if all([audit(Cache.open(path), options) for path in caches_at(options.cache)]) else 1


if __name__ == "__main__":
    run_command(main)
