"""The arrays that a chain rebuilds, and the numbers of elements by which that is seen."""

import numpy as np
import pytest

import reshard.doctor.rebuilds as rebuilds
from reshard.doctor import examine
from reshard.doctor.chain_reader import LeafOrigin
from reshard.doctor.dataflow.trace import Origins
from reshard.doctor.rebuilds import ElementKeys, HeldElements
from tests.doctor.fragments import FORTH, GATHER, HERE, OFFSET, RESHARD, SLICE, ZERO, known, move, text

USE = "ROOT %r = f32[8,2]{1,0} add(%d, %d)"
ROWS = "%e = f32[2,8]{1,0} dynamic-slice(%g, %at, %zero), dynamic_slice_sizes={2,8}"
TABLE = ["%id = u32[] partition-id()", "%table = s32[4]{0} constant({...})",
         "%row = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}", "%at = s32[] bitcast(%row)",
         "%zero = s32[] constant(0)"]  # fmt: skip
HALVES = "%h = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
OWN = "%own = f32[2,2]{1,0} dynamic-slice(%p, %zero, %at), dynamic_slice_sizes={2,2}"
RING = [f"%m{n} = f32[2,8]{{1,0}} collective-permute(%p), source_target_pairs={{{pairs}}}"
        for n in range(1, 4) for pairs in [",".join(f"{{{d},{(d + n) % 4}}}" for d in range(4))]]  # fmt: skip
JOINED = "%j = f32[8,8]{1,0} concatenate(%p, %m1, %m2, %m3), dimensions={0}"

REBUILT = {
    "gathered and sliced": RESHARD,
    "through a copy, a transpose and a convert": [
        *OFFSET, ZERO, GATHER, "%c = f32[8,8]{0,1} copy(%g)", "%t = f32[8,8]{1,0} transpose(%c), dimensions={1,0}",
        "%b = bf16[8,8]{1,0} convert(%t)",
        "%s = bf16[2,8]{1,0} dynamic-slice(%b, %at, %zero), dynamic_slice_sizes={2,8}",
        "ROOT %r = bf16[2,8]{1,0} add(%s, %s)"],
    "in two steps": [
        *OFFSET, ZERO, HALVES,
        "%g = f32[8,8]{1,0} all-gather(%h), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}", SLICE, USE],
    "joined from a ring of permutes": [
        *OFFSET, ZERO, *RING, JOINED,
        "%s = f32[8,2]{1,0} dynamic-slice(%j, %zero, %at), dynamic_slice_sizes={8,2}",
        "ROOT %r = f32[8,2]{1,0} add(%s, %s)"],
    "of windows that overlap": [
        *OFFSET, ZERO, GATHER, "%w = f32[3,8]{1,0} dynamic-slice(%g, %at, %zero), dynamic_slice_sizes={3,8}",
        "ROOT %r = f32[3,8]{1,0} add(%w, %w)"],
    "used in two parts that are not all of it": [
        *OFFSET, ZERO, GATHER, SLICE, ROWS, "%f = f32[8,2]{1,0} add(%d, %d)", "%k = f32[2,8]{1,0} add(%e, %e)",
        "ROOT %r = (f32[8,2]{1,0}, f32[2,8]{1,0}) tuple(%f, %k)"],
    "sliced anew for each use": [
        *OFFSET, ZERO, GATHER, *(SLICE.replace("%d", f"%d{n}") for n in range(5)),
        "%s0 = f32[8,2]{1,0} add(%d0, %d1)", "%s1 = f32[8,2]{1,0} add(%d2, %d3)",
        "ROOT %r = (f32[8,2]{1,0}, f32[8,2]{1,0}, f32[8,2]{1,0}) tuple(%s0, %s1, %d4)"],
    "offsets left out of the text": [*TABLE, GATHER, SLICE, USE],
}  # fmt: skip

USED = {
    "all of it": [GATHER, "ROOT %r = f32[8,8]{1,0} add(%g, %g)"],
    "all of it, in another form": [
        GATHER, "%t = f32[64]{0} reshape(%g)", "ROOT %r = f32[64]{0} add(%t, %t)"],
    "all of it, and a slice of it": [
        *OFFSET, ZERO, GATHER, SLICE, "%k = f32[8,8]{1,0} add(%g, %g)",
        "ROOT %r = (f32[8,2]{1,0}, f32[8,8]{1,0}) tuple(%d, %k)"],
    "by a loop's offset, which is data": [
        ZERO, "%i = u32[] parameter(1)", GATHER,
        "%d = f32[8,2]{1,0} dynamic-slice(%g, %zero, %i), dynamic_slice_sizes={8,2}", USE],
    "cut alike everywhere, as padding is": [
        GATHER, "%s = f32[7,8]{1,0} slice(%g), slice={[0:7], [0:8]}", "ROOT %r = f32[7,8]{1,0} add(%s, %s)"],
    "padded, and larger than it": [
        GATHER, "%none = f32[] constant(0)", "%w = f32[80,8]{1,0} pad(%g, %none), padding=0_72x0_0",
        "ROOT %r = f32[80,8]{1,0} add(%w, %w)"],
    "all of it by the last device, as in a cumsum": [
        *OFFSET, ZERO, GATHER, "%none = f32[] constant(0)",
        "%w = f32[14,8]{1,0} pad(%g, %none), padding=6_0x0_0",
        "%s = f32[8,8]{1,0} dynamic-slice(%w, %at, %zero), dynamic_slice_sizes={8,8}",
        "ROOT %r = f32[8,8]{1,0} add(%s, %s)"],
    "all of it, in an order for each device": [
        *OFFSET, ZERO, GATHER, "%w = f32[16,8]{1,0} concatenate(%g, %g), dimensions={0}",
        "%s = f32[8,8]{1,0} dynamic-slice(%w, %at, %zero), dynamic_slice_sizes={8,8}",
        "ROOT %r = f32[8,8]{1,0} add(%s, %s)"],
    "what each device has already": [
        *OFFSET, ZERO, OWN, "%g = f32[2,8]{1,0} all-gather(%own), replica_groups={{0,1,2,3}}, dimensions={1}",
        "%d = f32[2,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={2,2}",
        "ROOT %r = f32[2,2]{1,0} add(%d, %d)"],
    "a ring's tiles, each whole": [*RING, JOINED, "ROOT %r = f32[8,8]{1,0} add(%j, %j)"],
}  # fmt: skip


