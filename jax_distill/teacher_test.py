"""The teacher pass: stores hold what the model says, rows stay apart, and nothing is made twice."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from jax_distill import hf, sharding, teacher
from jax_distill.cache import Manifest, Store
from jax_distill.config import (
    CacheConfig,
    Config,
    DataConfig,
    Failure,
    Refusal,
    StudentConfig,
    TeacherConfig,
)
from jax_distill.model import Decoder, ModelConfig

TEMPERATURES = (1.0, 2.0, 0.5)
VOCAB, COLUMNS = 300, 320  # the tokenizer's length, and the head's padded width


def model_config(**fields) -> ModelConfig:
    sizes = dict(
        vocab_size=COLUMNS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
    )
    return ModelConfig(**{**sizes, **fields})


def random_model(seed: int = 0, **fields) -> Decoder:
    return Decoder(model_config(**fields), rngs=nnx.Rngs(seed))


@jax.jit
def _hidden_states(model: Decoder, *place) -> jax.Array:
    return model.hidden_states(*place).astype(jnp.float32)


def hidden_states(model: Decoder, rows) -> np.ndarray:
    """[N,T,D] fp32, rows whole on one device."""
    place = (rows[name] for name in ("tokens", "segment_ids", "positions"))
    return np.asarray(_hidden_states(model, *place))


def mesh():
    return sharding.make_mesh(data=-1, fsdp=1)


def single_rows(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """[N,T] rows of one document each, of every length from 1 to T, the rest padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, (rows, 1))
    real = np.arange(length)[None, :] < lengths
    tokens = np.where(real, rng.integers(0, VOCAB, (rows, length)), 0)
    return {
        "tokens": tokens.astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, np.arange(length), 0).astype(np.int32),
        "loss_mask": (np.arange(length)[None, :] < lengths - 1).astype(np.uint8),
    }


def manifest(length: int, **fields) -> Manifest:
    values = dict(
        sequence_length=length, shard_rows=8, vocab_size=VOCAB, top_k=10, temperatures=TEMPERATURES
    )
    return Manifest(**{**values, **fields})


def write(path: Path, rows, model, wanted: Manifest, **knobs) -> Store:
    knobs = {"batch_size": 8, "chunk_size": 16, "mesh": mesh()} | knobs
    return teacher.write_store(str(path), wanted, rows, model=model, **knobs)


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def definition(hidden, lm_head, *, vocab_size, top_k, temperature):
    """ids, gaps, log_z, log_tail in float64, straight from the formulas."""
    z = (hidden.astype(np.float64) @ lm_head.astype(np.float64).T)[..., :vocab_size]
    order = np.argsort(-z, axis=-1, kind="stable")
    ranked = np.take_along_axis(z, order, -1)
    top = ranked[..., :1]
    log_z = np.log(np.exp((z - top) / temperature).sum(-1))
    if top_k == vocab_size:
        return order, top - ranked, log_z, np.full(log_z.shape, -np.inf)
    rest = ranked[..., top_k:] / temperature
    largest = rest.max(-1, keepdims=True)
    lse_rest = largest[..., 0] + np.log(np.exp(rest - largest).sum(-1))
    log_tail = lse_rest - (top[..., 0] / temperature + log_z)
    return order[..., :top_k], (top - ranked)[..., :top_k], log_z, log_tail


# ---- a store of a model's rows ------------------------------------------------------------------


