"""The pairs of a permute: which device sends its whole tile to which."""

from __future__ import annotations

from reshard.errors import PlanError
from reshard.lower.even_rounds import EvenRounds
from reshard.types.layout import Layout
from reshard.types.pair.message import Tile, tiles
from reshard.types.pair.refine import refine


def permutation(operand: Layout, result: Layout) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) for every receiver: who holds before what it must hold after.

    Where several devices hold the same tile, senders are chosen so that each sends once.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> permutation(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh))
    ((0, 0), (2, 1), (1, 2), (3, 3))
    """
    r = refine(operand, result)
    if r is not None and operand.partial_as(result):
        rounds = EvenRounds(r)
        ids = operand.mesh.devices
        return tuple((ids[rounds.sender(at, ())], ids[at]) for at in range(operand.mesh.size))
    return _matched(operand, result)


def _matched(operand: Layout, result: Layout) -> tuple[tuple[int, int], ...]:
    """Devices matched by the tile that they hold and need; a device keeps its own where it can."""
    waiting: dict[Tile, list[int]] = {}
    pairs: list[tuple[int, int]] = []
    needs = tiles(result)
    for device, held in tiles(operand).items():
        if held == needs.get(device):
            pairs.append((device, device))
            del needs[device]
        else:
            waiting.setdefault(held, []).append(device)
    for device, needed in needs.items():
        if not waiting.get(needed):
            raise PlanError(f"permute: no device is left that holds what device {device} of {result} needs")
        pairs.append((waiting[needed].pop(), device))
    return tuple(sorted(pairs, key=lambda pair: pair[1]))
