"""The user's line of an instruction: its own, that of a caller that wraps it, or the nearest one."""

import pytest

from reshard import hlo
from reshard.hlo import Source
from reshard.hlo.origin import CallSite, source_of
from tests.hlo.fragments import GATHER, TABLES, computation, gather_source, metadata, module, only


def test_a_wrapped_collective_has_the_line_of_its_wrapper():
    inner = computation("w", "%p = f32[8] parameter(0)", f"ROOT %g = f32[16] {GATHER}")
    lines = ["%q = f32[8] parameter(0)", f"%s = ((f32[8]), f32[16]) async-start(%q), calls=%w{metadata(2)}"]
    source = only(hlo.collectives(module(*lines, before=inner, tables=TABLES))).source
    assert (source.line, source.exact) == (7, True)


def test_a_collective_in_a_loop_does_not_have_the_line_of_the_loop():
    inner = computation("b", "%p = f32[8] parameter(0)", f"ROOT %g = f32[16] {GATHER}")
    inner += computation("c", "%p = f32[8] parameter(0)")
    lines = ["%q = f32[8] parameter(0)", f"%s = f32[8] while(%q), condition=%c, body=%b{metadata(2)}"]
    assert only(hlo.collectives(module(*lines, before=inner, tables=TABLES))).source == Source("")


@pytest.mark.parametrize(
    ("own", "more", "expected"),
    [
        ("", [f"%n = f32[16] negate(%g){metadata(2)}"],
         Source("f/mul", 'model \\"x\\".py', 7, "loss", exact=False)),
        (', metadata={op_name="w"}', [f"%n = f32[16] negate(%g){metadata(1)}"],
         Source("w", "train.py", 50, "<module>", exact=False)),
        ("", ["%n = f32[16] negate(%g)", f"%m = f32[16] negate(%n){metadata(1)}"],
         Source("f/mul", "train.py", 50, "<module>", exact=False)),
        ("", ["%t = (f32[16]) tuple(%g)", f"%m = f32[16] custom-call(%t){metadata(1)}"], Source("")),
        (', metadata={op_name="w"}', [], Source("w")),
    ],
)  # fmt: skip
def test_the_nearest_line(own, more, expected):
    assert gather_source(own, *more) == expected


def test_a_line_inside_a_neighbouring_fusion():
    before = computation("f", "%a = f32[16] parameter(0)", f"ROOT %b = f32[16] negate(%a){metadata(1)}")
    assert gather_source("", "%n = f32[16] fusion(%g), kind=kLoop, calls=%f", before=before).line == 50


def test_users_come_before_operands():
    lines = [
        f"%o = f32[8] negate(%q){metadata(1)}",
        f"%g = f32[16] {GATHER.replace('%p', '%o')}",
        f"%n = f32[16] negate(%g){metadata(2)}",
    ]
    assert only(hlo.collectives(module(*lines, tables=TABLES))).source.line == 7


@pytest.mark.parametrize(("between", "line"), [(0, 50), (198, 50), (400, None)])
def test_a_line_that_is_too_far_away_is_not_taken(between, line):
    chain = [f"%n{at + 1} = f32[16] negate(%n{at})" for at in range(between)]
    read = module("%n0 = f32[16] parameter(0)", *chain, f"%m = f32[16] negate(%n{between}){metadata(1)}", tables=TABLES)
    first = read.entry.by_name["n1" if between else "n0"]
    assert source_of(read, (CallSite(read.entry, first),)).line == line
