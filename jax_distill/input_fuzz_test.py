"""Thousands of damaged inputs: each is refused in one line, or read as what stands in it.

`FUZZ_SEED=7 python -m pytest -m slow -n 0 -s jax_distill/input_fuzz_test.py` repeats a run.
"""

import io
import json
import os
import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jax_distill import config as c
from jax_distill import run as r
from jax_distill.base.errors import RunError, UserError
from jax_distill.data import Tokenizer, read_documents, train_tokenizer
from jax_distill.data.chat import Chat
from jax_distill.data.conversation import messages_of
from jax_distill.data.readers import read_raw
from jax_distill.data.template import Limits

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SEED = int(os.environ.get("FUZZ_SEED", "1"))
HOSTILE = [
    b"[" * 3000, b"{" * 300, b'{"a":' * 2000, b"9" * 5000, b"0x" + b"f" * 5000, b"2020-13-45",
    b"&a [*a]", b"*a", b"!!python/object:os.system {}", b"!x", b"? [a]\n: 1\n", b"<<: {a: 1}",
    b"\xff", b"\x00", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", "\ufdd0\u2028\ufeff".encode(),
    b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0.5", b"[]", b"{}", b'""', b'"',
    b"\n", b"\r", b"\t", b": ", b",", b"}", b"]", b"#", b"~", b"%", b"|", b">", b"yes", b"010",
    b"99999999999999999999", b"<|im_end|>", b"{{ 1 // 0 }}", b"{% for i in range(9999) %}",
]  # fmt: skip


def damaged(random_: random.Random, data: bytes) -> bytes:
    """One to three bits, slices or hostile fragments changed."""
    for _ in range(random_.randint(1, 3)):
        first = random_.randint(0, len(data))
        last = min(len(data), first + random_.choice([0, 1, 4, 30]))
        kind = random_.randrange(5)
        if kind == 0 and data:
            position = random_.randrange(len(data))
            flipped = bytes([data[position] ^ (1 << random_.randrange(8))])
            data = data[:position] + flipped + data[position + 1 :]
        elif kind == 1:
            data = data[:first] + data[last:]
        elif kind == 2:
            data = data[:last] + data[first:]
        elif kind == 3:
            data = data[:first]
        else:
            data = data[:first] + random_.choice(HOSTILE) + data[last:]
    return data


class Outcomes:
    """Counts them; any exception but a refusal of one line is kept as a fault."""

    def __init__(self, what: str) -> None:
        self.what, self.counts, self.faults = what, Counter(), []
        self.random = random.Random(f"{SEED} {what}")

    def try_(self, given: object, function) -> object:
        """What the function returns, None where it refuses."""
        try:
            found = function()
        except (UserError, RunError) as refusal:
            self.counts["refused"] += 1
            if len(str(refusal)) > 1500:
                self.faults.append((given, "long", str(refusal)[:200]))
            return None
        except Exception as error:
            self.faults.append((given, type(error).__name__, str(error)[:200]))
            return None
        self.counts["read"] += 1
        return found

    def expect(self, holds: bool, given: object) -> None:
        """What was read is what stands there; else it was silently something else."""
        if not holds:
            self.faults.append((given, "silent"))

    def end(self, at_least: int) -> None:
        """Print the counts; fail if anything was a fault."""
        print(f"\nseed {SEED}, {self.what}: {dict(self.counts)}, faults {len(self.faults)}")
        assert not self.faults, self.faults[:3]
        assert sum(self.counts.values()) >= at_least and self.counts["refused"]


