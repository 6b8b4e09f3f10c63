"""Curves of several runs: what differs most is found, named and drawn; speed does not count."""

import json

import numpy as np
import pytest

from jax_distill import report
from jax_distill.config import Refusal


def records(**changes) -> list[dict]:
    """Five steps; `changes`: key → (step, factor)."""
    made = []
    for step in range(1, 6):
        record = {"step": step, "loss": 3.0 / step, "gradient_norm": 1.0, "learning_rate": 1e-3}
        record["tokens_per_second"] = 100.0 * step
        if step == 5:
            record |= {"heldout_loss": 0.5, "heldout_kl": 0.0}
        for key, (where, factor) in changes.items():
            if where == step:
                record[key] *= factor
        made.append(record)
    return made


def run_folder(path, values, backend):
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in values))
    (path / "manifest.json").write_text(json.dumps({"backend": backend}))
    return path


@pytest.mark.parametrize("key,step", [("loss", 2), ("gradient_norm", 4), ("heldout_loss", 5)])
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


def test_the_command_names_and_draws_it(tmp_path, capsys):
    runs = [
        run_folder(tmp_path / "a", records(), "jax"),
        run_folder(tmp_path / "b", records(loss=(4, 1 + 1e-6)), "torch"),
        run_folder(tmp_path / "c", records(gradient_norm=(1, 3.0)), "torch"),
    ]
    out = tmp_path / "compare.png"
    report.main([*map(str, runs), "--out", str(out)])
    said = capsys.readouterr().out
    assert "a (jax) and b (torch): largest relative difference 1e-06, loss at step 4" in said
    assert "a (jax) and c (torch): largest relative difference 2, gradient norm at step 1" in said
    assert out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Refusal, match="metrics.jsonl"):
        report.main([str(tmp_path / "nowhere"), str(runs[0])])


def test_the_figure_has_a_strip_of_differences_under_every_quantity():
    runs = {"a (jax)": records(), "b (torch)": records(loss=(4, 1 + 1e-6))}
    figure = report.draw_comparison(runs)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [report.CURVES[key] for key in ("loss", "gradient_norm", "learning_rate")]
    strips = [axes for axes in figure.axes if axes.get_yscale() == "log"]
    assert len(strips) == 3
    rings = [text.get_text() for axes in strips for text in axes.texts if "e-" in text.get_text()]
    assert rings == ["1e-06"] and "loss at step 4" in figure.get_suptitle()
