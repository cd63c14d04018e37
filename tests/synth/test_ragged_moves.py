"""Moves of arrays in pieces of any size, against tables of owners in numpy (`tests.owners`)."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

import reshard as rs
from tests.endpoint_lp import forwarded
from tests.oracle import PADDING as NONE
from tests.oracle import check, tiles_of
from tests.owners import PADDING, Owned, assert_moved
from tests.sampling import few_or_all

MESHES = [{"x": 4}, {"d": 4}, {"x": 2, "y": 2}, {"x": 3, "y": 2}, {"a": 2, "b": 2, "c": 2}, {"x": 6}, {"x": 1, "y": 5}]
SHAPES = [(1,), (2,), (7,), (24,), (5, 4), (13, 1), (0, 3), (10, 6), (3, 2, 4)]
BATCH = 60


def random_pair(choose: random.Random, across: bool) -> tuple[Owned, Owned]:
    """Two layouts of one array, on meshes of as many devices, or `across` two sets that may have some in common."""
    shape, axes = choose.choice(SHAPES), choose.choice(MESHES)
    alike = [other for other in MESHES if np.prod(list(other.values())) == np.prod(list(axes.values()))]
    meshes = [rs.Mesh(axes), rs.Mesh(choose.choice(alike))]
    if across:
        axes = choose.choice(MESHES)
        devices = choose.sample(range(12), int(np.prod(list(axes.values()))))
        meshes[1] = rs.Mesh(axes, device_ids=devices)
    source, target = (Owned.random(choose, mesh, shape) for mesh in meshes)
    return source, target


def check_move(choose: random.Random, *, across: bool, proves: bool) -> None:
    source, target = random_pair(choose, across)
    whole = np.arange(1, 1 + np.prod(source.layout.shape), dtype=np.int32).reshape(source.layout.shape)
    for end in (source, target):
        assert rs.Layout.parse(str(end.layout), end.layout.mesh) == end.layout
        for device in end.layout.mesh.devices:
            assert end.layout.tile_shape_of(device) == tuple(map(len, end.indices(device)))
    plan = rs.plan(source.layout, target.layout)
    assert_moved(target, whole, rs.simulate(plan, source.tiles(whole)))
    # What the worst device lacks, element by element.
    held, wanted = source.held(whole.size), target.held(whole.size)
    lacks = max(int((mask & ~held.get(device, np.zeros_like(mask))).sum()) for device, mask in wanted.items())
    assert plan.lower_bound_bytes == 4 * lacks, f"{plan}"
    if not across and (source.layout.ragged or target.layout.ragged):
        assert plan.received_bytes == 4 * lacks, f"{plan}"
    assert rs.Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    if proves:
        rs.prove(plan)
        rs.verify(plan.to_descriptors(), source.layout, target.layout)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("long", [1, 1 << 60])
def test_random_moves(monkeypatch: pytest.MonkeyPatch, across: bool, long: int):
    """Tables of at least `long` items go through numpy: every one, and none."""
    monkeypatch.setattr("reshard.types.pieces._LONG", long)
    choose = random.Random(310 + across + long)
    for number in range(BATCH):
        check_move(choose, across=across, proves=number % 4 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_a_thousand_random_moves(seed: int):
    choose = random.Random(3100 + seed)
    for number in range(BATCH):
        check_move(choose, across=seed % 2 == 1, proves=number % 10 == 0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(200))
def test_twenty_thousand_random_moves(seed: int):
    choose = random.Random(31000 + seed)
    for number in range(BATCH):
        check_move(choose, across=seed % 10 == 1, proves=number % 10 == 0)


@pytest.mark.parametrize("count", few_or_all(60, 300))
def test_transitions_between_placements_are_at_the_bound(count: int):
    """Torch's chunks of chunks, strided ones too (`tests/types/notation/test_dtensor.py`)."""
    choose = random.Random(314)
    for _ in range(count):
        mesh, shape = choose.choice([(4,), (2, 3), (4, 2), (2, 2, 2)]), choose.choice([(10, 7), (12, 8), (5, 3)])
        kinds = ["R", "S(0)", "S(0)", "S(1)", "_S(0, 2)", "_S(1, 3)"]
        ends = [rs.Layout.from_dtensor([choose.choice(kinds) for _ in mesh], mesh, shape, "int32") for _ in range(2)]
        plan = rs.plan(*ends)
        check(plan)
        source, target = map(tiles_of, ends)
        lacks = max(len({*target[device].flat} - {*source[device].flat, NONE}) for device in ends[0].mesh.devices)
        assert plan.received_bytes == plan.lower_bound_bytes == 4 * lacks, f"{plan}"


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("count", few_or_all(15, 300))
def test_the_busiest_device_is_within_a_tenth_of_a_linear_program(count: int, across: bool):
    """Or one element: of one in which devices pass on what they receive, on one set and on two, most with replicas."""
    choose = random.Random(316 + across)
    while count:
        axes, other = ({"x": 4, "y": choose.choice([1, 2, 3])} for _ in range(2))
        devices = np.prod(list(axes.values()))
        apart = int(choose.choice([devices // 2, devices]))
        size = int(np.prod(list(other.values())))
        meshes = rs.Mesh(axes), rs.Mesh(other, device_ids=range(apart, apart + size)) if across else rs.Mesh(axes)
        shape = tuple(choose.choice([24, 32, 48]) for _ in range(choose.choice([1, 2])))
        source, target = (Owned.random(choose, mesh, shape) for mesh in meshes)
        if not source.layout.ragged and not target.layout.ragged:
            continue
        count -= 1
        plan = rs.plan(source.layout, target.layout)
        optimum = math.ceil(forwarded(source.layout, target.layout) - 1e-6)
        assert max(plan.sent_bytes, plan.received_bytes) <= 4 * max(1.1 * optimum, optimum + 1), f"{plan}"
        whole = np.arange(1, 1 + np.prod(shape), dtype=np.int32).reshape(shape)
        assert_moved(target, whole, rs.simulate(plan, source.tiles(whole)))
        if count % 10 == 0:
            rs.prove(plan)


def test_views_of_pieces():
    """Dims in pieces are permuted, and others split and merged beside them; a digit of another dim is taken."""
    choose = random.Random(311)
    for _ in range(20):
        mesh = rs.Mesh(choose.choice(MESHES))
        rows, columns = choose.randint(1, 9), choose.choice([2, 4, 6])
        whole = np.arange(1, 1 + rows * columns, dtype=np.int32).reshape(rows, columns)
        source = Owned.random(choose, mesh, (rows, columns))
        for view, moved in (
            ({"view": "a b -> b a"}, whole.T),
            ({"view": "a (b c) -> c a b", "c": 2}, whole.reshape(rows, -1, 2).transpose(2, 0, 1)),
            ({"view": "a b -> (a b)"}, whole.reshape(-1)),
            ({"view": "a b -> a b", "take": {"b": 1}}, whole[:, 1]),
        ):
            target = Owned.random(choose, mesh, moved.shape)
            plan = rs.plan(rs.Move(source.layout, target.layout, **view))
            assert_moved(target, moved, rs.simulate(plan, source.tiles(whole)))


def test_what_is_held_already_does_not_move():
    choose = random.Random(312)
    for _ in range(60):
        source, target = random_pair(choose, across=False)
        shape = source.layout.shape
        have = Owned.random(choose, target.layout.mesh, shape)
        stale = [choose.randrange(shape[0])] if shape[0] else []
        plan = rs.plan(source.layout, target.layout, have=have.layout, changed=stale)
        changed = np.zeros(shape, bool)
        changed[stale] = True
        fresh = {device: mask & ~changed.reshape(-1) for device, mask in have.held(changed.size).items()}
        held, wanted = source.held(changed.size), target.held(changed.size)
        lacks = max(int((wanted[device] & ~held[device] & ~fresh[device]).sum()) for device in wanted)
        assert plan.received_bytes == 4 * lacks, f"{plan}"
        rs.prove(plan)


def test_sums_to_pieces_and_from_them():
    mesh = rs.Mesh(x=2, y=2)
    whole = np.arange(1, 21, dtype=np.int32).reshape(10, 2)
    pieces = rs.Layout.parse("s32[{x}(3,7), 2]", mesh)
    plan = rs.plan(rs.Layout.parse("s32[10, 2] + sum{y}", mesh), pieces)
    parts = rs.simulate(plan, {device: whole * (1 + 9 * (device % 2)) for device in mesh.devices})
    assert np.array_equal(parts[2][:7], whole[3:] * 11)
    plan = rs.plan(pieces, rs.Layout.parse("s32[10, 2] + sum{x}", mesh))
    ends = {0: whole[:3], 1: whole[:3], 2: whole[3:], 3: whole[3:]}
    padded = {device: np.pad(tile, ((0, 7 - len(tile)), (0, 0))) for device, tile in ends.items()}
    tiles = rs.simulate(plan, padded)
    assert np.array_equal(tiles[0] + tiles[2], whole)


def check_sums(choose: random.Random) -> rs.Plan:
    """A move of an array of which some dims stay as they are, while sums are finished, kept and started."""
    mesh, shape = rs.Mesh(choose.choice(MESHES[2:])), choose.choice(SHAPES)
    source = Owned.random(choose, mesh, shape, sums=True)
    target = Owned.random(choose, mesh, shape, like=source, sums=True)
    whole = np.arange(1, 1 + np.prod(shape), dtype=np.int32).reshape(shape)
    parts = {device: source.summands(device) for device in mesh.devices}
    tiles = {device: tile * (1 + parts[device][0]) for device, tile in source.tiles(whole).items()}
    plan = rs.plan(source.layout, target.layout, network=choose.choice([None, None, "tpu-v5p"]))
    moved = rs.simulate(plan, tiles)
    whole *= sum(1 + parts[device][0] for device in parts[0][1])
    for device, wanted in target.tiles(whole).items():
        found, own = sum(moved[one] for one in target.summands(device)[1]), wanted != PADDING
        assert np.array_equal(found[own], wanted[own]), f"device {device}: {plan}"
    assert plan.received_bytes >= plan.lower_bound_bytes, f"{plan}"
    rs.prove(plan)
    assert rs.Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    return plan


@pytest.mark.parametrize("seed", range(2))
def test_sums_and_dims_that_stay(seed: int):
    choose = random.Random(314 + seed)
    kinds = Counter(step.kind for _ in range(120) for step in check_sums(choose).steps)
    assert len(kinds) >= 6, kinds


def test_dims_in_pieces_that_stay_take_part_in_collectives():
    """As many launches, and as many bytes a device, as beside an even dim of the largest piece."""
    mesh = rs.Mesh(x=4, y=2, z=2)
    for before, after in (
        ("s32[{rows}, {y}{z}2]", "s32[{rows}, 8]"),
        ("s32[{rows}, 8]", "s32[{rows}, {y}4]"),
        ("s32[{rows}, {y}4, 6]", "s32[{rows}, 8, {y}3]"),
        ("s32[{rows}, {y}{z}2]", "s32[{rows}, {z}{y}2]"),
        ("s32[{rows}, 8] + sum{y}", "s32[{rows}, 8]"),
        ("s32[{rows}, 8] + sum{y}{z}", "s32[{rows}, {y}{z}2]"),
        ("s32[{rows}, {y}4]", "s32[{rows}, 8] + sum{y}"),
        ("s32[{y}4, {rows}]", "s32[8, {rows}]"),
    ):
        plans: list[rs.Plan] = []
        for rows in ("{x}(3@0,1@3,2@1,2@0)", "{x}5"):
            ends = [rs.Layout.parse(end.replace("{rows}", rows), mesh) for end in (before, after)]
            plans.append(rs.plan(*ends))
        assert plans[0].launches == plans[1].launches, f"{plans[0]}"
        assert [step.kind for step in plans[0].steps] == [step.kind for step in plans[1].steps]
        assert plans[0].received_bytes == plans[1].received_bytes
        assert "sum" in before or plans[0].lower_bound_bytes == plans[0].received_bytes


def test_what_lies_alike_is_one_launch_to_a_neighbour():
    """A graph's halo: each device needs rows of its two neighbours only, whatever the number of devices."""
    for devices in (8, 64):
        mesh = rs.Mesh(x=devices)
        source = rs.Layout.from_sizes([10] * devices, mesh, (10 * devices,), "float32")
        shifted = [9, *[10] * (devices - 2), 11]
        plan = rs.plan(source, rs.Layout.from_sizes(shifted, mesh, (10 * devices,), "float32"))
        assert (plan.launches, plan.received_bytes) == (1, 4)


def test_pieces_of_one_element_stay_while_uneven_dims_are_gathered():
    """No refinement lists their local digit, whose radix is 1."""
    mesh = rs.Mesh(a=2, b=2, c=2)
    ends = [rs.Layout.parse(f"s32[{text}]", mesh) for text in ("{c}2/3, {a}(1@1,1@0), {b}2", "3, {a}(1@1,1@0), 4")]
    check(rs.plan(*ends))


def test_tiles_of_one_shape_are_not_taken_for_equal_ones():
    """Both sides have room for 4 elements on each of two devices, but no tile of one is a tile of the other."""
    source = rs.Layout.parse("s32[{x}(1,4)]", rs.Mesh(x=2))
    target = rs.Layout.parse("s32[{x}(1@1,4@0)]", rs.Mesh({"x": 2}, device_ids=[2, 3]))
    plan = rs.plan(source, target)
    moved = rs.simulate(plan, {0: np.array([7, 0, 0, 0], "i4"), 1: np.array([1, 2, 3, 4], "i4")})
    assert (moved[2].tolist(), moved[3].tolist()[:1]) == ([1, 2, 3, 4], [7])


def test_a_wrong_list_of_transfers_is_refused():
    mesh = rs.Mesh(x=4)
    source, target = (rs.Layout.parse(text, mesh) for text in ("f32[{x}(3,5,0,2)]", "f32[{x}(2@1,2@0,6@3)]"))
    transfers = list(rs.plan(source, target).to_descriptors())
    rs.verify(transfers, source, target)
    for at in range(len(transfers)):
        with pytest.raises(rs.errors.ReshardError):
            rs.verify([*transfers[:at], *transfers[at + 1 :]], source, target)
    with pytest.raises(rs.errors.ReshardError):
        rs.verify(transfers, rs.Layout.parse("f32[{x}(3,4,1,2)]", mesh), target)


def test_many_arrays_in_one_plan():
    choose = random.Random(313)
    mesh = rs.Mesh(x=2, y=2)
    pairs = {str(at): [Owned.random(choose, mesh, (9, 4)) for _ in range(2)] for at in range(6)}
    tree = rs.plan_tree({name: (source.layout, target.layout) for name, (source, target) in pairs.items()})
    whole = {name: np.arange(1, 37, dtype=np.int32).reshape(9, 4) + 100 * at for at, name in enumerate(pairs)}
    moved = rs.simulate(tree, {name: source.tiles(whole[name]) for name, (source, _) in pairs.items()})
    for name, (_, target) in pairs.items():
        assert_moved(target, whole[name], moved[name])
    # A loop over devices, so that the bound is joint and not the sum of the worst.
    held = {name: [end.held(36) for end in ends] for name, ends in pairs.items()}
    lacks = [sum(int((after[d] & ~before[d]).sum()) for before, after in held.values()) for d in mesh.devices]
    assert tree.lower_bound_bytes == 4 * max(lacks)
    assert list(itertools.chain(tree.plans)) == list(pairs)
