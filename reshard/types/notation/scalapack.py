"""ScaLAPACK's array descriptors: block-cyclic over a grid of processes, rows dealt to its rows, columns to its columns.

    desc = [1, context, M, N, MB, NB, RSRC, CSRC, LLD]        grid = (process rows, process columns)

    M = 1000, MB = 64, 2 process rows  ->  8{r}64/1000        8 rounds of blocks of 64, the last one padded

`read_descriptor` returns plain data; `Layout.from_scalapack` makes the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard.errors import LayoutError, quoted
from reshard.types.dims import checked_size
from reshard.types.mesh import Mesh
from reshard.types.whole import MOST_DEVICES, read_items

AXES = ("r", "c")
"""The mesh axes of the grid's rows and columns."""


class BlockCyclic(NamedTuple):
    """A dim of `size` elements dealt along `axis` in blocks of `block`."""

    size: int
    block: int
    axis: str


def read_descriptor(
    desc: Sequence[int], grid: Sequence[int], order: str = "R"
) -> tuple[Mesh, tuple[BlockCyclic, BlockCyclic]]:
    """Reads a descriptor: the mesh of the grid, its devices being process numbers, and how rows and columns are dealt.

    `order` is how BLACS numbers the grid: "R" row by row, "C" column by column. A source process (RSRC, CSRC)
    other than (0, 0) rotates the grid. Raises `LayoutError` for a descriptor that is not one of a dense matrix.

    >>> mesh, dims = read_descriptor([1, 0, 1000, 800, 64, 32, 0, 0, 512], (2, 3), "C")
    >>> mesh.device_ids, dims[0]
    ((0, 2, 4, 1, 3, 5), BlockCyclic(size=1000, block=64, axis='r'))
    """
    desc, grid = _read_numbers(desc, "descriptor"), _read_numbers(grid, "grid")
    if len(desc) != 9 or desc[0] != 1:
        raise LayoutError(
            f"descriptor {quoted(list(desc))}: give the 9 numbers [1, context, M, N, MB, NB, RSRC, CSRC, LLD] of a "
            f"dense matrix"
        )
    if len(grid) != 2 or min(grid) < 1:
        raise LayoutError(f"grid {quoted(grid)}: give (process rows, process columns), both at least 1")
    if grid[0] * grid[1] > MOST_DEVICES:
        raise LayoutError(f"grid {quoted(grid)} has {grid[0] * grid[1]} processes; at most {MOST_DEVICES} are listed")
    if not isinstance(order, str) or order not in ("R", "C"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(
            f"grid order {quoted(order)}: give 'R' if BLACS numbers the grid row by row, 'C' column by column"
        )
    _, _, rows, columns, row_block, column_block, row_source, column_source, _ = desc
    if min(row_block, column_block) < 1 or not (0 <= row_source < grid[0] and 0 <= column_source < grid[1]):
        raise LayoutError(
            f"descriptor {list(desc)} on grid {tuple(grid)}: blocks are at least 1, source processes within the grid"
        )
    # The process that holds the first block comes first along its axis.
    down = [(row_source + n) % grid[0] for n in range(grid[0])]
    right = [(column_source + n) % grid[1] for n in range(grid[1])]
    ids = [r * grid[1] + c if order == "R" else c * grid[0] + r for r in down for c in right]
    mesh = Mesh(dict(zip(AXES, grid, strict=True)), device_ids=ids)
    return mesh, (BlockCyclic(rows, row_block, AXES[0]), BlockCyclic(columns, column_block, AXES[1]))


def _read_numbers(given: Sequence[int], what: str) -> tuple[int, ...]:
    """The numbers of a descriptor or a grid as ints, all at least 0 but the context, which is BLACS's own."""
    items = read_items(given)
    if items is None:
        raise LayoutError(f"{what} {quoted(given)}: give a list of whole numbers")
    numbers = [*items]
    if len(numbers) == 9:
        numbers[1] = 0  # The context, which says nothing of where elements are, may be negative.
    try:
        return tuple(checked_size(number) for number in numbers)
    except LayoutError as error:
        raise LayoutError(f"{what} {quoted(items)}: {error}") from None
