"""Readers, split, mixture and order: what comes in comes out, and what does not is counted."""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jax_distill.base.errors import UserError
from jax_distill.config import Source
from jax_distill.data import (
    Corpus,
    Taken,
    Tokenizer,
    fingerprint,
    read_documents,
    tokenizing,
    train_tokenizer,
)
from jax_distill.data import corpus as corpus_module
from jax_distill.data.hub import hub_fingerprint
from jax_distill.data.paragraphs import SeenParagraphs

PROSE = [f"Document {i} says that {i * i} is the square of {i}. " * 4 for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level BPE without BOS, `<|endoftext|>` = 0 as EOS."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(PROSE, 300, folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def bos_tokenizer(tokenizer, tmp_path_factory) -> Tokenizer:
    """The same, but its post-processor puts `<s>` before each text, as Llama 3's does."""
    folder = tmp_path_factory.mktemp("bos_tokenizer")
    core = tokenizers.Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    core.add_special_tokens(["<s>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    core.save(str(folder / "tokenizer.json"))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return Tokenizer.load(folder)


def write_jsonl(file: Path, rows: list) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def read(path, tokenizer, *, format="auto", heldout_fraction=0.0):
    return read_documents(
        path, format=format, tokenizer=tokenizer, heldout_fraction=heldout_fraction
    )


def texts_of(documents, tokenizer) -> set[str]:
    return {tokenizer.decode(document.tokens) for document in documents}


def test_jsonl_text_round_trips_with_one_eos_each(tmp_path, tokenizer):
    texts = ["ünïcödé 😀 文字\u2028line\nnext", "tab\t\x00 end", "x" * 50]
    corpus = read(write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]), tokenizer)
    assert texts_of(corpus.train, tokenizer) == {text + "<|endoftext|>" for text in texts}
    assert all(document.tokens.dtype == np.int32 for document in corpus.train)
    assert all(document.targets.all() for document in corpus.train)
    assert corpus.counts.documents == 3 and corpus.counts.empty_documents == 0
    assert corpus.counts.tokens == sum(len(document.tokens) for document in corpus.train)


def test_eos_at_the_end_of_a_text_is_not_doubled(tmp_path, tokenizer):
    corpus = read(write_jsonl(tmp_path / "a.jsonl", [{"text": "a<|endoftext|>"}]), tokenizer)
    assert texts_of(corpus.train, tokenizer) == {"a<|endoftext|>"}


def test_control_tokens_written_in_texts_are_counted(tmp_path, bos_tokenizer):
    """Not those that begin and end a document; not words that only look like one."""
    rows = [
        {"text": "a<|endoftext|>b<s>c<|endoftext|>"},
        {"text": "<s>marked, <|endoftext|"},
        {"text": "<|endoftext|>begins"},
    ]
    corpus = read(write_jsonl(tmp_path / "a.jsonl", rows), bos_tokenizer)
    assert corpus.counts.named == {"control tokens written in texts, read as such": 3}
    assert "3 control tokens written in texts, read as such" in str(corpus.counts)


def test_at_most_one_bos(tmp_path, bos_tokenizer):
    rows = [{"text": "plain"}, {"text": "<s>marked"}, {"text": "<s><s>twice"}]
    corpus = read(write_jsonl(tmp_path / "a.jsonl", rows), bos_tokenizer)
    assert bos_tokenizer.adds_bos
    expected = {f"<s>{word}<|endoftext|>" for word in ("plain", "marked", "twice")}
    assert texts_of(corpus.train, bos_tokenizer) == expected
    assert corpus.counts.dropped_bos == 3
    assert "3 doubled BOS dropped" in str(corpus.counts)


def test_a_folder_gives_one_document_a_file_and_mixes_formats(tmp_path, tokenizer):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes("\ufeffone\r\ntwo\n\nthree".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b" \r\n")
    (tmp_path / ".hidden").write_bytes(b"not read")
    write_jsonl(tmp_path / "d.jsonl", [{"text": "row"}])
    np.save(tmp_path / "e.npy", np.array([[5, 6], [7, 8]], np.uint16))
    corpus = read(str(tmp_path), tokenizer)
    texts = {"one\ntwo\n\nthree<|endoftext|>", "row<|endoftext|>"}
    assert texts | {tokenizer.decode([5, 6]), tokenizer.decode([7, 8])} == texts_of(
        corpus.train, tokenizer
    )
    assert corpus.counts.empty_documents == 2
    assert "2 documents empty as read" in str(corpus.counts)


def test_of_a_cloned_data_set_only_the_training_data_are_read(tmp_path, tokenizer, capsys):
    """Its README, its scripts and its test split are left out, and named."""
    for name in ("README.md", "LICENSE.txt", "load.py", "notes.md", "data/image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"not to be read: {name}")
    splits = ("train-0.jsonl", "train-1.JSONL", "test-0.jsonl", "validation.jsonl", "dev_1.json")
    for name in splits:
        write_jsonl(tmp_path / "data" / name, [{"text": f"row of {name}"}])
    (tmp_path / "test").mkdir()
    write_jsonl(tmp_path / "test" / "part.jsonl", [{"text": "row of a test"}])
    corpus = read(str(tmp_path), tokenizer)
    expected = {f"row of {name}<|endoftext|>" for name in splits[:2]}
    assert texts_of(corpus.train, tokenizer) == expected
    said = " ".join(capsys.readouterr().out.split())
    assert "reading data/train-0.jsonl, data/train-1.JSONL; not LICENSE.txt, README.md" in said
    before = fingerprint(str(tmp_path), format="auto", tokenizer=tokenizer, settings={})
    (tmp_path / "README.md").write_text("other words")
    assert before == fingerprint(str(tmp_path), format="auto", tokenizer=tokenizer, settings={})
    # Where there is nothing else, prose is data, and so is a test split.
    assert texts_of(read(str(tmp_path / "test"), tokenizer).train, tokenizer) == {
        "row of a test<|endoftext|>"
    }
    for name in splits:
        (tmp_path / "data" / name).unlink()
    (tmp_path / "test" / "part.jsonl").unlink()
    assert texts_of(read(str(tmp_path), tokenizer).train, tokenizer) == {
        "not to be read: notes.md<|endoftext|>"
    }
    (tmp_path / "notes.md").unlink()
    with pytest.raises(UserError, match="expected files .jsonl .*, got LICENSE.txt, README.md"):
        read(str(tmp_path), tokenizer)


def test_one_text_file_is_cut_at_empty_lines_so_that_something_can_be_held_out(tmp_path, tokenizer):
    paragraphs = [f"Paragraph {i}: " + f"word{i} " * 300 for i in range(40)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    corpus = read(str(tmp_path / "book.txt"), tokenizer, heldout_fraction=0.01)
    found = "".join(texts_of(corpus.train + corpus.heldout, tokenizer))
    assert all(found.count(paragraph) == 1 for paragraph in paragraphs)
    assert len(corpus.heldout) >= 1 and len(corpus.train) >= 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n\n{"text": \n', r":3: expected one JSON object a line"),
        (b'{"text": "a"}\n["b"]\n', r":2: expected a JSON object"),
        (b'{"text": "a"}\n{"txt": "b"}\n', r":2: expected the key text, got txt"),
        (b'{"text": 5}\n', r":1: expected text to be a string, got 5"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r":2: expected UTF-8, got byte 0xff"),
        (b'{"text": "a\\ud800"}\n', r":1: expected Unicode text, got half a pair 0xd800"),
        (b'{"body": "a"}\n', r":1: expected the key text, messages or tokens, got body"),
        (b'{"tokens": [1, 2.5]}\n', r":1: expected a list of whole numbers"),
        (b'{"tokens": [1, "2"]}\n', r":1: expected a list of whole numbers"),
        (b'{"tokens": 3}\n', r":1: expected a list of whole numbers"),
        (b'{"tokens": [[1], [2, 3]]}\n', r":1: expected a list of whole numbers"),
        (b'{"tokens": [1, -1]}\n', r":1: expected ids from 0 up, got -1 at position 1"),
        (b'{"tokens": [1, 9999]}\n', r":1: expected ids below 300.*got 9999 at position 1"),
        (b'{"tokens": [1, 2], "targets": [1]}\n', r":1: expected targets of 0 or 1"),
        (b'{"messages": [{"content": "a"}]}\n', r"expected a chat template"),
        (b'{"text": ' + b"[" * 100_000 + b"\n", r":1: expected one JSON .*nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}\n", r":1: expected one JSON object a line"),
        (b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}\n", r":1: expected text to be a string"),
        (b'{"tokens": ' + b"[" * 900 + b"]" * 900 + b"}\n", r":1: expected a list of whole"),
        (b'{"tokens": [1e999]}\n', r":1: expected a list of whole numbers"),
        (b'{"tokens": [99999999999999999999]}\n', r":1: expected a list of whole numbers"),
        (b'{"instruction": "a", "output": "b"}\n', r":1: .* got instruction, output; .*write"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, tokenizer, content, message):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(str(tmp_path / "bad.jsonl"), tokenizer)
    assert "\n" not in str(caught.value)
    if "template" not in message:
        assert str(caught.value).startswith(str(tmp_path / "bad.jsonl"))


def test_bad_places_and_settings_are_refused(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "one.txt").write_text("only one document")
    (tmp_path / "cube.npy").write_bytes(b"junk")
    np.save(tmp_path / "more.npy", np.arange(3))
    with (tmp_path / "more.npy").open("ab") as file:
        file.write(b"wrong")
    same = write_jsonl(tmp_path / "same.jsonl", [{"text": "the same"}] * 20)
    cases = [
        (str(tmp_path / "none"), "auto", 0.0, "nothing is there"),
        (str(tmp_path / "empty"), "auto", 0.0, "expected files .jsonl .* got none"),
        (str(tmp_path / "latin1.txt"), "auto", 0.0, "expected UTF-8, got byte 0xe9"),
        (str(tmp_path / "one.txt"), "auto", 0.5, "at least 2 different documents .* got 1;"),
        (same, "auto", 0.5, "at least 2 different documents .* got 20 that are all the same"),
        (str(tmp_path / "one.txt"), "jsonl", 0.0, "expected one JSON object a line"),
        (str(tmp_path / "cube.npy"), "auto", 0.0, "expected a .npy array"),
        (str(tmp_path / "more.npy"), "auto", 0.0, "array of 24 bytes, as .* says, got 5 more"),
        ("builtin:french", "auto", 0.0, "builtin:english"),
        ([], "auto", 0.0, "an empty list"),
    ]
    for path, format, fraction, message in cases:
        with pytest.raises(UserError, match=message):
            read(path, tokenizer, format=format, heldout_fraction=fraction)


def test_token_arrays_and_token_lines(tmp_path, tokenizer):
    np.save(tmp_path / "flat.npy", np.array([5, 6, 0, 7, 8, 9, 0, 10], np.int64))
    corpus = read(str(tmp_path / "flat.npy"), tokenizer)
    found = sorted(document.tokens.tolist() for document in corpus.train)
    assert found == [[5, 6, 0], [7, 8, 9, 0], [10]]  # cut after EOS, nothing lost
    rows = [{"tokens": [5, 6, 7], "targets": [0, 0, 1]}, {"tokens": [8, 9]}, {"tokens": []}]
    corpus = read(write_jsonl(tmp_path / "t.jsonl", rows), tokenizer)
    found = {tuple(d.tokens.tolist()): d.targets.tolist() for d in corpus.train}
    assert found == {(5, 6, 7): [False, False, True], (8, 9): [True, True]}
    assert corpus.counts.empty_documents == 1 and corpus.counts.target_tokens == 3


def test_the_split_is_a_matter_of_content_alone(tmp_path, tokenizer):
    """Whoever reads the same documents, in another order or with others, holds out the same."""
    one = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in PROSE])
    other = write_jsonl(
        tmp_path / "b.jsonl", [{"text": text} for text in [*PROSE[::-1], *"qrstuv"]]
    )
    first = read(one, tokenizer, heldout_fraction=0.2)
    second = read(other, tokenizer, heldout_fraction=0.2)
    held, train = texts_of(first.heldout, tokenizer), texts_of(first.train, tokenizer)
    assert held <= texts_of(second.heldout, tokenizer)
    assert train <= texts_of(second.train, tokenizer)
    assert len(held) + len(train) == 60 and 4 <= len(held) <= 22
    by_definition = {
        text + "<|endoftext|>"
        for text in PROSE
        if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < 0.2 * 2**64
    }
    assert held == by_definition
    again = read(
        write_jsonl(tmp_path / "c.jsonl", [{"text": text} for text in PROSE[::-1]]),
        tokenizer,
        heldout_fraction=0.2,
    )
    pairs = zip(first.train + first.heldout, again.train + again.heldout, strict=True)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in pairs)  # in the same order, too
    more = texts_of(read(one, tokenizer, heldout_fraction=0.4).heldout, tokenizer)
    assert held < more


def test_at_least_one_document_is_held_out_and_one_is_left(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in PROSE[:3]])
    for fraction, heldout in ((1e-9, 1), (0.999999, 2), (0.0, 0)):
        corpus = read(path, tokenizer, heldout_fraction=fraction)
        assert (len(corpus.heldout), len(corpus.train)) == (heldout, 3 - heldout)


