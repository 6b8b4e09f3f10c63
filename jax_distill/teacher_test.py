"""The teacher pass: caches hold what the model says, rows stay apart, and nothing is made twice."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from jax_distill import hf, sharding, teacher
from jax_distill.base.errors import RunError, UserError
from jax_distill.batch import Batch
from jax_distill.cache import Cache, Manifest
from jax_distill.cache.location import Folder
from jax_distill.config import CacheConfig, Config, DataConfig, StudentConfig, TeacherConfig
from jax_distill.hf.architecture import COMMON_KEYS, LLAMA_KEYS
from jax_distill.model import Decoder, ModelConfig
from jax_distill.teacher import writing

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
def _hidden_states(model: Decoder, *inputs) -> jax.Array:
    return model.hidden_states(*inputs).astype(jnp.float32)


def hidden_states(model: Decoder, rows) -> np.ndarray:
    """[N,T,D] fp32, rows whole on one device."""
    names = ("tokens", "segment_ids", "positions")
    found = vars(rows) if isinstance(rows, Batch) else rows
    return np.asarray(_hidden_states(model, *(found[name] for name in names)))


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


def write(path: Path, rows, model, wanted: Manifest, **options) -> Cache:
    options = {"batch_size": 8, "chunk_size": 16, "mesh": mesh()} | options
    source = teacher.KnownRows.of(rows, wanted.shard_rows)
    return teacher.write_cache(str(path), wanted, source, model=model, **options)


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


# ---- a cache of a model's rows ------------------------------------------------------------------


def test_a_cache_holds_what_the_model_says(tmp_path):
    rows = single_rows(19, 12)
    model = random_model()
    cache = write(tmp_path, rows, model, manifest(12))
    hidden = hidden_states(model, rows)
    lm_head = np.asarray(model.lm_head_weight())
    real = rows["segment_ids"] > 0
    for temperature in TEMPERATURES:
        batch = cache.read(range(19), temperature=temperature)
        ids, gaps, log_z, log_tail = definition(
            hidden, lm_head, vocab_size=VOCAB, top_k=10, temperature=temperature
        )
        np.testing.assert_array_equal(batch.targets.indices[real], ids[real])
        exact = -gaps / temperature - log_z[..., None]
        np.testing.assert_allclose(batch.targets.logprobs[real], exact[real], atol=8e-3)
        np.testing.assert_allclose(batch.targets.log_tail[real], log_tail[real], atol=2e-5)
        assert (batch.targets.count == np.where(real, 10, 0)).all()
        assert (batch.targets.log_tail[~real] == 0).all()
        assert (batch.targets.logprobs[~real] == -np.inf).all()
    np.testing.assert_array_equal(batch.mask, rows["loss_mask"] == 1)


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
        np.testing.assert_array_equal(a.targets.indices[row, here], b.targets.indices[0, there])
        for name in ("logprobs", "log_tail"):
            ours, theirs = getattr(a.targets, name), getattr(b.targets, name)
            np.testing.assert_allclose(ours[row, here], theirs[0, there], atol=2e-3)


def test_padding_columns_of_the_head_never_teach(tmp_path):
    """Case 1: 300 words, a head of 320; the cache equals that of the head cut to 300."""
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
    assert a.targets.indices.max() < VOCAB
    np.testing.assert_array_equal(a.targets.indices, b.targets.indices)
    np.testing.assert_allclose(a.targets.log_tail, b.targets.log_tail, atol=1e-5)


def test_a_resumed_cache_is_byte_identical_where_batches_do_not_divide_shards(tmp_path):
    rows = single_rows(21, 12)
    wanted = manifest(12, shard_rows=5)
    write(tmp_path / "a", rows, random_model(), wanted)
    before = folder_bytes(tmp_path / "a")
    assert sum(name.startswith("commits/0") for name in before) == 5
    write(tmp_path / "b", rows, random_model(), wanted)
    for shard in (0, 3):
        (tmp_path / f"b/commits/{shard:06d}.json").unlink()
    torn = tmp_path / "b/teacher_gap_steps/c/3/0/0"
    torn.write_bytes(torn.read_bytes()[:10])
    write(tmp_path / "b", rows, random_model(), wanted)
    assert folder_bytes(tmp_path / "b") == before


def test_a_writer_that_holds_the_teacher_up_is_named_once(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    writer = SimpleNamespace(write=lambda *_: None)

    def takes(seconds: float) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: clock.__setitem__(0, clock[0] + seconds))

    with writing._Background(writer) as background:
        for shard, waits in enumerate((0.0, 1.0, 5.0, 5.0)):
            clock[0] += 10.0  # the teacher's own time
            background._pending = takes(waits)
            background.write(shard, dict)
    said = [line for line in capsys.readouterr().out.splitlines() if "bottleneck" in line]
    assert len(said) == 1 and "the teacher has waited 6.0 of 36.0 s for it" in said[0]


def test_no_more_than_the_planned_batches_are_on_the_devices(tmp_path, monkeypatch):
    """`plan --step teacher` counts AHEAD beside the one at work, over shards' ends too."""
    given, fetched, most = [], [], []
    capture, device_get = writing.capture, jax.device_get

    def captured(*words, **options):
        given.append(capture(*words, **options))
        most.append(len(given) - len(fetched))
        return given[-1]

    monkeypatch.setattr(writing, "capture", captured)
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(x) or device_get(x))
    write(tmp_path, single_rows(40, 12), random_model(), manifest(12, shard_rows=16))
    assert len(given) == len(fetched) == 5 and max(most) == 1 + teacher.AHEAD


