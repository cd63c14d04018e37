"""Where elements were, followed backwards, against an interpreter that runs the same text forwards."""

import re
from pathlib import Path

import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.chains import chains
from reshard.doctor.flow import Flow, Value
from reshard.doctor.index_maps import Movement, Points, Untraceable, unravel
from reshard.doctor.numbering import Numbering
from reshard.doctor.scalars import UNKNOWN, Scalars
from reshard.doctor.trace import NOWHERE, Tracer
from tests.doctor.oracle import Machine

DATA = Path(__file__).parent / "data"
ID = """
  %id = u32[] partition-id()
  %table = s32[4]{0} constant({2, 0, 6, 4})
  %row = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %at = s32[] reshape(%row)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
"""
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
    "permute of some": "f32[6,4]{1,0} collective-permute(%p), source_target_pairs={{3,1}}",
}


def followed(text, found):
    """The tracer's answer for all points of a value, as the machine's numbers, and the machine's own."""
    module = hlo.parse(text)
    flow = Flow(module)
    value, leaves = found(flow)
    numbering, machine = Numbering(flow), Machine(text)
    tracer = Tracer(Movement(flow, Scalars(flow, module.devices)), numbering, leaves)
    points = everywhere(module.devices, value.array.dims)
    before = tracer(value, points)
    sites = {site.instruction.name: site for region in flow.regions for site in flow.sites(region)}
    bases = {numbering.of(Value(sites[name].scope, name)): base for name, base in machine.made.items()}
    found = np.full(before.leaf.size, -1)
    for leaf, tile in tracer.tiles.items():
        mine = before.leaf == leaf
        found[mine] = bases[leaf] + before.device[mine] * tile.elements + before.place[mine]
    assert (before.leaf[found == -1] == NOWHERE).all()
    return found.reshape(module.devices, *value.array.dims), machine.values[value.name]


def everywhere(devices, dims):
    count = int(np.prod(dims))
    return Points(np.repeat(np.arange(devices), count), unravel(np.tile(np.arange(count), devices), dims))


def traced(text, name):
    return followed(text, lambda flow: (flow.origin(Value(flow.regions[0], name)), frozenset()))


def program(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        "HloModule m, num_partitions=4\n\nENTRY %main {\n  %p = f32[6,4]{1,0} parameter(0)\n"
        f"  %q = f32[6,4]{{1,0}} parameter(1){ID}{body}\n}}\n"
    )


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_move(move):
    got, want = traced(program(f"ROOT %r = {move}"), "r")
    np.testing.assert_array_equal(got, want)


def test_an_all_to_all_of_pieces():
    lines = [
        *(f"%s{i} = f32[3,4]{{1,0}} slice(%p), slice={{[{3 * i}:{3 * i + 3}], [0:4]}}" for i in range(2)),
        "%t = (f32[3,4]{1,0}, f32[3,4]{1,0}) all-to-all(%s0, %s1), replica_groups={{0,2},{3,1}}",
        *(f"%g{i} = f32[3,4]{{1,0}} get-tuple-element(%t), index={i}" for i in range(2)),
        "ROOT %r = f32[3,8]{1,0} concatenate(%g0, %g1), dimensions={1}",
    ]
    got, want = traced(program(*lines), "r")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "which",
    [
        ["%which = pred[] compare(%at, %zero), direction=EQ"],
        ["%i = s32[6,4]{1,0} iota(), iota_dimension=0", "%w = s32[6,4]{1,0} broadcast(%at), dimensions={}",
         "%which = pred[6,4]{1,0} compare(%i, %w), direction=LT"],
    ],
    ids=["by device", "by place"],
)  # fmt: skip
def test_a_choice_of_two_moves(which):
    lines = [
        "%a = f32[6,4]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
        *which,
        "ROOT %r = f32[6,4]{1,0} select(%which, %a, %q)",
    ]
    got, want = traced(program(*lines), "r")
    np.testing.assert_array_equal(got, want)


def test_through_fusions():
    text = program("%g = f32[24,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
                   "ROOT %r = f32[4,2]{1,0} fusion(%at, %g), kind=kLoop, calls=%inner")  # fmt: skip
    inner = """%inner {
  %b = f32[24,4]{1,0} parameter(1)
  %a = s32[] parameter(0)
  %z = s32[] constant(0)
  %d = f32[2,4]{1,0} dynamic-slice(%b, %a, %z), dynamic_slice_sizes={2,4}
  ROOT %t = f32[4,2]{1,0} transpose(%d), dimensions={1,0}
}

ENTRY"""
    got, want = traced(text.replace("ENTRY", inner), "r")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_a_recorded_program(path):
    """All sizes are divided by 64, in the text: what is 512 x 512 x 256 there has 256 elements here."""
    got, want = followed(_shrunk(path.read_text()), _rebuilding)
    assert got.shape == (8, 8, 1, 4)
    np.testing.assert_array_equal(got, want)


def _rebuilding(flow):
    """The result of the chain that receives most, and what it was made of."""
    movement = Movement(flow, Scalars(flow, flow.module.devices))
    found = chains(flow, movement, hlo.collectives(flow.module, every_branch=True))
    chain = max(found, key=lambda chain: sum(one.received_bytes for one in chain.collectives))
    (value,) = chain.results
    return value, chain.leaves


def _shrunk(text):
    """All sizes of the program divided by 64, its offsets too; 32768 are two dims of it."""
    smaller = re.sub(r"\b32768\b", "8", text)
    return re.sub(r"\b(2048|512|256|128|64)\b", lambda found: str(int(found[1]) // 64), smaller)


def test_an_offset_that_is_not_written():
    text = program("ROOT %r = f32[2,4]{1,0} dynamic-slice(%p, %at, %zero), dynamic_slice_sizes={2,4}")
    module = hlo.parse(text.replace("{2, 0, 6, 4}", "{...}"))
    flow = Flow(module)
    scalars = Scalars(flow, 4)
    movement = Movement(flow, scalars)
    value = Value(flow.regions[0], "r")
    assert scalars.at(Value(flow.regions[0], "at")) is UNKNOWN
    assert movement.sources(value) == [Value(flow.regions[0], "p")]  # it is still a move,
    with pytest.raises(Untraceable, match="not in the text"):  # but nobody knows which
        movement.parts(value, Points(np.zeros(1, int), np.zeros((2, 1), int)))


def test_an_offset_of_data_is_no_move():
    text = program(
        "%n = s32[] parameter(2)", "ROOT %r = f32[2,4]{1,0} dynamic-slice(%p, %n, %zero), dynamic_slice_sizes={2,4}"
    )
    flow = Flow(hlo.parse(text))
    movement = Movement(flow, Scalars(flow, 4))
    assert movement.sources(Value(flow.regions[0], "r")) is None
