"""Where instructions come from: stack frames, older metadata, and the nearest line where there is none."""

from pathlib import Path

import pytest

import reshard
from reshard import hlo
from reshard.hlo import Source
from tests.hlo.fragments import computation, module, only

OURS = Path(reshard.__file__).resolve().parent / "jax" / "redistribute.py"
TABLES = f"""
FileNames
1 "train.py"
2 "/env/lib/python3.12/site-packages/jax/_src/numpy.py"
3 "{OURS.as_posix()}"
4 "model \\"x\\".py"

FunctionNames
1 "<module>"
2 "loss"
3 "inside"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=50 end_line=50 column=1 end_column=2}}
2 {{file_name_id=4 function_name_id=2 line=7 end_line=8 column=3 end_column=4}}
3 {{file_name_id=3 function_name_id=3 line=99 end_line=99 column=1 end_column=1}}
4 {{file_name_id=2 function_name_id=3 line=1 end_line=1 column=1 end_column=1}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=4}}
5 {{file_location_id=4 parent_frame_id=1}}
"""
GATHER = "all-gather(%p), replica_groups={{0,1}}, dimensions={0}"


def source(metadata, *more, tables=TABLES, **options):
    lines = ["%p = f32[8] parameter(0)", f"%g = f32[16] {GATHER}{metadata}", *more]
    return only(hlo.collectives(module(*lines, tables=tables, **options))).source


def at(frame, op_name="f/mul"):
    return f', metadata={{op_name="{op_name}" stack_frame_id={frame}}}'


@pytest.mark.parametrize(
    ("frame", "file", "line", "function"),
    [
        (1, "train.py", 50, "<module>"),
        (2, 'model \\"x\\".py', 7, "loss"),
        (3, 'model \\"x\\".py', 7, "loss"),
        (4, 'model \\"x\\".py', 7, "loss"),
        (5, "/env/lib/python3.12/site-packages/jax/_src/numpy.py", 1, "inside"),
    ],
)
def test_the_innermost_frame_of_the_user(frame, file, line, function):
    """Frames of jax and of this package are passed over, unless there is no other."""
    assert source(at(frame)) == Source("f/mul", file, line, function)


def test_all_frames():
    read = module("%p = f32[8] parameter(0)", tables=TABLES)
    assert [frame.line for frame in read.frames.stack("{stack_frame_id=4}")] == [1, 99, 7, 50]
    assert [frame.users for frame in read.frames.stack("{stack_frame_id=4}")] == [False, False, True, True]
    assert read.frames.stack("{stack_frame_id=77}") == read.frames.stack("{}") == ()


def test_parents_that_are_not_raised_by_one():
    """A table whose first frame has no parent, and whose parents are the ids themselves."""
    tables = TABLES
    for frame, parent in {1: 0, 2: 1, 3: 2, 4: 3}.items():
        tables = tables.replace(f"\n{frame} {{file_location_id={frame} parent_frame_id={frame}}}",
                                f"\n{frame} {{file_location_id={frame} parent_frame_id={parent}}}")  # fmt: skip
    assert source(at(4), tables=tables) == source(at(4))


def test_a_frame_that_is_its_own_ancestor_ends_the_stack():
    tables = TABLES.replace("3 {file_location_id=3 parent_frame_id=3}", "3 {file_location_id=3 parent_frame_id=5}")
    assert source(at(4), tables=tables).line == 1


def test_metadata_of_older_versions():
    older = ', metadata={op_type="dot" op_name="f/dot" source_file="old.py" source_line=12 source_end_line=13}'
    assert source(older) == Source("f/dot", "old.py", 12)


def test_a_wrapped_collective_has_the_line_of_what_wraps_it():
    inner = computation("w", "%p = f32[8] parameter(0)", f"ROOT %g = f32[16] {GATHER}")
    lines = ["%q = f32[8] parameter(0)", f"%s = ((f32[8]), f32[16]) async-start(%q), calls=%w{at(2)}"]
    found = only(hlo.collectives(module(*lines, before=inner, tables=TABLES))).source
    assert (found.line, found.exact) == (7, True)


def test_a_loop_does_not_lend_its_line():
    inner = computation("b", "%p = f32[8] parameter(0)", f"ROOT %g = f32[16] {GATHER}")
    inner += computation("c", "%p = f32[8] parameter(0)")
    lines = ["%q = f32[8] parameter(0)", f"%s = f32[8] while(%q), condition=%c, body=%b{at(2)}"]
    assert only(hlo.collectives(module(*lines, before=inner, tables=TABLES))).source == Source("")


@pytest.mark.parametrize(
    ("metadata", "more", "found"),
    [
        ("", [f"%n = f32[16] negate(%g){at(2)}"], Source("f/mul", 'model \\"x\\".py', 7, "loss", exact=False)),
        (', metadata={op_name="w"}', [f"%n = f32[16] negate(%g){at(1)}"],
         Source("w", "train.py", 50, "<module>", exact=False)),
        ("", ["%n = f32[16] negate(%g)", f"%m = f32[16] negate(%n){at(1)}"],
         Source("f/mul", "train.py", 50, "<module>", exact=False)),
        ("", ["%t = (f32[16]) tuple(%g)", f"%m = f32[16] custom-call(%t){at(1)}"], Source("")),
        (', metadata={op_name="w"}', [], Source("w")),
    ],
)  # fmt: skip
def test_the_nearest_line(metadata, more, found):
    assert source(metadata, *more) == found


def test_the_line_inside_a_fusion_beside():
    before = computation("f", "%a = f32[16] parameter(0)", f"ROOT %b = f32[16] negate(%a){at(1)}")
    assert source("", "%n = f32[16] fusion(%g), kind=kLoop, calls=%f", before=before).line == 50


def test_users_come_before_operands():
    lines = [
        f"%o = f32[8] negate(%q){at(1)}",
        f"%g = f32[16] {GATHER.replace('%p', '%o')}",
        f"%n = f32[16] negate(%g){at(2)}",
    ]
    assert only(hlo.collectives(module(*lines, tables=TABLES))).source.line == 7


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (Source("f/mul", "a.py", 3, "f"), "a.py:3 (f/mul)"),
        (Source("w", "a.py", 3, exact=False), "near a.py:3 (w)"),
        (Source("", "a.py", 3), "a.py:3"),
        (Source("w"), "w"),
        (Source("", exact=False), "unknown"),
    ],
)
def test_as_text(origin, text):
    assert str(origin) == text
