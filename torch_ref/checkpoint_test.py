"""Checkpoints: what is kept and restored; a kill or a full disk loses nothing good."""

import pytest
import torch

from jax_distill.base.errors import RunError, UserError
from torch_ref.checkpoint import Checkpoints
from torch_ref.optimizer import make_optimizer


def state(value=0.0):
    parameters = {"w": torch.full((3,), value)}
    return parameters, make_optimizer("adamw", parameters, b1=0.9, b2=0.95, weight_decay=0.0)


def trained(steps, start=None, gradient=1.0):
    parameters, optimizer = start or state(1.0)
    for _ in range(steps):
        parameters["w"].grad = torch.full((3,), gradient)
        optimizer.step()
    return parameters, optimizer


def test_a_restored_state_goes_on_like_the_one_that_was_saved(tmp_path):
    parameters, optimizer = trained(3)
    Checkpoints(tmp_path, keep=2, seed=5).save(3, parameters, optimizer)
    again, fresh = state()
    Checkpoints(tmp_path, keep=2, seed=5).restore(3, again, fresh)
    for each in ((parameters, optimizer), (again, fresh)):
        trained(1, each, gradient=0.5)
    assert torch.equal(parameters["w"], again["w"]) and again["w"][0] != 1.0


def test_the_last_n_are_kept_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, seed=0)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 2.5}
    for step, loss in losses.items():
        checkpoints.save(step, *trained(1), validation=loss)
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
    with pytest.raises(RunError, match="No space left.*last checkpoint: step 1"):
        checkpoints.save(2, *trained(2))
    parameters, optimizer = state()
    checkpoints.restore(1, parameters, optimizer)
    assert torch.equal(parameters["w"], trained(1)[0]["w"])


def test_another_seed_another_student_and_another_program_are_refused(tmp_path):
    Checkpoints(tmp_path, keep=1, seed=0).save(1, *trained(1))
    parameters, optimizer = state()
    with pytest.raises(UserError, match="seed 1"):
        Checkpoints(tmp_path, keep=1, seed=1).restore(1, parameters, optimizer)
    with pytest.raises(UserError, match="another v"):
        Checkpoints(tmp_path, keep=1, seed=0).restore(
            1, parameters | {"v": torch.ones(1)}, optimizer
        )
    with pytest.raises(UserError, match="another w"):
        Checkpoints(tmp_path, keep=1, seed=0).restore(1, {"w": torch.ones(1)}, optimizer)
    file = tmp_path / "step_00000001.pt"  # as torch_ref wrote it with optimizers of its own
    torch.save(torch.load(file) | {"optimizer": {"count": 1, "state": {}}}, file)
    file.with_suffix(".sha256").unlink()
    with pytest.raises(UserError, match="expected the state of AdamW"):
        Checkpoints(tmp_path, keep=1, seed=0).restore(1, *state())
    (tmp_path / "10").mkdir()
    with pytest.raises(UserError, match="another program"):
        Checkpoints(tmp_path, keep=1, seed=0)


def saved(folder, *steps) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=len(steps), seed=0)
    for step in steps:
        checkpoints.save(step, *trained(step), validation=1 / step)
    return checkpoints


def refused(checkpoints, step) -> str:
    parameters, optimizer = state(0.25)
    with pytest.raises(RunError, match=f"expected a whole checkpoint of step {step}") as refusal:
        checkpoints.restore(step, parameters, optimizer)
    assert parameters["w"].tolist() == [0.25] * 3 and not optimizer.state
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("suffix", ["pt", "sha256"])
def test_a_bit_flipped_anywhere_in_a_step_is_refused_and_names_the_whole_one(tmp_path, suffix):
    checkpoints = saved(tmp_path, 3, 5, 7)
    for step, whole in ((7, 5), (5, 3)):
        file = tmp_path / f"step_{step:08d}.{suffix}"
        before = file.read_bytes()
        for place in [*range(0, len(before), 97), len(before) - 1]:
            flipped = bytearray(before)
            flipped[place] ^= 4
            file.write_bytes(flipped)
            refused(checkpoints, step)
        assert f"--train.resume_step {whole}" in refused(checkpoints, 7)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_cut_file_is_refused_in_one_line_with_its_sha256_and_without(tmp_path, kept):
    checkpoints = saved(tmp_path, 3, 7)
    file = tmp_path / "step_00000007.pt"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    assert "newest whole one is step 3" in refused(checkpoints, 7)
    file.with_suffix(".sha256").unlink()
    assert "does not read" in refused(checkpoints, 7)
    (tmp_path / "step_00000003.sha256").unlink()
    assert "no other step can be restored" in refused(checkpoints, 7)


def test_a_step_without_a_sha256_is_restored_with_a_warning(tmp_path, capsys):
    checkpoints = saved(tmp_path, 3)
    assert checkpoints.verify(3)
    (tmp_path / "step_00000003.sha256").unlink()
    parameters, optimizer = state()
    checkpoints.restore(3, parameters, optimizer)
    assert torch.equal(parameters["w"], trained(3)[0]["w"])
    assert "checkpoint of step 3: no sha256" in capsys.readouterr().out
    (tmp_path / "step_00000003.pt").rename(tmp_path / "step_00000004.pt")
    with pytest.raises(UserError, match="expected a checkpoint of step 4"):
        checkpoints.restore(4, parameters, optimizer)


@pytest.mark.parametrize("text", ["", "[3]", '{"3": "low"}', '{"x": 1.0}', "{" * 10**5, "\xff"])
def test_a_damaged_list_of_validation_values_is_one_line_before_any_work(tmp_path, text):
    saved(tmp_path, 3, 7)
    (tmp_path / "validation.json").write_text(text, "latin-1")
    with pytest.raises(RunError, match="delete the file.*newest one is 7") as refusal:
        Checkpoints(tmp_path, keep=2, seed=0)
    assert "\n" not in str(refusal.value)


def test_an_older_step_resumes_and_later_ones_are_set_aside(tmp_path):
    checkpoints = saved(tmp_path, 3, 5, 7)
    before = (tmp_path / "step_00000007.pt").read_bytes()
    checkpoints.set_aside_after(3)
    assert checkpoints.steps() == [3] and checkpoints.best_step() == 3
    assert (tmp_path / "step_00000007.pt.set_aside").read_bytes() == before
    checkpoints.save(7, *trained(2))
    again = Checkpoints(tmp_path, keep=2, seed=0)
    assert again.steps() == [3, 7] and again.best_step() == 3 and again.verify(7)


def test_what_only_looks_like_a_half_written_file_is_left(tmp_path):
    saved(tmp_path, 3)
    (tmp_path / "thesis.tmp").write_text("t")
    (tmp_path / ".step_00000005.sha256.tmp").write_text("t")
    Checkpoints(tmp_path, keep=2, seed=0)
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["thesis.tmp"]