def test_a_row_that_is_not_finite_is_named_and_nothing_of_its_shard_counts(tmp_path):
    rows = single_rows(20, 12)
    rows["tokens"][rows["tokens"] == 7] = 8
    rows["tokens"][13, 0], rows["tokens"][15, 0] = 7, 7
    model = random_model()
    model.embed_tokens.weight[...] = model.embed_tokens.weight[...].at[7].set(jnp.nan)
    with pytest.raises(RunError, match=r"NaN or infinity in 2 rows of .*: 13, 15;"):
        write(tmp_path, rows, model, manifest(12))
    cache = Cache.open(str(tmp_path))
    assert sorted(cache.commits) == [0]


def test_a_cache_that_cannot_fit_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match="make room"):
        write(tmp_path, single_rows(8, 12), random_model(), manifest(12))
    assert not Cache.open(str(tmp_path)).commits


def test_bf16_teachers_are_stored_from_fp32_logits(tmp_path):
    rows = single_rows(8, 12)
    model = Decoder(
        model_config(), rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16
    )
    cache = write(tmp_path, rows, model, manifest(12))
    _, _, log_z, _ = definition(
        hidden_states(model, rows),
        np.asarray(model.lm_head_weight().astype(jnp.float32)),
        vocab_size=VOCAB,
        top_k=10,
        temperature=1.0,
    )
    real = rows["segment_ids"] > 0
    top = cache.read(range(8)).targets.logprobs[..., 0]
    # Sharded rows round their bf16 hidden states a little otherwise than a whole batch does.
    np.testing.assert_allclose(top[real], -log_z[real], atol=0.1)
    assert np.median(np.abs(top[real] + log_z[real])) < 1e-3


# ---- both caches of a configuration -------------------------------------------------------------


def word_tokenizer(folder: Path, words: list[str]) -> None:
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))


def hf_folder(
    folder: Path, *, seed: int = 0, words: list[str] | None = None, **fields: int
) -> Path:
    word_tokenizer(folder, words or [f"w{i}" for i in range(VOCAB)])
    config = model_config(**fields)
    read = COMMON_KEYS | LLAMA_KEYS
    raw = {k: v for k, v in asdict(config).items() if k in read} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    hf.save_weights(folder, random_model(seed, **fields), config)
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
