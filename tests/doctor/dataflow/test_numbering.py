"""Value numbering: equal values have equal numbers, and different values different ones."""

import pytest

from reshard.doctor.dataflow.flow import Numbering
from tests.doctor.fragments import Analysis, text

FUSED = """%first {
  %a = f32[2,8]{1,0} parameter(0)
  %s = f32[1,8]{1,0} slice(%a), slice={[0:1], [0:8]}
  ROOT %n = f32[1,8]{1,0} negate(%s)
}

%second {
  %b = f32[2,8]{1,0} parameter(0)
  %t = f32[1,8]{1,0} slice(%b), slice={[0:1], [0:8]}
  ROOT %m = f32[1,8]{1,0} negate(%t)
}

%third {
  %c = f32[2,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} slice(%c), slice={[1:2], [0:8]}
  ROOT %o = f32[1,8]{1,0} negate(%u)
}

"""


def equal(*lines, names, before=""):
    """Whether two values have one number."""
    analysis = Analysis(text(*lines, before=before))
    numbering = Numbering(analysis.flow)
    first, second = (numbering.of(analysis.value(name)) for name in names)
    assert first == numbering.of(analysis.value(names[0]))
    return first == second


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("f32[2,8]{0,1} copy(%p)", "f32[2,8]{1,0} copy(%p)", True),
        ("f32[16]{0} reshape(%p)", "f32[16]{0} reshape(%p)", True),
        ("f32[16]{0} reshape(%p), metadata={op_name=\"a\"}", "f32[16]{0} reshape(%p), sharding={replicated}", True),
        ("f32[16]{0} reshape(%p)", "f32[4,4]{1,0} reshape(%p)", False),
        ("f32[16]{0} reshape(%p)", "f32[16]{0} bitcast(%p)", False),
        ("f32[16]{0} reshape(%p)", "f32[16]{0} reshape(%q)", False),
        ("f32[1,8] slice(%p), slice={[0:1], [0:8]}", "f32[1,8] slice(%p), slice={[1:2], [0:8]}", False),
        ("s32[] constant(2)", "s32[] constant(2)", True),
        ("s32[] constant(2)", "s32[] constant(3)", False),
        ("s32[] constant(2)", "u32[] constant(2)", False),
        ("f32[2,8]{1,0} negate(%p)", "f32[2,8]{1,0} negate(%p)", False),  # computed outside of fusions: not compared
        ("f32[2,8]{1,0} custom-call(%p)", "f32[2,8]{1,0} custom-call(%p)", False),
        ("f32[2,8]{1,0} parameter(2)", "f32[2,8]{1,0} parameter(3)", False),
    ],
)  # fmt: skip
def test_two_values_of_the_entry(first, second, expected):
    lines = ["%q = f32[2,8]{1,0} parameter(1)", f"%x = {first}", f"ROOT %y = {second}"]
    assert equal(*lines, names=("x", "y")) == expected


@pytest.mark.parametrize(("names", "expected"), [("nm", True), ("st", True), ("no", False), ("su", False)])
def test_values_that_are_recomputed_inside_fusions(names, expected):
    calls = [f"%f{at} = f32[1,8] fusion(%p), kind=kLoop, calls=%{name}" for at, name in enumerate(("first", "second"))]
    lines = [*calls, "ROOT %f2 = f32[1,8] fusion(%p), kind=kLoop, calls=%third"]
    assert equal(*lines, names=names, before=FUSED) == expected


def test_fusions_of_different_operands():
    lines = [
        "%q = f32[2,8]{1,0} parameter(1)",
        "%f = f32[1,8] fusion(%p), kind=kLoop, calls=%first",
        "%g = f32[1,8] fusion(%q), kind=kLoop, calls=%second",
    ]
    assert not equal(*lines, names="nm", before=FUSED)


def test_parts_of_a_tuple():
    parts = [f"%{name} = f32[2] get-tuple-element(%c), index={at}" for name, at in (("x", 0), ("y", 1), ("z", 0))]
    lines = ["%c = (f32[2], f32[2]) custom-call(%p)", *parts]
    assert equal(*lines, names="xz") and not equal(*lines, names="xy")
