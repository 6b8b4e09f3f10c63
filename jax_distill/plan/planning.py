"""One program compiled, and what XLA says of it: bytes by part, operations, what travels.

`peak_bytes` is what lies on a device while the step runs: the program's own peak (arguments +
outputs + temporaries − what outputs share with donated arguments) and, beside it, what the loop
around it keeps there (`ahead`: the batches read ahead; of the teacher, the rows and results of the
rest of the shard). It is the sum of these parts, each of one device:

    parameters              their shapes under their shardings
    optimizer_state         likewise, moments and counters
    store_batch             the batch and what is kept ahead; likewise
    gradients               temporaries, at the peak, with the shape of a parameter (or of one layer
                            of it) in its dtype or fp32, but for those that the forward pass makes:
                            gradients, their sums, updates and copies on the way
    loss_chunk              other temporaries, at the peak, that the loss makes: logits, a narrow
                            copy of the head, …; of the teacher, all that finds its top K
    activations_and_temps   all the rest at the peak: other temporaries, holes between them, results

The peak is the moment when the temporaries take most. A part that is not there at that moment is 0:
where the peak is not in the loss, a smaller chunk buys nothing; `phases` says how high each stands.
Where this jax's XLA does not write its buffers down as buffers.py reads them, gradients and loss
chunk stay inside the activations and temps, and `phases` is empty.
"""

import dataclasses
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_distill import devices
from jax_distill.config import Config, Failure, FromTeacher
from jax_distill.plan.buffers import Temporaries, Value, live_bytes, read_temporaries
from jax_distill.plan.hlo import (
    COLLECTIVES,
    Hlo,
    arrays,
    product_flops,
    read_hlo,
    sources,
    totals,
    travelling,
)
from jax_distill.plan.program import TEACHERS, Program, make_program
from jax_distill.plan.target import RESERVE, Target

PARTS = (
    "parameters",
    "optimizer_state",
    "gradients",
    "activations_and_temps",
    "store_batch",
    "loss_chunk",
)
PHASES = ("forward", "loss", "backward", "update")
GB = 1e9


