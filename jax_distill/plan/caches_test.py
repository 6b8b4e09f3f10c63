"""What a cache takes at scale: counted on a small one, and by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from jax_distill.base.errors import UserError
from jax_distill.cache import Cache, Manifest, create
from jax_distill.plan.caches import plan_cache, requests
from jax_distill.plan.command import command
from jax_distill.teacher import expected_bytes

ROWS, SHARD = 7, 3


def counted() -> np.ndarray:
    """(writes, reads) that TensorStore has made of files in this process."""
    found = {
        metric["name"].rsplit("/", 1)[-1]: metric["values"][0].get("value", 0)
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
    }
    return np.array([found.get("write", 0), found.get("batch_read", 0)])


@pytest.mark.parametrize("length", [64, 4096])  # one inner chunk a row, and two
def test_objects_and_requests_are_those_of_a_written_cache(length, tmp_path):
    manifest = Manifest(
        sequence_length=length, shard_rows=SHARD, vocab_size=90, top_k=4, temperatures=(1.0,)
    )
    rng = np.random.default_rng(0)
    rows = {
        name: rng.integers(0, 4, (ROWS, *shape)).astype(dtype)
        for name, (dtype, shape) in manifest.array_shapes().items()
    }
    plan = plan_cache(manifest, ROWS * length, teacher_rate=1.0, train_rate=1.0)
    puts, gets, row_gets = requests(manifest)
    with create(str(tmp_path), manifest, ROWS) as writer:
        for shard, first, last in writer.missing_shards():
            before = counted()
            writer.write(shard, {name: x[first : last + 1] for name, x in rows.items()})
            if last < ROWS - 1:  # the last one finishes the cache besides
                assert (counted() - before).tolist() == [puts, gets]
    assert plan.objects == sum(path.is_file() for path in Path(tmp_path).rglob("*"))
    cache = Cache.open(str(tmp_path))
    before = counted()
    cache.read([0, 4])
    assert (counted() - before).tolist() == [0, 2 * row_gets]


def test_a_billion_tokens_by_hand():
    manifest = Manifest(
        sequence_length=8192, shard_rows=8, vocab_size=128256, top_k=100, temperatures=(1.0,)
    )
    plan = plan_cache(manifest, 10**9, teacher_rate=65536.0, train_rate=8192.0)
    assert (plan.rows, plan.shards) == (122_071, 15_259)
    assert plan.objects == 15_259 * 11 + 10 + 4
    assert plan.bytes == expected_bytes(manifest, 122_071)
    assert plan.teacher_hours == pytest.approx(1e9 / 65536 / 3600)
    assert (plan.puts, plan.gets, plan.train_gets) == (11.0, 10.0, 20.0)


def test_the_command_needs_no_compiler_and_refuses_what_has_no_teacher(tmp_path, capsys):
    words = ["--config", "configs/llama31_8b_to_3b_8k.yaml", "--devices", "8"]
    words += ["--cache_tokens", "1000000000,100000000000"]
    file = tmp_path / "plan.json"
    assert command([*words, "--json", str(file)]) == 0
    assert "100,000,000,000" in capsys.readouterr().out
    one, hundred = json.loads(file.read_text())
    # 8B: 2 · 7.5e9 FLOPs a token and attention, 8 · 792 TFLOP/s.
    assert 0.7 < one["teacher_hours"] < 0.8
    assert hundred["teacher_hours"] == pytest.approx(100 * one["teacher_hours"])
    with pytest.raises(UserError, match="expected teacher.path and teacher.mode offline"):
        command([*words, "--teacher.mode", "online"])
