"""Exchanges in place: which share lies in which slot of which device, round by round, as arrays.

A share is a device and a place of its tile, one value of each digit that moves. Rounds send pieces of
slots; all are read before any is written, as in the numpy runtime. At the end every slot that is unpacked
must hold the share that the result's layout puts there, and every place must be unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from reshard.lower.exchange_in_place import ExchangeInPlace, Place
from reshard.proofs.symbolic.collectives import Frame, match, same_string
from reshard.proofs.symbolic.form import Atom
from reshard.proofs.symbolic.lists import Ints, array, coordinate, need, positions
from reshard.proofs.symbolic.verdicts import Tied
from reshard.types.layout import Layout
from reshard.types.rules.tile_view import TileView

NOTHING = -1


def exchange_in_place(step: ExchangeInPlace, frame: Frame) -> None:
    """Compares the slots' contents with both layouts."""
    need(frame.operand.even and frame.result.even and not frame.part, f"{frame.about}: in place, and not even")
    need(frame.operand.partial == frame.result.partial, f"{frame.about}: summands change")
    stay = [[a for a in local if a.src is None and a.dst is None] for local in (frame.before, frame.after)]
    same_string(*stay)
    need(step.slot == math.prod(a.radix for a in stay[0]), f"{frame.about}: a slot of another size than a share")
    for view, tile in ((step.send, frame.tiles[0]), (step.receive, frame.tiles[1])):
        need(view.tile == tile == view.padded, f"{frame.about}: a view of another tile")
    lengths = {t.length for turn in step.rounds for t in turn}
    need(step.staged or lengths <= {1}, f"{frame.about}: unstaged messages of several elements")
    cells = _cells(step, frame)
    go = [a for a in frame.before if a.dst is not None]
    slots = _packed(step, frame, go, len(cells) - 1)
    for turn in step.rounds:
        _move(step, np.array(turn, np.int64).reshape(len(turn), 6), slots, cells, frame.operand)
    _check_unpacked(step, frame, slots, go)


def _cells(step: ExchangeInPlace, frame: Frame) -> Ints:
    """The ends of the pieces that slots are sent in; digits keep their sizes where there are several."""
    spans = {(t.start, t.length) for turn in step.rounds for t in turn}
    need(all(a >= 0 and a + n <= step.slot for a, n in spans), f"{frame.about}: a piece that reaches out of its slot")
    if spans - {(0, step.slot)} and frame.names:
        raise Tied(frame.names)
    return np.array(sorted({0, step.slot} | {end for a, n in spans for end in (a, a + n)}), np.int64)


def _packed(step: ExchangeInPlace, frame: Frame, go: Sequence[Atom], cells: int) -> Ints:
    """What every slot holds after packing: position of the device, then its place, as one number."""
    size = frame.operand.mesh.size
    found = np.full((size, step.slots, cells), NOTHING, np.int64)
    rows = _rows(step.pack, step.send, frame.before, go, frame.operand)
    need(np.all((rows[:, 1] >= 0) & (rows[:, 1] < step.slots)), "a slot that is not there")
    found[rows[:, 0], rows[:, 1]] = (rows[:, 0] + size * rows[:, 2])[:, None]
    return found


def _move(step: ExchangeInPlace, turn: Ints, slots: Ints, cells: Ints, layout: Layout) -> None:
    """One round: all pieces are read, then all are written."""
    sender, receiver = positions(layout.mesh, turn[:, 0]), positions(layout.mesh, turn[:, 1])
    need(np.all((turn[:, 2:4] >= 0) & (turn[:, 2:4] < step.slots)), "a slot that is not there")
    held = slots[sender, turn[:, 2]]
    inside = (turn[:, 4, None] <= cells[None, :-1]) & (cells[None, 1:] <= (turn[:, 4] + turn[:, 5])[:, None])
    at, cell = np.nonzero(inside)
    slots[receiver[at], turn[at, 3], cell] = held[at, cell]


def _check_unpacked(step: ExchangeInPlace, frame: Frame, slots: Ints, go: Sequence[Atom]) -> None:
    come = [a for a in frame.after if a.src is not None]
    rows = _rows(step.unpack, step.receive, frame.after, come, frame.result)
    places = math.prod(a.radix for a in come)
    at, place = rows[:, 0], rows[:, 2]
    need(np.all((rows[:, 1] >= 0) & (rows[:, 1] < step.slots)), "a slot that is not there")
    need(len(np.unique(at * places + place)) == frame.result.mesh.size * places, "a place that is not unpacked")
    content = slots[at, rows[:, 1]]
    need(np.all((content == content[:, :1]) & (content != NOTHING)), f"{frame.about}: a slot of several shares")
    share, sender = np.divmod(content[:, 0], frame.operand.mesh.size)
    for a in frame.nested:
        if a.src is None and a.dst is None:
            continue
        before = coordinate(sender, a.src, a.radix) if a.src is not None else _digit(share, a, go)
        after = coordinate(at, a.dst, a.radix) if a.dst is not None else _digit(place, a, come)
        need(np.array_equal(before, after), f"{frame.about}: a slot holds another share, dim {a.dim}")
    for stride, size in frame.partial(frame.operand):
        need(np.array_equal(coordinate(sender, stride, size), coordinate(at, stride, size)), "another summand")


def _rows(
    places: Mapping[int, Sequence[tuple[int, Place]]],
    view: TileView,
    local: Sequence[Atom],
    moving: Sequence[Atom],
    layout: Layout,
) -> Ints:
    """(position, slot, number of the place) of every place in a list of them."""
    need(set(places) == set(layout.mesh.devices), "places of each device")
    axes = match(view.digits, local)
    rows: list[tuple[int, int, int]] = []
    known: dict[Place, int] = {}
    for device, listed in places.items():
        for slot, place in listed:
            if place not in known:
                known[place] = _number(place, axes, moving)
            rows.append((device, slot, known[place]))
    found = array(rows, 3, "places")
    found[:, 0] = positions(layout.mesh, found[:, 0])
    return found


def _number(place: Place, axes: Sequence[Sequence[Atom]], moving: Sequence[Atom]) -> int:
    """A place as one number: a value of every digit that moves, and the others whole."""
    need(len(place) == len(axes), "a place of other digits")
    found: dict[tuple[int, int], int] = {}
    for value, atoms in zip(place, axes, strict=True):
        moves = [a for a in atoms if (a.src, a.dst) != (None, None)]
        need(len(moves) == (0 if value is None else len(atoms)), "a place that cuts digits")
        rest = value or 0
        for a in reversed(moves):
            rest, found[a.place] = divmod(rest, a.radix)
        need(rest == 0, "a place out of its digit")
    number = 0
    for a in moving:
        number = number * a.radix + found.get(a.place, 0)
    return number


def _digit(number: Ints, atom: Atom, atoms: Sequence[Atom]) -> Ints:
    """One digit of a place's number."""
    at = [a.place for a in atoms].index(atom.place)
    return number // math.prod(a.radix for a in atoms[at + 1 :]) % atom.radix
