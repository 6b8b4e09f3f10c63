"""Bytes and times of programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest

from jax_distill.devices import GPUS
from jax_distill.plan.hlo import read_hlo, totals
from jax_distill.plan.roofline import Rates, instructions_of, make_roofline, rates_of
from jax_distill.plan.traffic import host_bytes, link_bytes

# A loop of 3 turns: a matmul [16,32]·[32,8] of a slice of x, added to the sum that it writes, and
# a kernel that writes 16 rows of y, in JAX's scope `loss`; after it a collective outside of it.
LOOP = """
%sum (x: f32[48,32], at: s32[], w: f32[32,8], total: f32[16,8]) -> f32[16,8] {
  %x = f32[48,32]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %w = f32[32,8]{1,0} parameter(2)
  %total = f32[16,8]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %rows = f32[16,32]{1,0} dynamic-slice(%x, %at, %zero), dynamic_slice_sizes={16,32}
  %dot = f32[16,8]{1,0} dot(%rows, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %added = f32[16,8]{1,0} add(%total, %dot)
}

%put (y: bf16[48,8], part: f32[16,8], at: s32[]) -> bf16[48,8] {
  %y = bf16[48,8]{1,0} parameter(0)
  %part = f32[16,8]{1,0} parameter(1)
  %at.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %half = bf16[16,8]{1,0} convert(%part)
  ROOT %updated = bf16[48,8]{1,0} dynamic-update-slice(%y, %half, %at.1, %zero.1)
}

%body (carry: (f32[48,32], f32[32,8], f32[16,8], bf16[48,8], s32[])) -> (f32[48,32], f32[32,8], f32[16,8], bf16[48,8], s32[]) {
  %carry = (f32[48,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, bf16[48,8]{1,0}, s32[]) parameter(0)
  %cx = f32[48,32]{1,0} get-tuple-element(%carry), index=0
  %cw = f32[32,8]{1,0} get-tuple-element(%carry), index=1
  %ct = f32[16,8]{1,0} get-tuple-element(%carry), index=2
  %cy = bf16[48,8]{1,0} get-tuple-element(%carry), index=3
  %ci = s32[] get-tuple-element(%carry), index=4
  %f1 = f32[16,8]{1,0} fusion(%cx, %ci, %cw, %ct), kind=kCustom, calls=%sum, metadata={op_name="jit(f)/jvp(loss)/while/body/dot_general"}
  %f2 = bf16[48,8]{1,0} fusion(%cy, %f1, %ci), kind=kLoop, calls=%put, metadata={op_name="jit(f)/jvp(loss)/while/body/update"}
  ROOT %out = (f32[48,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, bf16[48,8]{1,0}, s32[]) tuple(%cx, %cw, %f1, %f2, %ci)
}

%condition (carry.1: (f32[48,32], f32[32,8], f32[16,8], bf16[48,8], s32[])) -> pred[] {
  %carry.1 = (f32[48,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, bf16[48,8]{1,0}, s32[]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (p: (f32[48,32], f32[32,8], f32[16,8], bf16[48,8], s32[])) -> f32[16,8] {
  %p = (f32[48,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, bf16[48,8]{1,0}, s32[]) parameter(0)
  %while = (f32[48,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, bf16[48,8]{1,0}, s32[]) while(%p), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %last = f32[16,8]{1,0} get-tuple-element(%while), index=2
  ROOT %all = f32[16,8]{1,0} all-reduce(%last), to_apply=%condition, metadata={op_name="jit(f)/sum"}
}
"""  # noqa: E501


def test_a_loop_is_counted_by_hand():
    hlo = read_hlo(LOOP)
    rates = Rates(flops=1e6, memory=1e3, links=1e2, pcie=1e2)
    found = make_roofline(hlo, rates, devices=4, in_loss=instructions_of(hlo, "loss"))
    assert found.loss_flops == found.flops == 3 * 2 * 16 * 32 * 8
    assert found.loss_sum_bytes == 3 * 2 * 4 * 16 * 8  # read and written
    index, rows = 4, 4 * 16 * 32
    assert found.loss_matmul_bytes == 3 * (rows + index + 4 * 32 * 8)
    assert found.loss_bytes == 3 * (4 * 16 * 8 + index + 2 * 16 * 8)  # of y what is written
    alone = 2 * 4 * 16 * 8  # the collective's own
    assert found.memory_bytes == alone + sum(
        (found.loss_sum_bytes, found.loss_matmul_bytes, found.loss_bytes)
    )
    assert found.link_bytes == 2 * 4 * 16 * 8 * 3 / 4
    assert found.seconds["matmuls"] == found.flops / 1e6
    assert found.seconds["links"] == found.link_bytes / 1e2
    exposed = (found.loss_sum_bytes + found.loss_bytes) / 1e3
    assert found.loss_ratio == pytest.approx(1 + exposed / found.seconds["matmuls"])


def test_copies_to_the_host_and_back_are_counted_once_each_way():
    """As XLA writes them for an H200: a slice in its own fusion, and a whole vector."""
    text = """
%take (a: f32[28,64]) -> f32[1,64] {
  %a = f32[28,64]{1,0:S(5)} parameter(0)
  %i = s32[] constant(0)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}
}

%give (b: f32[28,64], new: f32[1,64]) -> f32[28,64] {
  %b = f32[28,64]{1,0:S(5)} parameter(0)
  %new = f32[1,64]{1,0} parameter(1)
  %j = s32[] constant(0)
  ROOT %kept = f32[28,64]{1,0:S(5)} dynamic-update-slice(%b, %new, %j, %j)
}

ENTRY %main (m: f32[28,64], v: f32[32]) -> f32[28,64] {
  %m = f32[28,64]{1,0:S(5)} parameter(0)
  %v = f32[32]{0:S(5)} parameter(1)
  %start = (f32[32]{0}, f32[32]{0:S(5)}, u32[]) copy-start(%v)
  %done = f32[32]{0} copy-done(%start)
  %back = (f32[32]{0:S(5)}, f32[32]{0}, u32[]) copy-start(%done)
  %stay = f32[32]{0:S(5)} copy-done(%back)
  %one = f32[1,64]{1,0} fusion(%m), kind=kLoop, calls=%take
  ROOT %all = f32[28,64]{1,0:S(5)} fusion(%m, %one), kind=kLoop, calls=%give
}
"""
    assert totals(read_hlo(text), host_bytes) == {"to device": 4 * 96, "to host": 4 * 96}


def test_a_compiled_matmul_reads_its_operands_and_writes_its_result_in_every_turn():
    """On the CPU that is here: what XLA fuses, or calls by another name, must not be lost."""

    def chain(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((160, 320), (5, 320, 320))]
    hlo = read_hlo(jax.jit(chain).lower(*shapes).compile().as_text())
    found = make_roofline(hlo, Rates(1.0, 1.0, 1.0, 1.0), devices=1, in_loss=set())
    least = 5 * 4 * (2 * 160 * 320 + 320 * 320)
    # Of each turn tanh, the slice of a weight and a copy of each may be kernels of their own.
    assert least <= found.memory_bytes <= 4 * least
    assert totals(hlo, link_bytes(1)) == {} and found.loss_ratio == 0.0


def test_rates_are_shares_of_the_data_sheet():
    rates, gpu = rates_of("NVIDIA H200"), GPUS["h200"]
    assert rates is not None and rates_of("CPU") is None
    assert rates.flops == pytest.approx(790e12, rel=0.01)  # docs/LOSS.md, measured
    assert rates.memory == 0.9 * gpu.bandwidth and rates.pcie < rates.links < rates.memory
