"""Checkpoints: what is kept and restored; a kill or a full disk loses nothing good."""

import pytest
import torch

from jax_distill.config import Failure, Refusal
from torch_ref.checkpoint import Checkpoints
from torch_ref.optimizer import Optimizer


def state(value=0.0):
    parameters = {"w": torch.full((3,), value)}
    knobs = dict(b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=None)
    return parameters, Optimizer("adamw", parameters, **knobs)


def trained(steps):
    parameters, optimizer = state(1.0)
    for _ in range(steps):
        optimizer.step({"w": torch.ones(3)}, 0.1)
    return parameters, optimizer


def test_a_restored_state_goes_on_like_the_one_that_was_saved(tmp_path):
    parameters, optimizer = trained(3)
    Checkpoints(tmp_path, keep=2, seed=5).save(3, parameters, optimizer)
    again, fresh = state()
    Checkpoints(tmp_path, keep=2, seed=5).restore(3, again, fresh)
    for each in (optimizer, fresh):
        each.step({"w": torch.full((3,), 0.5)}, 0.1)
    assert torch.equal(parameters["w"], again["w"]) and fresh.count == 4


def test_the_last_n_are_kept_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, seed=0)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5}
    for step, loss in losses.items():
        checkpoints.save(step, *trained(1), heldout=loss)
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.best_step() == 2 and checkpoints.latest_step() == 5


def test_half_written_files_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, seed=0)
    checkpoints.save(1, *trained(1))
    (tmp_path / "step_00000002.tmp").write_bytes(b"torn")
    checkpoints = Checkpoints(tmp_path, keep=2, seed=0)
    assert checkpoints.latest_step() == 1 and not list(tmp_path.glob("*.tmp"))


def test_a_save_that_fails_leaves_the_last_good_one(tmp_path, monkeypatch):
    """Case 30."""
    checkpoints = Checkpoints(tmp_path, keep=1, seed=0)
    checkpoints.save(1, *trained(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(Failure, match="No space left.*last checkpoint: step 1"):
        checkpoints.save(2, *trained(2))
    parameters, optimizer = state()
    checkpoints.restore(1, parameters, optimizer)
    assert optimizer.count == 1


def test_another_seed_another_student_and_another_program_are_refused(tmp_path):
    Checkpoints(tmp_path, keep=1, seed=0).save(1, *trained(1))
    parameters, optimizer = state()
    with pytest.raises(Refusal, match="seed 1"):
        Checkpoints(tmp_path, keep=1, seed=1).restore(1, parameters, optimizer)
    with pytest.raises(Refusal, match="another v"):
        Checkpoints(tmp_path, keep=1, seed=0).restore(
            1, parameters | {"v": torch.ones(1)}, optimizer
        )
    (tmp_path / "10").mkdir()
    with pytest.raises(Refusal, match="another program"):
        Checkpoints(tmp_path, keep=1, seed=0)
