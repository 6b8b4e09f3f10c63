"""The audit finds what is wrong with a cache, names it, and says so with its exit code."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_distill import audit, hf, teacher
from jax_distill.base.errors import RunError, UserError
from jax_distill.cache import Cache, create, shard_file, teacher_fingerprint
from jax_distill.cache_test import folder_bytes
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
def cache(config) -> Cache:
    return teacher.write_caches(config)[0]


def test_a_good_cache_is_described_verified_checked_and_drawn(cache, config, tmp_path, capsys):
    png = tmp_path / "cache.png"
    words = [config.cache.path, "--verify", "--spot_check", "6", "--png", str(png)]
    assert audit.main([*words, "--teacher", config.teacher.path]) == 0
    said = capsys.readouterr().out
    for fact in (
        cache.manifest.fingerprint,
        cache.manifest.data_fingerprint,
        f"{cache.tokens:,}",
        f"{cache.nbytes:,}",
        "teacher_gap_steps",
        "mass inside the K",
        "label inside",
        "verdict: K = 8 holds",
        "every checksum",
        "the targets are this teacher's",
    ):
        assert fact in said
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.with_name("cache-heldout.png").is_file()


def test_statistics_equal_the_definition(cache, config):
    model = random_model()
    batch = cache.read(range(cache.rows))
    ids, gaps, log_z, log_tail = definition(
        hidden_states(model, batch),
        np.asarray(model.lm_head_weight()),
        vocab_size=cache.manifest.vocab_size,
        top_k=8,
        temperature=1.0,
    )
    mask = batch.mask
    log_p = -gaps - log_z[..., None]
    outcomes = np.concatenate([log_p, log_tail[..., None]], -1)[mask]
    found = audit.statistics(cache, np.arange(cache.rows))
    assert found is not None
    np.testing.assert_allclose(found.retained, 1 - np.exp(log_tail[mask]), atol=1e-5)
    np.testing.assert_allclose(found.entropy, -(np.exp(outcomes) * outcomes).sum(-1), atol=2e-3)
    label = (ids == batch.labels[..., None]).any(-1)[mask].mean()
    assert list(found.by_k) == [1, 8]
    assert found.by_k[8][1] == pytest.approx(label)
    assert found.by_k[8][0] == pytest.approx(1 - np.exp(log_tail[mask]).mean(), abs=1e-5)
    assert found.by_k[1][1] == pytest.approx((ids[..., 0] == batch.labels)[mask].mean())
    assert found.by_k[1][0] == pytest.approx(np.exp(log_p[..., 0])[mask].mean(), abs=1e-5)


@pytest.mark.parametrize(
    ("inside", "advice"),
    [
        ({8: 0.97, 32: 0.995, 100: 0.999}, "cache.read_top_k 32 would do"),
        ({8: 0.97, 32: 0.98, 100: 0.99}, "enough under any tail"),
        ({8: 0.7, 32: 0.8, 100: 0.91}, "keep loss.tail bucket"),
        ({8: 0.01, 32: 0.02, 100: 0.05}, "a larger cache.top_k"),
    ],
)
def test_the_verdict_follows_from_the_probability_inside(inside, advice):
    by_k = {k: (mass, 0.9) for k, mass in inside.items()}
    said = audit.verdict(audit.Statistics(np.ones(1), np.ones(1), by_k, np.ones(1)))
    assert said.startswith(f"verdict: K = 100 holds {inside[100]:.1%}") and advice in said


def test_array_bytes_add_up_to_the_files_on_disk(cache):
    files = [f for f in Path(cache.path).rglob("*") if f.is_file() and "/c/" in str(f)]
    sizes = audit.array_bytes(cache)
    assert sum(sizes.values()) == cache.nbytes == sum(f.stat().st_size for f in files)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_verify_names_every_bad_file_and_nothing_else(cache, capsys):
    """Case 34: one file deleted, one cut short, one bit flipped, one shard never committed."""
    manifest = cache.manifest
    assert cache.shards >= 4
    bad = {
        shard_file(manifest, "tokens", 0): lambda f: f.unlink(),
        shard_file(manifest, "teacher_codes", 1): lambda f: f.write_bytes(f.read_bytes()[:-1]),
        shard_file(manifest, "teacher_log_z", 2): flip,
        "commits/000003.json": lambda f: f.unlink(),
        "loss_mask/zarr.json": lambda f: f.write_text(f.read_text() + " "),
    }
    assert audit.verify(cache) == []
    for name, damage in bad.items():
        damage(Path(cache.path) / name)
    problems = audit.verify(Cache.open(cache.path))
    assert sorted(p.split()[0].rstrip(":") for p in problems) == sorted(bad)
    lines = " ".join(problems)
    assert "rows 16..31" in lines
    assert all(word in lines for word in ("missing", "committed with", "sha256"))
    assert audit.main([cache.path, "--verify"]) == 1
    said = capsys.readouterr().out
    assert all(name in said for name in bad) and "delete them" in said


def test_damage_is_an_error_without_verify_too(cache):
    flip(Path(cache.path) / shard_file(cache.manifest, "teacher_gap_steps", 0))
    with pytest.raises(RunError, match="teacher_gap_steps/c/0/0/0"):
        audit.main([cache.path])


def test_another_teacher_fails_the_spot_check(cache, config, tmp_path, capsys):
    other = hf_folder(tmp_path / "other", seed=9)
    assert audit.main([cache.path, "--spot_check", "4", "--teacher", str(other)]) == 1
    said = capsys.readouterr().out
    assert "not the teacher" in said and "another teacher's" in said


def test_beside_a_live_writer_nothing_is_called_damage(cache, config, capsys):
    (Path(cache.path) / "commits/000003.json").unlink()
    with create(cache.path, cache.manifest, cache.rows):
        assert audit.main([cache.path, "--verify"]) == 0
        said = capsys.readouterr().out
        assert f"a writer is active (process {os.getpid()}" in said
        assert "delete" not in said and "bad" not in said
        with pytest.raises(UserError, match="a writer is active .*: wait for it"):
            Cache.open(cache.path).require_complete()
    assert audit.main([cache.path, "--verify"]) == 1
    said = capsys.readouterr().out
    assert "not finished; re-run the command" in said and "delete" not in said


def test_questions_that_make_no_sense_are_refused(cache, tmp_path):
    with pytest.raises(UserError, match="expected a cache at"):
        audit.main([str(tmp_path / "nothing")])
    with pytest.raises(UserError, match="--teacher DIR"):
        audit.main([cache.path, "--spot_check", "3"])
    with pytest.raises(UserError, match="at least 1 row"):
        audit.main([cache.path, "--spot_check", "0", "--teacher", "x"])


def test_the_command_line_exits_2_for_a_wrong_path(tmp_path):
    command = [sys.executable, "-m", "jax_distill.audit", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: expected a cache at")
    assert result.stderr.count("\n") == 1


def test_a_cache_without_a_teacher_is_described(config, capsys):
    bare = replace(config, teacher=replace(config.teacher, path=""))
    train, _ = teacher.write_caches(bare)
    assert audit.main([train.path, "--verify"]) == 0
    assert "no teacher" in capsys.readouterr().out


def test_the_fingerprint_of_a_teacher_follows_its_bytes(tmp_path):
    folder = hf_folder(tmp_path / "a")
    same = hf_folder(tmp_path / "b")
    assert teacher_fingerprint(folder) == teacher_fingerprint(same)
    hf.save_weights(same, random_model(1), model_config())
    assert teacher_fingerprint(folder) != teacher_fingerprint(same)


def test_repair_writes_the_damaged_shards_again_and_touches_no_other(cache, config, capsys):
    whole = cache.read(range(cache.rows))
    before = folder_bytes(Path(cache.path))
    shards = {1: "teacher_gap_steps", 2: "teacher_log_z"}
    keys = {shard: shard_file(cache.manifest, name, shard) for shard, name in shards.items()}
    for key in keys.values():
        flip(Path(cache.path) / key)
    words = [cache.path, "--teacher", config.teacher.path, "--verify"]
    assert audit.main(words) == 1
    assert audit.main([*words, "--repair"]) == 0
    assert f"writing 2 of {cache.shards} shards again" in capsys.readouterr().out
    repaired = Cache.open(cache.path)
    repaired.require_complete()
    again = repaired.read(range(cache.rows))
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    # Other batches, other roundings: a gap below 32 may be the next float16 number, 1/64 away.
    np.testing.assert_allclose(again.targets.logprobs, whole.targets.logprobs, atol=2**-6)
    after = folder_bytes(Path(cache.path))
    changed = {key for key in before if "/c/" in key and after[key] != before[key]}
    assert all(int(key.split("/c/")[1].split("/")[0]) in shards for key in changed)
    assert audit.main([*words, "--repair"]) == 0
    assert "nothing to repair" in capsys.readouterr().out


def test_what_the_teacher_cannot_repair_is_refused_and_left_as_it_is(cache, config, tmp_path):
    words = [cache.path, "--repair", "--teacher"]
    targets, rows = (
        Path(cache.path) / shard_file(cache.manifest, name, 1)
        for name in ("teacher_gap_steps", "loss_mask")
    )
    flip(targets)
    before = folder_bytes(Path(cache.path))
    hf_folder(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="is another by its fingerprint"):
        audit.main([*words, str(tmp_path / "other")])
    flip(rows)
    with pytest.raises(RunError, match=r"arrays of .* alone for --repair, got loss_mask/c/1"):
        audit.main([*words, config.teacher.path])
    flip(rows)
    assert folder_bytes(Path(cache.path)) == before
