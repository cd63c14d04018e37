"""Where elements were before each instruction, against a machine that runs it; dtypes on the way."""

import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import (
    UNKNOWN_FILL,
    Conversion,
    Points,
    Unconvertible,
    Untraceable,
    find_conversion,
)
from reshard.doctor.dataflow.scalars import UNKNOWN
from reshard.doctor.dataflow.trace import NOWHERE
from reshard.doctor.equivalence import Traced
from tests.doctor.fragments import Analysis
from tests.doctor.tracing import everywhere, follow_to_start, program

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


def padding_of(literal, dtype="f32"):
    """What stands for the padding of a tile with a constant."""
    lines = [f"%none = {dtype}[] constant({literal})", f"%p = {dtype}[2]{{0}} parameter(0)"]
    lines.append(f"ROOT %r = {dtype}[3]{{0}} pad(%p, %none), padding=0_1")
    body = "\n".join(f"  {line}" for line in lines)
    traced = Traced(hlo.parse(f"HloModule m\n\nENTRY %main {{\n{body}\n}}\n"), 1)
    value, leaf = (HloValue(traced.region("main"), name) for name in ("r", "p"))
    origins = traced.origins(value, (leaf,), Points(np.zeros(3, np.int64), np.arange(3)[np.newaxis]))
    assert origins.leaf.tolist()[:2] != [NOWHERE] * 2 and origins.leaf[2] == NOWHERE
    return int(origins.place[2])


def test_padding_has_the_bits_of_its_number():
    """Zero, -0 and the infinities are told apart; other numbers may change where they are converted."""
    assert padding_of("0") == padding_of("0", "s32") == 0
    assert len({padding_of(one) for one in ("0", "-0", "inf", "-inf")}) == 4
    assert padding_of("0.1") == padding_of("nan") == padding_of("inf", "f8e4m3") == UNKNOWN_FILL


def test_masks_need_not_be_evaluated_whole():
    """A mask of a large tile is known at each point: columns below the device's number are its own."""
    lines = [
        "%id = u32[] partition-id()",
        "%ids = u32[2048,2048]{1,0} broadcast(%id), dimensions={}",
        "%column = u32[2048,2048]{1,0} iota(), iota_dimension=1",
        "%mask = pred[2048,2048]{1,0} compare(%column, %ids), direction=LT",
        "%zero = f32[] constant(0)",
        "%zeros = f32[2048,2048]{1,0} broadcast(%zero), dimensions={}",
        "%p = f32[2048,2048]{1,0} parameter(0)",
        "ROOT %r = f32[2048,2048]{1,0} select(%mask, %p, %zeros)",
    ]
    body = "\n".join(f"  {line}" for line in lines)
    traced = Traced(hlo.parse(f"HloModule m, num_partitions=4\n\nENTRY %main {{\n{body}\n}}\n"), 4)
    value, leaf = (HloValue(traced.region("main"), name) for name in ("r", "p"))
    points = Points(np.array([0, 3, 3, 3]), np.array([[5, 0, 2, 7], [0, 2, 3, 1]]))
    assert (traced.origins(value, (leaf,), points).leaf == NOWHERE).tolist() == [True, False, True, False]


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
        ("ROOT %r = f32[6,4]{1,0} collective-permute(%p), source_target_pairs={{7,1}}", "from device 7"),
        ("ROOT %r = f32[3,4]{1,0} slice(%p)", "r: 'slice'"),
    ],
)
def test_forms_that_cannot_be_traced(line, message):
    analysis = Analysis(program(line))
    with pytest.raises(Untraceable, match=message):
        analysis.maps.preimages(analysis.value("r"), Points(np.zeros(1, int), np.zeros((2, 1), int)))


HEAD = """HloModule m, num_partitions=2

%wrote (a: (f32[6], f32[2])) -> f32[6] {
  %a = (f32[6]{0}, f32[2]{0}) parameter(0)
  %base = f32[6]{0} get-tuple-element(%a), index=0
  %part = f32[2]{0} get-tuple-element(%a), index=1
  %one = s32[] constant(1)
  ROOT %w = f32[6]{0} dynamic-update-slice(%base, %part, %one)
}

%kept (b: (f32[6], f32[2])) -> f32[6] {
  %b = (f32[6]{0}, f32[2]{0}) parameter(0)
  ROOT %k = f32[6]{0} get-tuple-element(%b), index=0
}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main {
  %p = f32[6]{0} parameter(0)
  %i = u32[] partition-id()
  %n = s32[] convert(%i)
  %two = s32[] constant(2)
  %at = s32[] multiply(%n, %two)
  %zero = f32[] constant(0)
  %part = f32[2]{0} dynamic-slice(%p, %at), dynamic_slice_sizes={2}
"""


def origins(lines, name, dims):
    """Where the elements of a value come from: device and place in %p, a row per device; -1 for padding."""
    traced = Traced(hlo.parse(HEAD + lines + "}\n"), 2, spliced=True)
    region = traced.region("main")
    result = traced.origins(HloValue(region, name), (HloValue(region, "p"),), everywhere(2, dims))
    return np.where(result.leaf < 0, -1, result.place).reshape(2, -1).tolist(), result.device.reshape(2, -1)