def test_a_paragraph_stands_once_and_in_the_held_out_part_if_anywhere(tmp_path, tokenizer):
    shared = (
        "This licence text stands in every single document of the corpus, word for word, again."
    )
    short = "Returns: the result."  # below 80 characters: may repeat
    texts = [f"{text}\n\n{shared}\n \n{short}\n\n   end {i}" for i, text in enumerate(PROSE)]
    texts.append(shared.replace(" ", "  "))  # other white space, the same paragraph
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    corpus = read(path, tokenizer, heldout_fraction=0.1)
    held = "".join(texts_of(corpus.heldout, tokenizer))
    train = "".join(texts_of(corpus.train, tokenizer))
    assert " ".join(held.split()).count(shared) == 1 and shared not in " ".join(train.split())
    assert (held + train).count(short) == 60 and (held + train).count("   end ") == 60
    assert corpus.counts.repeated_paragraphs == 60
    assert corpus.counts.repeated_characters >= 60 * len(shared)
    total = corpus.counts.documents + corpus.counts.heldout_documents
    assert total + corpus.counts.emptied_documents == 61


def test_weights_are_shares_of_the_tokens(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    sources = []
    for name, documents in (("a", 400), ("b", 100)):
        rows = [
            {"tokens": rng.integers(5, 299, rng.integers(5, 40)).tolist()} for _ in range(documents)
        ]
        for row in rows:
            row["tokens"][0] = 1 if name == "a" else 2
        sources.append(write_jsonl(tmp_path / f"{name}.jsonl", rows))

    def tokens_by_source(documents):
        totals = {1: 0, 2: 0}
        for document in documents:
            totals[int(document.tokens[0])] += len(document.tokens)
        return totals[1], totals[2]

    both = read([Source(path) for path in sources], tokenizer, heldout_fraction=0.1)
    assert both.counts.unread_documents == 0 and len(both.train + both.heldout) == 500
    mixed = read(
        [Source(sources[0], 3.0), Source(sources[1], 2.0)], tokenizer, heldout_fraction=0.1
    )
    (all_a, all_b), (a, b) = tokens_by_source(both.train), tokens_by_source(mixed.train)
    assert b == all_b and abs(a - 1.5 * b) <= 40 < all_a - a  # b runs out first: used whole
    held_a, held_b = tokens_by_source(mixed.heldout)
    assert held_b == tokens_by_source(both.heldout)[1] and held_a > 0
    used = len(mixed.train + mixed.heldout)
    assert mixed.counts.unread_documents <= 500 - used <= mixed.counts.unread_documents + 1
    for count in (20, 100, 300):  # at every point of the stream, not at its end alone
        a, b = tokens_by_source(mixed.train[:count])
        assert abs(a / 3 - b / 2) <= 40 / 2
    again = read(
        [Source(sources[0], 30.0), Source(sources[1], 20.0)], tokenizer, heldout_fraction=0.1
    )
    assert all(
        np.array_equal(x.tokens, y.tokens) for x, y in zip(mixed.train, again.train, strict=True)
    )
    for weights in ((1.0, None), (0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(UserError, match="weight"):
            read([Source(*pair) for pair in zip(sources, weights, strict=True)], tokenizer)


def test_each_source_of_a_mixture_gives_its_own_held_out_documents(tmp_path, tokenizer):
    """What is held out of a mixture is what each source alone holds out."""
    halves = (PROSE[:30], PROSE[30:])
    paths = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"text": text} for text in half])
        for i, half in enumerate(halves)
    ]
    mixed = read([Source(path) for path in paths], tokenizer, heldout_fraction=0.2)
    alone = [read(path, tokenizer, heldout_fraction=0.2) for path in paths]
    held = [texts_of(corpus.heldout, tokenizer) for corpus in alone]
    assert all(held) and texts_of(mixed.heldout, tokenizer) == held[0] | held[1]


