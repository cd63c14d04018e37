"""A layout on a terminal: a box for each piece, labelled with the devices that hold it.

    f32[2{x}64] on <x=4>

    ┌──────┬────────┬─────────┬─────────┬─────────┬─────────┬─────────┬─────────┐
    │ 0:64 │ 64:128 │ 128:192 │ 192:256 │ 256:320 │ 320:384 │ 384:448 │ 448:512 │
    ├──────┼────────┼─────────┼─────────┼─────────┼─────────┼─────────┼─────────┤
    │  0   │   1    │    2    │    3    │    0    │    1    │    2    │    3    │
    └──────┴────────┴─────────┴─────────┴─────────┴─────────┴─────────┴─────────┘

Pieces are looked up only as far as they are drawn, so that the size of the array does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reshard.show import terminal
from reshard.show.layout_pieces import (
    Piece,
    count_pieces,
    device_at_position,
    find_free_factors,
    fix_coordinates,
    label_piece,
    list_pieces,
    list_ranges,
)
from reshard.show.plan_table import array_bytes_text
from reshard.types import Dim, Layout
from reshard.types.units import bytes_text, counted, listed, shape_text

WIDE = 120  # Columns of a picture on a wider terminal.
# ColorBrewer's Set3: eleven light colours that are easy to tell apart, with black text on them.
COLOURS = ("8dd3c7", "ffffb3", "bebada", "fb8072", "80b1d3", "fdb462", "b3de69", "fccde5", "d9d9d9", "bc80bd", "ccebc5")


def show_layout(layout: Layout, limit: int) -> None:
    """Prints a layout, its sizes, and its picture on stdout; `limit` as for `show_picture`."""
    out = terminal.open_console()
    terminal.print_paragraph(out, str(layout), style=terminal.NAME)
    terminal.print_facts(out, list_facts(layout))
    out.print()
    show_picture(out, layout, limit)


def show_picture(out: Console, layout: Layout, limit: int) -> None:
    """Prints a strip or a grid of the dims that are split, and a table of devices for more than two dims.

    `limit` bounds the lines, roughly; what is left out is named below the picture.
    """
    if 0 in layout.shape:
        terminal.print_paragraph(out, "the array is empty: there is nothing to draw")
        return
    split = [at for at, dim in enumerate(layout.dims) if any(digit.axis is not None for digit in dim.digits)]
    drawn = list(range(len(layout.dims))) if len(layout.dims) <= 2 else split
    if len(drawn) == 2:
        _show_grid(out, layout, drawn[0], drawn[1], limit)
    elif len(drawn) == 1:
        _show_strips(out, layout, drawn[0], limit)
    elif not drawn:
        # A scalar, or an array of more than two dims that is not split
        grid = _make_grid([])
        grid.add_row(_colour_cell(f" {label_piece(layout, [])} ", 0))
        terminal.print_table(out, grid)
    if len(layout.dims) > 2:
        out.print()
        _show_devices(out, layout, limit)


def _show_strips(out: Console, layout: Layout, at: int, limit: int) -> None:
    """One dim: strips of equally many cells, one below the other, as many as fit."""
    dim, strips = layout.dims[at], max(1, limit // 4)
    cells = list(itertools.islice(list_pieces(dim), strips * 64))
    labels = [label_piece(layout, fix_coordinates(dim, layout.mesh, cell.number)) for cell in cells]
    width = 2 + max(len(word) for word in [*labels, *map(_piece_text, cells)])
    fit = max(1, (min(out.width, WIDE) - 1) // (width + 1))
    # As few strips as fit, of equal length, instead of full ones and a short last one.
    columns = -(-len(cells) // -(-len(cells) // fit))
    starts = range(0, len(cells), columns)[:strips]
    if len(layout.dims) > 1:
        terminal.print_paragraph(out, f"dim {at} across; the other dims are whole")
    for start in starts:
        strip = slice(start, start + columns)
        grid = _make_grid([_piece_text(cell).center(width) for cell in cells[strip]])
        pairs = zip(labels[strip], cells[strip], strict=True)
        grid.add_row(*(_colour_cell(word.center(width), cell.number) for word, cell in pairs))
        terminal.print_table(out, grid)
    _show_rest(out, at, dim, min(len(cells), len(starts) * columns))


def _show_grid(out: Console, layout: Layout, down: int, across: int, limit: int) -> None:
    """Two dims: a grid of cells, cut to the width of the screen and to `limit` lines."""
    rows = list(itertools.islice(list_pieces(layout.dims[down]), max(1, limit // 2)))
    columns = list(itertools.islice(list_pieces(layout.dims[across]), WIDE // 4))
    labels: list[list[str]] = []
    for row in rows:
        known = fix_coordinates(layout.dims[down], layout.mesh, row.number)
        ends = [fix_coordinates(layout.dims[across], layout.mesh, column.number) for column in columns]
        labels.append([label_piece(layout, [*known, *of_column]) for of_column in ends])
    side = max(len(_piece_text(row)) for row in rows)
    width = 2 + max(len(word) for word in [*itertools.chain(*labels), *map(_piece_text, columns)])
    columns = columns[: max(1, (min(out.width, WIDE) - side - 4) // (width + 1))]
    others = "; the other dims are whole" if len(layout.dims) > 2 else ""
    terminal.print_paragraph(out, f"dim {down} down, dim {across} across{others}")
    grid = _make_grid(["", *(_piece_text(column).center(width) for column in columns)])
    for row, words in zip(rows, labels, strict=True):
        pairs = zip(words, columns, strict=False)
        # Neighbours differ in colour along both dims.
        cells = [_colour_cell(word.center(width), 4 * row.number + column.number) for word, column in pairs]
        grid.add_row(Text(f" {_piece_text(row).rjust(side)} ", style=terminal.FAINT), *cells)
    terminal.print_table(out, grid)
    _show_rest(out, down, layout.dims[down], len(rows))
    _show_rest(out, across, layout.dims[across], len(columns))


def _make_grid(heads: Sequence[str]) -> Table:
    grid = Table(box=box.SQUARE, show_lines=True, padding=0, show_header=bool(heads), header_style=terminal.FAINT)
    for head in heads or [""]:
        grid.add_column(Text(head), no_wrap=True)
    return grid


def _colour_cell(text: str, colour: int) -> Text:
    return Text(text, style=f"black on #{COLOURS[colour % len(COLOURS)]}")


def _piece_text(piece: Piece) -> str:
    return f"{piece.start}:{piece.stop}"


def _show_rest(out: Console, at: int, dim: Dim, shown: int) -> None:
    """Prints how many pieces of a dim the picture leaves out, if any."""
    rest = count_pieces(dim) - shown
    if rest > 0:
        line = f"... and {counted(rest, 'more piece')} of dim {at}, up to {dim.size}"
        terminal.print_paragraph(out, line, style=terminal.FAINT)


def _show_devices(out: Console, layout: Layout, limit: int) -> None:
    """Prints a row per device: its coordinates, and its index ranges in each dim."""
    mesh = layout.mesh
    table = terminal.make_table(
        "device", *mesh.axes, *(f"dim {at}" for at in range(len(layout.dims))), right=["device"]
    )
    for position in range(min(mesh.size, limit)):
        coordinates = [str(mesh.coordinate(position, mesh.sub_axis(name))) for name in mesh.axes]
        held: list[str] = []
        for dim in layout.dims:
            first = [f"{start}:{stop}" for start, stop in itertools.islice(list_ranges(dim, mesh, position), 5)]
            held.append(", ".join([*first[:4], *(["..."] if len(first) > 4 else [])]) or "only padding")
        table.add_row(*map(Text, [str(device_at_position(mesh, position)), *coordinates, *held]))
    terminal.print_table(out, table)
    if mesh.size > limit:
        line = f"... and {counted(mesh.size - limit, 'more device')}; --limit shows more rows"
        terminal.print_paragraph(out, line, style=terminal.FAINT)


# A layout in words: mesh, sizes, split dims, padding, copies and partial sums.


def list_facts(layout: Layout) -> list[tuple[str, str]]:
    """Names and values, as `reshard show` prints them.

    >>> from reshard.types import Mesh
    >>> for name, words in list_facts(Layout.parse("f32[{x}3/10, 4]", Mesh(x=4, y=2))):
    ...     print(f"{name}: {words}")
    mesh: <x=4, y=2>, 8 devices
    global: 10 x 4, 160 B
    tile: 3 x 4, 48 B a device
    split: dim 0 over x
    padding: dim 0 from 10 to 12, the last piece is 1 of 3
    copies: 2 of every element: the same along y
    partial: no
    """
    mesh = layout.mesh
    ids = mesh.device_ids
    order = "" if ids is None else f" in the order {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
    split: list[str] = []
    padding: list[str] = []
    for at, dim in enumerate(layout.dims):
        axes = [mesh.spell(digit.axis) for digit in dim.digits if digit.axis is not None]
        split += [f"dim {at} over {', '.join(axes)}"] if axes else []
        if dim.padded == dim.size:
            continue
        if dim.pieces is not None:
            padding.append(f"dim {at} is in pieces {dim.pieces:}, for each of which tiles have {dim.tile}")
            continue
        words = [f"dim {at} from {dim.size} to {dim.padded}"]
        if any(axis is not None and axis.size > 1 for _, axis in dim.digits) and dim.digits[-1].axis is None:
            # Devices hold it in runs: the last that has data may be short, and some may have none.
            run, with_data = dim.digits[-1].radix, count_pieces(dim)
            words.append(f"the last piece is {dim.size - (with_data - 1) * run} of {run}")
            if empty := math.prod(digit.radix for digit in dim.digits) // run - with_data:
                words.append(f"{counted(empty, 'piece')} without data")
        padding.append(", ".join(words))
    what = "every summand" if layout.partial else "every element"
    unused = find_free_factors(mesh, [(mesh.stride(axis), axis.size) for axis in (*layout.held, *layout.partial)])
    copies = f"1 of {what}"
    if unused:
        along = listed([mesh.spell(axis) for factor in unused for axis in mesh.sub_axes(*factor)])
        copies = f"{math.prod(size for _, size in unused)} of {what}: the same along {along}"
    partial = "no"
    if layout.partial:
        along = listed([mesh.spell(axis) for axis in layout.partial])
        summands = math.prod(axis.size for axis in layout.partial)
        partial = f"the true array is the {layout.reduction} of {summands} arrays of this shape, along {along}"
    return [
        ("mesh", f"{mesh}, {counted(mesh.size, 'device')}{order}"),
        ("global", f"{shape_text(layout.shape)}, {array_bytes_text(layout)}"),
        ("tile", f"{shape_text(layout.tile_shape)}, {bytes_text(layout.tile_bytes)} a device"),
        ("split", "; ".join(split) or "no dim: every device holds the whole array"),
        ("padding", "; ".join(padding) or "none"),
        ("copies", copies),
        ("partial", partial),
    ]
