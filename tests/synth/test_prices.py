"""Prices of moves in bulk are those of the planner's own plans, whatever the form and the size of the arrays."""

from __future__ import annotations

import math
import random

import pytest

import reshard as rs
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.prices import MovePrices
from reshard.types.mesh import SubAxis

MESHES = (rs.Mesh(x=4, y=2), rs.Mesh(x=2, y=2, z=2), rs.Mesh(dcn=2, x=4, y=4), rs.Mesh(x=3, y=2))
SHAPES = ((4096, 11008), (32, 2048, 4096), (32000, 4096), (64, 48), (2, 3, 4, 8), (96,), (1, 24), (8,))


def draw_layout(rng: random.Random, mesh: rs.Mesh, shape: tuple[int, ...], dtype: str, sums: bool) -> rs.Layout:
    """Each axis splits a dim, or is summed over, or neither; what does not divide a dim does not split it."""
    dims: list[list[SubAxis]] = [[] for _ in shape]
    partial: list[SubAxis] = []
    for name in rng.sample(list(mesh.axes), len(mesh.axes)):
        axis, at = SubAxis(name, 1, mesh.axes[name]), rng.randrange(len(shape) + 2)
        if at == len(shape) and sums:
            partial.append(axis)
        elif at < len(shape) and shape[at] % math.prod(each.size for each in (*dims[at], axis)) == 0:
            dims[at].append(axis)
    return rs.Layout.tiled(mesh, shape, dtype, dims, tuple(partial), "sum" if partial else None)


def assert_price_is_of_the_plan(prices: MovePrices, source: rs.Layout, target: rs.Layout, network: str) -> None:
    price, plan = prices.price(source, target), rs.plan(source, target, network=network)
    assert math.isclose(price.seconds, plan.seconds or 0.0, rel_tol=1e-9), f"{source} -> {target}, {network}"
    assert (price.received_bytes, price.peak_bytes) == (plan.received_bytes, plan.peak_bytes), (
        f"{source} -> {target}, {network}"
    )


@pytest.mark.parametrize("network", ["tpu-v5p", "h100"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_prices_are_those_of_plans(mesh: rs.Mesh, network: str) -> None:
    rng, prices = random.Random(f"{mesh} {network}"), MovePrices(mesh, network)
    for _ in range(20):
        shape, dtype = rng.choice(SHAPES), rng.choice(("f32", "bf16"))
        source = draw_layout(rng, mesh, shape, dtype, True)
        assert_price_is_of_the_plan(prices, source, draw_layout(rng, mesh, shape, dtype, rng.random() < 0.3), network)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_estimates_of_many_moves_are_near_their_prices(mesh: rs.Mesh) -> None:
    """Moves between the dims of one array that split alike elsewhere take what those take, with few exceptions."""
    rng, prices = random.Random(f"{mesh}"), MovePrices(mesh, "tpu-v5p")
    ratios: list[float] = []
    for shape in SHAPES[:4]:
        ends = [[draw_layout(rng, mesh, shape, "bf16", sums) for _ in range(5)] for sums in (True, False)]
        estimates = prices.estimate_seconds(ends[0], [*ends[1], ends[0][0]])
        assert estimates[0, -1] == 0
        for source, row in zip(ends[0], estimates.tolist(), strict=True):
            for target, estimate in zip(ends[1], row, strict=False):
                exact = prices.price(source, target).seconds
                ratios.append(estimate / exact if exact else 1.0 + estimate)
    assert 0.5 < min(ratios) <= max(ratios) < 2
    assert sum(math.isclose(ratio, 1.0, rel_tol=0.02) for ratio in ratios) > 0.95 * len(ratios)


def test_one_form_at_every_size() -> None:
    """Small arrays are gathered at once, large ones over the idle axis, too: other plans of one form."""
    mesh, plans = rs.Mesh(dcn=2, x=8), set[tuple[str, ...]]()
    prices = MovePrices(mesh, "tpu-v5p")
    for rows in (1 << at for at in range(4, 26, 3)):
        source, target = (rs.Layout.parse(f"f32[{dim}, 16]", mesh) for dim in (f"{{dcn}}{rows}", f"{2 * rows}"))
        assert_price_is_of_the_plan(prices, source, target, "tpu-v5p")
        plans.add(tuple(step.kind for step in prices.plan(source, target).steps))
    assert plans == {("all_gather",), ("slice", "all_gather", "all_gather")}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bf16[{x}4, 256, 1536] + sum{dcn}", "bf16[{y}4, 256, 1536]"),
        ("f32[16, 256, {dcn}768] + sum{y}", "f32[{dcn}8, 256, {x}384]"),
    ],
)
def test_sums_are_scattered_along_the_dim_that_later_moves_can_cut(source: str, target: str) -> None:
    """As in a form, whose dims all have room: along the first dim, of 16, they took 1.15 and 1.35 times as long."""
    mesh = rs.Mesh(dcn=2, x=4, y=4)
    ends = rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh)
    assert_price_is_of_the_plan(MovePrices(mesh, "tpu-v5p"), *ends, "tpu-v5p")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}3/10, 16]", "f32[10, {x}4]"),  # padded
        ("s4[{x}2, 6]", "s4[8, 6]"),  # less than a byte
        ("f32[{x}0, 4]", "f32[0, {y}2]"),  # empty
        ("f32[] + sum{x}", "f32[]"),  # one element
        ("f32[{x}(1,2,3,4)]", "f32[10]"),  # pieces
    ],
)
def test_other_moves_are_planned_one_by_one(source: str, target: str) -> None:
    mesh = rs.Mesh(x=4, y=2)
    ends = rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh)
    assert_price_is_of_the_plan(MovePrices(mesh, "tpu-v5p"), *ends, "tpu-v5p")


