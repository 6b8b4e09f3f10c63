"""Experts over a mesh against their definition: by all-gather, and by the ragged exchange with its
one call, which no CPU has, done by gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill import sharding
from jax_distill.base.errors import UserError
from jax_distill.model.expert_mesh import ExpertSplit, mix_on_mesh
from jax_distill.model.experts import ExpertWeights, _mix, mix_experts
from jax_distill.model.experts_test import GATE, definition

N, D, E, K, F = 48, 6, 8, 2, 4


def by_gathers(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`jax.lax.ragged_all_to_all` as its documentation defines it."""
    own, row = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0], dtype=jnp.int32)
    parts, *sizes = (
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    for sender, part in enumerate(parts):
        first, size, to = (x[sender, own] for x in sizes)
        inside = (row >= to) & (row < to + size)
        values = part[jnp.clip(first + row - to, 0, part.shape[0] - 1)]
        output = jnp.where(inside[:, None], values, output)
    return output


@pytest.mark.parametrize("ragged,expert,tensor", [(False, 2, 2), (False, 4, 1), (True, 4, 1)])
def test_values_and_gradients_are_the_definitions(monkeypatch, ragged, expert, tensor):
    """With fsdp 2, in float64; no token wants two of the experts, most want the first. What is sent
    in vain, or twice, would show in a sum or a gradient."""
    if ragged:
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", by_gathers)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(N, E)) + np.array([3.0, 0, -99, -99, 0, 0, 0, 0])
    experts = np.argsort(-scores, axis=1)[:, :K].astype(np.int32)
    mesh = sharding.make_mesh(data=1, fsdp=2, expert=expert, tensor=tensor)
    split = ExpertSplit.of(mesh, experts=E, widths=F)._replace(ragged=ragged)
    assert (split.group, split.widths) == ("expert", "tensor" if tensor > 1 else None)
    with jax.enable_x64(True):
        shapes = [(N, D), (N, K), (E, D, 2 * F), (E, 2 * F), (E, F, D), (E, D)]
        x, weights, *own = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
        d_out = jnp.asarray(rng.normal(size=(N, D)))

        def on_mesh(x, weights, own):
            mix = lambda *inputs: _mix(*inputs, GATE, 8)  # noqa: E731
            return mix_on_mesh(mix, split, x, experts, weights, own)

        def defined(x, weights, own):
            return definition(x, experts, weights, own)

        def results(function):
            def total(*inputs):
                out = function(*inputs)
                return jnp.sum(out * d_out), out

            inputs = (x, weights, ExpertWeights(*own))
            return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*inputs)

        got, expected = results(on_mesh), results(defined)
    # fp32 is nowhere: sums of some dozen terms in another order.
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("implementation", ["ragged", "hopper"])
def test_what_cannot_split_experts_here_is_refused(implementation):
    rows = sharding.batch_sharding(sharding.make_mesh(data=1, fsdp=2, expert=4))
    own = ExpertWeights(*(jnp.zeros(s) for s in ((8, 6, 8), (8, 8), (8, 4, 6), (8, 6))))
    inputs = jnp.zeros((8, 6)), jnp.zeros((8, 2), jnp.int32), jnp.zeros((8, 2)), own
    with pytest.raises(UserError, match=f"train.experts blocks .*got {implementation}; set mesh"):
        mix_experts(*inputs, gate=GATE, row_sharding=rows, implementation=implementation)
