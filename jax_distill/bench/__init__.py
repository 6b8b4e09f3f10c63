"""Measurements: `python -m jax_distill.bench head | peers | gpu_check | step`, each with --help."""
