"""Stochastic rounding: the mean is kept, the variance is what it must be, the bits are a function
of (seed, step, leaf, index) and of nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_distill.training.rounding import key_of, random_bits, round_tree, stochastic_round

DRAWS = 1 << 16
VALUES = [0.02 + 1e-5, -0.02 - 1e-5, 1.0, 1.0 + 2**-12, -3.999, 1e-30, 3.1e38, 1e-39, 0.0, -0.0]


def bits_of(n: int, seed: int = 0) -> jax.Array:
    return random_bits(key_of(seed, 3, "leaf", "test"), (n,))


def neighbours(x: float) -> tuple[float, float]:
    """The two bf16 around |x| ≥ 0 of fp32 x; equal where x is one."""
    word = np.abs(np.float32(x)).view(np.uint32)
    low = word >> np.uint32(16) << np.uint32(16)
    high = low + np.uint32(0x10000) if low != word else low
    return float(low.view(np.float32)), float(high.view(np.float32))


@pytest.mark.parametrize("value", VALUES)
def test_mean_is_kept_and_variance_is_that_of_a_coin(value):
    x = np.float32(value)
    got = stochastic_round(jnp.full(DRAWS, x), bits_of(DRAWS))
    got = np.asarray(got.astype(jnp.float32), np.float64)
    low, high = neighbours(value)
    magnitude = abs(float(x))
    assert set(np.abs(got)) <= {low, high} and np.all(np.signbit(got) == np.signbit(x))
    variance = (magnitude - low) * (high - magnitude)
    assert abs(got.mean() - float(x)) <= 5 * (variance / DRAWS) ** 0.5
    unit = high - low or 1.0
    p = (magnitude - low) / unit
    spread = abs(1 - 2 * p) * (p * (1 - p) / DRAWS) ** 0.5 + 1 / DRAWS
    assert abs(got.var() / unit**2 - p * (1 - p)) <= 5 * spread


def test_a_small_update_vanishes_to_nearest_and_stays_on_average():
    """The reason for all of it: 0.02 + 1e-5, a thousand times."""

    def add(step, weights):
        stochastic, nearest = (p.astype(jnp.float32) + 1e-5 for p in weights)
        bits = random_bits(key_of(0, step, "p", "test"), stochastic.shape)
        return stochastic_round(stochastic, bits), nearest.astype(jnp.bfloat16)

    start = jnp.full(4096, 0.02, jnp.bfloat16)
    p, nearest = jax.lax.fori_loop(0, 1000, add, (start, start))
    assert jnp.array_equal(nearest, start)
    # Each step adds at most a quarter of a spacing squared to the variance of one weight.
    spacing = 2.0**-13
    error = (1000 / 4 * spacing**2 / 4096) ** 0.5
    expected = float(start[0]) + 1e-2
    assert float(p.astype(jnp.float32).mean()) == pytest.approx(expected, abs=5 * error)


def test_what_is_not_finite_stays_and_what_is_does_not_become_infinite():
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = jnp.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, largest], jnp.float32)
    for seed in range(8):
        got = stochastic_round(x, bits_of(6, seed)).astype(jnp.float32)
        expected = [np.inf, -np.inf, np.nan, largest, -largest, largest]
        np.testing.assert_array_equal(got, np.array(expected, np.float32))


def test_bf16_values_are_not_moved():
    words = np.arange(1 << 16, dtype=np.uint16)
    x = jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.bfloat16)
    got = stochastic_round(x.astype(jnp.float32), bits_of(1 << 16))
    same = np.asarray(jax.lax.bitcast_convert_type(got, jnp.uint16)) == words
    assert np.all(same | np.isnan(np.asarray(x.astype(jnp.float32))))


def test_bits_are_uniform_and_those_of_other_leaves_steps_and_seeds_are_independent():
    shape = (64, 1024)
    count = shape[0] * shape[1]

    @jax.jit
    def draw():
        keys = [(1, 7, "a", "p"), (2, 7, "a", "p"), (1, 8, "a", "p"), (1, 7, "b", "p")]
        return [random_bits(key_of(*key), shape) for key in [*keys, (1, 7, "a", "q")]]

    base, seed, step, leaf, purpose = map(np.asarray, draw())
    ones = [(base >> bit & 1).mean() for bit in range(32)]
    np.testing.assert_allclose(ones, 0.5, atol=5 * 0.5 / count**0.5)
    others = {
        "seed": seed,
        "step": step,
        "leaf": leaf,
        "purpose": purpose,
        "next row": np.roll(base, 1, axis=0),
        "next element": np.roll(base, 1, axis=1),
        "mirror": base[::-1, ::-1],
    }
    for name, other in others.items():
        agree = [(~(base ^ np.asarray(other)) >> bit & 1).mean() for bit in range(32)]
        np.testing.assert_allclose(agree, 0.5, atol=5 * 0.5 / count**0.5, err_msg=name)
    assert key_of(1, jnp.int32(7), "a", "p") == key_of(1, 7, "a", "p")


def test_a_slice_gets_the_bits_of_its_rows():
    key = key_of(0, 0, "stack", "p")
    whole = jax.jit(lambda: random_bits(key, (5, 3, 7)))()
    rows = jax.jit(jax.vmap(lambda row: random_bits(key, (1, 3, 7), first_row=row)))
    np.testing.assert_array_equal(rows(jnp.arange(5))[:, 0], whole)


def test_every_split_over_devices_rounds_alike():
    values = jax.random.normal(jax.random.key(0), (4, 16, 8))
    like = jnp.zeros(values.shape, jnp.bfloat16)

    def rounded(devices):
        mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
        split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
        function = jax.jit(
            lambda x: round_tree(x, like, seed=5, step=2, purpose="p"), out_shardings=split
        )
        return np.asarray(function(jax.device_put(values, split)))

    one = rounded(1)
    for devices in (2, 4, 8):
        np.testing.assert_array_equal(one, rounded(devices))


def test_fp32_leaves_pass_as_they_are():
    x = jnp.array([0.1, 0.2], jnp.float32)
    np.testing.assert_array_equal(round_tree([x], [x], seed=0, step=0, purpose="p")[0], x)
