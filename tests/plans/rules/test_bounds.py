"""Lower bounds against a count of global indices, device by device, and those of reductions against hand figures."""

from __future__ import annotations

import random
from itertools import product
from math import ceil, prod

import numpy as np
import pytest

import reshard as rs
from reshard.plans.rules.bounds import endpoint_bound, joint_endpoint_bound, joint_lower_bound, lower_bound
from reshard.types.dtypes import bits
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import contiguous_layouts, divisible_shape, random_crossing, random_pair
from tests.oracle import PADDING, tiles_of
from tests.sampling import few_or_all
from tests.trees import random_tree
from tests.view_oracle import KEPT, cut, random_case


def counted(source: Layout, target: Layout) -> int:
    """Bytes that the busiest device needs and does not hold, by masks."""
    worst = 0
    for device in target.mesh.devices:
        masks = []
        for layout in (source, target):
            mask = np.zeros(layout.shape, bool)
            along = zip(meaning(layout, device), layout.shape, strict=True)
            mask[np.ix_(*([i for i in dim if i < size] for dim, size in along))] = True
            masks.append(mask)
        worst = max(worst, int((masks[1] & ~masks[0]).sum()))
    return ceil(worst * bits(source.dtype) / 8)


@pytest.mark.fast(2)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=2, y=2, z=2)], ids=str)
def test_every_contiguous_pair(mesh: Mesh):
    layouts = list(contiguous_layouts(mesh, divisible_shape(mesh, 2)))
    for source in layouts:
        for target in layouts:
            assert lower_bound(source, target) == counted(source, target), f"{source} -> {target}"


@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2), Mesh(x=5), Mesh(x=2, y=3)], ids=str)
def test_every_uneven_contiguous_pair(mesh: Mesh):
    for shape in product((0, 2, 3, 7), (1, 4, 11)):
        layouts = list(contiguous_layouts(mesh, shape))
        for source in layouts:
            for target in layouts:
                assert lower_bound(source, target) == counted(source, target), f"{source} -> {target}"


@pytest.mark.parametrize("count", few_or_all(700, 8000))
def test_random_digit_layouts(count: int):
    choose = random.Random(0)
    for _ in range(count):
        source, target = random_pair(choose, dtype=choose.choice(("int32", "int4", "complex128", "bool")))
        assert lower_bound(source, target) == counted(source, target), f"{source} -> {target}"


@pytest.mark.parametrize(
    ("source", "target", "mesh", "expected"),
    [
        # Elements of the busiest device's target tile that are not in its source tile.
        ("f32[{x}4]", "f32[16]", Mesh(x=4), 48),
        ("f32[16]", "f32[{x}4]", Mesh(x=4), 0),
        ("f32[{x}4, 16]", "f32[16, {x}4]", Mesh(x=4), (64 - 16) * 4),
        ("f32[{x}3/10]", "f32[10]", Mesh(x=4), 9 * 4),  # device 3 holds one element
        ("f32[10]", "f32[{x}3/10]", Mesh(x=4), 0),
        ("f32[{x}8]", "f32[8{x}]", Mesh(x=2), 16),  # 0..7 and the even ones: 4 of 8 in common
        ("f32[2{x}2]", "f32[{x}4]", Mesh(x=2), 8),
        ("f64[16{x}64]", "f64[32{x}32]", Mesh(x=2), 512 * 8),
        ("f32[{x}{y}2]", "f32[{y}{x}2]", Mesh(x=2, y=2), 8),  # two devices swap their tiles
        ("int4[{x}3]", "int4[12]", Mesh(x=4), 5),  # nine nibbles
        ("f32[1{x}2/3]", "f32[3]", Mesh(x=4), 12),  # device 2 holds only padding
        # The devices y=1 hold nothing of their target's column. Those at x=0 need the rows 0, 1, 4, 5 and 8.
        ("f32[9, {y}/2]", "f32[3{x}2/9, 2]", Mesh(x=2, y=3), 5 * 2 * 4),
        ("f32[1{x}9/8, 17]", "f32[8, 5{y}2/17]", Mesh(x=2, y=2), 8 * 9 * 4),
        # The devices x=0 have no finished element, and the two of them share the seven: one receives four.
        ("f32[1, 7] + max{x}", "f32[{x}/1, 7] + min{y}", Mesh(x=2, y=2), 4 * 4),
    ],
)
def test_hand_figures(source: str, target: str, mesh: Mesh, expected: int):
    assert lower_bound(Layout.parse(source, mesh), Layout.parse(target, mesh)) == expected


def test_other_device_orders_are_other_layouts():
    ring, reversed_ring = Mesh(x=4), Mesh({"x": 4}, device_ids=[3, 2, 1, 0])
    source, target = Layout.parse("f32[{x}2]", ring), Layout.parse("f32[{x}2]", reversed_ring)
    assert lower_bound(source, target) == counted(source, target) == 8
    assert lower_bound(source, Layout.parse("f32[8]", reversed_ring)) == 24


