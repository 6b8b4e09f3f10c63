"""`python -m jax_distill.student`."""

from jax_distill.base.command import run_command
from jax_distill.student.command import main

if __name__ == "__main__":
    run_command(main)
