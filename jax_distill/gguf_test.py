"""GGUF files made here from known tensors → Hugging Face folders. No torch, extra gguf."""

import contextlib
import json
import struct
import sys
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer

from jax_distill import hf
from jax_distill.base.errors import RunError, UserError
from jax_distill.data.gguf import open_gguf
from jax_distill.hf.gguf import LAYER_NAMES, NAMES

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

LAYERS, D, F, HEADS, KV_HEADS, WIDTH = 2, 64, 96, 4, 2, 16
TOKENS = ["<|end|>", "<|start|>", *"abc12Ġ.", "ab", "Ġa"]
SIZES = dict(D=D, F=F, H=HEADS * WIDTH, G=KV_HEADS * WIDTH, V=len(TOKENS))
SHAPES = {
    "attn_norm.weight": "D",
    "attn_q.weight": "HD",
    "attn_k.weight": "GD",
    "attn_v.weight": "GD",
    "attn_output.weight": "DH",
    "ffn_norm.weight": "D",
    "ffn_gate.weight": "FD",
    "ffn_up.weight": "FD",
    "ffn_down.weight": "DF",
}


def shape(letters: str) -> tuple[int, ...]:
    return tuple(SIZES[letter] for letter in letters)


def known_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": shape("VD"), "output_norm.weight": shape("D")}
    shapes |= {f"blk.{i}.{name}": shape(s) for i in range(LAYERS) for name, s in SHAPES.items()}
    return {name: rng.normal(size=size).astype(np.float32) for name, size in shapes.items()}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from halves (i, i+Q/2) to neighbours (2i, 2i+1), as llama.cpp's converter
    does: row 2i of a head is HF's row i, row 2i+1 is HF's row i+Q/2."""
    by_head = weight.reshape(heads, -1, weight.shape[-1])
    half = by_head.shape[1] // 2
    out = np.empty_like(by_head)
    out[:, 0::2], out[:, 1::2] = by_head[:, :half], by_head[:, half:]
    return out.reshape(weight.shape)


def write_gguf(path, *, tensors=None, quantize=None, pre="smollm", bos=False, change=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(bos)
    writer.add_chat_template("{{ messages }}")
    if change:
        change(writer)
    for name, tensor in (tensors or known_tensors()).items():
        if name.endswith("attn_q.weight"):
            tensor = permuted(tensor, HEADS)
        if name.endswith("attn_k.weight"):
            tensor = permuted(tensor, KV_HEADS)
        if quantize and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_tensors_come_back_under_their_hf_names_unpermuted(tmp_path):
    tensors = known_tensors()
    folder = hf.local_folder(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    model = hf.load_model(folder)
    for name, short in LAYER_NAMES.items():
        module, leaf = short.rsplit(".", 1)
        stacked = model.layers
        for part in module.split("."):
            stacked = getattr(stacked, part)
        for layer in range(LAYERS):
            got = np.asarray(getattr(stacked, leaf)[...][layer])
            assert np.array_equal(got, tensors[f"blk.{layer}.{name}"]), name
    assert np.array_equal(model.lm_head_weight(), tensors["token_embd.weight"])
    assert model.config.tie_word_embeddings
    assert set(NAMES) - set(tensors) == {"output.weight"}


def test_an_output_tensor_makes_an_untied_model(tmp_path):
    tensors = known_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    model = hf.load_model(hf.local_folder(write_gguf(tmp_path / "a.gguf", tensors=tensors)))
    assert np.array_equal(model.lm_head_weight(), tensors["output.weight"])


def test_quantized_blocks_become_the_values_they_stand_for(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = known_tensors()
    folder = hf.local_folder(write_gguf(tmp_path / "a.gguf", tensors=tensors, quantize=kind))
    embedding = np.asarray(hf.load_model(folder).embed_tokens.weight[...])
    blocks = gguf.quantize(tensors["token_embd.weight"], kind)
    assert np.array_equal(embedding, gguf.dequantize(blocks, kind))
    assert 0 < np.abs(embedding - tensors["token_embd.weight"]).max() < 0.03


def test_config_holds_decimals_as_they_were_meant_and_both_rope_spellings(tmp_path):
    raw = hf.read_config(hf.local_folder(write_gguf(tmp_path / "a.gguf")))
    assert raw["rms_norm_eps"] == 1e-5
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 100000.0
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["head_dim"]) == (1, 0, WIDTH)


@pytest.mark.parametrize(
    "pre,pieces",
    [("smollm", ["ab", "Ġ", "1", "2", "c", "Ġa"]), ("gpt-2", ["ab", "Ġ", "1", "2", "c", "Ġa"])],
)
def test_the_tokenizer_cuts_merges_and_keeps_control_tokens_whole(tmp_path, pre, pieces):
    folder = hf.local_folder(write_gguf(tmp_path / "a.gguf", pre=pre))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoding = tokenizer.encode("<|end|>ab 12c a")
    assert encoding.tokens == ["<|end|>", *pieces]
    assert tokenizer.decode(encoding.ids) == "ab 12c a"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|start|>", "<|end|>")
    assert settings["chat_template"] == "{{ messages }}"
    ids = json.loads((folder / "generation_config.json").read_text())
    assert ids == {"bos_token_id": 1, "eos_token_id": 0}


def test_smollm_cuts_every_digit_and_gpt2_does_not(tmp_path):
    pieces = {}
    for pre in ("smollm", "gpt-2"):
        folder = hf.local_folder(write_gguf(tmp_path / f"{pre}.gguf", pre=pre))
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        pieces[pre] = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab 12c a")]
    assert pieces["smollm"] == ["ab", "Ġ", "1", "2", "c", "Ġa"]
    assert pieces["gpt-2"] == ["ab", "Ġ12", "c", "Ġa"]


def test_a_file_that_asks_for_bos_gets_one_from_the_tokenizer(tmp_path):
    folder = hf.local_folder(write_gguf(tmp_path / "a.gguf", bos=True))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<|start|>", "ab"]


def test_converted_once_by_content_and_whole_or_not_at_all(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf")
    first = hf.local_folder(path)
    marker = (first / "config.json").stat().st_mtime_ns
    assert hf.local_folder(path) == first
    assert (first / "config.json").stat().st_mtime_ns == marker
    tensors = known_tensors()
    tensors["output_norm.weight"] += 1
    changed = write_gguf(tmp_path / "a.gguf", tensors=tensors)
    broken = "jax_distill.hf.gguf.write_tokenizer"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(broken, lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        hf.local_folder(changed)
    names = sorted(path.name for path in (cache / "jax_distill" / "gguf").iterdir())
    assert names == [first.name, f"{first.name}.sha256.json"]
    assert hf.local_folder(changed) != first


@pytest.mark.parametrize("what", ["weights", "a missing file", "the record", "no record"])
def test_a_converted_folder_that_changed_since_is_converted_again(tmp_path, what, capsys):
    path = write_gguf(tmp_path / "a.gguf")
    folder = hf.local_folder(path)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    record = folder.with_name(f"{folder.name}.sha256.json")
    damaged = folder / "model.safetensors"
    if what == "weights":
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
    elif what == "a missing file":
        (folder / "generation_config.json").unlink()
    elif what == "the record":
        record.write_text("[]")
        damaged.touch()
    else:
        record.unlink()
        damaged.touch()
    assert hf.local_folder(path) == folder
    assert "again" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert hf.local_folder(path) == folder
    assert "again" not in capsys.readouterr().out


def test_what_cannot_be_carried_over_is_refused_by_name(tmp_path):
    def scaled(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    with pytest.raises(UserError, match=r"rope\.scaling\.type"):
        hf.local_folder(write_gguf(tmp_path / "a.gguf", change=scaled))
    with pytest.raises(UserError, match="llama-bpe"):
        hf.local_folder(write_gguf(tmp_path / "b.gguf", pre="llama-bpe"))
    more = known_tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        hf.local_folder(write_gguf(tmp_path / "c.gguf", tensors=more))
    less = known_tensors()
    del less["blk.1.ffn_up.weight"]
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        hf.local_folder(write_gguf(tmp_path / "d.gguf", tensors=less))
    (tmp_path / "e.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(UserError, match=r"e\.gguf"):
        hf.local_folder(tmp_path / "e.gguf")


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"jax-distill\[gguf\]"):
        hf.local_folder(path)


# ---- damage -------------------------------------------------------------------------------------


def refusal(path) -> str:
    with pytest.raises(UserError) as refused:
        hf.local_folder(path)
    line = str(refused.value)
    assert "\n" not in line and len(line) < 500, line
    return line


def header(*, tensors=0, entries=(), infos=b"", version=3) -> bytes:
    """The front of a file: entries of (key, type, value's bytes)."""
    text = lambda words: struct.pack("<Q", len(words)) + words  # noqa: E731
    parts = [b"GGUF", struct.pack("<IQQ", version, tensors, len(entries))]
    parts += [text(key) + struct.pack("<I", kind) + value for key, kind, value in entries]
    return b"".join(parts) + infos


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


HUGE = 2**62
DAMAGED = {
    "nothing": b"",
    "half a header": header()[:9],
    "another version": header(version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensors without end": header(tensors=HUGE),
    "keys without end": header()[:16] + struct.pack("<Q", HUGE),
    "a key of any length": header(entries=[(b"a", 4, b"1234")]).replace(
        struct.pack("<Q", 1) + b"a", struct.pack("<Q", HUGE) + b"a"
    ),
    "text of any length": header(entries=[(b"a", 8, struct.pack("<Q", HUGE))]),
    "an array of any length": header(entries=[(b"a", 9, array(4, HUGE))]),
    "texts of any number": header(entries=[(b"a", 9, array(8, HUGE))]),
    "texts beyond the end": header(entries=[(b"a", 9, array(8, 2**24))]),
    "numbers beyond the end": header(entries=[(b"a", 9, array(12, 2**24))]),
    "bools of any number": header(entries=[(b"a", 9, array(7, HUGE))]),
    "an array of arrays": header(entries=[(b"a", 9, array(9, 1, array(9, 1, array(4, 0))))]),
    "an unknown type": header(entries=[(b"a", 13, b"1234")]),
    "a bool of 2": header(entries=[(b"a", 7, b"\2")]),
    "a key twice": header(entries=[(b"a", 0, b"\1"), (b"a", 0, b"\2")]),
    "a key that is no text": header(entries=[(b"\xff", 0, b"\1")]),
    "an alignment of 0": header(entries=[(b"general.alignment", 4, bytes(4))]),
    "an alignment of 3": header(entries=[(b"general.alignment", 4, struct.pack("<I", 3))]),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_header_is_one_line_before_anything_is_made_of_it(tmp_path, what):
    (tmp_path / "a.gguf").write_bytes(DAMAGED[what])
    tracemalloc.start()
    assert "a.gguf" in refusal(tmp_path / "a.gguf")
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20  # imports
    tracemalloc.stop()


@pytest.mark.parametrize("left", [1, 100, 5000])
def test_a_file_cut_short_is_refused(tmp_path, left):
    path = write_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:-left])
    assert "not in its place" in refusal(path)


@pytest.mark.parametrize("offset", [32, 2**40, 2**63])
def test_a_tensor_at_another_place_is_refused(tmp_path, offset):
    """Its bytes would be another tensor's."""
    path = write_gguf(tmp_path / "a.gguf")
    data = path.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    path.write_bytes(data[:at] + struct.pack("<Q", offset) + data[at + 8 :])
    assert "'blk.1.ffn_up.weight' at" in refusal(path)


@pytest.mark.parametrize("dimensions", [0, 5, 2**31])
def test_a_tensor_of_no_or_many_dimensions_is_refused(tmp_path, dimensions):
    path = write_gguf(tmp_path / "a.gguf")
    data, name = path.read_bytes(), b"output_norm.weight"
    at = data.index(name) + len(name)
    path.write_bytes(data[:at] + struct.pack("<I", dimensions) + data[at + 4 :])
    assert f"of {dimensions} dimensions" in refusal(path)


@pytest.mark.parametrize(
    "key,value",
    [
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.key_length", "16"),
        ("llama.block_count", 2**31),
        ("llama.embedding_length", -64),
        ("llama.context_length", True),
        ("llama.rope.freq_base", "1e4"),
        ("llama.rope.freq_base", 1e300),
        ("llama.rope.freq_base", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
        ("llama.attention.layer_norm_rms_epsilon", [1e-5]),
        ("general.architecture", ["llama"]),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1] * len(TOKENS)),
        ("tokenizer.ggml.tokens", ["a"] * len(TOKENS)),
        ("tokenizer.ggml.token_type", [3]),
        ("tokenizer.ggml.token_type", 3),
        ("tokenizer.ggml.merges", ["a"]),
        ("tokenizer.ggml.merges", ["a b c"]),
        ("tokenizer.ggml.merges", ["a nothing"]),
        ("tokenizer.ggml.merges", [1]),
        ("tokenizer.ggml.pre", ["smollm"]),
        ("tokenizer.ggml.add_bos_token", 1),
        ("tokenizer.chat_template", ["{{ messages }}"]),
        *((f"tokenizer.ggml.{name}_token_id", -1) for name in ("bos", "eos", "padding", "unknown")),
        ("tokenizer.ggml.eos_token_id", len(TOKENS)),
        ("tokenizer.ggml.eos_token_id", 2**32 + 5),
        ("tokenizer.ggml.eos_token_id", True),
        ("tokenizer.ggml.eos_token_id", "0"),
    ],
)
def test_metadata_of_another_kind_is_one_line(tmp_path, monkeypatch, key, value):
    path = write_gguf(tmp_path / "a.gguf")
    file = open_gguf(path)
    changed = file._replace(metadata={**file.metadata, key: value})
    monkeypatch.setattr("jax_distill.hf.gguf.open_gguf", lambda _: changed)
    refusal(path)


def test_a_weight_that_is_not_finite_is_refused_by_name_when_it_is_loaded(tmp_path):
    tensors = known_tensors()
    tensors["blk.1.ffn_up.weight"][3, 5] = np.nan
    folder = hf.local_folder(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        hf.load_model(folder)


def test_a_full_disk_while_converting_is_one_line(tmp_path, small_disk, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf")
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    with pytest.raises(RunError, match="expected to write .*make room there"):
        hf.local_folder(path)
    assert not [p for p in small_disk.rglob("*") if p.is_file() and p.name != "filler"]
