"""Exchanges in place: which share lies in which slot of which device, round by round, as arrays.

A share is a device and a place in its tile: one value of each digit that moves. A round sends pieces of slots. As in
the numpy runtime, all of them are read before any is written. At the end, every slot that is unpacked must contain the
share that the result's layout puts there, and every place must be unpacked.

    f32[{x}3] -> f32[3{x}] on <x=3>, 3 slots of one element; the numbers are global indices

                            device 0    device 1    device 2
    tiles before            0 1 2       3 4 5       6 7 8
    packed                  0 2 1       4 3 5       8 7 6
    round 1 sends slot 1    0 3 1       4 7 5       8 2 6       from device d + 1 to device d
    round 2 sends slot 2    0 3 6       4 7 1       8 2 5       from device d + 2 to device d
    unpacked                0 3 6       1 4 7       2 5 8       what the result means
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reshard.lower.exchange_rounds import ExchangeInPlace, Place
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.contract import StepContract, match, same_string, size_of
from reshard.proofs.symbolic.form import FormDigit, Tied
from reshard.proofs.symbolic.lists import Ints, array, coordinate, positions, require
from reshard.types.layout import Layout

NOTHING = -1


def check_exchange_in_place(step: ExchangeInPlace, contract: StepContract) -> None:
    """Compares the contents of all slots with both layouts."""
    _check_shares(step, contract)
    ends = _piece_ends(step, contract)
    moving = [a for a in contract.before if a.dst is not None]
    slots = _packed(step, contract, moving, len(ends) - 1)
    for transfers in step.rounds:
        _run_round(step, np.array(transfers, np.int64).reshape(len(transfers), 6), slots, ends, contract.operand)
    _check_unpacked(step, contract, slots, moving)


def _check_shares(step: ExchangeInPlace, contract: StepContract) -> None:
    """Checks that a slot is one share: the digits that stay, in the same order on both sides."""
    about = contract.about
    even = contract.operand.even and contract.result.even
    require(even and not contract.part, f"{about}: in place, but not even or in parts")
    require(contract.operand.partial_as(contract.result), f"{about}: summands change")
    staying = [[a for a in local if a.src is None and a.dst is None] for local in (contract.before, contract.after)]
    same_string(*staying)
    require(step.slot == size_of(staying[0]), f"{about}: a slot of another size than a share")
    for view, tile in ((step.send, contract.tiles[0]), (step.receive, contract.tiles[1])):
        require(view.tile == tile == view.padded, f"{about}: a view of another tile")
    lengths = {t.length for transfers in step.rounds for t in transfers}
    require(step.staged or lengths <= {1}, f"{about}: unstaged messages of several elements")


def _piece_ends(step: ExchangeInPlace, contract: StepContract) -> Ints:
    """The ends of the pieces in which slots are sent; raises `Tied` if slots are cut, which fixes the sizes."""
    spans = {(t.start, t.length) for transfers in step.rounds for t in transfers}
    inside = all(start >= 0 and start + n <= step.slot for start, n in spans)
    require(inside, f"{contract.about}: a piece that reaches out of its slot")
    if spans - {(0, step.slot)} and contract.names:
        raise Tied(contract.names)
    return np.array(sorted({0, step.slot} | {end for start, n in spans for end in (start, start + n)}), np.int64)


def _packed(step: ExchangeInPlace, contract: StepContract, moving: Sequence[FormDigit], pieces: int) -> Ints:
    """The share in every piece of every slot after packing, as one number: device position + size * place."""
    size = contract.operand.mesh.size
    slots = np.full((size, step.slots, pieces), NOTHING, np.int64)
    rows = _rows(step.pack, step.send, contract.before, moving, contract.operand)
    require(np.all((rows[:, 1] >= 0) & (rows[:, 1] < step.slots)), "a slot that does not exist")
    slots[rows[:, 0], rows[:, 1]] = (rows[:, 0] + size * rows[:, 2])[:, None]
    return slots


def _run_round(step: ExchangeInPlace, transfers: Ints, slots: Ints, ends: Ints, layout: Layout) -> None:
    """Runs one round: the right side is read in full before the left side is written."""
    sender, receiver = positions(layout.mesh, transfers[:, 0]), positions(layout.mesh, transfers[:, 1])
    require(np.all((transfers[:, 2:4] >= 0) & (transfers[:, 2:4] < step.slots)), "a slot that does not exist")
    sent = slots[sender, transfers[:, 2]]
    start, stop = transfers[:, 4, None], (transfers[:, 4] + transfers[:, 5])[:, None]
    at, piece = np.nonzero((start <= ends[None, :-1]) & (ends[None, 1:] <= stop))
    slots[receiver[at], transfers[at, 3], piece] = sent[at, piece]


def _check_unpacked(step: ExchangeInPlace, contract: StepContract, slots: Ints, moving: Sequence[FormDigit]) -> None:
    """Checks that every place of every result is unpacked from a slot with the share that belongs there."""
    arriving = [a for a in contract.after if a.src is not None]
    rows = _rows(step.unpack, step.receive, contract.after, arriving, contract.result)
    places = size_of(arriving)
    at, place = rows[:, 0], rows[:, 2]
    require(np.all((rows[:, 1] >= 0) & (rows[:, 1] < step.slots)), "a slot that does not exist")
    every = len(np.unique(at * places + place)) == contract.result.mesh.size * places
    require(every, "a place that is not unpacked")
    content = slots[at, rows[:, 1]]
    whole = np.all((content == content[:, :1]) & (content != NOTHING))
    require(whole, f"{contract.about}: a slot of several shares")
    share, sender = np.divmod(content[:, 0], contract.operand.mesh.size)
    for a in contract.nested:
        if a.src is None and a.dst is None:
            continue
        before = coordinate(sender, a.src, a.radix) if a.src is not None else _digit(share, a, moving)
        after = coordinate(at, a.dst, a.radix) if a.dst is not None else _digit(place, a, arriving)
        require(np.array_equal(before, after), f"{contract.about}: a slot holds another share, dim {a.dim}")
    for stride, size in contract.partial(contract.operand):
        same = np.array_equal(coordinate(sender, stride, size), coordinate(at, stride, size))
        require(same, f"{contract.about}: another summand")


def _rows(
    places: Mapping[int, Sequence[tuple[int, Place]]],
    view: TileView,
    local: Sequence[FormDigit],
    moving: Sequence[FormDigit],
    layout: Layout,
) -> Ints:
    """(device position, slot, number of the place) for every entry of `pack` or `unpack`."""
    require(set(places) == set(layout.mesh.devices), "not every device has places")
    axes = match(view.digits, local)
    rows: list[tuple[int, int, int]] = []
    known: dict[Place, int] = {}
    for device, listed in places.items():
        for slot, place in listed:
            if place not in known:
                known[place] = _number(place, axes, moving)
            rows.append((device, slot, known[place]))
    table = array(rows, 3, "places")
    table[:, 0] = positions(layout.mesh, table[:, 0])
    return table


def _number(place: Place, axes: Sequence[Sequence[FormDigit]], moving: Sequence[FormDigit]) -> int:
    """A place as one number: the values of the digits that move. The view takes the other digits whole."""
    require(len(place) == len(axes), "a place of other digits")
    values: dict[tuple[int, int], int] = {}
    for value, digits in zip(place, axes, strict=True):
        moves = [a for a in digits if (a.src, a.dst) != (None, None)]
        require(len(moves) == (0 if value is None else len(digits)), "a place that cuts digits")
        rest = value or 0
        for a in reversed(moves):
            rest, values[a.place] = divmod(rest, a.radix)
        require(rest == 0, "a place outside of its digit")
    number = 0
    for a in moving:
        number = number * a.radix + values.get(a.place, 0)
    return number


def _digit(number: Ints, digit: FormDigit, digits: Sequence[FormDigit]) -> Ints:
    """One digit of a place's number, which all the digits spell."""
    at = [a.place for a in digits].index(digit.place)
    return number // size_of(digits[at + 1 :]) % digit.radix
