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

from jax_distill import config as c

ROOT = Path(__file__).parent
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
        (["--loss.temperature", "warm"], "loss.temperature as a number, got 'warm'"),
        (["--loss.tail", "bukket"], "loss.tail.*bukket"),
        (["--train.steps", "0"], "train.steps above 0, got 0"),
        (["--train.batch_size", "6", "--train.micro_batch_size", "4"], "divide.*6, got 4"),
        (["--loss.temperature", "2"], "among cache.temperatures"),
        (["--student.path", "s"], "one of student.path and student.from_teacher, got both"),
        (["--student.from_teacher.parameters", "9"], "from_teacher.layers and .parameters, got bo"),
        (["--student.from_teacher", "{}"], "from_teacher.layers and .parameters, got none"),
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
        (["--optimizer.warmup_steps", "-3"], "warmup_steps of at least 0, got -3"),
        (["--optimizer.clip_norm", "0"], "clip_norm above 0, got 0"),
        (["--optimizer.b1", "1.5"], r"b1 in \[0, 1\), got 1.5"),
        (["--optimizer.learning_rate", ".nan"], "learning_rate above 0, got nan"),
        (["--optimizer.learning_rate", ".inf"], "learning_rate above 0, got inf"),
        (["--loss.kl_weight", "0"], "kl_weight or loss.ce_weight above 0, got 0 for both"),
        (["--loss.ce_weight", "-1"], "ce_weight of at least 0, got -1"),
        (["--cache.temperatures", "[1, 0]"], "cache.temperatures above 0, got 0"),
        (["--seed", "-1"], r"seed in \[0, 2\^32\), got -1"),
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
        ("train: {steps: [1]}\n" + BASE, r"train.steps as a whole number or null, got \[1\]"),
        ("student: s\n", "student as a mapping of path, from_teacher, got 's'"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, expected):
    with pytest.raises(c.Refusal, match=expected) as refusal:
        c.load(["--config", write(tmp_path, text)])
    assert "\n" not in str(refusal.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(c.Refusal, match="nowhere.yaml.*No such file"):
        c.load(["--config", str(tmp_path / "nowhere.yaml")])


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x80\xff\x00")
    with pytest.raises(c.Refusal, match="expected YAML in UTF-8, got other bytes"):
        c.load(["--config", str(tmp_path / "model.safetensors")])


@pytest.mark.parametrize("path", ["package:x", "package:", "package:x:", "package::f"])
def test_a_package_path_names_both_parts(path):
    with pytest.raises(c.Refusal, match="expected package:DISTRIBUTION:FILE"):
        c.find_path(path)


def test_a_file_that_a_package_lacks_is_refused_with_a_cure():
    with pytest.raises(c.Refusal, match="expected nothing.gguf in .* pip show --files pyyaml"):
        c.find_path("package:pyyaml:nothing.gguf")


def test_a_path_names_a_file_of_a_package_a_shipped_one_or_what_lies_here(tmp_path, monkeypatch):
    found = Path(c.find_path("package:pyyaml:yaml/loader.py"))
    assert found.is_absolute() and "class SafeLoader" in found.read_text()
    monkeypatch.chdir(tmp_path)  # away from the checkout
    shipped = c.find_path("configs/quickstart.yaml")
    assert Path(shipped).is_absolute() and c.read_yaml(shipped)["teacher"]
    for path in ("configs/none.yaml", "none/configs/quickstart.yaml", "text.jsonl", ""):
        assert c.find_path(path) == path
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text(BASE)
    assert c.find_path("configs/quickstart.yaml") == "configs/quickstart.yaml"
    assert c.load([]).student.from_teacher == c.FromTeacher(layers=[0, 5])


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
        with pytest.raises(c.Refusal):
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
    assert "--config FILE" in said and "τ; must be among the store's." in said
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


def model_folder(path: Path, card: str | None) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    if card is not None:
        (path / "README.md").write_text(card)
    return path


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


FOLDERS = {
    "a thesis": lambda place: (place.mkdir(), (place / "thesis.txt").write_text("t")),
    "another's model": lambda place: model_folder(place, None),
    "another command's": lambda place: model_folder(place, "Trained with jax_distill on text"),
    "ours, with a thesis": lambda place: (
        model_folder(place, "cut by jax_distill.student"),
        (place / "thesis.txt").write_text("t"),
    ),
    "ours, with a folder": lambda place: (
        model_folder(place, "cut by jax_distill.student"),
        (place / "notes").mkdir(),
    ),
    "a file": lambda place: place.write_text("t"),
    "the source": lambda place: (place.parent / "source").rename(place),
    "what holds the source": lambda place: (
        place.mkdir(),
        (place.parent / "source").rename(place / "source"),
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_with_something_to_lose_is_never_written(tmp_path, what):
    source = model_folder(tmp_path / "source", None)
    out = tmp_path / "out"
    FOLDERS[what](out)
    source = {"the source": out, "what holds the source": out / "source"}.get(what, source)
    before = snapshot(tmp_path)
    with pytest.raises(c.Refusal) as refusal:
        with c.new_folder(out, marks=c.STUDENT_MARKS, apart=[source]):
            raise AssertionError("got a folder")
    assert re.fullmatch("expected .*, got .*; name another.*", str(refusal.value))
    assert snapshot(tmp_path) == before


def test_the_working_directory_is_never_written(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path("."), tmp_path, tmp_path / "here", Path("..")):
        with pytest.raises(c.Refusal, match="is or holds"):
            c.check_new_folder(out, marks=c.STUDENT_MARKS, apart=[])


@pytest.mark.parametrize("there", ["nothing", "empty", "ours", "a link to ours"])
def test_a_free_folder_appears_whole_or_not_at_all(tmp_path, there):
    out = tmp_path / "deep" / "out"
    if there != "nothing":
        out.mkdir(parents=True)
    if there.endswith("ours"):
        out.rmdir()
        model_folder(out, "cut by jax_distill.student")
        (out / "LICENSE.txt").write_text("as the teacher's")
    real = out
    if there == "a link to ours":
        out = tmp_path / "link"
        out.symlink_to(real)
    before = snapshot(real) if real.exists() else None
    knobs = dict(marks=c.STUDENT_MARKS, apart=[tmp_path / "source"], names=["LICENSE.txt"])
    with pytest.raises(c.Failure, match="No space left"):
        with c.new_folder(out, **knobs) as partial:
            (partial / "new").write_text("half")
            raise OSError(28, "No space left on device")
    assert (snapshot(real) if real.exists() else None) == before
    with c.new_folder(out, **knobs) as partial:
        (partial / "new").write_text("whole")
    assert snapshot(real) == {"new": b"whole"} and snapshot(out) == snapshot(real)
    assert [each.name for each in real.parent.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("t")
    for place in (file, file / "below"):
        with pytest.raises(c.Refusal, match=f"expected cache.path .*{file}.*name another"):
            c.check_writable(place, "cache.path")
        with pytest.raises(c.Refusal, match="name another"):
            c.check_new_folder(place, marks=c.STUDENT_MARKS, apart=[])
    for place in (tmp_path, file / "below"):
        with pytest.raises(c.Refusal, match="expected --json to be a file.*name another"):
            c.check_new_file(place, "--json")
    c.check_writable(tmp_path / "new" / "below", "cache.path")
    c.check_new_file(tmp_path / "new/rows.json", "--json")
    c.check_new_file(file, "--json")
    c.check_new_file(None, "--json")
    assert snapshot(tmp_path) == {"file": b"t"} and (tmp_path / "new").is_dir()


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
    configs = sorted((ROOT.parent / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        c.load(["--config", str(path)])


def test_every_field_is_read_by_some_code():
    """A field that nobody reads is an error."""
    sources = [path for path in ROOT.rglob("*.py") if not path.name.endswith("_test.py")]
    others = [path.read_text("utf-8") for path in sources if path.parent != ROOT / "config"]
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
