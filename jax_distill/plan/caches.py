"""What a cache of so many tokens takes: bytes, objects, requests, hours of the teacher. Computed.

    python -m jax_distill.plan --config X.yaml --device h200 --cache_tokens 1000000000,100000000000

Of the training rows, full ones. Rates are the roofline's: matmuls at 80 % of the card's bf16 rate,
nothing else counted, so that hours are the least there can be, and requests a second the most.

Requests, as the cache makes them of a file system (a test counts them): a shard is written by a put
of each array and one of its commit, and read back once by a get of each array; a random row is read
by two gets of each array, one of the shard's index and one of the row.
"""

import dataclasses
from collections.abc import Callable, Sequence

from rich.table import Table

from jax_distill import student
from jax_distill.base.console import console
from jax_distill.base.errors import UserError
from jax_distill.cache import Manifest
from jax_distill.config import Config
from jax_distill.devices import find_gpu
from jax_distill.hf.locate import find_architecture
from jax_distill.hidden_layers import cached_layers, hidden_arrays
from jax_distill.model import train_flops_per_token
from jax_distill.plan.roofline import Rates, rates_of
from jax_distill.teacher.writing import expected_bytes

METADATA = 4
"""Objects beside shards, commits and each array's zarr.json: the manifest, two heads, the lock."""
RECOMPUTED = {"none": 3.0, "dots": 3.0, "layer": 4.0}
"""Forward passes that a training step is worth, by train.remat."""


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Of one cache. Objects are files of a file system.

    Attributes:
        tokens, rows, shards, objects: counts. bytes: `teacher.expected_bytes`.
        teacher_hours: of `devices` devices. puts, gets: a second, while they write the cache.
        train_gets: a second of random rows that one training device reads.
    """

    tokens: int
    rows: int
    shards: int
    objects: int
    bytes: int
    teacher_hours: float
    puts: float
    gets: float
    train_gets: float


def requests(manifest: Manifest) -> tuple[int, int, int]:
    """(puts of a shard, gets of a shard, gets of a random row)."""
    arrays = len(manifest.stored_shapes())
    return arrays + 1, arrays, 2 * arrays


def plan_cache(
    manifest: Manifest, tokens: int, *, teacher_rate: float, train_rate: float
) -> CachePlan:
    """teacher_rate, train_rate: tokens a second of all devices that write, of one that trains."""
    arrays, length = len(manifest.stored_shapes()), manifest.sequence_length
    rows = -(-tokens // length)
    shards = -(-rows // manifest.shard_rows)
    puts, gets, row_gets = requests(manifest)
    shards_a_second = teacher_rate / (length * manifest.shard_rows)
    return CachePlan(
        tokens=tokens,
        rows=rows,
        shards=shards,
        objects=shards * (arrays + 1) + arrays + METADATA,
        bytes=expected_bytes(manifest, rows),
        teacher_hours=tokens / teacher_rate / 3600,
        puts=shards_a_second * puts,
        gets=shards_a_second * gets,
        train_gets=train_rate / length * row_gets,
    )


def plan_caches(
    config: Config, counts: Sequence[int], *, device: str, devices: int
) -> list[CachePlan]:
    """A plan for each number of tokens, of `devices` cards called `device` in `devices.GPUS`.

    Raises:
        UserError: no such card; no teacher, or none whose config.json is at hand.
    """
    if not config.teacher.path or config.teacher.is_live:
        raise UserError(
            "expected teacher.path and teacher.mode offline for --cache_tokens, got "
            f"{config.teacher.path or 'no teacher'}, {config.teacher.mode}; name a teacher"
        )
    rates = rates_of(find_gpu(device).name)
    assert rates is not None, "of a card in GPUS"
    length, cache = config.data.sequence_length, config.cache
    model, vocab_size = find_architecture(config.teacher.path, "teacher.path")
    layers = cached_layers(cache.hidden_layers, model.num_hidden_layers)
    targets = cache.stored_targets(length)
    targets["optional"] |= hidden_arrays(layers, length, model.hidden_size)
    manifest = Manifest(
        sequence_length=length, shard_rows=cache.shard_rows, vocab_size=vocab_size, **targets
    )
    forward = train_flops_per_token(model, length) / 3
    return [
        plan_cache(
            manifest,
            tokens,
            teacher_rate=devices * rates.flops / forward,
            train_rate=_train_rate(config, rates),
        )
        for tokens in counts
    ]


def _train_rate(config: Config, rates: Rates) -> float:
    """Tokens a second of the student on one device."""
    model = student.planned_architecture(config).model
    step = train_flops_per_token(model, config.data.sequence_length)
    return rates.flops / (step / 3 * RECOMPUTED[config.train.remat])


def print_caches(plans: Sequence[CachePlan], *, device: str, devices: int) -> None:
    """The plans beside each other."""
    title = f"the cache, computed, not measured; the teacher on {devices} × {device}"
    table = Table("tokens", title=title, title_justify="left")
    for each in plans:
        table.add_column(f"{each.tokens:,}", justify="right")
    lines: dict[str, Callable[[CachePlan], str]] = {
        "GB": lambda x: f"{x.bytes / 1e9:,.0f}",
        "bytes a token": lambda x: f"{x.bytes / x.tokens:.0f}",
        "rows": lambda x: f"{x.rows:,}",
        "shards": lambda x: f"{x.shards:,}",
        "objects": lambda x: f"{x.objects:,}",
        "hours of the teacher, at least": lambda x: f"{x.teacher_hours:,.1f}",
        "puts a second, writing": lambda x: f"{x.puts:.2g}",
        "gets a second, writing": lambda x: f"{x.gets:.2g}",
        "gets a second of one training device": lambda x: f"{x.train_gets:.2g}",
    }
    for name, value in lines.items():
        table.add_row(name, *map(value, plans))
    console.print(table)
