"""Where each instruction that only moves data takes its elements from, against an interpreter that runs forwards."""

import numpy as np
import pytest

from reshard.doctor.dataflow.index_maps import Points, Untraceable, ravel_indices, unravel_places
from reshard.doctor.dataflow.scalars import UNKNOWN
from tests.doctor.fragments import Analysis
from tests.doctor.tracing import follow_to_start, program

MOVES = {
    "copy": "f32[6,4]{0,1} copy(%p)",
    "reshape": "f32[2,3,4]{2,1,0} reshape(%p)",
    "transpose": "f32[4,6]{1,0} transpose(%p), dimensions={1,0}",
    "bitcast to a layout": "f32[4,6]{0,1} bitcast(%p)",
    "bitcast to a shape": "f32[2,3,4]{2,1,0} bitcast(%p)",
    "bitcast of both": "f32[4,2,3]{0,2,1} bitcast(%p)",
    "slice": "f32[3,2]{1,0} slice(%p), slice={[1:4], [0:4:2]}",
    "reverse": "f32[6,4]{1,0} reverse(%p), dimensions={0,1}",
    "pad": "f32[8,7]{1,0} pad(%p, %none), padding=0_2x1_2",
    "pad inside": "f32[11,4]{1,0} pad(%p, %none), padding=0_0_1x0_0",
    "pad that cuts": "f32[5,4]{1,0} pad(%p, %none), padding=-1_0x0_0",
    "concatenate": "f32[12,4]{1,0} concatenate(%p, %q), dimensions={0}",
    "broadcast": "f32[1,6,4]{2,1,0} broadcast(%p), dimensions={1,2}",
    "dynamic-slice": "f32[2,4]{1,0} dynamic-slice(%p, %at, %zero), dynamic_slice_sizes={2,4}",
    "gather all": "f32[24,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
    "gather in turned groups": "f32[6,8]{1,0} all-gather(%p), replica_groups={{2,0},{1,3}}, dimensions={1}",
    "gather over an axis": "f32[12,4]{1,0} all-gather(%p), replica_groups=mesh['x'=2,'y'=2] {'x'}, dimensions={0}",
    "all-to-all of an array": "f32[6,4]{1,0} all-to-all(%p), replica_groups={{0,1},{3,2}}, dimensions={1}",
    "all-to-all of four": "f32[6,4]{1,0} all-to-all(%p), replica_groups={{0,1,2,3}}, dimensions={1}",
    "permute": "f32[6,4]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
    "broadcast in groups": "f32[6,4]{1,0} collective-broadcast(%p), replica_groups={{2,0},{1,3}}",
    "broadcast to some": "f32[6,4]{1,0} collective-broadcast(%p), replica_groups={{3,1,0}}",
    "broadcast to all": "f32[6,4]{1,0} collective-broadcast(%p), replica_groups=[1,4]<=[4]",
    "permute of some": "f32[6,4]{1,0} collective-permute(%p), source_target_pairs={{3,1}}",
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_move(move):
    got, want = follow_to_start(program(f"ROOT %r = {move}"), "r")
    np.testing.assert_array_equal(got, want)


def test_an_all_to_all_of_several_operands():
    lines = [
        *(f"%s{i} = f32[3,4]{{1,0}} slice(%p), slice={{[{3 * i}:{3 * i + 3}], [0:4]}}" for i in range(2)),
        "%t = (f32[3,4]{1,0}, f32[3,4]{1,0}) all-to-all(%s0, %s1), replica_groups={{0,2},{3,1}}",
        *(f"%g{i} = f32[3,4]{{1,0}} get-tuple-element(%t), index={i}" for i in range(2)),
        "ROOT %r = f32[3,8]{1,0} concatenate(%g0, %g1), dimensions={1}",
    ]
    got, want = follow_to_start(program(*lines), "r")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "which",
    [
        ["%which = pred[] compare(%at, %zero), direction=EQ"],
        ["%i = s32[6,4]{1,0} iota(), iota_dimension=0", "%w = s32[6,4]{1,0} broadcast(%at), dimensions={}",
         "%which = pred[6,4]{1,0} compare(%i, %w), direction=LT"],
    ],
    ids=["by device", "by index"],
)  # fmt: skip
def test_a_choice_of_two_moves(which):
    lines = [
        "%a = f32[6,4]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
        *which,
        "ROOT %r = f32[6,4]{1,0} select(%which, %a, %q)",
    ]
    got, want = follow_to_start(program(*lines), "r")
    np.testing.assert_array_equal(got, want)


def test_an_offset_that_is_not_in_the_text():
    text = program("ROOT %r = f32[2,4]{1,0} dynamic-slice(%p, %at, %zero), dynamic_slice_sizes={2,4}")
    analysis = Analysis(text.replace("{2, 0, 6, 4}", "{...}"))
    value, maps = analysis.value("r"), analysis.maps
    assert maps.scalars.at(analysis.value("at")) is UNKNOWN
    assert maps.sources(value) == [analysis.value("p")]  # a move all the same,
    with pytest.raises(Untraceable, match="not in the text"):  # but an unknown one
        maps.preimages(value, Points(np.zeros(1, int), np.zeros((2, 1), int)))


@pytest.mark.parametrize(
    "lines",
    [
        ["%n = s32[] parameter(2)",
         "ROOT %r = f32[2,4]{1,0} dynamic-slice(%p, %n, %zero), dynamic_slice_sizes={2,4}"],
        ["%c = pred[6,4]{1,0} parameter(2)", "ROOT %r = f32[6,4]{1,0} select(%c, %p, %q)"],
        ["%n = f32[6,4]{1,0} broadcast(%none), dimensions={}",
         "%c = pred[6,4]{1,0} broadcast(%zero), dimensions={}", "ROOT %r = f32[6,4]{1,0} select(%c, %n, %n)"],
        ["%s = f32[] parameter(2)", "ROOT %r = f32[6,4]{1,0} broadcast(%s), dimensions={}"],
        ["ROOT %r = f32[6,4]{1,0} add(%p, %q)"],
    ],
    ids=["offset of data", "choice of data", "only padding", "copies of a scalar", "arithmetic"],
)  # fmt: skip
def test_instructions_that_are_not_moves(lines):
    analysis = Analysis(program(*lines))
    assert analysis.maps.sources(analysis.value("r")) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ROOT %r = f32[12,4]{1,0} all-gather(%p), replica_groups={{0,1},{2}}, dimensions={0}", "equal parts"),
        ("ROOT %r = f32[12,4]{1,0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}", "equal parts"),
        ("ROOT %r = u8[6,16]{1,0} bitcast(%p)", "changes the size"),
        ("ROOT %r = f32[6,4]{1,0} collective-broadcast(%p)", "replica_groups"),
        ("ROOT %r = f32[3,4]{1,0} slice(%p)", "r: 'slice'"),
    ],
)
def test_forms_that_cannot_be_traced(line, message):
    analysis = Analysis(program(line))
    with pytest.raises(Untraceable, match=message):
        analysis.maps.preimages(analysis.value("r"), Points(np.zeros(1, int), np.zeros((2, 1), int)))


@pytest.mark.parametrize("dims", [(), (7,), (3, 5), (2, 1, 7), (4, 0)])
def test_places_in_row_major_order(dims):
    count = int(np.prod(dims))
    index = unravel_places(np.arange(count), dims)
    np.testing.assert_array_equal(index, np.indices(dims).reshape(len(dims), count))
    np.testing.assert_array_equal(ravel_indices(index, dims), np.arange(count))
