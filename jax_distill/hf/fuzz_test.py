"""Mutated model files by the thousand: each is loaded as it reads, or refused in one line.

`pytest -m slow jax_distill/hf/fuzz_test.py -s` prints the counts; FUZZ_SEED repeats a run, and
FUZZ_INPUTS sets how many inputs each format gets. Weights' own bytes are left alone: neither
safetensors nor GGUF has a checksum, so a flipped bit there is another valid file. What is loaded is
held against an independent reading of the same bytes.
"""

import copy
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_distill import hf
from jax_distill.base.errors import RunError, UserError
from jax_distill.data import Tokenizer, train_tokenizer
from jax_distill.data.gguf import open_gguf
from jax_distill.gguf_test import write_gguf
from jax_distill.hf.tensor_files import read_slice, shape_and_dtype
from jax_distill.hf_test import RAW, parameters, random_tensors, write_folder

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("FUZZ_SEED", "0"))
INPUTS = int(os.environ.get("FUZZ_INPUTS", "800"))
HOSTILE = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        2**31,
        2**32 + 5,
        2**63,
        -(2**70),
        10**400,
        0.5,
        1e-320,
        -0.0,
    ),
    *(float("nan"), float("inf"), "", "x", "\ud800", "a" * 10_000, [], [1], [[]], {}, {"a": {}}),
]


def mutated_bytes(rng: np.random.Generator, data: bytes, end: int) -> bytes:
    """One to three changes in the first `end` bytes: a flipped bit, a cut, a doubled or lost part,
    random bytes, an extreme 32- or 64-bit number."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = int(rng.integers(0, max(min(end, len(out)), 1)))
        span = int(rng.integers(1, 17))
        kind = rng.integers(0, 7)
        if kind <= 1 and out:
            out[min(at, len(out) - 1)] ^= 1 << int(rng.integers(0, 8))
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + span]
        elif kind == 4:
            out[at:at] = out[at : at + span]
        elif kind == 5:
            out[at : at + span] = rng.bytes(span)
        else:
            number = [0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1][int(rng.integers(0, 7))]
            size = 8 if rng.integers(0, 2) or number >= 2**32 else 4
            out[at : at + size] = number.to_bytes(size, "little")
    return bytes(out)


def mutated_json(rng: np.random.Generator, content: Any) -> bytes:
    """A value replaced by a hostile one, a key lost, renamed or added, somewhere in it."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.integers(1, 3)):
        node = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = keys[int(rng.integers(0, len(keys)))]
            if isinstance(node[key], dict | list) and node[key] and rng.integers(0, 4):
                node = node[key]
                continue
            hostile = copy.deepcopy(HOSTILE[int(rng.integers(0, len(HOSTILE)))])
            kind = rng.integers(0, 6)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, dict):
                node[f"{key}_"] = node.pop(key)
            elif kind == 2 and isinstance(node, dict):
                node["added"] = hostile
            else:
                node[key] = hostile
            break
    text = json.dumps(content)
    return (text if rng.integers(0, 50) else "[" * 50_000 + text).encode()


def fuzz(
    name: str,
    inputs: int,
    mutate: Callable[[np.random.Generator], None],
    load: Callable[[], Any],
    oracle: Callable[[], Any],
) -> None:
    """mutate writes the files of one input; load reads them as the program does, oracle as the test
    does. Everything that is no refusal in one line, and every difference, fails with its number."""
    expected, counts = load(), Counter()
    assert expected == oracle()
    for number in range(inputs):
        mutate(np.random.default_rng([SEED, number]))
        try:
            found = load()
        except (UserError, RunError) as refusal:
            line = str(refusal)
            assert "\n" not in line and 0 < len(line) < 1000, (SEED, number, line)
            counts["refused in one line"] += 1
            continue
        except BaseException as error:
            raise AssertionError(f"{name}: seed {SEED}, input {number}: {error!r}") from error
        if found == expected:
            counts["loaded identical"] += 1
        else:
            assert found == oracle(), f"{name}: seed {SEED}, input {number}"
            counts["loaded, as its bytes read"] += 1
    print(f"\n{name}: seed {SEED}, {inputs} inputs: {dict(counts)}")
    assert counts["refused in one line"] > inputs / 5 and counts.total() == inputs


