"""Rung "gradients": of one batch of a cache, every parameter by its Hugging Face name.

The whole chain is in it: the cache's reader, packed attention, rotary positions, the head, the
loss. float32, 1e-5 of the largest entry of each tensor.
"""

import jax
import jax.numpy as jnp
import pytest
import tiny
import torch
from flax import nnx
from ladder import assert_as_near, assert_close, assert_same

from jax_distill import hf
from jax_distill.cache import Cache
from jax_distill.config import LossConfig
from jax_distill.devices import QUICK_COMPILE
from jax_distill.training import step
from torch_ref import model as torch_model

LENGTH, ROWS = 48, 4
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5
KINDS = {
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(),
    "biases": dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "llama3 rope": dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),
}
LOSSES = {
    "default": LossConfig(chunk_size=16 * ROWS),
    "temperature": LossConfig(
        implementation="dense", temperature=2.0, ce_weight=0.3, z_loss_weight=1e-3
    ),
    "paper": LossConfig(implementation="fused_chunked", tail="truncate", chunk_size=20 * ROWS),
    "cross-entropy": LossConfig(kl_weight=0.0, ce_weight=1.0),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    """Rows with targets of a teacher that no student here equals."""
    path = tmp_path_factory.mktemp("cache")
    rows = tiny.rows_cache(path / "rows", tiny.packed_rows(ROWS, LENGTH))
    return tiny.taught_cache(path / "taught", rows, tiny.llama_folder(path / "teacher", seed=9))


def jax_gradients(folder, batch, loss: LossConfig, compute_dtype=jnp.float32):
    """(mean loss, gradients by HF name)."""
    model = hf.load_model(folder, param_dtype=jnp.float32, compute_dtype=compute_dtype)
    graphdef, params = nnx.split(model, nnx.Param)
    count = float(batch.mask.sum())
    batch = batch.map(jnp.asarray)

    def mean_loss(params):
        return step.loss_fn(params, graphdef, batch, tiny.jax_task(loss))[0] / count

    program = jax.jit(jax.value_and_grad(mean_loss)).lower(params)
    value, gradients = program.compile(compiler_options=QUICK_COMPILE)(params)
    return float(value), tiny.by_hf_name(gradients, model.config)


@pytest.mark.parametrize("kind,loss", list(zip(KINDS, LOSSES, strict=True)))
def test_gradients_of_every_parameter_are_those_of_torch(cache, tmp_path, kind, loss):
    folder = tiny.llama_folder(tmp_path, **KINDS[kind])
    options = LOSSES[loss]
    batch = cache.read(range(ROWS), temperature=options.temperature)
    model = torch_model.load_model(str(folder), dtype="float32")
    expected, sums = tiny.torch_gradients(model, batch, tiny.torch_task(options), ROWS)
    value, got = jax_gradients(folder, batch, options)
    assert_close(f"gradients, {kind}", "loss", value, sums.loss / sums.count, LOSS_TOLERANCE)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(f"gradients, {kind}", name, got[name], gradient, GRADIENT_TOLERANCE)


def test_micro_batches_do_not_change_the_reference_gradients(cache, tmp_path):
    """Case 27, for the reference: rows with unequal numbers of targets, one denominator."""
    model = torch_model.load_model(str(tiny.llama_folder(tmp_path)), dtype="float32")
    batch = cache.read(range(ROWS))
    batch.mask[0, 5:] = False
    task = tiny.torch_task(LossConfig())
    whole, sums = tiny.torch_gradients(model, batch, task, ROWS)
    for size in (1, 2, 3):
        parts, more = tiny.torch_gradients(model, batch, task, size)
        assert more.count == sums.count
        for name, gradient in whole.items():
            assert_close(f"{size} a micro-batch", name, parts[name], gradient, 1e-5)


def test_gradient_checkpointing_does_not_change_the_reference_gradients(cache, tmp_path):
    model = torch_model.load_model(str(tiny.llama_folder(tmp_path)), dtype="float32")
    batch = cache.read(range(ROWS))
    task = tiny.torch_task(LossConfig())
    before, _ = tiny.torch_gradients(model, batch, task, ROWS)
    torch_model.recompute_layers(model)
    after, _ = tiny.torch_gradients(model, batch, task, ROWS)
    for name, gradient in before.items():
        assert_same("recomputed layers", name, after[name], gradient)


def test_bf16_gradients_are_as_near_to_float32s_as_the_references(cache, tmp_path):
    """bf16 matmuls under float32 parameters, stated apart: what each backend rounds is its own
    affair (the residual stream is bf16 in one, float32 in the other), so each is held against the
    float32 gradients. Error at most 1.5 × the reference's, plus one bf16 rounding (2⁻⁸)."""
    folder = tiny.llama_folder(tmp_path)
    batch = cache.read(range(ROWS))
    model = torch_model.load_model(str(folder), dtype="float32")

    def reference(compute_dtype: torch.dtype):
        task = tiny.torch_task(LossConfig(), compute_dtype=compute_dtype)
        return tiny.torch_gradients(model, batch, task, ROWS)

    (exact, sums), (rounded, rounded_sums) = reference(torch.float32), reference(torch.bfloat16)
    value, got = jax_gradients(folder, batch, LossConfig(), jnp.bfloat16)
    mean, rounded_mean = (x.loss / x.count for x in (sums, rounded_sums))
    assert_close("gradients, bf16", "loss", value, mean, 2**-8)
    assert_close("gradients, bf16", "the reference's loss", rounded_mean, mean, 2**-8)
    for name, gradient in exact.items():
        three = got[name], rounded[name], gradient
        assert_as_near("gradients, bf16", name, *three, factor=1.5, rounding=2**-8)
