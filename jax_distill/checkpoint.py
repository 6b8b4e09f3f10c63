"""Training state in Orbax checkpoints: parameters, optimizer state, step and seed.

Saved asynchronously; the last n are kept and, besides, the best by held-out loss. Orbax writes a
step into a temporary folder and renames it, so a kill leaves whole checkpoints only.
"""

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from jax_distill.config import Refusal


def _heldout_loss(metrics: dict[str, float]) -> float:
    return metrics["heldout_loss"]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, seed: int) -> None:
        """Open or create `folder`. `seed` is saved with each state and must match at restore."""
        self._seed = seed
        self._last_saved = -1
        policy = AnyPreservationPolicy(
            [
                LatestN(keep),
                BestN(
                    get_metric_fn=_heldout_loss,
                    reverse=True,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=_heldout_loss,
            best_mode="min",
            cleanup_tmp_directories=True,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._orbax = ocp.CheckpointManager(folder.absolute(), options=options)
        except OSError as error:
            raise Refusal(f"expected a writable {folder}, got {error.strerror}") from None

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return self._orbax.latest_step()

    def best_step(self) -> int | None:
        """The step with the lowest held-out loss among those that were evaluated."""
        return self._orbax.best_step()

    def steps(self) -> list[int]:
        """Every step that can be restored."""
        return sorted(self._orbax.all_steps())

    def save(
        self, step: int, params: Any, opt_state: Any, *, heldout_loss: float | None = None
    ) -> None:
        """Begin to save the state as of `step`; errors surface at the next save or at exit."""
        if step == self._last_saved:
            return
        self._last_saved = step
        metrics = None if heldout_loss is None else {"heldout_loss": heldout_loss}
        arguments = ocp.args.Composite(
            params=ocp.args.StandardSave(params),
            opt_state=ocp.args.StandardSave(opt_state),
            run=ocp.args.JsonSave({"step": step, "seed": self._seed}),
        )
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
        try:
            self._orbax.wait_until_finished()
        finally:
            self._orbax.close()
