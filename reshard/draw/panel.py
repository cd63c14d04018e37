"""One layout of a scene: its cells in the colours of their devices, with padding, labels and ticks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from reshard.draw.canvas import (
    LEGIBLE,
    NORMAL,
    PALE,
    SMALL,
    Area,
    Ink,
    Point,
    Size,
    box,
    polygons,
    stripes,
    width_of,
    words_on,
)
from reshard.draw.vector_tiles import Cell, Scene, fills

SLICE_NAME, SLICE_GAP = 0.17, 0.07
FINEST = 0.045  # Inches; smaller cells have no borders.


class SliceFrame(NamedTuple):
    """The place of a slice in a panel: its size and top in inches, and the elements that it spans."""

    width: float
    height: float
    top: float
    across: int
    down: int

    def x(self, element: float) -> float:
        """The place of an element in inches from the left."""
        return self.width * element / max(1, self.across)

    def y(self, element: float) -> float:
        """The place of an element in inches from the top."""
        return self.top + self.height * element / max(1, self.down)


class Panel:
    """Panel number `at` of a scene, on an area of `size`; `colour` is that of each device."""

    def __init__(self, scene: Scene, at: int, colour: dict[int, str], size: Size) -> None:
        self.scene, self.at, self.colour, self.size = scene, at, colour, size
        self.cells = scene.panels[at]
        self.strip = len(scene.grid) < 2

    def draw(self, area: Area) -> None:
        """Draws the panel on an area of its size."""
        axes, ink = area.axes(), area.ink
        axes.set(xlim=(0, area.width), ylim=(area.height, 0), xticks=[], yticks=[], label=self.scene.names[self.at])
        for spine in axes.spines.values():
            spine.set_visible(False)
        if not self.slices:
            style = {"fontsize": NORMAL, "color": ink.text, "ha": "center", "va": "center"}
            axes.text(area.width / 2, area.height / 2, "no elements", **style)
            return
        for frame, (name, cells) in zip(self.frames, self.slices, strict=True):
            self._draw_cells(axes, ink, frame, cells)
            self._draw_padding(axes, ink, frame, cells)
            axes.text(0, frame.top - 0.03, name, fontsize=SMALL, color=ink.text, va="bottom")
        self._draw_ticks(axes, ink)
        self._draw_labels(axes)

    @cached_property
    def slices(self) -> list[tuple[str, list[Cell]]]:
        """The cells of the panel, slice by slice, each slice with its name."""
        return self.scene.slices_of(self.at)

    @cached_property
    def frames(self) -> list[SliceFrame]:
        """The places of the slices, one below the other."""
        scene, number = self.scene, len(self.slices)
        name = SLICE_NAME if scene.slices else 0
        height = (self.size.height - number * name - (number - 1) * SLICE_GAP) / max(1, number)
        across = scene.extent(self.at, scene.grid[-1]) if scene.grid else 1
        down = 1 if self.strip else scene.extent(self.at, scene.grid[0])
        tops = [name + turn * (height + name + SLICE_GAP) for turn in range(number)]
        return [SliceFrame(self.size.width, height, top, across, down) for top in tops]

    @cached_property
    def legible(self) -> float:
        """The size of text, in points, in which all cells' labels fit into them; 0 if it would be too small to read."""
        sizes = [
            fitting(self.scene.label(self.at, cell), self._box(frame, cell, clear=True))
            for frame, (_, cells) in zip(self.frames, self.slices, strict=True)
            for cell in cells
        ]
        least = min(sizes, default=NORMAL)
        return least if least >= LEGIBLE else 0

    def _box(self, frame: SliceFrame, cell: Cell, clear: bool = False) -> list[Point]:
        """A cell's corners in inches; if `clear`, those of the part that is not padding, unless it is all padding."""
        spans = [cell.spans[dim] for dim in self.scene.grid]
        if clear:
            spans = [(a, min(b, n)) if a < n else (a, b) for (a, b), n in zip(spans, self._sizes, strict=True)]
        (left, right), (top, bottom) = spans[-1] if spans else (0, 1), (0, 1) if self.strip else spans[0]
        return box(frame.x(left), frame.y(top), frame.x(right), frame.y(bottom))

    @cached_property
    def _sizes(self) -> list[int]:
        """The array's true sizes along the axes of the panel."""
        return [self.scene.shape[dim] for dim in self.scene.grid]

    @cached_property
    def _ends(self) -> list[int]:
        """The ends of the drawn part along the axes of the panel, padding included."""
        return [self.cells.drawn[dim] * self.cells.runs[dim] for dim in self.scene.grid]

    def _draw_cells(self, axes: Any, ink: Ink, frame: SliceFrame, cells: Sequence[Cell]) -> None:
        outlines = [self._box(frame, cell) for cell in cells]
        corners: list[list[Point]] = []
        shown: list[str] = []
        for outline, cell in zip(outlines, cells, strict=True):
            own = fills(cell, self.colour, PALE)
            own = own if self.scene.striped(self.at) else own[:1]
            corners += stripes(outline, len(own)) if len(own) > 1 else [outline]
            shown += own
        polygons(axes, corners, shown, linewidths=0, antialiaseds=len(corners) > len(cells))
        if _smallest(outlines) >= FINEST:
            polygons(axes, outlines, ["none"], edgecolors=ink.back, linewidths=0.9)

    def _draw_padding(self, axes: Any, ink: Ink, frame: SliceFrame, cells: Sequence[Cell]) -> None:
        """Hatches what lies past the end of the array."""
        across, right = (self._sizes[-1], self._ends[-1]) if self._ends else (1, 1)
        down, bottom = (1, 1) if self.strip else (self._sizes[0], self._ends[0])
        if any(cells[0].spans[dim][0] >= self.scene.shape[dim] for dim in self.scene.slices):
            across = 0
        parts: list[list[Point]] = []
        if across < right:
            parts.append(box(frame.x(across), frame.y(0), frame.x(right), frame.y(bottom)))
        if across and down < bottom:
            parts.append(box(0, frame.y(down), frame.x(min(across, right)), frame.y(bottom)))
        polygons(axes, parts, [ink.back], alpha=0.7, linewidths=0)
        polygons(axes, parts, ["none"], hatch="//////", edgecolors="#808080", linewidths=0)

    def _draw_labels(self, axes: Any) -> None:
        """Writes the devices into the cells, if the labels fit into all of them."""
        if not self.legible:
            return
        for frame, (_, cells) in zip(self.frames, self.slices, strict=True):
            for cell in cells:
                (left, top), _, (right, bottom), _ = self._box(frame, cell, clear=True)
                own = fills(cell, self.colour, PALE)
                hidden = any(start >= size for (start, _), size in zip(cell.spans, self.scene.shape, strict=True))
                place = (left + right) / 2, (top + bottom) / 2
                words_on(axes, *place, self.scene.label(self.at, cell), self.legible, own, outlined=hidden)

    def _draw_ticks(self, axes: Any, ink: Ink) -> None:
        scene, style = self.scene, {"fontsize": SMALL, "color": ink.text}
        if not scene.grid:
            return
        across, name = self._borders(-1), f"dim {scene.grid[-1]} ({self._sizes[-1]})"
        axes.set_xticks([self.frames[-1].x(border) for border in across], list(map(str, across)))
        if self.strip:
            axes.text(self.size.width, -0.06, name, ha="right", va="bottom", **style)
            return
        axes.set_xlabel(name, labelpad=3, **style)
        rows = self._borders(0)
        names = [str(row) for _ in self.frames for row in rows]
        axes.set_yticks([frame.y(row) for frame in self.frames for row in rows], names)
        axes.set_ylabel(f"dim {scene.grid[0]} ({self._sizes[0]})", labelpad=5, **style)

    def _borders(self, axis: int) -> list[int]:
        """The indices that get a tick along an axis: 0, the end, and up to three borders of runs between them."""
        dim = self.scene.grid[axis]
        end, drawn, run = min(self._sizes[axis], self._ends[axis]), self.cells.drawn[dim], self.cells.runs[dim]
        inner = [number * run for number in range(0, drawn, -(-drawn // 4))]
        return [*(border for border in inner if border <= 0.86 * end), end]


def fitting(words: str, corners: Sequence[Point]) -> float:
    """The size of text, in points, in which words fit into a box; at most that of normal text."""
    (left, top), _, (right, bottom), _ = corners
    wide = words.replace("=", "==")  # As wide as two other characters.
    return min(NORMAL, (right - left) * 0.9 / max(1e-9, width_of(wide, 1)), (bottom - top) * 0.8 * 72)


def _smallest(outlines: Sequence[Sequence[Point]]) -> float:
    return min(min(right - left, bottom - top) for (left, top), _, (right, bottom), _ in outlines)
