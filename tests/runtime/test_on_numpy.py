"""The reference runtime: its accounts of memory and traffic against figures by hand, dtypes, empty and scalar arrays,
trees, steps in place, views, and that the given tiles stay as they were."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import StepError, TileError
from reshard.geometry.blocks import Axis, Block
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange, Transfer
from reshard.lower.program import InParts, join_launches
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.split_steps import part_regions, possible_counts
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.rules.tile_view import TileView
from reshard.runtime import Account, measure, on_numpy, run
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_numpy import run_instruction
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import pairs
from tests.oracle import PADDING, check, source_tiles, tiles_of
from tests.trees import check_tree, llama

MESH = Mesh(x=4, y=2)


def one_step(
    kind: str, source: str, target: str, mesh: Mesh = MESH, mode: StepMode | None = None, donate: bool = False
) -> Plan:
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    return chain(before, after, [StepSpec(kind, after, mode or StepMode())], donate)


# ---- accounts by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "target", "mesh", "peak", "received", "launches"),
    [
        # Operand 64 B, result 16 B.
        ("slice", "f32[16]", "f32[{x}4]", MESH, 80, 0, 0),
        # 16 and 64 B; blocks arrive in the result itself.
        ("all_gather", "f32[{x}4]", "f32[16]", MESH, 80, 48, 1),
        # 64 and 256 B, and a buffer of 256 B from which the columns are sorted.
        ("all_gather", "f32[4, {x}4]", "f32[4, 16]", MESH, 576, 192, 1),
        # 256 and 256 B, and the packed operand.
        ("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", MESH, 768, 192, 1),
        # Packed and unpacked: operand, packed operand and arrivals, then operand, arrivals and result.
        ("all_to_all", "f32[2, {x}4, 16]", "f32[2, 16, {x}4]", MESH, 4 * 512 - 512, 384, 1),
        ("permute", "f32[{x}{y}2]", "f32[{y}{x}2]", MESH, 16, 8, 1),
        ("reduce_scatter", "f32[16] + sum{x}", "f32[{x}4]", MESH, 80, 48, 1),
        ("reduce_scatter", "f32[4, 16] + sum{x}", "f32[4, {x}4]", MESH, 256 + 64 + 256, 192, 1),
        ("all_reduce", "f32[16] + sum{x}", "f32[16]", MESH, 128, 96, 1),
        # Tiles of 256 B and two messages of 64 B in flight on every device.
        ("exchange", "f32[{x}4, 16]", "f32[16, {x}4]", MESH, 640, 192, 3),
        ("exchange", "f32[{x}4]", "f32[16]", MESH, 80, 48, 3),
    ],
)
def test_memory_and_traffic_of_one_step(
    kind: str, source: str, target: str, mesh: Mesh, peak: int, received: int, launches: int
):
    memory = check(one_step(kind, source, target, mesh))
    assert (memory.peak_bytes, memory.received_bytes, memory.launches) == (peak, received, launches)


def test_source_and_target_are_left_at_the_end():
    for kind, source, target in (
        ("all_to_all", "f32[2, {x}4, 16]", "f32[2, 16, {x}4]"),
        ("all_gather", "f32[4, {x}4]", "f32[4, 16]"),
        ("exchange", "f32[{x}4, 16]", "f32[16, {x}4]"),
        ("reduce_scatter", "f32[4, 16] + sum{x}", "f32[4, {x}4]"),
    ):
        for donate in (False, True):
            plan = one_step(kind, source, target, donate=donate)
            memory = check(plan)
            kept = 0 if donate else plan.source.tile_bytes
            assert set(memory.live.values()) == {kept + plan.target.tile_bytes}


def test_memory_of_three_steps():
    mesh = Mesh(x=2, y=2, z=2)
    source, target = Layout.parse("f32[{x}4, {z}4, 8, 8]", mesh), Layout.parse("f32[8, 8, {z}4, {y}4]", mesh)
    plan = rs.plan(source, target)
    assert [s.kind for s in plan.steps] == ["slice", "all_to_all", "all_gather"]
    tile = 4 * 4 * 8 * 8 * 4
    # Slice: source and half of it. All-to-all of halves: the source, two halves, and buffers (the blocks lie inside
    # of the first dim). Gather: the source, a half and a whole tile.
    assert check(plan).peak_bytes == plan.peak_bytes == max(tile * 3 // 2, plan.steps[1].live_bytes, tile * 5 // 2)
    given_up = rs.plan(source, target, donate=True)
    assert check(given_up).peak_bytes == given_up.peak_bytes < plan.peak_bytes


def test_memory_in_place():
    plan = one_step("exchange", "f32[{x}4, 16]", "f32[16, {x}4]", mode=StepMode(1, in_place=True), donate=True)
    assert check(plan).peak_bytes == 256
    plan = one_step("exchange", "f32[{x}4, 16]", "f32[16, {x}4]", mode=StepMode(4, in_place=True), donate=True)
    assert check(plan).peak_bytes == 256 + 2 * 16
    plan = one_step("exchange", "f32[{x}4]", "f32[16]", mode=StepMode(1, in_place=True), donate=True)
    assert check(plan).peak_bytes == 64


def test_memory_in_place_of_elements_below_a_byte():
    """A buffer of two int4 is one byte, also while it grows from a tile of one."""
    plan = one_step("exchange", "s4[{x}]", "s4[2]", Mesh(x=2), mode=StepMode(1, in_place=True), donate=True)
    tiles = {device: np.array([device], numpy_dtype("int4")) for device in (0, 1)}
    memory = Account("int4")
    moved = run(lower_plan(plan), tiles, memory)
    assert moved[0].tolist() == [0, 1]
    assert (memory.peak_bytes, memory.live[0]) == (1, 1)


def test_received_bytes_of_each_device():
    memory = check(one_step("exchange", "f32[{x}3/10]", "f32[10]", Mesh(x=4)))
    # Devices hold 3, 3, 3 and 1 elements of ten.
    assert dict(memory.received) == {0: 28, 1: 28, 2: 28, 3: 36}


def test_a_tile_that_stays_is_not_received():
    memory = check(one_step("permute", "f32[{x}{y}2]", "f32[{y}{x}2]"))
    # Pieces 0 and 7 stay where they are.
    assert {d for d in MESH.devices if not memory.received[d]} == {0, 7}


# ---- dtypes --------------------------------------------------------------------------------------

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "complex128"]
SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float8_e8m0fnu"]
MOVES = [
    ("[{x}4, 16]", "[16, {x}4]"),
    ("[4, {x}4]", "[4, 16]"),
    ("[{x}{y}2]", "[{y}{x}2]"),
    ("[16]", "[{x}4]"),
    ("[{x}3/10]", "[10]"),
    ("[{x}3/10, 3]", "[{x}{y}2/10, 3]"),
]


@pytest.mark.fast(28)
@pytest.mark.parametrize("name", DTYPES + SMALL)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_dtypes(name: str, source: str, target: str):
    dtype = np.dtype(name if name in DTYPES else getattr(pytest.importorskip("ml_dtypes"), name))
    before, after = Layout.parse(f"{name}{source}", MESH), Layout.parse(f"{name}{target}", MESH)
    values = np.arange(np.prod(before.shape)) * 7 % 5
    values = (values % 2 if name == "bool" else values + 1).astype(dtype)
    plan, memory = rs.plan(before, after), Account(name)
    moved = rs.simulate(plan, spread(before, values), memory)
    for device, tile in spread(after, values).items():
        real = tiles_of(after)[device] != PADDING
        assert moved[device].dtype == dtype
        assert np.array_equal(moved[device][real], tile[real])
    assert memory.received_bytes == plan.received_bytes
    assert memory.peak_bytes <= plan.peak_bytes


def spread(layout: Layout, values: np.ndarray) -> dict[int, np.ndarray]:
    """The tiles of an array of these values."""
    return {d: np.where(t == PADDING, values[:1], values[np.maximum(t, 0)]) for d, t in tiles_of(layout).items()}


@settings(max_examples=100)
@given(pairs("int4"))
def test_int4_keeps_its_promises(pair: tuple[Layout, Layout]):
    """Bytes of half-byte elements are rounded up, in the promise and in the measurement alike."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    plan = rs.plan(*pair)
    memory = Account("int4")
    tiles = {d: (t % 7).astype(ml_dtypes.int4) for d, t in tiles_of(plan.source).items()}
    moved = rs.simulate(plan, tiles, memory)
    for device, tile in tiles_of(plan.target).items():
        real = tile != PADDING
        assert np.array_equal(moved[device][real].astype(int), (tile % 7)[real])
    assert memory.received_bytes <= plan.received_bytes
    assert memory.peak_bytes <= plan.peak_bytes


