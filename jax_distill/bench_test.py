"""The benchmarks at toy size, and what is planned for a GPU that is not here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_distill import devices
from jax_distill.base import charts, process
from jax_distill.base.errors import UserError
from jax_distill.bench import MATMULS, attention_check, gpu_check, head, peers
from jax_distill.bench import __main__ as bench
from jax_distill.conftest import on_devices
from jax_distill.synthetic import loss_inputs

SIZE = ["--tokens", "32", "--hidden_size", "16", "--vocab_size", "512", "--top_k", "7"]
TOY = [*SIZE, "--chunk_size", "8"]
ROOT = Path(__file__).resolve().parent.parent
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_cuda13_plugin")


def test_head_measures_writes_rows_and_draws(tmp_path, capsys):
    rows_at, plot_at = tmp_path / "new" / "rows.json", tmp_path / "other" / "plot.png"
    options = ["--implementation", "fused,kl_and_grads", "--repeats", "1", "--dtype", "float32"]
    written = ["--json", str(rows_at), "--plot", str(plot_at)]
    assert bench.main(["head", *TOY, *options, *written]) == 0
    rows = json.loads(rows_at.read_text())
    assert {row["implementation"] for row in rows} == {"fused", "kl_and_grads"}
    keys = "implementation tokens hidden_size vocab_size top_k chunk_size peak_gib matmuls"
    for row in rows:
        assert set(keys.split()) <= set(row)
        assert row["seconds"] > 0 and row["matmuls"] == 3
        assert row["peak_gib"] > row["floor_gib"] > 0
        assert (row["measured_gib"] is not None) == process.tells_memory()
    assert plot_at.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("kl_and_grads", "peak GiB", "floor", "paper"))


@pytest.mark.skipif(not process.tells_memory(), reason="needs Linux's /proc")
def test_the_measured_peak_is_near_the_planned_one_and_parts_dense_from_fused(tmp_path):
    """What a process takes on a CPU, inputs included, against XLA's plan: within 25 MiB."""
    size = ["--tokens", "512", "--hidden_size", "64", "--vocab_size", "32768", "--chunk_size", "32"]
    rows_at = tmp_path / "rows.json"
    options = ["--implementation", "dense,fused", "--repeats", "1", "--dtype", "float32"]
    command = [sys.executable, "-m", "jax_distill.bench", "head", *size, *options]
    # A process of its own: this one has memory left over from other tests, and would not grow.
    subprocess.run([*command, "--json", str(rows_at)], check=True, capture_output=True)
    fused, dense = json.loads(rows_at.read_text())
    assert dense["measured_gib"] > 3 * fused["measured_gib"]
    for row in (fused, dense):
        assert row["measured_gib"] == pytest.approx(row["peak_gib"], abs=25 / 1024)


def test_lines_are_drawn_by_chunk_size_and_the_papers_figures_where_they_belong(
    tmp_path, monkeypatch
):
    def row(implementation, chunk_size, tokens):
        case = head.Case(implementation, tokens, *head.PAPER_SHAPE, 100, chunk_size, "bfloat16")
        return head.row_of(case, "a GPU", devices.Memory(tokens << 20, 0, 0, 0))

    drawn = {}
    monkeypatch.setattr(
        head, "draw_lines", lambda path, lines, **more: drawn.update(more, lines=lines)
    )
    rows = [row("dense", 8, t) for t in (32768, 16384)]
    rows += [row("fused_chunked", c, t) for c in (8, 16) for t in (16384, 32768)]
    head.draw(rows, tmp_path / "plot.png", limit=None)
    floor = drawn["lines"].pop("inputs and gradients alone")
    assert drawn["lines"] == {
        "dense": [(32768, 32.0), (16384, 16.0)],
        "fused_chunked, C = 8": [(16384, 16.0), (32768, 32.0)],
        "fused_chunked, C = 16": [(16384, 16.0), (32768, 32.0)],
    }
    assert dict(floor) == {t: row("dense", 8, t)["floor_gib"] for t in (16384, 32768)}
    assert [(mark.x, mark.y) for mark in drawn["marks"]] == [(32768, 85.2), (32768, 5.45)]


