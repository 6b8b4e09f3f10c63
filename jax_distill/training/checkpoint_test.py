"""Checkpoints: last n and the best are kept, a foreign seed is refused, types and values return."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.base.errors import RunError, UserError
from jax_distill.training.checkpoint import Checkpoints

PARAMS = {"weight": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)}
MOMENTS = {"mu": jnp.arange(3, dtype=jnp.float32), "count": jnp.int32(7)}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_keeps_the_last_two_and_the_best(tmp_path):
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        for step, loss in [(1, 0.5), (2, 0.1), (3, None), (4, 0.3), (5, None), (6, 0.6)]:
            checkpoints.save(step, PARAMS, MOMENTS, validation=loss)
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
        pytest.raises(UserError, match="seed 2"),
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


def saved(folder, *steps) -> None:
    with Checkpoints(folder, keep=len(steps), seed=1) as checkpoints:
        for step in steps:
            checkpoints.save(step, PARAMS, MOMENTS)


def data_files(folder) -> list:
    """Every file of a step, the large ones and the small ones."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_a_bit_flipped_anywhere_in_a_step_is_refused_and_names_the_whole_one(tmp_path):
    saved(tmp_path / "c", 3, 7)
    files = data_files(tmp_path / "c/7")
    assert len(files) > 10
    for file in files:
        before = file.read_bytes()
        for place in {0, len(before) // 2, len(before) - 1} if before else ():
            flipped = bytearray(before)
            flipped[place] ^= 4
            file.write_bytes(flipped)
            with (
                Checkpoints(tmp_path / "c", keep=2, seed=1, read_only=True) as checkpoints,
                pytest.raises(RunError, match=r"--train\.resume_step 3") as refusal,
            ):
                checkpoints.restore(7, params=PARAMS)
            assert file.name in str(refusal.value) and "\n" not in str(refusal.value)
        file.write_bytes(before)
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        assert checkpoints.verify(7) and checkpoints.verify(3)


@pytest.mark.parametrize("change", ["cut", "removed", "added"])
def test_a_half_copied_step_is_refused_in_one_line(tmp_path, change):
    saved(tmp_path / "c", 3, 7)
    largest = max(data_files(tmp_path / "c/7"), key=lambda file: file.stat().st_size)
    if change == "cut":
        largest.write_bytes(largest.read_bytes()[:-9])
    elif change == "removed":
        largest.unlink()
    else:
        (largest.parent / "more").write_bytes(b"x")
    with (
        Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints,
        pytest.raises(RunError, match="expected a whole checkpoint of step 7.*step 3") as refusal,
    ):
        checkpoints.restore(7, params=PARAMS, opt_state=MOMENTS)
    assert "\n" not in str(refusal.value)


def test_without_hashes_damage_is_one_line_too_and_whole_steps_restore(tmp_path, capsys):
    saved(tmp_path / "c", 3, 7)
    for record in (tmp_path / "c/.hashes").glob("*.json"):
        record.unlink()
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        assert not checkpoints.verify(7)
        checkpoints.restore(7, params=PARAMS)
        assert "no hashes" in capsys.readouterr().out
        for file in data_files(tmp_path / "c/7/params"):
            file.write_bytes(b"not what it was")
        with pytest.raises(RunError, match="expected a whole checkpoint of step 7") as refusal:
            checkpoints.restore(7, params=PARAMS)
        assert "\n" not in str(refusal.value)


def test_empty_and_foreign_folders_are_no_steps(tmp_path):
    saved(tmp_path / "c", 3)
    (tmp_path / "c/9").mkdir()
    (tmp_path / "c/notes").mkdir()
    shutil.copytree(tmp_path / "c/3", tmp_path / "c/8", ignore=lambda *_: ["params"])
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        assert checkpoints.latest_step() == 3 and checkpoints.steps() == [3]


def test_a_users_folder_with_orbaxs_temporary_name_is_left_and_named(tmp_path, capsys):
    saved(tmp_path / "c", 3)
    mine = tmp_path / "c/5.orbax-checkpoint-tmp"
    mine.mkdir()
    (mine / "thesis.txt").write_text("t")
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        assert checkpoints.steps() == [3]
    assert (mine / "thesis.txt").read_text() == "t"
    assert "thesis.txt" in capsys.readouterr().out


def test_an_older_step_resumes_and_later_ones_are_set_aside(tmp_path):
    saved(tmp_path / "c", 3, 7)
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        checkpoints.restore(3, params=PARAMS)
        checkpoints.set_aside_after(3)
        assert checkpoints.steps() == [3]
        checkpoints.save(7, PARAMS, MOMENTS)
    assert (tmp_path / "c/7.set_aside/params").is_dir()
    with Checkpoints(tmp_path / "c", keep=2, seed=1) as checkpoints:
        assert checkpoints.steps() == [3, 7] and checkpoints.verify(7)
