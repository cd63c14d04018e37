"""The moves of chains: tiles, bytes needed, layouts and plans."""

import pytest

import reshard as rs
from reshard.doctor.chain_reader import ChainReader, Matcher
from reshard.doctor.dataflow.flow import Numbering
from tests.doctor.fragments import FORTH, GATHER, HERE, OFFSET, RESHARD, SLICE, ZERO, Analysis, known, text


def read(*lines, moves=(), planned=True, mesh=None, **options):
    """The moves of the one chain of a program, and its origin."""
    analysis = Analysis(text(*lines, **options))
    (chain,) = analysis.chains()
    reader = ChainReader(analysis.flow, analysis.maps, Numbering(analysis.flow), mesh)
    return reader.moves(chain, HERE, Matcher(moves), (lambda pair: rs.plan(*pair)) if planned else None)


def test_a_move_between_two_layouts():
    (move,), where, *_ = read(*RESHARD, mesh=rs.Mesh(a=4))
    assert ((move.before.dims, move.after.dims), where) == (((2, 8), (8, 2)), HERE)
    assert (str(move.source), str(move.target), move.whole) == (*FORTH, True)
    assert (move.needed_bytes, move.exact, move.plan.received_bytes) == (48, True, 48)


def test_plans_only_on_request():
    (move,), *_ = read(*RESHARD, planned=False)
    assert move.plan is None and move.exact


def test_a_known_move_gives_its_line_and_layouts():
    (move,), where, *_ = read(*RESHARD, moves=[known("model.py:7", *FORTH)])
    assert (where.file, where.line, where.function, where.exact) == ("model.py", 7, None, True)
    assert str(move.source.mesh) == "<a=4>"
    _, same, *_ = read(*RESHARD, moves=[known("train.py:26", *FORTH)])
    assert (same.line, same.function) == (26, "step")
    _, unnamed, *_ = read(*RESHARD, moves=[known("", *FORTH, near=["train.py:26"])])
    assert unnamed == HERE


def test_a_group_of_devices_has_only_a_part():
    """Pairs of devices swap halves: two other arrays, or two parts of one; the layouts are not those of the whole."""
    gather = "%g = f32[4,8]{1,0} all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}"
    (move,), *_ = read(gather, "ROOT %r = f32[4,8]{1,0} add(%g, %g)")
    assert (str(move.source), str(move.target), move.whole) == ("f32[{d1}2, 8]", "f32[4, 8]", False)


def test_only_the_part_that_is_used_is_needed():
    """Of the gathered array only rows 0 and 1 are used: 64 B for all devices but the one that has them."""
    part = "%s = f32[2,8]{1,0} slice(%g), slice={[0:2], [0:8]}"
    (move,), *_ = read(GATHER, part, "ROOT %r = f32[2,8]{1,0} add(%s, %s)")
    assert (move.needed_bytes, move.exact, move.source, move.plan) == (64, False, None, None)


def test_an_untraceable_move_needs_at_most_its_result():
    table = [
        "%id = u32[] partition-id()",
        "%table = s32[4]{0} constant({...})",
        "%zero = s32[] constant(0)",
        "%row = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}",
        "%at = s32[] bitcast(%row)",
    ]
    (move,), *_ = read(*table, GATHER, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")
    assert (move.needed_bytes, move.exact, move.source) == (64, False, None)


@pytest.mark.parametrize(
    ("second", "moves"),
    [
        (SLICE.replace("%d", "%e"), 1),  # the same again: once
        ("%e = f32[2,8]{1,0} dynamic-slice(%g, %at, %zero), dynamic_slice_sizes={2,8}", 2),  # rows, back again
    ],
)
def test_results_of_one_chain(second, moves):
    use = "ROOT %r = (f32[8,2]{1,0}, f32[8,2]{1,0}) custom-call(%d, %e)"
    read_moves, _, _, counted = read(*OFFSET, ZERO, GATHER, SLICE, second, use)
    assert len(read_moves) == moves
    assert counted == (None if moves == 1 else 48)
    assert [move.needed_bytes for move in read_moves] == [48, 0][:moves]


def test_the_widest_dtype_that_is_sent():
    halves = [GATHER.replace("f32", "bf16").replace("%p", "%h"), "%h = bf16[2,8]{1,0} convert(%p)"]
    use = "ROOT %r = f32[8,8]{1,0} convert(%g)"
    (move,), *_ = read(halves[1], halves[0], use)
    assert (move.before.dtype, move.after.dtype, move.needed_bytes) == ("bf16", "bf16", 96)


def test_the_form_with_the_fewest_dims_is_the_users():
    shaped = "%t = f32[64]{0} reshape(%g)"
    (move,), *_ = read(GATHER, shaped, "ROOT %r = f32[64]{0} add(%t, %t)")
    assert move.after.dims == (64,)


def test_equal_moves_of_different_arrays_are_listed_once():
    """Two arrays in one collective, of the same layouts."""
    pair = "(f32[8,8]{1,0}, f32[8,8]{1,0})"
    lines = [
        "%q = f32[2,8]{1,0} parameter(1)",
        f"%t = {pair} all-gather(%p, %q), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}",
        *(f"%g{at} = f32[8,8]{{1,0}} get-tuple-element(%t), index={at}" for at in range(2)),
        "ROOT %r = f32[8,8]{1,0} add(%g0, %g1)",
    ]
    (move,), _, _, counted = read(*lines)
    assert (move.needed_bytes, move.arrays, counted) == (192, 2, 384)
