"""Every implementation against the definition, and which one runs where."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.attention import Mask, attention, backward_workspace, cudnn, default_attention


@pytest.mark.parametrize("implementation", ["grouped", "blockwise"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("groups,dtype", [(1, jnp.float32), (2, jnp.bfloat16), (4, jnp.float32)])
def test_the_implementations_are_the_definition(groups, dtype, window, with_sinks, implementation):
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 9, 4, 8), "key": (2, 9, groups, 8), "value": (2, 9, groups, 8)}
    inputs = {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}
    if with_sinks:
        inputs["sinks"] = jnp.asarray(rng.normal(size=4), dtype)
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9], jnp.int32)

    def squares(inputs, implementation):
        mixed = attention(**inputs, mask=Mask(segment_ids, window), implementation=implementation)
        assert mixed.dtype == dtype
        return jnp.square(mixed.astype(jnp.float32)).sum()

    program = jax.jit(jax.value_and_grad(squares), static_argnums=1)
    ours, theirs = (program(inputs, name) for name in (implementation, "reference"))
    # bf16: weights, output and each gradient are rounded once, 2^-9 each. What is rounded are terms
    # of the size of Σ_q d_output·value, which may cancel (with a window of 1 they do).
    terms = 2 * float(jnp.square(inputs["value"].astype(jnp.float32)).sum(-1).max())
    tolerance = 1e-6 if dtype == jnp.float32 else 4 * 2.0**-9
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        left, right = (np.asarray(x, np.float32) for x in (left, right))
        np.testing.assert_allclose(left, right, atol=tolerance * max(terms, np.abs(right).max()))


def kernel(query, key, value, bias, window):
    """What cuDNN computes: output and logsumexp [B,H,T], causal, with bias and window."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bthq,bshq->bhts", query, key) / np.sqrt(query.shape[-1]) + bias
    distance = np.arange(query.shape[1])[:, None] - np.arange(query.shape[1])[None, :]
    seen = (distance >= 0) & (distance < (window or query.shape[1]))
    logits = jnp.where(jnp.asarray(seen)[None, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.einsum("bhts,bshq->bthq", jnp.exp(logits - lse[..., None]), value), lse


def kernel_backward(query, key, value, bias, lse, output, d_output, window):
    """The formula of a flash backward, from the output and logsumexp that it is given."""
    ratio = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(x, ratio, axis=2) for x in (key, value))
    logits = jnp.einsum("bthq,bshq->bhts", query, keys) / np.sqrt(query.shape[-1]) + bias
    distance = np.arange(query.shape[1])[:, None] - np.arange(query.shape[1])[None, :]
    seen = (distance >= 0) & (distance < (window or query.shape[1]))
    weights = jnp.where(jnp.asarray(seen)[None, None], jnp.exp(logits - lse[..., None]), 0.0)
    delta = jnp.sum(d_output * output, axis=-1).transpose(0, 2, 1)
    d_weights = jnp.einsum("bthq,bshq->bhts", d_output, values)
    d_logits = weights * (d_weights - delta[..., None]) / np.sqrt(query.shape[-1])
    fold = (*key.shape[:3], ratio, key.shape[3])
    return (
        jnp.einsum("bhts,bshq->bthq", d_logits, keys),
        jnp.einsum("bhts,bthq->bshq", d_logits, query).reshape(fold).sum(3),
        jnp.einsum("bhts,bthq->bshq", weights, d_output).reshape(fold).sum(3),
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_what_is_done_around_cudnns_kernels_is_right(monkeypatch, window, with_sinks):
    """The kernels run on a GPU alone; here their formulas stand in for them, in fp32."""

    class Forward:
        @staticmethod
        def bind(query, key, value, bias, *_, variadic_args, sliding_window_length, **__):
            assert variadic_args == (True, False)
            return kernel(query, key, value, bias, sliding_window_length)

    class Backward:
        @staticmethod
        def bind(query, key, value, bias, *rest, variadic_args, sliding_window_length, **__):
            assert variadic_args == (True, False)
            return kernel_backward(query, key, value, bias, *rest[6:], sliding_window_length)

    monkeypatch.setattr(cudnn.fa, "_dot_product_attention_fwd_p_wrapper", Forward)
    monkeypatch.setattr(cudnn.fa, "_dot_product_attention_bwd_p_wrapper", Backward)
    monkeypatch.setattr(cudnn.fa, "get_large_negative_number", lambda dtype: jnp.asarray(-1e30))
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 10, 4, 8), "key": (2, 10, 2, 8), "value": (2, 10, 2, 8)}
    inputs = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    if with_sinks:
        inputs["sinks"] = jnp.asarray(rng.normal(size=4), jnp.float32)
    mask = Mask(jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0, 0], [1] * 10], jnp.int32), window)

    def squares(inputs, implementation):
        return jnp.square(attention(**inputs, mask=mask, implementation=implementation)).sum()

    ours, theirs = (jax.value_and_grad(squares)(inputs, name) for name in ("cudnn", "reference"))
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5 * np.abs(np.asarray(right)).max())


