"""Rows split, vocabulary split, both: the same numbers, and nothing V wide travels."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_distill.devices import QUICK_COMPILE
from jax_distill.losses import Layout, kl_and_grads, loss
from jax_distill.losses.agreement_test import (
    RTOL,
    Case,
    Expected,
    assert_agrees,
    expected,
    make_case,
    on_device,
)
from jax_distill.objective import IMPLEMENTATIONS, Execution, Objective

OBJECTIVE = Objective(ce_weight=0.3)
TOKENS = 264  # of which a device holds 132 or 33: no other size here is one of these
GATHER = re.compile(r"= (.*?) (?:all-gather|all-to-all)(?:-start)?\(")


def make_mesh(rows: int, vocabulary: int) -> Mesh:
    devices = np.array(jax.devices()[: rows * vocabulary]).reshape(rows, vocabulary)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def problem() -> tuple[Case, Expected]:
    """[8,13,..] rows with holes, a head of 264 rows of which 260 are tokens, and the answer."""
    case = make_case(
        31,
        rows=8,
        width=16,
        vocab_size=260,
        padding=TOKENS - 260,
        temperature=2.0,
        bias=True,
        soft_cap=9.0,
    )
    return on_device(case), expected(case, OBJECTIVE)


def compiled(case: Case, mesh: Mesh, execution: Execution) -> tuple[Any, Case]:
    """The program for inputs already split over the mesh, gradients split as their inputs; and
    the case so split."""

    def value(trained, batch):
        sums = loss(*trained, batch, OBJECTIVE, execution)
        return sums.loss, sums

    rows, vocabulary, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P("tensor"), P()))
    hidden, head, batch = case
    split = Case(
        *(
            jax.tree.map(lambda x, place=sharding: jax.device_put(x, place), each)
            for each, sharding in ((hidden, rows), (head, vocabulary), (batch, rows))
        )
    )
    function = jax.jit(
        jax.value_and_grad(value, has_aux=True),
        out_shardings=((whole, whole), (rows, vocabulary)),
        compiler_options=QUICK_COMPILE,
    )
    return function.lower((split.hidden, split.head), split.batch).compile(), split


def run(program: Any, case: Case) -> Any:
    """Sums and gradients by name, as float64_loss gives them."""
    (_, sums), (d_hidden, d_head) = program((case.hidden, case.head), case.batch)
    gradients = {"hidden": d_hidden, "weight": d_head.weight, "bias": d_head.bias}
    return (
        {name: float(value) for name, value in sums._asdict().items()},
        {name: np.asarray(gradient, np.float64) for name, gradient in gradients.items()},
    )


def moved_shapes(text: str, kind: re.Pattern) -> set[tuple[int, ...]]:
    """The shapes of everything that a kind of collective yields in a compiled program."""
    moved = " ".join(found[1] for line in text.splitlines() if (found := kind.search(line)))
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", moved)}


def moved_sizes(text: str, kind: re.Pattern) -> set[int]:
    """Every dimension of those."""
    return {size for shape in moved_shapes(text, kind) for size in shape}


def logit_shapes(text: str, tokens: int) -> set[tuple[int, int]]:
    """B and C of all fp32 [B,C,V] in a compiled program, V being `tokens`; [1,1,V] is the bias."""
    found = re.findall(rf"f32\[(\d+),(\d+),{tokens}\]", text)
    return {(int(rows), int(positions)) for rows, positions in found} - {(1, 1)}


@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (8, 1), (1, 8), (4, 2), (2, 4)],
)
def test_an_explicit_split_changes_no_number(problem, rows, vocabulary):
    """1, 2, 4, 8 devices: rows, vocabulary, both. Only numbers per token travel, and a chunk is
    chunk_size tokens of a device."""
    case, wanted = problem
    mesh = make_mesh(rows, vocabulary)
    layout = Layout(mesh, rows=("data",), vocabulary="tensor")
    program, split = compiled(case, mesh, Execution(chunk_size=4 * 8 // rows, layout=layout))
    assert_agrees(run(program, split), wanted)
    text = program.as_text()
    assert not moved_sizes(text, GATHER)
    # What is summed and as wide is a gradient of the head, [V/n,D] or [V/n], never logits.
    logits = {(8 // rows, 4, TOKENS // vocabulary)}
    assert logit_shapes(text, TOKENS // vocabulary) == {(8 // rows, 4)}
    assert not logits & moved_shapes(text, re.compile(r"= (.*?) all-reduce(?:-start)?\("))


def test_a_gather_would_be_found():
    """What the tests here look for, in a program that has it."""
    mesh = make_mesh(1, 8)
    split, whole = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P())
    logits = jax.ShapeDtypeStruct((4, TOKENS), jnp.float32, sharding=split)
    text = jax.jit(lambda z: z, out_shardings=whole).lower(logits).compile().as_text()
    assert TOKENS in moved_sizes(text, GATHER)


@pytest.mark.parametrize("vocabulary", [1, 2])
def test_an_explicit_split_takes_bf16_and_rows_with_unlike_numbers_of_valid_positions(vocabulary):
    """Valid positions first, no bias: each device runs as many chunks as its own rows have, and
    what is kept of d_hidden in 16 bits is split with the rows. `kl_and_grads` is split alike."""
    case = on_device(make_case(32, rows=4, width=16, vocab_size=64), jnp.bfloat16)
    some = case.batch.mask & (jnp.arange(13)[None] < jnp.array([[13], [9], [2], [0]]))
    hidden, head, batch = case._replace(batch=replace(case.batch, mask=some))
    layout = Layout(make_mesh(2, vocabulary), rows=("data",), vocabulary="tensor")

    def results(execution):
        def value(hidden, head):
            return loss(hidden, head, batch, execution=execution).loss / 7.0

        def both(hidden, head):
            core = kl_and_grads(hidden, head, batch, execution=execution)
            return jax.value_and_grad(value, (0, 1))(hidden, head), core

        return jax.jit(both, compiler_options=QUICK_COMPILE)(hidden, head)

    whole = results(Execution(chunk_size=16, valid_first=True))
    split = results(Execution(chunk_size=8, valid_first=True, layout=layout))
    for got, wanted in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        assert got.dtype == wanted.dtype
        # Sums in another order: to RTOL of what is summed, then perhaps to the next bf16.
        size = float(jnp.max(jnp.abs(wanted.astype(jnp.float32))))
        step = 2.0**-7 if got.dtype == jnp.bfloat16 else RTOL
        # bf16 dlogits may round the other way, too, where their fp32 values differ.
        np.testing.assert_allclose(
            np.float64(got), np.float64(wanted), rtol=step, atol=size * (RTOL + 2.0**-9 * 2.0**-3)
        )


@pytest.mark.parametrize(
    ("implementation", "rows", "vocabulary"),
    [(name, *split) for name in IMPLEMENTATIONS for split in ((8, 1), (1, 8), (4, 2))]
    + [("fused", *split) for split in ((2, 1), (1, 2), (2, 2), (1, 4))],
)
def test_the_compiler_splits_every_implementation(problem, implementation, rows, vocabulary):
    """Plain jit on split inputs; `fused` with its valid positions first. A chunk's logits are
    [chunk_size,V] on each device."""
    case, wanted = problem
    execution = Execution(
        implementation,
        chunk_size=4 * 8 // rows,
        valid_first=implementation == "fused",
        row_shards=rows,
    )
    program, split = compiled(case, make_mesh(rows, vocabulary), execution)
    assert_agrees(run(program, split), wanted)
    text = program.as_text()
    assert not moved_sizes(text, GATHER) & {TOKENS, TOKENS // vocabulary}
    if implementation in ("fused", "fused_chunked"):
        assert logit_shapes(text, TOKENS // vocabulary) == {(8 // rows, 4)}


def test_the_weight_gradient_is_summed_over_the_devices_once(problem):
    """With an explicit split of rows the sum of [V,D] stands after the loop, not in it."""
    case, _ = problem
    mesh = make_mesh(8, 1)
    program, _ = compiled(case, mesh, Execution(chunk_size=4, layout=Layout(mesh, rows=("data",))))
    sums = [
        line
        for line in program.as_text().splitlines()
        if "all-reduce(" in line and f"f32[{TOKENS},16]" in line
    ]
    assert len(sums) == 1 and "while/body" not in sums[0]


def test_chunk_size_is_tokens_per_device():
    """Rows per device follow from row_shards or the layout; T and 1 bound the positions."""
    layout = Layout(make_mesh(4, 2), rows=("data",), vocabulary="tensor")
    assert layout.row_shards == 4 and Layout(make_mesh(4, 2)).row_shards == 1
    assert Execution(chunk_size=64).positions_per_chunk(8, 100) == 8
    assert Execution(chunk_size=64, row_shards=4).positions_per_chunk(8, 100) == 32
    assert Execution(chunk_size=64, layout=layout).positions_per_chunk(8, 100) == 32
    assert Execution(chunk_size=64, row_shards=8).positions_per_chunk(8, 50) == 50
    assert Execution(chunk_size=4).positions_per_chunk(8, 100) == 1


def test_a_layout_is_refused_where_it_means_nothing(problem):
    layout = Layout(make_mesh(1, 1))
    with pytest.raises(ValueError, match="layout"):
        loss(*problem[0], execution=Execution("dense", layout=layout))
    with pytest.raises(ValueError, match="layout"):
        loss(*problem[0], execution=Execution(layout="rows"))
    with pytest.raises(ValueError, match="row_shards"):
        Execution(row_shards=2, layout=layout)