def test_a_store_holds_what_the_model_says(tmp_path):
    rows = single_rows(19, 12)
    model = random_model()
    store = write(tmp_path, rows, model, manifest(12))
    hidden = hidden_states(model, rows)
    lm_head = np.asarray(model.lm_head_weight())
    real = rows["segment_ids"] > 0
    for temperature in TEMPERATURES:
        batch = store.read(range(19), temperature=temperature)
        ids, gaps, log_z, log_tail = definition(
            hidden, lm_head, vocab_size=VOCAB, top_k=10, temperature=temperature
        )
        np.testing.assert_array_equal(batch["teacher_indices"][real], ids[real])
        exact = -gaps / temperature - log_z[..., None]
        np.testing.assert_allclose(batch["teacher_logprobs"][real], exact[real], atol=8e-3)
        np.testing.assert_allclose(batch["teacher_log_tail"][real], log_tail[real], atol=2e-5)
        assert (batch["teacher_count"] == np.where(real, 10, 0)).all()
        assert (batch["teacher_log_tail"][~real] == 0).all()
        assert (batch["teacher_logprobs"][~real] == -np.inf).all()
    np.testing.assert_array_equal(batch["mask"], rows["loss_mask"] == 1)


def test_a_packed_rows_targets_equal_those_of_its_documents_alone(tmp_path):
    """Case 15."""
    length = 12
    alone = single_rows(8, length, seed=3)
    first, second = 7, 5
    for name, fill in (("segment_ids", 1), ("loss_mask", 1)):
        alone[name][0], alone[name][1] = 0, 0
        alone[name][0, :first], alone[name][1, :second] = fill, fill
    alone["tokens"][0, :first] = np.arange(10, 10 + first)
    alone["tokens"][1, :second] = np.arange(50, 50 + second)
    alone["positions"][:2] = np.arange(length)
    packed = {name: each.copy() for name, each in alone.items()}
    for name in ("tokens", "positions"):
        packed[name][0, first:] = alone[name][1, :second]
    packed["segment_ids"][0, first:] = 2
    a = write(tmp_path / "a", alone, random_model(), manifest(length)).read([0, 1])
    b = write(tmp_path / "b", packed, random_model(), manifest(length)).read([0])
    for row, here, there in (
        (0, slice(0, first), slice(0, first)),
        (1, slice(0, second), slice(first, length)),
    ):
        np.testing.assert_array_equal(
            a["teacher_indices"][row, here], b["teacher_indices"][0, there]
        )
        for name in ("teacher_logprobs", "teacher_log_tail"):
            np.testing.assert_allclose(a[name][row, here], b[name][0, there], atol=2e-3)


def test_padding_columns_of_the_head_never_teach(tmp_path):
    """Case 1: 300 words, a head of 320; the store equals that of the head cut to 300."""
    rows = single_rows(8, 12)
    wide = random_model()
    table = wide.embed_tokens.weight[...]
    wide.lm_head.weight[...] = wide.lm_head.weight[...].at[VOCAB:].mul(50.0)
    cut = random_model(vocab_size=VOCAB)
    for name in ("layers", "norm"):
        setattr(cut, name, getattr(wide, name))
    cut.embed_tokens.weight[...] = table[:VOCAB]
    cut.lm_head.weight[...] = wide.lm_head.weight[...][:VOCAB]
    a = write(tmp_path / "a", rows, wide, manifest(12)).read(range(8))
    b = write(tmp_path / "b", rows, cut, manifest(12)).read(range(8))
    assert a["teacher_indices"].max() < VOCAB
    np.testing.assert_array_equal(a["teacher_indices"], b["teacher_indices"])
    np.testing.assert_allclose(a["teacher_log_tail"], b["teacher_log_tail"], atol=1e-5)


def test_a_resumed_store_is_byte_identical_where_batches_do_not_divide_shards(tmp_path):
    rows = single_rows(21, 12)
    wanted = manifest(12, shard_rows=5)
    write(tmp_path / "a", rows, random_model(), wanted)
    before = folder_bytes(tmp_path / "a")
    assert sum(name.startswith("commits/") for name in before) == 5
    write(tmp_path / "b", rows, random_model(), wanted)
    for shard in (0, 3):
        (tmp_path / f"b/commits/{shard:06d}.json").unlink()
    torn = tmp_path / "b/teacher_gaps/c/3/0/0"
    torn.write_bytes(torn.read_bytes()[:10])
    write(tmp_path / "b", rows, random_model(), wanted)
    assert folder_bytes(tmp_path / "b") == before


