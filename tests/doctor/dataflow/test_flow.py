"""Regions, and the origins of values behind fusions, tuples and asynchronous calls."""

import pytest

from reshard.doctor import examine
from reshard.errors import NotationError
from reshard.hlo import Array
from tests.doctor.fragments import HLO_DATA, RECORDED, Analysis, text

FUSED = """%fused {
  %a = f32[2,8]{1,0} parameter(1)
  %b = f32[2,8]{1,0} parameter(0)
  ROOT %t = (f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%b, %a)
}

%wrapped {
  %w = f32[2,8]{1,0} parameter(0)
  ROOT %g = f32[8,8]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
}

"""
WRAPPERS = ("fusion", "call", "tuple", "get-tuple-element", "opt-barrier")
PAIR = "(f32[2,8]{1,0}, f32[2,8]{1,0})"


def origin(analysis, name, path=()):
    """The origin of a value: its computation, name and path."""
    value = analysis.flow.origin(analysis.value(name, path))
    return value.scope.computation.name, value.name, value.path


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["%n = f32[2,8]{1,0} negate(%p)", "ROOT %r = f32[2,8]{1,0} copy(%n)"], ("main", "r", ())),
        ([f"%t = {PAIR} tuple(%p, %q)", "ROOT %r = f32[2,8]{1,0} get-tuple-element(%t), index=1"], ("main", "q", ())),
        ([f"%c = {PAIR} custom-call(%p)", f"%b = {PAIR} opt-barrier(%c)",
          "ROOT %r = f32[2,8]{1,0} get-tuple-element(%b), index=1"], ("main", "c", (1,))),
        ([f"%f = {PAIR} fusion(%p, %q), kind=kLoop, calls=%fused",
          "ROOT %r = f32[2,8]{1,0} get-tuple-element(%f), index=0"], ("main", "p", ())),
        ([f"%f = {PAIR} fusion(%p, %q), kind=kLoop, calls=%fused",
          "ROOT %r = f32[2,8]{1,0} get-tuple-element(%f), index=1"], ("main", "q", ())),
        (["ROOT %r = f32[8,8]{1,0} call(%p), to_apply=%wrapped"], ("wrapped", "g", ())),
        (["%s = ((f32[2,8]{1,0}), f32[8,8]{1,0}) async-start(%p), calls=%wrapped",
          "ROOT %r = f32[8,8]{1,0} async-done(%s), calls=%wrapped"], ("wrapped", "g", ())),
        (["%s = (f32[2,8]{1,0}, f32[2,8]{1,0}, u32[]) copy-start(%p)",
          "ROOT %r = f32[2,8]{1,0} copy-done(%s)"], ("main", "p", ())),
        (["%s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
          "ROOT %r = f32[8,8]{1,0} all-gather-done(%s)"], ("main", "s", ())),
    ],
    ids=["copy", "tuple", "barrier", "fusion, first", "fusion, second", "call", "async", "async copy", "start, done"],
)  # fmt: skip
def test_the_origin_of_a_value(lines, expected):
    analysis = Analysis(text("%q = f32[2,8]{1,0} parameter(1)", *lines, before=FUSED))
    assert origin(analysis, "r") == expected


def test_a_computation_that_calls_itself_is_refused():
    called = "%a {\n  %p = f32[2] parameter(0)\n  ROOT %c = f32[2] call(%p), to_apply=%a\n}\n\n"
    with pytest.raises(NotationError, match="computation a calls itself"):
        examine(f"HloModule m\n\n{called}{called.replace('%a {', 'ENTRY %e {')}")


def test_an_offloaded_call_gets_its_operands_from_its_update():
    lines = ["%s = ((), ()) call-start(), to_apply=%wrapped", "%u = (f32[8,8]{1,0}) call-update(%s, %p)",
             "ROOT %r = f32[8,8]{1,0} call-done(%u)"]  # fmt: skip
    analysis = Analysis(text(*lines, before=FUSED))
    assert origin(analysis, "r") == ("wrapped", "g", ())
    assert origin(analysis, "w") == ("main", "p", ())


def test_the_arrays_of_values():
    start = "%s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}"
    nested = "%c = (f32[3]{0}, (s32[], f32[5,7]{1,0})) custom-call(%p)"
    analysis = Analysis(text(start, nested, "ROOT %d = f32[8,8]{1,0} all-gather-done(%s)"))
    assert analysis.value("s").array == Array("f32", (8, 8), "1,0") and analysis.value("s").opcode == "all-gather"
    assert analysis.value("c").array is None and analysis.value("c", (0, 1)).array is None
    assert analysis.value("c", (1, 1)).array.dims == (5, 7)
    origins = list(analysis.flow.array_origins(analysis.value("c")))
    assert [value.path for value in origins] == [(0,), (1, 0), (1, 1)]


NESTED = """%inner {
  %i = f32[2,8]{1,0} parameter(0)
  ROOT %n = f32[2,8]{1,0} negate(%i)
}

%outer {
  %o = f32[2,8]{1,0} parameter(0)
  ROOT %f = f32[2,8]{1,0} fusion(%o), kind=kLoop, calls=%inner
}

%check {
  %c = f32[2,8]{1,0} parameter(0)
  ROOT %less = pred[] custom-call(%c)
}

"""


def test_regions_and_their_instructions():
    call = "%x = f32[2,8]{1,0} call(%p), to_apply=%inner"
    loop = "ROOT %w = f32[2,8]{1,0} while(%x), condition=%check, body=%outer"
    analysis = Analysis(text(call, loop, before=NESTED))
    names = {
        region.computation.name: [site.instruction.name for site in analysis.flow.sites(region)]
        for region in analysis.flow.regions
    }
    assert names == {"main": ["p", "i", "n", "x", "w"], "check": ["c", "less"], "outer": ["o", "i", "n", "f"]}
    outer = next(region for region in analysis.flow.regions if region.computation.name == "outer")
    check = next(region for region in analysis.flow.regions if region.computation.name == "check")
    assert analysis.flow.body(check) is analysis.flow.body(outer) is outer
    assert analysis.flow.body(analysis.flow.regions[0]) is None


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_origins_of_recorded_modules_are_final(path):
    """An origin is its own origin, and no instruction that only wraps data."""
    analysis = Analysis(path.read_text())
    for region in analysis.flow.regions:
        for site in analysis.flow.sites(region):
            for value in analysis.flow.operands(analysis.value(site.instruction.name)):
                assert analysis.flow.origin(value) == value
                assert value.array is None or value.opcode not in WRAPPERS, value


def test_the_origin_of_a_collective_that_overlaps_with_computation():
    analysis = Analysis((HLO_DATA / "overlap_v5e_0.12.0.1.hlo").read_text())
    done = analysis.value("async-collective-done")
    assert (done.opcode, analysis.flow.origin(done).opcode) == ("fusion", "all-gather")
