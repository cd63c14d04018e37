"""Where values come from, which are equal, and the integers that depend on the device alone."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, describe_instruction
from reshard.doctor.dataflow.scalars import UNKNOWN, Scalars
from reshard.errors import NotationError
from reshard.hlo import Array
from tests.doctor.fragments import Analysis, text

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


def describe_sort(*computations):
    """What a sort does by the last of these."""
    name = f"c{len(computations) - 1}"
    before = "".join(f"%c{at} {{\n  %p = f32[8] parameter(0)\n{body}\n}}\n\n" for at, body in enumerate(computations))
    entry = f"ENTRY %e {{\n  %x = f32[8] parameter(0)\n  ROOT %s = f32[8] sort(%x), to_apply=%{name}\n}}"
    module = hlo.parse(f"HloModule m\n\n{before}{entry}")
    return describe_instruction(module, module.entry.root)


def test_what_is_called_is_described_in_one_pass():
    """Computations that each call the one before twice, and one that calls itself."""
    twice = "  %a = f32[8] map(%p), to_apply=%c{0}\n  ROOT %b = f32[8] map(%a), to_apply=%c{0}"
    sine, cosine = (f"  ROOT %r = f32[8] {opcode}(%p)" for opcode in ("sine", "cosine"))
    called = [twice.format(at) for at in range(40)]
    assert describe_sort(sine, *called) != describe_sort(cosine, *called)
    assert describe_sort(sine, *called) == describe_sort(sine.replace("%r", "%other"), *called)
    itself = "  ROOT %r = f32[8] map(%p), to_apply=%c0"
    assert describe_sort(itself) != describe_sort(sine)


def test_branches_inside_of_what_is_called_count():
    sine, cosine = (f"  ROOT %r = f32[8] {opcode}(%p)" for opcode in ("sine", "cosine"))
    either = "  %q = pred[] constant(true)\n  ROOT %r = f32[8] conditional(%q, %p, %p), true_computation=%c0, "
    either += "false_computation=%c1"
    assert describe_sort(sine, cosine, either) != describe_sort(sine, sine, either)


def test_an_offloaded_call_gets_its_operands_from_its_update():
    lines = ["%s = ((), ()) call-start(), to_apply=%wrapped", "%u = (f32[8,8]{1,0}) call-update(%s, %p)",
             "ROOT %r = f32[8,8]{1,0} call-done(%u)"]  # fmt: skip
    analysis = Analysis(text(*lines, before=FUSED))
    assert origin(analysis, "r") == ("wrapped", "g", ())
    assert origin(analysis, "w") == ("main", "p", ())


FUSED_OF_NUMBERING = "".join(
    f"%{name} {{\n  %{a} = f32[2,8]{{1,0}} parameter(0)\n"
    f"  %{s} = f32[1,8]{{1,0}} slice(%{a}), slice={{[{row}:{row + 1}], [0:8]}}\n"
    f"  ROOT %{n} = f32[1,8]{{1,0}} negate(%{s})\n}}\n\n"
    for name, (a, s, n), row in (("first", "asn", 0), ("second", "btm", 0), ("third", "cuo", 1))
)


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


def test_the_arrays_of_values():
    start = "%s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}"
    nested = "%c = (f32[3]{0}, (s32[], f32[5,7]{1,0})) custom-call(%p)"
    analysis = Analysis(text(start, nested, "ROOT %d = f32[8,8]{1,0} all-gather-done(%s)"))
    assert analysis.value("s").array == Array("f32", (8, 8), "1,0") and analysis.value("s").opcode == "all-gather"
    assert analysis.value("c").array is None and analysis.value("c", (0, 1)).array is None
    assert analysis.value("c", (1, 1)).array.dims == (5, 7)
    origins = list(analysis.flow.array_origins(analysis.value("c")))
    assert [value.path for value in origins] == [(0,), (1, 0), (1, 1)]


@pytest.mark.parametrize(("names", "expected"), [("nm", True), ("st", True), ("no", False), ("su", False)])
def test_values_that_are_recomputed_inside_fusions(names, expected):
    calls = [f"%f{at} = f32[1,8] fusion(%p), kind=kLoop, calls=%{name}" for at, name in enumerate(("first", "second"))]
    lines = [*calls, "ROOT %f2 = f32[1,8] fusion(%p), kind=kLoop, calls=%third"]
    assert equal(*lines, names=names, before=FUSED_OF_NUMBERING) == expected


def scalars(*lines, before="", devices=6, header=", num_partitions=6"):
    """The numbers of the values of an entry, by name."""
    body = "\n".join(f"  {line}" for line in lines)
    flow = Flow(hlo.parse(f"HloModule m{header}\n\n{before}\nENTRY %main {{\n{body}\n}}\n"))
    known = Scalars(flow, devices)
    return lambda name, path=(): known.at(HloValue(flow.regions[0], name, path))


def test_the_numbers_of_a_device():
    """2 replicas of 3 partitions: device 4 is partition 1 of replica 1."""
    header = ", replica_count=2, num_partitions=3"
    at = scalars("%p = u32[] partition-id()", "ROOT %r = u32[] replica-id()", header=header)
    assert at("p").tolist() == [0, 1, 2, 0, 1, 2]
    assert at("r").tolist() == [0, 0, 0, 1, 1, 1]


BINARY = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: 0 if b == 0 else int(math.copysign(abs(a) // abs(b), a * b)),
    "remainder": lambda a, b: 0 if b == 0 else int(math.copysign(abs(a) % abs(b), a)),
    "minimum": min,
    "maximum": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
SMALL = st.integers(-50, 50)


@pytest.mark.parametrize("opcode", BINARY)
@settings(max_examples=20)
@given(SMALL, SMALL)
@example(-7, 3)
@example(7, -3)
@example(-7, 0)
def test_arithmetic_of_two_numbers(opcode, a, b):
    at = scalars(f"%a = s32[] constant({a})", f"%b = s32[] constant({b})", f"ROOT %r = s32[] {opcode}(%a, %b)")
    assert at("r").tolist() == [BINARY[opcode](a, b)] * 6


ID = "%id = u32[] partition-id()"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("u32[] shift-left(%id, %two)", [0, 4, 8, 12, 16, 20]),
        ("u32[] shift-right-logical(%id, %one)", [0, 0, 1, 1, 2, 2]),
        ("s32[] negate(%id)", [0, -1, -2, -3, -4, -5]),
        ("pred[] not(%id)", [1, 0, 0, 0, 0, 0]),
        ("u32[] clamp(%one, %id, %two)", [1, 1, 2, 2, 2, 2]),
        ("u32[] subtract(%id, %two)", [2**32 - 2, 2**32 - 1, 0, 1, 2, 3]),
        ("s64[] convert(%id)", [0, 1, 2, 3, 4, 5]),
        ("u32[1] reshape(%id)", [[0], [1], [2], [3], [4], [5]]),
        ("u32[2] broadcast(%id), dimensions={}", [[i, i] for i in range(6)]),
        ("u32[3] iota(), iota_dimension=0", [[0, 1, 2]] * 6),
        ("u32[2,3] iota(), iota_dimension=1", [[[0, 1, 2], [0, 1, 2]]] * 6),
        ("u32[] select(%first, %two, %id)", [2, 1, 2, 3, 4, 5]),
        ("s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}", [[7], [5], [3], [2], [2], [2]]),  # clamped
        ("s32[2] dynamic-slice(%table, %one), dynamic_slice_sizes={2}", [[5, 3]] * 6),
        ("pred[3] constant({true, false, true})", [[1, 0, 1]] * 6),
    ],
)
def test_one_instruction(line, expected):
    lines = [
        ID,
        "%one = u32[] constant(1)",
        "%two = u32[] constant(2)",
        "%zero = u32[] constant(0)",
        "%first = pred[] compare(%id, %zero), direction=EQ",
        "%table = s32[4] constant({7, 5, 3, 2})",
    ]
    assert scalars(*lines, f"ROOT %r = {line}")("r").tolist() == expected


@pytest.mark.parametrize(
    "line",
    [
        "s32[] parameter(0)",
        "f32[] constant(1)",
        "s32[] custom-call(%id)",
        "s32[] add(%id, %data)",
        "s32[1048577] iota(), iota_dimension=0",  # too large to be worth computing
    ],
)
def test_other_values_depend_on_data(line):
    assert scalars(ID, "%data = s32[] parameter(1)", f"ROOT %r = {line}")("r") is None


def test_constants_that_are_not_in_the_text():
    lines = ["%table = s32[16] constant({...})", "%row = s32[1] dynamic-slice(%table, %id), dynamic_slice_sizes={1}"]
    at = scalars(ID, *lines, "%data = s32[1] parameter(1)", "ROOT %r = s32[1] add(%row, %data)")
    assert at("table") is UNKNOWN and at("row") is UNKNOWN and at("r") is None


TUPLE = "(u32[], u32[], u32[], u32[])"
LOOP = f"""%check {{
  %c = {TUPLE} parameter(0)
  ROOT %less = pred[] custom-call(%c)
}}

