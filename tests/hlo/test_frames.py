"""Stack frames and older metadata, in all the ways that XLA prints them."""

import pytest

from reshard.hlo import Frame, Source
from reshard.hlo.frames import metadata_fields
from tests.hlo.fragments import OURS, TABLES, gather_source, metadata, module


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
    """Frames of jax and of this package are skipped, unless there are no others."""
    assert gather_source(metadata(frame)) == Source("f/mul", file, line, function)


def test_all_frames():
    read = module("%p = f32[8] parameter(0)", tables=TABLES)
    assert [frame.line for frame in read.frames.stack("{stack_frame_id=4}")] == [1, 99, 7, 50]
    assert [frame.users for frame in read.frames.stack("{stack_frame_id=4}")] == [False, False, True, True]
    assert read.frames.stack("{stack_frame_id=77}") == read.frames.stack("{}") == ()


def test_parents_without_the_offset():
    """A table whose first frame has no parent, and whose parents are given by their own ids."""
    tables = TABLES
    for frame, parent in {1: 0, 2: 1, 3: 2, 4: 3}.items():
        tables = tables.replace(f"\n{frame} {{file_location_id={frame} parent_frame_id={frame}}}",
                                f"\n{frame} {{file_location_id={frame} parent_frame_id={parent}}}")  # fmt: skip
    assert gather_source(metadata(4), tables=tables) == gather_source(metadata(4))


def test_a_frame_that_is_its_own_ancestor_ends_the_stack():
    tables = TABLES.replace("3 {file_location_id=3 parent_frame_id=3}", "3 {file_location_id=3 parent_frame_id=5}")
    assert gather_source(metadata(4), tables=tables).line == 1


def test_metadata_of_older_versions():
    older = ', metadata={op_type="dot" op_name="f/dot" source_file="old.py" source_line=12 source_end_line=13}'
    assert gather_source(older) == Source("f/dot", "old.py", 12)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Source("f/mul", "a.py", 3, "f"), "a.py:3 (f/mul)"),
        (Source("w", "a.py", 3, exact=False), "near a.py:3 (w)"),
        (Source("", "a.py", 3), "a.py:3"),
        (Source("w"), "w"),
        (Source("", exact=False), "unknown"),
    ],
)
def test_a_source_as_text(source, text):
    assert str(source) == text


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("train.py", True),
        ("/home/me/jax/train.py", True),
        ("/env/site-packages/flax/core.py", False),
        ("/env/site-packages/transformers/models/llama.py", True),
        ("/env/site-packages/jax/_src/numpy.py", False),
        ("/env/dist-packages/jaxlib/mlir.py", False),
        ("C:\\env\\site-packages\\reshard\\plan.py", False),
        (str(OURS), False),
    ],
)
def test_files_of_the_user(file, users):
    assert Frame(file, 1).users == users


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("{}", {}),
        ('{op_name="a b" stack_frame_id=2}', {"op_name": "a b", "stack_frame_id": "2"}),
        ('{op_name="say \\"x=1\\"" line=-3}', {"op_name": 'say \\"x=1\\"', "line": "-3"}),
    ],
)
def test_fields_of_metadata(text, fields):
    assert metadata_fields(text) == fields
