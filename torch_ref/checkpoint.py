"""Training state on disk: parameters, optimizer state, step and seed, one file a step.

A file is written beside its place, flushed and renamed, so a kill leaves whole checkpoints only.
The last n are kept and, besides, the best by held-out KL (without a teacher, by held-out loss).
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from jax_distill.config import Failure, Refusal
from jax_distill.run import write_json
from torch_ref.optimizer import Optimizer

NAME = re.compile(r"step_(\d+)\.pt")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, seed: int) -> None:
        """Open or create `folder`.

        Raises:
            Refusal: it cannot be written, or another program's checkpoints lie there.
        """
        self._folder, self._keep, self._seed = folder, keep, seed
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(f"expected a writable {folder}, got {error.strerror}") from None
        for path in folder.glob("*.tmp"):
            path.unlink()
        foreign = [p.name for p in folder.iterdir() if p.is_dir()]
        if foreign:
            raise Refusal(
                f"expected checkpoints of torch_ref in {folder}, got {foreign[0]} of another "
                "program; set another --output_dir"
            )

    def steps(self) -> list[int]:
        """Every step that can be restored."""
        matches = (NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest held-out number among those that were saved with one."""
        losses = self._heldout()
        return min(losses, key=losses.__getitem__, default=None)

    def save(
        self,
        step: int,
        parameters: dict[str, torch.Tensor],
        optimizer: Optimizer,
        *,
        heldout: float | None = None,
    ) -> None:
        """Write the state as of `step`, then remove what need not be kept. `heldout` is what the
        best goes by: the smaller the better.

        Raises:
            Failure: the disk does not take it; the last good checkpoint stays.
        """
        content = {
            "step": step,
            "seed": self._seed,
            "parameters": {name: p.detach() for name, p in parameters.items()},
            "optimizer": {"count": optimizer.count, "state": optimizer.state},
        }
        temporary = self._folder / f"step_{step:08d}.tmp"
        try:
            with temporary.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path(step))
            losses = self._heldout() | ({} if heldout is None else {step: heldout})
            write_json(self._folder / "heldout.json", losses)
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Failure(
                f"expected to save step {step} in {self._folder}, got: {reason}; "
                f"last checkpoint: step {self.latest_step() or 0}"
            ) from error
        kept = {*self.steps()[-self._keep :], self.best_step()}
        for old in set(self.steps()) - kept:
            self._path(old).unlink()

    def restore(self, step: int, parameters: dict[str, torch.Tensor], optimizer: Optimizer) -> None:
        """Put the state of a step into the tensors and the optimizer given.

        Raises:
            Refusal: the run had another seed or other parameters.
        """
        place = next(iter(parameters.values())).device
        content: dict[str, Any] = torch.load(self._path(step), map_location=place)
        if content["seed"] != self._seed:
            raise Refusal(
                f"expected a checkpoint with seed {self._seed}, got {content['seed']}; set seed "
                "to the run's, or another --output_dir"
            )
        differ = sorted(content["parameters"].keys() ^ parameters.keys())
        if differ:
            raise Refusal(f"expected a checkpoint of this student, got another {differ[0]}")
        with torch.no_grad():
            for name, value in content["parameters"].items():
                parameters[name].copy_(value)
        optimizer.count = content["optimizer"]["count"]
        optimizer.state = content["optimizer"]["state"]

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}.pt"

    def _heldout(self) -> dict[int, float]:
        """step → held-out number of the checkpoints that are there."""
        path = self._folder / "heldout.json"
        if not path.exists():
            return {}
        stored = json.loads(path.read_text(encoding="utf-8"))
        here = set(self.steps())
        return {int(k): v for k, v in stored.items() if int(k) in here and v is not None}