%body {{
  %q = {TUPLE} parameter(0)
  %kept = u32[] get-tuple-element(%q), index=0
  %changed = u32[] get-tuple-element(%q), index=1
  %one = u32[] get-tuple-element(%q), index=2
  %other = u32[] get-tuple-element(%q), index=3
  %next = u32[] add(%changed, %kept)
  ROOT %t = {TUPLE} tuple(%kept, %next, %other, %one)
}}

"""


@pytest.mark.parametrize(("name", "numbers"), [("kept", [0, 1, 2]), ("changed", None), ("one", None), ("other", None)])
def test_numbers_that_a_loop_passes_on(name, numbers):
    """One element stays, one changes, and two change places."""
    lines = [ID, "%two = u32[] constant(2)", f"%t = {TUPLE} tuple(%id, %id, %id, %two)"]
    body = "\n".join(f"  {line}" for line in [*lines, f"ROOT %w = {TUPLE} while(%t), condition=%check, body=%body"])
    flow = Flow(hlo.parse(f"HloModule m, num_partitions=3\n\n{LOOP}\nENTRY %main {{\n{body}\n}}\n"))
    region = next(region for region in flow.regions if region.computation.name == "body")
    known = Scalars(flow, 3).at(HloValue(region, name))
    assert (None if known is None else known.tolist()) == numbers


def test_numbers_that_a_branch_gets():
    branches = "".join(f"%{name} {{\n  ROOT %b = u32[] parameter(0)\n}}\n\n" for name in ("first", "second"))
    lines = [ID, "%two = u32[] constant(2)", "%twice = u32[] multiply(%id, %two)", "%which = s32[] parameter(0)"]
    line = "ROOT %c = u32[] conditional(%which, %id, %twice), branch_computations={%first, %second}"
    body = "\n".join(f"  {one}" for one in [*lines, line])
    flow = Flow(hlo.parse(f"HloModule m, num_partitions=3\n\n{branches}ENTRY %main {{\n{body}\n}}\n"))
    known = Scalars(flow, 3)
    by_name = {region.computation.name: region for region in flow.regions}
    assert known.at(HloValue(by_name["first"], "b")).tolist() == [0, 1, 2]
    assert known.at(HloValue(by_name["second"], "b")).tolist() == [0, 2, 4]
