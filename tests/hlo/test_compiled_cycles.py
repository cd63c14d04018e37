"""Estimated cycles of compiled modules: loops times their trips, the longest branch, collectives left out."""

from __future__ import annotations

import pytest

from reshard import hlo
from reshard.errors import NotationError
from reshard.hlo.compiled_cycles import count_cycles, estimates_cycles

TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%fused { ROOT %n = f32[8]{0} negate(%p0), backend_config={"window_config":{"estimated_cycles":"999"}} }

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %twelve = s32[] constant(12)
  ROOT %less = pred[] compare(%i, %twelve), direction=LT
}

%body (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %v = f32[8]{0} get-tuple-element(%q), index=1
  %five = s32[] constant(5)
  %next = s32[] add(%j, %five)
  %w = f32[8]{0} fusion(%v), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
  %g = f32[8]{0} all-to-all(%w), replica_groups={{0,1}}, dimensions={0}, backend_config={"x":{"estimated_cycles":"7"}}
  ROOT %t = (s32[], f32[8]) tuple(%next, %g)
}

%short (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %b = f32[8]{0} copy(%a), backend_config={"window_config":{"estimated_cycles":"20"}}
}

%long (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %d = f32[8]{0} copy(%c), backend_config={"window_config":{"estimated_cycles":"3000"}}
}

ENTRY %main (p: f32[8], k: pred[]) -> f32[8] {
  %zero = s32[] constant(0)
  %p = f32[8]{0} parameter(0)
  %k = pred[] parameter(1)
  %start = (s32[], f32[8]) tuple(%zero, %p)
  %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  %r = f32[8]{0} get-tuple-element(%loop), index=1
  %s = f32[8]{0} reshape(%r), backend_config={"integer_config":{"integer":"5"}}
  ROOT %o = f32[8]{0} conditional(%k, %s, %s), true_computation=%short, false_computation=%long
}
"""


def test_loops_count_with_their_trips_branches_with_the_longest_and_collectives_not():
    module = hlo.parse(TEXT)
    assert count_cycles(module) == 3 * 100 + 3000
    assert count_cycles(module, module.computation("body")) == 100
    assert [one.name for one in module.entry.instructions if estimates_cycles(one)] == []
    assert estimates_cycles(module.computation("body").by_name["w"])


def test_what_is_no_module_is_refused():
    with pytest.raises(NotationError, match="module"):
        count_cycles(TEXT)  # pyright: ignore[reportArgumentType]