def test_a_bar_is_drawn_of_its_parts(tmp_path):
    path, limits = tmp_path / "plot.png", [charts.Limit(5.0, "room")]
    charts.draw_bars(path, {"one": {"a": 1.0, "b": 2.0}}, title="t", label="GB", limits=limits)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("computes", ["bucket", "full KL"])
def test_the_answer_for_peers_is_its_own_derivative(computes):
    """The gradients against central differences of the value, float64: error O(h²) and eps/h."""
    inputs = loss_inputs(1, 3, width=4, vocab_size=11, top_k=5)
    inputs = inputs._replace(
        hidden=inputs.hidden.astype(np.float64), weight=inputs.weight.astype(np.float64)
    )
    answer, step = peers.float64_answer(inputs, computes), 1e-5
    for name, gradient in (("hidden", "d_hidden"), ("weight", "d_weight")):
        exact, array = answer[gradient], getattr(inputs, name)
        assert exact.shape == array.shape
        for index in np.ndindex(array.shape):
            values = []
            for move in (step, -step):
                moved = array.copy()
                moved[index] += move
                there = inputs._replace(**{name: moved})
                values.append(peers.float64_answer(there, computes)["loss"])
            slope = (values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx(exact[index], rel=1e-6, abs=1e-7)


def test_the_answer_is_zero_where_student_and_teacher_agree_and_their_kl_elsewhere():
    """K = V: the bucket is the whole KL; at distance 0 both are 0."""
    same = loss_inputs(1, 3, width=4, vocab_size=11, top_k=10, distance=0.0)
    for computes in ("bucket", "full KL"):
        assert peers.float64_answer(same, computes)["loss"] == pytest.approx(0.0, abs=1e-5)
    other = loss_inputs(1, 3, width=4, vocab_size=11, top_k=10)
    bucket, full = (peers.float64_answer(other, c)["loss"] for c in ("bucket", "full KL"))
    assert bucket == pytest.approx(full, rel=1e-5) and full > 0.1  # the tail is one token: exact


@pytest.mark.slow
def test_peers_agree_and_who_is_not_installed_is_named(tmp_path):
    rows_at = tmp_path / "new" / "rows.json"
    assert bench.main(["peers", *TOY, "--json", str(rows_at)]) == 0
    rows = {row["label"]: row for row in json.loads(rows_at.read_text())}
    assert len(rows) == len(peers.PEERS) == 11
    assert not rows["jax_distill fused"]["missing"] and not rows["torch_ref fused"]["missing"]
    for row in rows.values():
        if row["missing"]:
            assert row["seconds"] is None and "No module named" in row["missing"]
        else:
            assert max(row[f"{x}_error"] for x in ("value", "d_hidden", "d_weight")) < 1e-4
            assert row["seconds"] > 0


def test_the_gpu_check_covers_every_implementation_and_both_lengths():
    cases = {(c.implementation, c.tokens, c.chunk_size) for c in gpu_check.cases_of(toy=False)}
    assert cases == {(i, t, 2048) for i in MATMULS for t in (8192, 262144)}
    script = (ROOT / ".ci/gpu_check.sh").read_text()
    assert "--tokens 8192,262144 --chunk_size 2048" in script  # torch_ref's


def test_the_gpu_checks_definition_of_attention_is_its_own_derivative():
    """The gradients against central differences of the value, float64: error O(h²) and eps/h."""
    size = attention_check.Size(6, 4, 2, 3, 3)
    rng = np.random.default_rng(0)
    shapes = {"query": (6, 4, 3), "key": (6, 2, 3), "value": (6, 2, 3), "sinks": (4,)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    cotangent, segments = rng.normal(size=shapes["query"]), np.array([1, 1, 1, 2, 2, 0])
    step = 1e-5
    for window in (None, size.window):
        exact = attention_check.definition(arrays, cotangent, segments, window, True)
        for name, array in arrays.items():
            for index in list(np.ndindex(array.shape))[::5]:
                values = []
                for move in (step, -step):
                    moved = array.copy()
                    moved[index] += move
                    there = arrays | {name: moved}
                    out = attention_check.definition(there, cotangent, segments, window, True)
                    values.append(np.sum(out["output"] * cotangent))
                slope = (values[0] - values[1]) / (2 * step)
                assert slope == pytest.approx(exact[f"d_{name}"][index], rel=1e-6, abs=1e-8)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="needs a checkout")
def test_the_gpu_check_runs_at_toy_size(tmp_path):
    out = tmp_path / "new"
    environment = on_devices(1) | {"OUT": str(out), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / ".ci/gpu_check.sh"), "--toy"]  # on one device, as on one GPU
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = json.loads((out / "gpu_check_jax.json").read_text())
    assert len(ours["correctness"]) == 10 and all(row["right"] for row in ours["correctness"])
    kinds = {"grouped", "blockwise", "reference"}  # × 2 dtypes × 2 rows × 2 windows × 2
    assert {row["implementation"] for row in ours["attention"]} >= kinds
    assert len(ours["attention"]) >= 48 and all(row["right"] for row in ours["attention"])
    (step,) = json.loads((out / "gpu_check_steps.json").read_text())
    assert step["planned_bytes"] and "compare" not in done.stderr
    assert "1e-4 allowed" in done.stdout.replace("0.0001", "1e-4")
    assert {row["implementation"] for row in ours["head"]} == set(MATMULS)
    assert all(row["peak_gib"] and row["seconds"] for row in ours["head"])
    theirs = json.loads((out / "gpu_check_torch.json").read_text())
    assert len({row["implementation"] for row in theirs}) == 4
    assert all(row["seconds"] for row in theirs)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--implementation", "fused,fast"], "fast"),
        (["--tokens", "1k"], "1k"),
        (["--top_k", "600"], "top_k"),
        (["--plan", "h300"], "h300"),
        (["--json", "."], "expected --json to be a file"),
        (["--json", "/dev/null/rows.json"], "expected --json to be a file"),
        (["--plot", "plot.bmp"], "expected --plot to end in .png"),
        (["--plot", "/dev/null/plot.png"], "expected --plot to be a file"),
        (["--tokens", "32768", "--hidden_size", "4096", "--vocab_size", "131072"], "CPU"),
    ],
)
def test_head_refuses_nonsense_in_one_line(options, word):
    with pytest.raises(UserError, match=word) as refusal:
        bench.main(["head", *TOY, *options])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("words", [["peers", *TOY], ["gpu_check", "--toy"]])