def test_a_row_that_is_not_finite_is_named_and_nothing_of_its_shard_counts(tmp_path):
    rows = single_rows(20, 12)
    rows["tokens"][rows["tokens"] == 7] = 8
    rows["tokens"][13, 0], rows["tokens"][15, 0] = 7, 7
    model = random_model()
    model.embed_tokens.weight[...] = model.embed_tokens.weight[...].at[7].set(jnp.nan)
    with pytest.raises(Failure, match=r"NaN or infinity in 2 rows of .*: 13, 15;"):
        write(tmp_path, rows, model, manifest(12))
    store = Store.open(str(tmp_path))
    assert sorted(store.commits) == [0]


def test_a_store_that_cannot_fit_is_refused_before_the_work(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Refusal, match="make room"):
        write(tmp_path, single_rows(8, 12), random_model(), manifest(12))
    assert not Store.open(str(tmp_path)).commits


def test_bf16_teachers_are_stored_from_fp32_logits(tmp_path):
    rows = single_rows(8, 12)
    model = Decoder(
        model_config(), rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16
    )
    store = write(tmp_path, rows, model, manifest(12))
    _, _, log_z, _ = definition(
        hidden_states(model, rows),
        np.asarray(model.lm_head_weight().astype(jnp.float32)),
        vocab_size=VOCAB,
        top_k=10,
        temperature=1.0,
    )
    real = rows["segment_ids"] > 0
    top = store.read(range(8))["teacher_logprobs"][..., 0]
    # Sharded rows round their bf16 hidden states a little otherwise than a whole batch does.
    np.testing.assert_allclose(top[real], -log_z[real], atol=0.1)
    assert np.median(np.abs(top[real] + log_z[real])) < 1e-3


# ---- both stores of a configuration -------------------------------------------------------------


def word_tokenizer(folder: Path, words: list[str]) -> None:
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))


def hf_folder(folder: Path, *, seed: int = 0, words: list[str] | None = None) -> Path:
    word_tokenizer(folder, words or [f"w{i}" for i in range(VOCAB)])
    config = model_config()
    raw = {k: v for k, v in asdict(config).items() if k != "rope"} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    hf.save_weights(folder, random_model(seed), config)
    return folder


def text_file(path: Path, *, seed: int = 0, documents: int = 90) -> Path:
    rng = np.random.default_rng(seed)
    lines = [
        " ".join(f"w{i}" for i in rng.integers(1, VOCAB, rng.integers(3, 40)))
        for _ in range(documents)
    ]
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


@pytest.fixture
def config(tmp_path) -> Config:
    hf_folder(tmp_path / "teacher")
    return Config(
        output_dir=str(tmp_path / "run"),
        teacher=TeacherConfig(path=str(tmp_path / "teacher"), dtype="float32", batch_size=8),
        student=StudentConfig(path=str(tmp_path / "teacher")),
        data=DataConfig(
            path=str(text_file(tmp_path / "text.jsonl")),
            format="jsonl",
            sequence_length=32,
            heldout_fraction=0.2,
        ),
        cache=CacheConfig(path=str(tmp_path / "cache"), top_k=8, shard_rows=16),
    )


def test_stores_are_made_once_and_then_found_without_reading_text_or_weights(
    config, monkeypatch, capsys
):
    train, heldout = teacher.write_stores(config)
    assert train.complete and heldout.complete and heldout.rows > 1
    assert train.manifest.vocab_size == VOCAB and train.manifest.top_k == 8
    assert train.manifest.vocabulary["w7"] == 7
    assert train.manifest.counts["tokens_in"] == train.manifest.counts["tokens_out"] == train.tokens
    said = capsys.readouterr().out
    assert "free" in said and "more tokens take about" in said and "bytes a token" in said
    before = folder_bytes(Path(config.cache.path))

    def never(*_, **__):
        raise AssertionError("a finished store needs no work")

    monkeypatch.setattr(teacher.stores.data, "read_documents", never)
    monkeypatch.setattr(teacher.stores.hf, "load_model", never)
    again, _ = teacher.write_stores(config)
    assert again.rows == train.rows
    assert folder_bytes(Path(config.cache.path)) == before
    assert "is there" in capsys.readouterr().out


