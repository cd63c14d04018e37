"""Tiles as SVG: every cell says who holds what, as the layout's meaning does, and the file in docs is the code's."""

import math
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reshard.draw.vector_tiles import tiles_svg
from reshard.errors import ReshardError
from reshard.synth import plan
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = "{http://www.w3.org/2000/svg}"
PAIRS = [
    (Mesh(x=4, y=2), "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"),
    (Mesh(x=4, y=2), "f32[{x}4, 16]", "f32[16, {y}8]"),
    (Mesh(x=3), "f32[{x}3/7]", "f32[7]"),
    (Mesh(x=8, y=8), "f32[{x}8, {y}8]", "f32[{y}8, {x}8]"),
    (Mesh(x=2, y=2), "f32[2{x}2, {y}3]", "f32[{x}4, {y}3]"),
]


def hovers(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{NAME}title")]


@pytest.mark.parametrize(("mesh", "source", "target"), PAIRS, ids=[f"{a}-{b}" for _, a, b in PAIRS])
def test_the_cells_hold_what_the_meaning_says(mesh: Mesh, source: str, target: str):
    made = plan(Layout.parse(source, mesh), Layout.parse(target, mesh))
    shown: dict[int, int] = {}
    for words in hovers(tiles_svg(made)):
        if match := re.fullmatch(r"devices? ([\d, ]+): \[(.*)\]", words):
            spans = [range(*map(int, span.split(":"))) for span in match[2].split(", ")]
            count = math.prod(map(len, spans))
            for device in map(int, match[1].split(", ")):
                shown[device] = shown.get(device, 0) + count
    meant = dict.fromkeys(mesh.devices, 0)
    for layout in (made.source, *(step.result for step in made.steps)):
        for device in mesh.devices:
            inside = (
                [at for at in along if at < n] for along, n in zip(meaning(layout, device), layout.shape, strict=True)
            )
            meant[device] += math.prod(map(len, inside))
    assert shown == meant
    stacked = tiles_svg(made, columns=1)
    assert sorted(hovers(stacked)) == sorted(hovers(tiles_svg(made)))
    assert float(ElementTree.fromstring(stacked).get("width", "")) < 300  # a phone shows 360 pixels


def test_it_is_one_element_with_words_for_those_who_do_not_see_it():
    mesh = Mesh(x=2)
    root = ElementTree.fromstring(tiles_svg(plan(Layout.parse("f32[{x}2]", mesh), Layout.parse("f32[4]", mesh))))
    assert root.tag == f"{NAME}svg" and root.get("role") == "img"
    assert root.get("aria-label") == "which device holds what, from f32[{x}2] to f32[4], by all_gather"


def test_too_many_devices_are_refused():
    mesh = Mesh(x=8192)
    with pytest.raises(ReshardError, match="too many to draw"):
        tiles_svg(plan(Layout.parse("f32[{x}1]", mesh), Layout.parse("f32[8192]", mesh)))


def test_the_pictures_in_docs_are_those_that_the_code_draws():
    for name, svg in runpy.run_path(str(DOCS / "make_images.py"))["images"]().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == svg, "python docs/make_images.py"
