"""`python -m jax_distill.import_logprobs --config X.yaml --data.path FILE`"""

from jax_distill.config import run_configured

if __name__ == "__main__":
    run_configured("jax_distill.import_logprobs", "jax_distill.import_logprobs.writing")
