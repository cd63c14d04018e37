"""Which values belong to one chain, what a fragment has to yield, the arrays that move, and known moves that fit."""

from collections import Counter

import pytest

import reshard as rs
from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.chain_reader import ChainReader, Matcher, TracedMove, Unfit, list_chains
from reshard.doctor.dataflow.flow import Numbering
from reshard.doctor.equivalence import Traced
from reshard.hlo import Source
from reshard.hlo.splice import Use
from tests.doctor.fragments import (
    BACK,
    FORTH,
    GATHER,
    HERE,
    OFFSET,
    RECORDED,
    REDUCE,
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

FIRST = "%a = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
SECOND = "%b = f32[8,8]{1,0} all-gather(%c), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}"


INNER = f"%inner {{\n  %p = f32[2,8]{{1,0}} parameter(0)\n  ROOT {GATHER}\n}}\n"
USE = "ROOT %r = f32[8,8]{1,0} add(%b, %b)"


def chains(*lines, **options):
    """The names in each chain: collectives, values, results with their used forms, leaves."""
    return [named(chain) for chain in Analysis(text(*lines, **options)).chains()]


def named(chain):
    results = {value.name: [form.name for form in forms] for value, forms in chain.results.items()}
    names = [one.name for one in chain.collectives]
    return names, [value.name for value in chain.values], results, {leaf.name for leaf in chain.leaves}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (RESHARD, [(["g"], ["g", "d"], {"d": ["d"]}, {"p"})]),
        ([FIRST, "%c = f32[4,8]{0,1} copy(%a)", SECOND, USE], [(["a", "b"], ["a", "c", "b"], {"b": ["b"]}, {"p"})]),
        ([FIRST, "%c = f32[4,8]{0,1} add(%a, %a)", SECOND, USE],
         [(["a"], ["a"], {"a": ["a"]}, {"p"}), (["b"], ["b"], {"b": ["b"]}, {"c"})]),
        ([FIRST, SECOND.replace("%c", "%a"), "ROOT %r = (f32[4,8]{1,0}, f32[8,8]{1,0}) custom-call(%a, %b)"],
         [(["a"], ["a"], {"a": ["a"]}, {"p"}), (["b"], ["b"], {"b": ["b"]}, {"a"})]),
        ([GATHER, "%t = f32[64]{0} bitcast(%g)", "ROOT %r = f32[64]{0} add(%t, %t)"],
         [(["g"], ["g"], {"g": ["t"]}, {"p"})]),
        (["%u = f32[2,8]{1,0} collective-permute(%p), channel_id=1, source_target_pairs={{1,0},{2,1}}",
          "%v = f32[2,8]{1,0} collective-permute(%p), channel_id=2, source_target_pairs={{0,1},{1,2}}",
          "%c = f32[4,8]{1,0} concatenate(%u, %v), dimensions={0}", "ROOT %r = f32[4,8]{1,0} add(%c, %c)"],
         [(["u", "v"], ["u", "v", "c"], {"c": ["c"]}, {"p"})]),
    ],
    ids=["gather and slice", "local moves between", "arithmetic ends it", "a use ends it", "used form", "put together"],
)  # fmt: skip
def test_where_chains_begin_and_end(lines, expected):
    assert chains(*lines) == expected


def test_a_collective_in_a_computation_that_no_region_opens():
    call = "ROOT %r = f32[8,8]{1,0} custom-call(%p), called_computations={%inner}"
    assert chains(call, before=INNER) == [(["g"], [], {}, set())]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_chains_of_recorded_modules(path):
    """Every collective is in one chain; no value is in two; results are values, and leaves are not."""
    analysis = Analysis(path.read_text())
    every = analysis.chains()
    expected = Counter(one.name for one in hlo.collectives(analysis.module, every_branch=True))
    assert Counter(one.name for chain in every for one in chain.collectives) == expected
    values = Counter(value for chain in every for value in chain.values)
    assert max(values.values(), default=1) == 1
    for chain in every:
        assert set(chain.results) <= set(chain.values) and not chain.leaves & set(chain.values)
        assert chain.reduces or not chain.values or chain.results


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
    return text(*OFFSET, ZERO, *lines, before=REDUCE)