# ---- config.json --------------------------------------------------------------------------------

CONFIG = RAW | {
    "head_dim": 8,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": [2, 3],
    "max_sequence_length": 7,
}


def expected_config(raw: dict[str, Any]) -> dict[str, Any]:
    """What a Llama's config.json says in the older spelling, by the defaults of transformers."""
    raw = {key: value for key, value in raw.items() if value is not None}
    found = {name: raw[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = raw["num_attention_heads"]
    found |= {
        "num_hidden_layers": raw["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads", heads),
        "head_dim": raw.get("head_dim", raw["hidden_size"] // heads),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": raw.get("max_position_embeddings", 2048),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "attention_bias": raw.get("attention_bias", False),
    }
    rope = {key: x for key, x in (raw.get("rope_scaling") or {}).items() if x is not None}
    kind = rope.get("rope_type", "default")
    found |= {"rope_type": kind, "rope_theta": raw.get("rope_theta", 10000.0)}
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        found |= {name: rope[name] for name in names}
        original = rope.get("original_max_position_embeddings") or found["max_position_embeddings"]
        found["original_max_position_embeddings"] = original
    return found


def test_config_json(tmp_path):
    folder = write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG))
    file = folder / "config.json"
    data = file.read_bytes()
    whole, loaded = parameters(hf.load_model(folder)), {}

    def mutate(rng):
        is_json = rng.integers(0, 2)
        file.write_bytes(mutated_json(rng, CONFIG) if is_json else mutated_bytes(rng, data, 10**9))

    def load():
        config = hf.model_config(hf.read_config(folder))
        if config not in loaded and len(loaded) < 60:  # the weights do not change
            try:
                found = parameters(hf.load_model(folder))
                assert found.keys() == whole.keys()
                assert all(np.array_equal(found[path], whole[path]) for path in whole)
                loaded[config] = None
            except UserError as refusal:
                loaded[config] = refusal
        if loaded.get(config):
            raise loaded[config]
        values = vars(config) | vars(config.rope)
        return {key: values[key] for key in expected_config(hf.read_config(folder))}

    def oracle():
        return expected_config(json.loads(file.read_bytes()))

    fuzz("config.json", 2 * INPUTS, mutate, load, oracle)


# ---- safetensors and its index ------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, tuple]:
    files = hf.weight_files(folder)
    found = {}
    for key, path in files.items():
        shape, dtype = shape_and_dtype(path, key)
        if dtype != "F32":
            raise UserError(f"refused by hf.load_model: {key} in {dtype}")
        found[key] = shape, read_slice(path, key, (slice(None),) * len(shape)).tobytes()
    if not files:
        raise UserError("no weights: a random start, which says so")
    return found


def tensors_by_hand(file: Path) -> dict[str, tuple]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    return {
        key: (tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for key, entry in header.items()
        if key != "__metadata__"
    }


def test_safetensors_headers(tmp_path):
    tensors = {key: random_tensors()[key] for key in list(random_tensors())[:5]}
    folder = write_folder(tmp_path / "model", RAW, tensors)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    content = json.loads(data[8:header])

    def mutate(rng):
        if rng.integers(0, 2):
            file.write_bytes(mutated_bytes(rng, data, header))
            return
        text = mutated_json(rng, content)
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[header:])

    fuzz(
        "safetensors headers",
        INPUTS,
        mutate,
        lambda: tensors_in(folder),
        lambda: tensors_by_hand(file),
    )


def test_index_files(tmp_path):
    folder = write_folder(tmp_path / "model")
    tensors = random_tensors()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {"total_size": 1}, "weight_map": {}}
    for i, name in enumerate(names):
        part = dict(list(tensors.items())[i::2])
        save_file(part, folder / name)
        index["weight_map"] |= dict.fromkeys(part, name)
    save_file(tensors, tmp_path / "outside.safetensors")
    file = folder / "model.safetensors.index.json"
    data = json.dumps(index).encode()
    file.write_bytes(data)

    def mutate(rng):
        is_json = rng.integers(0, 2)
        file.write_bytes(mutated_json(rng, index) if is_json else mutated_bytes(rng, data, 10**9))

    def load():
        return {key: path.name for key, path in hf.weight_files(folder).items()}

    # Nothing but the true places is right: an index that says otherwise is refused.
    fuzz("index files", INPUTS, mutate, load, lambda: index["weight_map"])


