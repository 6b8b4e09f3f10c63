"""Sequences with logprobs → `<cache.path>/train` and `<cache.path>/heldout`, as the teacher's pass
would have written them.

The files stand in `data.path` and the teacher's name in `teacher.path`, so that `train` with the
same configuration finds the caches finished. Where that teacher is here too, `train` checks them
against it as it checks any cache.

Held out are sequences by the rule of `data.Corpus`: the sha256 of their ids below
`data.heldout_fraction`, one at least; both parts in the order of the hashes. Rows are packed as
`packing.pack` packs documents: whole sequences, each a segment; one longer than a row is cut into
pieces, each of which goes on as the source read it, with all before in its context, while a student
reads the piece alone: a line says how many. The targets of a token stay with it.

Bounded memory: targets wait on the disk (`TMPDIR`), 6·K + 10 bytes a token, until they are packed.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from jax_distill import data, teacher
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache, Location, Manifest, create, teacher_fingerprint
from jax_distill.config import Config
from jax_distill.data.files import data_suffix
from jax_distill.data.readers import source_files
from jax_distill.import_logprobs.reading import Imported, read_sequences
from jax_distill.packing import Rows, pack

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@dataclass
class Waiting:
    """What was read, its arrays in files of `folder`.

    Attributes:
        lengths, digests, targets: of each sequence its tokens, the sha256 of its ids, and which of
            them may be predicted (bool [n]).
        clamped: positions whose 1 − Σ was below 0.
    """

    folder: Path
    lengths: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    clamped: int = 0
    _forms: dict[str, tuple[np.dtype, tuple[int, ...]]] = field(default_factory=dict)
    _files: dict[str, IO[bytes]] = field(default_factory=dict)

    def add(self, one: Imported) -> None:
        """Put a sequence at the end."""
        self.lengths.append(len(one.tokens))
        self.digests.append(hashlib.sha256(one.tokens.astype("<i4").tobytes()).digest())
        self.targets.append(one.targets)
        self.clamped += one.clamped
        for name, array in {"tokens": one.tokens, **one.encoded.arrays()}.items():
            if name not in self._files:
                self._files[name] = (self.folder / name).open("wb")
                self._forms[name] = array.dtype, array.shape[1:]
            self._files[name].write(array.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def arrays(self) -> dict[str, np.ndarray]:
        """All tokens one after the other: int32 [total] and the targets' arrays [total,..]."""
        for file in self._files.values():
            file.flush()
        total = sum(self.lengths)
        return {
            name: np.memmap(self.folder / name, dtype, "r", shape=(total, *shape))
            for name, (dtype, shape) in self._forms.items()
        }


def hold_out(digests: Sequence[bytes], fraction: float) -> tuple[list[int], list[int]]:
    """The numbers of (train, heldout) sequences, each in the order of the hashes; the rule stands
    in `data.Corpus`.

    Raises:
        UserError: fewer than two different sequences.
    """
    order = sorted(range(len(digests)), key=lambda number: digests[number])
    if len(set(digests)) < 2:
        raise UserError(
            f"expected at least 2 different sequences to hold one out, got {len(set(digests))}; "
            "give more"
        )
    bound = int(fraction * 2.0**64)
    count = sum(int.from_bytes(each[:8]) < bound for each in digests)
    first, last = (digests.count(digests[order[end]]) for end in (0, -1))
    count = min(max(count, first), len(order) - last)
    return order[count:], order[:count]


def pack_numbers(waiting: Waiting, chosen: Sequence[int], config: Config, split: str) -> Rows:
    """Rows whose `tokens` are numbers of tokens of `Waiting.arrays`: what is packed is where each
    token and its targets are."""
    text = config.data
    ends = np.cumsum(waiting.lengths)
    documents = [
        data.Document(
            np.arange(ends[number] - waiting.lengths[number], ends[number], dtype=np.int32),
            waiting.targets[number],
        )
        for number in chosen
    ]
    rows = pack(
        documents,
        sequence_length=text.sequence_length,
        packing=text.packing,
        separate_documents=text.separate_documents,
        max_rows=text.max_rows if split == "train" else text.max_heldout_rows,
    )
    say(f"{split}: {rows}")
    longer = sum(waiting.lengths[number] > text.sequence_length for number in chosen)
    if longer:
        say(
            f"{split}: WARNING: {longer:,} sequences are longer than data.sequence_length "
            f"{text.sequence_length}: a student reads pieces whose beginning the teacher saw"
        )
    if not rows.predicted:
        raise UserError(
            f"expected {split} sequences with tokens to predict, got none; give longer ones"
        )
    return rows


def shard_arrays(
    rows: Rows, arrays: dict[str, np.ndarray], manifest: Manifest, first: int, last: int
) -> dict[str, np.ndarray]:
    """Rows first to last (inclusive) as a cache's writer takes them; padding is 0."""
    own = {name: array[first : last + 1] for name, array in rows.arrays.items()}
    where, real = own["tokens"], own["segment_ids"] > 0
    for name, array in arrays.items():
        dtype, shape = manifest.array_shapes()[name]
        own[name] = np.zeros((len(where), *shape), dtype)
        own[name][real] = array[where[real]]
    return own


