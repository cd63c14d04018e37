"""Digits of rows: by dims, cut alike, and held as before or as afterwards."""

import pytest

from reshard.doctor.batch_ops import BatchOp
from reshard.doctor.chain_reader import Unfit
from reshard.doctor.op_layouts import Choices, RowDigit, group_by_dim, tile_strides
from reshard.hlo import Array

ROWS = Array("f32", (8, 4))
OP = BatchOp("fft", "", (0,), (ROWS,), (ROWS,))


def test_digits_by_dims():
    digits = [RowDigit(8, 4, 1, None), RowDigit(1, 8, None, 1)]  # 1 x 8 goes through dim 1 and half of a digit of dim 0
    (rows, columns) = group_by_dim(digits, (8, 4), "x")
    assert rows == [RowDigit(1, 2, None, 4), RowDigit(2, 4, 1, None)]
    assert columns == [RowDigit(1, 4, None, 1)]
    with pytest.raises(Unfit, match="x is used in part"):
        group_by_dim(digits[:1], (8, 4), "x")
    assert tile_strides((2, 3, 4)) == [12, 4, 1]


def test_dims_that_count_rows_are_cut_alike():
    before = [[RowDigit(1, 8, 1, None)], [RowDigit(1, 4, None, 1)]]
    after = [[RowDigit(1, 2, None, 1), RowDigit(2, 4, 1, None)], [RowDigit(1, 4, None, 2)]]
    choices = Choices(OP, before, [after], 8, None)
    assert choices.before[0] == [RowDigit(1, 2, 1, None), RowDigit(2, 4, 2, None)]
    assert choices.order(choices.after[0]) == ((2, 1), (4, 2))
    rows = {str(moves.rows) for moves in choices.of([ROWS])}
    assert rows == {"f32[{d0}{d1}{d2}, 4]", "f32[{d1}{d2}2, 4]"}


def test_rows_that_are_counted_otherwise():
    before = [[RowDigit(1, 2, 1, None), RowDigit(2, 3, None, 4)], [RowDigit(1, 4, None, 1)]]
    after = [[RowDigit(1, 3, None, 1), RowDigit(3, 2, 1, None)], [RowDigit(1, 4, None, 3)]]
    with pytest.raises(Unfit, match="in other digits"):
        Choices(OP, before, [after], 2, None)
