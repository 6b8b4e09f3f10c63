"""`gradient_chunks`: the dlogits of several chunks kept, one matmul for their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_distill.losses import Head, Layout, kl_and_grads, loss
from jax_distill.losses.agreement_test import (
    RTOL,
    Case,
    assert_agrees,
    chunks_of,
    expected,
    make_case,
    on_device,
    relative_error,
    run,
)
from jax_distill.losses.live_test import V, inputs, objective_of
from jax_distill.losses.masks_test import poisoned
from jax_distill.losses.numerics_test import equations, nearly_taught, taught_by_itself
from jax_distill.losses.sharded_test import OBJECTIVE, compiled, make_mesh
from jax_distill.losses.sharded_test import run as run_split
from jax_distill.objective import Execution, Objective
from jax_distill.synthetic import rounding_by_norm


@pytest.mark.parametrize(
    ("chunk", "merged", "valid_first"),
    [(4, 2, True), (4, 3, False), (5, 9, False), (3, 4, False)],
    ids=["remainder of a chunk", "remainder of one", "one group, no multiple", "multiple"],
)
def test_groups_of_any_size_give_the_numbers_of_float64(chunk, merged, valid_first):
    """12 or 13 positions; masked cells hold NaN, infinities and ids out of range."""
    case = make_case(41, length=12 if chunk == 3 else 13, bias=True, soft_cap=9.0)
    wanted = expected(case, Objective(ce_weight=0.3))
    hidden, batch = poisoned(case.hidden, case.batch)
    case = Case(hidden, case.head, batch)
    options: dict[str, Any] = dict(chunk=chunk, gradient_chunks=merged, valid_first=valid_first)
    assert_agrees(run("fused", case, Objective(ce_weight=0.3), **options), wanted)


def test_a_group_is_one_matmul_for_each_gradient_and_one_chunk_of_fp32_logits():
    """Read in the jaxpr: of 48 positions 8 at a time have logits, 24 have dlogits."""
    case = on_device(taught_by_itself(5.0, length=48), jnp.bfloat16)
    execution = chunks_of(8, case, gradient_chunks=3)

    def core(hidden, head, batch):
        return kl_and_grads(hidden, head, batch, execution=execution)

    closed = jax.make_jaxpr(core)(*case)
    found = list(equations(closed.jaxpr))
    matmuls = [
        (tuple(v.aval.shape for v in eqn.invars), eqn.outvars[0].aval.shape)
        for eqn in found
        if eqn.primitive.name == "dot_general"
    ]
    assert sorted(matmuls) == sorted(
        [
            (((1, 8, 32), (251, 32)), (1, 8, 251)),
            (((1, 24, 251), (251, 32)), (1, 24, 32)),
            (((1, 24, 251), (1, 24, 32)), (251, 32)),
        ]
    )
    wide = {
        (var.aval.shape[1], str(var.aval.dtype))
        for eqn in found
        for var in eqn.outvars
        if var.aval.shape[-1:] == (251,) and len(var.aval.shape) == 3
    }
    assert {size for size, dtype in wide if dtype == "float32"} == {8}
    assert {dtype for size, dtype in wide if size == 24} == {"bfloat16"}


def test_a_group_keeps_three_digits_in_bf16():
    """32 chunks in groups of 4."""
    case, wanted = nearly_taught(20.0)
    _, got = run("fused", case, dtype=jnp.bfloat16, chunk=8, gradient_chunks=4)
    for name in ("hidden", "weight"):
        assert relative_error(got[name], wanted[name]) < rounding_by_norm("bfloat16", 2)


def test_a_live_teacher_takes_groups():
    """The order in which an fp32 sum is made is all that differs."""
    hidden, weight, _, live = inputs(2.0)

    def total(hidden: Any, weight: Any, merged: int) -> Any:
        head = Head(weight, vocab_size=V)
        execution = Execution(chunk_size=4, gradient_chunks=merged)
        return loss(hidden, head, live, objective_of("jsd"), execution).loss

    graded = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), static_argnums=2)
    one, other = (jax.tree.leaves(graded(hidden, weight, merged)) for merged in (1, 4))
    for a, b in zip(one, other, strict=True):
        assert relative_error(np.asarray(b), np.asarray(a)) < RTOL


@pytest.mark.parametrize("explicit", [True, False])
def test_rows_and_vocabulary_may_be_split(explicit):
    case = make_case(
        31, rows=8, width=16, vocab_size=260, padding=4, temperature=2.0, bias=True, soft_cap=9.0
    )
    mesh = make_mesh(2, 2)
    split = dict(layout=Layout(mesh, rows=("data",), vocabulary="tensor")) if explicit else {}
    execution = Execution(chunk_size=4 * 4, row_shards=2, gradient_chunks=2, **split)
    assert_agrees(run_split(*compiled(on_device(case), mesh, execution)), expected(case, OBJECTIVE))