def test_nan_payloads_and_minus_zero_survive():
    before, after = Layout.parse("f32[{x}1, 4]", MESH), Layout.parse("f32[4, {x}]", MESH)
    values = np.array([[np.nan, -0.0, np.inf, 1]] * 4, np.float32)
    values.view(np.uint32)[0, 0] = 0x7FC12345  # a NaN with a payload
    tiles = {device: values[device // 2 : device // 2 + 1] for device in MESH.devices}
    moved = rs.simulate(rs.plan(before, after), tiles)
    for device in MESH.devices:
        column = device // 2
        assert np.array_equal(moved[device].view(np.uint32), values[:, column : column + 1].view(np.uint32))


# ---- shapes --------------------------------------------------------------------------------------


def test_scalars():
    mesh = Mesh(x=4)
    same = Layout.parse("f32[]", mesh)
    tiles = {d: np.array(2.5, np.float32) for d in mesh.devices}
    assert rs.simulate(rs.plan(same, same), tiles)[3] == 2.5
    summed = Layout.parse("f32[] + sum{x}", mesh)
    moved = rs.simulate(rs.plan(summed, same), tiles)
    assert all(tile.shape == () and tile == 10 for tile in moved.values())
    reordered = Mesh({"x": 4}, device_ids=[3, 2, 1, 0])
    check(rs.plan(same, Layout.parse("f32[]", reordered)))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[0]", "f32[0]"),
        ("f32[0, {x}4]", "f32[0, 16]"),
        ("f32[0, {x}4]", "f32[0, {y}8]"),
        ("f32[0, {x}3/10]", "f32[0, 10]"),
        ("f32[{x}4, 0]", "f32[16, 0]"),
        ("f32[0, 16] + sum{x}", "f32[0, {x}4]"),
        ("f32[0] + sum{x}", "f32[0]"),
    ],
)
def test_empty_arrays(source: str, target: str):
    plan = rs.plan(Layout.parse(source, MESH), Layout.parse(target, MESH))
    memory = check(plan)
    assert (memory.received_bytes, memory.peak_bytes, plan.received_bytes, plan.peak_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9])
