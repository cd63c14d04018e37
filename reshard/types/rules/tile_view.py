"""How a collective sees a tile: reshaped to digits, some of which number its blocks.

    operand f32[8, 4] -> all_to_all to [{x}.., ..], x=2

    tile (8, 4)  --pad-->  padded (8, 4)  --reshape-->  digits (2, 4, 4)
                                                       blocks ^: axis 0 says which member gets it

One view serves the typing rules (is a staging copy needed, how large is it) and the lowering
(which block goes where), so the promise and the program cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reshard.types.layout import Layout
from reshard.types.pair.refine import RefinedDigit, Refinement


@dataclass(frozen=True)
class TileView:
    """A tile of shape `tile`, padded (or cut) to `padded`, reshaped to `digits`.

    `dims` says which dim of the tile each digit is of; `blocks` are the digit axes that together
    number a block, major to minor in group order.
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
        """How many blocks there are."""
        return math.prod(self.digits[axis] for axis in self.blocks)

    @cached_property
    def block_shape(self) -> tuple[int, ...]:
        """The digits of one block."""
        return tuple(r for axis, r in enumerate(self.digits) if axis not in self.blocks)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The digit axes, those joined that hold a block's elements in one run: within a dim, a new run
        starts where a digit that numbers blocks follows one that does not.
        """
        found: list[list[int]] = []
        for axis, dim in enumerate(self.dims):
            last = found[-1][-1] if found else None
            new = last is None or self.dims[last] != dim or (axis in self.blocks and last not in self.blocks)
            found.append([axis]) if new else found[-1].append(axis)
        return tuple(map(tuple, found))

    @cached_property
    def in_place(self) -> bool:
        """Whether the blocks lie in the tile one after another, so that no staging copy is needed."""
        return self.tile == self.padded and self.blocks == tuple(range(len(self.blocks)))


def before(operand: Layout, refinement: Refinement, order: Sequence[int] = ()) -> TileView:
    """The operand's tile; blocks are the atoms that the strides in `order` come to hold."""
    local = [a for a in refinement.digits if a.src is None]
    return _view(operand, local, {a.dst: i for i, a in enumerate(local) if a.dst is not None}, order)


def after(result: Layout, refinement: Refinement, order: Sequence[int] = ()) -> TileView:
    """The result's tile; blocks are the atoms that the strides in `order` held."""
    local = [a for a in refinement.digits if a.dst is None]
    return _view(result, local, {a.src: i for i, a in enumerate(local) if a.src is not None}, order)


def _view(layout: Layout, local: list[RefinedDigit], axes: dict[int, int], order: Sequence[int]) -> TileView:
    padded = [1] * len(layout.shape)
    for atom in local:
        padded[atom.dim] *= atom.radix
    digits = tuple(a.radix for a in local)
    blocks = tuple(axes[stride] for stride in order)
    return TileView(layout.tile_shape, tuple(padded), digits, tuple(a.dim for a in local), blocks)


def scatter_order(refinement: Refinement) -> tuple[int, ...]:
    """The order of a group's members in which the operand's blocks leave without being packed."""
    return tuple(digit.dst for digit in refinement.sliced if digit.dst is not None)


def gather_order(refinement: Refinement) -> tuple[int, ...]:
    """The order of a group's members in which the result's blocks arrive without being unpacked."""
    return tuple(digit.src for digit in refinement.gathered if digit.src is not None)
