"""Every layout of small arrays on prime axes, for searches that try everything."""

from __future__ import annotations

import itertools

from reshard.plans.plan import Plan, StepSpec, chain
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim

FOUR, SIX, EIGHT = Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=2, y=2, z=2)
IDLE, SUMMED = -1, -2


def every_layout(mesh: Mesh, shape: tuple[int, ...], partial: bool = False) -> list[Layout]:
    """All even layouts of whole prime axes; an axis holds any digit of any dim, nothing, or, if `partial`, summands."""
    axes = [mesh.sub_axis(name) for name in mesh.axes]
    layouts = set()
    for choice in itertools.product(*(places(axis.size, shape, partial) for axis in axes)):
        held = list(zip(axes, choice, strict=True))
        dims = [nested([(low, axis) for axis, (d, low) in held if d == at], n) for at, n in enumerate(shape)]
        if None not in dims:
            layouts.add(Layout(mesh, tuple(dims), "int8", "sum", tuple(axis for axis, (d, _) in held if d == SUMMED)))
    return sorted(layouts, key=str)


def places(radix: int, shape: tuple[int, ...], partial: bool) -> list[tuple[int, int]]:
    """What an axis of a prime size can hold: (dim, place)."""
    free = [(IDLE, 0), (SUMMED, 0)] if partial else [(IDLE, 0)]
    return free + [(d, low) for d, n in enumerate(shape) for low in range(1, n + 1) if n % (low * radix) == 0]


def nested(held: list, size: int) -> Dim | None:
    """The dim whose digits at these places are held; None if they do not nest."""
    digits, at = [], size
    for low, axis in sorted(held, reverse=True):
        if at % (low * axis.size):
            return None
        digits += [Digit(at // (low * axis.size), None), Digit(axis.size, axis)]
        at = low
    return Dim((*digits, Digit(at, None)), size)


def plan_of(source: str, *moves: tuple[str, str], mesh: Mesh, donate: bool = False) -> Plan:
    """The plan of the given steps: (kind, result)."""
    specs = [StepSpec(kind, Layout.parse(text, mesh)) for kind, text in moves]
    return chain(Layout.parse(source, mesh), specs[-1].result, specs, donate)
