"""Operations that could run on each device's own rows: what is proposed, and why others stay."""

import pytest

from reshard.doctor.chain_reader import Unfit
from tests.doctor.batched import FFT, SORT, proposed


def test_an_fft_whose_operand_is_gathered():
    one = proposed(FFT).replacement()
    assert (one.instruction, one.source, one.places) == ("f", "p", ((2, 8), (8, 1)))
    assert [str(one.choices[0].source), str(one.choices[0].rows)] == ["c64[{d0}2, 8]", "c64[{d0}2, 8]"]
    assert [tuple(map(str, pair)) for pair in one.choices[0].outputs] == [("c64[{d0}2, 8]", "c64[8, {d0}2]")]
    (output,) = one.outputs
    assert (output.number, output.order, output.uses[0].name) == (0, ((4, 4), (2, 2), (2, 1)), "d")


def test_a_sort_whose_second_operand_is_the_index():
    everything = proposed(SORT)
    one = everything.replacement()
    assert [operand.index_dim for operand in one.inputs] == [None, 1]
    assert [(output.number, output.values[0].name) for output in one.outputs] == [(1, "d")]
    chain = everything.joined[0][0]
    assert sorted(collective.name for collective in chain.collectives) == ["g", "k"]


def test_a_source_in_parts_of_rows_is_moved_to_the_rows_of_the_result():
    columns = FFT.replace("c64[2,8]{1,0} parameter", "c64[8,2]{1,0} parameter").replace(
        "dimensions={0}", "dimensions={1}"
    )
    columns = columns.replace("c64[8,2]{1,0} dynamic-slice(%f, %zero, %at), dynamic_slice_sizes={8,2}",
                              "c64[2,8]{1,0} dynamic-slice(%f, %at, %zero), dynamic_slice_sizes={2,8}")  # fmt: skip
    choices = {str(moves.rows) for moves in proposed(columns).replacement().choices}
    assert choices == {"c64[8, 8]", "c64[{d0}2, 8]"}


@pytest.mark.parametrize(
    ("was", "is_now", "why"),
    [
        (
            "dynamic-slice(%f, %zero, %at), dynamic_slice_sizes={8,2}",
            "slice(%f), slice={[0:8], [3:5]}",
            "in part|comes from",
        ),
        ("ROOT %d", "%other = c64[8,8]{1,0} negate(%g)\n  ROOT %d", "takes g as well"),
        ("c64[8,2]{1,0} dynamic-slice", "c64[8,2]{1,0} dynamic-slice", None),
    ],
)
def test_what_is_left(was, is_now, why):
    everything = proposed(FFT.replace(was, is_now))
    if why is None:
        assert everything.replacement().outputs
        return
    with pytest.raises(Unfit, match=why):
        everything.replacement()


def test_what_something_else_takes_in_another_form_is_not_the_operations_own():
    text = FFT.replace(
        "  ROOT", "  %own = c64[2,8]{1,0} slice(%g), slice={[0:2], [0:8]}\n  %n = c64[2,8]{1,0} negate(%own)\n  ROOT"
    )
    assert proposed(text).joined == ()


def test_an_index_of_the_rows_is_not_one_inside_of_them():
    with pytest.raises(Unfit, match="takes 2 arrays"):
        proposed(SORT.replace("iota_dimension=1", "iota_dimension=0")).replacement()