@pytest.mark.parametrize(
    ("lines", "name", "dims", "expected"),
    [
        (["ROOT %u = f32[6]{0} dynamic-update-slice(%p, %part, %n)"], "u", (6,),
         [[0, 1, 2, 3, 4, 5], [0, 2, 3, 3, 4, 5]]),
        (["%far = s32[] constant(9)", "ROOT %u = f32[6]{0} dynamic-update-slice(%p, %part, %far)"], "u", (6,),
         [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]]),
        (["%r = f32[2,1,3]{2,1,0} reshape(%p)",
          "ROOT %d = f32[2,3]{1,0} reduce(%r, %zero), dimensions={1}, to_apply=%sum"],
         "d", (2, 3), [[0, 1, 2, 3, 4, 5]] * 2),
        (["ROOT %c = f32[6]{0} conditional(%flag, %t, %t), true_computation=%wrote, false_computation=%kept"],
         "c", (6,), [[0, 1, 2, 3, 4, 5], [0, 2, 3, 3, 4, 5]]),
        (["ROOT %c = f32[6]{0} conditional(%n, %t, %t), branch_computations={%wrote, %kept}"], "c", (6,),
         [[0, 0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]),
        (['%q = s32[] custom-call(%p), custom_call_target="anything"',  # its own elements: following ends there
          "%u = f32[6]{0} dynamic-update-slice(%p, %part, %q)", "ROOT %v = f32[6]{0} copy(%u)"], "v", (6,),
         [[0, 1, 2, 3, 4, 5]] * 2),
    ],
    ids=["update", "update past the end", "reduction", "branch of a flag", "branch of a number", "unknown offset"],
)  # fmt: skip
def test_what_compiled_plans_consist_of(lines, name, dims, expected):
    carried = ["%flag = pred[] convert(%i)", "%t = (f32[6]{0}, f32[2]{0}) tuple(%p, %part)"]
    assert origins("".join(f"  {line}\n" for line in [*carried, *lines]), name, dims)[0] == expected


def converted(*lines, dtype="bf16"):
    """What becomes of the elements of %p on their way to the root."""
    body = "\n".join(f"  {line}" for line in (f"%p = {dtype}[8]{{0}} parameter(0)", *lines))
    traced = Traced(hlo.parse(f"HloModule m, num_partitions=4\n\nENTRY %main {{\n{body}\n}}\n"), 4)
    region = traced.region("main")
    return find_conversion(traced.maps, HloValue(region, region.computation.root.name), HloValue(region, "p"))


def test_there_and_back_loses_nothing():
    lines = ("%w = f32[8]{0} convert(%p)", "ROOT %n = bf16[8]{0} convert(%w)")
    assert converted(*lines) == Conversion("bf16", "bf16", "bf16")


def test_widened_in_the_end():
    assert converted("ROOT %w = s32[8]{0} convert(%p)", dtype="s8") == Conversion("s8", "s8", "s32")


@pytest.mark.parametrize(
    ("dtype", "lines"),
    [
        ("f32", ("%n = bf16[8]{0} convert(%p)", "ROOT %h = f16[8]{0} convert(%n)")),
        ("f64", ("%n = f32[8]{0} convert(%p)", "ROOT %h = bf16[8]{0} convert(%n)")),  # It is rounded twice.
        ("f32", ("%n = s32[8]{0} convert(%p)", "ROOT %w = f32[8]{0} convert(%n)")),
        ("u8", ("ROOT %w = s16[8]{0} convert(%p)",)),
    ],
    ids=["bf16 and f16", "two roundings", "floats and integers", "signs"],
)
def test_what_is_not_one_conversion(dtype, lines):
    with pytest.raises(Unconvertible, match="it converts"):
        converted(*lines, dtype=dtype)


def test_elements_that_go_several_ways():
    lines = (
        "%n = bf16[8]{0} convert(%p)",
        "%w = f32[8]{0} convert(%n)",
        "ROOT %c = f32[16]{0} concatenate(%p, %w), dimensions={0}",
    )
    with pytest.raises(Unconvertible, match="and others not"):
        converted(*lines, dtype="f32")


def test_a_chain_longer_than_functions_nest():
    copies = [f"%c{at} = f32[8]{{0}} copy(%{'w' if at == 0 else f'c{at - 1}'})" for at in range(2000)]
    found = converted("%w = f32[8]{0} convert(%p)", *copies, "ROOT %n = bf16[8]{0} convert(%c1999)")
    assert found == Conversion("bf16", "bf16", "bf16")


def test_a_computation_that_is_both_branches_has_the_operands_of_neither():
    """Its parameter is one of two values, so nothing is known of it."""
    branch = "%same {\n  ROOT %a = f32[2]{0} parameter(0)\n}\n\n"
    entry = (
        "ENTRY %main {\n  %p = f32[2]{0} parameter(0)\n  %q = f32[2]{0} parameter(1)\n  %id = u32[] partition-id()\n"
        "  %half = u32[] constant(2)\n  %low = pred[] compare(%id, %half), direction=LT\n"
        "  ROOT %c = f32[2]{0} conditional(%low, %p, %q), true_computation=%same, false_computation=%same\n}\n"
    )
    traced = Traced(hlo.parse("HloModule m, num_partitions=4\n\n" + branch + entry), 4, spliced=True)
    assert traced.maps.sources(HloValue(traced.region("main"), "c")) is None
    assert traced.maps.sources(HloValue(traced.region("same"), "a")) is None
