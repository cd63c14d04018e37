"""Collectives run on symbols: which digit of the operand each digit of the result comes from.

The numpy runtime opens a tile to digits, takes blocks, sends them and closes them again. Here every digit
is a variable. Reshaping keeps the string of digits, so two shapes fit if their strings of radices and
names are equal; a block's number is the string of its block digits; the sender of a block has, along the
group's factors, the coordinates that the block's number spells.

    receiver at c, local digits e          c:4  is the coordinate along stride 4, e0:2 the digit of dim 0 at place 2
    its element comes from the device with  c:4 := e0:2, from local digit  e1:8 := c:4

The claim is that, atom by atom, the digit that the operand's layout reads at the one end is the digit that
the result's layout reads at the other. Nothing here depends on how many devices there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reshard.lower.program import AllGather, AllReduce, AllToAll, ReduceScatter, Slice
from reshard.proofs.symbolic.form import Atom, Place
from reshard.proofs.symbolic.lists import Factors, check_blocks, check_groups, factors, need
from reshard.proofs.symbolic.queries import Claim, Sum
from reshard.types.layout import Layout
from reshard.types.rules.parts import Cut
from reshard.types.rules.tile_view import TileView

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Frame:
    """One step: its layouts, their atoms if they nest, and the shapes of the tiles that it works on."""

    about: str
    operand: Layout
    result: Layout
    atoms: tuple[Atom, ...] | None
    tiles: tuple[Shape, Shape]
    names: frozenset[Place] = frozenset()
    part: frozenset[Place] = frozenset()

    @property
    def nested(self) -> tuple[Atom, ...]:
        """The atoms."""
        need(self.atoms is not None, f"{self.about}: the two layouts do not nest")
        return self.atoms or ()

    @property
    def before(self) -> list[Atom]:
        """Those local in the operand, without the one that numbers parts."""
        return [a for a in self.nested if a.src is None and a.place not in self.part]

    @property
    def after(self) -> list[Atom]:
        """Those local in the result, without the one that numbers parts."""
        return [a for a in self.nested if a.dst is None and a.place not in self.part]

    def partial(self, layout: Layout) -> Factors:
        """The partial factors of a layout."""
        return [(layout.mesh.stride(a), a.size) for a in layout.partial]


@dataclass(frozen=True)
class Moved:
    """Where the element at a receiver's coordinates and local digits comes from.

    `coordinates` replaces some of the receiver's by variables, `digits` names the operand's local digits;
    over the `summed` factors the senders are all combined.
    """

    coordinates: dict[int, str]
    digits: dict[Place, str]
    summed: Factors = ()


def match(radices: Sequence[int], atoms: Sequence[Atom]) -> list[list[Atom]]:
    """For each radix of a view, the atoms that it is the product of; every string of atoms matches in one way."""
    found: list[list[Atom]] = []
    at = 0
    for radix in radices:
        found.append([])
        while at < len(atoms) and math.prod(a.radix for a in found[-1]) * atoms[at].radix <= radix:
            if radix == math.prod(a.radix for a in found[-1]) and atoms[at].radix > 1:
                break
            found[-1].append(atoms[at])
            at += 1
        need(math.prod(a.radix for a in found[-1]) == radix, "a view cuts digits elsewhere than the layouts do")
    need(at == len(atoms), "a view has fewer digits than the tile")
    return found


def opened(view: TileView, atoms: Sequence[Atom], tile: Shape, rank: int) -> tuple[list[Atom], list[Atom]]:
    """A view's block digits in the order that numbers blocks, and the rest, over a tile's atoms."""
    need(view.tile == tile, f"a view of tiles of shape {view.tile}, where tiles have {tile}")
    padded = tuple(math.prod(a.radix for a in atoms if a.dim == at) for at in range(rank))
    need(view.padded == padded, f"a view padded to {view.padded}, where digits fill {padded}")
    axes = match(view.digits, atoms)
    need(len(set(view.blocks)) == len(view.blocks) and all(0 <= b < len(axes) for b in view.blocks), "block axes")
    blocks = [a for axis in view.blocks for a in axes[axis]]
    rest = [a for axis, own in enumerate(axes) if axis not in view.blocks for a in own]
    return blocks, rest


def name(atom: Atom) -> str:
    """The variable of a local digit of the result."""
    return f"e{atom.dim}:{atom.low}"


def coordinate(stride: int) -> str:
    """The variable of the receiver's coordinate along a stride."""
    return f"c:{stride}"


