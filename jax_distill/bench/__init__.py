"""Measurements: `python -m jax_distill.bench head | peers`, each with --help."""
