"""The legs of plans to other devices, and their messages within budgets."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import BudgetError
from reshard.jax.crossing import across

TRAINER = rs.Mesh(fsdp=4)
SERVER = rs.Mesh({"tp": 2, "rep": 2}, device_ids=[4, 5, 6, 7])


def planned(source: str, target: str, *, server: rs.Mesh = SERVER, **options: object) -> rs.Plan:
    return rs.plan(rs.Layout.parse(source, TRAINER), rs.Layout.parse(target, server), **options)


def test_pulled_legs_receive_the_fewest_bytes() -> None:
    whole = planned("f32[{fsdp}32, 64]", "f32[128, {tp}32]")
    parts = across.pull_tiles(whole)
    assert [step.kind for leg in parts for step in leg.steps] == ["exchange"]
    assert parts.across.received_bytes == whole.lower_bound_bytes
    assert parts.across.peak_bytes <= whole.peak_bytes + parts.across.steps[0].cost.scratch


def test_a_view_is_pulled_in_one_exchange_between_its_casts() -> None:
    near, far = rs.Layout.parse("f32[{fsdp}32, 64]", TRAINER), rs.Layout.parse("bf16[{tp}32, 128]", SERVER)
    parts = across.pull_tiles(rs.plan(rs.Move(near, far, view="a b -> b a", cast=True)))
    assert [[step.kind for step in leg.steps] for leg in parts] == [["cast"], ["exchange"], []]
    ends = rs.Layout.parse("bf16[{fsdp}32, 64]", TRAINER), rs.Layout.parse("f32[{tp}64, 64]", SERVER)
    parts = across.pull_tiles(rs.plan(rs.Move(*ends, cast=True)))
    assert [[step.kind for step in leg.steps] for leg in parts] == [[], ["exchange"], ["cast"]]


def test_a_device_of_both_sets_may_send_and_receive_at_once() -> None:
    """Its two messages both count."""
    other = rs.Mesh({"tp": 2}, device_ids=[2, 7])
    parts = across.split_legs(planned("f32[{fsdp}32, 64]", "f32[{tp}64, 64]", server=other))
    step = parts.across.steps[0]
    tiles = step.operand.tile_bytes + step.result.tile_bytes
    cut = across.cut_messages(parts, tiles + 2048, 1, pieces=False).across
    assert cut.steps[0].mode.chunk == 256 and cut.peak_bytes <= tiles + 2048


@pytest.mark.parametrize("buffers", [1, 2])
def test_messages_fit_the_budget(buffers: int) -> None:
    whole = planned("f32[{fsdp}32, 64]", "f32[128, {tp}32]")
    parts = across.split_legs(whole)
    step = parts.across.steps[0]
    tiles = max(step.operand.tile_bytes, step.result.tile_bytes)
    for room in (buffers * 4, 64, 4096):
        cut = across.cut_messages(parts, tiles + room, buffers, pieces=False).across.steps[0]
        message = (cut.mode.chunk or 10**9) * 4
        assert cut.mode.chunk is None or message * buffers <= room
    with pytest.raises(BudgetError) as raised:
        across.cut_messages(parts, tiles + buffers * 4 - 1, buffers, pieces=False)
    assert raised.value.smallest == tiles + buffers * 4


def test_whole_tiles_become_messages_only_between_processes() -> None:
    parts = across.split_legs(planned("f32[{fsdp}4]", "f32[{tp}{rep}4]"))
    assert parts.across.steps[0].kind == "permute"
    assert across.cut_messages(parts, None, 1, pieces=False) == parts
    assert across.cut_messages(parts, None, 2, pieces=True).across.steps[0].kind == "exchange"
