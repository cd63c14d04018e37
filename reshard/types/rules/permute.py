"""`permute`: whole tiles change devices.

    mesh <x=4, y=2>, f32[{x}{y}2] -> f32[{y}{x}2]

    dim   radix   before   after
     0      2     x:(1)2   y
     0      2     x:(2)2   x:(1)2
     0      2     y        x:(2)2
     0      2     local    local

No digit changes between local and held, so every tile of the result is a tile of the operand. The two meshes may
also list the same devices in different orders, or be two sets of equally many devices.
"""

from __future__ import annotations

from reshard.types.layout import Layout
from reshard.types.pair.device_sets import one_set
from reshard.types.rules.cost import Cost, StepMode, refusal


def check_permute(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """The tiles stay the same; the busiest device receives one."""
    if _local_places(operand) != _local_places(result) or not operand.partial_as(result):
        raise refusal("permute", operand, result, "the tiles must be the same ones, only on other devices")
    if not one_set(operand.mesh, result.mesh):
        _check_crossing(operand, result)
    return Cost(operand.tile_bytes, 1, 0)


def _check_crossing(operand: Layout, result: Layout) -> None:
    """Every device of one set must have a partner in the other."""
    if operand.mesh.size != result.mesh.size:
        sizes = f"{operand.mesh.size} devices to {result.mesh.size}"
        raise refusal("permute", operand, result, f"from {sizes}: use an exchange between sets of different sizes")
    if operand.partial:
        raise refusal("permute", operand, result, "a sum cannot stay partial on other devices; finish it first")


def _local_places(layout: Layout) -> list[tuple[int, list[tuple[int, int]]]]:
    """The padded size of each dim with its local digits as (place value, radix): the shape of its tiles."""
    shapes: list[tuple[int, list[tuple[int, int]]]] = []
    for dim in layout.dims:
        place, local = 1, list[tuple[int, int]]()
        for radix, axis in reversed(dim.digits):
            if axis is None and radix != 1:
                local.append((place, radix))
            place *= radix
        shapes.append((place, local))
    return shapes
