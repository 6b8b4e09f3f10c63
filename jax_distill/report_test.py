"""Curves of several runs: what differs most is found, named and drawn; speed does not count."""

import html
import json
import re

import numpy as np
import pytest

from jax_distill import report
from jax_distill.base.console import console
from jax_distill.base.errors import UserError
from jax_distill.config import Config, LossConfig, save


def records(**changes) -> list[dict]:
    """Five steps; `changes`: key → (step, factor)."""
    made = []
    for step in range(1, 6):
        record = {"step": step, "loss": 3.0 / step, "gradient_norm": 1.0, "learning_rate": 1e-3}
        record["tokens_per_second"] = 100.0 * step
        if step == 5:
            record |= {"val_loss": 0.5, "val_kl": 0.0}
        for key, (where, factor) in changes.items():
            if where == step:
                record[key] *= factor
        made.append(record)
    return made


def run_folder(path, values, backend, **options):
    path.mkdir()
    changed = Config(output_dir=str(path), **options)
    save(changed, path / "config.yaml")
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in values))
    (path / "manifest.json").write_text(json.dumps({"backend": backend}))
    return path


@pytest.mark.parametrize("key,step", [("loss", 2), ("gradient_norm", 4), ("val_loss", 5)])
def test_the_largest_difference_is_found_with_its_step(key, step):
    first, second = records(), records(**{key: (step, 1.25), "learning_rate": (3, 1.01)})
    found = report.largest_difference(first, second)
    assert found is not None and found[:2] == (key, step) and found[2] == pytest.approx(0.25)


def test_speed_is_no_difference_and_runs_without_a_common_step_have_none():
    assert report.largest_difference(records(), records(tokens_per_second=(2, 9.0)))[2] == 0
    later = [r | {"step": r["step"] + 100} for r in records()]
    assert report.largest_difference(records(), later) is None
    assert "no step in common" in report.compared("a", "b", None)


def test_differences_are_those_of_common_steps():
    second = [r for r in records(loss=(2, 1.5)) if r["step"] in (2, 4, 5)]
    steps, gaps = report.differences(records(), second, "loss")
    assert steps.tolist() == [2, 4, 5]
    np.testing.assert_allclose(gaps, [0.5, 0, 0], atol=1e-15)
    assert report.differences(records(), second, "absent")[0].shape == (0,)


def test_of_runs_that_should_be_the_same_the_largest_difference_is_named(tmp_path, capsys):
    runs = [
        run_folder(tmp_path / "a", records(), "jax"),
        run_folder(tmp_path / "b", records(loss=(4, 1 + 1e-6)), "torch"),
        run_folder(tmp_path / "c", records(gradient_norm=(1, 3.0)), "torch"),
    ]
    out = tmp_path / "compare.png"
    report.main([*map(str, runs), "--parity", "--out", str(out)])
    said = capsys.readouterr().out
    assert "a (jax) and b (torch): largest relative difference 1e-06, loss at step 4" in said
    assert "a (jax) and c (torch): largest relative difference 2, gradient norm at step 1" in said
    assert out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="metrics.jsonl"):
        report.main([str(tmp_path / "nowhere"), str(runs[0])])


