"""`python -m jax_distill.teacher --config X.yaml`"""

from jax_distill.config import run_configured

if __name__ == "__main__":
    run_configured("jax_distill.teacher", "jax_distill.teacher.caches")
