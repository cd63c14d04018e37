"""Which of the known moves a traced move is."""

import pytest

from reshard.doctor import examine
from reshard.doctor.chain_reader import Matcher, TracedMove
from reshard.hlo import Source
from tests.doctor.fragments import BACK, FORTH, GATHER, OFFSET, SLICE, ZERO, known, layouts, only, text

SLICED = [*OFFSET, ZERO, f'{GATHER}, metadata={{op_name="jit(f)/add" source_file="f.py" source_line=9}}', SLICE]
RESHARDED_ON_LINE_9 = text(*SLICED, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")


@pytest.mark.parametrize(
    ("moves", "line"),
    [
        ([known("f.py:3", *FORTH)], 3),  # the only candidate
        ([known("f.py:3", *FORTH), known("f.py:9", *FORTH)], 9),  # the one of the same line
        ([known("f.py:3", *FORTH, near=["f.py:9"]), known("f.py:4", *FORTH)], 3),  # the one next to the line
        ([known("f.py:3", *FORTH), known("f.py:4", *FORTH)], 9),  # ambiguous: the HLO's own line stays
        ([known("f.py:3", "f32[{a}2, 8]", "f32[8, 8]")], 9),  # another result
        ([known("f.py:3", "f32[{a}2, 8]", "f32[{a}2, 8]")], 9),  # not a move
        ([known("f.py:9", "f32[{a}2, 8]", "f32[2{a}, 8]")], 9),  # tiles of the same size, but another bound
        ([known("f.py:9", *BACK)], 9),  # the reverse
        ([known("f.py:3", *BACK)], 9),  # the reverse, on another line
    ],
)
def test_a_move_that_the_program_asks_for(moves, line):
    place = only(examine(RESHARDED_ON_LINE_9, known=moves))
    assert (place.where.file, place.where.line) == ("f.py", line)
    assert (place.needed_bytes, place.planned_bytes, place.exact) == (48, 48, True)
    assert place.moves[0].target.tile_shape == (8, 2)


def test_the_form_of_the_tiles_decides_between_two_moves_of_one_line():
    place = only(examine(RESHARDED_ON_LINE_9, known=[known("f.py:9", *BACK), known("f.py:9", *FORTH)]))
    assert layouts(place) == [FORTH]


def traced(before=((2, 8),), after=((8, 2),), received=192, needed=None, pair=None, dtype="f32", line=9):
    return TracedMove(Source("f", "f.py", line), dtype, before, after, received, needed, pair)


FITTING = known("f.py:9", *FORTH)
PAIR = (FITTING.source, FITTING.target)


@pytest.mark.parametrize(
    ("move", "matches"),
    [
        (traced(), True),
        (traced(needed=48, pair=PAIR), True),
        (traced(needed=47), False),  # another bound
        (traced(received=47), False),  # it receives less than the bound
        (traced(before=[(16,)]), True),  # one of the tiles has another form
        (traced(before=[(16,)], after=[(16,)]), False),  # both have: nothing tells it from its reverse
        (traced(before=[(16,)], after=[(16,)], pair=PAIR), True),  # the digits do
        (traced(before=[(16,)], after=[(16,)], pair=PAIR[::-1]), False),
        (traced(before=[(15,), (3, 5)]), False),  # no tile has the size
        (traced(before=[(1, 2, 1, 8)]), True),  # dims of size 1 do not matter
    ],
)
def test_tiles_bytes_and_digits_have_to_agree(move, matches):
    assert (Matcher([FITTING]).match(move) is not None) == matches


def test_the_move_is_returned_in_the_dtype_that_is_sent():
    """XLA sends bf16 before it converts to f32: half the bytes, and half the bound."""
    match = Matcher([FITTING]).match(traced(dtype="bf16", received=96, needed=24))
    assert (match.source.dtype, match.target.dtype) == ("bfloat16", "bfloat16")
    assert Matcher([FITTING]).match(traced(dtype="bf16", received=96, needed=48)) is None


def test_equal_moves_are_matched_in_turn():
    """Two moves of one line that differ in nothing but the lines beside it."""
    matcher = Matcher([known("f.py:9", *FORTH, near=["f.py:1"]), known("f.py:9", *FORTH, near=["f.py:2"])])
    assert [set(matcher.match(traced()).near) for _ in range(4)] == [{"f.py:1"}, {"f.py:2"}] * 2
