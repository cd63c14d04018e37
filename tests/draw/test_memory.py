"""The picture of memory: bars are as long as what is live, their parts are named, and the limits are marked."""

from __future__ import annotations

import pytest

from reshard.draw.pictures import draw_scene
from reshard.draw.scene import FLOOR, PART, PROMISE, Area, Lines, Scene
from reshard.show.plan_table import build_timeline
from tests.draw.cases import CASES, planned
from tests.draw.reading import areas, texts


def lengths(scene: Scene) -> dict[str, list[tuple[str, float]]]:
    """The parts of each bar: what they are, and how long."""
    found: dict[str, list[tuple[str, float]]] = {}
    for part in areas(scene):
        moment, _, what = part.title.partition(": ")
        (left, _), _, (right, _), _ = part.bounds
        name = next(name for name in sorted(PART, key=len, reverse=True) if what.startswith(name))
        assert part.fills == (PART[name],)
        found.setdefault(moment, []).append((name, right - left))
    return found


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("budget", [None, 4500, 10**6])
def test_bars_are_the_live_bytes_and_lines_the_limits(name: str, budget: int | None):
    plan, every = planned(name), build_timeline(planned(name)).moments
    for narrow, most in ((False, 460.0), (True, 170.0)):
        scene = draw_scene("memory", plan, budget, narrow)
        scale = most / max(plan.peak_bytes, budget or 0, 1)
        wanted = {m.name: [(part, scale * size) for part, size in m.parts if size] for m in every}
        shown = lengths(scene)
        assert {moment: parts for moment, parts in wanted.items() if parts} == {
            moment: [(part, pytest.approx(size)) for part, size in parts] for moment, parts in shown.items()
        }
        left = min((area.bounds[0][0] for area in areas(scene)), default=0)
        lines = {mark.colour: mark.segments[0][0][0] - left for mark in scene.marks if isinstance(mark, Lines)}
        if areas(scene):
            limits = {PROMISE: plan.peak_bytes, "ink": budget, FLOOR: plan.floor_bytes}
            assert {colour: limits[colour] for colour in lines} == {
                colour: pytest.approx(at / scale) for colour, at in lines.items()
            }
        assert (FLOOR in lines) == (plan.peak_bytes != plan.floor_bytes) and ("ink" in lines) == (budget is not None)
        assert not narrow or scene.width <= 360


def test_parts_have_their_names_or_a_key():
    written = texts(draw_scene("memory", planned("three dims")))
    for words in ("source 2048 B", "operand 2048 B", "result 2048 B", "scratch 2048 B", "peak 6144 B", "floor 4096 B"):
        assert words in written
    scene = draw_scene("memory", planned("partial"))
    assert {"source", "operand", "result"} <= set(texts(scene))
    key = [mark for mark in scene.marks if isinstance(mark, Area) and not mark.title]
    assert [mark.fills for mark in key] == [(PART[name],) for name in ("source", "operand", "result")]
