"""Rung "teacher": a cache written by transformers and one written by JAX from the same weights.

Same ids wherever the logits differ by more than rounding, log-probabilities and tail to 1e-4, and
each backend's check of a cache passes on what the other wrote. Besides: what torch_ref.teacher does
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
from ladder import assert_close, assert_rare, assert_same_targets

import torch_ref.audit
import torch_ref.losses
import torch_ref.teacher
from jax_distill import audit, hf, sharding, targets, teacher
from jax_distill.base.errors import RunError, UserError
from jax_distill.batch import Batch
from jax_distill.cache import Cache, row_uniforms, teacher_fingerprint
from jax_distill.config import CacheConfig, Config, TeacherConfig
from torch_ref import model as torch_model

LENGTH, ROWS, TOP_K, TEMPERATURES = 48, 10, 12, (1.0, 2.0)
SEED = 1  # rows with padding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.llama_folder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def rows():
    return tiny.packed_rows(ROWS, LENGTH, seed=SEED)


def settings(folder, tmp_path) -> Config:
    return Config(
        teacher=TeacherConfig(path=str(folder), dtype="float32", batch_size=3),
        cache=CacheConfig(
            path=str(tmp_path / "cache"),
            top_k=TOP_K,
            temperatures=list(TEMPERATURES),
            hidden_layers=[0, 1],
        ),
    )


@pytest.fixture(scope="module")
def caches(folder, rows, tmp_path_factory):
    """(by torch, by JAX), of the same rows and weights."""
    path = tmp_path_factory.mktemp("caches")
    for split in ("train", "heldout"):
        tiny.rows_cache(path / "rows" / split, rows)
    config = settings(folder, path)
    by_torch = torch_ref.teacher.write_caches(config, str(path / "rows"), device="cpu")[0]
    mesh = sharding.make_mesh(data=-1, fsdp=1)
    model = hf.load_model(
        folder,
        param_dtype=jnp.float32,
        compute_dtype=jnp.float32,
        shardings=lambda p: sharding.parameter_sharding(mesh, p.logical_axes, p.shape),
    )
    manifest = dataclasses.replace(
        by_torch.manifest, teacher_fingerprint=teacher_fingerprint(folder)
    )
    by_jax = teacher.write_cache(
        str(path / "jax"),
        manifest,
        teacher.KnownRows.of(rows, manifest.shard_rows),
        model=model,
        mesh=mesh,
        batch_size=8,
        chunk_size=64,
    )
    return by_torch, by_jax


def test_both_backends_call_their_caches_by_the_same_name(caches):
    by_torch, by_jax = caches
    assert by_torch.manifest.identity() == by_jax.manifest.identity()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_both_backends_cache_the_same_distributions(caches, temperature):
    ours, theirs = (cache.read(range(ROWS), temperature=temperature) for cache in caches)
    assert_same_targets(f"teacher, τ {temperature}", ours, theirs)


def test_both_backends_cache_the_same_hidden_states(caches):
    """Where they are rounded to bf16 apart it is by a unit in the last place, and seldom."""
    ours, theirs = (cache.read(range(ROWS), hidden_layers=[1, 0]) for cache in caches)
    states = [np.asarray(each.teacher_layers, np.float32) for each in (ours, theirs)]
    assert states[0].shape == (ROWS, LENGTH, 2, states[0].shape[-1])
    padding = ours.segment_ids == 0
    assert padding.any() and not any(each[padding].any() for each in states)
    assert (states[0][~padding] != 0).any(-1).all()
    assert_close("teacher", "hidden states", *states, 2.0**-7, mean=2.0**-11)


def test_each_backends_audit_passes_on_the_others_cache(caches, folder, tmp_path):
    by_torch, by_jax = caches
    model = torch_model.load_model(str(folder), dtype="float32")
    kl, shifted = torch_ref.audit.spot_check(by_jax, model, np.arange(0, ROWS, 2))
    assert kl.shape == shifted.shape == (by_jax.read(range(0, ROWS, 2)).mask.sum(),)
    assert kl.max() < 1e-5 and shifted.mean() > 1.0
    argv = [by_torch.path, "--verify", "--spot_check", "4", "--teacher", str(folder)]
    assert 0 == audit.main([*argv, "--png", str(tmp_path / "cache.png")])


def test_the_torch_audit_refuses_another_teachers_cache(caches, tmp_path):
    other = tiny.llama_folder(tmp_path, seed=5)
    argv = [caches[1].path, "--teacher", str(other), "--spot_check", "3"]
    with pytest.raises(RunError, match="expected the targets of"):
        torch_ref.audit.main(argv)


@pytest.mark.parametrize("kind", ["random", "top_p"])
def test_both_backends_choose_the_same_ids(kind):
    """Random samples by the same numbers, and as many ids as reach p, of the same logits: rounding
    may change what falls on a border, in one position of 1,000 at most."""
    rows, length, vocab_size, top_k = 2, 100, 700, 30
    z = np.random.default_rng(2).normal(0, 4, (rows, length, vocab_size)).astype(np.float32)
    uniforms = row_uniforms(range(rows), length, top_k) if kind == "random" else None
    options = dict(top_k=top_k, temperatures=(2.0, 1.0), top_p=0.4 if kind == "top_p" else None)
    head = np.eye(vocab_size, dtype=np.float32)
    call = jax.jit(
        lambda z, u: targets.topk_targets(
            z, head, u, vocab_size=vocab_size, chunk_size=64, **options
        )
    )
    ours = jax.device_get(call(z, uniforms)[0]).arrays()
    flat = None if uniforms is None else torch.from_numpy(uniforms).flatten(0, 1)
    found, finite = torch_ref.teacher.targets_of(torch.from_numpy(z).flatten(0, 1), flat, **options)
    theirs = {name: x.numpy().reshape(ours[name].shape) for name, x in found.arrays().items()}
    assert finite.all() and ours.keys() == theirs.keys()
    assert ("teacher_draws" in ours) == (kind == "random")
    other = np.zeros((rows, length), bool)
    for name in ours.keys() - {"teacher_log_z", "teacher_log_tail", "teacher_gaps"}:
        wrong = ours[name] != theirs[name]
        other |= wrong.any(-1) if wrong.ndim == 3 else wrong
    assert_rare("teacher", f"another choice, {kind}", other, 1e-3)
    for name in ("teacher_log_z", "teacher_log_tail"):
        assert_close("teacher", name, ours[name][~other], theirs[name][~other], 1e-5, unit=1.0)
    counts = ours["teacher_count"]
    assert counts.min() < counts.max()


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
        return torch_ref.losses.logits(part, head)

    monkeypatch.setattr(torch_ref.teacher, "logits", counted)
    model = torch_model.load_model(str(folder), dtype="float32")
    manifest = tiny.manifest(LENGTH, top_k=TOP_K, temperatures=TEMPERATURES)
    torch_ref.teacher.capture(model, Batch.from_rows(rows), manifest, chunk_size=50)
    assert max(seen) <= 50 and sum(seen) == ROWS * LENGTH


@pytest.mark.parametrize("top_k", [1, 7, 40])
@pytest.mark.parametrize("scale", [0.0, 3.0, 40.0])
def test_targets_equal_float64_written_from_the_formula(top_k, scale):
    z = torch.tensor(np.random.default_rng(0).normal(size=(20, 40)) * scale, dtype=torch.float32)
    found, finite = torch_ref.teacher.targets_of(z, top_k=top_k, temperatures=TEMPERATURES)
    assert finite.all()
    order = z.double().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(found.indices, order)
    for which, temperature in enumerate(TEMPERATURES):
        log_p = (z.double() / temperature).log_softmax(-1)
        tail = log_p.scatter(1, order, -math.inf).logsumexp(-1)
        largest = log_p.max(-1).values
        torch.testing.assert_close(found.log_z[:, which].double(), -largest, rtol=1e-6, atol=3e-6)
        got = found.log_tail[:, which].double()
        torch.testing.assert_close(got, tail, rtol=1e-6, atol=1e-5)
        mass = -torch.expm1(tail[tail > -0.7])
        torch.testing.assert_close(-torch.expm1(got[tail > -0.7]), mass, rtol=1e-5, atol=0)


def test_a_cache_goes_on_after_a_kill_and_ends_the_same(folder, rows, tmp_path):
    for split in ("train", "heldout"):
        tiny.rows_cache(tmp_path / "rows" / split, rows)
    config = settings(folder, tmp_path)

    def write() -> dict[str, bytes]:
        torch_ref.teacher.write_caches(config, str(tmp_path / "rows"), device="cpu")
        files = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
        return {str(f): f.read_bytes() for f in files}

    before = write()
    (tmp_path / "cache/train/commits/000001.json").unlink()
    (tmp_path / "cache/train/teacher_gap_steps/c/1/0/0").write_bytes(b"torn")
    assert write() == before
    changed = dataclasses.replace(config, cache=dataclasses.replace(config.cache, top_k=5))
    with pytest.raises(UserError, match="top_k"):
        torch_ref.teacher.write_caches(changed, str(tmp_path / "rows"), device="cpu")


def test_a_row_that_is_not_finite_is_named(folder, rows, tmp_path):
    for split in ("train", "heldout"):
        tiny.rows_cache(tmp_path / "rows" / split, rows)
    model = torch_model.load_model(str(folder), dtype="float32")
    bad = int(rows["tokens"][6, 0])
    hit = np.flatnonzero((rows["tokens"] == bad).any(1))
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = math.nan
    source = Cache.open(str(tmp_path / "rows/train"))
    manifest = torch_ref.teacher.manifest_for(source.manifest, model, settings(folder, tmp_path))
    with pytest.raises(RunError, match=rf"rows \[{hit[0]}"):
        torch_ref.teacher.write_cache(
            str(tmp_path / "out"), manifest, source, model, batch_size=1, chunk_size=50
        )


def test_segments_beyond_the_teachers_context_are_refused_or_said(folder, rows, tmp_path, capsys):
    for split in ("train", "heldout"):
        tiny.rows_cache(tmp_path / "rows" / split, rows)
    limit = 7
    beyond = 2 * sum(int((np.bincount(row)[1:] > limit).sum()) for row in rows["segment_ids"])
    short = tiny.llama_folder(tmp_path / "short", max_position_embeddings=limit)
    config = settings(short, tmp_path)
    with pytest.raises(UserError, match=f"at most 7 tokens, got {beyond} longer"):
        torch_ref.teacher.write_caches(config, str(tmp_path / "rows"), device="cpu")
    assert not (tmp_path / "cache/train").exists()
    allowed = dataclasses.replace(config.teacher, beyond_context="allow")
    config = dataclasses.replace(config, teacher=allowed)
    torch_ref.teacher.write_caches(config, str(tmp_path / "rows"), device="cpu")
    assert f"{beyond} longer than the teacher's" in " ".join(capsys.readouterr().out.split())


def test_weights_that_do_not_fit_the_architecture_are_refused(folder, tmp_path):
    other = tiny.llama_folder(tmp_path / "other", num_hidden_layers=3)
    (tmp_path / "other/config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match="unexpected_keys"):
        torch_model.load_model(str(other), dtype="float32")
    with pytest.raises(UserError, match="expected a model"):
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
    with pytest.raises(UserError, match="packed documents apart"):
        torch_model.check_model(model)


def test_padding_never_turns_into_nan(folder, rows):
    model = torch_model.load_model(str(folder), dtype="float32")
    inputs = [torch.tensor(rows[k]) for k in ("tokens", "segment_ids", "positions")]
    inputs[1][:] = 0
    assert torch_model.hidden_states(model, *inputs).isfinite().all()


def test_jax_reads_what_transformers_saved(folder, rows):
    """Logits of the fixture agree, so a failure above is of the cache and not of the model."""
    model = torch_model.load_model(str(folder), dtype="float32")
    inputs = [torch.tensor(rows[k]) for k in ("tokens", "segment_ids", "positions")]
    with torch.no_grad():
        expected = torch_model.hidden_states(model, *inputs).numpy()
    ours = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=jnp.float32)
    got = jax.jit(lambda m, *x: m.hidden_states(*x))(ours, *(jnp.asarray(x) for x in inputs))
    real = rows["segment_ids"] > 0
    assert_close("teacher", "hidden states", np.asarray(got)[real], expected[real], 4e-6)