def test_sizes_below_and_beside_the_number_of_pieces(size: int):
    for target in ("{x}{y}", "{y}", "{x:(1)2}", ""):
        tile = -(-size // {"{x}{y}": 8, "{y}": 2, "{x:(1)2}": 2, "": 1}[target])
        check(
            rs.plan(Layout.from_spec(MESH, (size,), "f32", [["x"]]), Layout.parse(f"f32[{target}{tile}/{size}]", MESH))
        )


def test_one_device():
    mesh = Mesh()
    plan = rs.plan(Layout.parse("f32[3, 4]", mesh), Layout.parse("f32[3, 4]", mesh))
    tile = np.arange(12, dtype=np.float32).reshape(3, 4)
    moved = rs.simulate(plan, {0: tile})
    assert np.array_equal(moved[0], tile)


def test_padding_is_not_data():
    """Whatever the source's padding contains, it never reaches the target."""
    before, after = Layout.parse("f32[{x}3/10]", MESH), Layout.parse("f32[{y}5]", MESH)
    tiles = spread(before, np.ones(10, np.float32))
    for device, tile in tiles.items():
        tile[tiles_of(before)[device] == PADDING] = np.nan
    moved = rs.simulate(rs.plan(before, after), tiles)
    assert all((tile == 1).all() for tile in moved.values())


# ---- the given tiles -----------------------------------------------------------------------------


@settings(max_examples=100)
@given(pairs(), st.booleans())
def test_given_tiles_are_never_written_to(pair: tuple[Layout, Layout], donate: bool):
    plan = rs.plan(*pair, donate=donate)
    given_tiles = {device: tile.astype("int32") for device, tile in tiles_of(plan.source).items()}
    for tile in given_tiles.values():
        tile.flags.writeable = False
    moved = rs.simulate(plan, given_tiles)
    for device, tile in moved.items():
        assert not np.shares_memory(tile, given_tiles[device])
        assert tile.flags.writeable


def test_given_tiles_are_not_overwritten_in_place():
    plan = one_step("exchange", "f32[{x}4, 16]", "f32[16, {x}4]", mode=StepMode(1, in_place=True), donate=True)
    given_tiles = {d: t.astype(np.float32) for d, t in tiles_of(plan.source).items()}
    kept = {d: t.copy() for d, t in given_tiles.items()}
    moved = rs.simulate(plan, given_tiles)
    for device, tile in given_tiles.items():
        assert np.array_equal(tile, kept[device])
        assert not np.shares_memory(tile, moved[device])


def test_tiles_need_not_be_contiguous():
    before, after = Layout.parse("f32[{x}4, 16]", MESH), Layout.parse("f32[16, {x}4]", MESH)
    plan = rs.plan(before, after)
    tiles = {d: t.astype(np.float32) for d, t in tiles_of(before).items()}
    strided = {d: np.asfortranarray(t) for d, t in tiles.items()}
    one, other = rs.simulate(plan, tiles), rs.simulate(plan, strided)
    assert all(np.array_equal(one[d], other[d]) for d in MESH.devices)


def test_lists_are_tiles_of_their_dtype():
    mesh = Mesh(x=2)
    plan = rs.plan(Layout.parse("f64[{x}2]", mesh), Layout.parse("f64[4]", mesh))
    assert rs.simulate(plan, {0: [0.0, 1.0], 1: [2.0, 3.0]})[0].tolist() == [0.0, 1.0, 2.0, 3.0]  # type: ignore[dict-item]


@pytest.mark.parametrize("order", ["C", "F", ">"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("s32[{x}3/10, 2{y}2/7]", "s32[{y}{x}2/10, 7]"),
        ("s32[2{x}2/13, 5]", "s32[{y}7/13, {x}2/5]"),
        ("s32[{x}1/3, 5]", "s32[3, {x}{y}1/5]"),
        ("s32[11, 3]", "s32[{x}{y}2/11, 3]"),
    ],
)
def test_tiles_without_padding(source: str, target: str, order: str):
    """Devices without any element have tiles of none."""
    plan = rs.plan(Layout.parse(source, MESH), Layout.parse(target, MESH))
    before, after = ([own(end, d) for d in MESH.devices] for end in (plan.source, plan.target))
    tiles = {d: tile.astype(">i4") if order == ">" else tile.astype("i4", order) for d, tile in enumerate(before)}
    moved = rs.simulate(plan, tiles, padded=False)
    for device in MESH.devices:
        assert moved[device].dtype == np.dtype("int32") and moved[device].dtype.isnative
        assert np.array_equal(moved[device], after[device])
        assert plan.target.tile_shape_of(device) == after[device].shape
    full = rs.simulate(plan, tiles)
    assert all(full[d].shape == plan.target.tile_shape for d in MESH.devices)


def own(layout: Layout, device: int) -> np.ndarray:
    """The global indices of a tile without padding."""
    dims = zip(meaning(layout, device), layout.shape, strict=True)
    whole = np.arange(np.prod(layout.shape)).reshape(layout.shape)
    return whole[np.ix_(*([index for index in along if index < size] for along, size in dims))]


def test_another_devices_tile_without_padding_is_refused():
    plan = rs.plan(Layout.parse("f32[{x}3/10]", Mesh(x=4)), Layout.parse("f32[10]", Mesh(x=4)))
    tiles = {0: np.zeros(1, "f4"), 1: np.zeros(3, "f4"), 2: np.zeros(3, "f4"), 3: np.zeros(3, "f4")}
    with pytest.raises(TileError, match=r"device 0's tile has shape \(1,\), the source's tiles have \(3,\)"):
        rs.simulate(plan, tiles)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: None}, ("missing [0]", "one tile per device")),
        ({8: np.zeros((4, 16), np.float32)}, ("unknown [8]", "one tile per device")),
        ({3: np.zeros((4, 15), np.float32)}, ("device 3", "(4, 15)")),
        ({3: np.zeros((4, 16), np.float64)}, ("device 3", "float64")),
        ({3: np.zeros((4, 16), ">f4")[:3]}, ("device 3", "(3, 16)")),
    ],
)
def test_wrong_tiles(change: dict[int, np.ndarray | None], words: tuple[str, str]):
    plan = one_step("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]")
    tiles = {d: np.zeros((4, 16), np.float32) for d in MESH.devices} | change
    with pytest.raises(TileError) as caught:
        run(lower_plan(plan), {d: t for d, t in tiles.items() if t is not None})
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- trees ---------------------------------------------------------------------------------------

