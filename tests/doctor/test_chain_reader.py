"""What is read of a chain: what a fragment has to yield, the arrays that move, and the known moves that fit."""

import pytest

import reshard as rs
from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.chain_reader import ChainReader, Matcher, TracedMove, Unfit, is_needed, list_chains
from reshard.doctor.dataflow.flow import Numbering
from reshard.doctor.equivalence import Traced
from reshard.doctor.infer_layouts import Pick
from reshard.hlo import Source
from reshard.hlo.splice import Use
from tests.doctor.fragments import (
    BACK,
    FORTH,
    GATHER,
    HERE,
    OFFSET,
    RESHARD,
    SLICE,
    ZERO,
    Analysis,
    known,
    layouts,
    only,
    text,
)
from tests.hlo.splices import NAMES, recorded

HEAD = """HloModule m, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main {
  %p = f32[2,8]{1,0} parameter(0)
  %i = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%i, %two)
  %zero = u32[] constant(0)
"""
GATHER_ROWS = "  %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n"
SLICE_COLUMNS = "  %d = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}\n"


def replacements(text, devices=4, from_sums=True):
    """The replacements of each chain, or the reason why there are none."""
    module = hlo.parse(text)
    traced = Traced(module, devices)
    finder = ChainReader(traced.flow, traced.maps, traced.numbering, None)
    results = []
    for chain in list_chains(traced.flow, traced.maps, hlo.collectives(module, every_branch=True), from_sums=from_sums):
        try:
            results.append(finder.replacements(chain))
        except Unfit as why:
            results.append(str(why))
    return results


def module(*lines):
    return HEAD + "".join(lines) + "}"


def test_a_gather_that_is_sliced():
    (((one,),)) = replacements(module(GATHER_ROWS, SLICE_COLUMNS, "  ROOT %r = f32[8,2]{1,0} negate(%d)\n"))
    assert one.source == "p" and one.uses == (Use((), "d"),)
    assert one.before.dims == (2, 8) and one.after.dims == (8, 2)
    assert str(one.move.source) == "f32[{d0}2, 8]" and str(one.move.target) == "f32[8, {d0}2]"
    assert one.move.places == ((2, 8), (4, 2), (2, 1))


def test_places_say_how_the_tile_lies():
    """The tile is transposed before it is gathered: its rows are the columns of the result."""
    (((one,),)) = replacements(
        module(
            "  %t = f32[8,2]{0,1} transpose(%p), dimensions={1,0}\n",
            "  %g = f32[8,8]{0,1} all-gather(%t), channel_id=1, replica_groups=[1,4]<=[4], dimensions={1}\n",
            "  %u = f32[8,8]{1,0} transpose(%g), dimensions={1,0}\n",
            "  %d = f32[8,2]{1,0} dynamic-slice(%u, %zero, %at), dynamic_slice_sizes={8,2}\n",
            "  ROOT %r = f32[8,2]{1,0} negate(%d)\n",
        )
    )
    assert one.source == "t" and one.before.layout == "0,1"
    radices = [radix for radix, _ in one.move.places]
    strides = [stride for _, stride in one.move.places]
    assert radices == [2, 4, 2] and strides == [1, 4, 2]


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_programs(name):
    module = recorded(name)
    everything = [one for each in replacements(module.text, 8) if not isinstance(each, str) for one in each]
    for change in module.splices:
        assert any(one.source == change.source and one.uses == change.uses for one in everything)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            (
                "  %g = f32[8]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum\n",
                "  ROOT %r = f32[8]{0} negate(%g)\n",
            ),
            "not the sum of one array",
        ),
        (
            (
                "  %b = bf16[2,8]{1,0} convert(%p)\n",
                "  %g = bf16[8,8]{1,0} all-gather(%b), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n",
                "  %w = f16[8,8]{1,0} convert(%g)\n",
                "  %d = f16[8,2]{1,0} dynamic-slice(%w, %zero, %at), dynamic_slice_sizes={8,2}\n",
                "  ROOT %r = f16[8,2]{1,0} negate(%d)\n",
            ),
            "it converts bf16 to f16",
        ),
        (
            (
                "  %q = f32[2,8]{1,0} parameter(1)\n",
                GATHER_ROWS,
                "  %h = f32[8,8]{1,0} all-gather(%q), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}\n",
                "  %c = f32[16,8]{1,0} concatenate(%g, %h), dimensions={0}\n",
                "  %d = f32[16,2]{1,0} dynamic-slice(%c, %zero, %at), dynamic_slice_sizes={16,2}\n",
                "  ROOT %r = f32[16,2]{1,0} negate(%d)\n",
            ),
            "joins 2 arrays",
        ),
    ],
    ids=["reduction", "conversion", "two arrays"],
)
def test_what_cannot_be_replaced_says_why(lines, why):
    (reason,) = replacements(module(*lines))
    assert why in reason


