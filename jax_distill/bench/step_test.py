"""`bench step` on a CPU: rows, table, refusals, a setup that dies, the paper's figures."""

import json
import os
import subprocess
import sys

import pytest

from jax_distill import hf
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.bench import __main__ as bench
from jax_distill.bench import step

SMALL = ["--data.sequence_length", "16", "--train.batch_size", "2", "--steps", "1"]
SMALL += ["--config", "configs/quickstart.yaml", "--cache.top_k", "8"]


def test_each_setup_runs_in_its_own_process_and_the_table_stands_beside_the_plan(tmp_path, capsys):
    rows_at = tmp_path / "new" / "rows.json"
    options = ["--setups", "fused_chunked,fused", "--json", str(rows_at)]
    assert bench.main(["step", *SMALL, *options]) == 0
    chunked, fused = json.loads(rows_at.read_text())
    for row, setup in ((chunked, "fused_chunked"), (fused, "fused")):
        assert row["setup"] == setup and row["paper"] is None
        assert row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(32 / row["seconds"])
        assert row["tflops"] > 0 and row["planned_bytes"] > 4 * 4 * 1_000_000
        if sys.platform == "linux":  # elsewhere a process does not learn what it holds
            # Beside XLA's buffers the process grows by its threads and its code.
            assert 0.5 * row["planned_bytes"] < row["peak_bytes"] < row["planned_bytes"] + 3e8
    assert fused["loss"] == pytest.approx(chunked["loss"], rel=1e-5)
    said = capsys.readouterr().out
    assert "2 × 16 tokens a step, CPU" in said and "fused_chunked" in said


@pytest.mark.usefixtures("optax_promotion")
def test_overrides_reach_the_step(tmp_path):
    rows_at = tmp_path / "rows.json"
    layerwise = ["--optimizer.layerwise", "true", "--optimizer.clip_norm", "null"]
    options = ["--in_process", "--setups", "fused", "--optimizer.state_dtype", "bfloat16"]
    assert bench.main(["step", *SMALL, *options, *layerwise, "--json", str(rows_at)]) == 0
    (row,) = json.loads(rows_at.read_text())
    assert row["optimizer"]["layerwise"] and row["optimizer"]["state_dtype"] == "bfloat16"


@pytest.mark.usefixtures("optax_promotion")
def test_hidden_states_come_with_the_batch(tmp_path):
    """As a cache gives them; beside a live teacher the step makes them."""
    rows_at = tmp_path / "rows.json"
    hidden = ["--loss.hidden_weight", "1", "--cache.hidden_layers", "2"]
    options = ["--in_process", "--setups", "fused", "--json", str(rows_at)]
    assert bench.main(["step", *SMALL, *hidden, *options]) == 0
    (row,) = json.loads(rows_at.read_text())
    assert row["setup"] == "fused" and row["loss"] > 1  # of random states: near 1 by itself
    assert step.options_of("online") == ["--loss.implementation=dense", "--teacher.mode=online"]


@pytest.mark.parametrize(
    "options,word",
    [
        (["--setups", "dense,offline"], "'offline'"),
        (["--setups", "fused,fast"], "'fast'"),
        (["--steps", "0"], "--steps"),
        (["--in_process"], "one setup"),
        (["--json", "."], "expected --json to be a file"),
        (["--json", "/dev/null/rows.json"], "expected --json to be a file"),
        (["--optimizer.layerwize", "true"], "optimizer.layerwise"),
        (["--setups", "fused", "--in_process", "--data.sequence_length", "1000000"], "CPU"),
    ],
)
def test_nonsense_is_refused_in_one_line(options, word):
    with pytest.raises(UserError, match=word) as refusal:
        bench.main(["step", *SMALL, *options])
    assert "\n" not in str(refusal.value)


def test_several_devices_of_a_cpu_need_no_flag():
    words = "from jax_distill import devices; print(len(devices.local_devices(2)))"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-c", words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr


def test_a_setup_that_dies_leaves_the_others_and_exit_code_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    rows_at = tmp_path / "rows.json"
    assert bench.main(["step", *SMALL, "--setups", "fused", "--json", str(rows_at)]) == 1
    assert json.loads(rows_at.read_text()) == [{"setup": "fused", "failed": "exit 1"}]
    assert "fused: exit 1" in capsys.readouterr().out


def test_the_papers_figures_stand_beside_its_own_case_only():
    model = hf.model_config(hf.read_config(find_path("configs/llama32_3b")))
    assert step.paper_of("fused_chunked", model, 8192) == (58.3, 20.2, 304.0)
    assert step.paper_of("online", model, 8192) == (102.8, 25.9, 237.0)
    assert step.paper_of("fused", model, 8192) is None
    assert step.paper_of("dense", model, 32768) is None
