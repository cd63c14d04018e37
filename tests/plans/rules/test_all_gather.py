"""`all_gather`: costs by hand, and refusals."""

from __future__ import annotations

from math import prod

import pytest

from reshard.errors import StepError
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import Cost
from tests.oracle import check, tiles_of
from tests.plans.rules.steps import cost, derived, one_step, refuses


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        # Three tiles of 4 elements arrive in place.
        ("f32[{x}4]", "f32[16]", Cost(3 * 16, 1, 0)),
        # The blocks are columns of the result, so they arrive in a buffer of its size.
        ("f32[4, {x}4]", "f32[4, 16]", Cost(3 * 64, 1, 256)),
        # A dim of size 1 in front makes no difference.
        ("f32[1, {x}4]", "f32[1, 16]", Cost(3 * 16, 1, 0)),
        ("f32[{x}{y}2]", "f32[16]", Cost(7 * 8, 1, 0)),
        # The group is ordered by y, then x, like the blocks of the result: they arrive in place.
        ("f32[{y}{x}2]", "f32[16]", Cost(7 * 8, 1, 0)),
        ("f32[{x}{y}2]", "f32[{x}4]", Cost(8, 1, 0)),
        ("f32[{x}{y}2]", "f32[{x:(1)2}{y}4]", None),
        # Padded tiles are sent whole: three tiles of three elements.
        ("f32[{x}3/10]", "f32[10]", Cost(3 * 12, 1, 48)),
        ("c128[{y}4] + sum{x}", "c128[8] + sum{x}", Cost(64, 1, 0)),
        ("s4[{x}3]", "s4[12]", Cost(5, 1, 0)),
    ],
)
def test_all_gather(operand: str, result: str, expected: Cost | None):
    if expected is None:
        with pytest.raises(StepError, match="only held digits may change"):
            cost("all_gather", operand, result)
    else:
        assert cost("all_gather", operand, result) == expected


@pytest.mark.parametrize(
    ("kind", "operand", "result", "why"),
    [
        ("all_gather", "f32[16]", "f32[{x}4]", "only held digits may change"),
        ("all_gather", "f32[{x}4, 16]", "f32[16, {x}4]", "only held digits may change"),
        ("all_gather", "f32[{x}4] + sum{y}", "f32[16]", "partial sub-axes must stay"),
        ("all_gather", "f32[{x}{y}2]", "f32[{y}8]", "only held digits may change"),
    ],
)
def test_refusals(kind: str, operand: str, result: str, why: str):
    refuses(kind, operand, result, why)


def test_the_tiles_of_a_group_make_up_the_result():
    """Even pairs: a device receives the rest of its result, and needs no buffer if tiles are runs of the result."""
    seen = {True: 0, False: 0}
    for operand, result in derived("all_gather", count=60):
        check(one_step("all_gather", operand, result))
        if not (operand.even and result.even and prod(result.shape)) or operand.partial:
            continue
        step_cost = check_step("all_gather", operand, result)
        assert step_cost.received == result.tile_bytes - operand.tile_bytes
        tiles, results = tiles_of(operand), tiles_of(result)
        for device, gathered in results.items():
            place = {int(index): at for at, index in enumerate(gathered.reshape(-1))}
            group = [tile.reshape(-1) for tile in tiles.values() if int(tile.reshape(-1)[0]) in place]
            runs = [[place[int(index)] for index in tile] for tile in group]
            in_place = all(run == list(range(run[0], run[0] + len(run))) for run in runs)
            assert (step_cost.scratch == 0) == in_place, f"device {device} of {operand} -> {result}"
            assert step_cost.scratch in (0, result.tile_bytes)
            seen[in_place] += 1
    assert min(seen.values()) > 5