def test_a_conversion_that_loses_nothing():
    (((one,),)) = replacements(
        module(
            "  %b = bf16[2,8]{1,0} negate(%p)\n",
            "  %w = f32[2,8]{1,0} convert(%b)\n",
            "  %g = f32[8,8]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n",
            "  %s = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}\n",
            "  ROOT %r = f32[8,2]{1,0} negate(%s)\n",
        )
    )
    assert one.source == "b" and one.after.dtype == "f32" and str(one.move.source) == "bf16[{d0}2, 8]"


def test_the_narrowest_dtype_is_moved_from_before_it_was_widened():
    """CPU sends bf16 as f32; what is used is bf16 again."""
    (((one,),)) = replacements(
        module(
            "  %b = bf16[2,8]{1,0} convert(%p)\n",
            "  %n = bf16[2,8]{1,0} negate(%b)\n",
            "  %w = f32[2,8]{1,0} convert(%n)\n",
            "  %g = f32[8,8]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n",
            "  %c = bf16[8,8]{1,0} convert(%g)\n",
            "  %s = bf16[8,2]{1,0} dynamic-slice(%c, %zero, %at), dynamic_slice_sizes={8,2}\n",
            "  %f = f32[8,2]{1,0} convert(%s)\n",
            "  ROOT %r = f32[8,2]{1,0} negate(%f)\n",
        )
    )
    assert one.source == "n" and one.uses == (Use((), "s"),) and str(one.move.source) == "bf16[{d0}2, 8]"


SUM = "  %g = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum\n"
COLUMNS = "  %d = f32[2,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={2,2}\n"


def test_a_sum_that_is_sliced():
    (((one,),)) = replacements(module(SUM, COLUMNS, "  ROOT %r = f32[2,2]{1,0} negate(%d)\n"))
    assert one.source == "p" and one.uses == (Use((), "d"),) and one.is_summed and one.leaf.name == "g"
    assert str(one.move.source) == "f32[2, 8] + sum{d0}" and str(one.move.target) == "f32[2, {d0}2]"


def test_a_sum_that_is_sliced_and_sent_on():
    """Devices get their columns from others, which have the whole sum as well."""
    shift = "  %m = f32[2,2]{1,0} collective-permute(%d), channel_id=2, source_target_pairs={{0,0},{2,1},{1,2},{3,3}}\n"
    (((one,),)) = replacements(module(SUM, COLUMNS, shift, "  ROOT %r = f32[2,2]{1,0} negate(%m)\n"))
    assert str(one.move.source) == "f32[2, 8] + sum{d0}{d1}" and str(one.move.target) == "f32[2, {d1}{d0}2]"


def test_a_sum_in_groups():
    """Devices 0 and 2 add up, and 1 and 3: only the digit of stride 2 is summed."""
    text = module(
        SUM.replace("[1,4]<=[4]", "{{0,2},{1,3}}"),
        "  %half = u32[] divide(%i, %two)\n  %four = u32[] constant(4)\n  %from = u32[] multiply(%half, %four)\n",
        "  %d = f32[2,4]{1,0} dynamic-slice(%g, %zero, %from), dynamic_slice_sizes={2,4}\n",
        "  ROOT %r = f32[2,4]{1,0} negate(%d)\n",
    )
    (((one,),)) = replacements(text)
    assert str(one.move.source) == "f32[2, 8] + sum{d0}" and str(one.move.target) == "f32[2, {d0}4]"
    assert list(one.move.source.mesh.axes.values()) == [2, 2]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((SUM.replace("[1,4]<=[4]", "{{0,3},{1,2}}"), COLUMNS), "groups"),
        ((SUM.replace("%sum", "%other"), COLUMNS), "not the sum of one array"),
        (
            (
                SUM,
                "  %n = bf16[2,8]{1,0} convert(%g)\n",
                "  %w = f32[2,8]{1,0} convert(%n)\n",
                COLUMNS.replace("%g", "%w").replace("%d", "%e"),
                "  %d = f32[2,2]{1,0} copy(%e)\n",
            ),
            "rounds the sum to bf16",
        ),
    ],
    ids=["groups", "operation", "rounded"],
)
def test_sums_that_cannot_be_replaced_say_why(lines, why):
    (reason,) = replacements(module(*lines, "  ROOT %r = f32[2,2]{1,0} negate(%d)\n"))
    assert why in reason


