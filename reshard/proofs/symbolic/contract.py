"""What one step must do, and the finite part of a program that is compared with it: views, and lists of devices.

    f32[{x}4, 16] -> f32[16, {x}4]   all_to_all      tile before (4, 16): digits 4 | 4 4     view 4, 4 4 of block axis 1
                                                     tile after  (16, 4): digits 4 4 | 4

A contract has two sides. If every tile holds what the meaning of `operand` gives, then after the instruction every tile
holds what the meaning of `result` gives.

Groups, blocks and pairs are finite data. Whether they are what a formula in a device's coordinates gives is one exact,
vectorized comparison per device, without a solver; what the formula then does to elements is proved once for all
devices. The lowering writes such lists (`lower.groups`) and the prover reads them, so the two share no code:
`check_groups` takes the members' coordinates apart instead of building the groups again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import UndecidedError
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.form import FormDigit, Place
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh

Ints = NDArray[np.int64]
Shape = tuple[int, ...]
Factors = Sequence[tuple[int, int]]
"""(stride, radix) factors of the positions, major first."""


def require(holds: Any, what: str) -> None:
    """Stops the proof with `UndecidedError(what)` unless a condition holds."""
    if not bool(holds):
        raise UndecidedError(what)


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
        tiles: list[Shape] = []
        for digits, tile, cut in ((self.before, self.tiles[0], take), (self.after, self.tiles[1], put)):
            divides = cut.outer * cut.parts * cut.inner == tile[cut.axis]
            require(divides, "parts that do not divide a tile's axis")
            tiles.append((*tile[: cut.axis], cut.outer * cut.inner, *tile[cut.axis + 1 :]))
            own = [a for a in digits if a.dim == cut.axis]
            _, numbering, _ = match_digits((cut.outer, cut.parts, cut.inner), own)
            require(frozenset(a.place for a in numbering) == places, f"{self.about}: parts of other digits")
        return replace(self, tiles=(tiles[0], tiles[1]), part=places)

    def between_parts(self) -> StepContract:
        """The contract of one part as that of a whole step, between layouts without the digits that number parts.

        Both have these at the same place, where no dim is padded, so equal indices of a part are equal in the whole.
        """
        ends: list[Layout] = []
        for layout in (self.operand, self.result) if self.part else ():
            dims = list(layout.dims)
            for at, low, radix in sorted((a.dim, a.low, a.radix) for a in self.nested if a.place in self.part)[::-1]:
                digits, place = list[Digit](), 1
                for digit in reversed(dims[at].digits):
                    cut = digit.axis is None and place <= low < place * digit.radix
                    digits.insert(0, digit._replace(radix=digit.radix // radix) if cut else digit)
                    place *= digit.radix
                require(place == dims[at].size, f"{self.about}: parts of a padded dim")
                dims[at] = Dim(tuple(digits), place // radix)
            ends.append(replace(layout, dims=tuple(dims)))
        return replace(self, operand=ends[0], result=ends[1], digits=None, part=frozenset()) if ends else self


# ---- views ---------------------------------------------------------------------------------------


def count_values(digits: Sequence[FormDigit]) -> int:
    """How many values some digits have together."""
    return math.prod(a.radix for a in digits)


def match_digits(radices: Sequence[int], digits: Sequence[FormDigit]) -> list[list[FormDigit]]:
    """For each radix of a view, the digits whose product it is: a string of digits matches in at most one way.

    A digit of radix 1 goes with the radix before it.
    """
    groups: list[list[FormDigit]] = []
    at = 0
    for radix in radices:
        group: list[FormDigit] = []
        while at < len(digits) and count_values(group) * digits[at].radix <= radix:
            if count_values(group) == radix and digits[at].radix > 1:
                break
            group.append(digits[at])
            at += 1
        require(count_values(group) == radix, "a view cuts digits elsewhere than the layouts do")
        groups.append(group)
    require(at == len(digits), "a view has fewer digits than the tile")
    return groups


def open_view(
    view: TileView, digits: Sequence[FormDigit], tile: Shape, rank: int
) -> tuple[list[FormDigit], list[FormDigit]]:
    """Splits a tile's digits by a view: those that number blocks, in the order that numbers them, and the others."""
    require(view.tile == tile, f"a view of tiles of shape {view.tile}, where tiles have {tile}")
    padded = tuple(count_values([a for a in digits if a.dim == at]) for at in range(rank))
    require(view.padded == padded, f"a view padded to {view.padded}, where digits fill {padded}")
    axes = match_digits(view.digits, digits)
    distinct = len(set(view.blocks)) == len(view.blocks)
    require(distinct and all(0 <= b < len(axes) for b in view.blocks), "a view whose block axes are not axes")
    named = [{a.dim for a in own if a.radix > 1} or {dim} for own, dim in zip(axes, view.dims, strict=False)]
    require(named == [{dim} for dim in view.dims] and len(named) == len(axes), "a view whose axes are of other dims")
    blocks = [a for axis in view.blocks for a in axes[axis]]
    rest = [a for axis, own in enumerate(axes) if axis not in view.blocks for a in own]
    return blocks, rest


