"""Which changes would make a configuration fit: each is planned, and they are ranked."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from jax_distill.config import Config
from jax_distill.plan.planning import Plan
from jax_distill.plan.search import Outcome, Request, fits
from jax_distill.plan.target import Target

BIG_FRACTION = 0.95
SMALLEST_CHUNK = 128
FREE, SLOWER, HARDWARE, NUMBERS = range(4)
"""What a change costs, the least first: nothing but memory is saved; time, the numbers stay; more
devices; the numbers change."""


@dataclass(frozen=True)
class Change:
    """A change that may save memory.

    effort: one of the four above; cost: in words. options: for the command line; devices, fraction:
    instead of the request's, None leaves them.
    """

    effort: int
    cost: str
    options: tuple[str, ...] = ()
    devices: int | None = None
    fraction: float | None = None

    @property
    def command(self) -> str:
        """As one types it."""
        devices = [f"--devices {self.devices}"] if self.devices else []
        fraction = [f"XLA_CLIENT_MEM_FRACTION={self.fraction}"] if self.fraction else []
        return " ".join([*self.options, *devices, *fraction])

    def outcome(self, request: Request) -> Outcome:
        """The plan with this change."""
        fields = {"devices": self.devices, "fraction": self.fraction}
        changed = {name: value for name, value in fields.items() if value}
        return request.changed(*self.options, **changed).outcome(self.command)

    def joined(self, other: "Change") -> "Change":
        """Both; of a key that both set, the other's value."""
        values = dict(option.split("=", 1) for option in (*self.options, *other.options))
        return Change(
            effort=max(self.effort, other.effort),
            cost=f"{self.cost}; {other.cost}",
            options=tuple(f"{key}={value}" for key, value in values.items()),
            devices=other.devices or self.devices,
            fraction=other.fraction or self.fraction,
        )


Found = list[tuple[Change, Outcome]]


def changes_of(step: str, devices: int, config: Config, target: Target) -> list[Change]:
    """What can be changed in this configuration, the cheapest first."""
    changes: list[Change] = []
    if target.on_gpu and target.pool_bytes < BIG_FRACTION * target.device_bytes:
        changes.append(Change(FREE, "the card is this process's alone", fraction=BIG_FRACTION))
    changes += (_train_changes if step == "train" else _teacher_changes)(config, devices)
    for more in (2, 4, 8) if target.on_gpu else ():  # devices of a CPU share its memory
        if more > devices:
            changes.append(_spread(config, step, more))
    return sorted(changes, key=lambda change: change.effort)


def _halves(value: int, lowest: int, count: int) -> Iterator[int]:
    """value/2, value/4, … while whole and at least `lowest`, `count` of them at most."""
    halved = (value >> power for power in range(1, count + 1) if value % (1 << power) == 0)
    return islice((half for half in halved if half >= lowest), count)


def _train_changes(config: Config, devices: int) -> Iterator[Change]:
    train, loss, optimizer = config.train, config.loss, config.optimizer
    if loss.implementation != "fused":
        yield Change(FREE, "as fast as dense", ("--loss.implementation=fused",))
    if loss.implementation != "dense":
        for chunk in _halves(loss.chunk_size, SMALLEST_CHUNK, 2):
            cost = "the head's gradient is read and written more often"
            yield Change(SLOWER, cost, (f"--loss.chunk_size={chunk}",))
    for fewer in _halves(train.rows_per_micro_batch, devices, 3):
        if fewer % devices == 0:
            cost = f"{train.batch_size // fewer} passes a step, gradients summed in fp32"
            yield Change(SLOWER, cost, (f"--train.micro_batch_size={fewer}",))
    if train.remat != "layer":
        yield Change(SLOWER, "each layer is recomputed", ("--train.remat=layer",))
    if optimizer.name != "adafactor" and optimizer.offload == "none":
        cost = "the moments go to the host and back each step"
        yield Change(SLOWER, cost, ("--optimizer.offload=moments",))
    if optimizer.name != "adafactor" and not optimizer.layerwise:
        yield from _layerwise(config)
    if optimizer.name != "adafactor" and optimizer.state_dtype == "float32":
        yield Change(NUMBERS, "moments rounded to bf16", ("--optimizer.state_dtype=bfloat16",))
    if train.param_dtype == "float32":
        cost = "parameters in bf16, stochastic rounding"
        yield Change(NUMBERS, cost, ("--train.param_dtype=bfloat16",))


