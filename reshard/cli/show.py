"""`reshard show`: a picture of which device holds what, one cell per piece, and the sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reshard.cli.arguments import Options
from reshard.cli.request import one_layout
from reshard.errors import ReshardError
from reshard.show import terminal
from reshard.show.holders import Piece, count, device, fixed, free, label, pieces, ranges
from reshard.types import Dim, Layout, SubAxis
from reshard.types.units import bytes_text, counted, listed, shape_text

WIDE = 120  # Columns of a picture where the terminal has more.
# ColorBrewer's Set3: eleven light colours that are easy to tell apart, with black text on them.
COLOURS = ("8dd3c7", "ffffb3", "bebada", "fb8072", "80b1d3", "fdb462", "b3de69", "fccde5", "d9d9d9", "bc80bd", "ccebc5")


def run(options: Options) -> int:
    """Draws the layout of a call."""
    if options.limit < 1:
        raise ReshardError(f"--limit {options.limit}: show at least 1 row")
    layout, out = one_layout(options), terminal.console()
    terminal.paragraph(out, str(layout), style=terminal.NAME)
    terminal.facts(out, facts(layout))
    out.print()
    picture(out, layout, options.limit)
    return 0


def facts(layout: Layout) -> list[tuple[str, str]]:
    """Mesh, sizes, padding, replication and partial sums in words."""
    mesh = layout.mesh
    order = "" if mesh.device_ids is None else f" in the order {_few(mesh.device_ids)}"
    return [
        ("mesh", f"{mesh}, {counted(mesh.size, 'device')}{order}"),
        ("global", f"{shape_text(layout.shape)}, {bytes_text(layout.nbytes(math.prod(layout.shape)))}"),
        ("tile", f"{shape_text(layout.tile_shape)}, {bytes_text(layout.tile_bytes)} a device"),
        ("split", _split(layout)),
        ("padding", "; ".join(_padding(layout)) or "none"),
        ("copies", _copies(layout)),
        ("partial", _partial(layout)),
    ]


def _few(ids: Sequence[int]) -> str:
    return f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"


def _split(layout: Layout) -> str:
    words: list[str] = []
    for at, dim in enumerate(layout.dims):
        axes = [layout.mesh.spell(d.axis) for d in dim.digits if d.axis is not None]
        if axes:
            words.append(f"dim {at} over {', '.join(axes)}")
    return "; ".join(words) or "no dim: every device holds the whole array"


def _padding(layout: Layout) -> Iterator[str]:
    for at, dim in enumerate(layout.dims):
        if dim.padded == dim.size:
            continue
        last = list(itertools.islice(pieces(dim), count(dim) - 1, None)) if count(dim) < 10**6 else []
        held = sum(axis.size > 1 for _, axis in dim.digits if axis is not None)
        empty = math.prod(d.radix for d in dim.digits) // max(1, dim.digits[-1].radix) - count(dim)
        words = [f"dim {at} from {dim.size} to {dim.padded}"]
        if last and held and dim.digits[-1].axis is None:
            words.append(f"the last piece is {last[0].stop - last[0].start} of {dim.digits[-1].radix}")
            words += [f"{counted(empty, 'piece')} without data"] if empty else []
        yield ", ".join(words)


def _copies(layout: Layout) -> str:
    mesh = layout.mesh
    used = [(mesh.stride(axis), axis.size) for axis in (*layout.held, *layout.partial)]
    unused = free(mesh, used)
    copies = math.prod(size for _, size in unused)
    what = "every summand" if layout.partial else "every element"
    if copies == 1:
        return f"1 of {what}"
    return (
        f"{copies} of {what}: the same along {listed([_spell(layout, a) for u in unused for a in mesh.sub_axes(*u)])}"
    )


def _spell(layout: Layout, axis: SubAxis) -> str:
    return layout.mesh.spell(axis)


def _partial(layout: Layout) -> str:
    if not layout.partial:
        return "no"
    axes = listed([_spell(layout, axis) for axis in layout.partial])
    summands = math.prod(axis.size for axis in layout.partial)
    return f"the true array is the {layout.reduction} of {summands} arrays of this shape, along {axes}"


def picture(out: Console, layout: Layout, limit: int) -> None:
    """A strip, a grid or a table, as the rank allows; `limit` bounds its lines."""
    if 0 in layout.shape:
        terminal.paragraph(out, "the array is empty: there is nothing to draw")
        return
    cut = [at for at, dim in enumerate(layout.dims) if any(d.axis is not None for d in dim.digits)]
    drawn = list(range(len(layout.dims))) if len(layout.dims) <= 2 else cut
    if len(drawn) == 2:
        _grid(out, layout, drawn[0], drawn[1], limit)
    elif len(drawn) == 1:
        _strips(out, layout, drawn[0], limit)
    elif not drawn:
        _whole(out, layout)
    if len(layout.dims) > 2:
        out.print()
        _devices(out, layout, limit)


def _whole(out: Console, layout: Layout) -> None:
    grid = _box([])
    grid.add_row(_cell(f" {label(layout, [])} ", 0))
    terminal.show(out, grid)


def _strips(out: Console, layout: Layout, at: int, limit: int) -> None:
    """One dim: strips of cells, as many one below the other as need be."""
    dim = layout.dims[at]
    most = max(1, limit // 4) * 64
    shown = list(itertools.islice(pieces(dim), most))
    labels = [label(layout, fixed(dim, layout.mesh, p.number)) for p in shown]
    width = 2 + max(len(word) for word in [*labels, *map(_span, shown)])
    fit = max(1, (min(out.width, WIDE) - 1) // (width + 1))
    columns = -(-len(shown) // -(-len(shown) // fit))  # Strips of one length.
    rows = list(itertools.islice(range(0, len(shown), columns), max(1, limit // 4)))
    if len(layout.dims) > 1:
        terminal.paragraph(out, f"dim {at} across; the other dims are whole")
    for first in rows:
        part = slice(first, first + columns)
        grid = _box([_span(p).center(width) for p in shown[part]])
        grid.add_row(*(_cell(w.center(width), p.number) for w, p in zip(labels[part], shown[part], strict=True)))
        terminal.show(out, grid)
    _cut(out, at, dim, min(len(shown), len(rows) * columns))


def _grid(out: Console, layout: Layout, down: int, across: int, limit: int) -> None:
    """Two dims: a grid of cells, cut to the screen."""
    rows = list(itertools.islice(pieces(layout.dims[down]), max(1, limit // 2)))
    columns = list(itertools.islice(pieces(layout.dims[across]), WIDE // 4))
    labels = [[_at(layout, (down, r), (across, c)) for c in columns] for r in rows]
    side = max(len(_span(r)) for r in rows)
    width = 2 + max(len(word) for word in [*itertools.chain(*labels), *map(_span, columns)])
    columns = columns[: max(1, (min(out.width, WIDE) - side - 4) // (width + 1))]
    terminal.paragraph(out, f"dim {down} down, dim {across} across{_others(layout)}")
    grid = _box(["", *(_span(c).center(width) for c in columns)])
    for row, words in zip(rows, labels, strict=True):
        cells = [_cell(word.center(width), 4 * row.number + c.number) for word, c in zip(words, columns, strict=False)]
        grid.add_row(Text(f" {_span(row).rjust(side)} ", style=terminal.FAINT), *cells)
    terminal.show(out, grid)
    _cut(out, down, layout.dims[down], len(rows))
    _cut(out, across, layout.dims[across], len(columns))


def _others(layout: Layout) -> str:
    return "; the other dims are whole" if len(layout.dims) > 2 else ""


def _at(layout: Layout, *places: tuple[int, Piece]) -> str:
    known = [f for at, piece in places for f in fixed(layout.dims[at], layout.mesh, piece.number)]
    return label(layout, known)


def _box(heads: Sequence[str]) -> Table:
    grid = Table(box=box.SQUARE, show_lines=True, padding=0, show_header=bool(heads), header_style=terminal.FAINT)
    for head in heads or [""]:
        grid.add_column(Text(head), no_wrap=True)
    return grid


def _cell(text: str, colour: int) -> Text:
    return Text(text, style=f"black on #{COLOURS[colour % len(COLOURS)]}")


def _span(piece: Piece) -> str:
    return f"{piece.start}:{piece.stop}"


def _cut(out: Console, at: int, dim: Dim, shown: int) -> None:
    """Says what of a dim is not in the picture."""
    rest = count(dim) - shown
    if rest > 0:
        line = f"... and {counted(rest, 'more piece')} of dim {at}, up to {dim.size}"
        terminal.paragraph(out, line, style=terminal.FAINT)


def _devices(out: Console, layout: Layout, limit: int) -> None:
    """A row per device: its coordinates, and its index ranges of each dim."""
    mesh = layout.mesh
    table = terminal.table("device", *mesh.axes, *(f"dim {at}" for at in range(len(layout.dims))), right=["device"])
    for position in range(min(mesh.size, limit)):
        coordinates = [str(mesh.coordinate(position, mesh.sub_axis(name))) for name in mesh.axes]
        held = [_ranges(dim, layout, position) for dim in layout.dims]
        table.add_row(*map(Text, [str(device(mesh, position)), *coordinates, *held]))
    terminal.show(out, table)
    if mesh.size > limit:
        line = f"... and {counted(mesh.size - limit, 'more device')}; --limit shows more rows"
        terminal.paragraph(out, line, style=terminal.FAINT)


def _ranges(dim: Dim, layout: Layout, position: int) -> str:
    found = [f"{start}:{stop}" for start, stop in itertools.islice(ranges(dim, layout.mesh, position), 5)]
    return ", ".join([*found[:4], *(["..."] if len(found) > 4 else [])]) or "only padding"
