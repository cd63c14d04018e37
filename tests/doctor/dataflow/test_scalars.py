"""Integers that depend on the device alone, against values worked out by hand and by Python's own arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard import hlo
from reshard.doctor.dataflow.flow import Flow, HloValue
from reshard.doctor.dataflow.scalars import UNKNOWN, Scalars


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
COMPARISONS = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
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


@given(st.sampled_from(sorted(COMPARISONS)), SMALL, SMALL)
def test_comparisons(direction, a, b):
    compare = f"ROOT %r = pred[] compare(%a, %b), direction={direction}"
    at = scalars(f"%a = s32[] constant({a})", f"%b = s32[] constant({b})", compare)
    assert at("r").tolist() == [int(COMPARISONS[direction](a, b))] * 6


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


def test_the_shape_of_the_numbers():
    at = scalars(ID, "%w = u32[2,3] broadcast(%id), dimensions={}", "ROOT %r = u32[3,2] reshape(%w)")
    assert at("r").shape == (6, 3, 2) and at("r").dtype == np.int64