@pytest.mark.parametrize("f", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_reductions_cost_what_the_collectives_must(f: int, dtype: str):
    mesh = Mesh(x=f)
    axis = [mesh.sub_axis("x")]
    summed = Layout.tiled(mesh, (f * 6, 5), dtype, [[], []], axis)
    tile = summed.tile_bytes
    held = Layout.tiled(mesh, summed.shape, dtype, [axis, []])
    everywhere = Layout.tiled(mesh, summed.shape, dtype, [[], []])
    assert lower_bound(summed, held) * f == (f - 1) * tile
    assert lower_bound(summed, everywhere) * f == 2 * (f - 1) * tile
    assert lower_bound(summed, summed) == 0


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        ("f32[24, {y}8] + sum{x}", "f32[{x}6, {y}8]", 3 / 4),
        ("f32[24, {y}8] + sum{x}", "f32[24, {y}8]", 3 / 2),
        # An axis that nothing uses.
        ("f32[24, 24] + sum{x}", "f32[{x}6, 24]", 3 / 4),
        # Part of a reduction: along x alone, (4 - 1) / 4 of the tile for each.
        ("f32[24] + sum{x}{y}", "f32[{x}6] + sum{y}", 3 / 4),
    ],
)
def test_reductions_in_shares_of_a_tile(source: str, target: str, share: float):
    summed, end = (Layout.parse(text, Mesh(x=4, y=3)) for text in (source, target))
    assert lower_bound(summed, end) == summed.tile_bytes * share


def test_a_reduction_counts_devices_along_spans_that_do_not_nest():
    """Sub-axes of 6 and of 4 that share a factor use all 12 devices: 5 summands to receive, 2 more holders each."""
    source, target = (Layout.parse(text, Mesh(x=12)) for text in ("f32[12] + mean{x:(2)6}", "f32[3{x:(3)4}]"))
    assert lower_bound(source, target) == 28


@pytest.mark.parametrize(
    ("source", "target", "mesh", "most"),
    [
        # The maximum is that of the finished tile, of which only true elements count.
        ("f32[6] + sum{y}", "f32[1{y}9{x}/6]", Mesh(x=2, y=2), 12),
        ("f32[8, 3] + min{x}", "f32[8, 1{x}3{y}/3]", Mesh(x=2, y=2), 64),
        ("f32[4{x:(2)2}/7] + mean{x:(1)2}", "f32[2{x:(1)2}3/7]", Mesh(x=4), 20),
    ],
)
def test_bounds_of_uneven_reductions_are_bounds(source: str, target: str, mesh: Mesh, most: int):
    """There are plans in which no device receives more than `most` bytes."""
    assert lower_bound(Layout.parse(source, mesh), Layout.parse(target, mesh)) <= most


def test_bound_needs_no_devices():
    mesh = Mesh(x=1 << 10, y=1 << 10)
    n = 1 << 20
    source = Layout.tiled(mesh, (n, n), "float32", [[mesh.sub_axis("x"), mesh.sub_axis("y")], []])
    target = Layout.tiled(mesh, (n, n), "float32", [[], [mesh.sub_axis("y"), mesh.sub_axis("x")]])
    assert lower_bound(source, target) == prod((n, 4)) - 4


def test_sums_along_other_devices_can_be_finished_on_the_way():
    """Each device has another summand after than before: no device must receive its own, only the sum counts."""
    before = rs.Mesh({"z": 3, "data": 4}, device_ids=[1, 0, 3, 4, 6, 8, 5, 7, 10, 2, 9, 11])
    source = rs.Layout.parse("f32[16, {data}4/13] + sum{z}", before)
    plan = rs.plan(source, rs.Layout.parse("f32[16, 13] + sum{z}", rs.Mesh(z=3, w=2, dcn=2)))
    assert plan.lower_bound_bytes <= plan.received_bytes


# ---- of moves with a view or a cast ----


def test_the_bound_is_what_the_neediest_device_lacks():
    for seed in range(300, 380):
        move = (case := random_case(random.Random(seed), most=96)).move
        index = np.arange(int(np.prod(move.source.shape))).reshape(move.source.shape)
        held, wanted = cut(move.source, index), cut(move.target, case.reference(index))
        lacked = [
            sum(e not in set(held[d].reshape(-1)) for e in tile.reshape(-1) if e != PADDING and e < KEPT)
            for d, tile in wanted.items()
        ]
        assert lower_bound(move.source, move.target, move.view) == 8 * max(lacked), (seed, str(move))


