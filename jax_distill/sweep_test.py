"""Several runs by one command: which, where, over which cache, and what a failed one does."""

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from jax_distill import sweep
from jax_distill.base.errors import UserError
from jax_distill.config import load, save
from jax_distill.config.grid import read_grid
from jax_distill.distil_test import make_config
from jax_distill.teacher_test import hf_folder, text_file

PROG = "jax_distill.train"
QUICKSTART = ["--config", "configs/quickstart.yaml", "--output_dir", "r"]


def configs(*words: str) -> dict[str, object]:
    """The configuration of each run by its folder's name."""
    found = sweep.combinations(PROG, [*QUICKSTART, *words])
    return {each.folder.name: load(each.words, PROG) for each in found}


def test_each_combination_has_its_folder_and_all_read_one_cache():
    runs = configs("--seed", "5", "--sweep", "loss.tail=bucket,truncate", "seed=1,2")
    assert list(runs) == [
        f"tail={tail},seed={n}" for tail in ("bucket", "truncate") for n in (1, 2)
    ]
    assert [(run.loss.tail, run.seed) for run in runs.values()][1] == ("bucket", 2)
    assert {run.cache.path for run in runs.values()} == {"r/cache"}
    assert {run.output_dir for run in runs.values()} == {f"r/{name}" for name in runs}


@pytest.mark.parametrize("key", ["cache.top_k", "data.max_rows", "teacher.batch_size"])
def test_what_changes_a_cache_gets_its_own(key):
    runs = configs("--sweep", f"{key}=8,16")
    assert [run.cache.path for run in runs.values()] == [f"r/{name}/cache" for name in runs]


def test_reading_fewer_shares_the_cache():
    assert {run.cache.path for run in configs("--sweep", "cache.read_top_k=8,16").values()} == {
        "r/cache"
    }


def test_lists_and_names_that_are_short_twice():
    words = ("--sweep", "train.profile_steps=[1,2],[2,3]")
    assert [run.train.profile_steps for run in configs(*words).values()] == [[1, 2], [2, 3]]
    assert read_grid(["a=[1,2],3"]) == {"a": ["[1,2]", "3"]}
    assert list(configs("--sweep", "train.batch_size=8", "teacher.batch_size=4")) == [
        "train.batch_size=8,teacher.batch_size=4"
    ]


def test_several_processes_sweep_by_printed_commands_alone(capsys):
    words = [*QUICKSTART, "--mesh.coordinator_address", "auto", "--sweep", "seed=1,2"]
    with pytest.raises(UserError, match="one process with --sweep, got mesh.coordinator_address"):
        sweep.sweep(PROG, words)
    assert sweep.sweep(PROG, [*words, "--print_commands"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 2 and all("--mesh.coordinator_address auto" in x for x in commands)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "got nothing"),
        (["loss.tail"], "KEY=V1,V2, got loss.tail"),
        (["loss.tail=bucket,"], "KEY=V1,V2"),
        (["seed=1,1"], "once"),
        (["seed=1", "seed=2"], "once"),
        (["loss.tial=bucket"], "the nearest is loss.tail"),
        (["loss.tail=bucket,bukcet"], "bukcet"),
        (["data.path=a/b,a_b"], "folders of different names"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_runs(words, expected):
    with pytest.raises(UserError, match=expected.replace(".", r"\.")):
        sweep.combinations(PROG, [*QUICKSTART, "--sweep", *words])


def test_the_commands_for_a_scheduler(capsys):
    words = [*QUICKSTART, "--sweep", "seed=1,2", "--print_commands"]
    assert sweep.sweep(PROG, words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"python -m {PROG} --config") for line in lines)
    assert lines[1].endswith("--output_dir r/seed=2 --cache.path r/cache --seed=2")


def test_runs_one_after_the_other_and_goes_on_after_one_that_fails(tmp_path, capfd):
    """Real processes. A learning rate that overflows fp32 is the run that fails."""
    hf_folder(tmp_path / "teacher")
    text_file(tmp_path / "text.jsonl")
    save(make_config(tmp_path), tmp_path / "config.yaml")
    words = ["--config", str(tmp_path / "config.yaml"), "--train.steps", "2"]
    words += ["--train.ce_baseline", "false", "--sweep", "optimizer.learning_rate=1e38,0.01"]
    assert sweep.sweep(PROG, words) == 1
    printed = " ".join("".join(capfd.readouterr()).split())
    for expected in ("1 of 2 runs failed", "lower optimizer.learning_rate"):
        assert expected in printed, printed
    good = tmp_path / "run" / "learning_rate=0.01"
    assert json.loads((good / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run" / "curves.png").is_file()
    assert not (good / "cache").exists() and (tmp_path / "cache").is_dir()
    one = [*words[:-1], "optimizer.learning_rate=0.01"]
    again, other = (sweep.combinations(PROG, [*one, *more])[0] for more in ([], ["--seed", "9"]))
    assert again.finished(PROG) and not other.finished(PROG)


def test_a_signal_is_handed_on_and_waited_for(tmp_path, monkeypatch):
    """The child stands for a run that saves its state when it is asked to stop."""
    saved = tmp_path / "saved"
    child = textwrap.dedent(f"""
        import os, pathlib, signal
        def save(*_):
            pathlib.Path({str(saved)!r}).touch()
            raise SystemExit(143)
        signal.signal(signal.SIGTERM, save)
        os.kill({os.getpid()}, signal.SIGUSR1)
        signal.pause()
    """)

    def interrupt(*_):
        raise KeyboardInterrupt(signal.SIGTERM)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep.run_one([sys.executable, "-c", child])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert Path(saved).exists()


def test_the_terminals_own_signal_does_not_reach_the_run_a_second_time():
    code = "import os; raise SystemExit(os.getpgrp() != os.getpid())"
    assert sweep.run_one([sys.executable, "-c", code]) == 0
