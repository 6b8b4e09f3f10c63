"""Will it fit, and what will it do: the real step, compiled for a device that need not be here.

`python -m jax_distill.plan --config X.yaml --device h200 [--devices 8] [--step train|teacher]`
compiles from shapes alone: no weight, text, cache or GPU is needed. `planning.py` says what each
number is.
"""

from jax_distill.plan.command import main
from jax_distill.plan.planning import PARTS, PHASES, Plan, make_plan
from jax_distill.plan.target import Target, find_target

__all__ = ["PARTS", "PHASES", "Plan", "Target", "find_target", "main", "make_plan"]
