"""The small commands: what they refuse, in one line, before any work; what they never lose."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_distill import audit, evaluate, export, hf, report, sharding, student, teacher
from jax_distill.base.errors import RunError, UserError
from jax_distill.config import FromTeacher, StudentConfig, as_dict, save
from jax_distill.model import count_parameters
from jax_distill.model_folder import model_card
from jax_distill.model_folder_test import snapshot
from jax_distill.teacher_test import VOCAB, config, hf_folder, random_model
from jax_distill.training.checkpoint import Checkpoints

__all__ = ["config"]
COMMANDS = {each.__name__.split(".")[-1]: each for each in (audit, evaluate, export, report)}
COMMANDS["student"] = student
NAMES = ("teacher", "student", "student_before")  # of a table
ROW = {
    "kl": 0.123,
    "cross_entropy": 4.0,
    "perplexity": 54.6,
    "top1_agreement": 0.5,
    "acceptance_rate": 0.7,
    "calibration_error": 0.1,
}


def refusal(command: str, *words) -> str:
    """What a command says, in one line, to words that it refuses."""
    with pytest.raises(UserError) as refused:
        COMMANDS[command].main([str(word) for word in words])
    line = str(refused.value)
    assert re.fullmatch("expected .*, got .*; .*", line), line
    return line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("words", [[], ["a", "b", "--unknown", "1"], ["--help_me"]])
def test_wrong_arguments_are_one_line_and_name_the_help(command, words):
    line = refusal(command, *words)
    assert f"python -m jax_distill.{command} --help" in line


# ---- a run folder, without the training ---------------------------------------------------------


@pytest.fixture
def run(config, tmp_path) -> Path:
    """A finished run of 4 steps of 8 rows of 32 tokens, whose best checkpoint is that of step 2."""
    folder = tmp_path / "run"
    folder.mkdir()
    cut = StudentConfig(from_teacher=FromTeacher(layers=[0]))
    config = dataclasses.replace(config, student=cut)
    save(config, folder / "config.yaml")
    place = Path(config.teacher.path)
    start = student.make_student(place, folder / "student", FromTeacher(layers=[0]))
    model = hf.load_model(start)
    params = nnx.state(model, nnx.Param)
    with Checkpoints(folder / "checkpoints", keep=2, seed=config.seed) as saved:
        saved.save(2, params, params, validation=0.5)
        saved.save(4, jax.tree.map(lambda x: 2 * x, params), params, validation=0.7)
    lines = [{"step": 2, "loss": 1.0, "val_loss": 0.5}, {"step": 4, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "test": {"teacher": ROW, "student": ROW},
        "steps": 4,
        "tokens_trained": 4 * 8 * 32,
        "student_parameters": count_parameters(model.config),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    card = model_card(summary=summary, config=as_dict(config), cache="abc")
    export.write_folder(folder / "export", model, student=start, dtype="float32", card=card)
    return folder


def test_a_card_tells_the_exported_step_and_the_table_only_if_it_is_of_that_step(run, tmp_path):
    cards = {}
    for step in ("latest", "best", "2"):
        export.main([str(run), str(tmp_path / f"at {step}"), "--step", step])
        cards[step] = (tmp_path / f"at {step}" / "README.md").read_text()
    assert "1,024 tokens (4 steps)" in cards["latest"] and "0.1230" in cards["latest"]
    assert "`abc`" in cards["latest"]
    written = json.loads((tmp_path / "at best/generation_config.json").read_text())
    assert written == {"_from_model_config": True}  # the source has none, and no special tokens
    for step in ("best", "2"):
        assert "512 tokens (2 steps)" in cards[step] and "0.1230" not in cards[step]
        assert "val_loss: 0.5000" in cards[step]
    weights = [
        jax.tree.leaves(nnx.state(hf.load_model(tmp_path / f"at {step}")))[0]
        for step in ("best", "latest")
    ]
    assert (2 * weights[0] == weights[1]).all()


def test_a_card_of_an_unfinished_run_tells_its_step_and_its_cache(run, config, tmp_path):
    caches = teacher.write_caches(config)
    (run / "summary.json").unlink()
    export.main([str(run), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "(4 steps)" in card and "KL" not in card.split("```")[0]
    assert caches[0].manifest.fingerprint in card


def test_export_writes_over_its_own_folder_and_over_no_other(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for step in ("2", "4"):
        export.main([str(run), str(out), "--step", step])
    assert "(4 steps)" in (out / "README.md").read_text()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("t")
    (tmp_path / "file").write_text("t")
    (out / "thesis.txt").write_text("t")
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    for place in ("precious", "out", "file", "file/below", ".", "..", run, run / "student"):
        refusal("export", run, place)
    assert "thesis.txt; name another" in refusal("export", run, "precious")
    assert "expected a run folder" in refusal("export", "file", "new")
    assert "expected a run folder" in refusal("export", "precious", "new")
    assert "expected --step among [2, 4]" in refusal("export", run, "new", "--step", "3")
    assert snapshot(tmp_path) == before


def test_a_push_is_refused_before_the_work_or_leaves_what_was_written(run, tmp_path, monkeypatch):
    """huggingface_hub's own client, and nobody at the other end."""
    out = tmp_path / "out"
    for repo in ("name", "a/b/c", "../x", "owner/a--b", "owner/name.git", f"o/{'n' * 99}"):
        said = refusal("export", run, out, "--push", repo)
        assert "expected a hub id owner/name for --push" in said, said
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install 'jax-distill[hub]'" in refusal("export", run, out, "--push", "o/n")
    assert not out.exists()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    with pytest.raises(RunError, match="expected to push .* to o/n, got .*; the folder is written"):
        export.main([str(run), str(out), "--push", "o/n"])
    hf.load_model(out)


