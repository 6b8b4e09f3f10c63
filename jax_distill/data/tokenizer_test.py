"""A tokenizer folder's files: which end mark counts, what an id is, and damage in one line."""

import hashlib
import json

import pytest

from jax_distill.base.errors import UserError
from jax_distill.data import Tokenizer, train_tokenizer
from jax_distill.data_test import PROSE, bos_tokenizer, tokenizer

__all__ = ["bos_tokenizer", "tokenizer"]

FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)


@pytest.fixture
def folder(tmp_path):
    """Of 259 tokens and no file that names a special one."""
    train_tokenizer(["a b c"], 260, tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    return tmp_path


def write(folder, **files) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def refusal(folder) -> str:
    with pytest.raises(UserError) as refused:
        Tokenizer.load(folder)
    line = str(refused.value)
    assert str(folder) in line and "\n" not in line and len(line) < 600
    return line


NAMED = {
    "tokenizer_config": {"eos_token": "b"},
    "special_tokens_map": {"eos_token": {"content": "b", "lstrip": False}},
    "config": {"eos_token_id": "id of b"},
    "generation_config": {"eos_token_id": ["id of b", 3]},
}


@pytest.mark.parametrize("where", NAMED)
@pytest.mark.parametrize("null", [None, {}, []])
def test_the_end_mark_that_one_file_names_wins_over_nulls_in_the_others(folder, where, null):
    """Case 47."""
    wanted = Tokenizer.load(folder).vocab["b"]
    for name in NAMED:
        write(folder, **{name: {"eos_token": null or None, "eos_token_id": null or None}})
    named = json.loads(json.dumps(NAMED[where]).replace('"id of b"', str(wanted)))
    write(folder, **{where: named})
    assert Tokenizer.load(folder).eos_id == wanted


def test_of_several_the_tokenizers_own_word_counts(folder):
    vocab = Tokenizer.load(folder).vocab
    write(folder, generation_config={"eos_token_id": vocab["d"]})
    for name, letter in (("config", "c"), ("special_tokens_map", "b"), ("tokenizer_config", "a")):
        named = {"eos_token_id": vocab[letter]} if name == "config" else {"eos_token": letter}
        write(folder, **{name: named})
        assert Tokenizer.load(folder).eos_id == vocab[letter]


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("id_", [-1, 2**32 + 5, 259, True, 1.0, "1", [1, -1], [[1]], {"a": 1}])
def test_an_id_is_a_number_inside_the_vocabulary(folder, file, key, id_):
    write(folder, **{file: {key: id_}})
    assert f"{file}.json: {key} to be ids from 0 to 258, got" in refusal(folder)
    write(folder, **{file: {key: 258}})
    assert getattr(Tokenizer.load(folder), key.removesuffix("_token_id") + "_id") == 258


@pytest.mark.parametrize("token", ["</s>", 5, True, ["a"], {"content": ["a"]}])
def test_a_named_token_is_one_of_the_vocabulary(folder, token):
    write(folder, tokenizer_config={"eos_token": token})
    assert "eos_token to be a token of tokenizer.json, got" in refusal(folder)


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"add_bos_token": "false"}, "add_bos_token true or false, got 'false'"),
        ({"add_bos_token": 1}, "add_bos_token true or false, got 1"),
        ({"chat_template": 5}, "a chat template as text, got 5"),
        ({"chat_template": [{"name": "a"}]}, "chat templates with name and template"),
        ({"chat_template": ["a"]}, "chat templates with name and template"),
        ({"chat_template": [{"name": [], "template": ""}]}, "chat templates with name and"),
    ],
)
def test_a_setting_of_another_kind_is_refused(folder, settings, said):
    write(folder, tokenizer_config=settings)
    assert said in refusal(folder)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", "\xff", "[" * 100_000, '{"a": ' * 100_000, "9" * 5_000, "null"]
)
def test_a_file_that_is_no_json_object_is_one_line(folder, file, text):
    (folder / file).write_text(text, "latin-1")
    assert f"expected a JSON object in {folder / file}, got" in refusal(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "\xff", "[" * 9999])
def test_a_tokenizer_that_is_none_is_one_line(folder, text):
    (folder / "tokenizer.json").write_text(text, "latin-1")
    assert "expected a tokenizer, got" in refusal(folder)


def test_what_only_fails_with_a_text_is_one_line_too(folder):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    tokenizer = Tokenizer.load(folder)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(UserError, match="expected a tokenizer, got"):
            encode("b")


def test_ids_beyond_32_bits_are_refused(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["a"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "token ids below 2^31" in refusal(folder)


def test_a_chat_template_file_that_is_no_text_is_one_line(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "expected a chat template in" in refusal(folder)


def test_a_trained_tokenizer_is_the_same_twice_and_loses_no_text(tmp_path, tokenizer):
    train_tokenizer(PROSE, 300, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (tokenizer.folder / name).read_bytes()
    assert (tokenizer.length, tokenizer.bos_id, tokenizer.eos_id) == (300, 0, 0)
    assert not tokenizer.adds_bos and tokenizer.vocab["<|endoftext|>"] == 0
    text = "never seen: žluťoučký 😀\r\n\t\x00 文字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(" a").tolist() != tokenizer.encode("a").tolist()
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer(PROSE, 256, tmp_path)


def test_tokenizer_fingerprint_is_the_id_to_token_map(tmp_path, tokenizer, bos_tokenizer):
    ordered = sorted((id_, token) for token, id_ in tokenizer.vocab.items())
    expected = hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
    assert Tokenizer.load(tokenizer.folder).fingerprint == expected != bos_tokenizer.fingerprint
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="expected a tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match="it is not there"):
        Tokenizer.load(tmp_path / "none")


def test_eos_falls_back_to_config_json(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer.folder / "tokenizer.json").read_bytes())
    assert Tokenizer.load(tmp_path).eos_id is None
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8], "bos_token_id": null}')
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.eos_id, loaded.bos_id, loaded.adds_bos) == (7, None, False)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(UserError, match="'</s>'"):
        Tokenizer.load(tmp_path)
