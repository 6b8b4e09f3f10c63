"""One program compiled, and what XLA says of it: bytes by part, FLOPs, collectives.

`peak_bytes` is what is on a device while the step runs: the program's own peak (arguments +
outputs + temporaries − what outputs share with donated arguments) and, beside it, what the loop
around it keeps there (`ahead`: the batches read ahead; of the teacher, the rows and results of
AHEAD more) and cuDNN's workspace, of which XLA knows nothing where there is no GPU to ask.
It is the sum of these parts, each of one device:

    parameters              their shapes under their shardings
    teacher                 of one that runs beside the student; likewise
    optimizer_state         likewise, moments and counters; not what `optimizer.offload` keeps in
                            the host's memory (`host_bytes`): a layer of it is among the temps
    cache_batch             the batch and what is kept ahead; likewise
    gradients               temporaries, at the peak, with the shape of a parameter (or of one layer
                            of it) in its dtype or fp32, but for those of the forward pass:
                            gradients, their sums, updates and copies on the way
    loss_chunk              other temporaries of the loss at the peak: logits, the head in bf16, …;
                            of the teacher, all that finds its top K
    cudnn_workspace         of the backward of cuDNN's attention, `attention.backward_workspace`; 0
                            for other attention, for the teacher's forward, and on a GPU that is
                            there, where XLA asks cuDNN and counts it among the temporaries
    activations_and_temps   all the rest at the peak: other temporaries, holes between them, results

The peak is the moment when the temporaries take most, plus the workspace even where that moment is
not in the backward, the one phase that needs it: at most that much too much. Any other part that is
not there at that moment is 0: where the peak is not in the loss, a smaller chunk saves nothing;
`phases` has the peak of each. Where this jax's XLA does not write its buffers down as buffers.py
reads them, gradients and loss chunk are counted among the activations and temps, and `phases` is
empty.
"""

import dataclasses
import re
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_distill import devices
from jax_distill.base.errors import RunError
from jax_distill.config import Config, as_dict
from jax_distill.plan.buffers import Temporaries, Value, live_bytes, read_temporaries
from jax_distill.plan.hlo import (
    COLLECTIVES,
    Hlo,
    arrays,
    collective_bytes,
    hidden_workspace,
    matmul_flops,
    read_hlo,
    sources,
    totals,
)
from jax_distill.plan.program import TEACHER_SCOPE, Program, make_program
from jax_distill.plan.roofline import Roofline, instructions_of, make_roofline, rates_of
from jax_distill.plan.target import RESERVE, Target

PARTS = (
    "parameters",
    "teacher",
    "optimizer_state",
    "gradients",
    "activations_and_temps",
    "cache_batch",
    "loss_chunk",
    "cudnn_workspace",
)
PHASES = ("forward", "loss", "backward", "update")
GB = 1e9


