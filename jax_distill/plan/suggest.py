"""What would make a configuration fit: every knob turned, planned, and ranked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from jax_distill.config import Config
from jax_distill.plan.planning import Plan
from jax_distill.plan.search import Question, outcome, tried
from jax_distill.plan.target import Target
from jax_distill.run import say

BIG_FRACTION = 0.95
SMALLEST_CHUNK = 128
FREE, SLOWER, HARDWARE, NUMBERS = range(4)
"""Efforts, by which knobs are ranked: nothing changes but the memory; the numbers stay, and it may
be slower; more devices; the numbers change."""


@dataclass(frozen=True)
class Knob:
    """A change that may save memory.

    effort: one of the four above; cost: in words. options: for the command line; devices, fraction:
    other than asked for.
    """

    effort: int
    cost: str
    options: tuple[str, ...] = ()
    devices: int | None = None
    fraction: float | None = None

    @property
    def command(self) -> str:
        """As one types it."""
        words = list(self.options)
        if self.devices:
            words.append(f"--devices {self.devices}")
        if self.fraction:
            words.append(f"XLA_CLIENT_MEM_FRACTION={self.fraction}")
        return " ".join(words)


Found = list[tuple[Knob, Plan | str]]


def knobs_of(question: Question, config: Config, target: Target) -> list[Knob]:
    """What can be turned in this configuration, the cheapest first."""
    knobs: list[Knob] = []
    if target.on_gpu and target.pool_bytes < BIG_FRACTION * target.device_bytes:
        knobs.append(Knob(FREE, "the card is this process's alone", fraction=BIG_FRACTION))
    if question.step == "train":
        knobs += _exact_knobs(config, question.devices) + _rounding_knobs(config)
    else:
        knobs += _teacher_knobs(config, question.devices)
    for devices in (2, 4, 8) if target.on_gpu else ():  # devices of a CPU share its memory
        if devices > question.devices:
            knobs.append(_spread(config, question.step, devices))
    return sorted(knobs, key=lambda knob: knob.effort)


def _halves(value: int, lowest: int, count: int) -> Iterator[int]:
    """value/2, value/4, … while whole and at least `lowest`, `count` of them at most."""
    halved = (value >> power for power in range(1, count + 1) if value % (1 << power) == 0)
    return islice((half for half in halved if half >= lowest), count)


def _exact_knobs(config: Config, devices: int) -> list[Knob]:
    """Those that leave the numbers of training as they are."""
    train, loss = config.train, config.loss
    rows = train.micro_batch_size or train.batch_size
    knobs = []
    if loss.implementation != "fused":
        knobs.append(Knob(FREE, "as fast as dense", ("--loss.implementation=fused",)))
    if loss.implementation != "dense":
        cost = "the head's gradient is read and written more often"
        for chunk in _halves(loss.chunk_size, SMALLEST_CHUNK, 2):
            knobs.append(Knob(SLOWER, cost, (f"--loss.chunk_size={chunk}",)))
    for fewer in _halves(rows, devices, 3):
        if fewer % devices == 0:
            cost = f"{train.batch_size // fewer} passes a step, gradients summed in fp32"
            knobs.append(Knob(SLOWER, cost, (f"--train.micro_batch_size={fewer}",)))
    if train.remat != "layer":
        cost = "each layer is computed once more"
        knobs.append(Knob(SLOWER, cost, ("--train.remat=layer",)))
    return knobs


def _rounding_knobs(config: Config) -> list[Knob]:
    """Those that change the numbers, or may."""
    train, optimizer = config.train, config.optimizer
    knobs = []
    if not optimizer.layerwise and optimizer.name != "adafactor":
        unclipped = optimizer.clip_norm is None
        whole = f"--train.micro_batch_size={train.batch_size}"
        options = ("--optimizer.layerwise=true", "--optimizer.clip_norm=null", whole)
        cost = "one pass a step" + ("" if unclipped else ", no clipping")
        knobs.append(Knob(SLOWER if unclipped else NUMBERS, cost, options))
    if optimizer.state_dtype == "float32" and optimizer.name != "adafactor":
        cost = "moments rounded to bf16"
        knobs.append(Knob(NUMBERS, cost, ("--optimizer.state_dtype=bfloat16",)))
    if train.param_dtype == "float32":
        cost = "parameters rounded to bf16, by chance"
        knobs.append(Knob(NUMBERS, cost, ("--train.param_dtype=bfloat16",)))
    return knobs


def _teacher_knobs(config: Config, devices: int) -> list[Knob]:
    knobs = []
    for rows in _halves(config.teacher.batch_size, devices, 3):
        if rows % devices == 0:
            knobs.append(Knob(SLOWER, "more calls", (f"--teacher.batch_size={rows}",)))
    for chunk in _halves(config.loss.chunk_size, SMALLEST_CHUNK, 2):
        knobs.append(Knob(SLOWER, "more chunks", (f"--loss.chunk_size={chunk}",)))
    for shard in _halves(config.cache.shard_rows, 1, 2):
        knobs.append(Knob(SLOWER, "more shards", (f"--cache.shard_rows={shard}",)))
    if config.teacher.dtype == "float32":
        knobs.append(Knob(NUMBERS, "the teacher in bf16", ("--teacher.dtype=bfloat16",)))
    return knobs


def _spread(config: Config, step: str, devices: int) -> Knob:
    """The same over more devices: what lasts is split among them, each has a row at least."""
    split = ("--mesh.data=1", f"--mesh.fsdp={devices}")
    cost = f"{devices} devices"
    if step == "teacher":
        rows = -(-config.teacher.batch_size // devices) * devices
        options = (*split, f"--teacher.batch_size={rows}")
        return Knob(HARDWARE, cost, options, devices=devices)
    train = config.train
    rows = -(-(train.micro_batch_size or train.batch_size) // devices) * devices
    batch = -(-train.batch_size // rows) * rows
    if batch != train.batch_size:
        cost += f", {batch} rows a step"
    sizes = (f"--train.micro_batch_size={rows}", f"--train.batch_size={batch}")
    return Knob(HARDWARE, cost, (*split, *sizes), devices=devices)


def suggest(question: Question, config: Config, target: Target, plan: Plan) -> Found:
    """Each knob alone; where none is enough, one after the other together until it fits. Ranked:
    what fits first, then by effort, then by size. plan: of the configuration as it stands."""
    found: Found = []
    for knob in knobs_of(question, config, target):
        found.append((knob, _turn(question, knob)))
    if not any(_fits(plan) for _, plan in found):
        found += _together(question, found, plan)

    def rank(row: tuple[Knob, Plan | str]) -> tuple[int, int, int]:
        knob, plan = row
        if isinstance(plan, str):
            return 2, knob.effort, 0
        return 0 if plan.fits else 1, knob.effort, plan.peak_bytes

    return sorted(found, key=rank)


def _fits(plan: Plan | str) -> bool:
    return isinstance(plan, Plan) and plan.fits


def _turn(question: Question, knob: Knob) -> Plan | str:
    plan = tried(lambda: question.plan(*knob.options, devices=knob.devices, fraction=knob.fraction))
    say(f"{knob.command}: {outcome(plan)}")
    return plan


def _together(question: Question, found: Sequence[tuple[Knob, Plan | str]], plan: Plan) -> Found:
    """Knobs joined one by one, the cheap before the dear and more devices last, until it fits; of
    those that turn one key the one that saved most. Left out is a knob that is refused beside those
    before it, or leaves no more memory than they did."""
    best: dict[str, tuple[Plan, Knob]] = {}
    for knob, of in found:
        key = knob.options[0].split("=")[0] if knob.options else ""
        if isinstance(of, Plan) and (key not in best or of.peak_bytes < best[key][0].peak_bytes):
            best[key] = (of, knob)
    joined: Found = []
    whole, left = None, plan.margin_bytes  # the peak, and of a larger share of the card its pool
    for alone, knob in sorted(best.values(), key=lambda b: (b[1].devices or 0, b[1].effort)):
        both = knob if whole is None else _join(whole, knob)
        turned = alone if whole is None else _turn(question, both)
        if isinstance(turned, str) or turned.margin_bytes <= left:
            continue
        if whole is not None:
            joined.append((both, turned))
        whole, left = both, turned.margin_bytes
        if turned.fits:
            break
    return joined


def _join(first: Knob, second: Knob) -> Knob:
    """Both turned; of a key that both set, the second's value."""
    values = dict(option.split("=", 1) for option in (*first.options, *second.options))
    return Knob(
        effort=max(first.effort, second.effort),
        cost=f"{first.cost}; {second.cost}",
        options=tuple(f"{key}={value}" for key, value in values.items()),
        devices=second.devices or first.devices,
        fraction=second.fraction or first.fraction,
    )
