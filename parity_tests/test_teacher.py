"""Rung "teacher": a store written by transformers and one written by JAX from the same weights.

Same ids wherever the logits differ by more than rounding, log-probabilities and tail to 1e-4, and
each backend's check of a store passes on what the other wrote. Besides: what torch_ref.teacher does
alone (ties, resuming, refusals), and that packed documents are kept apart.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers
from ladder import assert_close, assert_same_targets

import torch_ref.audit
import torch_ref.teacher
from jax_distill import audit, hf, sharding, teacher
from jax_distill.cache import Store
from jax_distill.config import CacheConfig, Config, Failure, Refusal, TeacherConfig
from torch_ref import model as torch_model

LENGTH, ROWS, TOP_K, TEMPERATURES = 48, 10, 12, (1.0, 2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama_folder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def rows():
    return tiny.packed_rows(ROWS, LENGTH)


def settings(folder, tmp_path) -> Config:
    return Config(
        teacher=TeacherConfig(path=str(folder), dtype="float32", batch_size=3),
        cache=CacheConfig(
            path=str(tmp_path / "cache"), top_k=TOP_K, temperatures=list(TEMPERATURES)
        ),
    )


@pytest.fixture(scope="module")
def stores(folder, rows, tmp_path_factory):
    """(by torch, by JAX), of the same rows and weights."""
    place = tmp_path_factory.mktemp("stores")
    for split in ("train", "heldout"):
        tiny.rows_store(place / "rows" / split, rows)
    config = settings(folder, place)
    by_torch = torch_ref.teacher.write_stores(config, str(place / "rows"), device="cpu")[0]
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    model = hf.load_model(
        folder,
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
    )
    wanted = dataclasses.replace(
        by_torch.manifest, teacher_fingerprint=teacher.teacher_fingerprint(folder)
    )
    by_jax = teacher.write_store(
        str(place / "jax"),
        wanted,
        rows,
        model=model,
        mesh=mesh,
        batch_size=8,
        chunk_size=64,
    )
    return by_torch, by_jax


def test_both_backends_call_their_stores_by_the_same_name(stores):
    by_torch, by_jax = stores
    assert by_torch.manifest.identity() == by_jax.manifest.identity()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_both_backends_store_the_same_distributions(stores, temperature):
    ours, theirs = (store.read(range(ROWS), temperature=temperature) for store in stores)
    rung = f"teacher, τ {temperature}"
    assert_same_targets(rung, ours, theirs, temperature=temperature)


def test_each_backends_audit_passes_on_the_others_store(stores, folder, tmp_path):
    by_torch, by_jax = stores
    model = torch_model.load_model(str(folder), dtype="float32")
    found = torch_ref.audit.spot_check(by_jax, model, np.arange(0, ROWS, 2))
    assert found.kl < 1e-5 and found.worst_row < 1e-5 and found.shifted > 1.0
    argv = [by_torch.path, "--verify", "--spot_check", "4", "--teacher", str(folder)]
    assert 0 == audit.main([*argv, "--png", str(tmp_path / "store.png")])


def test_the_torch_audit_refuses_another_teachers_store(stores, tmp_path):
    other = tiny.llama_folder(tmp_path, seed=5)
    argv = [stores[1].path, "--teacher", str(other), "--spot_check", "3"]
    with pytest.raises(Failure, match="expected the targets of"):
        torch_ref.audit.main(argv)


# ---- torch_ref.teacher alone --------------------------------------------------------------------


def test_equal_logits_are_ordered_by_id_also_at_the_edge_of_k():
    z = torch.tensor([[3.0, 1, 3, 0, 3, 1, 1, 0], [0.0, 0, 0, 0, 0, 0, 0, 1]])
    values, ids = torch_ref.teacher.top_k_of(z, 5)
    assert ids.tolist() == [[0, 2, 4, 1, 5], [7, 0, 1, 2, 3]]
    assert torch.equal(values, z.gather(1, ids))


def test_no_more_than_a_chunk_of_positions_has_logits_at_a_time(folder, rows, monkeypatch):
    seen = []

    def counted(part, head):
        seen.append(len(part))
        return torch_model.logits(part, head)

    monkeypatch.setattr(torch_ref.teacher, "logits", counted)
    model = torch_model.load_model(str(folder), dtype="float32")
    wanted = tiny.manifest(LENGTH, top_k=TOP_K, temperatures=TEMPERATURES)
    torch_ref.teacher.capture(model, rows, wanted, chunk_size=50)
    assert max(seen) <= 50 and sum(seen) == ROWS * LENGTH


@pytest.mark.parametrize("top_k", [1, 7, 40])
@pytest.mark.parametrize("scale", [0.0, 3.0, 40.0])
def test_targets_equal_float64_written_from_the_formula(top_k, scale):
    z = torch.tensor(np.random.default_rng(0).normal(size=(20, 40)) * scale, dtype=torch.float32)
    found = torch_ref.teacher.targets_of(z, top_k=top_k, temperatures=TEMPERATURES)
    assert found["finite"].all()
    order = z.double().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(found["indices"], order)
    for place, temperature in enumerate(TEMPERATURES):
        log_p = (z.double() / temperature).log_softmax(-1)
        tail = log_p.scatter(1, order, -math.inf).logsumexp(-1)
        largest = log_p.max(-1).values
        torch.testing.assert_close(
            found["log_z"][:, place].double(), -largest, rtol=1e-6, atol=3e-6
        )
        got = found["log_tail"][:, place].double()
        torch.testing.assert_close(got, tail, rtol=1e-6, atol=1e-5)
        mass = -torch.expm1(tail[tail > -0.7])
        torch.testing.assert_close(-torch.expm1(got[tail > -0.7]), mass, rtol=1e-5, atol=0)


def test_a_store_goes_on_after_a_kill_and_ends_the_same(folder, rows, tmp_path):
    for split in ("train", "heldout"):
        tiny.rows_store(tmp_path / "rows" / split, rows)
    config = settings(folder, tmp_path)

    def write() -> dict[str, bytes]:
        torch_ref.teacher.write_stores(config, str(tmp_path / "rows"), device="cpu")
        files = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
        return {str(f): f.read_bytes() for f in files}

    before = write()
    (tmp_path / "cache/train/commits/000001.json").unlink()
    (tmp_path / "cache/train/teacher_gaps/c/1/0/0").write_bytes(b"torn")
    assert write() == before
    changed = dataclasses.replace(config, cache=dataclasses.replace(config.cache, top_k=5))
    with pytest.raises(Refusal, match="top_k"):
        torch_ref.teacher.write_stores(changed, str(tmp_path / "rows"), device="cpu")


def test_a_row_that_is_not_finite_is_named(folder, rows, tmp_path):
    for split in ("train", "heldout"):
        tiny.rows_store(tmp_path / "rows" / split, rows)
    model = torch_model.load_model(str(folder), dtype="float32")
    bad = int(rows["tokens"][6, 0])
    hit = np.flatnonzero((rows["tokens"] == bad).any(1))
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = math.nan
    source = Store.open(str(tmp_path / "rows/train"))
    wanted = torch_ref.teacher.manifest_for(source.manifest, model, settings(folder, tmp_path))
    with pytest.raises(Failure, match=rf"rows \[{hit[0]}"):
        torch_ref.teacher.write_store(
            str(tmp_path / "out"), wanted, source, model, batch_size=1, chunk_size=50
        )


def test_weights_that_do_not_fit_the_architecture_are_refused(folder, tmp_path):
    other = tiny.llama_folder(tmp_path / "other", num_hidden_layers=3)
    (tmp_path / "other/config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(Refusal, match="unexpected_keys"):
        torch_model.load_model(str(other), dtype="float32")
    with pytest.raises(Refusal, match="expected a model"):
        torch_model.load_model(str(tmp_path / "nothing"), dtype="float32")


SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
)
ARCHITECTURES = [
    (transformers.LlamaConfig(**SIZES), "sdpa"),
    (transformers.LlamaConfig(**SIZES), "eager"),
    (transformers.Qwen3Config(**SIZES), "sdpa"),
    (transformers.MistralConfig(**SIZES, sliding_window=4), "sdpa"),
    (transformers.Gemma2Config(**SIZES, sliding_window=4), "eager"),
    (transformers.Gemma3TextConfig(**SIZES, sliding_window=4), "sdpa"),
    (transformers.CohereConfig(**SIZES), "sdpa"),
    (transformers.GraniteConfig(**SIZES, logits_scaling=3.0), "eager"),
    (transformers.GPTNeoXConfig(**SIZES), "sdpa"),
]


@pytest.mark.parametrize(
    "config,attention", ARCHITECTURES, ids=[f"{type(c).__name__}-{a}" for c, a in ARCHITECTURES]
)
def test_packed_documents_are_kept_apart_in_transformers_own_models(config, attention, monkeypatch):
    """Case 14, for the reference; and the check would notice if they were not."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    torch_model.check_model(model)
    masks = torch_model.attention_masks
    monkeypatch.setattr(
        torch_model, "attention_masks", lambda m, segments: masks(m, torch.ones_like(segments))
    )
    with pytest.raises(Refusal, match="packed documents apart"):
        torch_model.check_model(model)


def test_padding_never_turns_into_nan(folder, rows):
    model = torch_model.load_model(str(folder), dtype="float32")
    place = [torch.tensor(rows[k]) for k in ("tokens", "segment_ids", "positions")]
    place[1][:] = 0
    assert torch_model.hidden_states(model, *place).isfinite().all()


def test_jax_reads_what_transformers_saved(folder, rows):
    """Logits of the fixture agree, so a failure above lies in the store and not in the model."""
    model = torch_model.load_model(str(folder), dtype="float32")
    place = [torch.tensor(rows[k]) for k in ("tokens", "segment_ids", "positions")]
    with torch.no_grad():
        expected = torch_model.hidden_states(model, *place).numpy()
    ours = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)
    got = jax.jit(lambda m, *x: m.hidden_states(*x))(ours, *(jnp.asarray(x) for x in place))
    real = rows["segment_ids"] > 0
    assert_close("teacher", "hidden states", np.asarray(got)[real], expected[real], 4e-6)
