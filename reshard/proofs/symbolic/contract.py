"""What one step must do, and how the digits of its tiles are grouped by the views of an instruction.

    f32[{x}4, 16] -> f32[16, {x}4]   all_to_all      tile before (4, 16): digits 4 | 4 4     view 4, 4 4 of block axis 1
                                                     tile after  (16, 4): digits 4 4 | 4

A contract has two sides. If every tile holds what the meaning of `operand` gives, then after the instruction every tile
holds what the meaning of `result` gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.form import FormDigit, Place
from reshard.proofs.symbolic.lists import Factors, require
from reshard.types.layout import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StepContract:
    """One step: its layouts, their common digits if they nest, and the shapes of the tiles before and after.

    `names` are the places whose sizes vary. `part` are the places that number the parts of a step that runs part by
    part: an instruction for one part does not see them.
    """

    about: str
    operand: Layout
    result: Layout
    digits: tuple[FormDigit, ...] | None
    tiles: tuple[Shape, Shape]
    names: frozenset[Place] = frozenset()
    part: frozenset[Place] = frozenset()

    @property
    def nested(self) -> tuple[FormDigit, ...]:
        """The common digits; raises `UndecidedError` if there are none."""
        require(self.digits is not None, f"{self.about}: the two layouts do not nest")
        return self.digits or ()

    @property
    def before(self) -> list[FormDigit]:
        """The digits that are local in the operand, without those that number parts."""
        return [a for a in self.nested if a.src is None and a.place not in self.part]

    @property
    def after(self) -> list[FormDigit]:
        """The digits that are local in the result, without those that number parts."""
        return [a for a in self.nested if a.dst is None and a.place not in self.part]

    def partial(self, layout: Layout) -> Factors:
        """The partial factors of a layout."""
        return [(layout.mesh.stride(a), a.size) for a in layout.partial]

    def of_part(self, take: Cut, put: Cut, places: frozenset[Place]) -> StepContract:
        """The contract of one part: `places` number the parts of operand and result alike, and are left out."""
        tiles = (_part_shape(self.tiles[0], take), _part_shape(self.tiles[1], put))
        for digits, cut in ((self.before, take), (self.after, put)):
            own = [a for a in digits if a.dim == cut.axis]
            _, numbering, _ = match((cut.outer, cut.parts, cut.inner), own)
            require(frozenset(a.place for a in numbering) == places, f"{self.about}: parts of other digits")
        return replace(self, tiles=tiles, part=places)


def size_of(digits: Sequence[FormDigit]) -> int:
    """How many values some digits have together."""
    return math.prod(a.radix for a in digits)


def match(radices: Sequence[int], digits: Sequence[FormDigit]) -> list[list[FormDigit]]:
    """For each radix of a view, the digits whose product it is: a string of digits matches in at most one way.

    A digit of radix 1 goes with the radix before it.
    """
    groups: list[list[FormDigit]] = []
    at = 0
    for radix in radices:
        group: list[FormDigit] = []
        while at < len(digits) and size_of(group) * digits[at].radix <= radix:
            if size_of(group) == radix and digits[at].radix > 1:
                break
            group.append(digits[at])
            at += 1
        require(size_of(group) == radix, "a view cuts digits elsewhere than the layouts do")
        groups.append(group)
    require(at == len(digits), "a view has fewer digits than the tile")
    return groups


def opened(
    view: TileView, digits: Sequence[FormDigit], tile: Shape, rank: int
) -> tuple[list[FormDigit], list[FormDigit]]:
    """Splits a tile's digits by a view: those that number blocks, in the order that numbers them, and the others."""
    require(view.tile == tile, f"a view of tiles of shape {view.tile}, where tiles have {tile}")
    padded = tuple(size_of([a for a in digits if a.dim == at]) for at in range(rank))
    require(view.padded == padded, f"a view padded to {view.padded}, where digits fill {padded}")
    axes = match(view.digits, digits)
    distinct = len(set(view.blocks)) == len(view.blocks)
    require(distinct and all(0 <= b < len(axes) for b in view.blocks), "a view whose block axes are not axes")
    blocks = [a for axis in view.blocks for a in axes[axis]]
    rest = [a for axis, own in enumerate(axes) if axis not in view.blocks for a in own]
    return blocks, rest


def same_string(one: Sequence[FormDigit], other: Sequence[FormDigit]) -> list[tuple[FormDigit, FormDigit]]:
    """The pairs of digits that reshaping one string to the other pairs: both have equal radices and names."""
    kept = [[a for a in string if a.radix > 1] for string in (one, other)]
    spelled = [[(a.radix, a.name) for a in string] for string in kept]
    require(spelled[0] == spelled[1], "two shapes of one block are different strings of digits")
    return list(zip(*kept, strict=True))


def _part_shape(tile: Shape, cut: Cut) -> Shape:
    require(cut.outer * cut.parts * cut.inner == tile[cut.axis], "parts that do not divide a tile's axis")
    return (*tile[: cut.axis], cut.outer * cut.inner, *tile[cut.axis + 1 :])