@pytest.mark.parametrize(("source", "target", "bound"), [("f32", "bf16", 24), ("bf16", "f32", 24), ("s4", "f32", 6)])
def test_a_cast_is_bound_by_the_narrower_dtype(source, target, bound):
    layouts = [Layout.parse(text, Mesh(x=4)) for text in (f"{source}[{{x}}4]", f"{target}[16]")]
    assert lower_bound(*layouts) == bound


@pytest.mark.parametrize(("reduced", "target"), [("s32[4] + sum{x}", "bool[{y}2]"), ("f32[4] + mean{x}", "u8[{y}2]")])
def test_a_reduction_that_the_narrower_dtype_has_not_is_bounded_too(reduced: str, target: str):
    ends = Layout.parse(reduced, Mesh(x=2)), Layout.parse(target, Mesh({"y": 2}, device_ids=[5, 6]))
    assert rs.plan(rs.Move(*ends, cast=True)).lower_bound_bytes == 2


# ---- of several arrays: below what runs, and above what one array alone makes necessary ----


def plain(moves: list[tuple[rs.Layout, rs.Layout]]) -> list[tuple[rs.Layout, rs.Layout, None, None]]:
    """The moves, without views, beside nothing that is held."""
    return [(source, target, None, None) for source, target in moves]


def test_it_is_the_busiest_devices_sum():
    """Against a count of the elements that each device lacks, one by one."""
    choose = random.Random(3)
    for _ in range(40):
        moves = [ends for ends in random_tree(choose).values() if ends[0].partial_as(ends[1])]
        lacks: dict[int, int] = {}
        for source, target in moves:
            held, wanted = tiles_of(source), tiles_of(target)
            for device in target.mesh.devices:
                more = {*wanted[device].flat} - {*held[device].flat} - {PADDING}
                lacks[device] = lacks.get(device, 0) + target.nbytes(len(more))
        assert joint_lower_bound(plain(moves)) == max(lacks.values(), default=0)


def test_reductions_of_all_arrays_add_up():
    mesh = rs.Mesh(x=4)
    ends = tuple(rs.Layout.parse(text, mesh) for text in ("f32[16] + sum{x}", "f32[{x}4]"))
    assert joint_lower_bound(plain([ends, ends])) == 2 * lower_bound(*ends)
    uneven = tuple(rs.Layout.parse(text, mesh) for text in ("f32[15] + sum{x}", "f32[{x}4/15]"))
    assert joint_lower_bound(plain([uneven, uneven])) >= lower_bound(*uneven)


def test_what_leaves_holders_adds_up():
    """Against every set of source devices: what is held by these alone and needed elsewhere, shared evenly."""
    choose = random.Random(11)
    above = 0
    for _ in range(25):
        moves = [*[random_crossing(choose)] * choose.randint(1, 3), random_crossing(choose)]
        bound = joint_endpoint_bound(plain(moves))
        alone = max(endpoint_bound(*ends) for ends in moves)
        above += bound > alone
        tree = rs.plan_tree({str(number): ends for number, ends in enumerate(moves)})
        assert bound <= tree.endpoint_bound_bytes <= max(tree.sent_bytes, tree.received_bytes)
        assert tree.endpoint_bound_bytes >= alone
        assert bound <= _all_senders(moves)
    assert above > 5


def _all_senders(moves: list[tuple[rs.Layout, rs.Layout]]) -> int:
    """The sum over arrays of all bytes that some device lacks: no device can be bound to send more."""
    total = 0
    for source, target in moves:
        held = tiles_of(source)
        for device, tile in tiles_of(target).items():
            own = {*held[device].flat} if device in held else set[int]()
            total += target.nbytes(len({*tile.flat} - own - {PADDING}))
    return total


def test_views_and_casts_add_up():
    mesh = rs.Mesh(x=4)
    source, target = rs.Layout.parse("f32[{x}4, 16]", mesh), rs.Layout.parse("bf16[256]", mesh)
    move = rs.Move(source, target, view="a b -> (a b)", cast=True)
    one, two = rs.plan_tree({"a": move}), rs.plan_tree({"a": move, "b": move})
    assert two.lower_bound_bytes == 2 * one.lower_bound_bytes == two.received_bytes > 0


def test_views_without_common_units_add_up():
    """A fused q, k and v in two pieces, which end where none of the three does."""
    trainer, server = rs.Mesh(fsdp=4, tp=2), rs.Mesh({"tp": 4}, device_ids=range(8, 12))
    fused, query = rs.Layout.parse("bf16[{fsdp}64, {tp}384]", trainer), rs.Layout.parse("bf16[256, {tp}64]", server)
    move = rs.Move(fused, query, view="m (three h) -> m h", take={"three": 0}, three=3)
    tree = rs.plan_tree(
        {"a": move, "b": (rs.Layout.parse("bf16[{fsdp}64]", trainer), rs.Layout.parse("bf16[256]", server))}
    )
    assert tree.lower_bound_bytes == tree.received_bytes == 2 * (256 * 64 + 256)