SUM = "%g = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum"
COLUMNS = "%d = f32[2,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={2,2}"
USED = "ROOT %r = f32[2,2]{1,0} negate(%d)"
ALL = "channel_id=1, replica_groups=[1,4]<=[4]"
REPLACED = {
    "gather": ([GATHER, SLICE, "ROOT %r = f32[8,2]{1,0} negate(%d)"], "p", "d", "f32[{d0}2, 8]", "f32[8, {d0}2]"),
    "narrow": (  # the conversion loses nothing
        ["%b = bf16[2,8]{1,0} negate(%p)", "%w = f32[2,8]{1,0} convert(%b)", GATHER.replace("%p", "%w"), SLICE,
         "ROOT %r = f32[8,2]{1,0} negate(%d)"], "b", "d", "bf16[{d0}2, 8]", "bf16[8, {d0}2]"),
    "widened": (  # CPU sends bf16 as f32; what is used is bf16 again
        ["%b = bf16[2,8]{1,0} convert(%p)", "%n = bf16[2,8]{1,0} negate(%b)", "%w = f32[2,8]{1,0} convert(%n)",
         GATHER.replace("%p", "%w"), "%c = bf16[8,8]{1,0} convert(%g)",
         "%s = bf16[8,2]{1,0} dynamic-slice(%c, %zero, %at), dynamic_slice_sizes={8,2}",
         "%f = f32[8,2]{1,0} convert(%s)", "ROOT %r = f32[8,2]{1,0} negate(%f)"],
        "n", "s", "bf16[{d0}2, 8]", "bf16[8, {d0}2]"),
    "sum": ([SUM, COLUMNS, USED], "p", "d", "f32[2, 8] + sum{d0}", "f32[2, {d0}2]"),
    "sum, sent on": (  # devices get their columns from others, which have the whole sum as well
        [SUM, COLUMNS.replace("%d", "%e"), "%d = f32[2,2]{1,0} collective-permute(%e), channel_id=2, "
         "source_target_pairs={{0,0},{2,1},{1,2},{3,3}}", USED],
        "p", "d", "f32[2, 8] + sum{d0}{d1}", "f32[2, {d1}{d0}2]"),
    "sum in groups": (  # devices 0 and 2 add up, and 1 and 3: only the digit of stride 2 is summed
        [SUM.replace("[1,4]<=[4]", "{{0,2},{1,3}}"), "%half = u32[] divide(%id, %two)", "%four = u32[] constant(4)",
         "%from = u32[] multiply(%half, %four)",
         "%d = f32[2,4]{1,0} dynamic-slice(%g, %zero, %from), dynamic_slice_sizes={2,4}",
         "ROOT %r = f32[2,4]{1,0} negate(%d)"], "p", "d", "f32[2, 8] + sum{d0}", "f32[2, {d0}4]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_what_replaces_a_chain(name):
    lines, source, used, before, after = REPLACED[name]
    (((one,),)) = replacements(module(*lines))
    assert (one.sources, one.uses, one.is_summed) == ((source,), (Use((), used),), "sum" in name)
    assert (str(one.move.source), str(one.move.target)) == (before, after)
    if name == "gather":
        assert (one.befores[0].dims, one.after.dims) == ((2, 8), (8, 2)) and one.move.places == ((2, 8), (4, 2), (2, 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_programs(name):
    module = recorded(name)
    everything = [one for each in replacements(module.text, 8) if not isinstance(each, str) for one in each]
    for change in module.splices:
        assert any(one.sources == change.sources and one.uses == change.uses for one in everything)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([f"%d = f32[8]{{0}} reduce-scatter(%p), {ALL}, to_apply=%sum"], "not the sum of one array"),
        (["%b = bf16[2,8]{1,0} convert(%p)", f"%g = bf16[8,8]{{1,0}} all-gather(%b), {ALL}, dimensions={{0}}",
          "%w = f16[8,8]{1,0} convert(%g)",
          "%d = f16[8,2]{1,0} dynamic-slice(%w, %zero, %at), dynamic_slice_sizes={8,2}"], "it converts bf16 to f16"),
        (["%q = f32[2,8]{1,0} parameter(1)", GATHER, GATHER.replace("%g", "%h").replace("%p", "%q"),
          "%c = f32[8,16]{1,0} concatenate(%g, %h), dimensions={1}", "%there = u32[] add(%at, %at)",
          COLUMNS.replace("%g", "%c").replace("%at", "%there").replace("8,2", "8,4")],
         "joins 2 arrays"),
        ([SUM.replace("[1,4]<=[4]", "{{0,3},{1,2}}"), COLUMNS], "groups"),
        ([SUM.replace("%sum", "%other"), COLUMNS], "not the sum of one array"),
        ([SUM, "%n = bf16[2,8]{1,0} convert(%g)", "%w = f32[2,8]{1,0} convert(%n)",
          COLUMNS.replace("%g", "%w").replace("%d", "%e"), "%d = f32[2,2]{1,0} copy(%e)"], "rounds the sum to bf16"),
    ],
    ids=["reduction", "conversion", "two arrays", "groups", "operation", "rounded"],
)  # fmt: skip
def test_what_cannot_be_replaced_says_why(lines, why):
    (reason,) = replacements(module(*lines, "ROOT %r = f32[2,2]{1,0} negate(%d)"))
    assert why in reason


def test_without_sums_the_reduction_is_a_chain_of_its_own():
    text = module(SUM, COLUMNS, "ROOT %r = f32[2,2]{1,0} negate(%d)")
    assert replacements(text, from_sums=False) == ["nothing uses its results"]


PART = "%e = f32[1,2]{1,0} slice(%g), slice={[0:1], [2:4]}\n  ROOT %r = f32[1,2]{1,0} negate(%e)"


def test_a_part_of_one_device_of_each_group():
    """Rows 2 and 3 of what pairs of devices gather: those of devices 1 and 3."""
    gather = GATHER.replace("f32[8,8]", "f32[4,8]").replace("[1,4]<=[4]", "{{0,1},{2,3}}")
    (((one,),)) = replacements(module(gather, PART.replace("[0:1]", "[3:4]")))
    assert one.move[3:] == (((2, 1),), 10, (1,))
    assert str(one.move.source) == "f32[{d1}, 2]" and list(one.move.source.mesh.axes.values()) == [2, 2]


@pytest.mark.parametrize(
    "lines",
    [
        ("%e = f32[2,2]{1,0} slice(%g), slice={[1:3], [2:4]}", "ROOT %r = f32[2,2]{1,0} negate(%e)"),
        PART.replace("[0:1]", "[1:3]").replace("f32[1,", "f32[2,"),
    ],
    ids=["rows", "more rows"],
)
def test_parts_of_two_devices_are_shifts(lines):
    (((one,),)) = replacements(module(GATHER, *([lines] if isinstance(lines, str) else lines)))
    assert one.move is None and one.shift is not None


def read(*lines, moves=(), planned=True, mesh=None, **options):
    """The moves of the one chain of a program, and its origin."""
    analysis = Analysis(text(*lines, **options))
    (chain,) = analysis.chains()
    reader = ChainReader(analysis.flow, analysis.maps, Numbering(analysis.flow), mesh)
    return reader.moves(chain, HERE, Matcher(moves), (lambda pair: rs.plan(*pair)) if planned else None)


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