TREE = rs.plan_tree(llama(MESH))
TILES = {name: source_tiles(plan) for name, plan in TREE.plans.items()}


def test_the_weights_of_a_model():
    account = check_tree(TREE)
    assert account.received_bytes == TREE.received_bytes == TREE.lower_bound_bytes


def test_the_given_tiles_are_not_written_to():
    kept = {name: {device: tile.copy() for device, tile in by.items()} for name, by in TILES.items()}
    rs.simulate(rs.plan_tree(llama(MESH), donate=True), TILES)
    for name, by in TILES.items():
        for device, tile in by.items():
            np.testing.assert_array_equal(tile, kept[name][device])


def test_tiles_of_a_tree_without_padding():
    ends = tuple(rs.Layout.parse(text, MESH) for text in ("s32[{x}3/10]", "s32[{y}{x}2/10]"))
    tree = rs.plan_tree({"a": ends, "b": ends})
    tiles = {device: np.arange(10, dtype="int32")[device // 2 * 3 :][:3] for device in range(8)}
    moved = rs.simulate(tree, {"a": tiles, "b": tiles}, padded=False)
    assert [moved["b"][device].tolist() for device in (0, 1, 2)] == [[0, 1], [8, 9], [2, 3]]


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (None, "tiles are a NoneType"),
        ({}, "tiles are given for 0 arrays"),
        (TILES | {"more": {}}, "'more'"),
        (TILES | {"norm": {}}, "norm: tiles are given for 0 devices"),
        (TILES | {"norm": {d: t.astype("int64") for d, t in TILES["norm"].items()}}, "norm: device 0's tile .* int64"),
        (TILES | {"norm": {d: t[1:] for d, t in TILES["norm"].items()}}, "norm: "),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles: object, message: str):
    with pytest.raises(TileError, match=message):
        rs.simulate(TREE, tiles)


def test_measure_sees_a_tree_as_one_call():
    with measure() as measured:
        rs.simulate(TREE, TILES)
    assert len(measured.calls) == 1
    assert measured.received_bytes == TREE.received_bytes


def test_a_batch_packed_in_the_wrong_order_is_seen(monkeypatch: pytest.MonkeyPatch):
    def turned(programs):
        joint = join_launches(programs)
        return [replace(step, receive=step.receive[::-1]) if getattr(step, "receive", ()) else step for step in joint]

    ends = [tuple(rs.Layout.parse(t, MESH) for t in (f"s32[{{x}}{n}]", f"s32[{4 * n}]")) for n in (2, 3)]
    tree = rs.plan_tree(ends)
    check_tree(tree)
    monkeypatch.setattr(on_numpy, "join_launches", turned)
    with pytest.raises((AssertionError, ValueError)):
        check_tree(tree)


def test_bytes_of_several_dtypes_are_counted_together():
    ends = {n: tuple(rs.Layout.parse(t, MESH) for t in (f"{n}[{{x}}4]", f"{n}[16]")) for n in ("s8", "s16", "s64")}
    tree = rs.plan_tree(ends)
    account = Account("uint8")
    rs.simulate(tree, {name: source_tiles(plan) for name, plan in tree.plans.items()}, account)
    assert account.received_bytes == tree.received_bytes == 12 * (1 + 2 + 8)
    assert account.launches == 3


# ---- steps in parts that overwrite their operand -------------------------------------------------

MESHES = (Mesh(x=4, y=2), Mesh(x=3, y=2), Mesh(x=5))


def in_place(plan: rs.Plan, number: int) -> rs.Plan | None:
    """The plan with all its steps in place, in parts whose counts are chosen by `number`; None if one cannot be."""
    specs: list[StepSpec] = []
    for step in plan.steps:
        possible = possible_counts(step.operand, step.result)
        if not possible:
            return None
        mode = StepMode(parts=possible[number % len(possible)], in_place=True)
        specs.append(StepSpec(step.kind, step.result, mode))
    try:
        return chain(plan.source, plan.target, specs, donate=True)
    except StepError:
        return None


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_swaps_in_every_number_of_parts(mesh: Mesh):
    """An axis moves between any two of three dims, with and without slots to rearrange."""
    size = 2 * mesh.axes["x"]
    rows = [tuple("{x}2" if dim == at else str(size) for dim in range(3)) for at in range(3)]
    ends = [Layout.parse(f"f32[{', '.join(dims)}]", mesh) for dims in rows]
    seen = Counter[tuple[bool, bool]]()
    for source, target in itertools.permutations(ends, 2):
        for number in range(len(possible_counts(source, target))):
            plan = in_place(rs.plan(source, target, donate=True), number)
            assert plan is not None
            check(plan)
            (step,) = lower_plan(plan).instructions
            assert isinstance(step, InParts)
            where = part_regions(source.tile_shape, step.take, target.tile_shape, step.put)
            seen[where.before > 1, where.after > 1] += 1
    assert len(seen) >= 3


@settings(max_examples=100)
@given(pairs("float32"), st.integers(0, 5))
def test_random_plans_in_place(pair: tuple[Layout, Layout], number: int):
    plan = in_place(rs.plan(*pair, donate=True), number)
    if plan is not None:
        check(plan)


@pytest.mark.parametrize(("source", "target"), [("f32[0, {x}4]", "f32[0, 16]"), ("f32[{x}4, 0]", "f32[16, 0]")])
def test_empty_tiles_in_place(source: str, target: str):
    before, after = Layout.parse(source, MESH), Layout.parse(target, MESH)
    plan = chain(before, after, [StepSpec("all_gather", after, StepMode(parts=2, in_place=True))], donate=True)
    assert check(plan).peak_bytes == plan.peak_bytes == 0


def test_memory_is_a_tile_and_two_parts():
    source, target = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16, 2]", "f32[16, {x}4, 2]"))
    plan = chain(source, target, [StepSpec("all_to_all", target, StepMode(parts=4, in_place=True))], donate=True)
    whole, part = source.tile_bytes, source.tile_bytes // 4
    packed = plan.steps[0].cost.scratch - 2 * part
    assert plan.peak_bytes == check(plan).peak_bytes == whole + 2 * part + packed