def gb(size: float) -> str:
    """Bytes in GB, to a hundredth; to three digits below one, down to a KB."""
    return f"{size / GB:.2f}" if abs(size) >= GB or abs(size) < 1e3 else f"{size / GB:.3g}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one configuration needs of each device. Bytes are of one device; tokens and FLOPs are of
    all devices and one step."""

    config: dict[str, Any]  # the keys that memory depends on, by name
    step: str  # train or teacher
    device: str
    devices: int
    attention: str  # its implementation
    peak_bytes: int  # see the top of the file
    parts: dict[str, int]  # by PARTS; they add up to peak_bytes
    program_peak_bytes: int  # of XLA's program alone
    argument_bytes: int  # likewise
    host_bytes: dict[str, int]  # of the host's memory for all devices, by name; empty: no offload
    phases: dict[str, int]  # the peak in each phase, what is kept ahead included
    peak_phase: str  # the phase of the peak; empty where XLA did not write it down
    device_bytes: int
    pool_bytes: int  # what a process gets of the device
    pool_note: str  # why that much
    reserve_bytes: int  # kept free for what no plan sees
    fits: bool  # peak + reserve ≤ pool
    margin_bytes: int  # what is left then; negative: what is missing
    tokens_per_step: int
    flops_per_step: float  # by the model's formula
    xla_flops_per_step: (
        float  # its matmuls, recomputed ones too; a loop of unknown length: one turn
    )
    collectives: dict[str, dict[str, float]]  # name → count and bytes of one device and step
    roofline: Roofline | None  # computed; None on what is no known card, and in fp32
    compile_seconds: float  # of this machine
    jax: str  # its version


def make_plan(
    config: Config, target: Target, *, step: str = "train", reserve: float = RESERVE
) -> Plan:
    """Compile the step of `config` for `target` and read the result.

    reserve: share of the pool.

    Raises:
        UserError: the configuration cannot be run so, or its architecture is not at hand.
        RunError: XLA will not compile it.
    """
    with devices.tracing_for(target.devices[0]) if target.planned else nullcontext():
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
        host_bytes=program.host,
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
        xla_flops_per_step=totals(hlo, matmul_flops).get("flops", 0.0) * len(target.devices),
        collectives=_collectives(hlo),
        roofline=_roofline(config, target, program, hlo, step),
        compile_seconds=seconds,
        jax=jax.__version__,
    )


def split_peak(
    program: Program, memory: devices.Memory, temporaries: Temporaries | None, hlo: Hlo
) -> tuple[int, dict[str, int], dict[str, int]]:
    """peak_bytes, parts and phases: see the top of the file."""
    arguments = program.parameters + program.teacher + program.optimizer_state + program.batch
    # What a program does not read is no argument of it, and is on the device all the same.
    planned = memory.peak + max(arguments - memory.arguments, 0) + program.ahead
    workspace = hidden_workspace(hlo)
    peak = planned + workspace
    parts = dict.fromkeys(PARTS, 0) | {
        "parameters": program.parameters,
        "teacher": program.teacher,
        "optimizer_state": program.optimizer_state,
        "cache_batch": program.batch + program.ahead,
        "cudnn_workspace": workspace,
    }
    phases: dict[str, int] = {}
    if temporaries is not None:
        live, phase_of = _over_time(program, temporaries, hlo)
        together = np.sum(list(live.values()), axis=0)
        top = int(np.argmax(together))
        parts["gradients"] = int(live["gradients"][top])
        parts["loss_chunk"] = int(live["loss_chunk"][top])
        below = planned - memory.temps
        for phase in PHASES:
            inside = together[[of == phase for of in phase_of]]
            if inside.size:
                phases[phase] = below + int(inside.max())
                phases[phase] += workspace if phase == "backward" else 0
    parts["activations_and_temps"] = peak - sum(parts.values())
    return peak, parts, phases


def compile_program(program: Program, target: Target) -> tuple[Any, Temporaries | None]:
    """The compiled program, and what is in its temporary memory.

    Raises:
        RunError: XLA's own error, in one line.
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
        raise RunError(f"expected XLA to compile the step, got: {reason}") from error
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def phase_of_source(source: str, scope: str) -> str:
    """The phase of the step that JAX's name stack `source` belongs to. scope: the loss's name, or
    that of what finds the teacher's top K, which is of the loss where the teacher is live; all else
    that a teacher does is forward."""
    words = set(re.split(r"[/()]", source))
    if scope in words or (scope != TEACHER_SCOPE and TEACHER_SCOPE in words):
        return "loss"
    if scope == TEACHER_SCOPE:
        return "forward"
    if "transpose" in words:
        return "backward"
    return "forward" if "jvp" in words else "update"


def _kind(value: Value, source: str, program: Program) -> str:
    """The part that a temporary belongs to."""
    phase = phase_of_source(source, program.scope)
    found = arrays(value.shape)
    if phase != "forward" and len(found) == 1 and found[0] in program.gradient_shapes:
        return "gradients"
    return "loss_chunk" if phase == "loss" else "other"


def _over_time(
    program: Program, temporaries: Temporaries, hlo: Hlo
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Temporary bytes by kind, and the phase, at each instruction of the schedule."""
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
    found = totals(hlo, collective_bytes)
    return {
        name: {"count": found[name], "bytes": found[f"{name} bytes"]}
        for name in COLLECTIVES
        if name in found
    }


def _roofline(
    config: Config, target: Target, program: Program, hlo: Hlo, step: str
) -> Roofline | None:
    dtype = config.train.compute_dtype if step == "train" else config.teacher.dtype
    rates = rates_of(target.name) if dtype == "bfloat16" else None
    if rates is None:
        return None
    in_loss = instructions_of(hlo, program.scope)
    return make_roofline(hlo, rates, devices=len(target.devices), in_loss=in_loss)


KEYS = {
    "train": """teacher.mode teacher.packed_experts data.sequence_length cache.top_k
        loss.chunk_size loss.gradient_chunks loss.implementation loss.hidden_weight
        loss.hidden_layers mesh.data mesh.fsdp mesh.expert mesh.tensor student.path
        student.from_teacher optimizer.name optimizer.state_dtype optimizer.layerwise
        optimizer.offload optimizer.clip_norm train.batch_size train.micro_batch_size
        train.param_dtype train.compute_dtype train.remat""",
    "teacher": """teacher.path teacher.dtype teacher.packed_experts teacher.batch_size
        data.sequence_length cache.top_k cache.hidden_layers loss.chunk_size mesh.data mesh.fsdp
        mesh.expert mesh.tensor""",
}
"""Those that memory depends on, by step."""


def _deciding_keys(config: Config, step: str) -> dict[str, Any]:
    sections = as_dict(config)
    return {key: sections[key.split(".")[0]][key.split(".")[1]] for key in KEYS[step].split()}
