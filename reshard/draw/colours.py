"""Colours, boxes and stripes that every picture shares.

Fills are the same in light and dark and differ for every kind of colour vision (Okabe and Ito's eight colours for up to
eight devices); nothing is shown by fill alone.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from itertools import pairwise

from reshard.show.plan_table import IN_PLACE, OPERAND, RESULT, RUNNING, SCRATCH, SOURCE
from reshard.types.mesh import Mesh

FEW = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#d55e00", "#999999")
PALE = "#d8d8d8"
PART = {
    SOURCE: "#999999",
    OPERAND: "#56b4e9",
    RESULT: "#009e73",
    IN_PLACE: "#cc79a7",
    SCRATCH: "#e69f00",
    RUNNING: "#56b4e9",
}
PROMISE, FLOOR = "#d55e00", "#2f8ccf"

_LONG = 2.5  # Boxes that are longer than this times their width have straight stripes.

Point = tuple[float, float]


def ink_on(fill: str) -> str:
    """Black or white, whichever is easier to read on a fill.

    >>> ink_on("#f0e442"), ink_on("#0072b2")
    ('#000000', '#ffffff')
    """
    shares = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if luminance > 0.18 else "#ffffff"


def colour_by_coordinate(mesh: Mesh) -> dict[int, str]:
    """A colour for each device: eight distinct ones, or a hue by the first axis and a lightness by the others.

    >>> colour_by_coordinate(Mesh(x=2)), len(set(colour_by_coordinate(Mesh(x=8, y=8)).values()))
    ({0: '#56b4e9', 1: '#e69f00'}, 64)
    """
    if mesh.size <= len(FEW):
        return dict(zip(mesh.devices, FEW, strict=False))
    first = next(size for size in mesh.axes.values() if size > 1)
    rest = mesh.size // first
    return {device: _tint(*divmod(at, rest), first, rest) for at, device in enumerate(mesh.devices)}


def colour_devices(meshes: Sequence[Mesh]) -> dict[int, str]:
    """The colour of each device of these meshes, by its coordinates on the largest one if that has them all.

    >>> sorted(colour_devices([Mesh(x=2), Mesh({"y": 2}, device_ids=[2, 3])]))
    [0, 1, 2, 3]
    """
    mesh = max(meshes, key=lambda mesh: mesh.size)
    devices = sorted({device for each in meshes for device in each.devices})
    if not set(devices) <= set(mesh.devices):  # The two ends are on different devices.
        mesh = Mesh({"d": len(devices)}, device_ids=devices)
    return colour_by_coordinate(mesh)


def _tint(major: int, minor: int, hues: int, tints: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(0.85 * major / hues + 0.02, 0.42 + 0.38 * minor / max(1, tints - 1), 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def box(left: float, top: float, right: float, bottom: float) -> tuple[Point, ...]:
    """The corners of a rectangle."""
    return (left, top), (right, top), (right, bottom), (left, bottom)


def cut_stripes(corners: Sequence[Point], count: int) -> list[tuple[Point, ...]]:
    """A box cut into `count` stripes, one for each device that holds all of it: diagonal, or along a long box.

    >>> cut_stripes(box(0, 0, 8, 2), 2)
    [((0, 0.0), (8, 0.0), (8, 1.0), (0, 1.0)), ((0, 1.0), (8, 1.0), (8, 2.0), (0, 2.0))]
    """
    (left, top), _, (right, bottom), _ = corners
    ends = [at / count for at in range(count + 1)]
    if right - left > _LONG * (bottom - top):
        levels = [top + end * (bottom - top) for end in ends]
        return [box(left, low, right, high) for low, high in pairwise(levels)]
    if bottom - top > _LONG * (right - left):
        levels = [left + end * (right - left) for end in ends]
        return [box(low, top, high, bottom) for low, high in pairwise(levels)]

    def cut_unit(share: float) -> list[Point]:
        """Where the line at this share of the way from the upper left to the lower right cuts the unit square."""
        t = 2 * share
        return [(t, 0.0), (0.0, t)] if t <= 1 else [(1.0, t - 1), (t - 1, 1.0)]

    parts: list[tuple[Point, ...]] = []
    for low, high in pairwise(ends):
        # The stripe in the middle has the two corners that lie between its lines.
        middle = low < 0.5 < high
        (a, b), (c, d) = cut_unit(low), cut_unit(high)
        unit = [a, *([(1.0, 0.0)] if middle else []), c, d, *([(0.0, 1.0)] if middle else []), b]
        parts.append(tuple([(left + x * (right - left), top + y * (bottom - top)) for x, y in dict.fromkeys(unit)]))
    return parts