def pair_digits(one: Sequence[FormDigit], other: Sequence[FormDigit]) -> list[tuple[FormDigit, FormDigit]]:
    """The pairs of digits that reshaping one string to the other pairs: both have equal radices and names."""
    kept = [[a for a in string if a.radix > 1] for string in (one, other)]
    spelled = [[(a.radix, a.name) for a in string] for string in kept]
    require(spelled[0] == spelled[1], "two shapes of one block are different strings of digits")
    return list(zip(*kept, strict=True))


# ---- lists of devices ----------------------------------------------------------------------------


def read_rows(values: object, columns: int, what: str) -> Ints:
    """A list of rows as an array with a given number of columns."""
    try:
        rows = np.array(values, np.int64)
    except (ValueError, TypeError, OverflowError):
        raise UndecidedError(f"{what}: the rows are not equally long") from None
    if rows.size == 0:
        return rows.reshape(0, columns)
    require(rows.ndim == 2 and rows.shape[1] == columns, f"{what}: rows of {columns} were expected")
    return rows


def list_ids(mesh: Mesh) -> Ints:
    """The device at each position.

    >>> list_ids(Mesh({"x": 3}, device_ids=[10, 7, 20])).tolist(), list_ids(Mesh(x=2)).tolist()
    ([10, 7, 20], [0, 1])
    """
    return np.arange(mesh.size) if mesh.device_ids is None else np.array(mesh.device_ids, np.int64)


def find_positions(mesh: Mesh, ids: Ints) -> Ints:
    """The positions of devices, given by their ids.

    >>> find_positions(Mesh({"x": 3}, device_ids=[10, 7, 20]), np.array([20, 10])).tolist()
    [2, 0]
    """
    if mesh.device_ids is None:
        require(np.all((ids >= 0) & (ids < mesh.size)), "unknown devices")
        return ids
    known = list_ids(mesh)
    order = np.argsort(known)
    at = np.minimum(np.searchsorted(known[order], ids), len(known) - 1)
    require(np.all(known[order][at] == ids), "unknown devices")
    return order[at]


def coordinate_along(position: Ints, stride: int, radix: int) -> Ints:
    """The coordinate of each position along a factor."""
    return position // stride % radix


def number_along(position: Ints, along: Factors) -> Ints:
    """The number that each position's coordinates along some factors spell."""
    number = np.zeros_like(position)
    for stride, radix in along:
        number = number * radix + coordinate_along(position, stride, radix)
    return number