def _layerwise(config: Config) -> Iterator[Change]:
    """With all rows of a step in one pass; and with as many rows a step as a pass has now."""
    train, clips = config.train, config.optimizer.clip_norm is not None
    options = ("--optimizer.layerwise=true", "--optimizer.clip_norm=null")
    cost = ", no clipping" if clips else ""
    whole = f"--train.micro_batch_size={train.batch_size}"
    yield Change(NUMBERS if clips else SLOWER, f"one pass a step{cost}", (*options, whole))
    rows = train.rows_per_micro_batch
    if rows < train.batch_size:
        sizes = (f"--train.batch_size={rows}", f"--train.micro_batch_size={rows}")
        rows_text = f"{rows} rows a step instead of {train.batch_size}"
        yield Change(NUMBERS, f"{rows_text}{cost}", (*options, *sizes))


def _teacher_changes(config: Config, devices: int) -> Iterator[Change]:
    for rows in _halves(config.teacher.batch_size, devices, 3):
        if rows % devices == 0:
            yield Change(SLOWER, "more calls", (f"--teacher.batch_size={rows}",))
    for chunk in _halves(config.loss.chunk_size, SMALLEST_CHUNK, 2):
        yield Change(SLOWER, "more chunks", (f"--loss.chunk_size={chunk}",))
    if config.teacher.dtype == "float32":
        yield Change(NUMBERS, "the teacher in bf16", ("--teacher.dtype=bfloat16",))


def _spread(config: Config, step: str, devices: int) -> Change:
    """The same over more devices, which split parameters and moments; each has a row at least."""
    train, cost = config.train, f"{devices} devices"
    mesh = ("--mesh.data=1", f"--mesh.fsdp={devices}", "--mesh.expert=1", "--mesh.tensor=1")
    wanted = config.teacher.batch_size if step == "teacher" else train.rows_per_micro_batch
    rows = -(-wanted // devices) * devices
    if step == "teacher":
        return Change(HARDWARE, cost, (*mesh, f"--teacher.batch_size={rows}"), devices=devices)
    batch = -(-train.batch_size // rows) * rows
    if batch != train.batch_size:
        cost += f", {batch} rows a step"
    sizes = (f"--train.micro_batch_size={rows}", f"--train.batch_size={batch}")
    return Change(HARDWARE, cost, (*mesh, *sizes), devices=devices)


def suggest(request: Request, plan: Plan) -> Found:
    """Each change alone; where none is enough on the devices there are, one after the other
    together until it fits. Ranked: what fits first, then by effort, then by size. plan: of the
    request as it stands."""
    changes = changes_of(request.step, request.devices, request.config(), request.target())
    found: Found = [(change, change.outcome(request)) for change in changes]
    if not any(fits(plan) for change, plan in found if not change.devices):
        found += _together(request, found, plan)

    def rank(row: tuple[Change, Outcome]) -> tuple[int, int, int]:
        change, plan = row
        if isinstance(plan, str):
            return 2, change.effort, 0
        return 0 if plan.fits else 1, change.effort, plan.peak_bytes

    return sorted(found, key=rank)


def _together(request: Request, found: Found, plan: Plan) -> Found:
    """Changes joined one by one, the cheapest first and more devices last, until it fits; of those
    that set one key the one that saved most. Left out is a change that is refused beside those
    before it, or leaves no more memory than they did."""
    best: dict[str, tuple[Plan, Change]] = {}
    for change, of in found:
        key = change.options[0].split("=")[0] if change.options else ""
        if isinstance(of, Plan) and (key not in best or of.peak_bytes < best[key][0].peak_bytes):
            best[key] = (of, change)
    joined: Found = []
    whole, left = None, plan.margin_bytes  # the peak, and of a larger share of the card its pool
    for alone, change in sorted(best.values(), key=lambda b: (b[1].devices or 0, b[1].effort)):
        both = change if whole is None else whole.joined(change)
        of = alone if whole is None else both.outcome(request)
        if isinstance(of, str) or of.margin_bytes <= left:
            continue
        if whole is not None:
            joined.append((both, of))
        whole, left = both, of.margin_bytes
        if of.fits:
            break
    return joined