def test_what_has_no_price_is_refused() -> None:
    mesh = rs.Mesh(x=4)
    rows, whole, mean = (rs.Layout.parse(text, mesh) for text in ("f32[{x}2]", "f32[8]", "f32[8] + mean{x}"))
    with pytest.raises(rs.errors.PlanError, match="seconds"):
        MovePrices(mesh, "none")
    with pytest.raises(rs.errors.PlanError):
        MovePrices(mesh, "h100").price(rows, mean)
    with pytest.raises(rs.errors.PlanError):
        MovePrices(mesh, "h100").price(whole, rs.Layout.parse("bf16[8]", mesh))


def test_work_takes_the_slower_of_arithmetic_and_memory() -> None:
    speed = DeviceSpeed("lab", {"bf16": 4e12, "f32": 1e12}, 2e12, call_seconds=1e-6)
    assert math.isclose(speed.work_seconds(8e12, 1e6), 2.0 + 1e-6)
    assert math.isclose(speed.work_seconds(8e12, 1e6, "f32"), 8.0 + 1e-6)
    assert math.isclose(speed.work_seconds(1.0, 4e12, "f32"), 2.0 + 1e-6)
    with pytest.raises(rs.errors.NetworkError):
        DeviceSpeed("lab", {"f32": 0}, 1)


def test_strided_devices_need_no_room_to_pack_along_one_dim() -> None:
    mesh = rs.Mesh(x=4, y=2)
    prices = [MovePrices(mesh, "tpu-v5p", strided=strided) for strided in (False, True)]
    whole, one, two = (
        rs.Layout.parse(text, mesh) for text in ("f32[64, 64] + sum{x,y}", "f32[64, {x}{y}8]", "f32[{y}32, {x}16]")
    )
    for target, packed in ((one, 0), (two, 1)):
        for ends in ((whole, target), (target, rs.Layout.parse("f32[64, 64]", mesh))):
            ours, strided = (each.price(*ends).peak_bytes for each in prices)
            assert ours - strided == (1 - packed) * whole.tile_bytes


def test_what_receives_nothing_is_a_copy():
    mesh = rs.Mesh(x=4, y=2)
    whole, rows, columns = (rs.Layout.parse(text, mesh) for text in ("f32[64, 8]", "f32[{x}16, 8]", "f32[64, {y}4]"))
    prices = MovePrices(mesh, "h100", copy_rate=1e3)
    # A quarter is read and written; what moves is timed by its plan.
    assert prices.price(whole, rows).seconds == pytest.approx(2 * 16 * 8 * 4 / 1e3)
    assert prices.price(rows, columns).seconds == rs.plan(rows, columns, network="h100").seconds
    assert prices.price(rows, rows).seconds == 0
    estimates = prices.estimate_seconds([whole, rows], [rows, columns])
    exact = [[prices.price(source, target).seconds for target in (rows, columns)] for source in (whole, rows)]
    assert estimates.tolist() == exact


def test_joined_sums_share_what_one_of_them_waits():
    mesh = rs.Mesh(x=4, y=2)
    network = rs.Network.of({"x": (1e-3, 1e9), "y": (1e-3, 1e9)})
    prices = MovePrices(mesh, network)
    total, whole, rows = (
        rs.Layout.parse(text, mesh) for text in ("f32[64, 64] + sum{x,y}", "f32[64, 64]", "f32[{x}16, {y}32]")
    )
    # Nothing is sent of one number: what an all-reduce of it takes, all of them wait for together.
    one, none = (rs.Layout.parse(text, mesh) for text in ("f32[1] + sum{x,y}", "f32[1]"))
    waits = rs.plan(one, none, network=network).seconds
    alone = prices.price(total, whole).seconds
    assert alone - prices.price(total, whole, 4).seconds == pytest.approx(0.75 * waits, rel=1e-3)
    assert prices.price(total, rows, 4).seconds == prices.price(total, rows).seconds
    assert prices.price(rows, whole, 4).seconds == prices.price(rows, whole).seconds


def test_strided_devices_pack_in_two_passes_what_they_gather_along_two_dims():
    mesh = rs.Mesh(x=4, y=2)
    rate = 1e6
    whole, rows, corners = (
        rs.Layout.parse(text, mesh) for text in ("f32[64, 64]", "f32[{x}16, 64]", "f32[{y}32, {x}16]")
    )
    prices = MovePrices(mesh, "tpu-v5p", strided=True, copy_rate=rate)
    for source, target, packed in ((rows, whole, 0), (corners, whole, whole.tile_bytes)):
        seconds = rs.plan(source, target, network="tpu-v5p").seconds
        assert prices.price(source, target).seconds == pytest.approx(seconds + 4 * packed / rate)
        assert prices.estimate_seconds([source], [target])[0, 0] == pytest.approx(seconds + 4 * packed / rate)