def test_a_held_out_part_without_targets_is_refused(tmp_path, tokenizer):
    rows = [{"tokens": [5, 6, i], "targets": [0, 0, 1]} for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    held = {tuple(d.tokens) for d in read(path, tokenizer, heldout_fraction=0.1).heldout}
    for row in rows:
        row["targets"][2] = int(tuple(row["tokens"]) not in held)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="expected text to predict in the held-out part of"):
        read(path, tokenizer, heldout_fraction=0.1)


def documents_of(corpus, split, start=None) -> list:
    return [document for _, document in corpus.documents(split, start)]


@pytest.mark.parametrize("weight", [None, 1.0])
def test_no_more_is_tokenized_than_was_asked_for(tmp_path, tokenizer, weight):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * 9} for i in range(2000)])
    corpus = Corpus([Source(path, weight)], tokenizer=tokenizer, heldout_fraction=0.1)
    some = list(itertools.islice(corpus.documents("train"), 400))
    left = corpus.counts.unread_documents
    assert corpus.counts.documents == 400 and left == 2000 - 400  # the held-out ones, too
    assert f"{left:,} documents not read further" in str(corpus.counts)
    assert 0 < corpus.share_read("train") < 0.5
    whole = documents_of(corpus, "train")
    assert corpus.share_read("train") == pytest.approx(1.0)
    for (_, a), b in zip(some, whole, strict=False):
        np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.parametrize("weights", [(None, None), (3.0, 2.0)])
