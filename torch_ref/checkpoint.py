"""Training state on disk: parameters, optimizer state, step and seed, one file a step.

A file is written beside its path, flushed and renamed, so a kill leaves whole checkpoints only.
Then its sha256 is written beside it, as `sha256sum --check` reads it, and checked before the step
is restored. The last n are kept and, besides, the best by validation KL (without a teacher,
validation loss).
"""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import sha256_of, write_json, write_text
from jax_distill.base.json_object import DAMAGE, one_line, read_json_object

NAME = re.compile(r"step_(\d{8,})\.pt")
TEMPORARY = re.compile(r"step_\d+\.tmp|\.step_\d+\.sha256\.tmp|\.validation\.json\.tmp")
# What torch.load raises besides, of a file that is not what was saved.
UNREADABLE = (*DAMAGE, RuntimeError, EOFError, pickle.UnpicklingError)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, seed: int) -> None:
        """Open or create `folder`.

        Raises:
            UserError: it cannot be written, or another program's checkpoints lie there.
            RunError: the list of validation values is damaged.
        """
        self._folder, self._keep, self._seed = folder, keep, seed
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"expected a writable {folder}, got {error.strerror}") from None
        for path in folder.iterdir():
            if TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink()
        foreign = [p.name for p in folder.iterdir() if p.is_dir()]
        if foreign:
            raise UserError(
                f"expected checkpoints of torch_ref in {folder}, got {foreign[0]} of another "
                "program; set another --output_dir"
            )
        self._validation()  # damage shows before any work

    def steps(self) -> list[int]:
        """Every step that can be restored."""
        matches = (NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest validation value among those that were saved with one."""
        losses = self._validation()
        return min(losses, key=losses.__getitem__, default=None)

    def save(
        self,
        step: int,
        parameters: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        validation: float | None = None,
    ) -> None:
        """Write the state as of `step`, then remove what need not be kept. `validation`
        decides the best: the smaller the better.

        Raises:
            RunError: the disk does not take it; the last good checkpoint stays.
        """
        content = {
            "step": step,
            "seed": self._seed,
            "parameters": {name: p.detach() for name, p in parameters.items()},
            "optimizer": optimizer.state_dict(),
        }
        temporary = self._folder / f"step_{step:08d}.tmp"
        try:
            with temporary.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            self._record(step).unlink(missing_ok=True)
            os.replace(temporary, self._path(step))
            write_text(self._record(step), self._line(step))
            losses = self._validation() | ({} if validation is None else {step: validation})
            write_json(self._validation_file, losses)
        except (OSError, RuntimeError) as error:
            raise RunError(
                f"expected to save step {step} in {self._folder}, got: {one_line(error)}; "
                f"last checkpoint: step {self.latest_step() or 0}"
            ) from error
        kept = {*self.steps()[-self._keep :], self.best_step()}
        for old in set(self.steps()) - kept:
            self._path(old).unlink()
            self._record(old).unlink(missing_ok=True)

    def verify(self, step: int) -> bool:
        """Whether the step's file is proven to be the one that was saved; False without a sha256,
        which is a step whose run was killed right after the rename.

        Raises:
            RunError: it is not; names the newest step that can be restored.
        """
        if not self._record(step).is_file():
            return False
        if not self._is_whole(step):
            raise RunError(self._damaged(step, f"{self._path(step).name}: not as its sha256 says"))
        return True

    def restore(
        self, step: int, parameters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        """Put the state of a step into the tensors and the optimizer given.

        Raises:
            RunError: the step is damaged (see `verify`).
            UserError: the run had another seed or other parameters.
        """
        if not self.verify(step):
            say(f"checkpoint of step {step}: no sha256, the save was interrupted; not verified")
        path = self._path(step)
        try:
            # On the host: two states at once may not fit the device.
            content: dict[str, Any] = torch.load(path, map_location="cpu")
            found = {"step": content["step"], "seed": content["seed"]}
            stored = {name: tuple(x.shape) for name, x in content["parameters"].items()}
            optimizer_state = content["optimizer"]
        except UNREADABLE as error:
            reason = f"{path.name} does not read: {type(error).__name__}: {one_line(error)}"
            raise RunError(self._damaged(step, reason)) from error
        if found != {"step": step, "seed": self._seed}:
            raise UserError(
                f"expected a checkpoint of step {step}, seed {self._seed}, got {found}; set seed "
                "to the run's, or another --output_dir"
            )
        shapes = {name: tuple(x.shape) for name, x in parameters.items()}
        differ = sorted({name for name, _ in stored.items() ^ shapes.items()})
        if differ:
            raise UserError(
                f"expected a checkpoint of this student, got another {differ[0]}; set another "
                "--output_dir"
            )
        with torch.no_grad():
            for name, value in content["parameters"].items():
                parameters[name].copy_(value)
        try:
            optimizer.load_state_dict(optimizer_state)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"expected the state of {type(optimizer).__name__} in {path}, got another's, or an "
                "older version's; set another --output_dir"
            ) from error

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps to `….set_aside`, to resume from `step`."""
        for later in [each for each in self.steps() if each > step]:
            path = self._path(later)
            target = path.with_name(f"{path.name}.set_aside")
            path.replace(target)
            self._record(later).unlink(missing_ok=True)
            say(f"checkpoint of step {later} moved to {target}")
        write_json(self._validation_file, self._validation())

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}.pt"

    def _record(self, step: int) -> Path:
        return self._path(step).with_suffix(".sha256")

    def _line(self, step: int) -> str:
        path = self._path(step)
        return f"{sha256_of(path)}  {path.name}\n"

    def _is_whole(self, step: int) -> bool:
        record = self._record(step)
        return record.is_file() and record.read_bytes() == self._line(step).encode()

    def _damaged(self, step: int, found: str) -> str:
        whole = next((s for s in reversed(self.steps()) if s != step and self._is_whole(s)), None)
        cure = (
            "no other step can be restored: restore the folder from a copy, or set another "
            "--output_dir"
            if whole is None
            else f"the newest whole one is step {whole}: resume with --train.resume_step {whole}"
        )
        return f"expected a whole checkpoint of step {step} in {self._folder}, got {found}; {cure}"

    @property
    def _validation_file(self) -> Path:
        return self._folder / "validation.json"

    def _validation(self) -> dict[int, float]:
        """step → validation value of the checkpoints that are there.

        Raises:
            RunError: the file is damaged.
        """
        if not self._validation_file.exists():
            return {}
        whole = f"it only says which step is the best; the newest one is {self.latest_step() or 0}"
        try:
            stored = read_json_object(self._validation_file, cure=f"delete the file: {whole}")
            losses = {int(key): None if v is None else float(v) for key, v in stored.items()}
        except UserError as error:
            raise RunError(str(error)) from None
        except DAMAGE as error:
            raise RunError(
                f"expected a validation value by step in {self._validation_file}, got "
                f"{one_line(error)}; delete the file: {whole}"
            ) from None
        here = set(self.steps())
        return {step: loss for step, loss in losses.items() if step in here and loss is not None}
