"""The benchmarks at toy size, and what is planned for a GPU that is not here."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_distill import devices
from jax_distill.bench import __main__ as bench
from jax_distill.bench import gpu_check, head, head_plot, peers, process
from jax_distill.config import Refusal
from jax_distill.losses.float64_test import Batch, float64_loss, make_batch

TOY = ["--tokens", "32", "--hidden", "16", "--vocab", "512", "--top_k", "7", "--chunk_size", "8"]
ROOT = Path(__file__).resolve().parent.parent
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_cuda13_plugin")


def test_head_measures_writes_rows_and_draws(tmp_path, capsys):
    rows_at, plot_at = tmp_path / "new" / "rows.json", tmp_path / "other" / "plot.png"
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
        assert (row["measured_gib"] is not None) == process.tells_memory()
    assert plot_at.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("kl_and_grads", "peak GiB", "floor", "paper"))


@pytest.mark.skipif(not process.tells_memory(), reason="the kernel does not tell")
def test_the_measured_peak_is_near_the_planned_one_and_parts_dense_from_fused(tmp_path):
    """What a process takes on a CPU, inputs included, against XLA's plan: within 25 MiB."""
    size = ["--tokens", "512", "--hidden", "64", "--vocab", "32768", "--chunk_size", "32"]
    rows_at = tmp_path / "rows.json"
    options = ["--implementation", "dense,fused", "--repeats", "1", "--dtype", "float32"]
    command = [sys.executable, "-m", "jax_distill.bench", "head", *size, *options]
    # A process of its own: this one has memory left over from other tests, and would not grow.
    subprocess.run([*command, "--json", str(rows_at)], check=True, capture_output=True)
    fused, dense = json.loads(rows_at.read_text())
    assert dense["measured_gib"] > 3 * fused["measured_gib"]
    for row in (fused, dense):
        assert row["measured_gib"] == pytest.approx(row["peak_gib"], abs=25 / 1024)


def test_lines_are_drawn_by_chunk_size_and_labels_stand_apart():
    def row(implementation, chunk_size, tokens, gib):
        known = {"implementation": implementation, "chunk_size": chunk_size, "tokens": tokens}
        return {**known, "peak_gib": gib, "fits": gib < 100}

    rows = [row("dense", 8, t, 4.0 * t) for t in (32, 16)]
    rows += [row(name, 8, t, 8.0 + t) for name in ("fused", "fused_chunked") for t in (16, 32)]
    rows += [row("fused", 16, t, 9.0 + t) for t in (16, 32)]
    lines = head_plot.lines_of(rows)
    assert [line.label for line in lines] == [
        "dense",
        "fused, C = 8",
        "fused_chunked, C = 8",
        "fused, C = 16",
    ]
    assert lines[0].points == [(16, 64.0, True), (32, 128.0, False)]
    labels = head_plot.labels_of(lines)
    assert [text for text, *_ in labels] == [
        "fused, C = 8, fused_chunked, C = 8",
        "fused, C = 16",
        "dense",
    ]
    places = [at for *_, at in labels]
    assert all(b >= a * head_plot.APART for a, b in zip(places, places[1:], strict=False))


def test_the_answer_for_peers_is_that_of_the_losses(tmp_path):
    options = argparse.Namespace(tokens=6, hidden=8, vocab=40, top_k=5, chunk_size=3)
    inputs = peers.make_inputs(options)
    answer = peers.float64_answer(inputs, "bucket")
    arrays = {name: inputs[name][None] for name in inputs if name.startswith("teacher_")}
    arrays = {name: arrays[name] for name in arrays.keys() & Batch.__dataclass_fields__.keys()}
    batch = make_batch(0, shape=(1, 6, 8, 40, 5), holes=False).replace(
        hidden=inputs["hidden"][None].astype(np.float64),
        lm_head=inputs["lm_head"].astype(np.float64),
        **arrays,
    )
    sums, gradients = float64_loss(batch)
    assert answer["loss"] == pytest.approx(sums["loss"], rel=1e-6)
    np.testing.assert_allclose(answer["d_hidden"], gradients["hidden"][0], atol=1e-6)
    np.testing.assert_allclose(answer["d_lm_head"], gradients["lm_head"], atol=1e-6)


@pytest.mark.slow
def test_peers_agree_and_who_is_not_installed_is_named(tmp_path):
    rows_at = tmp_path / "new" / "rows.json"
    size = ["--tokens", "32", "--hidden", "16", "--vocab", "512", "--top_k", "7"]
    assert bench.main(["peers", *size, "--chunk_size", "8", "--json", str(rows_at)]) == 0
    rows = {row["label"]: row for row in json.loads(rows_at.read_text())}
    assert len(rows) == len(peers.PEERS) == 11
    assert not rows["jax_distill fused"]["missing"] and not rows["torch_ref fused"]["missing"]
    for row in rows.values():
        if row["missing"]:
            assert row["seconds"] is None and "No module named" in row["missing"]
        else:
            assert max(row[f"{x}_error"] for x in ("value", "d_hidden", "d_lm_head")) < 1e-4
            assert row["seconds"] > 0


def test_the_gpu_check_covers_every_implementation_length_and_chunk():
    cases = {(c.implementation, c.tokens, c.chunk_size) for c in gpu_check.cases_of(toy=False)}
    lengths, chunks = (8192, 32768, 262144), (1024, 2048, 4096)
    chunked = set(head.PRODUCTS) - {"dense"}
    assert cases == {(i, t, c) for i in chunked for t in lengths for c in chunks} | {
        ("dense", t, 1024) for t in lengths
    }
    script = (ROOT / ".ci/gpu_check.sh").read_text()
    assert "--tokens 8192,32768,262144 --chunk_size 1024,2048,4096" in script  # torch_ref's


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="needs a checkout")
def test_the_gpu_check_runs_at_toy_size(tmp_path):
    out = tmp_path / "new"
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / ".ci/gpu_check.sh"), "--toy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = json.loads((out / "gpu_check_jax.json").read_text())
    assert len(ours["correctness"]) == 10 and all(row["right"] for row in ours["correctness"])
    assert {row["implementation"] for row in ours["head"]} == set(head.PRODUCTS)
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
        (["--tokens", "32768", "--hidden", "4096", "--vocab", "131072"], "CPU"),
    ],
)
def test_head_refuses_nonsense_in_one_line(options, word):
    with pytest.raises(Refusal, match=word) as refusal:
        bench.main(["head", *TOY, *options])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("words", [["peers", *TOY], ["gpu_check", "--toy"]])
def test_rows_that_cannot_be_written_are_refused_before_the_work(words, monkeypatch):
    monkeypatch.setattr(peers, "make_inputs", None)
    with pytest.raises(Refusal, match="expected --json to be a file.*; name another"):
        bench.main([*words, "--json", "/dev/null/rows.json"])


@pytest.mark.slow
def test_so_are_those_of_torch_ref():
    command = [sys.executable, "-m", "torch_ref.head", "--json", "/dev/null/rows.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected --json to be a file" in done.stderr


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