def offset_of_held(dim: Dim, layout: Layout, position: Ints) -> Ints:
    """What the held digits add to the global index of a dim, for the device at each position.

    In pieces of any size they are the number of the piece, and `list_indices` says its indices.

    >>> layout = Layout.parse("f32[4{x}2]", Mesh(x=3))
    >>> offset_of_held(layout.dims[0], layout, np.arange(3)).tolist()
    [0, 2, 4]
    """
    offset, low = np.zeros_like(position), 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            offset = offset + coordinate_along(position, layout.mesh.stride(axis), radix) * low
        elif dim.pieces is not None:
            continue
        low *= radix
    return offset


def list_indices(dim: Dim, offset: int) -> Ints:
    """The global index at each local index of a dim on devices whose held digits are worth `offset`; padding is at or
    past the true size.

    >>> list_indices(Layout.parse("f32[{x}(2@0,3@1,1@0)]", Mesh(x=2)).dims[0], 0).tolist()
    [0, 1, 5]
    """
    indices, low = np.zeros(1, np.int64), 1
    if dim.pieces is not None:
        indices = np.full(dim.tile, dim.size, np.int64)
        for run in dim.pieces.runs_of(offset):
            indices[run.local : run.local + run.length] = np.arange(run.start, run.start + run.length)
        return indices
    for radix, axis in reversed(dim.digits):
        if axis is None:
            indices = (np.arange(radix)[:, None] * low + indices[None]).reshape(-1)
        low *= radix
    return offset + indices


def held_factors(digits: Sequence[FormDigit], side: str) -> list[tuple[int, int]]:
    """The device factors that hold some digits, before ('src') or after ('dst')."""
    strides = [digit.src if side == "src" else digit.dst for digit in digits]
    require(None not in strides, "a digit that numbers blocks is held by no device")
    return [(stride, digit.radix) for stride, digit in zip(strides, digits, strict=True) if stride is not None]


def check_groups(mesh: Mesh, groups: object, along: Factors, ordered: bool) -> None:
    """Checks that groups are the devices that differ along the factors only, each once, and in order if `ordered`."""
    count = math.prod(radix for _, radix in along)
    at = find_positions(mesh, read_rows(groups, count, "groups"))
    once = at.size == mesh.size and np.all(np.bincount(at.ravel(), minlength=mesh.size) == 1)
    require(once, "the groups do not have each device once")
    rest = at - sum((coordinate_along(at, *factor) * factor[0] for factor in along), np.zeros_like(at))
    require(np.all(rest == rest[:, :1]), "the members of a group differ in other coordinates too")
    number = number_along(at, along)
    number = number if ordered else np.sort(number, axis=1)
    require(np.all(number == np.arange(count)), "the members of a group are in another order, or not the right ones")


def check_blocks(mesh: Mesh, block: Mapping[int, int], along: Factors) -> None:
    """Checks that every device keeps the block that its coordinates number."""
    require(len(block) == mesh.size, "not every device has a slice")
    number = number_along(find_positions(mesh, np.array(list(block), np.int64)), along)
    require(np.all(number == np.array(list(block.values()), np.int64)), "a device keeps another block")


def check_places(
    mesh: Mesh, place: Mapping[int, int | None], along: Factors, first: Factors, equal: Sequence[tuple[int, int, int]]
) -> None:
    """Checks that the devices with data are those at coordinate 0 along the factors `first` and at equal coordinates
    along the pairs of strides `equal`, and that each has it at the block that its coordinates number.
    """
    require(len(place) == mesh.size, "not every device has a summand")
    at = find_positions(mesh, np.array(list(place), np.int64))
    has_data = np.ones(len(at), bool)
    for stride, radix in first:
        has_data &= coordinate_along(at, stride, radix) == 0
    for one, other, radix in equal:
        has_data &= coordinate_along(at, one, radix) == coordinate_along(at, other, radix)
    given = np.array([-1 if block is None else block for block in place.values()], np.int64)
    right = np.all(given == np.where(has_data, number_along(at, along), -1))
    # Where -1 is given, numpy would write the last block.
    require(right and -1 not in place.values(), "a device has data in another summand or block")