def test_without_sums_the_reduction_is_a_chain_of_its_own():
    text = module(SUM, COLUMNS, "  ROOT %r = f32[2,2]{1,0} negate(%d)\n")
    assert replacements(text, from_sums=False) == ["nothing uses its results"]


FIRST = "  %e = f32[1,2]{1,0} slice(%g), slice={[0:1], [2:4]}\n  ROOT %r = f32[1,2]{1,0} negate(%e)\n"


def test_a_part_of_one_device():
    """A whole array is gathered for two elements of the first device."""
    (((one,),)) = replacements(module(GATHER_ROWS, FIRST))
    assert one.source == "p" and one.uses == (Use((), "e"),)
    assert one.pick == Pick(((0, 0), (2, 3)), (0,)) and one.move.places == ((2, 1),)
    assert str(one.move.source) == "f32[{d0}, 2]" and str(one.move.target) == "f32[4, 2]"


def test_a_part_of_one_device_of_each_group():
    """Rows 2 and 3 of what pairs of devices gather: those of devices 1 and 3."""
    gather = GATHER_ROWS.replace("f32[8,8]", "f32[4,8]").replace("[1,4]<=[4]", "{{0,1},{2,3}}")
    (((one,),)) = replacements(module(gather, FIRST.replace("[0:1]", "[3:4]")))
    assert one.pick == Pick(((1, 1), (2, 3)), (1,))
    assert str(one.move.source) == "f32[{d1}, 2]" and list(one.move.source.mesh.axes.values()) == [2, 2]


@pytest.mark.parametrize(
    "lines",
    [
        ("  %e = f32[2,2]{1,0} slice(%g), slice={[1:3], [2:4]}\n", "  ROOT %r = f32[2,2]{1,0} negate(%e)\n"),
        FIRST.replace("[0:1]", "[1:3]").replace("f32[1,", "f32[2,"),
    ],
    ids=["rows", "more rows"],
)
def test_parts_of_two_devices_are_shifts(lines):
    (((one,),)) = replacements(module(GATHER_ROWS, *([lines] if isinstance(lines, str) else lines)))
    assert one.move is None and one.shift is not None


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


USE = "ROOT %r = f32[8,8]{1,0} add(%g, %g)"


def answers(*lines):
    analysis = Analysis(text(*lines))
    return [is_needed(chain, analysis.flow) for chain in analysis.chains()]


def test_a_gather_that_is_used_whole():
    assert answers(GATHER, USE) == [True]
    assert answers(GATHER, "%t = f32[64]{0} bitcast(%g)", "ROOT %r = f32[64]{0} add(%t, %t)") == [True]


def test_what_could_be_moved_in_a_narrower_dtype_is_left_to_layouts():
    narrow = "%n = bf16[2,8]{1,0} convert(%p)"
    wide = "%w = f32[2,8]{1,0} convert(%n)"
    assert answers(narrow, wide, GATHER.replace("%p", "%w"), USE) == [False]
    assert answers("%w = f32[2,8]{1,0} copy(%p)", GATHER.replace("%p", "%w"), USE) == [True]


def test_reductions_and_chains_of_several_collectives():
    total = "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}"
    assert answers(total, "ROOT %r = f32[2,8]{1,0} add(%s, %s)") == [False]
    first = "%a = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
    second = "%b = f32[8,8]{1,0} all-gather(%a), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}"
    assert answers(first, second, "ROOT %r = f32[8,8]{1,0} add(%b, %b)") == [False]
