"""`plan.draw`: which pictures of a plan of one or many arrays there are, and how they share a figure."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reshard.draw.memory_bars import draw_memory
from reshard.draw.scene import LINE, SMALL, Mark, Scene, Words, add_words, wrap_words
from reshard.draw.tile_panels import draw_tiles
from reshard.draw.traffic_matrix import draw_traffic
from reshard.errors import ReshardError, quoted
from reshard.plans.plan import AnyPlan
from reshard.show.plan_table import build_timeline

NAMES = ("tiles", "memory", "traffic")
_GAP, _EDGE = 34.0, 10.0
_WIDEST = 1152.0  # A wider figure would be shown too small.
_NOTICE = 432.0  # The width of a notice.


def draw(plan: AnyPlan, what: str | None = None) -> Any:
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
    painter = load_painter()
    scenes = [(what, draw_scene(what, plan))] if what else [(name, _scene_or_notice(name, plan)) for name in NAMES]
    # Side by side as far as they fit.
    placed: list[Any] = []
    left, top, width, height = 0.0, _EDGE, 0.0, _EDGE
    for name, scene in scenes:
        framed = add_words(scene)
        if left and left + framed.width > _WIDEST:
            left, top = 0.0, height + _GAP
        placed.append(painter.PlacedScene(name, framed, left, top))
        left += framed.width + _GAP
        width, height = max(width, left - _GAP), max(height, top + framed.height)
    return painter.paint_figure(placed, width, height + _EDGE)


def draw_scene(name: str, plan: AnyPlan, budget: int | None = None, narrow: bool = False) -> Scene:
    """The scene of a picture by its name, for a wide or a narrow screen.

    Raises `ReshardError` for a plan that is too large for it.
    """
    if name == "memory":
        return draw_memory(build_timeline(plan), budget, narrow)
    if not plan.names:
        raise ReshardError('a tree of no arrays has no tiles and no traffic to draw; use draw("memory")')
    largest = max(plan.plans.values(), key=lambda one: one.source.tile_bytes)
    return draw_tiles(largest, narrow) if name == "tiles" else draw_traffic(largest)


def _scene_or_notice(name: str, plan: AnyPlan) -> Scene:
    try:
        return draw_scene(name, plan)
    except ReshardError as error:
        lines = wrap_words(str(error), _NOTICE - 20, SMALL)
        marks: list[Mark] = [Words(10, 8 + LINE * at, line, anchor="start") for at, line in enumerate(lines)]
        return Scene(_NOTICE, 8 + LINE * len(lines), tuple(marks), f"no picture of the {name}")


def load_painter() -> Any:
    """The painter of figures; raises `ReshardError` if matplotlib is not installed."""
    try:
        return import_module("reshard.draw.paint_figure")
    except ImportError as error:
        raise ReshardError(
            f"drawing needs matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from None
