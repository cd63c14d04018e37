"""`Plan.draw` and `TreePlan.draw`: which pictures of a plan there are, and how they share a figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from reshard.errors import ReshardError, quoted
from reshard.plans.plan import Plan, TreePlan
from reshard.show.plan_table import Timeline, moments, tree_timeline

NAMES = ("tiles", "memory", "traffic")
_GAP, _EDGE = 0.35, 0.1
_WIDEST = 12.0  # Inches; a wider figure would be shown too small.


class Drawing(Protocol):
    """A picture that knows its size, and draws itself on an area of that size."""

    @property
    def size(self) -> Any:
        """The picture's width and height in inches."""
        ...

    def put(self, area: Any) -> None:
        """Draws the picture."""
        ...


def draw(plan: Plan | TreePlan, what: str | None = None) -> Any:
    """One picture of a plan as a matplotlib `Figure`, or all of them; see `Plan.draw`.

    Among all pictures, one that cannot be drawn becomes a notice that says why. Memory is that of all arrays of a tree;
    tiles and traffic are those of its largest array.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> figure = draw(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), "tiles")
    """
    if what is not None and not (isinstance(what, str) and what in NAMES):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ReshardError(
            f"there is no picture {quoted(what)} of a plan; use one of {', '.join(NAMES)}, or None for all"
        )
    canvas = load_canvas()
    pictures = [_picture(what, plan)] if what else [_picture_or_notice(name, plan) for name in NAMES]
    places, width, height = _placed(pictures)
    area = canvas.blank(canvas.Size(width, height))
    for picture, left, top in places:
        picture.put(area.inside(left, top, *picture.size))
    return area.figure


def _placed(pictures: list[Drawing]) -> tuple[list[tuple[Drawing, float, float]], float, float]:
    """Each picture with its left and top, side by side as far as they fit, and the size of the whole figure."""
    places: list[tuple[Drawing, float, float]] = []
    left, top, width, height = 0.0, _EDGE, 0.0, _EDGE
    for picture in pictures:
        if left and left + picture.size.width > _WIDEST:
            left, top = 0.0, height + _GAP
        places.append((picture, left, top))
        left += picture.size.width + _GAP
        width, height = max(width, left - _GAP), max(height, top + picture.size.height)
    return places, width, height + _EDGE


def _picture(name: str, plan: Plan | TreePlan) -> Drawing:
    from reshard.draw.memory_picture import MemoryPicture  # They draw on the canvas: only with matplotlib.
    from reshard.draw.tiles_picture import TilesPicture
    from reshard.draw.traffic_picture import TrafficPicture

    if name == "memory":
        return MemoryPicture(_timeline(plan))
    classes: dict[str, Callable[[Plan], Drawing]] = {"tiles": TilesPicture, "traffic": TrafficPicture}
    return classes[name](_largest(plan))


def _timeline(plan: Plan | TreePlan) -> Timeline:
    if isinstance(plan, TreePlan):
        return tree_timeline(plan)
    return Timeline(tuple(moments(plan)), plan.peak_bytes, plan.floor_bytes)


def _largest(plan: Plan | TreePlan) -> Plan:
    """A plan, or that of the largest array of a tree."""
    if isinstance(plan, Plan):
        return plan
    if not plan.names:
        raise ReshardError('a tree of no arrays has no tiles and no traffic to draw; use draw("memory")')
    return max(plan.plans.values(), key=lambda one: one.source.tile_bytes)


def _picture_or_notice(name: str, plan: Plan | TreePlan) -> Drawing:
    from reshard.draw.notice import Notice

    try:
        return _picture(name, plan)
    except ReshardError as error:
        return Notice(name, str(error))


def load_canvas() -> Any:
    """The canvas; raises `ReshardError` if matplotlib is not installed."""
    try:
        from reshard.draw import canvas
    except ImportError as error:
        raise ReshardError(
            f"drawing needs matplotlib, which cannot be imported ({error}): pip install 'reshard[draw]'"
        ) from None
    return canvas
