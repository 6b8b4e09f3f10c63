"""`python -m jax_distill.teacher --config X.yaml`"""

from jax_distill.config import load, run_command
from jax_distill.teacher import main

if __name__ == "__main__":
    run_command(lambda argv: main(load(argv, "jax_distill.teacher")))
