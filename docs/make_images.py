"""Draws the pictures of the README and of the site's first page: python docs/make_images.py; a test repeats it."""

from __future__ import annotations

from pathlib import Path

import reshard as rs
from reshard.draw.paint_svg import STANDALONE, paint_svg
from reshard.draw.tile_panels import draw_tiles

IMAGES = Path(__file__).parent / "images"


def images() -> dict[str, str]:
    """Each picture's file name and its contents."""
    mesh = rs.Mesh(x=4, y=2)
    source = rs.Layout.parse("f32[{y}8, 16, {x}4]", mesh)
    target = rs.Layout.parse("f32[16, {x}{y}2, 16]", mesh)
    return {"plan.svg": paint_svg(draw_tiles(rs.plan(source, target)), STANDALONE) + "\n"}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, svg in images().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
