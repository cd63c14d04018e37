"""A tile as a collective sees it: reshaped to digits, some of which number the blocks that it sends.

    mesh <x=2>, all_to_all f32[{x}4, 8] -> f32[8, {x}4]: the operand's tile is 4 x 8

    tile (4, 8)  --pad-->  (4, 8)  --reshape-->  digits (4, 2, 4)
                                                 blocks     ^ axis 1 is the member of the group that gets the block

The blocks are columns here, so they are packed before they are sent. The typing rules (is a copy needed, how large is
it) and the lowering (which block goes where) use the same view, so that promise and program cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.geometry.refine import RefinedDigit, Refinement
from reshard.types.layout import Layout


@dataclass(frozen=True)
class TileView:
    """A tile of shape `tile`, padded or cut to `padded` and reshaped to `digits`.

    `dims` gives the dim of the tile that each digit belongs to. `blocks` are the digit axes that together number a
    block, major to minor in group order.
    """

    tile: tuple[int, ...]
    padded: tuple[int, ...]
    digits: tuple[int, ...]
    dims: tuple[int, ...]
    blocks: tuple[int, ...]

    @cached_property
    def elements(self) -> int:
        """Elements of the padded tile."""
        return math.prod(self.padded)

    @cached_property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.digits[axis] for axis in self.blocks)

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block, in digits."""
        return tuple(r for axis, r in enumerate(self.digits) if axis not in self.blocks)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The digit axes, grouped so that a block has a contiguous range in each group.

        A new group starts with each dim, and within a dim where a digit that numbers blocks follows one that does not.
        """
        groups: list[list[int]] = []
        for axis, dim in enumerate(self.dims):
            last = groups[-1][-1] if groups else None
            new = last is None or self.dims[last] != dim or (axis in self.blocks and last not in self.blocks)
            groups.append([axis]) if new else groups[-1].append(axis)
        return tuple(map(tuple, groups))

    @cached_property
    def in_place(self) -> bool:
        """Whether the blocks follow each other in the tile, so that no copy is needed."""
        return self.tile == self.padded and self.blocks == tuple(range(len(self.blocks)))


def before(operand: Layout, refinement: Refinement, order: Sequence[int] = ()) -> TileView:
    """The operand's tile; its blocks are the digits that the strides in `order` come to hold."""
    local = [d for d in refinement.digits if d.src is None]
    return _tile_view(operand, local, {d.dst: axis for axis, d in enumerate(local) if d.dst is not None}, order)


def after(result: Layout, refinement: Refinement, order: Sequence[int] = ()) -> TileView:
    """The result's tile; its blocks are the digits that the strides in `order` held."""
    local = [d for d in refinement.digits if d.dst is None]
    return _tile_view(result, local, {d.src: axis for axis, d in enumerate(local) if d.src is not None}, order)


def _tile_view(layout: Layout, local: list[RefinedDigit], axes: dict[int, int], order: Sequence[int]) -> TileView:
    padded = [1] * len(layout.shape)
    for digit in local:
        padded[digit.dim] *= digit.radix
    digits = tuple(d.radix for d in local)
    blocks = tuple(axes[stride] for stride in order)
    return TileView(layout.tile_shape, tuple(padded), digits, tuple(d.dim for d in local), blocks)


def scatter_order(refinement: Refinement) -> tuple[int, ...]:
    """The order of a group's members in which the operand's blocks leave without being packed."""
    return tuple(digit.dst for digit in refinement.sliced if digit.dst is not None)


def gather_order(refinement: Refinement) -> tuple[int, ...]:
    """The order of a group's members in which the result's blocks arrive without being unpacked."""
    return tuple(digit.src for digit in refinement.gathered if digit.src is not None)
