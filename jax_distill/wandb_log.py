"""Metrics to Weights & Biases as well, where `train.wandb` names a project. wandb's own environment
variables hold: WANDB_MODE=offline, WANDB_ENTITY, WANDB_BASE_URL."""

import importlib.util
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_distill.base.errors import UserError
from jax_distill.base.files import write_text
from jax_distill.base.json_object import one_line
from jax_distill.config import Config, as_dict

ID_FILE = "wandb_id"


def check_wandb(config: Config) -> None:
    """Refuse, before the work, `train.wandb` without the package."""
    if config.train.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"expected the package wandb for train.wandb {config.train.wandb}, got none; "
            "pip install 'jax-distill[wandb]', or leave train.wandb empty"
        )


class WandbLog:
    """One run of wandb for a folder of metrics; a resumed training goes on in it, by the id that
    `<folder>/wandb_id` keeps. wandb drops steps that it has already."""

    def __init__(self, config: Config, folder: Path) -> None:
        """Raises UserError where wandb does not begin: no login, no connection."""
        import wandb

        file = folder / ID_FILE
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, secrets.token_hex(8))
        place = Path(config.output_dir)
        name = place.name if folder == place else f"{place.name} {folder.name}"
        try:
            self._run = wandb.init(
                project=config.train.wandb,
                dir=str(folder),
                name=name,
                id=file.read_text("utf-8").strip(),
                resume="allow",
                config=as_dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # whatever wandb, its service or the network raise
            raise UserError(
                f"expected wandb to log to {config.train.wandb}, got {type(error).__name__}: "
                f"{one_line(error)}; run wandb login, set WANDB_MODE=offline, or leave train.wandb "
                "empty"
            ) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One record; what is no finite number is left out."""
        numbers = {
            key: value
            for key, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._run.log(numbers, step=step)

    def finish(self, *, failed: bool = False) -> None:
        """Send what is left, and whether the training has failed."""
        self._run.finish(exit_code=int(failed))


def open_wandb(config: Config, folder: Path) -> WandbLog | None:
    """The log of the metrics in `folder`; None without `train.wandb`."""
    return WandbLog(config, folder) if config.train.wandb else None