def test_a_stream_goes_on_after_what_was_taken_and_tokenizes_that_not_again(
    tmp_path, tokenizer, monkeypatch, weights
):
    """Also where documents are dropped, and lose paragraphs to earlier ones."""
    shared = "This paragraph of more than eighty characters stands in every third document, again."
    texts = [f"{text}\n\n{shared if i % 3 else text}" for i, text in enumerate(PROSE)]
    halves = (texts[:40] + texts[:3], texts[40:])
    paths = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"text": text} for text in half])
        for i, half in enumerate(halves)
    ]
    monkeypatch.setattr(corpus_module, "WINDOW", 2000)  # about 8 documents
    monkeypatch.setattr(tokenizing, "BATCH", 4)
    sources = [Source(path, weight) for path, weight in zip(paths, weights, strict=True)]
    corpus = Corpus(sources, tokenizer=tokenizer, heldout_fraction=0.1)
    whole = list(corpus.documents("train"))
    assert corpus.counts.repeated_paragraphs and corpus.counts.emptied_documents
    for count in range(0, len(whole), 5):
        documents, tokens = [0] * corpus.streams, [0] * corpus.streams
        for stream, document in whole[:count]:
            documents[stream] += 1
            tokens[stream] += len(document.tokens)
        rest = list(corpus.documents("train", Taken(tuple(documents), tuple(tokens))))
        assert len(rest) == len(whole) - count
        assert corpus.counts.documents <= len(rest) + 2 * 4 * corpus.streams
        for (stream, document), (expected_stream, expected) in zip(
            rest, whole[count:], strict=True
        ):
            assert stream == expected_stream
            np.testing.assert_array_equal(document.tokens, expected.tokens)