def test_a_run_whose_configuration_was_emptied_is_refused(run, tmp_path):
    for text in ("", "seed: 1\n", "\x80"):
        (run / "config.yaml").write_text(text, "latin-1")
        assert "whole configuration in" in refusal("export", run, tmp_path / "out")


# ---- student ------------------------------------------------------------------------------------


def test_student_writes_over_its_own_folder_and_over_no_other(run, config, tmp_path):
    source, out = config.teacher.path, tmp_path / "out"
    command = ["--teacher", source, "--out", str(out), "--layers"]
    for layers in ("0", "0,1", "1"):
        student.main([*command, layers])
    assert hf.read_config(out)["num_hidden_layers"] == 1
    assert f"Layers 1 of `{source}`" in (out / "README.md").read_text()
    first = hf.load_model(source).layers.mlp.up_proj.weight[...][1]
    assert (hf.load_model(out).layers.mlp.up_proj.weight[...][0] == first).all()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("t")
    (tmp_path / "file").write_text("t")
    before = snapshot(tmp_path)
    for place in ("precious", "file", "file/below", "teacher", ".", "run/export", "teacher/.."):
        refusal("student", "--teacher", source, "--out", tmp_path / place, "--layers", "0,1")
    assert snapshot(tmp_path) == before


def test_a_student_killed_half_made_leaves_nothing_at_its_place(config, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(student.cutting, "_copy_weights", killed)
    cut = FromTeacher(layers=[0])
    with pytest.raises(KeyboardInterrupt):
        student.make_student(Path(config.teacher.path), tmp_path / "out", cut)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    student.make_student(Path(config.teacher.path), tmp_path / "out", cut)
    hf.load_model(tmp_path / "out")


@pytest.mark.parametrize("size", [["--layers", "a"], ["--parameters", "0"], []])
def test_a_students_size_is_named_right(config, tmp_path, size):
    refusal("student", "--teacher", config.teacher.path, "--out", tmp_path / "out", *size)
    assert not (tmp_path / "out").exists()


# ---- evaluate, audit, report --------------------------------------------------------------------


@pytest.fixture
def heldout(config) -> str:
    return teacher.write_caches(config)[1].path


def test_evaluate_refuses_a_teacher_with_another_tokenizer(config, heldout, tmp_path, monkeypatch):
    other = hf_folder(tmp_path / "other", words=[f"v{i}" for i in range(VOCAB)])
    own = config.teacher.path
    monkeypatch.chdir(tmp_path)  # configs/ is found from anywhere, as in train
    for name in (other, "configs/quickstart_teacher"):
        line = refusal("evaluate", heldout, "--teacher", name, "--student", own)
        assert "a teacher with the tokenizer of the cache" in line and f"{VOCAB} ids" in line
        line = refusal("evaluate", heldout, "--teacher", own, "--student", name)
        assert "the student's tokenizer to give id 0" in line
    for words in (["--teacher", "package:x", "--student", own], ["--teacher", own]):
        refusal("evaluate", heldout, *words)


def test_evaluate_takes_another_teacher_of_the_same_tokenizer_and_says_so(
    config, heldout, tmp_path, capsys
):
    other = hf_folder(tmp_path / "other", seed=5)
    words = [heldout, "--student", config.teacher.path, "--json", str(tmp_path / "table.json")]
    evaluate.main([*words, "--teacher", config.teacher.path])
    assert "not the teacher" not in capsys.readouterr().out
    found = json.loads((tmp_path / "table.json").read_text())
    assert found["test"]["teacher"]["kl"] == pytest.approx(0, abs=1e-6)
    name = Path(config.teacher.path).name  # the same model under two names
    for sample in found["samples"]:
        texts = sample["continuations"]
        assert len(set(texts.values())) == 2 and len(texts) == 3, (name, texts)
    evaluate.main([*words, "--teacher", str(other)])
    assert "not the teacher that the cache was made with" in capsys.readouterr().out


def test_evaluate_refuses_a_head_that_lacks_ids_of_the_cache(config, heldout, tmp_path):
    cache = evaluate.Cache.open(heldout)
    narrow = random_model(vocab_size=VOCAB - 1)
    with pytest.raises(UserError, match=f"expected a vocabulary of at least {VOCAB} for narrow"):
        evaluate.test_table(
            random_model(),
            {"narrow": narrow},
            cache,
            evaluate.table_rows(cache),
            batch_size=2,
            chunk_size=8,
        )


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_logits_that_are_not_finite_is_refused_by_model_and_row(heldout, name, value):
    """One embedding is broken: the rows with that token, at a position that counts or before it."""
    cache = evaluate.Cache.open(heldout)
    rows = evaluate.table_rows(cache)
    models = {each: random_model(seed) for seed, each in enumerate(NAMES)}
    tokens = cache.read(rows, targets=False).tokens
    broken = next(x for x in range(1, VOCAB) if 0 < (tokens[:, :-3] == x).any(1).sum() < len(rows))
    weight = models[name].embed_tokens.weight
    weight[...] = weight[...].at[broken].set(value)
    row = rows[(tokens[:, :-3] == broken).any(axis=1)][0]
    said = rf"logits of {name.replace('_', ' ')}, got NaN or infinity in rows {row}\b"
    with pytest.raises(RunError, match=said):
        evaluate.test_table(models.pop("teacher"), models, cache, rows, batch_size=2, chunk_size=8)


def test_evaluate_refuses_weights_that_are_not_finite_before_any_table(config, heldout, tmp_path):
    broken = random_model()
    broken.norm.weight[...] = broken.norm.weight[...].at[0].set(jnp.nan)
    student = hf_folder(tmp_path / "student")
    hf.save_weights(student, broken, broken.config)
    words = [heldout, "--teacher", config.teacher.path, "--student", student]
    assert "finite numbers in 'model.norm.weight'" in refusal("evaluate", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["--batch_size", "0"],
        ["--batch_size", "-1"],
        ["--chunk_size", "0"],
        ["--json", "file/below.json"],
        ["--json", "."],
        ["--rows", "most"],
    ],
)
def test_evaluate_refuses_before_it_opens_anything(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    line = refusal("evaluate", "no cache", "--teacher", "t", "--student", "s", *words)
    assert words[0] in line and "no cache" not in line


def test_evaluate_refuses_an_unfinished_cache(config, heldout):
    (Path(heldout) / "commits/000000.json").unlink()
    own = config.teacher.path
    assert "finished cache" in refusal("evaluate", heldout, "--teacher", own, "--student", own)


def test_figures_that_cannot_be_written_are_refused_before_the_work(run, tmp_path):
    (tmp_path / "file").write_text("t")
    for command, first, option in (("audit", "no cache", "--png"), ("report", run, "--out")):
        for place in ("a.bmp", "a", "file/a.png"):
            assert f"expected {option} to" in refusal(command, first, option, tmp_path / place)
    assert "no cache" not in refusal("audit", "no cache", "--seed", "-1")
    assert "metrics.jsonl" in refusal("report", tmp_path / "file")
    report.main([str(run), "--out", str(tmp_path / "new/curves.svg")])
    assert (tmp_path / "new/curves.svg").is_file()


@pytest.mark.parametrize("sizes", [{"data": -1, "fsdp": 3}, {"data": 3, "fsdp": -1}])
def test_a_mesh_that_the_devices_do_not_fill_names_what_was_set(sizes):
    name = next(key for key, value in sizes.items() if value == 3)
    with pytest.raises(
        UserError, match=f"expected mesh.{name} to divide the devices here, 8, got 3"
    ):
        sharding.make_mesh(**sizes)
    with pytest.raises(UserError, match="to be 8, .*got mesh.data 3 · mesh.fsdp 2; set mesh.data"):
        sharding.make_mesh(data=3, fsdp=2)