def leaves(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_configuration_files(tmp_path):
    outcomes, file = Outcomes("configuration files"), tmp_path / "x.yaml"
    root = Path(__file__).parent.parent / "configs"
    texts = [path.read_bytes() for path in sorted(root.glob("*.yaml"))]
    for _ in range(1200):
        data = damaged(outcomes.random, outcomes.random.choice(texts))
        file.write_bytes(data)
        config = outcomes.try_(data, lambda: c.load(["--config", str(file)]))
        if config is None:
            continue
        values = c.flatten(c.as_dict(config))
        for key, value in leaves(c.parse(data.decode())):
            if value is not None and key in values and key != "data.path":
                outcomes.expect(values[key] == value, data)
        c.save(config, tmp_path / "again.yaml")
        again = c.load(["--config", str(tmp_path / "again.yaml")])
        outcomes.expect(again == config, data)
    outcomes.end(1200)


def test_command_lines(tmp_path):
    outcomes, file = Outcomes("command lines"), tmp_path / "x.yaml"
    file.write_text("teacher: {path: t}\nstudent: {from_teacher: {layers: [0, 5]}}\n")
    for _ in range(700):
        key = outcomes.random.choice(c.field_names())
        start = outcomes.random.choice([b"1", b"[1, 2]", b"{tail: ignore}", b"text", b"null"])
        word = damaged(outcomes.random, start).replace(b"\0", b"").decode(errors="surrogateescape")
        words = [f"--config={file}", f"--{key}={word}"]
        config = outcomes.try_((key, word), lambda words=words: c.load(words))
        if config is not None:
            value = c.flatten(c.as_dict(config)).get(key)
            if isinstance(value, str) and word:
                outcomes.expect(value == word, (key, word))
            elif isinstance(value, int | float):
                outcomes.expect(value == c.parse(word), (key, word))
    outcomes.end(700)


def test_run_folders(tmp_path):
    outcomes = Outcomes("run folders")
    lines = [json.dumps({"step": step, "loss": 1 / step, "kl": None}) for step in range(1, 9)]
    whole = {
        "metrics.jsonl": "".join(line + "\n" for line in lines).encode(),
        "manifest.json": json.dumps({"run_format": 2, "backend": "jax", "cache": "ab"}).encode(),
        "summary.json": json.dumps({"steps": 8, "test": {"student": {"kl": 0.5}}}).encode(),
    }
    readers = {
        "metrics.jsonl": lambda: r.read_metrics(tmp_path / "metrics.jsonl"),
        "manifest.json": lambda: r.read_run_manifest(tmp_path),
        "summary.json": lambda: r.read_summary(tmp_path),
    }
    for _ in range(1000):
        name = outcomes.random.choice(list(whole))
        data = damaged(outcomes.random, whole[name])
        (tmp_path / name).write_bytes(data)
        found = outcomes.try_((name, data), readers[name])
        if found is not None and name == "metrics.jsonl":
            *ended, last = data.split(b"\n")
            outcomes.expect(repr(found[: len(ended)]) == repr([*map(json.loads, ended)]), data)
            outcomes.expect(len(found) <= len(ended) + bool(last), data)
        elif found is not None:
            outcomes.expect(repr(found) == repr(json.loads(data)), data)
    outcomes.end(1000)


def test_configurations_of_runs(tmp_path):
    """A run with checkpoints resumes only with the configuration that it was begun with."""
    outcomes = Outcomes("configurations of runs")
    student = c.StudentConfig(from_teacher=c.FromTeacher(layers=[0]))
    config = c.Config(output_dir=str(tmp_path / "run"), student=student)
    with r.Run(config, backend="jax") as run:
        (run.path / "checkpoints/3").mkdir(parents=True)
    file = tmp_path / "run/config.yaml"
    whole, want = file.read_bytes(), dict(leaves(c.as_dict(config)))

    def reopen():
        with r.Run(config, backend="jax"):
            return True

    for _ in range(150):
        data = damaged(outcomes.random, whole)
        file.write_bytes(data)
        if outcomes.try_(data, reopen):
            for key, value in leaves(c.parse(data.decode()) or {}):
                free = key in r.FREE_FIELDS or value == want.get(key)
                outcomes.expect(free or key.endswith("path"), data)
    outcomes.end(150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["<user>Hi?<assistant>Ho, 1 2 3."] * 3, 260, folder)
    return folder


def test_data_lines(folder, tmp_path):
    outcomes, tokenizer = Outcomes("data lines"), Tokenizer.load(folder)
    kinds = [
        [{"text": f"Line {i} of a text.", "id": i} for i in range(5)],
        [{"tokens": [i, i + 1, 7], "targets": [0, 1, 1]} for i in range(5)],
    ]
    file = tmp_path / "x.jsonl"
    for _ in range(900):
        rows = outcomes.random.choice(kinds)
        whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
        data = damaged(outcomes.random, whole)
        file.write_bytes(data)
        corpus = outcomes.try_(
            data, lambda: read_documents(str(file), tokenizer=tokenizer, heldout_fraction=0.1)
        )
        if corpus is not None:
            counts = corpus.counts
            found = counts.documents + counts.heldout_documents
            found += counts.empty_documents + counts.emptied_documents
            text = data.removeprefix(b"\xef\xbb\xbf")
            given = sum(bool(line.decode().strip()) for line in text.split(b"\n"))
            outcomes.expect(found == given, data)
    outcomes.end(900)


def test_token_arrays(tmp_path):
    outcomes, file = Outcomes("token arrays"), tmp_path / "x.npy"
    for _ in range(400):
        shape = outcomes.random.choice([(12,), (3, 4), (0,), (2, 0)])
        kind = outcomes.random.choice(["<u2", "<i4", ">i8", "<u8", "<f4", "|b1", "O"])
        stream = io.BytesIO()
        np.save(stream, np.arange(np.prod(shape)).reshape(shape).astype(kind))
        data = stream.getvalue()
        if outcomes.random.random() < 0.8:
            data = damaged(outcomes.random, data)
        file.write_bytes(data)
        raws = outcomes.try_(data, lambda: list(read_raw(str(file), format="auto", eos_id=5)))
        if raws is not None:
            given = np.load(file).ravel().astype(np.int64).tolist()
            outcomes.expect([i for raw in raws for i in raw.content.tolist()] == given, data)
        for raw in raws or []:
            outcomes.expect(raw.content.dtype == np.int32 and (raw.content >= 0).all(), data)
    outcomes.end(400)


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_chat_rows(folder):
    outcomes, counts = Outcomes("chat rows"), Counter()
    (folder / "chat_template.jinja").write_text(CHATML)
    tokenizer = Tokenizer.load(folder)
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be."},
                {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
                {"role": "user", "content": "Hm <|endoftext|>?"},
                {"role": "assistant", "content": "Ho.", "weight": 1},
            ],
            "tools": [{"name": "f"}],
        },
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]},
    ]

    def document(row):
        messages, tools, _ = messages_of(row)
        return messages, tokenizer.chat.document(messages, tools, counts)

    while sum(outcomes.counts.values()) < 1000:
        data = damaged(outcomes.random, json.dumps(outcomes.random.choice(rows)).encode())
        try:
            row = json.loads(data)
        except (ValueError, RecursionError):
            continue  # see test_data_lines
        if not isinstance(row, dict) or not {"messages", "conversations"} & row.keys():
            continue
        found = outcomes.try_(data, lambda row=row: document(row))
        if found is None:
            continue
        messages, tokens = found
        text = tokenizer.decode(tokens.tokens)
        for message in messages:
            if isinstance(message.get("content"), str):
                outcomes.expect(message["content"] in text, data)
        for python in ("None", "{'", "['"):
            outcomes.expect(python not in text or python in str(row), data)
        said = [m.get("content") or "" for m in messages if m["role"] == "assistant"]
        weights = [m.get(k, 1) for m in messages for k in ("weight", "train", "loss_mask")]
        if all(isinstance(each, str) for each in said) and all(weights):
            learned = tokenizer.decode(tokens.tokens[tokens.targets])
            outcomes.expect(learned == "".join(each + "<|endoftext|>" for each in said), data)
    tokenizer.chat.close()
    outcomes.end(1000)


def test_templates(folder):
    outcomes = Outcomes("chat templates")
    core = Tokenizer.load(folder)._core
    talk = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
    limits = Limits(seconds=1.0, memory=300 << 20, characters=10**5)
    for _ in range(100):
        data = damaged(outcomes.random, CHATML.encode()).decode(errors="replace")

        def document(data=data):
            chat = Chat(core, data, values={"eos_token": "<|endoftext|>"}, limits=limits)
            try:
                return chat.document(talk)
            finally:
                chat.close()

        outcomes.try_(data, document)
    outcomes.end(100)


def test_a_header_that_claims_more_than_there_is(tmp_path):
    """A .npy whose header asks for 2^62 numbers is refused before anything is allocated."""
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904,), }"
    header = header.ljust(117) + b"\n"
    file = tmp_path / "x.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 64)
    with pytest.raises(UserError, match="expected a .npy array"):
        list(read_raw(str(file), format="auto"))
