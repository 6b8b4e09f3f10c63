"""What the training loops of both backends decide alike: where to begin, when to log, evaluate and
save, when to stop, and what a finished run says of itself. No jax, no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_distill import report
from jax_distill.base.console import Stopped, StopSignal, say
from jax_distill.base.errors import UserError
from jax_distill.base.files import write_json
from jax_distill.cache import Cache
from jax_distill.config import Config, TrainConfig
from jax_distill.run import Run, not_finite, read_metrics


class Saved(Protocol):
    """The checkpoints of a run."""

    def steps(self) -> list[int]: ...

    def latest_step(self) -> int | None: ...


def first_step(checkpoints: Saved, *, steps: int, resume_step: int | None) -> int:
    """How many steps are done already.

    Raises:
        UserError: more than are asked for; a `resume_step` without a checkpoint.
    """
    first = checkpoints.latest_step() or 0
    if resume_step is not None:
        if resume_step not in checkpoints.steps():
            raise UserError(
                f"expected train.resume_step among the checkpoints {checkpoints.steps()}, got "
                f"{resume_step}; choose one of them, or leave it out for the newest"
            )
        first = resume_step
    if first > steps:
        raise UserError(
            f"expected at least {first} steps, which are done, got {steps}; raise train.steps or "
            "train.epochs, or set another --output_dir for a shorter run"
        )
    return first


class Due(NamedTuple):
    """What is to be done after a step."""

    evaluate: bool
    save: bool
    log: bool


def due(train: TrainConfig, step: int, steps: int) -> Due:
    """After `step` of `steps` steps; the last one is evaluated, saved and logged."""

    def falls(every: int | None) -> bool:
        return bool(every and step % every == 0)

    evaluate = step == steps or falls(train.eval_every)
    return Due(
        evaluate,
        evaluate or falls(train.save_every),
        evaluate or falls(train.log_every) or step == 1,
    )


def saves(train: TrainConfig, *, first: int, steps: int) -> int:
    """How many checkpoints the steps after `first` write."""
    return sum(due(train, step, steps).save for step in range(first + 1, steps + 1))


def check_step(values: Mapping[str, float], step: int, rows: Iterable[int], saved: Saved) -> None:
    """Say where a step had nothing to learn from.

    Raises:
        RunError: loss or gradient norm are not finite; names the step and the rows.
    """
    if not np.isfinite(values["loss"] + values["gradient_norm"]):
        broken = f"loss {values['loss']}, gradient norm {values['gradient_norm']}"
        raise not_finite(step, broken, rows, saved.latest_step())
    if not values["valid_tokens"]:
        say(f"step {step}: no valid token in rows {list(map(int, rows))}: nothing was learned")


def check_validation(
    values: Mapping[str, float], step: int, rows: Iterable[int], saved: Saved
) -> None:
    """RunError where a step has broken the weights, which its own loss does not tell."""
    if not np.isfinite(values.get("val_loss", 0.0)):
        broken = f"validation loss {values['val_loss']} after it"
        raise not_finite(step, broken, rows, saved.latest_step())


def best_by(values: Mapping[str, float]) -> float | None:
    """What the best checkpoint goes by: validation KL; without a teacher, validation loss."""
    return values.get("val_kl", values.get("val_loss"))


def stopped(stop: str, what: str, step: int, steps: int) -> Stopped:
    """What ends the loop after a signal, the state being saved."""
    return Stopped(f"{what}: {stop} at step {step} of {steps}, state saved", stop)


def check_stop(stop: StopSignal, what: str, steps: int) -> None:
    """Raises Stopped where a signal came after the last step was saved."""
    if stop.received:
        message = f"{what}: {stop.received} after step {steps} of {steps}, state saved"
        raise Stopped(message, stop.received)


def last_validation(folder: Path) -> dict[str, float]:
    """The last validation means that training logged."""
    records = read_metrics(folder / "metrics.jsonl")
    last: dict[str, float] = next((r for r in reversed(records) if "val_loss" in r), {})
    return {key: value for key, value in last.items() if key.startswith("val_")}


MACHINE = ("compile_seconds", "planned_peak_bytes", "peak_bytes_in_use", "peak_host_bytes")
"""What metrics.jsonl says of the machine."""


def last_machine(folder: Path) -> dict[str, float]:
    """The latest of MACHINE that training logged, those that there are."""
    records = read_metrics(folder / "metrics.jsonl")
    return {key: r[key] for key in MACHINE for r in records if r.get(key) is not None}


def summary_of(
    run: Run,
    config: Config,
    cache: Cache,
    *,
    steps: int,
    table: Mapping[str, Mapping[str, float]],
    shown: Mapping[str, Any] | None = None,
    student_parameters: int,
    teacher_parameters: int | None,
) -> dict[str, Any]:
    """What `summary.json` says of a finished run. `shown`: what else the evaluation found, by its
    name there."""
    return {
        "test": table,
        **(shown or {}),
        "validation": last_validation(run.path),
        "student_parameters": student_parameters,
        "teacher_parameters": teacher_parameters,
        "steps": steps,
        "tokens_trained": steps * config.train.batch_size * cache.sequence_length,
        "seconds": run.seconds,
        **last_machine(run.path),
        "cache": {
            "path": cache.path,
            "tokens": cache.tokens,
            "bytes_per_token": cache.nbytes / max(cache.tokens, 1),
        },
    }


def finish(run: Run, summary: Mapping[str, Any]) -> None:
    """Write summary and report, once the student is exported."""
    write_json(run.path / "summary.json", summary)
    report.write_report(run.path, summary)
    say(f"done in {summary['seconds']:,.0f} s: {run.path}/export, summary.json, report.html")
