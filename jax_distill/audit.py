"""What a store holds, whether it is whole, and whether it is this teacher's.

`python -m jax_distill.audit STORE [--verify] [--spot_check N --teacher DIR] [--png FILE]`

STORE is one store, or the folder with `train` and `heldout`. Exit code 1: something is wrong with
it; 2: the question was.
"""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from jax_distill import hf
from jax_distill.cache import Store, commit_key, read_manifest, shard_file, teacher_fingerprint
from jax_distill.config import FIGURES, CommandLine, Refusal, check_new_file, run_command
from jax_distill.losses import IMPLEMENTATIONS
from jax_distill.model import Decoder
from jax_distill.run import console, say
from jax_distill.teacher import find_teacher

STATISTICS_TOKENS = 2_000_000  # of a larger store, rows at even distances
READ_TOKENS = 65_536  # of a read
# Nats per token between a store and its own teacher run again: fp16 gaps cost 2e-6 at fp32; bf16
# rounds hidden states otherwise in batches of another shape.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}


class Statistics(NamedTuple):
    """Of the valid positions of some rows, at the store's first temperature.

    retained: [P], probability inside the K. entropy: [P], nats, of the K+1 outcomes: a lower bound
    of the teacher's. label_in_top_k: share of the positions.
    """

    retained: np.ndarray
    entropy: np.ndarray
    label_in_top_k: float


