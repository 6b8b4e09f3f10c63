"""The audit finds what is wrong with a store, names it, and says so with its exit code."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_distill import audit, hf, teacher
from jax_distill.cache import Store, shard_file
from jax_distill.config import Failure, Refusal
from jax_distill.teacher_test import (
    config,
    definition,
    hf_folder,
    hidden_states,
    model_config,
    random_model,
)

__all__ = ["config"]


@pytest.fixture
def store(config) -> Store:
    return teacher.write_stores(config)[0]


def test_a_good_store_is_described_verified_checked_and_drawn(store, config, tmp_path, capsys):
    png = tmp_path / "store.png"
    words = [config.cache.path, "--verify", "--spot_check", "6", "--png", str(png)]
    assert audit.main([*words, "--teacher", config.teacher.path]) == 0
    said = capsys.readouterr().out
    for fact in (
        store.manifest.fingerprint,
        store.manifest.data_fingerprint,
        f"{store.tokens:,}",
        f"{store.nbytes:,}",
        "teacher_gaps",
        "mass inside the K",
        "label among the K",
        "right",
    ):
        assert fact in said
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.with_name("store-heldout.png").is_file()


def test_statistics_equal_the_definition(store, config):
    model = random_model()
    batch = store.read(range(store.rows))
    ids, gaps, log_z, log_tail = definition(
        hidden_states(model, batch),
        np.asarray(model.lm_head_weight()),
        vocab_size=store.manifest.vocab_size,
        top_k=8,
        temperature=1.0,
    )
    mask = batch["mask"]
    log_p = -gaps - log_z[..., None]
    outcomes = np.concatenate([log_p, log_tail[..., None]], -1)[mask]
    found = audit.statistics(store, np.arange(store.rows))
    assert found is not None
    np.testing.assert_allclose(found.retained, 1 - np.exp(log_tail[mask]), atol=1e-5)
    np.testing.assert_allclose(found.entropy, -(np.exp(outcomes) * outcomes).sum(-1), atol=2e-3)
    label = (ids == batch["labels"][..., None]).any(-1)[mask].mean()
    assert found.label_in_top_k == pytest.approx(label)


def test_array_bytes_add_up_to_the_files_on_disk(store):
    files = [f for f in Path(store.path).rglob("*") if f.is_file() and "/c/" in str(f)]
    sizes = audit.array_bytes(store)
    assert sum(sizes.values()) == store.nbytes == sum(f.stat().st_size for f in files)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_verify_names_every_bad_file_and_nothing_else(store, capsys):
    """Case 34: one file deleted, one cut short, one bit flipped, one shard never committed."""
    manifest = store.manifest
    assert store.shards >= 4
    bad = {
        shard_file(manifest, "tokens", 0): lambda f: f.unlink(),
        shard_file(manifest, "teacher_indices", 1): lambda f: f.write_bytes(f.read_bytes()[:-1]),
        shard_file(manifest, "teacher_log_z", 2): flip,
        "commits/000003.json": lambda f: f.unlink(),
    }
    assert audit.verify(store) == []
    for name, damage in bad.items():
        damage(Path(store.path) / name)
    problems = audit.verify(Store.open(store.path))
    assert sorted(p.split()[0].rstrip(":") for p in problems) == sorted(bad)
    told = " ".join(problems)
    assert "rows 16..31" in told
    assert all(word in told for word in ("missing", "committed with", "sha256", "not committed"))
    assert audit.main([store.path, "--verify"]) == 1
    said = capsys.readouterr().out
    assert all(name in said for name in bad)


def test_damage_is_an_error_without_verify_too(store):
    flip(Path(store.path) / shard_file(store.manifest, "teacher_gaps", 0))
    with pytest.raises(Failure, match="teacher_gaps/c/0/0/0"):
        audit.main([store.path])


def test_another_teacher_fails_the_spot_check(store, config, tmp_path, capsys):
    other = hf_folder(tmp_path / "other", seed=9)
    assert audit.main([store.path, "--spot_check", "4", "--teacher", str(other)]) == 1
    said = capsys.readouterr().out
    assert "not the teacher" in said and "WRONG" in said


def test_targets_one_position_late_fail_the_spot_check(store):
    """Case 7: KL is 0 where the targets belong and large beside it."""
    model = random_model()
    kl, shifted = audit.spot_check(store, model, np.arange(4))
    assert kl < 1e-5 and shifted > 0.5

    class Late:
        manifest = store.manifest

        @staticmethod
        def read(rows, **knobs):
            batch = store.read(rows, **knobs)
            late = {k: np.roll(v, -1, axis=1) for k, v in batch.items() if k.startswith("teacher")}
            return batch | late

    kl, shifted = audit.spot_check(Late(), model, np.arange(4))  # type: ignore[arg-type]
    assert kl > 0.5 and shifted < 1e-5


def test_questions_that_make_no_sense_are_refused(store, tmp_path):
    with pytest.raises(Refusal, match="expected a store at"):
        audit.main([str(tmp_path / "nothing")])
    with pytest.raises(Refusal, match="--teacher DIR"):
        audit.main([store.path, "--spot_check", "3"])
    with pytest.raises(Refusal, match="at least 1 row"):
        audit.main([store.path, "--spot_check", "0", "--teacher", "x"])


def test_the_command_line_exits_2_for_a_wrong_path(tmp_path):
    command = [sys.executable, "-m", "jax_distill.audit", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: expected a store at")
    assert result.stderr.count("\n") == 1


def test_a_store_without_a_teacher_is_described(config, capsys):
    bare = replace(config, teacher=replace(config.teacher, path=""))
    train, _ = teacher.write_stores(bare)
    assert audit.main([train.path, "--verify"]) == 0
    assert "no teacher" in capsys.readouterr().out


def test_the_fingerprint_of_a_teacher_follows_its_bytes(tmp_path):
    folder = hf_folder(tmp_path / "a")
    same = hf_folder(tmp_path / "b")
    assert teacher.teacher_fingerprint(folder) == teacher.teacher_fingerprint(same)
    hf.save_weights(same, random_model(1), model_config())
    assert teacher.teacher_fingerprint(folder) != teacher.teacher_fingerprint(same)
