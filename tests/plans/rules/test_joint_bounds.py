"""Joint bounds: below what runs, and above what one array alone makes necessary."""

from __future__ import annotations

import random

import reshard as rs
from reshard.plans.rules.bounds import endpoint_bound, joint_endpoint_bound, joint_lower_bound, lower_bound
from tests.layouts import random_crossing
from tests.oracle import PADDING, tiles_of
from tests.trees import random_tree


def plain(moves: list[tuple[rs.Layout, rs.Layout]]) -> list[tuple[rs.Layout, rs.Layout, None]]:
    """The moves, without views."""
    return [(source, target, None) for source, target in moves]


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


def test_it_is_no_less_than_the_bound_of_one_array():
    choose = random.Random(5)
    for _ in range(60):
        moves = list(random_tree(choose).values())
        joint = joint_lower_bound(plain(moves))
        assert max(lower_bound(*ends) for ends in moves) <= joint <= sum(lower_bound(*ends) for ends in moves)


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
