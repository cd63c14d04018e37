"""Which bytes of which file are which elements of a tile.

    stored f32[6, 4] in one piece, at byte 80        tile of f32[{x}3, 4] on device 1 of <x=2>

    row 0, 1, 2    bytes 80-127                      FileRead(piece, (Block(12, 0, (Axis(3, 4, 4), Axis(4, 1, 1))),))
    row 3, 4, 5    bytes 128-175    <- one run

The sender of a block is a piece of a file here: its `src` counts elements from the beginning of the piece, and its
`dst` elements of the padded tile, as between two devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.geometry.blocks import Axis, Block, Factor, cut_range, list_strides, merge_blocks, multiply_blocks
from reshard.geometry.holders import tile_of
from reshard.geometry.overlap import piece_runs
from reshard.plans.load_plan import Reading
from reshard.plans.stored import Box, ChunkGrid, Stored, StoredPiece
from reshard.types.layout import Layout


class FileRead(NamedTuple):
    """What a tile takes of one piece of a stored tensor: in each block, `src` counts elements of the piece, `dst` those
    of the tile."""

    piece: StoredPiece
    blocks: tuple[Block, ...]


class _DimRuns(NamedTuple):
    """What a tile has of one dim of a stored tensor: runs of (index there, offset in the tile, length), and how far
    apart neighbours are in the tile."""

    step: int
    runs: Sequence[tuple[int, int, int]]


def list_file_reads(stored: Stored, layout: Layout, device: int, box: Box | None = None) -> list[FileRead]:
    """What the tile of a device takes of each piece of a stored tensor, or of a box of it that has the layout's shape.

    >>> from reshard.types.mesh import Mesh
    >>> stored = Stored("w", "float32", (6, 4), (StoredPiece(((0, 6), (0, 4)), 0, 80, 96),))
    >>> [read.blocks for read in list_file_reads(stored, Layout.parse("f32[{x}3, 4]", Mesh(x=2)), 1)]
    [(Block(src=12, dst=0, axes=(Axis(extent=3, src=4, dst=4), Axis(extent=4, src=1, dst=1))),)]
    """
    box = tuple((0, size) for size in stored.shape) if box is None else box
    return _list_reads(stored, _list_dim_runs(layout, device, box))


def list_reading_reads(tensors: Mapping[str, Stored], reading: Reading, device: int) -> list[tuple[Stored, FileRead]]:
    """What the tile of a device takes of each piece of the tensors of a reading.

    >>> from reshard.plans.load_plan import PackedPart
    >>> from reshard.types.mesh import Mesh
    >>> pieces = {name: StoredPiece(((0, 4),), 0, at, 16) for name, at in (("a", 80), ("b", 96))}
    >>> tensors = {name: Stored(name, "float32", (4,), (piece,)) for name, piece in pieces.items()}
    >>> parts = PackedPart("a", 0), PackedPart("b", 4)
    >>> pack = Reading("pack", "", None, Layout.parse("f32[{x}5/9]", Mesh(x=2)), 1, parts)
    >>> [(stored.name, *read.blocks) for stored, read in list_reading_reads(tensors, pack, 1)]
    [('b', Block(src=1, dst=0, axes=(Axis(extent=3, src=1, dst=1),)))]
    """
    if reading.packed:
        return list(_list_packed_reads(tensors, reading, device))
    stored = tensors[reading.stored]
    if reading.split == 1:
        return [(stored, read) for read in list_file_reads(stored, reading.layout, device, reading.box)]
    # The first two dims are the parts of the tensor's first dim, and what is read of each.
    of_part, of_row, *rest = _list_dim_runs(reading.layout, device, reading.box or ())
    rows = stored.shape[0] // reading.split
    runs = [
        ((part + n) * rows + row, at + n * of_part.step + to, length)
        for part, at, parts in of_part.runs
        for n in range(parts)
        for row, to, length in of_row.runs
    ]
    return [(stored, read) for read in _list_reads(stored, [_DimRuns(of_row.step, runs), *rest])]


def _list_dim_runs(layout: Layout, device: int, box: Box) -> list[_DimRuns]:
    """What the tile of a device has of each dim of an array of which the layout's is a box."""
    if tuple(stop - start for start, stop in box) != layout.shape or layout.partial:
        raise LayoutError(f"{layout} is not a layout of the box {box} of a stored tensor; give one of its shape")
    each = zip(layout.dims, tile_of(layout, device), list_strides(layout.tile_shape), box, strict=False)
    return [
        _DimRuns(step, [(first + start, local * step, length) for first, local, length in piece_runs(dim)[number]])
        for dim, number, step, (start, _) in each
    ]