def extents(lines, **options):
    return [place.rebuilds for place in examine(text(*lines), **options).places]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", REBUILT)
def test_planted(name, sampled, monkeypatch):
    """The same for large arrays; there a ring is not recognized, whose order differs from device to device."""
    if sampled:
        monkeypatch.setattr(rebuilds, "_EXACT", 0)
    missed = sampled and "ring" in name
    (place,) = examine(text(*REBUILT[name])).places
    assert (place.rebuilds, place.rebuilt and place.rebuilt.dims) == (("", None) if missed else ("whole", (8, 8)))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", USED)
def test_look_alikes(name, sampled, monkeypatch):
    if sampled:
        monkeypatch.setattr(rebuilds, "_EXACT", 0)
    assert set(extents(USED[name])) <= {""}


def test_two_arrays_in_one_collective():
    """One is used as a whole, as in FSDP; the other is cut: only that one is rebuilt, and its line named."""
    pair = "(f32[8,8]{1,0}, f32[8,4]{1,0})"
    lines = [
        *OFFSET, ZERO, "%q = f32[2,4]{1,0} parameter(1)",
        f"%t = {pair} all-gather(%p, %q), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}",
        "%g = f32[8,8]{1,0} get-tuple-element(%t), index=0", "%h = f32[8,4]{1,0} get-tuple-element(%t), index=1",
        "%d = f32[8,1]{1,0} dynamic-slice(%h, %zero, %id), dynamic_slice_sizes={8,1}",
        "%k = f32[8,1]{1,0} add(%d, %d)", "%l = f32[8,8]{1,0} add(%g, %g)",
        "ROOT %r = (f32[8,8]{1,0}, f32[8,1]{1,0}) tuple(%l, %k)",
    ]  # fmt: skip
    moves = [known("fsdp.py:3", "f32[{a}2, 8]", "f32[8, 8]"), known("bad.py:7", "f32[{a}2, 4]", "f32[8, {a}]")]
    (place,) = examine(text(*lines), known=moves).places
    assert (place.rebuilds, place.rebuilt.dims, place.where.file) == ("whole", (8, 4), "bad.py")
    assert str(place.rebuilt_move.source) == "f32[{a}2, 4]"


def test_a_part_that_all_of_a_group_has():
    """Pairs of devices gather 4 rows, and slice columns: whole only if the program says that pairs are copies."""
    half = "%d = f32[4,4]{1,0} dynamic-slice(%h, %zero, %at), dynamic_slice_sizes={4,4}"
    table = ["%id = u32[] partition-id()", "%table = u32[4]{0} constant({0, 4, 0, 4})",
             "%row = u32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}",
             "%at = u32[] bitcast(%row)"]  # fmt: skip
    lines = [*table, ZERO, HALVES, half, "ROOT %r = f32[4,4]{1,0} add(%d, %d)"]
    assert extents(lines) == ["group"]


def test_what_a_user_gathers_in_a_shard_map_is_not_judged():
    gather = f'{GATHER}, metadata={{op_name="jit(f)/shard_map/all_gather"}}'
    assert extents([*OFFSET, ZERO, gather, SLICE, USE]) == [""]


def test_the_line_is_that_of_the_known_move():
    (place,) = examine(text(*RESHARD), known=[known("train.py:7", *FORTH)]).places
    assert (place.rebuilds, place.where.file, place.where.line) == ("whole", "train.py", 7)


def held(*rows):
    """Elements as rows of device, leaf, source device and place."""
    device, *origins = np.array(rows, np.int64).reshape(-1, 4).T
    return HeldElements(device, Origins(*origins))


def test_elements_are_equal_if_leaf_place_and_copy_are():
    leaves = {5: LeafOrigin(np.array([0, 0, 2, 2]), move(), HERE, True)}
    elements = held((0, 5, 0, 3), (1, 5, 1, 3), (1, 5, 2, 3), (1, 5, 0, 4), (1, 9, 0, 3), (1, 9, 1, 3))
    keys = ElementKeys(4, leaves, [elements])
    numbers = keys.of(elements)
    assert numbers[0] == numbers[1] and len(set(numbers.tolist())) == 5
    assert keys.leaf(numbers).tolist() == [5, 5, 5, 5, 9, 9]
    assert keys.had(numbers, np.array(1)).tolist() == [True, True, False, True, False, True]