def test_what_does_not_fit_the_window_comes_in_another_order_and_nothing_is_lost(
    tmp_path, tokenizer, monkeypatch
):
    rows = [{"tokens": [1, i % 250, i // 250]} for i in range(1000)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    def order(window: int) -> list:
        monkeypatch.setattr(corpus_module, "WINDOW", window)
        corpus = Corpus(path, tokenizer=tokenizer, heldout_fraction=0.0)
        return [tuple(document.tokens.tolist()) for document in documents_of(corpus, "train")]

    given = [tuple(row["tokens"]) for row in rows]
    by_hash = sorted(given, key=lambda t: hashlib.sha256(np.array(t, "<i4").tobytes()).digest())
    assert order(12_000) == by_hash  # 12 bytes each
    near = order(1200)  # 100 documents
    assert near != given and sorted(near) == sorted(given)
    distance = np.array([abs(given.index(each) - at) for at, each in enumerate(near)])
    assert 20 < distance.mean() < 300  # a window of 100 stays about 100 documents
    assert order(1200) == near


def test_sources_without_weights_are_read_side_by_side(tmp_path, tokenizer, monkeypatch):
    """In proportion to their sizes, so that the first rows are of all of them."""
    monkeypatch.setattr(corpus_module, "WINDOW", 0)
    paths = [
        write_jsonl(tmp_path / f"{which}.jsonl", [{"tokens": [which, i]} for i in range(count)])
        for which, count in ((1, 200), (2, 50), (3, 0))
    ]
    corpus = Corpus([Source(p) for p in paths], tokenizer=tokenizer, heldout_fraction=0.0)
    which = np.array([document.tokens[0] for document in documents_of(corpus, "train")])
    assert len(which) == 250
    for count in (25, 100, 200):
        assert abs((which[:count] == 2).sum() - count / 5) <= 1


def test_seen_paragraphs_are_a_set_until_they_are_full():
    """Against Python's own set; keys that collide in the table, repetitions within a call."""
    rng = np.random.default_rng(0)
    seen, known = SeenParagraphs(1 << 16), set()
    for _ in range(60):
        keys = [int(k).to_bytes(8, "little") * 2 for k in rng.integers(1, 20_000, 500)]
        keys += [bytes([1]) + bytes(7) + int(k).to_bytes(8, "little") for k in range(1, 30)]
        found = seen.add(keys)
        for key, is_new in zip(keys, found, strict=True):
            assert is_new == (key not in known)
            known.add(key)
    assert not seen.is_full
    copy = seen.copy()
    assert copy.add([b"x" * 16]) == [True] and seen.add([b"x" * 16]) == [True]
    small = SeenParagraphs(64)
    first = [bytes([i + 1]) * 16 for i in range(200)]
    assert small.add(first) == [True] * 200 and small.is_full
    again = small.add(first)
    assert 40 <= again.count(False) < 64  # those that it holds are found
    assert small.add(first) == again


def test_fingerprint_changes_with_all_that_matters_and_with_nothing_else(
    tmp_path, tokenizer, bos_tokenizer
):
    """Case 36: data, tokenizer or settings changed under the same path give another one."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    settings = {"sequence_length": 8, "packing": True}

    def print_of(path=path, tokenizer=tokenizer, **changes):
        return fingerprint(path, format="auto", tokenizer=tokenizer, settings=settings | changes)

    first = print_of()
    assert print_of() == first == print_of(packing=True)
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(Path(path).read_bytes())
    assert print_of(str(copy)) == first
    others = [
        print_of(packing=False),
        print_of(tokenizer=bos_tokenizer),
        print_of("builtin:english"),
    ]
    others += [print_of([Source(path, 1.0)]), print_of([Source(path), Source(path)])]
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "twO"}])
    assert len({first, print_of(), *others}) == 7


def test_hub_reads_a_data_set_or_names_the_pip_line(tmp_path, tokenizer, monkeypatch):
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in PROSE])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'jax-distill\[hub\]'"):
        read(str(tmp_path), tokenizer, format="hub")
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets")
    corpus = read(f"{tmp_path}::train[:50%]", tokenizer, format="hub")
    assert texts_of(corpus.train, tokenizer) == {text + "<|endoftext|>" for text in PROSE[:30]}
    before = hub_fingerprint(str(tmp_path))
    assert hub_fingerprint(str(tmp_path)) == before != hub_fingerprint(f"{tmp_path}::train[:50%]")
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in PROSE[1:]])
    assert hub_fingerprint(str(tmp_path)) != before
    for path, message in ((f"{tmp_path}::valid", "valid"), ("no/such", "no/such")):
        with pytest.raises(UserError, match=message):
            read(path, tokenizer, format="hub")


def test_the_first_rows_of_a_hub_data_set_are_streamed_and_kept(tmp_path, tokenizer, monkeypatch):
    """Not much more is read than they take: the last file of the set is none."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train-0.jsonl", [{"text": text} for text in PROSE])
    write_jsonl(folder / "train-1.jsonl", [{"text": text} for text in PROSE * 100])
    (folder / "train-2.jsonl").write_text("[this is no JSON")
    path = f"{folder}:default:train[:20]"
    corpus = read(path, tokenizer, format="hub")
    assert texts_of(corpus.train, tokenizer) == {text + "<|endoftext|>" for text in PROSE[:20]}
    before = hub_fingerprint(path)
    assert before == hub_fingerprint(path) != hub_fingerprint(f"{folder}:default:train[:19]")
    with pytest.raises(UserError, match="expected the hub data set .*set, got"):
        read(str(folder), tokenizer, format="hub")
    with pytest.raises(UserError, match="expected the hub data set no/such:default:train.:3.*got"):
        read("no/such:default:train[:3]", tokenizer, format="hub")
