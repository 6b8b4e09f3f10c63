"""The command line: every trap of argparse and YAML closed, every refusal one line."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_distill import config as c

BASE = "teacher: {path: t}\nstudent: {from_teacher: {layers: [0, 5]}}\n"


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path, BASE)


def test_config_file_is_applied_first_wherever_it_stands(tmp_path):
    file = write(tmp_path, BASE + "optimizer: {learning_rate: 1e-3}\n")
    before = c.load(["--optimizer.learning_rate", "0.5", "--config", file])
    after = c.load(["--config", file, "--optimizer.learning_rate", "0.5"])
    assert before == after
    assert before.optimizer.learning_rate == 0.5
    assert c.load([f"--config={file}"]).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--loss.chunk", "5"], "nearest is loss.chunk_size"),
        (["--loss.chunk-size", "5"], "nearest is loss.chunk_size"),
        (["--los.temperature=2"], "nearest is loss.temperature"),
        (["--loss.temperature", "warm"], "loss.temperature.*float.*warm"),
        (["--loss.tail", "bukket"], "loss.tail.*bukket"),
        (["--train.steps", "0"], "train.steps above 0, got 0"),
        (["--train.batch_size", "6", "--train.micro_batch_size", "4"], "divide.*6, got 4"),
        (["--loss.temperature", "2"], "among cache.temperatures"),
        (["--student.path", "s"], "one of student.path and student.from_teacher"),
        (["--data.heldout_fraction", "1"], "heldout_fraction in"),
        (["--teacher.path="], "expected teacher.path"),
        (["stray"], "stray"),
        (["--config", "other.yaml"], "expected one --config, got 2"),
    ],
)
def test_bad_words_are_refused_in_one_line(base, words, expected):
    with pytest.raises(c.Refusal) as refusal:
        c.load(["--config", base, *words])
    assert re.search(expected, str(refusal.value))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE + "seed: 1\nseed: 2\n", "'seed' in lines 3 and 4"),
        (BASE + "loss: {tau: 2}\n", "no such key loss.tau"),
        (BASE + "trian: {steps: 2}\n", "nearest is train"),
        ("- 1\n", "expected a mapping"),
        ("a: [\n", "expected YAML"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, expected):
    with pytest.raises(c.Refusal, match=expected) as refusal:
        c.load(["--config", write(tmp_path, text)])
    assert "\n" not in str(refusal.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(c.Refusal, match="nowhere.yaml.*No such file"):
        c.load(["--config", str(tmp_path / "nowhere.yaml")])


def test_resolved_config_reads_back_the_same(base, tmp_path):
    config = c.load(["--config", base, "--data.path=[{path: a, weight: 2}, {path: b}]"])
    assert config.data.path == [c.Source("a", 2.0), c.Source("b", None)]
    c.save(config, tmp_path / "saved.yaml")
    assert c.load(["--config", str(tmp_path / "saved.yaml")]) == config


def test_output_dir_and_store_follow_the_file_name(base):
    config = c.load(["--config", base])
    assert config.output_dir == "runs/x"
    assert config.cache.path == "runs/x/cache"


def test_command_line_refuses_with_exit_code_2_and_no_traceback(base):
    code = "from jax_distill import config as c; c.run_command(lambda a: print(c.load(a)))"
    command = [sys.executable, "-c", code, "--config", base, "--loss.temprature", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_config_files_of_the_project_load():
    configs = sorted((Path(c.__file__).parent.parent / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        c.load(["--config", str(path)])


def test_every_field_is_read_by_some_code():
    """A field that nobody reads is an error."""
    root = Path(c.__file__).parent
    sources = [p.read_text("utf-8") for p in root.rglob("*.py") if not p.name.endswith("_test.py")]
    others = [text for text in sources if "class LossConfig" not in text]
    code = "\n".join([*others, inspect.getsource(c.without_teacher)])
    for name in c.field_names():
        last = name.rsplit(".", 1)[-1]
        assert re.search(rf"\.{last}\b", code), f"no code reads {name}"


def test_every_field_is_described():
    for cls in vars(c).values():
        if dataclasses.is_dataclass(cls) and cls is not c.Config and cls is not c.Source:
            for field in dataclasses.fields(cls):
                assert f"{field.name}:" in (cls.__doc__ or "") or field.name in (
                    cls.__doc__ or ""
                ), f"{cls.__name__}.{field.name} has no words in its docstring"