def test_rows_that_cannot_be_written_are_refused_before_the_work(words, monkeypatch):
    monkeypatch.setattr(peers, "loss_inputs", None)
    with pytest.raises(UserError, match="expected --json to be a file.*; name another"):
        bench.main([*words, "--json", "/dev/null/rows.json"])


@pytest.mark.slow
def test_so_are_those_of_torch_ref():
    command = [sys.executable, "-m", "torch_ref.head", "--json", "/dev/null/rows.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected --json to be a file" in done.stderr


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(UserError, match="head"):
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
    rows = json.loads(rows_at.read_text())
    peaks = {(row["implementation"], row["tokens"]): row["peak_gib"] for row in rows}
    assert all(row["seconds"] is None and row["measured_gib"] is None for row in rows)
    for row in rows:  # one fp32 chunk of logits and one bf16 of dlogits; through the loss, a cast
        chunk = 1024 * 131072 * 6 / devices.GIB
        cast = 0.0 if row["implementation"] == "kl_and_grads" else 0.51
        assert row["peak_gib"] - row["floor_gib"] < chunk + cast + 0.02
    assert peaks["kl_and_grads", 32768] <= 4.05
    assert peaks["kl_and_grads", 262144] <= 6.0
    assert peaks["fused", 32768] <= 4.8
    assert peaks["fused", 262144] <= 8.5


@pytest.mark.skipif(bool(PLUGIN), reason="jax's CUDA plugin is installed")
def test_planning_without_the_plugin_names_the_extra():
    done = plan_in_a_process(*TOY)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'jax_distill[plan]'" in done.stderr
