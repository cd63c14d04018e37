"""A layout in words: mesh, sizes, split dims, padding, copies and partial sums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reshard.show.headings import array_bytes_text
from reshard.show.holders import count, free
from reshard.types import Dim, Layout
from reshard.types.units import bytes_text, counted, listed, shape_text


def facts(layout: Layout) -> list[tuple[str, str]]:
    """Names and values, as `reshard show` prints them.

    >>> from reshard.types import Mesh
    >>> for name, words in facts(Layout.parse("f32[{x}3/10, 4]", Mesh(x=4, y=2))):
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
    order = "" if mesh.device_ids is None else f" in the order {_first_few(mesh.device_ids)}"
    return [
        ("mesh", f"{mesh}, {counted(mesh.size, 'device')}{order}"),
        ("global", f"{shape_text(layout.shape)}, {array_bytes_text(layout)}"),
        ("tile", f"{shape_text(layout.tile_shape)}, {bytes_text(layout.tile_bytes)} a device"),
        ("split", _split(layout)),
        ("padding", "; ".join(_padding(layout)) or "none"),
        ("copies", _copies(layout)),
        ("partial", _partial(layout)),
    ]


def _first_few(ids: Sequence[int]) -> str:
    return f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"


def _split(layout: Layout) -> str:
    words: list[str] = []
    for at, dim in enumerate(layout.dims):
        axes = [layout.mesh.spell(digit.axis) for digit in dim.digits if digit.axis is not None]
        if axes:
            words.append(f"dim {at} over {', '.join(axes)}")
    return "; ".join(words) or "no dim: every device holds the whole array"


def _padding(layout: Layout) -> Iterator[str]:
    for at, dim in enumerate(layout.dims):
        if dim.padded != dim.size:
            yield ", ".join([f"dim {at} from {dim.size} to {dim.padded}", *_short_pieces(dim)])


def _short_pieces(dim: Dim) -> list[str]:
    """The last piece that holds data and the pieces that hold none, of a padded dim that devices hold in runs."""
    split = any(axis is not None and axis.size > 1 for _, axis in dim.digits)
    if not split or dim.digits[-1].axis is not None:
        return []
    run, with_data = dim.digits[-1].radix, count(dim)
    empty = math.prod(digit.radix for digit in dim.digits) // run - with_data
    words = [f"the last piece is {dim.size - (with_data - 1) * run} of {run}"]
    return [*words, f"{counted(empty, 'piece')} without data"] if empty else words


def _copies(layout: Layout) -> str:
    mesh = layout.mesh
    unused = free(mesh, [(mesh.stride(axis), axis.size) for axis in (*layout.held, *layout.partial)])
    copies = math.prod(size for _, size in unused)
    what = "every summand" if layout.partial else "every element"
    if copies == 1:
        return f"1 of {what}"
    axes = [mesh.spell(axis) for factor in unused for axis in mesh.sub_axes(*factor)]
    return f"{copies} of {what}: the same along {listed(axes)}"


def _partial(layout: Layout) -> str:
    if not layout.partial:
        return "no"
    axes = listed([layout.mesh.spell(axis) for axis in layout.partial])
    summands = math.prod(axis.size for axis in layout.partial)
    return f"the true array is the {layout.reduction} of {summands} arrays of this shape, along {axes}"