def _list_reads(stored: Stored, dims: Sequence[_DimRuns]) -> list[FileRead]:
    """What a tile that has these indices takes of each piece."""
    if not all(dim.runs for dim in dims):
        return []
    reads: list[FileRead] = []
    bounds = [(min(run[0] for run in dim.runs), max(run[0] + run[2] for run in dim.runs)) for dim in dims]
    # Each dim gives its own blocks, of few runs, and the piece has their products.
    for piece in _list_near_pieces(stored, bounds):
        own = list_piece_strides(piece)
        factors: list[Factor] = []
        for (start, stop), (step, runs), src in zip(piece.box, dims, own, strict=True):
            shared: list[Block] = []
            for first, to, length in runs:
                low, high = max(start, first), min(stop, first + length)
                if low < high:
                    shared.append(Block((low - start) * src, to + (low - first) * step, (Axis(high - low, src, step),)))
            factors.append(tuple(merge_blocks(shared)))
        if all(factors):
            blocks = tuple(multiply_blocks(each) if each else Block(0, 0, ()) for each in itertools.product(*factors))
            reads.append(FileRead(piece, blocks))
    return reads


def _list_packed_reads(
    tensors: Mapping[str, Stored], reading: Reading, device: int
) -> Iterator[tuple[Stored, FileRead]]:
    """What the tile of a device takes of tensors that lie one behind another in a pack, each in C order."""
    (tile,) = _list_dim_runs(reading.layout, device, ((0, reading.layout.shape[0]),))
    for name, start in reading.packed:
        stored = tensors[name]
        below, size = list_strides(stored.shape), math.prod(stored.shape)
        for first, local, length in tile.runs:
            low, high = max(0, first - start), min(size, first + length - start)
            if low >= high:
                continue
            for piece in stored.pieces:
                ends = zip(piece.box, list_piece_strides(piece), below, strict=True)
                axes = tuple(Axis(end - begin, src, dst) for (begin, end), src, dst in ends)
                to = sum(begin * step for (begin, _), step in zip(piece.box, below, strict=True))
                block = Block(0, to + local + start - first, axes)
                # Only a tensor of one piece lies in two tiles.
                parts = [block] if high - low == size else list(cut_range(block, low, high))
                yield stored, FileRead(piece, tuple(parts))


def list_piece_strides(piece: StoredPiece) -> Sequence[int]:
    """How far apart neighbours along each dim are in a piece, in elements."""
    return piece.strides or list_strides([stop - start for start, stop in piece.box])


