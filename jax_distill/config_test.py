"""The command line: every trap of argparse and YAML closed, every refusal one line."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_distill import config as c
from jax_distill.base.errors import UserError
from jax_distill.config import yaml_text
from jax_distill.objective import Execution, Objective

ROOT = Path(__file__).parent
BASE = "teacher: {path: t}\nstudent: {from_teacher: {layers: [0, 5]}}\n"
TWO = ["--mesh.coordinator_address", "localhost:8476", "--mesh.num_processes", "2"]


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
        (["--loss.temperature", "warm"], "loss.temperature as a number, got 'warm'"),
        (["--loss.tail", "bukket"], "loss.tail.*bukket"),
        (["--train.steps", "0"], "train.steps above 0, got 0"),
        (["--train.batch_size", "6", "--train.micro_batch_size", "4"], "divide.*6, got 4"),
        (["--loss.temperature", "2"], "among cache.temperatures"),
        (
            ["--train.steps", "3", "--train.epochs", "1"],
            "one of train.steps and train.epochs, got 3",
        ),
        (["--student.path", "s"], "one of student.path and student.from_teacher, got both"),
        (["--student.from_teacher", "{}"], "from_teacher.layers, .parameters or a width .* none"),
        (
            ["--student.from_teacher", "{layers: [0], parameters: 9, intermediate_size: 8}"],
            "two of student.from_teacher.layers, .parameters and .intermediate_size, got all",
        ),
        (["--student.from_teacher.importance_by", "kl"], "without layers for importance_by kl"),
        (["--student.from_teacher.hidden_size", "0"], "from_teacher.hidden_size above 0, got 0"),
        (["--student.from_teacher.layers", "0,5"], "a list of whole numbers or null, got '0,5'"),
        (["--student.from_teacher.layers", "[a]"], r"layers\[0\] as a whole number, got 'a'"),
        (["--student.from_teacher", "{layer: [0]}"], "nearest is student.from_teacher.layers"),
        (["--loss", "{temprature: 1}"], "no such key loss.temprature"),
        (["--student", "s"], "student as a mapping of path, from_teacher, got 's'"),
        (["--data.path", "[{weight: 2}]"], r"expected data.path\[0\].path, got none"),
        (["--data.path", "[{path: a, wight: 2}]"], r"in data.path\[0\], got wight"),
        (["--teacher.path"], "expected a value, got nothing"),
        (["--teacher.path", "--seed", "1"], "expected a value, got --seed"),
        (["--teacher.path", "package:x", "--seed"], "--seed: expected a value"),
        (["--train.steps", "1.5"], "train.steps as a whole number or null, got 1.5"),
        (["--train.steps", "many"], "train.steps as a whole number or null, got 'many'"),
        (["--train.steps", "true"], "train.steps as a whole number or null, got True"),
        (["--train.profile_steps", "[2]"], r"0 <= first < last, got \[2\]"),
        (["--train.profile_steps", "[4,2]"], r"0 <= first < last, got \[4, 2\]"),
        (["--mesh.fsdp", "0"], "mesh.fsdp above 0, or -1 .*, got 0"),
        (["--mesh.data", "-2"], "mesh.data above 0, or -1 .*, got -2"),
        (["--mesh.num_processes", "2"], "mesh.coordinator_address with mesh.num_processes 2"),
        (["--mesh.process_id", "0"], "coordinator_address with .*process_id 0, got none"),
        (["--mesh.coordinator_address", "node1"], "as host:port or auto, got 'node1'"),
        ([*TWO, "--mesh.process_id", "2"], "mesh.process_id from 0 to 1, .*, got 2"),
        (["--mesh.heartbeat_seconds", "0"], "mesh.heartbeat_seconds above 0, got 0"),
        (["--optimizer.warmup_steps", "-3"], "warmup_steps of at least 0, got -3"),
        (["--optimizer.clip_norm", "0"], "clip_norm above 0, got 0"),
        (["--optimizer.b1", "1.5"], r"b1 in \[0, 1\), got 1.5"),
        (["--optimizer.learning_rate", ".nan"], "learning_rate above 0, got nan"),
        (["--optimizer.learning_rate", ".inf"], "learning_rate above 0, got inf"),
        (["--loss.kl_weight", "0"], "loss.ce_weight or loss.hidden_weight above 0, got 0 for all"),
        (["--loss.ce_weight", "-1"], "ce_weight of at least 0, got -1"),
        (["--cache.temperatures", "[1, 0]"], "cache.temperatures above 0, got 0"),
        (["--seed", "-1"], r"seed in \[0, 2\^32\), got -1"),
        (["--data.sequence_length", "1"], "sequence_length of at least 2"),
        (["--data.heldout_fraction", "1"], "heldout_fraction in"),
        (["--teacher.path="], "expected teacher.path"),
        (["stray"], "stray"),
        (["--seed", "2020-13-45"], "seed as a whole number, got '2020-13-45'"),
        (["--seed", "010"], "seed as a whole number, got '010'"),
        (["--seed", "1:30"], "seed as a whole number, got '1:30'"),
        (["--seed", "9" * 5000], "--seed: .*below 2.63, got '999.*9'"),
        (["--seed", "0x" + "f" * 5000], "--seed: .*below 2.63, got '0xf"),
        (["--train.steps", "1e300"], "whole number or null, got 1e.300"),
        (["--seed", "&a 1"], "--seed: line 1: expected no anchors"),
        (["--seed", "!!python/name:os.system"], "--seed: line 1: expected no tags"),
        (["--loss", "{a: 1, a: 2}"], "--loss: expected each key once, got 'a'"),
        (["--loss", "{[a]: 1}"], r"--loss: line 1: expected keys that are text, got \['a'\]"),
        (["--loss", "[" * 5000], "--loss: line 1: expected at most 20 brackets"),
        (["--cache.temperatures", "[1"], "--cache.temperatures: expected YAML"),
        (["--teacher.path", "a\0b"], r"--teacher.path: expected Unicode text, got '.x00'"),
        (["--output_dir", "a\udcff"], r"--output_dir: expected Unicode text, got '.udcff'"),
        (["--dry_run"], "no such key dry_run; --help shows all keys"),
        (["--learning_rate", "1"], "nearest is optimizer.learning_rate"),
        (["--keep", "1"], "nearest is train.keep"),
        (["--config", "other.yaml"], "expected one --config, got 2"),
    ],
)
def test_bad_words_are_refused_in_one_line(base, words, expected):
    with pytest.raises(UserError) as refusal:
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
        ("train: {steps: [1]}\n" + BASE, r"train.steps as a whole number or null, got \[1\]"),
        ("student: s\n", "student as a mapping of path, from_teacher, got 's'"),
        ("? [a]\n: 1\n", "line 1: expected keys that are text"),
        ("1: 2\n", "line 1: expected keys that are text, got 1"),
        ("seed: !!int 3\n", "line 1: expected no tags"),
        ("seed: !mine 3\n", "line 1: expected no tags"),
        ("loss: &a {}\n", "line 1: expected no anchors"),
        ("\nloss: *a\n", "line 2: expected no anchors"),
        ("loss: &a [*a]\n", "line 1: expected no anchors"),
        ("loss: {<<: {tail: ignore}}\n", "no such key loss.<<"),
        (f"seed: {'[' * 3000}{']' * 3000}\n", "at most 20 brackets"),
        (f"seed: {'9' * 5000}\n", "whole numbers below 2.63"),
        ('teacher: {path: "a\\ud800"}\n', r"Unicode text, got '.ud800'"),
        ('teacher: {path: "a\\0"}\n', r"Unicode text, got '.x00'"),
        ("a: \x07\n", "expected YAML"),
        (f"#{' ' * 1_000_000}\n", "at most 1,000,000 bytes"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, expected):
    with pytest.raises(UserError, match=expected) as refusal:
        c.load(["--config", write(tmp_path, text)])
    assert "\n" not in str(refusal.value)


def test_dates_octals_and_sexagesimals_are_text(tmp_path):
    """YAML 1.1 reads them as a date, as 8 and as 90."""
    for text in ("2020-01-02", "2020-13-45", "010", "1:30"):
        config = c.load(["--config", write(tmp_path, BASE + f"output_dir: {text}\n")])
        assert config.output_dir == text


@settings(max_examples=300, deadline=None)
@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63) + 1, 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200)
        | st.sampled_from(["\x85", "a \x85 b", "\u2028", "\r", "\r\n", "\t a"])
        | st.sampled_from(["1e3", "010", "~", "yes", "2020-01-01", "-", "1_0", ".inf", "0x1", "="]),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text("abc:# ~1"), inner, max_size=4)
        ),
        max_leaves=10,
    )
)
def test_what_is_written_is_read_back_with_the_same_types(value):
    again = c.parse(yaml_text.dump(value))
    assert again == value and repr(again) == repr(value)


def test_text_that_looks_like_a_number_is_saved_as_text(base, tmp_path):
    config = c.load(["--config", base, "--output_dir", "1e3", "--teacher.path", "010"])
    c.save(config, tmp_path / "saved.yaml")
    assert c.load(["--config", str(tmp_path / "saved.yaml")]) == config


def test_without_a_configuration_file_the_usage_is_shown():
    for words in ([], ["--seed", "1"], ["--print_config"]):
        with pytest.raises(UserError, match="expected python -m jax_distill.train --config FILE"):
            c.load(words, "jax_distill.train")


def test_the_json_schema_has_every_key_and_agrees_with_the_loader(base):
    def keys(node, prefix=""):
        for name, inner in node.get("properties", {}).items():
            yield prefix + name
            for option in [inner, *inner.get("anyOf", [])]:
                yield from keys(option, f"{prefix}{name}.")

    schema = c.json_schema()
    assert list(keys(schema)) == c.field_names()
    assert schema["properties"]["loss"]["properties"]["tail"]["enum"][0] == "bucket"
    assert schema["properties"]["data"]["properties"]["path"]["anyOf"][1]["items"]["required"] == [
        "path"
    ]
    command = [sys.executable, "-m", "jax_distill.config", "--json_schema"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert shown["properties"] == schema["properties"]


def test_a_refusal_comes_before_jax_is_imported(base):
    """`config`, `base` and `data` import neither jax nor torch."""
    code = (
        "import sys; from jax_distill import config, data; import jax_distill.base.console\n"
        "try: config.load(sys.argv[1:])\n"
        "except config.loading.UserError: print({'jax', 'torch', 'grain'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, "--config", base, "--train.steps", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_every_command_shows_its_version(base):
    for module in ("jax_distill.config", "jax_distill.teacher"):
        command = [sys.executable, "-m", module, "--version"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert re.fullmatch(r"jax_distill \d+\.\d+\.\d+\S*\n", result.stdout)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.yaml.*No such file"):
        c.load(["--config", str(tmp_path / "nowhere.yaml")])


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x80\xff\x00")
    with pytest.raises(UserError, match="expected YAML in UTF-8, got other bytes"):
        c.load(["--config", str(tmp_path / "model.safetensors")])


def test_print_config_shows_what_results_and_does_nothing(base, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config", base, "--loss.chunk_size", "7", "--data.path", "[{path: a, weight: 2}]"]
    for place in (0, 2, len(words)):  # wherever it stands
        with pytest.raises(SystemExit) as end:
            c.load([*words[:place], "--print_config", *words[place:]])
        assert end.value.code == 0
        shown = capsys.readouterr().out
        (tmp_path / "shown.yaml").write_text(shown)
        again = c.load(["--config", "shown.yaml"])
        assert again == c.load(words) and again.loss.chunk_size == 7
        assert again.output_dir == "runs/x"  # resolved
        assert list(yaml.safe_load(shown)) == [f.name for f in dataclasses.fields(c.Config)]
    for wrong in (["--loss.chunk", "7"], ["--train.steps", "0"]):
        with pytest.raises(UserError):
            c.load([*words, *wrong, "--print_config"])
    assert capsys.readouterr().out == "" and not (tmp_path / "runs").exists()


def test_every_key_of_the_schema_is_an_option(base):
    """Nested ones below what is null too, mappings, lists; text stays as it was written."""

    def student(*words):
        return c.load(["--config", base, *words]).student

    cut = "--student.from_teacher"
    assert student(f"{cut}.layers", "[0]").from_teacher == c.FromTeacher(layers=[0])
    assert student(f"{cut}.layers=[1, 2]").from_teacher == c.FromTeacher(layers=[1, 2])
    for words in (
        [cut, '{"parameters": 9}'],
        [f"{cut}.layers", "null", f"{cut}.parameters", "9"],
        [cut, "null", f"{cut}.parameters=9"],
    ):
        assert student(*words).from_teacher == c.FromTeacher(parameters=9)
    assert student(cut, "null", "--student.path", "1e3") == c.StudentConfig(path="1e3")
    found = c.load(["--config", base, "--loss", "{chunk_size: 7}", "--loss.tail", "ignore"])
    assert found.loss == c.LossConfig(chunk_size=7, tail="ignore")
    found = c.load(["--config", base, "--train.steps", "1e3", "--train.keep=3", "--seed", "7"])
    assert (found.train.steps, found.train.keep, found.seed) == (1000, 3, 7)
    assert isinstance(found.train.steps, int)
    found = c.load(["--config", base, "--cache.temperatures", "[1, 2]", "--data.packing", "no"])
    assert found.cache.temperatures == [1.0, 2.0] and found.data.packing is False


@pytest.mark.parametrize("name", c.field_names())
def test_every_default_may_be_given_as_an_option(name, tmp_path):
    """The value that a configuration shows, given back on the command line, changes nothing."""
    file = write(tmp_path, BASE)
    before = c.load(["--config", file])
    value = c.as_dict(before)
    for part in name.split("."):
        value = value[part]
    text = value if isinstance(value, str) else json.dumps(value)
    assert c.load(["--config", file, f"--{name}={text}"]) == before


def test_a_section_of_comments_is_an_empty_one(tmp_path):
    config = c.load(["--config", write(tmp_path, BASE + "loss:\n  # ce_weight: 1\n")])
    assert config.loss == c.LossConfig()


def test_help_shows_the_schema(capsys):
    with pytest.raises(SystemExit) as end:
        c.load(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "--config FILE" in said and "must be among the cache's." in said
    for key in c.field_names():
        assert re.search(rf"--{key}\b", said), key


def test_a_configuration_is_saved_whole_or_not_at_all(base, tmp_path, monkeypatch):
    file = tmp_path / "saved.yaml"
    c.save(c.load(["--config", base]), file)
    before = file.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        c.save(c.load(["--config", base, "--seed", "5"]), file)
    assert file.read_text() == before


def test_resolved_config_reads_back_the_same(base, tmp_path):
    config = c.load(["--config", base, "--data.path=[{path: a, weight: 2}, {path: b}]"])
    assert config.data.path == [c.Source("a", 2.0), c.Source("b", None)]
    c.save(config, tmp_path / "saved.yaml")
    assert c.load(["--config", str(tmp_path / "saved.yaml")]) == config


def test_a_run_folder_on_an_object_store_is_refused_by_name_and_a_cache_is_not(base):
    with pytest.raises(UserError, match="output_dir as a folder of this machine, got s3://b/run: "):
        c.load(["--config", base, "--output_dir", "s3://b/run"])
    assert c.load(["--config", base, "--cache.path", "s3://b/c"]).cache.path == "s3://b/c"


def test_output_dir_and_cache_follow_the_file_name(base):
    config = c.load(["--config", base])
    assert config.output_dir == "runs/x"
    assert config.cache.path == "runs/x/cache"


def test_command_line_refuses_with_exit_code_2_and_no_traceback(base):
    code = (
        "from jax_distill import config; from jax_distill.base.command import run_command; "
        "run_command(lambda argv: print(config.load(argv)))"
    )
    command = [sys.executable, "-c", code, "--config", base, "--loss.temprature", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    command[-2:] = ["--train.steps\n\x1b[31m", "2"]  # nor does a name break the line
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert r"train.steps\n\x1b[31m" in result.stderr


def test_config_files_of_the_project_load():
    configs = sorted((ROOT.parent / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        c.load(["--config", str(path)])


def test_every_field_is_read_by_some_code():
    """A field that nobody reads is an error."""
    sources = [path for path in ROOT.rglob("*.py") if not path.name.endswith("_test.py")]
    others = [path.read_text("utf-8") for path in sources if path.parent != ROOT / "config"]
    here = (c.without_teacher, c.LossConfig.hidden_objective)
    code = "\n".join([*others, *map(inspect.getsource, here)])
    for name in c.field_names():
        last = name.rsplit(".", 1)[-1]
        assert re.search(rf"\.{last}\b", code), f"no code reads {name}"


def test_every_field_is_described():
    for cls in vars(c).values():
        if dataclasses.is_dataclass(cls) and cls not in (c.Config, c.Source):
            for field in dataclasses.fields(cls):
                docs = [each.__doc__ or "" for each in (cls, Objective, Execution)]
                named = any(f"{field.name}:" in doc for doc in docs)
                assert named, f"{cls.__name__}.{field.name} has no words in its docstring"


@pytest.mark.parametrize("command", ["train", "teacher"])
def test_wrong_options_are_refused_before_jax_is_imported(command, tmp_path):
    """Neither it nor torch, Orbax or TensorStore: seconds that nobody waits for a typing error."""
    code = f"""
import runpy, sys
sys.argv = ["x", "--config", "configs/quickstart.yaml", "--loss.tail", "bukket"]
try:
    runpy.run_module("jax_distill.{command}", run_name="__main__")
except SystemExit as end:
    heavy = {{"jax", "flax", "torch", "orbax", "tensorstore"}} & set(sys.modules)
    print(end.code, heavy)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.strip() == "2 set()", done
    assert "loss.tail" in done.stderr and done.stderr.count("\n") == 1