def same_string(one: Sequence[Atom], other: Sequence[Atom]) -> list[tuple[Atom, Atom]]:
    """Pairs of digits of two strings of equal radices and names: what reshaping one to the other pairs."""
    ends = [[(a.radix, a.name) for a in string if a.radix > 1] for string in (one, other)]
    need(ends[0] == ends[1], "two shapes of one block are different strings of digits")
    kept = [[a for a in string if a.radix > 1] for string in (one, other)]
    return list(zip(*kept, strict=True))


def run(instruction: object, frame: Frame) -> list[Claim]:
    """The claims that make a collective right; its lists are compared on the way."""
    match instruction:
        case Slice():
            moved = _slice(instruction, frame)
        case AllGather():
            moved = _all_gather(instruction, frame)
        case AllToAll():
            moved = _all_to_all(instruction, frame)
        case ReduceScatter():
            moved = _reduce_scatter(instruction, frame)
        case AllReduce():
            moved = _all_reduce(instruction, frame)
        case _:
            need(False, f"{frame.about}: no such instruction as {type(instruction).__name__}")
            return []
    _check_partial(frame, moved, instruction)
    return [_claim(frame, moved)]


def in_part(frame: Frame, take: Cut, put: Cut, places: frozenset[Place]) -> Frame:
    """The frame of one part: the atoms that number parts left out, the same ones of operand and result."""
    tiles = (_part(frame.tiles[0], take), _part(frame.tiles[1], put))
    for atoms, cut in ((frame.before, take), (frame.after, put)):
        strings = match([cut.outer, cut.parts, cut.inner], [a for a in atoms if a.dim == cut.axis])
        need(frozenset(a.place for a in strings[1]) == places, f"{frame.about}: parts of other digits")
    return replace(frame, tiles=tiles, part=places)


def _part(tile: Shape, cut: Cut) -> Shape:
    need(cut.outer * cut.parts * cut.inner == tile[cut.axis], "parts that are not a tile's axis")
    return (*tile[: cut.axis], cut.outer * cut.inner, *tile[cut.axis + 1 :])


def _slice(step: Slice, frame: Frame) -> Moved:
    blocks, rest = opened(step.send, frame.before, frame.tiles[0], len(frame.operand.dims))
    check_blocks(frame.operand.mesh, step.block, factors(blocks, "dst"))
    return Moved({}, _sent(blocks, rest) | _closed(step.receive, rest, frame))


def _all_gather(step: AllGather, frame: Frame) -> Moved:
    blocks, rest = opened(step.receive, frame.after, frame.tiles[1], len(frame.operand.dims))
    along = factors(blocks, "src")
    check_groups(frame.operand.mesh, step.groups, along, ordered=True)
    need(_elements(rest) == math.prod(frame.tiles[0]), "a block that is not a tile")
    return Moved(_senders(blocks, along), {a.place: name(b) for a, b in same_string(frame.before, rest)})


def _all_to_all(step: AllToAll, frame: Frame) -> Moved:
    out, left = opened(step.send, frame.before, frame.tiles[0], len(frame.operand.dims))
    arrived, rest = opened(step.receive, frame.after, frame.tiles[1], len(frame.operand.dims))
    along = factors(arrived, "src")
    check_groups(frame.operand.mesh, step.groups, along, ordered=True)
    need([a.radix for a in out] == [a.radix for a in arrived], "block j of the one end is not numbered as at the other")
    digits = {a.place: coordinate(stride) for a, (stride, _) in zip(out, along, strict=True)}
    return Moved(_senders(arrived, along), digits | {a.place: name(b) for a, b in same_string(left, rest)})


def _reduce_scatter(step: ReduceScatter, frame: Frame) -> Moved:
    blocks, rest = opened(step.send, frame.before, frame.tiles[0], len(frame.operand.dims))
    along = factors(blocks, "dst")
    check_groups(frame.operand.mesh, step.groups, along, ordered=True)
    return Moved({}, _sent(blocks, rest) | _closed(step.receive, rest, frame), along)


def _all_reduce(step: AllReduce, frame: Frame) -> Moved:
    kept = _parts(frame, frame.result)
    along = [f for f in _parts(frame, frame.operand) if f not in kept]
    check_groups(frame.operand.mesh, step.groups, along, ordered=False)
    need(frame.tiles[0] == frame.tiles[1], "a combined tile of another shape")
    return Moved({}, {a.place: name(b) for a, b in same_string(frame.before, frame.after)}, along)


