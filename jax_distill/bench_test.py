"""The benchmarks at toy size, and what is planned for a GPU that is not here."""

import importlib.util
import json
import subprocess
import sys

import pytest

from jax_distill import devices
from jax_distill.bench import __main__ as bench
from jax_distill.bench import head
from jax_distill.config import Refusal

TOY = ["--tokens", "32", "--hidden", "16", "--vocab", "512", "--top_k", "7", "--chunk_size", "8"]
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_cuda13_plugin")


def test_head_measures_writes_rows_and_draws(tmp_path, capsys):
    rows_at, plot_at = tmp_path / "rows.json", tmp_path / "plot.png"
    options = ["--implementation", "fused,kl_and_grads", "--repeats", "1", "--dtype", "float32"]
    written = ["--json", str(rows_at), "--plot", str(plot_at)]
    assert bench.main(["head", *TOY, *options, *written]) == 0
    rows = json.loads(rows_at.read_text())
    assert {row["implementation"] for row in rows} == {"fused", "kl_and_grads"}
    keys = "implementation tokens hidden vocab top_k chunk_size peak_gib products seconds"
    for row in rows:
        assert set(keys.split()) <= set(row)
        assert row["seconds"] > 0 and row["products"] == 3
        assert row["peak_gib"] > row["floor_gib"] > 0
        assert row["measured_gib"] is None  # a CPU does not tell
    assert plot_at.read_bytes().startswith(b"\x89PNG")
    assert "kl_and_grads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--implementation", "fused,fast"], "fast"),
        (["--tokens", "1k"], "1k"),
        (["--top_k", "600"], "top_k"),
        (["--plan", "h300"], "h300"),
        (["--tokens", "32768", "--hidden", "4096", "--vocab", "131072"], "CPU"),
    ],
)
def test_head_refuses_nonsense_in_one_line(options, word):
    with pytest.raises(Refusal, match=word) as refusal:
        bench.main(["head", *TOY, *options])
    assert "\n" not in str(refusal.value)


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(Refusal, match="head"):
        bench.main(["heads"])


def test_the_floor_is_that_of_the_paper_sized_head():
    """32K tokens: 3.52 GiB with an fp32 head gradient, 3.27 with d_hidden over hidden."""
    case = head.Case("fused", 32768, 4096, 131072, 100, 1024, "bfloat16")
    assert case.floor / devices.GIB == pytest.approx(3.52, abs=0.01)
    core = case._replace(implementation="kl_and_grads")
    assert core.floor / devices.GIB == pytest.approx(3.27, abs=0.01)


@pytest.mark.parametrize("key", list(devices.GPUS))
def test_a_target_config_states_the_facts(key):
    gpu = devices.find_gpu(key)
    text = devices.target_config(gpu)
    for fact in (gpu.cores, gpu.bandwidth, gpu.memory_bytes, gpu.name):
        assert str(fact) in text
    assert text.count("{") == text.count("}")


def plan_in_a_process(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jax_distill.bench", "head", "--plan", "h200", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not PLUGIN, reason="needs jax's CUDA plugin: pip install 'jax_distill[plan]'")
def test_the_paper_sized_head_fits_as_planned_for_an_h200(tmp_path):
    """LOSS.md §5: ≤ 4.05 and 6.0 GiB for the core, ≤ 4.8 and 8.5 through the loss."""
    rows_at = tmp_path / "rows.json"
    done = plan_in_a_process("--implementation", "fused,kl_and_grads", "--json", str(rows_at))
    assert done.returncode == 0, done.stderr
    peaks = {
        (row["implementation"], row["tokens"]): row["peak_gib"]
        for row in json.loads(rows_at.read_text())
    }
    assert peaks["kl_and_grads", 32768] <= 4.05
    assert peaks["kl_and_grads", 262144] <= 6.0
    assert peaks["fused", 32768] <= 4.8
    assert peaks["fused", 262144] <= 8.5


@pytest.mark.skipif(bool(PLUGIN), reason="jax's CUDA plugin is installed")
def test_planning_without_the_plugin_names_the_extra():
    done = plan_in_a_process(*TOY)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'jax_distill[plan]'" in done.stderr
