"""Known moves: which one a traced move is."""

import pytest

from reshard.doctor import examine
from tests.doctor.fragments import BACK, FORTH, GATHER, OFFSET, SLICE, ZERO, known, layouts, only, text


@pytest.mark.parametrize(
    ("moves", "line"),
    [
        ([known("f.py:3", *FORTH)], 3),  # the only one that it can be
        ([known("f.py:3", *FORTH), known("f.py:9", *FORTH)], 9),  # that of the same line
        ([known("f.py:3", *FORTH, near=["f.py:9"]), known("f.py:4", *FORTH)], 3),  # that next to it
        ([known("f.py:3", *FORTH), known("f.py:4", *FORTH)], 9),  # either: the HLO's own line stays
        ([known("f.py:3", "f32[{a}2, 8]", "f32[8, 8]")], 9),  # another result
        ([known("f.py:3", "f32[{a}2, 8]", "f32[{a}2, 8]")], 9),  # no move
        ([known("f.py:9", "f32[{a}2, 8]", "f32[2{a}, 8]")], 9),  # tiles of the same size, and another bound
        ([known("f.py:9", *BACK)], 9),  # the reverse
        ([known("f.py:3", *BACK)], 9),  # another form of tiles, on another line
    ],
)
def test_a_move_that_the_program_asks_for(moves, line):
    gather = f'{GATHER}, metadata={{op_name="jit(f)/add" source_file="f.py" source_line=9}}'
    module = text(*OFFSET, ZERO, gather, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")
    place = only(examine(module, known=moves))
    assert (place.where.file, place.where.line) == ("f.py", line)
    assert (place.needed_bytes, place.planned_bytes, place.exact) == (48, 48, True)
    assert place.moves[0].target.tile_shape == (8, 2)


def test_the_form_of_a_known_move_decides_between_two_of_one_line():
    gather = f'{GATHER}, metadata={{op_name="jit(f)/add" source_file="f.py" source_line=9}}'
    module = text(*OFFSET, ZERO, gather, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")
    place = only(examine(module, known=[known("f.py:9", *BACK), known("f.py:9", *FORTH)]))
    assert layouts(place) == [FORTH]