def _closed(view: TileView, block: Sequence[Atom], frame: Frame) -> dict[Place, str]:
    """The digits of a block that is closed to a whole tile of the result."""
    numbered, rest = opened(view, frame.after, frame.tiles[1], len(frame.operand.dims))
    return {a.place: name(b) for a, b in same_string(block, [*numbered, *rest])}


def _sent(blocks: Sequence[Atom], rest: Sequence[Atom]) -> dict[Place, str]:
    """A receiver's own coordinates number the block that it gets."""
    found = {a.place: coordinate(a.dst) for a in blocks if a.dst is not None}
    need(len(found) == len(blocks) and not {a.place for a in rest} & set(found), "a digit that numbers blocks")
    return found


def _senders(blocks: Sequence[Atom], along: Factors) -> dict[int, str]:
    """The sender of a block has the coordinates that the block's number spells."""
    return {stride: name(a) for a, (stride, _) in zip(blocks, along, strict=True)}


def _elements(atoms: Sequence[Atom]) -> int:
    return math.prod(a.radix for a in atoms)


def _parts(frame: Frame, layout: Layout) -> list[tuple[int, int]]:
    """A layout's partial factors, cut where the other layout's end."""
    ends = {e for lay in (frame.operand, frame.result) for s, n in frame.partial(lay) for e in (s, s * n)}
    ends |= {a.dst for a in frame.nested if a.dst is not None} | {
        a.dst * a.radix for a in frame.nested if a.dst is not None
    }
    found: list[tuple[int, int]] = []
    for stride, size in frame.partial(layout):
        inner = sorted(e for e in ends if stride <= e <= stride * size)
        found += [(low, high // low) for low, high in itertools.pairwise(inner)]
    return found


def _check_partial(frame: Frame, moved: Moved, instruction: object) -> None:
    """Summed are all the factors that are partial before and not after; the others keep their summand."""
    before, after = set(_parts(frame, frame.operand)), set(_parts(frame, frame.result))
    need(after <= before, f"{frame.about}: the result is partial where the operand is not")
    need(set(moved.summed) == before - after, f"{frame.about}: other summands are combined than those of the layouts")
    need(not {s for s, _ in after} & set(moved.coordinates), f"{frame.about}: summands change places")
    if moved.summed:
        reduction = getattr(instruction, "reduction", None)
        need(reduction == frame.operand.reduction, f"{frame.about}: combined by {reduction}")
    need(not after or frame.operand.reduction == frame.result.reduction, f"{frame.about}: another reduction is left")


def _claim(frame: Frame, moved: Moved) -> Claim:
    """Atom by atom, the digit read at the operand is the digit read at the result."""
    equal: list[tuple[str, str]] = []
    read: dict[Place, str] = {}
    bounds: dict[str, int | str] = {}
    for a in frame.nested:
        before = name(a) if a.place in frame.part else moved.digits.get(a.place, "unset")
        if a.src is not None:
            before = moved.coordinates.get(a.src, coordinate(a.src))
        elif a.radix > 1:
            need(before != "unset", f"{frame.about}: a digit of the operand is read by nobody")
        after = name(a) if a.dst is None else coordinate(a.dst)
        for stride in (a.src, a.dst):
            if stride is not None:
                bounds[coordinate(stride)] = a.radix
        if a.dst is None:
            bounds[name(a)] = a.name or a.radix
        read[a.place] = after if a.radix == 1 else before
        equal.append((read[a.place], after))
    given, below = _padding(frame, read)
    return Claim(frame.about, tuple(bounds.items()), tuple(equal), given, below)


def _padding(frame: Frame, read: dict[Place, str]) -> tuple[tuple[tuple[Sum, int], ...], tuple[tuple[Sum, int], ...]]:
    """True elements come from within the operand's tile, where its digits go on past it."""
    given: list[tuple[Sum, int]] = []
    below: list[tuple[Sum, int]] = []
    for at, dim in enumerate(frame.operand.dims):
        local = [a for a in frame.before if a.dim == at]
        if _elements(local) == frame.tiles[0][at]:
            continue
        whole = [(a.low, name(a) if a.dst is None else coordinate(a.dst)) for a in frame.nested if a.dim == at]
        given.append((tuple(whole), dim.size))
        inner = [(_elements(local[i + 1 :]), read[a.place]) for i, a in enumerate(local)]
        below.append((tuple(inner), frame.tiles[0][at]))
    return tuple(given), tuple(below)
