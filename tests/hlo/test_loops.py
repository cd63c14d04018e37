"""The trip counts of loops that XLA does not annotate; every condition of the inference is violated once."""

import pytest

from reshard import hlo
from tests.hlo.fragments import computation, module

SUM = "(s32[], f32[8], s32[])"
START = [
    "%zero = s32[] constant(0)",
    "%count = s32[] constant(12)",
    "%v = f32[8] parameter(0)",
    f"%start = {SUM} tuple(%zero, %v, %count)",
]
CONDITION = [
    f"%p = {SUM} parameter(0)",
    "%i = s32[] get-tuple-element(%p), index=0",
    "%bound = s32[] constant(12)",
    "ROOT %less = pred[] compare(%i, %bound), direction=LT",
]
BODY = [
    f"%q = {SUM} parameter(0)",
    "%j = s32[] get-tuple-element(%q), index=0",
    "%k = s32[] get-tuple-element(%q), index=2",
    "%w = f32[8] get-tuple-element(%q), index=1",
    "%one = s32[] constant(1)",
    "%next = s32[] add(%j, %one)",
    f"ROOT %t = {SUM} tuple(%next, %w, %k)",
]


def count(start=START, condition=CONDITION, body=BODY, config="", **replaced):
    """The trip count of the loop, with parts of its lines replaced."""
    before = computation("condition", *condition) + computation("body", *body)
    loop = f"ROOT %loop = {SUM} while(%start), condition=%condition, body=%body{config}"
    read = module(*start, loop, before=before)
    return hlo.trip_count(read, read.entry, read.entry.by_name["loop"])


def but(lines, old, new):
    assert any(old in line for line in lines)
    return [line.replace(old, new) for line in lines]


def test_a_counted_loop():
    assert count() == 12


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "expected"),
    [
        (0, 12, 5, "LT", 3),
        (3, 12, 1, "LT", 9),
        (0, 12, 1, "LE", 13),
        (0, 12, 5, "LE", 3),
        (0, 10, 5, "LE", 3),
        (12, 0, -1, "GT", 12),
        (12, 0, -5, "GE", 3),
        (12, 3, 1, "LT", 0),
        (0, 12, -1, "LT", None),
        (0, 12, 0, "LT", None),
        (0, 12, 1, "GT", None),
        (0, 12, 1, "NE", None),
    ],
)
def test_counted_loops_of_all_kinds(start, bound, step, direction, expected):
    trips = count(
        but(START, "constant(0)", f"constant({start})"),
        but(but(CONDITION, "constant(12)", f"constant({bound})"), "LT", direction),
        but(BODY, "constant(1)", f"constant({step})"),
    )
    steps = range(start, bound + {"LE": 1, "GE": -1}.get(direction, 0), step) if expected else range(0)
    assert trips == expected == (expected and len(steps))


def test_a_counter_that_is_subtracted_from():
    body = but(BODY, "add(%j, %one)", "subtract(%j, %one)")
    assert count(but(START, "constant(0)", "constant(20)"), but(CONDITION, "LT", "GT"), body) == 8
    reverse = but(BODY, "add(%j, %one)", "subtract(%one, %j)")
    assert count(but(START, "constant(0)", "constant(20)"), but(CONDITION, "LT", "GT"), reverse) is None


def test_the_step_may_be_the_first_operand():
    assert count(body=but(BODY, "add(%j, %one)", "add(%one, %j)")) == 12


def test_copies_are_seen_through():
    start = [*but(START, "tuple(%zero", "tuple(%c2")]
    start[1:1] = ["%c1 = (s32[], s32[], u32[]) copy-start(%zero)", "%c2 = s32[] copy-done(%c1)"]
    body = but(BODY, "add(%j", "add(%jj")
    body.insert(2, "%jj = s32[] copy(%j)")
    assert count(start, body=body) == 12


def test_the_bound_may_be_carried_along():
    condition = but(CONDITION, "constant(12)", "get-tuple-element(%p), index=2")
    assert count(condition=condition) == 12
    changed = but(BODY, "tuple(%next, %w, %k)", "tuple(%next, %w, %next)")
    assert count(condition=condition, body=changed) is None


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("start", "tuple(%zero, %v, %count)", "custom-call(%zero, %v, %count)"),
        ("start", "%zero = s32[] constant(0)", "%zero = s32[] parameter(1)"),
        ("condition", "compare(%i, %bound), direction=LT", "custom-call(%i, %bound)"),
        ("condition", "%bound = s32[] constant(12)", "%bound = s32[] custom-call(%p)"),
        ("body", "add(%j, %one)", "multiply(%j, %one)"),
        ("body", "add(%j, %one)", "add(%one, %one)"),
        ("body", "add(%j, %one)", "add(%k, %one)"),
        ("body", "%one = s32[] constant(1)", "%one = s32[] custom-call(%q)"),
        ("body", "tuple(%next, %w, %k)", "custom-call(%next, %w, %k)"),
    ],
)
def test_a_count_that_depends_on_data_is_unknown(part, old, new):
    lines = {"start": START, "condition": CONDITION, "body": BODY}
    lines[part] = but(lines[part], old, new)
    assert count(**lines) is None


@pytest.mark.parametrize(
    "config",
    [
        ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}',
        ", backend_config={known_trip_count={n=7}}",
    ],
)
def test_the_annotation_of_xla_comes_first(config):
    assert count(config=config) == 7
