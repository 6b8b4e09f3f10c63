"""Training state in Orbax checkpoints: parameters, optimizer state, step and seed.

Saved asynchronously; the last n are kept and, besides, the best by held-out KL. Orbax writes a
step into a temporary folder and renames it, so a kill leaves whole checkpoints only.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jax_distill.config import Failure, Refusal


def _heldout(metrics: dict[str, float]) -> float:
    return metrics["heldout"]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, seed: int, read_only: bool = False) -> None:
        """Open or create `folder`. `seed` is saved with each state and must match at restore.

        `read_only` touches nothing there: a run may be saving into it.
        """
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax narrates what it raises, too
        self._seed = seed
        self._last_saved = -1
        policy = AnyPreservationPolicy(
            [
                LatestN(keep),
                BestN(
                    get_metric_fn=_heldout,
                    reverse=True,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_heldout,
            best_mode="min",
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        try:
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
            self._orbax = ocp.CheckpointManager(folder.absolute(), options=options)
        except OSError as error:
            raise Refusal(f"expected a writable {folder}, got {error.strerror}") from None

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return self._orbax.latest_step()

    def best_step(self) -> int | None:
        """The step with the lowest held-out number among those that were saved with one."""
        return self._orbax.best_step()

    def steps(self) -> list[int]:
        """Every step that can be restored."""
        return sorted(self._orbax.all_steps())

    def save(self, step: int, params: Any, opt_state: Any, *, heldout: float | None = None) -> None:
        """Begin to save the state as of `step`; errors surface at the next save or at exit.
        `heldout` is what `best` goes by: the smaller the better.

        Raises:
            Failure: the disk would not take it, or the one before.
        """
        if step == self._last_saved:
            return
        self._last_saved = step
        metrics = None if heldout is None else {"heldout": heldout}
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            opt_state=ocp.args.StandardSave(opt_state),
            run=ocp.args.JsonSave({"step": step, "seed": self._seed}),
        )
        with self._disk_errors():
            # Orbax's threads would wait 20 s for a folder that cannot be made.
            probe = Path(self._orbax.directory) / ".writable"
            probe.touch()
            probe.unlink()
            self._orbax.save(step, args=arguments, metrics=metrics, force=True)

    def restore(self, step: int, **like: Any) -> dict[str, Any]:
        """`params=` and `opt_state=` of a step (either or both), placed and typed as the trees
        given: arrays, or ShapeDtypeStructs with shardings."""
        items = {
            name: ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, tree))
            for name, tree in like.items()
        }
        arguments = ocp.args.Composite(run=ocp.args.JsonRestore(), **items)
        found = self._orbax.restore(step, args=arguments)
        if found["run"] != {"step": step, "seed": self._seed}:
            raise Refusal(
                f"expected a checkpoint of step {step}, seed {self._seed}, got {found['run']}; "
                "set seed to the run's, or another --output_dir"
            )
        self._last_saved = step
        return {name: found[name] for name in like}

    def restore_as_saved(self, step: int) -> dict[str, Any]:
        """Everything of a step as plain numpy trees, for those who only look."""
        items = ("params", "opt_state", "run")
        arguments = ocp.args.Composite(
            **{name: ocp.args.StandardRestore() for name in items[:2]}, run=ocp.args.JsonRestore()
        )
        found = self._orbax.restore(step, args=arguments)
        return {name: found[name] for name in items}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        """Wait for the last save; raises what went wrong with it."""
        with self._disk_errors():
            try:
                self._orbax.wait_until_finished()
            finally:
                self._orbax.close()  # raises again what the wait raised

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) and "os_error_code" not in str(error):
                raise
            reason = str(error).split(" [tensorstore_spec")[0]
            raise Failure(
                f"expected to write a checkpoint into {self._orbax.directory}, got: {reason}; "
                f"last whole checkpoint: step {self.latest_step() or 0}; "
                "make room there, and the same command goes on"
            ) from error