@pytest.mark.parametrize("fault", [lambda cycle: cycle[:-1], lambda cycle: cycle[1:], lambda cycle: ()])
def test_slots_that_stay_behind_are_seen(fault: object, monkeypatch: pytest.MonkeyPatch):
    """A part that is read where another was written before, or slots that are not brought together."""
    source, target = (Layout.parse(text, Mesh(x=4)) for text in ("f32[16, 3, {x}1]", "f32[{x}4, 3, 4]"))
    plan = chain(source, target, [StepSpec("all_to_all", target, StepMode(parts=4, in_place=True))], donate=True)
    check(plan)
    cycles = on_numpy.transposing_cycles
    monkeypatch.setattr(on_numpy, "transposing_cycles", lambda *slots: [fault(c) for c in cycles(*slots)])  # pyright: ignore
    with pytest.raises(AssertionError):
        check(plan)


def test_refusals():
    mesh = Mesh(x=4, y=2)
    for kind, before, after, why in (
        ("all_gather", "f32[{x}4, 16]", "f32[16, 16]", "equally large"),
        ("permute", "f32[{x}3/11, 4]", "f32[{x}3/11, 4]", "even"),
    ):
        source, target = Layout.parse(before, mesh), Layout.parse(after, mesh)
        with pytest.raises(StepError, match=why):
            chain(source, target, [StepSpec(kind, target, StepMode(parts=2, in_place=True))], donate=True)
    source, target = Layout.parse("f32[{x}{y}2, 4]", mesh), Layout.parse("f32[{y}{x}2, 4]", mesh)
    with pytest.raises(rs.errors.PlanError, match="donate"):
        chain(source, target, [StepSpec("permute", target, StepMode(parts=2, in_place=True))])


