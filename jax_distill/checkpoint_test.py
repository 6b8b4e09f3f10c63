"""Checkpoints: last n and the best are kept, a foreign seed is refused, types and values return."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.checkpoint import Checkpoints
from jax_distill.config import Refusal

PARAMS = {"weight": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)}
MOMENTS = {"mu": jnp.arange(3, dtype=jnp.float32), "count": jnp.int32(7)}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_keeps_the_last_two_and_the_best(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        for step, loss in [(1, 0.5), (2, 0.1), (3, None), (4, 0.3), (5, None), (6, 0.6)]:
            checkpoints.save(step, PARAMS, MOMENTS, heldout=loss)
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        assert checkpoints.steps() == [2, 5, 6]
        assert (checkpoints.latest_step(), checkpoints.best_step()) == (6, 2)


def test_state_returns_bit_for_bit_and_in_parts(tmp_path):
    with Checkpoints(tmp_path / "c", keep=1, seed=1) as checkpoints:
        checkpoints.save(3, PARAMS, MOMENTS)
    with Checkpoints(tmp_path / "c", keep=1, seed=1) as checkpoints:
        both = checkpoints.restore(3, params=PARAMS, opt_state=MOMENTS)
        part = checkpoints.restore(3, params=PARAMS)
    assert part.keys() == {"params"}
    np.testing.assert_array_equal(both["params"]["weight"], PARAMS["weight"])
    assert both["params"]["weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(both["opt_state"]["mu"], MOMENTS["mu"])
    assert int(both["opt_state"]["count"]) == 7


def test_another_seed_is_refused(tmp_path):
    with Checkpoints(tmp_path / "c", keep=1, seed=1) as checkpoints:
        checkpoints.save(3, PARAMS, MOMENTS)
    with (
        Checkpoints(tmp_path / "c", keep=1, seed=2) as checkpoints,
        pytest.raises(Refusal, match="seed 2"),
    ):
        checkpoints.restore(3, params=PARAMS)


def test_a_reader_leaves_a_save_in_progress_alone(tmp_path):
    with Checkpoints(tmp_path / "c", keep=1, seed=1) as checkpoints:
        checkpoints.save(1, PARAMS, MOMENTS)
    half = tmp_path / "c/2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c/1", half)
    with Checkpoints(tmp_path / "c", keep=1, seed=1, read_only=True) as reader:
        assert reader.steps() == [1]
    assert half.exists()
    with Checkpoints(tmp_path / "c", keep=1, seed=1) as writer:
        writer.save(3, PARAMS, MOMENTS)
    assert not half.exists()  # so it was one that could have been taken for litter
