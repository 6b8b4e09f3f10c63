"""The commands with their caches on an object store: bytes and numbers as in a local folder."""

import json
import re
from pathlib import Path

import pytest
import yaml

from jax_distill.cache import object_store
from jax_distill.cache.conftest import CREDENTIALS, bucket_bytes, local_bytes, put
from jax_distill.kill_test import finish
from jax_distill.teacher_test import hf_folder, text_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # see kill_test


def settings(folder: Path, name: str, cache: str) -> list[str]:
    """--config of a run `name` with two steps and a tiny teacher, whose caches are at `cache`."""
    content = {
        "output_dir": str(folder / name),
        "teacher": {"path": str(folder / "teacher"), "dtype": "float32", "batch_size": 4},
        "student": {"from_teacher": {"layers": [0]}},
        "data": {
            "path": str(folder / "text.jsonl"),
            "format": "jsonl",
            "sequence_length": 32,
            "heldout_fraction": 0.2,
        },
        "cache": {"path": cache, "top_k": 4, "shard_rows": 16},
        "train": {"steps": 2, "batch_size": 8, "compute_dtype": "float32"},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return ["--config", str(file)]


def test_every_command_reads_and_writes_a_bucket_as_a_folder(tmp_path, endpoint, monkeypatch):
    """teacher, train, audit with a repair, evaluate, and torch_ref's teacher and training."""
    for name, value in {"AWS_ENDPOINT_URL": endpoint, **CREDENTIALS}.items():
        monkeypatch.setenv(name, value)
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl")
    log, teacher = tmp_path / "log", ["--teacher", str(tmp_path / "teacher")]
    caches = {"local": str(tmp_path / "local_cache"), "bucket": "s3://caches/run"}
    tables = {}
    for name, cache in caches.items():
        config = settings(tmp_path, name, cache)
        if name == "bucket":
            finish(["jax_distill.teacher", *config], log)
        finish(["jax_distill.train", *config], log)
        tables[name] = json.loads((tmp_path / name / "summary.json").read_text())["test"]
        rows = ["--rows", cache, "--device", "cpu", "--cache.path", f"{cache}_torch"]
        finish(["torch_ref.teacher", *config, *rows], log)
    assert tables["local"] == tables["bucket"]
    object_store.context.cache_clear()
    put(f"{cache}/train", "teacher_gap_steps/c/1/0/0", b"damaged")
    check = ["--repair", "--verify", "--spot_check", "4", *teacher, "--compare", caches["local"]]
    finish(["jax_distill.audit", cache, *check], log)
    student = ["--student", str(tmp_path / "bucket" / "export")]
    finish(["jax_distill.evaluate", f"{cache}/heldout", *student, *teacher], log)
    torch = ["--cache.path", f"{cache}_torch", "--output_dir", str(tmp_path / "torch")]
    finish(["torch_ref.train", *config, *torch, "--device", "cpu"], log)
    # Not compared: a manifest has the git revision, another one after a commit, and a head hashes
    # it; what was repaired was computed in batches of another shape.
    other = re.compile(r"manifest|/head-|^train/(teacher_\w+/c/1/|commits/000001)|writer.lock")
    for which in ("", "_torch"):
        here = local_bytes(tmp_path / f"local_cache{which}")
        there = bucket_bytes(f"s3://caches/run{which}")
        same = [{k: x for k, x in each.items() if not other.search(k)} for each in (here, there)]
        assert same[0] == same[1] and len(same[0]) > 50
    object_store.context.cache_clear()