def test_cudnns_workspace_is_what_the_library_answered():
    """cuDNN 9.28 asked with an H200's properties, B=1, H=24, Q=128: GB."""
    for length, gigabytes in ((8192, 0.20), (32768, 0.81), (131072, 3.2), (262144, 6.5)):
        found = backward_workspace(rows=1, length=length, heads=24, head_dim=128)
        assert found / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_other_releases_of_jax_do_not_reach_its_private_functions(monkeypatch):
    fake = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert default_attention(jnp.bfloat16, 4096, 64, device=fake) == "cudnn"
    monkeypatch.setattr(cudnn.jax, "__version__", "0.13.0")
    assert default_attention(jnp.bfloat16, 4096, 64, device=fake) == "blockwise"


def test_large_logits_do_not_leak_across_documents():
    """The mask is added to the logits: it must outweigh any of them."""
    query = jnp.full((1, 4, 1, 8), 1e4, jnp.float32)
    value = jnp.asarray([1.0, 1.0, 5.0, 5.0])[None, :, None, None] * jnp.ones((1, 4, 1, 8))
    segment_ids = jnp.asarray([[1, 1, 2, 2]], jnp.int32)
    mixed = attention(query, query, value, Mask(segment_ids), implementation="grouped")
    assert np.array_equal(mixed, value)


def test_the_reference_is_the_formula_with_and_without_a_window():
    """In float64 by loops: softmax of q·k/√Q over t − w < s ≤ t in the query's own segment."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 7, heads, 4)) for heads in (4, 2, 2))
    segments = [1, 1, 1, 1, 2, 2, 0]
    for window in (None, 2, 100):
        expected = np.zeros(query.shape)
        for t, head in np.ndindex(7, 4):
            seen = [
                s
                for s in range(t + 1)
                if segments[s] == segments[t] and (window is None or t - s < window)
            ]
            weights = np.exp([query[0, t, head] @ key[0, s, head // 2] / 2 for s in seen])
            expected[0, t, head] = weights / weights.sum() @ value[0, seen, head // 2]
        mask = Mask(jnp.asarray([segments]), window)
        inputs = (jnp.asarray(x, jnp.float32) for x in (query, key, value))
        got = attention(*inputs, mask, implementation="reference")
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_mask_is_compared_by_jit_by_its_window_alone():
    masks = [Mask(jnp.ones((1, 4), jnp.int32), window) for window in (None, 3, 3)]
    none, three, again = map(jax.tree.structure, masks)
    assert three == again != none


@pytest.mark.parametrize(
    "device,dtype,length,head_dim,expected",
    [
        (("cpu", None), jnp.bfloat16, 8, 64, "grouped"),
        (("gpu", "9.0"), jnp.bfloat16, 8, 64, "cudnn"),
        (("gpu", "8.0"), jnp.float16, 8, 128, "cudnn"),
        (("gpu", "9.0"), jnp.float32, 8, 64, "grouped"),
        (("gpu", "9.0"), jnp.bfloat16, 7, 64, "grouped"),
        (("gpu", "9.0"), jnp.bfloat16, 8, 192, "cudnn"),
        (("gpu", "8.9"), jnp.bfloat16, 8, 192, "grouped"),
        (("gpu", "9.0"), jnp.bfloat16, 32768, 128, "cudnn"),
        (("gpu", "9.0"), jnp.bfloat16, 65536, 128, "blockwise"),
        (("gpu", "9.0"), jnp.float32, 4096, 64, "blockwise"),
        (("cpu", None), jnp.float32, 4096, 64, "blockwise"),
        (("gpu", "9.0"), jnp.bfloat16, 8, 36, "grouped"),
        (("gpu", "7.5"), jnp.bfloat16, 8, 64, "grouped"),
        (("gpu", "gfx942"), jnp.bfloat16, 8, 64, "grouped"),
        (("tpu", None), jnp.bfloat16, 8, 64, "grouped"),
    ],
)
def test_cudnn_is_chosen_where_its_kernel_takes_the_input(
    monkeypatch, device, dtype, length, head_dim, expected
):
    platform, capability = device
    fake = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [fake])
    assert default_attention(dtype, length, head_dim) == expected
