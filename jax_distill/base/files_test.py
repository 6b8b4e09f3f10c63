"""What a path names; atomic writes; locks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jax_distill.base.errors import UserError, shown
from jax_distill.base.files import Lock, find_path, write_json
from jax_distill.base.json_object import read_json_object


@pytest.mark.parametrize("path", ["package:x", "package:", "package:x:", "package::f"])
def test_a_package_path_names_both_parts(path):
    with pytest.raises(UserError, match="expected package:DISTRIBUTION:FILE"):
        find_path(path)


def test_a_file_that_a_package_lacks_is_refused_with_a_cure():
    with pytest.raises(UserError, match="expected nothing.gguf in .* pip show --files pyyaml"):
        find_path("package:pyyaml:nothing.gguf")


def test_a_path_names_a_file_of_a_package_a_shipped_one_or_what_lies_here(tmp_path, monkeypatch):
    found = Path(find_path("package:pyyaml:yaml/loader.py"))
    assert found.is_absolute() and "class SafeLoader" in found.read_text()
    monkeypatch.chdir(tmp_path)  # away from the checkout
    shipped = find_path("configs/quickstart.yaml")
    assert (
        Path(shipped).is_absolute() and yaml.safe_load(Path(shipped).read_text("utf-8"))["teacher"]
    )
    for path in ("configs/none.yaml", "none/configs/quickstart.yaml", "text.jsonl", ""):
        assert find_path(path) == path
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.yaml").write_text("seed: 1")
    assert find_path("configs/quickstart.yaml") == "configs/quickstart.yaml"


def test_json_is_written_whole_and_what_is_not_finite_is_null(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": [1.5, float("nan")], "b": float("inf")})
    assert json.loads(file.read_text("utf-8")) == {"a": [1.5, None], "b": None}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_lock_is_refused_by_the_name_of_its_owner_and_free_after_a_kill(tmp_path):
    path = tmp_path / "run" / ".lock"
    code = f"""
import os, signal, sys
from pathlib import Path
from jax_distill.base.files import Lock
lock = Lock(Path({str(path)!r}), "the folder")
print("locked", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match=f"the folder is in use by process {process.pid} on"):
        Lock(path, "the folder")
    process.communicate("\n")
    Lock(path, "the folder").release()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b"[1]", r"got \[1\]"),
        (b"null", "got None"),
        (b"\xff{}", "no UTF-8 .0xff at 0"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "limit"),
        (None, "no file there"),
    ],
)
def test_what_is_no_json_object_is_named_in_one_line(tmp_path, content, problem):
    file = tmp_path / "manifest.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"a JSON object in the manifest {file}.*{problem}"):
        read_json_object(file, what="manifest")
    file.write_bytes(b'{"a": [1]}')
    assert read_json_object(file, what="manifest") == {"a": [1]}


def test_a_name_that_no_file_system_takes_is_not_there():
    for path in ("x" * 5000, "configs/" + "y" * 300, "a\0b"):
        assert find_path(path) == path


def test_values_in_messages_are_short_at_any_depth():
    deep = value = []
    for _ in range(5000):
        value.append(value := [])
    for each in (deep, "x" * 10**6, list(range(10**5)), {1: {2: {3: {4: 5}}}}, b"\0" * 10**5):
        assert len(shown(each)) < 400
    assert shown("a") == "'a'"