def gb(size: float) -> str:
    """Bytes in GB, to a hundredth; to three digits below one, down to a KB."""
    return f"{size / GB:.2f}" if abs(size) >= GB or abs(size) < 1e3 else f"{size / GB:.3g}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one configuration needs of each device. Bytes are of one device.

    Attributes:
        config: the keys that decide, by name.
        step: `train` or `teacher`. device, devices: which and how many.
        attention: the implementation.
        peak_bytes: see the top of the file; parts: they add up to it.
        program_peak_bytes, argument_bytes: of XLA's program alone.
        phases: the highest bytes in each phase of the program, what is kept ahead included.
        peak_phase: the phase of the peak; empty where XLA did not tell.
        device_bytes: memory of the device; pool_bytes: what a process gets of it, pool_note: why;
            reserve_bytes: left for what no plan sees.
        fits: peak + reserve ≤ pool; margin_bytes: what is left then (negative: what is missing).
        tokens_per_step: of all devices. flops_per_step: of all devices, by the model's formula.
        xla_flops_per_step: of all devices, products of the compiled program, recomputed ones too.
        collectives: name → {"count", "bytes"} of one device and step.
        compile_seconds: of this machine.
        jax: its version.
    """

    config: dict[str, Any]
    step: str
    device: str
    devices: int
    attention: str
    peak_bytes: int
    parts: dict[str, int]
    program_peak_bytes: int
    argument_bytes: int
    phases: dict[str, int]
    peak_phase: str
    device_bytes: int
    pool_bytes: int
    pool_note: str
    reserve_bytes: int
    fits: bool
    margin_bytes: int
    tokens_per_step: int
    flops_per_step: float
    xla_flops_per_step: float
    collectives: dict[str, dict[str, float]]
    compile_seconds: float
    jax: str


def make_plan(
    config: Config, target: Target, *, step: str = "train", reserve: float = RESERVE
) -> Plan:
    """Compile the step of `config` for `target` and read the result.

    reserve: share of the pool.

    Raises:
        Refusal: the configuration cannot be run so, or its architecture is not at hand.
        Failure: XLA will not compile it.
    """
    program = make_program(config, target, step)
    begin = time.perf_counter()
    compiled, temporaries = compile_program(program, target)
    seconds = time.perf_counter() - begin
    hlo = read_hlo(compiled.as_text())
    memory = devices.memory_of(compiled)
    peak, parts, phases = split_peak(program, memory, temporaries, hlo)
    pool = target.pool_bytes
    margin = pool - int(pool * reserve) - peak
    return Plan(
        config=_deciding_keys(config, step),
        step=step,
        device=target.name,
        devices=len(target.devices),
        attention=program.attention,
        peak_bytes=peak,
        parts=parts,
        program_peak_bytes=memory.peak,
        argument_bytes=memory.arguments,
        phases=phases,
        peak_phase=max(phases, key=lambda phase: phases[phase], default=""),
        device_bytes=target.device_bytes,
        pool_bytes=pool,
        pool_note=target.pool_note,
        reserve_bytes=int(pool * reserve),
        fits=margin >= 0,
        margin_bytes=margin,
        tokens_per_step=program.tokens,
        flops_per_step=program.flops,
        xla_flops_per_step=totals(hlo, product_flops).get("flops", 0.0) * len(target.devices),
        collectives=_collectives(hlo),
        compile_seconds=seconds,
        jax=jax.__version__,
    )


def split_peak(
    program: Program, memory: devices.Memory, temporaries: Temporaries | None, hlo: Hlo
) -> tuple[int, dict[str, int], dict[str, int]]:
    """peak_bytes, parts and phases: see the top of the file."""
    arguments = program.parameters + program.optimizer_state + program.batch
    # What a program does not read is no argument of it, and lies there all the same.
    peak = memory.peak + max(arguments - memory.arguments, 0) + program.ahead
    parts = dict.fromkeys(PARTS, 0) | {
        "parameters": program.parameters,
        "optimizer_state": program.optimizer_state,
        "store_batch": program.batch + program.ahead,
    }
    phases: dict[str, int] = {}
    if temporaries is not None:
        live, phase_of = _by_place(program, temporaries, hlo)
        together = np.sum(list(live.values()), axis=0)
        top = int(np.argmax(together))
        parts["gradients"] = int(live["gradients"][top])
        parts["loss_chunk"] = int(live["loss_chunk"][top])
        below = peak - memory.temps
        for phase in PHASES:
            inside = together[[of == phase for of in phase_of]]
            if inside.size:
                phases[phase] = below + int(inside.max())
    parts["activations_and_temps"] = peak - sum(parts.values())
    return peak, parts, phases


def compile_program(program: Program, target: Target) -> tuple[Any, Temporaries | None]:
    """The compiled program, and what lies in its temporary memory.

    Raises:
        Failure: XLA's own error, in one line.
    """
    cached = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    # A program out of the cache was not compiled, so nothing is written down.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with tempfile.TemporaryDirectory(prefix="jax_distill_plan_") as folder:
            compiled = devices.compile_ahead(
                program.jitted,
                *program.arguments,
                planned=target.planned,
                options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True},
                **program.static,
            )
            return compiled, read_temporaries(Path(folder))
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise Failure(f"expected XLA to compile the step, got: {reason}") from error
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def phase_of_source(source: str, scope: str) -> str:
    """Which phase of the step a line of JAX's name stack stands in. scope: the loss's name, or that
    of what finds the teacher's top K; all else that a teacher does is forward."""
    words = set(re.split(r"[/()]", source))
    if scope in words:
        return "loss"
    if scope == TEACHERS:
        return "forward"
    if "transpose" in words:
        return "backward"
    return "forward" if "jvp" in words else "update"


def _kind(value: Value, source: str, program: Program) -> str:
    """The part that a temporary belongs to."""
    phase = phase_of_source(source, program.scope)
    found = arrays(value.shape)
    if phase != "forward" and len(found) == 1 and found[0] in program.parameter_shapes:
        return "gradients"
    return "loss_chunk" if phase == "loss" else "other"


def _by_place(
    program: Program, temporaries: Temporaries, hlo: Hlo
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Temporary bytes by kind, and the phase, at each place of the schedule."""
    source = sources(hlo)
    kinds = [_kind(value, source.get(value.name, ""), program) for value in temporaries.values]
    live = live_bytes(temporaries, kinds, ("gradients", "loss_chunk", "other"))
    phases, last = [], "forward"
    for name in temporaries.schedule:
        if source.get(name):
            last = phase_of_source(source[name], program.scope)
        phases.append(last)
    return live, phases


def _collectives(hlo: Hlo) -> dict[str, dict[str, float]]:
    found = totals(hlo, travelling)
    return {
        name: {"count": found[name], "bytes": found[f"{name} bytes"]}
        for name in COLLECTIVES
        if name in found
    }


def _deciding_keys(config: Config, step: str) -> dict[str, Any]:
    """The keys of the configuration that memory depends on."""
    names = ["data.sequence_length", "cache.top_k", "loss.chunk_size", "mesh.data", "mesh.fsdp"]
    if step == "teacher":
        names = ["teacher.path", "teacher.dtype", "teacher.batch_size", *names, "cache.shard_rows"]
    else:
        names += ["loss.implementation", "student.path", "student.from_teacher"]
        names += [f"optimizer.{k}" for k in ("name", "state_dtype", "layerwise", "clip_norm")]
        names += ["train.batch_size", "train.micro_batch_size", "train.param_dtype"]
        names += ["train.compute_dtype", "train.remat"]
    values = {}
    for name in names:
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        values[name] = dataclasses.asdict(value) if isinstance(value, FromTeacher) else value
    return values
