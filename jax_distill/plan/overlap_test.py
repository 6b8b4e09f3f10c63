"""Which of a schedule's collectives run beside other kernels, by hand."""

import pytest

from jax_distill.plan.hlo import read_hlo
from jax_distill.plan.overlap import find_overlap

# A loop of 3 turns. Over 4 devices a gather of f32[64,8] sends 2048 · 3/4 bytes. Beside it: a
# matmul of 2·16·32·8 FLOPs. Then a pair with nothing between; then two pairs on their way at once,
# beside one kernel of 2 · 4·64·8 bytes; a gather that is no pair; one as `async-start`.
PROGRAM = """
%gathered (g: f32[16,8]) -> f32[64,8] {
  %g = f32[16,8]{1,0} parameter(0)
  ROOT %inner = f32[64,8]{1,0} all-gather(%g), dimensions={0}
}

%body (carry: (f32[16,32], f32[32,8], f32[16,8], s32[])) -> (f32[16,32], f32[32,8], f32[16,8], s32[]) {
  %carry = (f32[16,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, s32[]) parameter(0)
  %x = f32[16,32]{1,0} get-tuple-element(%carry), index=0
  %w = f32[32,8]{1,0} get-tuple-element(%carry), index=1
  %y = f32[16,8]{1,0} get-tuple-element(%carry), index=2
  %i = s32[] get-tuple-element(%carry), index=3
  %s1 = (f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%y), dimensions={0}
  %dot = f32[16,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d1 = f32[64,8]{1,0} all-gather-done(%s1)
  ROOT %out = (f32[16,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, s32[]) tuple(%x, %w, %dot, %i)
}

%condition (carry.1: (f32[16,32], f32[32,8], f32[16,8], s32[])) -> pred[] {
  %carry.1 = (f32[16,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, s32[]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (p: (f32[16,32], f32[32,8], f32[16,8], s32[])) -> f32[64,8] {
  %p = (f32[16,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, s32[]) parameter(0)
  %while = (f32[16,32]{1,0}, f32[32,8]{1,0}, f32[16,8]{1,0}, s32[]) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %z = f32[16,8]{1,0} get-tuple-element(%while), index=2
  %s2 = (f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%z), dimensions={0}
  %d2 = f32[64,8]{1,0} all-gather-done(%s2)
  %s3 = (f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%z), dimensions={0}
  %s4 = (f32[16,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%z), dimensions={0}
  %neg = f32[64,8]{1,0} negate(%d2)
  %d3 = f32[64,8]{1,0} all-gather-done(%s3)
  %d4 = f32[64,8]{1,0} all-gather-done(%s4)
  %plain = f32[64,8]{1,0} all-gather(%z), dimensions={0}
  %s5 = ((f32[16,8]{1,0}), f32[64,8]{1,0}) async-start(%z), calls=%gathered
  %neg.1 = f32[64,8]{1,0} negate(%neg)
  ROOT %d5 = f32[64,8]{1,0} async-done(%s5)
}
"""  # noqa: E501


@pytest.mark.parametrize("links", [256.0, 2048.0])  # slower and faster than what is beside them
def test_collectives_run_beside_the_kernels_between_their_start_and_done(links):
    found = find_overlap(read_hlo(PROGRAM), devices=4, flops=4096.0, memory=1024.0, links=links)
    one = 2048 * 3 / 4 / links  # seconds of a gather alone
    matmul = max(2 * 16 * 32 * 8 / 4096, 4 * (16 * 32 + 32 * 8 + 16 * 8) / 1024)
    negated = 2 * 4 * 64 * 8 / 1024
    assert found.links == pytest.approx((3 + 5) * one)
    assert found.kernels == pytest.approx(3 * matmul + 2 * negated)
    # In the loop; of the two at once, both together; of the last one.
    hidden = 3 * min(one, matmul) + min(2 * one, negated) + min(one, negated)
    assert found.hidden == pytest.approx(hidden)
