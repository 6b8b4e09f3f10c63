"""The Hopper kernels: refusals and choice everywhere; where the package is installed (Python 3.12,
JAX 0.11.2) its plain-JAX op against our definition, and the kernels compiled for an H200 that is
not here. What they compute is checked on a GPU, by the first-minute check and `.ci/gpu_check.sh`.
"""

import importlib
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_distill import devices
from jax_distill.attention import Mask, attention, default_attention, hopper
from jax_distill.base.errors import UserError

PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_cuda13_plugin")
INSTALLED = importlib.util.find_spec("jla") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="needs the extra hopper")


def gpu(capability: str = "9.0") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        platform="gpu", compute_capability=capability, device_kind="NVIDIA H200"
    )


def as_if_installed(monkeypatch) -> None:
    monkeypatch.setattr(hopper, "TRIED", jax.__version__)
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda name: name)


def inputs(dtype, width: int) -> tuple[jax.Array, ...]:
    """Shapes only: [1,8,4,Q], [1,8,2,Q] twice."""
    return tuple(jnp.zeros((1, 8, heads, width), dtype) for heads in (4, 2, 2))


MASK = Mask(jnp.ones((1, 8), jnp.int32))


@pytest.mark.skipif(INSTALLED, reason="the extra is installed")
def test_without_the_package_one_line_says_what_to_install():
    with pytest.raises(UserError) as caught:
        attention(*inputs(jnp.bfloat16, 64), MASK, implementation="hopper")
    assert str(caught.value) == (
        "expected the package jax-linear-attention (Python 3.12 or newer) for train.attention "
        "hopper, got none; run pip install 'jax_distill[hopper]', or set --train.attention "
        "blockwise"
    )


@pytest.mark.parametrize(
    "device,dtype,width,words",
    [
        (gpu("8.0"), jnp.bfloat16, 64, "a Hopper GPU"),
        (gpu(), jnp.float32, 64, "bfloat16 or float16 for train.attention hopper, got float32"),
        (gpu(), jnp.bfloat16, 96, "a head dim of 64 or 128 for train.attention hopper, got 96"),
        (None, jnp.bfloat16, 64, "got cpu; set --train.attention blockwise"),
    ],
)
def test_what_the_kernels_refuse_is_refused_in_one_line(monkeypatch, device, dtype, width, words):
    as_if_installed(monkeypatch)
    with devices.tracing_for(device), pytest.raises(UserError, match=words) as caught:
        attention(*inputs(dtype, width), MASK, implementation="hopper")
    assert "\n" not in str(caught.value) and "install" not in str(caught.value)


def test_another_release_of_jax_is_refused(monkeypatch):
    as_if_installed(monkeypatch)
    monkeypatch.setattr(hopper, "TRIED", "0.0.1")
    refused = hopper.hopper_refuses(jnp.dtype(jnp.bfloat16), 64, gpu())
    assert refused == ("JAX 0.0.1", jax.__version__)


@pytest.mark.parametrize(
    "dtype,length,head_dim,expected",
    [
        (jnp.bfloat16, 32768, 128, "cudnn"),
        (jnp.bfloat16, 65536, 128, "hopper"),
        (jnp.float16, 262144, 64, "hopper"),
        (jnp.bfloat16, 65536, 256, "blockwise"),
        (jnp.float32, 65536, 128, "blockwise"),
    ],
)
def test_they_run_by_default_where_blockwise_would(monkeypatch, dtype, length, head_dim, expected):
    assert default_attention(dtype, 65536, head_dim, device=gpu("8.0")) == "blockwise"
    as_if_installed(monkeypatch)
    with devices.tracing_for(gpu()):
        assert default_attention(dtype, length, head_dim) == expected


@needs_package
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_packages_own_definition_is_ours(window, with_sinks):
    """Its plain-JAX op has the arguments and the meaning that its kernels document: documents, a
    window that counts the query itself, sinks as logits; grouped heads in the same order."""
    theirs = importlib.import_module("jla.layers.attention").attention
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 24, 4, 64), "key": (2, 24, 2, 64), "value": (2, 24, 2, 64)}
    arrays = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    if with_sinks:
        arrays["sinks"] = jnp.asarray(rng.normal(size=4), jnp.float32)
    segments = jnp.asarray([[1] * 7 + [2] * 12 + [0] * 5, [1] * 24], jnp.int32)
    cotangent = jnp.asarray(rng.normal(size=shapes["query"]), jnp.float32)

    def ours(arrays):
        return jnp.sum(
            attention(**arrays, mask=Mask(segments, window), implementation="reference") * cotangent
        )

    def package(arrays):
        q, k, v = (arrays[name] for name in shapes)
        options = {"segment_ids": segments, "sliding_window": window, "sinks": arrays.get("sinks")}
        return jnp.sum(theirs(q, k, v, implementation="xla", **options) * cotangent)

    right = jax.value_and_grad(ours)(arrays)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got = jax.value_and_grad(package)(arrays)
    # fp32 sums of at most 24 terms of 64-wide logits in another order: 1e-5 of the largest value.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(np.asarray(b)).max())


@needs_package
@pytest.mark.skipif(not PLUGIN, reason="needs jax's CUDA plugin: pip install 'jax_distill[plan]'")
def test_the_kernels_compile_for_an_h200_in_linear_memory():
    """gpt-oss's window and sinks on a packed row of 8K: temporaries below [T,T] bytes, of one head
    at one byte a weight."""
    (device,) = devices.planned_devices(devices.GPUS["h200"])
    whole = NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())
    length = 8192

    def shape(*size: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, dtype, sharding=whole)

    def total(query, key, value, sinks, segments):
        mask = Mask(segments, 128)
        mixed = attention(query, key, value, mask, sinks=sinks, implementation="hopper")
        return jnp.sum(mixed.astype(jnp.float32))

    kv = shape(1, length, 2, 64)
    shapes = [shape(1, length, 8, 64), kv, kv, shape(8), shape(1, length, dtype=jnp.int32)]
    with devices.tracing_for(device), jax.numpy_rank_promotion("allow"):
        program = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
        compiled = devices.compile_ahead(program, *shapes, planned=True)
    assert compiled.as_text().count("mosaic_gpu") >= 3  # forward, dq, dk and dv
    assert devices.memory_of(compiled).temps < length * length
