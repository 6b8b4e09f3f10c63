"""`python -m jax_distill.plan --config X.yaml --device h200`."""

from jax_distill.base.command import run_command
from jax_distill.plan.command import command

if __name__ == "__main__":
    run_command(command)