# ---- views ---------------------------------------------------------------------------------------

PAIR = rs.Mesh(x=2)


def test_an_alias_takes_no_memory_and_is_not_the_callers_array():
    layouts = [rs.Layout.parse(text, PAIR) for text in ("int64[{x}6]", "int64[{x}, 6]")]
    plan = rs.plan(rs.Move(*layouts, view="(a b) -> a b", a=2))
    tiles = {device: np.arange(6) for device in PAIR.devices}
    memory = Account("int64")
    moved = rs.simulate(plan, tiles, memory)
    assert memory.peak_bytes == plan.peak_bytes == 48
    moved[0][...] = -1
    assert tiles[0][1] == 1


def test_a_cast_is_counted_in_both_dtypes():
    layouts = [rs.Layout.parse(text, PAIR) for text in ("f32[{x}8]", "bf16[16]")]
    plan = rs.plan(rs.Move(*layouts, cast=True))
    memory = Account("float32")
    rs.simulate(plan, {device: np.zeros(8, "f4") for device in PAIR.devices}, memory)
    assert (memory.peak_bytes, memory.received_bytes) == (plan.peak_bytes, plan.received_bytes) == (80, 16)
    assert set(memory.live.values()) == {64}


def test_a_block_outside_of_a_tile_is_refused():
    tile = TileView((4,), (4,), (4,), (0,), ())
    for place, stride in ((3, 1), (-1, 1), (0, 4)):
        block = Block(place, 0, (Axis(2, stride, 1),))
        step = Exchange(tile, tile, (0,), (Transfer(0, 0, (block,)),), (), staged=False, viewed=True)
        with pytest.raises(TileError, match="leaves a tile"):
            run_instruction(step, {0: np.zeros(4)}, (4,), Account("float64"))
