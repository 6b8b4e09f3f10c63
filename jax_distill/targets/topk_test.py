"""The K largest by groups: the bits of `jax.lax.top_k`, and what a GPU sorts for them."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jax_distill import devices
from jax_distill.targets.topk import GROUP, grouped_top_k

SPECIAL = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, 1.5, -1.0], np.float32)
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_cuda13_plugin")


def rows_of(kind: str, size: int) -> np.ndarray:
    """Four rows of float32."""
    rng = np.random.default_rng(size)
    if kind == "logits":
        return rng.normal(0, 3, (4, size)).astype(np.float32)
    if kind == "ties":
        return rng.integers(0, 3, (4, size)).astype(np.float32)
    if kind == "special":
        return rng.choice(SPECIAL, (4, size))
    few = np.full((4, size), -np.inf, np.float32)  # fewer finite ones than are asked for
    few[:, rng.permutation(size)[:5]] = rng.normal(0, 1, (4, min(5, size)))
    return few


@pytest.mark.parametrize("kind", ["logits", "ties", "special", "few"])
@pytest.mark.parametrize("size", [1, GROUP, GROUP + 1, 100, 1000, 40 * GROUP, 5001])
def test_the_largest_by_groups_are_those_of_the_whole_row_bit_for_bit(kind, size):
    """Sizes that groups do not divide, more asked for than there are groups, ties across groups."""
    z = rows_of(kind, size)
    for top_k in {1, 2, 7, 30, size // GROUP, size} & set(range(1, min(size, 200) + 1)):
        values, indices = jax.jit(grouped_top_k, static_argnums=1)(z, top_k)
        wanted, ids = jax.lax.top_k(z, top_k)
        np.testing.assert_array_equal(indices, ids)
        np.testing.assert_array_equal(
            np.asarray(values).view(np.int32), np.asarray(wanted).view(np.int32)
        )


def test_leading_axes_are_rows():
    z = rows_of("ties", 12 * GROUP).reshape(2, 2, -1)
    for got, wanted in zip(grouped_top_k(z, 3), jax.lax.top_k(z, 3), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.skipif(not PLUGIN, reason="needs jax's CUDA plugin: pip install 'jax_distill[plan]'")
def test_a_gpu_sorts_no_more_than_the_maxima_and_the_chosen_groups():
    size, top_k = 128_256, 100
    where = SingleDeviceSharding(devices.planned_devices(devices.find_gpu("h200"))[0])
    z = jax.ShapeDtypeStruct((64, size), jnp.float32, sharding=where)
    function = jax.jit(lambda z: grouped_top_k(z, top_k))
    program = devices.compile_ahead(function, z, planned=True).as_text()
    sorted_sizes = {int(n) for n in re.findall(r"= \(f32\[64,(\d+)\].* sort\(", program)}
    assert sorted_sizes == {size // GROUP, top_k * GROUP}