def _list_near_pieces(stored: Stored, bounds: Sequence[tuple[int, int]]) -> Iterator[StoredPiece]:
    """The pieces of a stored tensor that meet a box, in their order."""
    pieces = stored.pieces
    if not isinstance(pieces, ChunkGrid):
        for piece in pieces:
            if all(a < high and low < b for (a, b), (low, high) in zip(piece.box, bounds, strict=True)):
                yield piece
        return
    # A grid of a million chunks is not walked: those that meet the box are a box of chunks.
    ranges = [range(low // chunk, -(-high // chunk)) for (low, high), chunk in zip(bounds, pieces.chunks, strict=True)]
    for indices in itertools.product(*ranges):
        number = 0
        for index, count in zip(indices, pieces.counts, strict=True):
            number = number * count + index
        yield pieces[number]


# Spans: bytes of a file that follow each other and are all wanted, by one tile or by several.
#
#     two tiles of columns        a a b b | a a b b | a a b b     one span of three rows, in runs of half a row
#     one of them                 a a . . | a a . . | a a . .     three spans
#
# Long runs are read straight to where they belong, the neighbours of a file in one call, whatever tensors they are of.
# Short ones are read together into a buffer, and copied from there.


MOST_BUFFERS = 1024
"""Buffers of one `preadv`: the least limit of the systems that have it (IOV_MAX)."""

MOST_BYTES = (2 << 30) - 4096
"""Bytes that one `preadv` returns at most on Linux."""

SHORT = 16 << 10
"""Bytes of a run below which a buffer and a copy take less than a buffer of its own in the call."""

SCRATCH = 1 << 20
"""Bytes that are read into a buffer at once: they stay in a core's cache until they are copied."""


class SpanPart(NamedTuple):
    """What a tile has of a span: `src` counts bytes of the file in this block, `dst` elements of the tile."""

    tile: int
    itemsize: int
    block: Block


class FileSpan(NamedTuple):
    """Bytes `start` to `stop` of a file, all of which belong to some part; `straight` if these are long runs."""

    file: int
    start: int
    stop: int
    parts: tuple[SpanPart, ...]
    straight: bool


def list_spans(wanted: Iterable[tuple[int, int, Sequence[FileRead]]]) -> list[FileSpan]:
    """The spans of what some tiles want of raw pieces, given the number of each tile and the bytes of its elements.

    No two tiles want the same elements: of several that are alike, one reads.

    >>> stored = StoredPiece(((0, 2), (0, 8)), 0, 80, 64)
    >>> reads = [FileRead(stored, (Block(at, 0, (Axis(2, 8, 4), Axis(4, 1, 1))),)) for at in (0, 4)]
    >>> [(span.start, span.stop) for span in list_spans([(0, 4, reads[:1]), (1, 4, reads[1:])])]
    [(80, 144)]
    >>> [(span.start, span.stop) for span in list_spans([(0, 4, reads[:1])])]
    [(80, 96), (112, 128)]
    """
    by_piece: dict[tuple[int, int], list[SpanPart]] = {}
    for tile, size, reads in wanted:
        for piece, blocks in reads:
            for block in blocks if piece.raw else ():
                if not block.elements:
                    continue
                axes = [Axis(extent, src * size, dst) for extent, src, dst in block.axes]
                axes.sort(key=lambda axis: -axis.src)  # Pieces in another order than C's are read in their own.
                part = SpanPart(tile, size, Block(piece.offset + block.src * size, block.dst, tuple(axes)))
                by_piece.setdefault((piece.file, piece.offset), []).append(part)
    spans = [span for (file, _), parts in by_piece.items() for span in _span_parts(file, parts)]
    # Neighbours of a file may be of several tensors: their names do not matter to the file.
    spans.sort(key=lambda span: (span.file, span.start))
    joined: list[FileSpan] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last and (last.file, last.stop) == (span.file, span.start) and last.straight and span.straight:
            joined[-1] = FileSpan(last.file, last.start, span.stop, (*last.parts, *span.parts), True)
        else:
            joined.append(span)
    return joined


def _span_parts(file: int, parts: Sequence[SpanPart]) -> list[FileSpan]:
    """The spans of some parts of one piece."""
    start = min(part.block.src for part in parts)
    stop = max(_end_of_part(part) for part in parts)
    nbytes = sum(part.block.elements * part.itemsize for part in parts)
    # Parts do not overlap, so nothing is left out if they have as many bytes as there are.
    if nbytes == stop - start:
        runs = sum(map(count_part_runs, parts))
        return [FileSpan(file, start, stop, tuple(parts), runs <= len(parts) or nbytes >= SHORT * runs)]
    if not any(part.block.axes for part in parts):  # Elements that are wanted twice.
        return [span for part in parts for span in _span_parts(file, [part])]
    groups = _group_overlapping(parts)
    if len(groups) > 1:
        return [span for group in groups for span in _span_parts(file, group)]
    # Something is left out inside of them: row by row, as far as it takes.
    rows: list[SpanPart] = []
    for part in parts:
        (extent, src, dst), *rest = part.block.axes or (Axis(1, 0, 0),)
        rows += (
            part._replace(block=Block(part.block.src + n * src, part.block.dst + n * dst, tuple(rest)))
            for n in range(extent)
        )
    return [span for group in _group_overlapping(rows) for span in _span_parts(file, group)]


def _group_overlapping(parts: Sequence[SpanPart]) -> list[list[SpanPart]]:
    """Parts in the order of the file, those together whose bytes, from their first to their last, overlap or touch."""
    groups: list[list[SpanPart]] = []
    reach = -1
    for part in sorted(parts, key=lambda part: part.block.src):
        if part.block.src > reach:
            groups.append([])
        groups[-1].append(part)
        reach = max(reach, _end_of_part(part))
    return groups


def _end_of_part(part: SpanPart) -> int:
    """The byte after the last one of a part."""
    return part.block.src + sum((extent - 1) * src for extent, src, _ in part.block.axes) + part.itemsize


def count_part_runs(part: SpanPart) -> int:
    """The runs of a part: bytes that follow each other in the file and in the tile, if that is C-ordered."""
    runs, below = part.block.elements, 1
    for extent, src, dst in reversed(part.block.axes):
        if extent != 1 and (src, dst) != (below * part.itemsize, below):
            break
        runs, below = runs // extent, below * extent
    return runs


def count_elements_until(block: Block, at: int) -> int:
    """The elements of a block that begin before a byte of the file: its axes are those of nested rows.

    >>> block = Block(80, 0, (Axis(3, 32, 4), Axis(4, 4, 1)))
    >>> count_elements_until(block, 100), count_elements_until(block, 152)
    (4, 10)
    """
    count, left = 0, at - block.src
    below = block.elements
    for extent, src, _ in block.axes:
        if left <= 0:
            return count
        below //= extent
        index = min(extent - 1, (left - 1) // src)
        count, left = count + index * below, left - index * src
    return count + (left > 0)
