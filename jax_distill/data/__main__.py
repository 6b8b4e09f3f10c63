"""`python -m jax_distill.data --config X.yaml --rows 3`: see `jax_distill.preview`, which needs
what is built upon this package."""

import runpy

if __name__ == "__main__":
    runpy.run_module("jax_distill.preview", run_name="__main__", alter_sys=True)