def change_teacher(config: Config) -> Config:
    hf.save_weights(config.teacher.path, random_model(5), model_config())
    return config


def change_tokenizer(config: Config) -> Config:
    words = [f"w{i}" for i in range(VOCAB)]
    words[3], words[9] = words[9], words[3]
    word_tokenizer(Path(config.teacher.path), words)
    return config


def change_text(config: Config) -> Config:
    """Case 8: one token of one document."""
    path = Path(str(config.data.path))
    first, *rest = path.read_text().splitlines()
    word, *words = json.loads(first)["text"].split()
    other = "w7" if word != "w7" else "w8"
    path.write_text("\n".join([json.dumps({"text": " ".join([other, *words])}), *rest]))
    return config


def change_packing(config: Config) -> Config:
    return replace(config, data=replace(config.data, packing=False))


def change_top_k(config: Config) -> Config:
    return replace(config, cache=replace(config.cache, top_k=9))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_teacher, "teacher_fingerprint"),
        (change_tokenizer, "tokenizer_fingerprint"),
        (change_text, "data_fingerprint"),
        (change_packing, "data.packing: stored True, wanted False"),
        (change_top_k, "top_k: stored 8, wanted 9"),
    ],
)
def test_an_old_store_is_refused_by_the_name_of_what_changed(config, change, named):
    """Case 36."""
    teacher.write_stores(config)
    before = folder_bytes(Path(config.cache.path))
    with pytest.raises(Refusal, match=named):
        teacher.write_stores(change(config))
    assert folder_bytes(Path(config.cache.path)) == before


def test_data_with_a_tokenizer_that_is_not_the_teachers_is_refused(config, tmp_path):
    """Case 3, before anything is stored."""
    words = [f"w{i}" for i in range(VOCAB)]
    words[3], words[9] = words[9], words[3]
    word_tokenizer(tmp_path / "other", words)
    other = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "other")))
    with pytest.raises(Refusal, match="id 3 to 'w3' as the teacher's own does, got 'w9'"):
        teacher.write_stores(other)
    assert not Path(config.cache.path).exists()


def test_ids_beyond_the_teachers_head_are_refused(config):
    word_tokenizer(Path(config.teacher.path), [f"w{i}" for i in range(COLUMNS + 5)])
    line = " ".join(f"w{i}" for i in range(COLUMNS + 5))
    path = Path(str(config.data.path))
    path.write_text(path.read_text() + "\n" + json.dumps({"text": line}))
    with pytest.raises(Refusal, match=f"ids below {COLUMNS}.*got {COLUMNS + 4}"):
        teacher.write_stores(config)


def test_without_a_teacher_the_stores_hold_rows_alone(config):
    train, heldout = teacher.write_stores(replace(config, teacher=TeacherConfig()))
    assert train.manifest.top_k == 0 and heldout.complete
    assert "teacher_logprobs" not in train.read([0])
    assert not list(Path(config.cache.path).rglob("teacher_*"))


def test_a_tokenizer_is_trained_on_the_text_once(config):
    bpe = replace(config.data, tokenizer="bpe:280", format="jsonl")
    bare = replace(config, data=bpe, teacher=TeacherConfig())
    train, _ = teacher.write_stores(bare)
    folder = teacher.tokenizer_folder(bare, None)
    assert (folder / "tokenizer.json").is_file()
    assert train.manifest.vocab_size <= 280
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    teacher.write_stores(bare)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp


def test_no_heldout_text_is_refused(config):
    with pytest.raises(Refusal, match="expected heldout text"):
        teacher.write_stores(replace(config, data=replace(config.data, heldout_fraction=0.0)))
