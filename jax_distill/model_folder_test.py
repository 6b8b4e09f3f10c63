"""A model folder is written whole or not at all, and never over what somebody would miss; only
known files get into it, and every reader finds the same model there."""

import json
import re
from pathlib import Path

import pytest

from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import check_new_file, check_writable
from jax_distill.data import Tokenizer, train_tokenizer
from jax_distill.model_folder import (
    STUDENT_MARKS,
    both_spellings,
    check_new_folder,
    collect_text_files,
    copy_tokenizer,
    new_folder,
    text_files,
    write_config,
)


def write_folder(path: Path, card: str | None) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    if card is not None:
        (path / "README.md").write_text(card)
    return path


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


FOLDERS = {
    "a thesis": lambda path: (path.mkdir(), (path / "thesis.txt").write_text("t")),
    "another's model": lambda path: write_folder(path, None),
    "another command's": lambda path: write_folder(path, "Trained with jax_distill on text"),
    "ours, with a thesis": lambda path: (
        write_folder(path, "cut by jax_distill.student"),
        (path / "thesis.txt").write_text("t"),
    ),
    "ours, with a folder": lambda path: (
        write_folder(path, "cut by jax_distill.student"),
        (path / "notes").mkdir(),
    ),
    "a file": lambda path: path.write_text("t"),
    "the source": lambda path: (path.parent / "source").rename(path),
    "what holds the source": lambda path: (
        path.mkdir(),
        (path.parent / "source").rename(path / "source"),
    ),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_with_something_to_lose_is_never_written(tmp_path, what):
    source = write_folder(tmp_path / "source", None)
    out = tmp_path / "out"
    FOLDERS[what](out)
    source = {"the source": out, "what holds the source": out / "source"}.get(what, source)
    before = snapshot(tmp_path)
    with pytest.raises(UserError) as refusal:
        with new_folder(out, marks=STUDENT_MARKS, apart=[source]):
            raise AssertionError("got a folder")
    assert re.fullmatch("expected .*, got .*; name another.*", str(refusal.value))
    assert snapshot(tmp_path) == before


def test_the_working_directory_is_never_written(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path("."), tmp_path, tmp_path / "here", Path("..")):
        with pytest.raises(UserError, match="is or holds"):
            check_new_folder(out, marks=STUDENT_MARKS, apart=[])


@pytest.mark.parametrize("there", ["nothing", "empty", "ours", "a link to ours"])
def test_a_free_folder_appears_whole_or_not_at_all(tmp_path, there):
    out = tmp_path / "deep" / "out"
    if there != "nothing":
        out.mkdir(parents=True)
    if there.endswith("ours"):
        out.rmdir()
        write_folder(out, "cut by jax_distill.student")
        (out / "LICENSE.txt").write_text("as the teacher's")
    real = out
    if there == "a link to ours":
        out = tmp_path / "link"
        out.symlink_to(real)
    before = snapshot(real) if real.exists() else None
    options = dict(marks=STUDENT_MARKS, apart=[tmp_path / "source"], names=["LICENSE.txt"])
    with pytest.raises(RunError, match="No space left"):
        with new_folder(out, **options) as partial:
            (partial / "new").write_text("half")
            raise OSError(28, "No space left on device")
    assert (snapshot(real) if real.exists() else None) == before
    with new_folder(out, **options) as partial:
        (partial / "new").write_text("whole")
    assert snapshot(real) == {"new": b"whole"} and snapshot(out) == snapshot(real)
    assert [each.name for each in real.parent.iterdir()] == ["out"]


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("t")
    for path in (file, file / "below"):
        with pytest.raises(UserError, match=f"expected cache.path .*{file}.*name another"):
            check_writable(path, "cache.path")
        with pytest.raises(UserError, match="name another"):
            check_new_folder(path, marks=STUDENT_MARKS, apart=[])
    for path in (tmp_path, file / "below"):
        with pytest.raises(UserError, match="expected --json to be a file.*name another"):
            check_new_file(path, "--json")
    check_writable(tmp_path / "new" / "below", "cache.path")
    check_new_file(tmp_path / "new/rows.json", "--json")
    check_new_file(file, "--json")
    check_new_file(None, "--json")
    assert snapshot(tmp_path) == {"file": b"t"} and (tmp_path / "new").is_dir()


# ---- what is copied, and how config.json is spelled ---------------------------------------------


def model_folder(path: Path, config: dict | None = None, eos: str = "a", **settings) -> Path:
    """config.json and a tokenizer that ends texts with `eos`."""
    train_tokenizer(["a b c"], 260, path)
    names = {"eos_token": eos, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (path / "config.json").write_text(json.dumps({"vocab_size": 300, **(config or {})}))
    return path


def test_only_known_files_are_copied(tmp_path):
    """Case 50."""
    source, out = model_folder(tmp_path / "source"), tmp_path / "out"
    kept = "LICENSE NOTICE.txt USE_POLICY.md merges.txt vocab.json chat_template.jinja".split()
    left = """adapter_config.json preprocessor_config.json trainer_state.json secrets.json notes.txt
        pytorch_model.bin.index.json model.safetensors.index.json README.md a.jinja""".split()
    for name in (*kept, *left):
        (source / name).write_text("{}")
    (source / "special_tokens_map.json").mkdir()
    out.mkdir()
    copy_tokenizer(source, out)
    own = {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == {*kept, *own}
    with new_folder(tmp_path / "student", marks=STUDENT_MARKS, apart=[source]) as partial:
        copy_tokenizer(source, partial)
        (partial / "README.md").write_text("cut by jax_distill.student")
    check_new_folder(tmp_path / "student", marks=STUDENT_MARKS, apart=[source])


@pytest.mark.parametrize("name", ["tokenizer_config.json", "LICENSE", "config.json"])
def test_the_text_of_a_file_outside_the_folder_is_never_copied(tmp_path, name):
    source = model_folder(tmp_path / "source")
    (tmp_path / "secret").write_text("{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../secret")
    with pytest.raises(UserError, match=f"expected {name} to be in .*source, got a link to"):
        text_files(source)
    (source / name).unlink()
    (source / "real").write_text("{}")
    (source / name).symlink_to("real")
    (tmp_path / "link").symlink_to(source)
    assert text_files(tmp_path / "link") == text_files(source)


def test_a_snapshot_of_the_hub_may_link_to_its_own_blobs(tmp_path):
    model = tmp_path / "models--owner--name"
    source = model_folder(model / "snapshots" / "abc")
    (model / "blobs").mkdir()
    for path in list(source.iterdir()):
        path.rename(model / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert text_files(source) == ["tokenizer.json", "tokenizer_config.json"]
    (tmp_path / "secret").write_text("{}")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="expected LICENSE to be in"):
        text_files(source)


def written_config(source: Path, out: Path) -> tuple[dict, dict]:
    out.mkdir()
    copy_tokenizer(source, out)
    write_config(source, out)
    names = ("config.json", "generation_config.json")
    return tuple(json.loads((out / name).read_text()) for name in names)


@pytest.mark.parametrize(
    "config,generation,stops,generation_stops",
    [
        (None, None, "a", "a"),
        (None, [7], "a", [7, "a"]),
        ([7], None, [7, "a"], [7, "a"]),
        (7, "a", [7, "a"], "a"),
        ("a", {}, "a", "a"),
        ([8, "a"], ["a", 9], [8, "a"], ["a", 9]),
    ],
)
def test_the_export_stops_at_what_ended_the_text(
    tmp_path, config, generation, stops, generation_stops
):
    """Case 47. generation: the file's ids; {}: it names none; None: there is no file."""
    source = model_folder(tmp_path / "source")
    end = Tokenizer.load(source).eos_id

    def with_id(value):
        if isinstance(value, list):
            return [with_id(each) for each in value]
        return end if value == "a" else value

    source = model_folder(source, {"eos_token_id": with_id(config)})
    if generation is not None:
        content = {"top_p": 0.5, **({"eos_token_id": with_id(generation)} if generation else {})}
        (source / "generation_config.json").write_text(json.dumps(content))
    raw, found = written_config(source, tmp_path / "out")
    assert raw["eos_token_id"] == with_id(stops)
    assert found["eos_token_id"] == with_id(generation_stops)
    assert found.get("top_p") == (None if generation is None else 0.5)


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("id_", [-1, 300, 2**32 + 5, True, "1", [1, -1]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_export_with_an_id_that_is_no_token_is_refused(tmp_path, file, key, id_):
    source = model_folder(tmp_path / "source", {"eos_token_id": 1})
    content = {"vocab_size": 300, key: id_}
    (source / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{file}: {key} to be ids from 0 to "):
        written_config(source, tmp_path / "out")


def test_a_rope_per_layer_type_and_none_at_all_are_left_as_they_are():
    nested = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    for raw in (nested, {}, {"rope_scaling": None}):
        assert both_spellings(raw) == raw


# ---- whose tokenizer a student is exported with -------------------------------------------------

TEMPLATE = "{% for message in messages %}{{ message.content }}a{% endfor %}"


def collected(tmp_path: Path, student: dict, text: dict) -> dict:
    """tokenizer_config.json of the export."""
    folders = [model_folder(tmp_path / name, **x) for name, x in (("s", student), ("t", text))]
    (folders[0] / "LICENSE").write_text("the student's")
    (folders[0] / "generation_config.json").write_text("{}")
    (folders[1] / "LICENSE").write_text("the teacher's")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").write_text("of an earlier start")
    collect_text_files(*folders, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "the student's"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    own = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"LICENSE", "generation_config.json", *own}
    return json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_the_export_speaks_the_template_that_made_the_text(tmp_path, capsys):
    """Case 42: a chat teacher and a base student with equal ids."""
    assert collected(tmp_path, {}, {"chat_template": TEMPLATE})["chat_template"] == TEMPLATE
    assert f"tokenizer and chat template of {tmp_path / 't'}" in capsys.readouterr().out


@pytest.mark.parametrize("student", [{"chat_template": TEMPLATE + " "}, {"eos": "b"}])
def test_another_template_or_end_mark_gives_way(tmp_path, student):
    text = {"eos": "a", "chat_template": TEMPLATE}
    assert collected(tmp_path, student | {"own": 1}, text) == {
        "eos_token": "a",
        "chat_template": TEMPLATE,
    }


@pytest.mark.parametrize("text", [{}, {"chat_template": TEMPLATE}])
def test_what_speaks_alike_is_the_students_own(tmp_path, text, capsys):
    student = {"chat_template": TEMPLATE, "own": 1}
    assert collected(tmp_path, student, text) == {"eos_token": "a", **student}
    assert capsys.readouterr().out == ""


def test_a_student_with_more_tokens_and_another_template_is_refused(tmp_path):
    student = model_folder(tmp_path / "s")
    text = model_folder(tmp_path / "t", chat_template=TEMPLATE)
    content = json.loads((student / "tokenizer.json").read_text())
    added = dict(content["added_tokens"][0], id=260, content="<|more|>")
    content["added_tokens"].append(added)
    (student / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="got another end mark or template; set data.tokenizer to"):
        collect_text_files(student, text, tmp_path)
