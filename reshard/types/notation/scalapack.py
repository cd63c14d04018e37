"""ScaLAPACK's array descriptors: block-cyclic over a grid of processes, rows dealt to its rows, columns to its columns.

    desc = [1, context, M, N, MB, NB, RSRC, CSRC, LLD]        grid = (process rows, process columns)

    M = 1000, MB = 64, 2 process rows  ->  8{r}64/1000        8 rounds of blocks of 64, the last one padded

`read` returns plain data; `Layout.from_scalapack` makes the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.types.mesh import Mesh

AXES = ("r", "c")
"""The mesh axes of the grid's rows and columns."""


class BlockCyclic(NamedTuple):
    """A dim of `size` elements dealt along `axis` in blocks of `block`."""

    size: int
    block: int
    axis: str


def read(desc: Sequence[int], grid: Sequence[int], order: str = "R") -> tuple[Mesh, tuple[BlockCyclic, BlockCyclic]]:
    """Reads a descriptor: the mesh of the grid, its devices being process numbers, and how rows and columns are dealt.

    `order` is how BLACS numbers the grid: "R" row by row, "C" column by column. A source process (RSRC, CSRC)
    other than (0, 0) rotates the grid. Raises `LayoutError` for a descriptor that is not one of a dense matrix.

    >>> mesh, dims = read([1, 0, 1000, 800, 64, 32, 0, 0, 512], (2, 3), "C")
    >>> mesh.device_ids, dims[0]
    ((0, 2, 4, 1, 3, 5), BlockCyclic(size=1000, block=64, axis='r'))
    """
    _check(desc, grid, order)
    _, _, rows, columns, row_block, column_block, row_source, column_source, _ = desc
    # The process that holds the first block comes first along its axis.
    down = [(row_source + n) % grid[0] for n in range(grid[0])]
    right = [(column_source + n) % grid[1] for n in range(grid[1])]
    ids = [r * grid[1] + c if order == "R" else c * grid[0] + r for r in down for c in right]
    mesh = Mesh(dict(zip(AXES, grid, strict=True)), device_ids=ids)
    return mesh, (BlockCyclic(rows, row_block, AXES[0]), BlockCyclic(columns, column_block, AXES[1]))


def _check(desc: Sequence[int], grid: Sequence[int], order: str) -> None:
    if len(desc) != 9 or desc[0] != 1:
        raise LayoutError(
            f"descriptor {list(desc)}: give the 9 numbers [1, context, M, N, MB, NB, RSRC, CSRC, LLD] of a dense matrix"
        )
    if len(grid) != 2 or min(grid) < 1:
        raise LayoutError(f"grid {tuple(grid)}: give (process rows, process columns), both at least 1")
    if order not in ("R", "C"):
        raise LayoutError(f"grid order {order!r}: give 'R' if BLACS numbers the grid row by row, 'C' column by column")
    row_block, column_block, row_source, column_source = desc[4:8]
    if min(row_block, column_block) < 1 or not (0 <= row_source < grid[0] and 0 <= column_source < grid[1]):
        raise LayoutError(
            f"descriptor {list(desc)} on grid {tuple(grid)}: blocks are at least 1, source processes within the grid"
        )