def statistics(store: Store, rows: np.ndarray) -> Statistics | None:
    """Read rows and describe them; None where no position of them is valid."""
    temperature = store.manifest.temperatures[0]
    step = max(READ_TOKENS // store.sequence_length, 1)
    retained, entropy, found = [], [], []
    for first in range(0, len(rows), step):
        batch = store.read(rows[first : first + step], temperature=temperature)
        valid = batch["mask"]
        log_p, log_tail = batch["teacher_logprobs"][valid], batch["teacher_log_tail"][valid]
        outcomes = np.concatenate([log_p, log_tail[:, None]], axis=1).astype(np.float64)
        p = np.exp(outcomes)
        entropy.append(-(p * np.where(p > 0, outcomes, 0)).sum(axis=1))
        retained.append(-np.expm1(np.minimum(log_tail.astype(np.float64), 0)))
        real = np.arange(log_p.shape[1]) < batch["teacher_count"][valid][:, None]
        label = batch["labels"][valid][:, None]
        found.append(((batch["teacher_indices"][valid] == label) & real).any(axis=1))
    if not sum(map(len, found)):
        return None
    share = float(np.concatenate(found).mean())
    return Statistics(np.concatenate(retained), np.concatenate(entropy), share)


def array_bytes(store: Store) -> dict[str, int]:
    """Bytes on disk of each array's committed shards."""
    names = store.manifest.array_shapes()
    commits = store.commits.values()
    return {name: sum(commit["files"][name]["bytes"] for commit in commits) for name in names}


def verify(store: Store) -> list[str]:
    """Read every byte of every shard again. One line for each that is missing or not as committed:
    the file, its rows, what is wrong."""
    problems = []
    for shard in range(store.shards):
        commit = store.commits.get(shard)
        if commit is None:
            problems.append(f"{commit_key(shard)}: shard {shard} is not committed")
            continue
        for name, expected in commit["files"].items():
            key = shard_file(store.manifest, name, shard)
            problem = _file_problem(Path(store.path) / key, expected)
            if problem:
                where = f"rows {commit['first_row']}..{commit['last_row']}"
                problems.append(f"{key} ({where}): {problem}")
    return problems


def _file_problem(file: Path, expected: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return "missing"
    size = file.stat().st_size
    if size != expected["bytes"]:
        return f"{size} bytes, committed with {expected['bytes']}"
    with file.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    return None if got == expected["sha256"] else f"sha256 {got}, not {expected['sha256']}"


@partial(jax.jit, static_argnames=("vocab_size", "temperature"))
def _kl_sums(
    model: Decoder, batch: Mapping[str, jax.Array], *, vocab_size: int, temperature: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """KL(store ‖ model) over the K+1 outcomes summed over the valid tokens of [B,T]; the same with
    the store's targets one position late; the count."""
    hidden = model.hidden_states(batch["tokens"], batch["segment_ids"], batch["positions"])

    def kl(shift: int) -> tuple[jax.Array, jax.Array]:
        names = ("teacher_indices", "teacher_logprobs", "teacher_log_tail", "teacher_count")
        sums = IMPLEMENTATIONS["fused"](
            hidden,
            model.lm_head_weight(),
            batch["labels"],
            batch["mask"],
            *(jnp.roll(batch[name], shift, axis=1) for name in names),
            vocab_size=vocab_size,
            temperature=temperature,
            chunk_size=256,
        )
        return sums.kl, sums.count

    value, count = kl(0)
    return value, kl(1)[0], count


def spot_check(store: Store, model: Decoder, rows: np.ndarray) -> tuple[float, float]:
    """Mean KL per valid token between stored targets and the live teacher, and the same with the
    targets shifted by one position, in nats.

    Raises:
        Refusal: the rows hold no valid position.
    """
    temperature = store.manifest.temperatures[0]
    total = np.zeros(3)
    for row in rows:
        batch = store.read([int(row)], temperature=temperature)
        sums = _kl_sums(model, batch, vocab_size=store.manifest.vocab_size, temperature=temperature)
        total += np.array([float(x) for x in sums])
    if not total[2]:
        raise Refusal("expected rows with something to predict, got none; raise --spot_check")
    return total[0] / total[2], total[1] / total[2]


def draw(store: Store, found: Statistics) -> Figure:
    """Retained mass, entropy, and bytes a token by array."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    mass, entropy, size = figure.subplots(1, 3)
    mass.hist(found.retained, bins=np.linspace(0, 1, 41))
    mass.set_title(f"probability inside the {store.manifest.top_k}", fontsize=10)
    entropy.hist(found.entropy, bins=40)
    entropy.set_title("entropy of the K+1 outcomes, nats", fontsize=10)
    for axes in (mass, entropy):
        axes.set_ylabel("positions", fontsize=8)
    sizes = array_bytes(store)
    size.barh(list(sizes), [count / max(store.tokens, 1) for count in sizes.values()])
    size.set_title("bytes a token", fontsize=10)
    size.tick_params(labelsize=7)
    return figure


def print_facts(store: Store) -> None:
    """What the manifest and the commits say."""
    manifest = store.manifest
    facts = {
        "path": store.path,
        "rows": f"{store.rows:,} of {manifest.sequence_length:,} tokens",
        "committed": f"{len(store.commits)} of {store.shards} shards of {manifest.shard_rows} rows",
        "tokens": f"{store.tokens:,}, of which {store.targets:,} predict",
        "vocabulary": f"{manifest.vocab_size:,}, largest id {store.largest_token:,}",
        "top K": f"{manifest.top_k} ({manifest.sampling})" if manifest.top_k else "no teacher",
        "temperatures": ", ".join(map(str, manifest.temperatures)),
        "store": manifest.fingerprint,
        "teacher": f"{manifest.teacher_fingerprint} {manifest.teacher_dtype}",
        "tokenizer": manifest.tokenizer_fingerprint,
        "data": manifest.data_fingerprint,
        "settings": ", ".join(f"{key} {value}" for key, value in manifest.data.items()),
        "made with": ", ".join(f"{key} {value}" for key, value in manifest.versions.items()),
        "git revision": manifest.git_revision,
    }
    for name, value in facts.items():
        say(f"{name:<13} {value}")
    size = Table("array", "bytes", "bytes a token", title=f"{store.nbytes:,} bytes")
    tokens = max(store.tokens, 1)
    for name, count in {**array_bytes(store), "all": store.nbytes}.items():
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
    say(f"mass inside the K: mean {found.retained.mean():.4f}, least {found.retained.min():.4f}")
    say(f"label among the K: {found.label_in_top_k:.1%} of the positions")
    say(f"entropy of the K+1 outcomes: mean {found.entropy.mean():.3f} nats")


def stores_at(path: str) -> list[str]:
    """The store at `path`, or those at `path`/train and `path`/heldout.

    Raises:
        Refusal: neither is there.
    """
    inside = [path, *(f"{path}/{split}" for split in ("train", "heldout"))]
    found = [place for place in inside if read_manifest(place) is not None]
    if not found:
        raise Refusal(f"expected a store at {path}, got no manifest.json there; check the path")
    return found


def audit(store: Store, options: argparse.Namespace) -> bool:
    """Tell all that was asked about one store; whether nothing is wrong with it."""
    print_facts(store)
    if options.verify:
        problems = verify(store)
        for problem in problems:
            say(f"bad: {problem}")
        if problems:
            say(
                f"{store.path}: {len(problems)} problems; delete the commits of these shards and "
                "run the command that wrote the store again"
            )
            return False
        say(f"{store.path}: every checksum of {len(store.commits)} shards is right")
    if options.spot_check and not store.manifest.top_k:
        raise Refusal(
            f"expected a store with a teacher for --spot_check, got rows alone at {store.path}; "
            "leave --spot_check"
        )
    if not store.manifest.top_k or not store.commits:
        return True
    committed = [np.arange(c["first_row"], c["last_row"] + 1) for c in store.commits.values()]
    rows = np.concatenate(committed)
    wanted = max(STATISTICS_TOKENS // store.sequence_length, 1)
    found = statistics(store, rows[:: max(len(rows) // wanted, 1)])
    if found is None:
        say(f"{store.path}: no position predicts anything")
        return True
    print_statistics(found)
    if options.png:
        draw(store, found).savefig(_png(options.png, store), dpi=120)
    return not options.spot_check or _spot_check_passes(store, rows, options)


def _png(path: str, store: Store) -> Path:
    """`store.png`, or `store-heldout.png` where several stores are looked at in one go."""
    file = Path(path)
    name = Path(store.path).name
    return file.with_name(f"{file.stem}-{name}{file.suffix}") if name == "heldout" else file


def _spot_check_passes(store: Store, rows: np.ndarray, options: argparse.Namespace) -> bool:
    manifest = store.manifest
    found = find_teacher(options.teacher)
    folder, _ = found.require_model(other="audit")
    if teacher_fingerprint(found.place or folder) != manifest.teacher_fingerprint:
        say(f"{found.place} is not the teacher that the store was made with, by its fingerprint")
    dtype = jnp.dtype(manifest.teacher_dtype or "float32")
    model = hf.load_model(folder, param_dtype=dtype, compute_dtype=dtype)
    count = min(options.spot_check, len(rows))
    chosen = np.sort(np.random.default_rng(options.seed).choice(rows, count, replace=False))
    kl, shifted = spot_check(store, model, chosen)
    tolerance = TOLERANCES[dtype.name]
    good = kl <= tolerance and shifted > kl
    say(
        f"spot check of {count} rows (seed {options.seed}): KL to the live teacher {kl:.3g} nats "
        f"(at most {tolerance:g}), shifted by one {shifted:.3g}: {'right' if good else 'WRONG'}"
    )
    return good


def main(argv: Sequence[str]) -> int:
    """The command line above; 0 when every store is right, 1 when one is not."""
    parser = CommandLine("jax_distill.audit")
    parser.add_argument("store", help="a store, or the folder with train and heldout")
    parser.add_argument("--verify", action="store_true", help="read every checksum again")
    parser.add_argument("--spot_check", type=int, metavar="N", help="run N random rows again")
    parser.add_argument("--teacher", help="HF folder, GGUF file or hub id, for --spot_check")
    parser.add_argument("--seed", type=int, default=0, help="of the rows of --spot_check")
    parser.add_argument("--png", help="draw the statistics here")
    options = parser.parse_args(argv)
    if options.spot_check is not None and options.spot_check < 1:
        raise Refusal(
            f"expected --spot_check of at least 1 row, got {options.spot_check}; raise it"
        )
    if options.seed < 0:
        raise Refusal(f"expected --seed of at least 0, got {options.seed}; raise it")
    check_new_file(options.png, "--png", FIGURES)
    if options.spot_check and not options.teacher:
        raise Refusal("expected --teacher DIR with --spot_check, got none; name the teacher")
    return 0 if all([audit(Store.open(path), options) for path in stores_at(options.store)]) else 1


if __name__ == "__main__":
    run_command(main)