def test_several_runs_open_with_final_numbers_and_the_options_that_differ(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(console, "width", 200)
    hot = LossConfig(temperature=2.0)
    runs = [
        run_folder(tmp_path / "a", records(), "jax"),
        run_folder(tmp_path / "b", records(loss=(5, 1.5)), "jax", loss=hot, seed=4),
    ]
    test = {"student": {"kl": 0.25, "perplexity": 7.5}, "teacher": {"kl": 0.0}}
    (runs[1] / "summary.json").write_text(json.dumps({"test": test, "tokens_trained": 1234567}))
    report.main([*map(str, runs), "--out", str(tmp_path / "compare.png")])
    said = capsys.readouterr().out
    rows = [re.sub("[^ -~–τ‖]", " ", line).split("  ") for line in said.splitlines()]
    cells = {
        words[0]: words[1:] for row in rows if (words := [c.strip() for c in row if c.strip()])
    }
    assert cells["training loss"] == ["0.6000", "0.9000"]
    assert cells["validation KL"] == ["0.0000", "0.0000"]
    assert cells["test KL"] == ["–", "0.2500"] and cells["test perplexity"] == ["–", "7.5000"]
    assert cells["tokens trained"] == ["–", "1,234,567"]
    assert cells["loss.temperature"] == ["1.0", "2.0"] and cells["seed"] == ["0", "4"]
    assert "loss.tail" not in cells and "largest relative difference" not in said
    assert "whole vocabulary" in said and "tail bucket" in said


@pytest.mark.parametrize("row", [{}, {"kl": None}, {"kl": 0.1234, "perplexity": 3}])
def test_a_report_says_what_is_compared_and_on_what_whatever_the_table_lacks(tmp_path, row):
    run = run_folder(tmp_path / "a", records(), "jax")
    manifest = {"backend": "jax", "started": "2026-01-02T03:04:05Z", "cache": "f00d"}
    (run / "manifest.json").write_text(json.dumps(manifest | {"versions": {"jax": "0.10.2"}}))
    summary = {
        "test": {"ce_baseline": row},
        "cache": {"path": "runs/x/cache/train", "tokens": 12345},
        "seconds": 9.5,
    }
    page = html.unescape(report.write_report(run, summary).read_text("utf-8"))
    for words in ("2026-01-02T03:04:05Z", "f00d", "0.10.2", "runs/x/cache/train", "12,345"):
        assert words in page
    assert "over the whole vocabulary at temperature 1" in page and "CE-only student" in page
    assert re.search("100 most likely tokens, .* tail bucket, at temperature 1.0", page)
    assert "<td>cache top_k</td><td>100</td>" in page
    assert ("0.1234" in page) == (row.get("kl") == 0.1234) and "<td>–</td>" in page


def test_a_report_says_speed_memory_and_retained_mass_once_and_only_where_known(tmp_path):
    values = [r | {"teacher_mass": 0.8 + 0.02 * r["step"]} for r in records()]
    run = run_folder(tmp_path / "a", values, "jax")
    summary = {"planned_peak_bytes": 1982915612, "peak_host_bytes": None, "compile_seconds": 10.4}
    page = report.write_report(run, summary).read_text("utf-8")
    for cells in ("300 tokens/s", "1.98 GB", "10.4 s", "0.8600"):  # median; mean of the steps
        assert page.count(f"<td>{cells}</td>") == 1
    assert "host memory" not in page and "1,982,915,612" not in page
    bare = run_folder(tmp_path / "b", [{"step": 1, "loss": 1.0}], "jax")
    assert "speed, memory" not in report.write_report(bare, {}).read_text("utf-8")


@pytest.mark.parametrize("name", ["manifest.json", "summary.json", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("damaged", [b"[1]\n", b"{\n{", b"\xff\xfe\n"])
def test_a_damaged_file_of_a_run_is_refused_by_name(tmp_path, name, damaged):
    runs = [run_folder(tmp_path / each, records(), "jax") for each in "ab"]
    (runs[1] / "summary.json").write_text("{}")
    (runs[1] / name).write_bytes(damaged)
    for folders in (runs, runs[1:]):
        with pytest.raises(UserError, match=f"{name}.*expected|expected .*{name}"):
            report.main([*map(str, folders), "--out", str(tmp_path / "x.png")])


def test_the_figure_has_a_strip_of_differences_under_every_quantity():
    runs = {"a (jax)": records(), "b (torch)": records(loss=(4, 1 + 1e-6))}
    figure = report.draw_comparison(runs)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [report.CURVES[key] for key in ("loss", "gradient_norm", "learning_rate")]
    strips = [axes for axes in figure.axes if axes.get_yscale() == "log"]
    assert len(strips) == 3
    rings = [text.get_text() for axes in strips for text in axes.texts if "e-" in text.get_text()]
    assert rings == ["1e-06"] and "loss at step 4" in figure.get_suptitle()
