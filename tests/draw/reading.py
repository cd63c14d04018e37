"""A scene or a figure as a person reads it."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np

from reshard.draw.scene import Area, Scene, Words
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning

TILE = re.compile(r"devices? ([\d, ]+?)(, \.\.\.)?: \[(.*)\]")


def texts(scene: Scene) -> list[str]:
    """All words of a scene, in order."""
    return [mark.text for mark in scene.marks if isinstance(mark, Words)]


def areas(scene: Scene) -> list[Area]:
    """The areas of a scene that say what they are."""
    return [mark for mark in scene.marks if isinstance(mark, Area) and mark.title]


def area_of(corners: Any) -> float:
    """The area of a polygon, by the shoelace formula."""
    pairs = zip(corners, [*corners[1:], corners[0]], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


def read_tile(area: Area) -> tuple[set[int], tuple[range, ...]] | None:
    """The devices and the indices that the title of a tile names; None for other areas."""
    match = TILE.fullmatch(area.title)
    if match is None:
        return None
    spans = tuple(range(*map(int, span.split(":"))) for span in match[3].split(", ") if span)
    return set(map(int, match[1].split(", "))), spans


def holders(layout: Layout) -> dict[tuple[int, ...], set[int]]:
    """The devices of every element of the true array, by the layout's meaning."""
    held: dict[tuple[int, ...], set[int]] = {}
    for device in layout.mesh.devices:
        for element in product(*meaning(layout, device)):
            if all(at < size for at, size in zip(element, layout.shape, strict=True)):
                held.setdefault(element, set()).add(device)
    return held


def listed(label: str, mesh: Mesh) -> set[int]:
    """The devices that a label names, by their ids or by their coordinates."""
    devices: set[int] = set()
    for part in label.split(" + "):
        if "=" in part:
            fixed = {name: int(at) for name, at in (one.split("=") for one in part.split(","))}
            ids = np.reshape(mesh.devices, list(mesh.axes.values()))
            devices |= set(ids[tuple(fixed.get(name, slice(None)) for name in mesh.axes)].ravel().tolist())
            continue
        if match := re.fullmatch(r"(\d+),(\d+),\.\.,(\d+)", part):
            first, second, last = map(int, match.groups())
            devices |= set(range(first, last + 1, second - first))
            continue
        for run in part.split(","):
            first, _, last = run.partition("-")
            devices |= set(range(int(first), int(last or first) + 1))
    return devices


def words(figure: Any) -> str:
    """All words in a figure."""
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)
