"""Strict JAX for every test here: no silent promotion, no silent broadcasting, 8 devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def optax_promotion():
    """optax's own arithmetic mixes ints and floats; everything of ours stays strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield
