"""The tiles of a plan as SVG, without matplotlib: a panel for each layout, with the steps between them.

    source              all_to_all            target
    ┌───┬───┬───┬───┐    1792 B     ┌───────────────┐      Each cell is coloured and labelled by its devices; a pointer
    │ 0 │ 2 │ 4 │ 6 │   ───────>    │       0       │      that rests on it shows which indices they hold.
    └───┴───┴───┴───┘   received    └───────────────┘

The same cells as in `plan.draw("tiles")`, for pages that a browser makes by itself and for files beside a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from reshard.draw.cells import Cell
from reshard.draw.scene import Scene, fills, scene
from reshard.draw.shapes import PALE, Point, box, on, stripes
from reshard.types.plan import Plan, Step
from reshard.types.units import bytes_text, counted

_WIDTH, _SHORTEST, _TALLEST = 200.0, 60.0, 280.0
_GAP, _EDGE, _HEAD, _FOOT = 118.0, 46.0, 44.0, 40.0  # Between panels; left of the first, above and below each.
_TOP, _DROP = 14.0, 62.0  # Above the first panel; between panels that are stacked.
_HATCH = 8.0  # Between the lines over padding.
_LETTER = 0.61  # The width of a character over its size.
_SMALLEST, _NORMAL = 7.0, 12.0
_STYLE = "font-family:system-ui,sans-serif;font-size:12px"

STANDALONE = """
svg{color:#1c1e21;background:#fff}
@media (prefers-color-scheme:dark){svg{color:#e6e8ea;background:#15171a}}
"""
"""A style for a picture in a file of its own, legible in light and dark."""


@dataclass(frozen=True)
class _Panel:
    """One layout: its cells, and where they lie, in pixels."""

    scene: Scene
    at: int
    colour: dict[int, str]

    @cached_property
    def slices(self) -> list[tuple[str, list[Cell]]]:
        return self.scene.slices_of(self.at)

    @cached_property
    def _spans(self) -> tuple[int, int]:
        """The elements across and down."""
        grid = self.scene.grid
        across = self.scene.extent(self.at, grid[-1]) if grid else 1
        return max(1, across), max(1, self.scene.extent(self.at, grid[0])) if len(grid) > 1 else 1

    @cached_property
    def slice_height(self) -> float:
        across, down = self._spans
        tall = _SHORTEST if len(self.scene.grid) < 2 else min(max(_WIDTH * down / across, _SHORTEST), _TALLEST)
        return tall if len(self.slices) <= 1 else max(tall / len(self.slices), 46.0)

    @property
    def pitch(self) -> float:
        return self.slice_height + (20 if self.scene.slices else 0)

    @property
    def height(self) -> float:
        return _HEAD + self.pitch * max(1, len(self.slices)) + _FOOT

    def elements(self) -> Iterator[str]:
        """The panel's texts and cells."""
        layout = str(self.scene.layouts[self.at])
        size = min(12.5, (_WIDTH + _GAP - 24) / (_LETTER * len(layout)))
        middle = _WIDTH / 2
        yield _text(middle, 12, self.scene.names[self.at], "middle", "font-weight:600")
        mono = f"font-family:ui-monospace,Menlo,Consolas,monospace;font-size:{max(size, 6.5):.4g}px"
        yield _text(middle, 31, layout, "middle", mono)
        for number, (name, cells) in enumerate(self.slices):
            top = _HEAD + number * self.pitch
            if self.scene.slices:
                yield _text(0, top + 13, name, "start", "font-size:10.5px;opacity:.75")
                top += 20
            for cell in cells:
                yield self._cell(cell, top)
            yield from self._padding(cells, top)
        if not self.slices:
            yield _text(middle, _HEAD + self.slice_height / 2, "no elements", "middle")
        yield from self._ticks()

    def _corners(self, cell: Cell, top: float, clear: bool = False) -> tuple[float, float, float, float]:
        """A cell's sides in pixels; if `clear`, those of the part that is not padding."""
        ends = self.scene.shape if clear else [stop for _, stop in cell.spans]
        spans = [(cell.spans[dim][0], min(cell.spans[dim][1], ends[dim])) for dim in self.scene.grid]
        (left, right) = spans[-1] if spans else (0, 1)
        (low, high) = spans[0] if len(spans) > 1 else (0, 1)
        wide, tall = _WIDTH / self._spans[0], self.slice_height / self._spans[1]
        return left * wide, top + low * tall, right * wide, top + high * tall

    def _cell(self, cell: Cell, top: float) -> str:
        """The part of a cell that is not padding, with its label and what a pointer on it shows."""
        if self._is_padding(cell):
            return ""
        corners = self._corners(cell, top, clear=True)
        own = fills(cell, self.colour, PALE)
        own = own if self.scene.striped(self.at) else own[:1]
        outline = box(*corners)
        parts = stripes(outline, len(own)) if len(own) > 1 else [outline]
        shapes = "".join(_polygon(part, fill) for part, fill in zip(parts, own, strict=True))
        title = escape(self._hover(cell))
        return f"<g><title>{title}</title>{shapes}{_rim(corners)}{self._words(cell, corners, own)}</g>"

    def _is_padding(self, cell: Cell) -> bool:
        return any(start >= size for (start, _), size in zip(cell.spans, self.scene.shape, strict=True))

    def _padding(self, cells: Sequence[Cell], top: float) -> Iterator[str]:
        """The part of each cell that lies past the end of the array."""
        for cell in cells:
            left, low, right, bottom = self._corners(cell, top)
            if self._is_padding(cell):
                yield _hatched(left, low, right, bottom)
                continue
            _, _, end, floor = self._corners(cell, top, clear=True)
            yield _hatched(end, low, right, bottom) if end < right else ""
            yield _hatched(left, floor, end, bottom) if floor < bottom else ""

    def _words(self, cell: Cell, corners: Sequence[float], own: Sequence[str]) -> str:
        left, top, right, bottom = corners
        words = self.scene.label(self.at, cell)
        size = min(_NORMAL, (right - left) * 0.9 / (_LETTER * len(words)), (bottom - top) * 0.8)
        if size < _SMALLEST:
            return ""
        ink = on(own[0]) if len(own) == 1 else "#000"
        halo = ";paint-order:stroke;stroke:#fff;stroke-width:2.5px" if len(own) > 1 else ""
        x, y = (left + right) / 2, (top + bottom) / 2 + size * 0.35
        return _text(x, y, words, "middle", f"font-size:{size:.4g}px;fill:{ink}{halo}")

    def _hover(self, cell: Cell) -> str:
        """Which devices hold which indices."""
        sizes = self.scene.shape
        each = (f"{start}:{min(stop, max(start, n))}" for (start, stop), n in zip(cell.spans, sizes, strict=True))
        devices = ", ".join(map(str, cell.devices[:32])) + (", ..." if len(cell.devices) > 32 else "")
        return f"{'device' if len(cell.devices) == 1 else 'devices'} {devices}: [{', '.join(each)}]"

    def _ticks(self) -> Iterator[str]:
        grid, style = self.scene.grid, "font-size:10.5px;opacity:.75"
        if not grid or not self.slices:
            return
        bottom = _HEAD + self.pitch * len(self.slices)
        yield _text(_WIDTH / 2, bottom + 17, f"dim {grid[-1]} ({self.scene.shape[grid[-1]]})", "middle", style)
        if len(grid) > 1:
            name = escape(f"dim {grid[0]} ({self.scene.shape[grid[0]]})")
            at = f'transform="translate(-8 {(_HEAD + bottom) / 2:.4g}) rotate(-90)"'
            yield f'<text {at} text-anchor="middle" style="fill:currentColor;{style}">{name}</text>'


def tiles_svg(plan: Plan, style: str = "", columns: int = 3) -> str:
    """The tiles of a plan before, between and after its steps as one `svg` element; `style` is CSS to put into it.

    The panels are in rows of `columns`: with 1, one is below the other, for a narrow screen.

    Raises `ReshardError` for more devices than a picture has room for, and for steps that change the array's dims.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> svg = tiles_svg(plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh)))
    >>> "<title>device 3: [12:16, 0:16]</title>" in svg, "all_to_all" in svg
    (True, True)
    """
    panels = _panels(plan)
    width, height, parts = _in_rows(plan, panels, columns)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.4g} {height:.5g}" role="img"'
    sizes = f'width="{width:.4g}" height="{height:.5g}" style="{_STYLE}" aria-label="{escape(_spoken(plan))}"'
    return f"{head} {sizes}>{f'<style>{style}</style>' if style else ''}{''.join(parts)}</svg>"


def tiles_notes(plan: Plan) -> str:
    """How to read the picture, and what it leaves out."""
    return " ".join(scene(plan).notes())


def _in_rows(plan: Plan, panels: Sequence[_Panel], columns: int) -> tuple[float, float, list[str]]:
    """Width, height and elements of the panels; an arrow leads to each from the left, to a row's first from above."""
    top, parts = _TOP, list[str]()
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        tall = max(panel.height for panel in row)
        if first:
            parts.append(_arrow_down(top, plan.steps[first - 1]))
            top += _DROP
        for column, panel in enumerate(row):
            left = _EDGE + column * (_WIDTH + _GAP)
            middle = top + _HEAD + (tall - _HEAD - _FOOT) / 2
            parts += [_arrow(left - _GAP, middle, plan.steps[panel.at - 1])] if column else []
            parts.append(_placed(panel, left, top))
        top += tall
    return _EDGE + min(columns, len(panels)) * (_WIDTH + _GAP) - _GAP + 52, top, parts


def _placed(panel: _Panel, left: float, top: float) -> str:
    return f'<g transform="translate({left:.4g} {top:.5g})">{"".join(panel.elements())}</g>'


def _panels(plan: Plan) -> list[_Panel]:
    shown = scene(plan)
    return [_Panel(shown, at, shown.colour) for at in range(len(shown.panels))]


def _spoken(plan: Plan) -> str:
    """The picture in words."""
    steps = ", ".join(step.kind for step in plan.steps) or "no step"
    return f"which device holds what, from {plan.source} to {plan.target}, by {steps}"


def _arrow(left: float, middle: float, step: Step) -> str:
    start, end, centre = left + 12, left + _GAP - 28, left + (_GAP - 16) / 2
    words = _received(step)
    line = (
        f'<path d="M{start:.4g} {middle:.4g}H{end:.4g}m-6 -4l6 4l-6 4" fill="none" stroke="currentColor" '
        'stroke-width="1.3"/>'
    )
    below = (_text(centre, middle + 16 + 13 * at, text, "middle", "font-size:10.5px") for at, text in enumerate(words))
    return f"{_text(centre, middle - 8, step.kind, 'middle', 'font-size:10.5px;font-weight:600')}{line}{''.join(below)}"


def _arrow_down(top: float, step: Step) -> str:
    x = _EDGE + _WIDTH / 2 - 60
    line = (
        f'<path d="M{x:.4g} {top:.5g}v{_DROP - 22:.4g}m-4 -6l4 6l4 -6" fill="none" stroke="currentColor" '
        'stroke-width="1.3"/>'
    )
    kind = _text(x + 14, top + 16, step.kind, "start", "font-size:10.5px;font-weight:600")
    return f"{line}{kind}{_text(x + 14, top + 31, ' '.join(_received(step)), 'start', 'font-size:10.5px')}"


def _received(step: Step) -> list[str]:
    launches = [f"in {counted(step.launches, 'launch')}"] if step.launches > 1 else []
    return [bytes_text(step.received_bytes), "received", *launches]


def _text(x: float, y: float, words: str, anchor: str, style: str = "") -> str:
    ink = "" if "fill:" in style else "fill:currentColor;"
    return f'<text x="{x:.4g}" y="{y:.5g}" text-anchor="{anchor}" style="{ink}{style}">{escape(words)}</text>'


def _polygon(corners: Sequence[Point], fill: str) -> str:
    return f'<polygon points="{" ".join(f"{x:.4g},{y:.4g}" for x, y in corners)}" fill="{fill}"/>'


def _hatched(left: float, top: float, right: float, bottom: float) -> str:
    """Lines at half a right angle across a box of padding."""
    lines: list[str] = []
    total = left + top + _HATCH  # x + y of the points of a line.
    while total < right + bottom:
        start, end = max(left, total - bottom), min(right, total - top)
        lines.append(f"M{start:.4g} {total - start:.4g}L{end:.4g} {total - end:.4g}")
        total += _HATCH
    place = f'x="{left:.4g}" y="{top:.4g}" width="{right - left:.4g}" height="{bottom - top:.4g}"'
    return (
        f'<g stroke="currentColor" stroke-opacity=".35"><title>padding</title><rect {place} fill="#888" '
        f'fill-opacity=".1"/><path d="{"".join(lines)}"/></g>'
    )


def _rim(corners: Sequence[float]) -> str:
    """A border where the cell is large enough for one."""
    left, top, right, bottom = corners
    if min(right - left, bottom - top) < 5:
        return ""
    place = f'x="{left:.4g}" y="{top:.4g}" width="{right - left:.4g}" height="{bottom - top:.4g}"'
    return f'<rect {place} fill="none" stroke="#fff" stroke-opacity=".75"/>'
