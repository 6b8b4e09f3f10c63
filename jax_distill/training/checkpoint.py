"""Training state in Orbax checkpoints: parameters, optimizer state, step and seed.

Saved asynchronously; the last n are kept and, besides, the best by validation loss. Orbax writes a
step into a temporary folder and renames it, so a kill leaves whole checkpoints only. Once a step is
committed, the sha256 of its files are written to `.hashes/<step>.json`; they are checked before the
step is restored. Of several processes each saves and restores its own devices' parts, and all of
them call the same methods; what concerns the folder the first one does.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jax_distill import processes
from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.hashes import first_change, write_hashes
from jax_distill.training.offload import copied

TEMPORARY = re.compile(r"(\d+)\.orbax-checkpoint-tmp(-\d+)?")
ORBAX_NAMES = {"params", "opt_state", "run", "metrics", "_CHECKPOINT_METADATA"}


def _validation(metrics: dict[str, float]) -> float:
    return metrics["validation"]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, seed: int, read_only: bool = False) -> None:
        """Open or create `folder`. `seed` is saved with each state and must match at restore.

        `read_only` touches nothing there: a run may be saving into it.
        """
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax narrates what it raises, too
        self._seed, self._keep = seed, keep
        self._folder = folder.absolute()
        self._last_saved = -1
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hashes")
        self._hashing: Future[None] | None = None
        policy = AnyPreservationPolicy(
            [
                LatestN(keep),
                BestN(
                    get_metric_fn=_validation,
                    reverse=True,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_validation,
            best_mode="min",
            read_only=read_only,
        )
        try:
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
                processes.from_primary(self._remove_temporary_folders)
            with self._damage("the list of steps"):
                self._orbax = ocp.CheckpointManager(self._folder, options=options)
        except OSError as error:
            raise UserError(
                f"expected {folder} to be a folder that can be written, got {error.strerror}; "
                "set another --output_dir"
            ) from None

    def check_room(self, state_bytes: int, saves: int, *, runs: int = 1) -> None:
        """Refuse, before the run, a disk that the checkpoints will not fit: `saves` are to come,
        of which the last `keep` and the best stay, and one more lies there while it is written.

        runs: of this size, this one included, that will save on the same disk.

        Raises:
            UserError: names what is needed and what is free.
        """
        most = self._keep + 2
        count = min(saves, max(most - len(self.steps()), 1)) + (runs - 1) * min(saves, most)
        free = shutil.disk_usage(self._folder).free
        if count * state_bytes > free:
            raise UserError(
                f"expected {count * state_bytes / 1e9:,.3g} GB free for checkpoints in "
                f"{self._folder} ({count} of {state_bytes / 1e9:,.3g} GB), got {free / 1e9:,.3g} "
                "GB; make room, lower train.keep, raise train.save_every and train.eval_every, or "
                "set another --output_dir"
            )

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest validation loss among those that were saved with one."""
        with self._damage("the metrics"):
            return self._orbax.best_step()

    def steps(self) -> list[int]:
        """Every committed step that has all its parts."""
        return sorted(
            step
            for step in self._orbax.all_steps()
            if all((self._folder / str(step) / name).is_dir() for name in ("params", "opt_state"))
        )

    def save(
        self, step: int, params: Any, opt_state: Any, *, validation: float | None = None
    ) -> None:
        """Begin to save the state as of `step`; errors surface at the next save or at exit.
        `validation` is what `best` goes by: the smaller the better.

        Raises:
            RunError: the disk would not take it, or the one before.
        """
        if step == self._last_saved:
            return
        self._last_saved = step
        metrics = None if validation is None else {"validation": validation}
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            opt_state=ocp.args.StandardSave(copied(opt_state)),
            run=ocp.args.JsonSave({"step": step, "seed": self._seed}),
        )
        with self._disk_errors():
            if self._hashing is not None:
                self._hashing.result()
            if processes.is_primary_process():
                # Orbax's threads would wait 20 s for a folder that cannot be made.
                probe = self._folder / ".writable"
                probe.touch()
                probe.unlink()
            self._orbax.save(step, args=arguments, metrics=metrics, force=True)
            self._hashing = self._background.submit(self._hash_when_committed, step)

    def verify(self, step: int) -> bool:
        """Whether the step's files are proven to be those that were saved; False without hashes,
        which is a step whose run was killed right after the commit.

        Raises:
            RunError: they are not; names the file, and the newest step that can be restored.
        """
        record = self._record(step)
        if not record.is_file():
            return False
        try:
            found = first_change(self._folder / str(step), record)
        except ValueError as error:
            found = f"its hashes do not read ({error})"
        if found:
            raise RunError(self._damaged(step, found))
        return True

    def restore(self, step: int, **like: Any) -> dict[str, Any]:
        """`params=` and `opt_state=` of a step (either or both), placed and typed as the trees
        given: arrays, or ShapeDtypeStructs with shardings.

        Raises:
            RunError: the step is damaged (see `verify`). UserError: it is another run's.
        """
        if not processes.from_primary(lambda: self.verify(step)):
            say(f"checkpoint of step {step}: no hashes, the save was interrupted; not verified")
        items = {
            name: ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
            for name, tree in like.items()
        }
        arguments = ocp.args.Composite(run=ocp.args.JsonRestore(), **items)
        with self._damage(f"step {step}", step):
            found = self._orbax.restore(step, args=arguments)
        if found["run"] != {"step": step, "seed": self._seed}:
            raise UserError(
                f"expected a checkpoint of step {step}, seed {self._seed}, got {found['run']}; "
                "set seed to the run's, or another --output_dir"
            )
        self._last_saved = step
        return {name: found[name] for name in like}

    def shape_of(self, step: int, module: str) -> tuple[int, ...] | None:
        """The shape of a module's `weight` among the parameters of a step, if it has the module."""
        with self._damage(f"step {step}", step):
            with ocp.StandardCheckpointer() as reader:
                found = reader.metadata(self._folder / str(step) / "params").item_metadata
        return tuple(found[module]["weight"]["value"].shape) if module in found else None

    def set_aside_after(self, step: int) -> None:
        """Move the checkpoints of later steps to `<step>.set_aside`, to resume from `step`."""

        def move() -> None:
            for later in [each for each in self._orbax.all_steps() if each > step]:
                target = self._folder / f"{later}.set_aside"
                shutil.rmtree(target, ignore_errors=True)
                (self._folder / str(later)).rename(target)
                self._record(later).unlink(missing_ok=True)
                say(f"checkpoint of step {later} moved to {target}")

        processes.from_primary(move)
        self._orbax.reload()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Wait for the last save; raises what went wrong with it."""
        with self._disk_errors():
            try:
                if self._hashing is not None:
                    self._hashing.result()
            finally:
                self._background.shutdown()
                self._orbax.close()  # raises again what the wait raised

    def _hash_when_committed(self, step: int) -> None:
        self._orbax.wait_until_finished()
        if not processes.is_primary_process():
            return
        write_hashes(self._folder / str(step), self._record(step))
        kept = {self._record(each) for each in self._orbax.all_steps()}
        for record in self._record(step).parent.glob("*.json"):
            if record not in kept:
                record.unlink(missing_ok=True)

    def _record(self, step: int) -> Path:
        return self._folder / ".hashes" / f"{step}.json"

    def _remove_temporary_folders(self) -> None:
        """What a killed save left goes; a folder that only has such a name stays, and is named."""
        for path in sorted(self._folder.iterdir()):
            if not TEMPORARY.fullmatch(path.name) or not path.is_dir():
                continue
            foreign = [each.name for each in path.iterdir() if not self._is_orbaxs(each)]
            if foreign:
                say(f"{path}: not a checkpoint ({foreign[0]}), left there; move it away")
            else:
                shutil.rmtree(path)

    def _is_orbaxs(self, path: Path) -> bool:
        return path.name.split(".")[0] in ORBAX_NAMES or path.name == "commit_success.txt"

    def _damaged(self, step: int, found: str) -> str:
        whole = [each for each in self.steps() if each != step and self._is_whole(each)]
        if not whole:
            return (
                f"expected a whole checkpoint of step {step} in {self._folder}, got {found}; no "
                "other step can be restored: restore the folder from a copy, or set another "
                "--output_dir"
            )
        return (
            f"expected a whole checkpoint of step {step} in {self._folder}, got {found}; the "
            f"newest whole one is step {whole[-1]}: resume with --train.resume_step {whole[-1]}"
        )

    def _is_whole(self, step: int) -> bool:
        with contextlib.suppress(ValueError, OSError):
            return first_change(self._folder / str(step), self._record(step)) is None
        return False

    @contextlib.contextmanager
    def _damage(self, what: str, step: int | None = None) -> Iterator[None]:
        """Whatever Orbax raises of a damaged folder, in one line."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, ValueError, FileNotFoundError) as error:
            reason = f"{what} does not read: {type(error).__name__}: {error}".split("\n")[0][:300]
            if step is not None:
                raise RunError(self._damaged(step, reason)) from error
            raise RunError(
                f"expected whole checkpoints in {self._folder}, got: {reason}; restore the folder "
                "from a copy, or set another --output_dir"
            ) from error

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) and "os_error_code" not in str(error):
                raise
            reason = str(error).split(" [tensorstore_spec")[0]
            raise RunError(
                f"expected to write a checkpoint into {self._folder}, got: {reason}; "
                f"last whole checkpoint: step {self.latest_step() or 0}; "
                "make room there, and re-run the same command to resume"
            ) from error
