"""What is read of XLA's text: matmuls, collectives, what is in memory when."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_distill import sharding
from jax_distill.plan.buffers import Temporaries, Value, live_bytes, read_temporaries
from jax_distill.plan.hlo import (
    collective_bytes,
    hidden_workspace,
    matmul_flops,
    read_hlo,
    totals,
)
from jax_distill.plan.planning import phase_of_source
from jax_distill.plan.program import TEACHER_SCOPE


def test_matmuls_in_a_loop_count_as_often_as_it_turns():
    def chain(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 32), (5, 32, 32))]
    text = jax.jit(chain).lower(*shapes).compile().as_text()
    assert totals(read_hlo(text), matmul_flops) == {"flops": 5 * 2.0 * 16 * 32 * 32}


def test_a_sum_over_devices_is_an_all_reduce_of_its_bytes():
    mesh = sharding.make_mesh(data=2, fsdp=1, devices=jax.devices()[:2])
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("data", None))
    x = jax.ShapeDtypeStruct((6, 100), jnp.float32, sharding=split)
    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)
    found = totals(read_hlo(total.lower(x).compile().as_text()), collective_bytes)
    assert found == {"all-reduce": 1, "all-reduce bytes": 400.0}


def test_gpu_matmuls_are_read_from_their_calls():
    """Lines of a module that XLA made for an H200; on a CPU there are none like them."""
    text = """
ENTRY %main (q: bf16[1,64,6,8], k: bf16[1,64,2,8], a: f32[16,32], b: f32[32,8]) -> f32[16,8] {
  %q = bf16[1,64,6,8]{3,2,1,0} parameter(0)
  %k = bf16[1,64,2,8]{3,2,1,0} parameter(1)
  %a = f32[16,32]{1,0} parameter(2)
  %b = f32[32,8]{1,0} parameter(3)
  %fwd = (bf16[1,6,64,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "6", "64", "64"]}, "mask_type": "CAUSAL"}}
  %bwd = (bf16[1,6,64,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "6", "64", "64"]}, "mask_type": "NO_MASK"}}
  ROOT %c = (f32[16,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501
    square = 6 * 64 * 64 * 8
    expected = 2 * 2 * square / 2 + 5 * 2 * square + 2 * 16 * 32 * 8
    assert totals(read_hlo(text), matmul_flops) == {"flops": expected}


@pytest.mark.parametrize(("length", "gigabytes"), [(8192, 0.20), (32768, 0.81)])
def test_a_workspace_that_xla_does_not_know_of_is_cudnns_own_answer(length, gigabytes):
    """A call in a loop's body as for an H200 that is not there; one that is there, XLA asks."""
    call = """
%body (q: bf16[1,LENGTH,24,128]) -> bf16[1,24,LENGTH,128] {
  %q = bf16[1,LENGTH,24,128]{3,2,1,0} parameter(0)
  ROOT %c = (bf16[1,24,LENGTH,128]{3,1,2,0}, u8[SIZE]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "24", "LENGTH", "LENGTH"]}, "mask_type": "CAUSAL"}}
}
""".replace("LENGTH", str(length))  # noqa: E501
    unknown, known = call.replace("SIZE", "0"), call.replace("SIZE", "4096")
    # Two digits are what H200.md's table has.
    assert hidden_workspace(read_hlo(unknown)) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert hidden_workspace(read_hlo(known)) == 0
    assert hidden_workspace(read_hlo(unknown.replace("Backward", ""))) == 0


def test_a_byte_is_counted_once_and_only_while_it_lives():
    def value(start, size, first, last):
        return Value("x", start, size, first, last, "f32[1]{0}")

    values = [value(0, 10, 0, 2), value(0, 10, 2, 4), value(10, 5, 1, 1), value(5, 20, 4, 4)]
    found = live_bytes(Temporaries(values, list("abcde")), ["a", "b", "b", "a"], ("b", "a"))
    assert found["b"].tolist() == [0, 5, 10, 10, 10]
    assert found["a"].tolist() == [10, 10, 0, 0, 15]


def test_phases_are_read_from_jaxs_names():
    names = {
        "jit(step_fn)/jvp(loss)/while": "loss",
        "jit(step_fn)/transpose(jvp(loss))/mul": "loss",
        "jit(step_fn)/transpose(jvp())/while/body/dot_general": "backward",
        "jit(step_fn)/jvp()/while": "forward",
        "jit(step_fn)/add": "update",
    }
    assert {name: phase_of_source(name, "loss") for name in names} == names
    assert phase_of_source("jit(capture)/while/body/dot_general", TEACHER_SCOPE) == "forward"
    assert phase_of_source("jit(capture)/shmap_body/targets/top_k", TEACHER_SCOPE) == "loss"


def test_words_that_are_not_understood_give_nothing_rather_than_something(tmp_path):
    assert read_temporaries(tmp_path) is None
    (tmp_path / "m.buffer-assignment.txt").write_text(
        "allocation 3: size 8, preallocated-temp:\n value: <7 add @0> (size=8,offset=0): f32[2]\n"
    )
    ranges = tmp_path / "m.live-range.txt"
    ranges.write_text("  InstructionSequence:\n    0:add\n  BufferLiveRange:\n    add{}:0-0\n")
    found = read_temporaries(tmp_path)
    assert found == Temporaries([Value("add", 0, 8, 0, 0, "f32[2]")], ["add"])
    ranges.write_text("  InstructionSequence:\n    0:add\n  Live ranges:\n    add: 0 to 0\n")
    assert read_temporaries(tmp_path) is None
