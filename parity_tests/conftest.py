"""The settings of jax_distill's own tests."""

from jax_distill.conftest import *  # noqa: F403
