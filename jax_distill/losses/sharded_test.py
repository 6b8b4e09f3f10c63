"""Rows split, vocabulary split, both: the same numbers, and nothing V wide travels."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_distill.config import Refusal
from jax_distill.losses import IMPLEMENTATIONS, Layout
from jax_distill.losses.agreement_test import FAST_COMPILE, arrays, assert_agrees
from jax_distill.losses.float64_test import float64_loss, make_batch

KNOBS = {"vocab_size": 260, "ce_weight": 0.3, "temperature": 2.0, "soft_cap": 9.0}
COLUMNS = 264  # of which a device holds 132 or 33: no other size here is one of these
GATHER = re.compile(r"= (.*?) (?:all-gather|all-to-all)(?:-start)?\(")


def make_mesh(rows: int, columns: int) -> Mesh:
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def problem() -> tuple[dict[str, Any], Any]:
    """[8,13,..] rows with holes, a head of 264 columns of which 260 are real, and the answer."""
    batch = make_batch(31, shape=(8, 13, 16, COLUMNS, 5), vocab_size=260, temperature=2.0)
    batch = batch.replace(bias=np.random.default_rng(0).normal(size=COLUMNS))
    data = arrays(batch) | {"bias": jnp.asarray(batch.bias, jnp.float32)}
    return data, float64_loss(batch, **KNOBS)


def compiled(implementation: str, data: dict[str, Any], mesh: Mesh, **knobs: Any) -> Any:
    """The program for inputs already split over the mesh, gradients split as their inputs."""
    columns = {"lm_head", "bias"}
    loss = partial(IMPLEMENTATIONS[implementation], chunk_size=4, **KNOBS, **knobs)

    def value(trained, rest):
        sums = loss(**trained, **rest)
        return sums.loss, sums

    def shaped(name):
        sharding = NamedSharding(mesh, P("tensor") if name in columns else P("data"))
        return jax.ShapeDtypeStruct(data[name].shape, data[name].dtype, sharding=sharding)

    trained = {name: shaped(name) for name in ("hidden", "lm_head", "bias")}
    rest = {name: shaped(name) for name in data if name not in trained}
    places = {name: leaf.sharding for name, leaf in trained.items()}
    whole = NamedSharding(mesh, P())
    function = jax.jit(
        jax.value_and_grad(value, has_aux=True),
        out_shardings=((whole, whole), places),
        compiler_options=FAST_COMPILE,
    )
    return function.lower(trained, rest).compile(), trained, rest


def run(program: Any, shapes: list[dict[str, Any]], data: dict[str, Any]) -> Any:
    """Sums and gradients by name, as float64_loss gives them."""
    split = [{k: jax.device_put(data[k], s.sharding) for k, s in part.items()} for part in shapes]
    (_, sums), gradients = program(*split)
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


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (8, 1), (1, 8), (4, 2), (2, 4)],
)
def test_a_split_by_hand_changes_no_number(problem, rows, columns):
    """1, 2, 4, 8 devices: rows, vocabulary, both. Only numbers per token travel."""
    data, wanted = problem
    mesh = make_mesh(rows, columns)
    layout = Layout(mesh, rows=("data",), vocabulary="tensor")
    program, *shapes = compiled("fused", data, mesh, layout=layout)
    assert_agrees(run(program, shapes, data), wanted)
    text = program.as_text()
    assert not moved_sizes(text, GATHER)
    # What is summed and as wide is a gradient of the head, [V/n,D] or [V/n], never logits.
    logits = {(8 // rows, 4, COLUMNS // columns)}
    assert not logits & moved_shapes(text, re.compile(r"= (.*?) all-reduce(?:-start)?\("))


def test_a_gather_would_be_found():
    """What the tests here look for, in a program that has it."""
    mesh = make_mesh(1, 8)
    split, whole = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P())
    logits = jax.ShapeDtypeStruct((4, COLUMNS), jnp.float32, sharding=split)
    text = jax.jit(lambda z: z, out_shardings=whole).lower(logits).compile().as_text()
    assert COLUMNS in moved_sizes(text, GATHER)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_split_by_hand_takes_bf16_and_rows_of_unlike_length(columns):
    """Valid positions first, no bias: each device runs as many chunks as its own rows have, and
    what is kept of d_hidden in 16 bits is split with the rows."""
    batch = make_batch(32, shape=(4, 13, 16, 64, 5))
    mask = batch.mask & (np.arange(13) < np.array([[13], [9], [2], [0]]))
    batch = batch.replace(mask=mask)
    data = arrays(batch, jnp.bfloat16)
    inputs = (data.pop("hidden"), data.pop("lm_head"))
    layout = Layout(make_mesh(2, columns), rows=("data",), vocabulary="tensor")

    def gradients(layout):
        loss = partial(IMPLEMENTATIONS["fused"], chunk_size=4, valid_first=True, layout=layout)
        function = jax.value_and_grad(lambda *trained: loss(*trained, **data).loss / 7.0, (0, 1))
        return jax.jit(function, compiler_options=FAST_COMPILE)(*inputs)

    (wanted, whole), (got, split) = gradients(None), gradients(layout)
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)
    for a, b in zip(split, whole, strict=True):
        assert a.dtype == jnp.bfloat16
        # Sums in another order may round to the next bf16.
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "rows", "columns"),
    [(name, *split) for name in IMPLEMENTATIONS for split in ((8, 1), (1, 8), (4, 2))]
    + [("fused", *split) for split in ((2, 1), (1, 2), (2, 2), (1, 4))],
)
def test_the_compiler_splits_every_implementation(problem, implementation, rows, columns):
    """Plain jit on split inputs; `fused` with its valid positions first."""
    data, wanted = problem
    first = implementation == "fused"
    program, *shapes = compiled(implementation, data, make_mesh(rows, columns), valid_first=first)
    assert_agrees(run(program, shapes, data), wanted)
    assert not moved_sizes(program.as_text(), GATHER) & {COLUMNS, COLUMNS // columns}


def test_the_head_gradient_is_summed_over_the_devices_once(problem):
    """With rows split by hand the sum of [V,D] stands after the loop, not in it."""
    data, _ = problem
    mesh = make_mesh(8, 1)
    program, *_ = compiled("fused", data, mesh, layout=Layout(mesh, rows=("data",)))
    sums = [
        line
        for line in program.as_text().splitlines()
        if "all-reduce(" in line and f"f32[{COLUMNS},16]" in line
    ]
    assert len(sums) == 1 and "while/body" not in sums[0]


def test_a_layout_is_refused_where_it_means_nothing(problem):
    data, _ = problem
    with pytest.raises(Refusal, match="layout"):
        IMPLEMENTATIONS["dense"](**data, layout=Layout(make_mesh(1, 1)))