# ---- GGUF ---------------------------------------------------------------------------------------


def test_gguf_headers(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "model.gguf")
    data = file.read_bytes()
    header = gguf.GGUFReader(file).data_offset
    converted = Counter()

    def mutate(rng):
        file.write_bytes(mutated_bytes(rng, data, header))

    def load():
        found = open_gguf(file)
        if converted["tried"] < 80:
            converted["tried"] += 1
            try:
                shutil.rmtree(hf.local_folder(file))
            except UserError as refusal:
                assert "\n" not in str(refusal)
        tensors = {x.name: (x.shape, int(x.tensor_type), x.data.tobytes()) for x in found.tensors}
        return repr(sorted(found.metadata.items())), tensors

    def oracle():
        """The gguf package's own reader, which trusts what it reads: only for what we accept."""
        reader = gguf.GGUFReader(file)
        fields = {k: x.contents() for k, x in reader.fields.items() if not k.startswith("GGUF.")}
        tensors = {
            x.name: (tuple(reversed(x.shape.tolist())), int(x.tensor_type), x.data.tobytes())
            for x in reader.tensors
        }
        return repr(sorted(fields.items())), tensors

    fuzz("GGUF headers", INPUTS, mutate, load, oracle)


# ---- tokenizer files ----------------------------------------------------------------------------


def test_tokenizer_files(tmp_path):
    folder = tmp_path / "tokenizer"
    train_tokenizer(["a b c ab"], 262, folder)
    contents = {
        "tokenizer.json": json.loads((folder / "tokenizer.json").read_text()),
        "tokenizer_config.json": {
            "eos_token": None,
            "add_bos_token": False,
            "chat_template": "{{1}}",
        },
        "special_tokens_map.json": {"bos_token": {"content": "a"}, "eos_token": None},
        "config.json": {"eos_token_id": [5, 6], "bos_token_id": 7},
        "generation_config.json": {"eos_token_id": 8},
    }
    texts = {name: json.dumps(content).encode() for name, content in contents.items()}
    for name, text in texts.items():
        (folder / name).write_bytes(text)

    def mutate(rng):
        for name, text in texts.items():
            (folder / name).write_bytes(text)
        name = list(texts)[max(0, int(rng.integers(-3, len(texts))))]
        is_json = rng.integers(0, 2)
        changed = (
            mutated_json(rng, contents[name]) if is_json else mutated_bytes(rng, texts[name], 10**9)
        )
        (folder / name).write_bytes(changed)

    def load():
        tokenizer = Tokenizer.load(folder)
        tokenizer.encode("ab c \u6587")
        tokenizer.encode_batch(["a"])
        return dict(tokenizer.vocab), *tokenizer.conventions

    def oracle():
        read = {name: json.loads((folder / name).read_bytes()) for name in texts}
        vocab = dict(read["tokenizer.json"]["model"]["vocab"])
        vocab |= {x["content"]: x["id"] for x in read["tokenizer.json"]["added_tokens"]}
        config, tokens, *models = (read[name] for name in list(texts)[1:])

        def special(name):
            for file in (config, tokens):
                token = file.get(name)
                token = token.get("content") if isinstance(token, dict) else token
                if token is not None:
                    return vocab[token]
            for file in models:
                ids = file.get(f"{name}_id")
                if ids is not None and ids != []:
                    return ids[0] if isinstance(ids, list) else ids
            return None

        bos = special("bos_token")
        adds = bool(config.get("add_bos_token")) and bos is not None
        return vocab, bos, special("eos_token"), adds, config.get("chat_template") or None

    fuzz("tokenizer files", INPUTS, mutate, load, oracle)