def _check(config: Config) -> None:
    """Refuse what logprobs from elsewhere cannot be."""
    cache = config.cache
    for key, value, needed in (
        ("cache.temperatures", cache.temperatures, [1.0]),
        ("cache.sampling", cache.sampling, "top_k"),
        ("cache.top_p", cache.top_p, None),
        ("cache.hidden_layers", cache.hidden_layers or 0, 0),
        ("teacher.mode", config.teacher.mode, "offline"),
        ("mesh.coordinator_address", config.mesh.coordinator_address, ""),
    ):
        if value != needed:
            raise UserError(
                f"expected {key} {'null' if needed is None else needed or 'empty'} for logprobs "
                f"made elsewhere (their K largest at τ = 1, by one process), got {value}; set it so"
            )
    if not config.teacher.path:
        raise UserError("expected teacher.path to name who made the logprobs, got none; set it")
    if not config.data.heldout_fraction:
        raise UserError(
            "expected data.heldout_fraction above 0, got 0; the test table wants held-out rows"
        )
    if config.data.tokenizer.startswith("bpe:"):
        raise UserError(
            f"expected data.tokenizer to be the one that made the ids, got "
            f"{config.data.tokenizer}; name its folder"
        )


def _files(config: Config) -> tuple[Any, list[Path]]:
    """`data.path` as the fingerprint takes it, and the files."""
    path = teacher.data_path(config)
    parts = [path] if isinstance(path, str) else [source.path for source in path]
    if not isinstance(path, str) and any(source.weight is not None for source in path):
        raise UserError("expected files without weights to import, got a mixture; leave them out")
    if config.data.format == "hub" or any(part.startswith("builtin:") for part in parts):
        raise UserError(
            f"expected data.path to name files of logprobs, got {', '.join(parts)}; give "
            f"{', '.join(SUFFIXES)}"
        )
    files = [file for part in parts for file in source_files(part, format=config.data.format)]
    for file in files:
        if data_suffix(file) not in SUFFIXES:
            raise UserError(
                f"expected a file of logprobs ({', '.join(SUFFIXES)}), got {file}; name others"
            )
    return path, files


def import_caches(config: Config) -> tuple[Cache, Cache]:
    """The caches of training and held-out rows, made as far as they are missing.

    Raises:
        UserError: options that such a cache cannot have; files that `read_sequences` refuses;
            another cache at that path.
        RunError: the disk is full.
    """
    _check(config)
    path, files = _files(config)
    found = teacher.find_teacher(config.teacher.path)
    tokenizer = data.Tokenizer.load(teacher.tokenizer_folder(config, found.folder))
    Location(config.cache.path).check_writable()
    head_size = found.model.vocab_size if found.model else tokenizer.length
    of_teacher = config.cache.stored_targets(config.data.sequence_length) | {
        "vocab_size": min(tokenizer.length, head_size),
        "teacher_fingerprint": teacher_fingerprint(found.source) if found.source else "imported",
        "teacher_dtype": config.teacher.dtype,
    }
    manifests = teacher.split_manifests(config, path, tokenizer, lambda _: of_teacher)
    vocab_size = manifests["train"].vocab_size
    temporary = tempfile.TemporaryDirectory(prefix="jax_distill_import_")
    with temporary as folder, Waiting(Path(folder)) as waiting:
        for file in files:
            for one in read_sequences(file, top_k=config.cache.top_k, vocab_size=vocab_size):
                waiting.add(one)
        total = sum(waiting.lengths)
        if total >= 2**31:
            raise UserError(f"expected less than 2^31 tokens, got {total:,}; import them in parts")
        parts = hold_out(waiting.digests, config.data.heldout_fraction)
        say(
            f"import: {len(waiting.lengths):,} sequences of {total:,} tokens, τ = 1; the rest of "
            f"the vocabulary is 1 − Σ, below 0 and set to 0 at {waiting.clamped:,} positions"
        )
        arrays = waiting.arrays()
        caches = []
        for split, chosen in zip(data.SPLITS, parts, strict=True):
            rows = pack_numbers(waiting, chosen, config, split)
            counts = {k: v for k, v in vars(rows).items() if isinstance(v, int)}
            counts |= {"clamped_tails": waiting.clamped}  # of both parts
            manifest = replace(manifests[split], counts=counts)
            caches.append(_write(f"{config.cache.path}/{split}", manifest, rows, arrays))
    return caches[0], caches[1]


def _write(path: str, manifest: Manifest, rows: Rows, arrays: dict[str, np.ndarray]) -> Cache:
    with create(path, manifest, len(rows)) as writer:
        for shard, first, last in writer.missing_shards():
            writer.write(shard, shard_arrays(rows, arrays, manifest, first, last))
    cache = Cache.open(path)
    cache.require_complete()
    say(
        f"cache: {cache.path} holds {cache.tokens:,} tokens, "
        f"{cache.nbytes / max(cache.tokens, 1):.1f} bytes a token"
    )
    return cache


def main(config: Config) -> None:
    """Import as configured."""
    import_caches(config)
