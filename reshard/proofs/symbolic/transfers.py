"""Exchanges and permutes: finite lists of who sends what to whom, compared with both layouts.

    f32[{x}4, 16] -> f32[16, {x}4] on <x=4>, the box from device 1 to device 2

            local rows   local columns   global rows   global columns
    src     0 to 3       8 to 11         4 to 7        8 to 11
    dst     4 to 7       0 to 3          4 to 7        8 to 11

The boxes of an even exchange are read as spans of digits. A box is right if every digit that a device holds on one side
has, on the other side, the span of one value that is the device's coordinate, and every digit that is local on both
sides has the same span on both. An exchange between numerals that do not nest is compared index by index, dim by dim:
with a table of places for each dim, never one for the whole array. Finally, every element of every result must be in
a box.

The boxes are computed by `lower.exchange_rounds` from intervals and refinements. Here they are only compared, against
the layouts' numerals as `form` and `lists` read them, so that a fault there cannot confirm itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.errors import PlanError
from reshard.lower.exchange_rounds import Exchange, SlicedTransfer
from reshard.lower.program import Permute
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.contract import StepContract, match, size_of
from reshard.proofs.symbolic.form import FormDigit, Place, Tied
from reshard.proofs.symbolic.lists import Ints, array, coordinate, held_offset, positions, require
from reshard.types.layout import Dim, Layout

MOST_PIECES = 1024
"""More pieces of one share are not compared with each other."""

MOST_CELLS = 1 << 22
"""A tile that its boxes cut into more cells is not compared."""


class Boxes(NamedTuple):
    """Boxes as arrays: their senders and receivers, and (boxes, axes, start and extent) at both ends."""

    sender: Ints
    receiver: Ints
    src: Ints
    dst: Ints

    def at(self, layout: Layout, side: str) -> Ints:
        """The positions of the senders ("src") or the receivers ("dst")."""
        return positions(layout.mesh, self.sender if side == "src" else self.receiver)


def check_exchange(step: Exchange, contract: StepContract) -> None:
    """Compares an exchange's lists with both layouts."""
    require(contract.operand.partial_as(contract.result), f"{contract.about}: summands change")
    for view, tile in ((step.send, contract.tiles[0]), (step.receive, contract.tiles[1])):
        require(view.tile == tile == view.padded, f"{contract.about}: a view of another tile")
        require(math.prod(view.digits) == math.prod(tile), f"{contract.about}: a view of other sizes")
    require(_has_slices(step), f"{contract.about}: a block that is no slice of the digits of its tiles")
    passed = [t for t in itertools.chain.from_iterable(step.sliced.rounds) if t.relayed]
    if passed:
        check_relay(step, passed, contract)
        return
    boxes = boxes_of(step)
    _check_summands(boxes, contract)
    if not step.staged:
        _check_runs(step, boxes)
    if contract.digits is not None and contract.operand.even and contract.result.even:
        _check_digits(step, boxes, contract)
    else:
        _check_tables(step, boxes, contract)


def _has_slices(step: Exchange) -> bool:
    """Whether all blocks of an exchange are slices; else a run of the program has to say whether it is right."""
    try:
        _ = step.sliced
    except PlanError:
        return False
    return True


def check_permute(step: Permute, contract: StepContract) -> None:
    """Checks that every receiver gets a tile whose held digits, at the sender, spell what the receiver's own spell."""
    pairs = array(step.pairs, 2, "pairs")
    once = np.array_equal(np.sort(pairs[:, 1]), np.sort(np.array(contract.result.mesh.devices)))
    require(once, "the pairs do not have each receiver once")
    boxes = Boxes(pairs[:, 0], pairs[:, 1], pairs, pairs)
    _check_summands(boxes, contract)
    sent, received = boxes.at(contract.operand, "src"), boxes.at(contract.result, "dst")
    for a, b in zip(contract.operand.dims, contract.result.dims, strict=True):
        require(a.padded == b.padded, "tiles of other sizes")
        one, other = _held_numbers(a, contract.operand, sent), _held_numbers(b, contract.result, received)
        require([k for k, _ in one] == [k for k, _ in other], "tiles of other digits")
        same = all(np.array_equal(v, w) for (_, v), (_, w) in zip(one, other, strict=True))
        require(same, "a sender of another tile")
    require(contract.tiles[0] == contract.tiles[1], "tiles of other shapes")


def check_relay(step: Exchange, passed: Sequence[SlicedTransfer], contract: StepContract) -> None:
    """Compares a relay: first what is sent out of the operand, then what is passed on out of tiles of the result.

    What a device passes on has arrived before, and goes to the same place of the same tile of another device.
    """
    turns = [any(t.relayed for t in turn) for turn in step.rounds]
    mixed = any(t.relayed != later for turn, later in zip(step.rounds, turns, strict=True) for t in turn)
    require(turns == sorted(turns) and not mixed, f"{contract.about}: elements are passed on before all have arrived")
    single = all(t.elements <= 1 for t in itertools.chain.from_iterable(step.rounds))
    require(step.staged or single, f"{contract.about}: a relay without buffers")
    first = boxes_of(step, relayed=False)
    _check_tables(step, first, contract, filled=False)
    spans = _spans(passed, "src", step.receive), _spans(passed, "dst", step.receive)
    require(np.array_equal(*spans), f"{contract.about}: an element is passed on to another place")
    ends = array([(t.sender, t.receiver) for t in passed for _ in t.boxes], 2, "transfers")
    at = [positions(contract.result.mesh, ends[:, side]) for side in (0, 1)]
    for dim in contract.result.dims:
        tiles = [held_offset(dim, contract.result, side) for side in at]
        require(np.array_equal(tiles[0], tiles[1]), f"{contract.about}: an element is passed on to another tile")
    received = first.at(contract.result, "dst")
    for sender in np.unique(at[0]):
        _check_covered(first.dst[received == sender], spans[0][at[0] == sender], contract)
    everything = Boxes(
        *(np.concatenate([first.sender, ends[:, 0]]), np.concatenate([first.receiver, ends[:, 1]])),
        *(np.concatenate([first.dst, spans[1]]), np.concatenate([first.dst, spans[1]])),
    )
    _check_filled(everything, contract, everything.at(contract.result, "dst"))


def boxes_of(step: Exchange, *, relayed: bool = True) -> Boxes:
    """All boxes of an exchange, the local ones first; `relayed` says whether those of the second turn are included."""
    every = [*step.sliced.local, *itertools.chain.from_iterable(step.sliced.rounds)]
    transfers = [t for t in every if relayed or not t.relayed]
    ends = array([(t.sender, t.receiver) for t in transfers for _ in t.boxes], 2, "transfers")
    return Boxes(ends[:, 0], ends[:, 1], _spans(transfers, "src", step.send), _spans(transfers, "dst", step.receive))


def _spans(transfers: Sequence[SlicedTransfer], side: str, view: TileView) -> Ints:
    """The (start, extent) of every box along every axis of a view."""
    axes = len(view.digits)
    flat = [[x for span in getattr(box, side) for x in span] for t in transfers for box in t.boxes]
    if not axes:
        return np.zeros((len(flat), 0, 2), np.int64)
    spans = array(flat, 2 * axes, "boxes").reshape(-1, axes, 2)
    inside = np.all(spans[..., 0] >= 0) and np.all(spans.sum(axis=2) <= np.array(view.digits))
    require(inside, "a box that reaches out of a tile")
    return spans


def _check_runs(step: Exchange, boxes: Boxes) -> None:
    """Checks that each unstaged message is one box, and contiguous in memory at both ends."""
    single = all(len(t.boxes) == 1 for transfers in step.sliced.rounds for t in transfers)
    require(single, "an unstaged message of several boxes")
    sent = boxes.sender != boxes.receiver
    for spans, view in ((boxes.src, step.send), (boxes.dst, step.receive)):
        extents, begun = spans[sent, :, 1], np.zeros(int(sent.sum()), bool)
        for axis, size in enumerate(view.digits):
            contiguous = np.all(~begun | (extents[:, axis] == size))
            require(contiguous, "an unstaged message that is not contiguous in memory")
            begun |= extents[:, axis] > 1


def _check_summands(boxes: Boxes, contract: StepContract) -> None:
    """Checks that a summand goes to a device that keeps the same summand of the sum."""
    sent, received = boxes.at(contract.operand, "src"), boxes.at(contract.result, "dst")
    pairs = zip(contract.partial(contract.operand), contract.partial(contract.result), strict=True)
    for before, after in pairs:
        same = np.array_equal(coordinate(sent, *before), coordinate(received, *after))
        require(same, "a summand of another device")


def _held_numbers(dim: Dim, layout: Layout, at: Ints) -> list[tuple[Place, Ints]]:
    """The numbers that runs of held digits spell, by the place and the radix of the local digit above each run."""
    numbers: list[tuple[Place, Ints]] = []
    low, value, weight = 1, np.zeros_like(at), 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            value, weight = value + coordinate(at, layout.mesh.stride(axis), radix) * weight, weight * radix
        elif radix > 1:
            numbers.append(((low, radix), value))
            value, weight = np.zeros_like(at), 1
        low *= radix
    return [*numbers, ((low, 1), value)]


# ---- boxes of digits -----------------------------------------------------------------------------


def _check_digits(step: Exchange, boxes: Boxes, contract: StepContract) -> None:
    src = _by_digit(boxes.src, match(step.send.digits, contract.before))
    dst = _by_digit(boxes.dst, match(step.receive.digits, contract.after))
    _tie_cut_digits(contract, src, dst)
    sent, received = boxes.at(contract.operand, "src"), boxes.at(contract.result, "dst")
    for a in contract.nested:
        if a.place in contract.part:
            continue
        before = _one_value(coordinate(sent, a.src, a.radix)) if a.src is not None else src[a.place]
        after = _one_value(coordinate(received, a.dst, a.radix)) if a.dst is not None else dst[a.place]
        require(np.array_equal(before, after), f"{contract.about}: a box of other elements, dim {a.dim}")
    _check_reached(boxes, contract, dst)


def _one_value(value: Ints) -> Ints:
    return np.stack([value, np.ones_like(value)], axis=1)


def _by_digit(spans: Ints, axes: list[list[FormDigit]]) -> dict[Place, Ints]:
    """Each axis's spans as spans of its digits: single values of major ones, a range of one, minor ones whole."""
    by_place: dict[Place, Ints] = {}
    for axis, digits in enumerate(axes):
        start, extent = spans[:, axis, 0], spans[:, axis, 1]
        for a in reversed(digits):
            whole = (start % a.radix == 0) & (extent % a.radix == 0)
            require(np.all(whole | (start % a.radix + extent <= a.radix)), "a box that is not a span of digits")
            by_place[a.place] = np.stack(
                [np.where(whole, 0, start % a.radix), np.where(whole, a.radix, extent)], axis=1
            )
            start, extent = start // a.radix, np.where(whole, extent // a.radix, 1)
        require(np.all(extent == 1) and np.all(start == 0), "a box that is not a span of digits")
    return by_place


def _tie_cut_digits(contract: StepContract, *sides: dict[Place, Ints]) -> None:
    """Raises `Tied` if boxes cut digits whose sizes were to vary."""
    named = [a for a in contract.nested if a.name is not None and a.place not in contract.part]
    cut = [a.place for a in named if any(np.any(side[a.place][:, 1] != a.radix) for side in sides)]
    if cut:
        raise Tied(frozenset(cut))


def _check_reached(boxes: Boxes, contract: StepContract, dst: dict[Place, Ints]) -> None:
    """Checks that every receiver gets every piece of every share, and that the pieces make up the whole share."""
    staying = [a for a in contract.after if a.src is None]
    arriving = [a for a in contract.after if a.src is not None]
    key = boxes.at(contract.result, "dst")
    for a in arriving:
        require(np.all(dst[a.place][:, 1] == 1), "a box of several shares")
        key = key * a.radix + dst[a.place][:, 0]
    spans = np.concatenate([np.zeros((len(key), 2), np.int64), *(dst[a.place] for a in staying)], axis=1)
    pieces, which = np.unique(spans, axis=0, return_inverse=True)
    _check_pieces(pieces[:, 2:].reshape(len(pieces), len(staying), 2), [a.radix for a in staying])
    wanted = contract.result.mesh.size * size_of(arriving) * len(pieces)
    arrived = len(np.unique(key * max(len(pieces), 1) + which.ravel()))
    require(arrived == wanted > 0, f"{contract.about}: of {wanted} pieces {arrived} arrive")


def _check_pieces(pieces: Ints, radices: Sequence[int]) -> None:
    """Checks that pieces do not overlap and together have all elements of a share."""
    require(np.prod(pieces[..., 1], axis=1).sum() == math.prod(radices), "the pieces of a share are not all of it")
    require(len(pieces) <= MOST_PIECES, f"a share in {len(pieces)} pieces, too many to compare")
    low, high = pieces[..., 0], pieces.sum(axis=2)
    meet = np.all((low[:, None] < high[None]) & (low[None] < high[:, None]), axis=2)
    require(meet.sum() == len(pieces), "two pieces of a share overlap")


# ---- boxes of runs -------------------------------------------------------------------------------


def _check_tables(step: Exchange, boxes: Boxes, contract: StepContract, *, filled: bool = True) -> None:
    by_dim = step.send.digits == contract.tiles[0] and step.receive.digits == contract.tiles[1]
    require(by_dim, "boxes of other axes than dims")
    require(not contract.part, f"{contract.about}: parts of an exchange of uneven boxes")
    _tie_touched_dims(boxes, contract)
    sent, received = boxes.at(contract.operand, "src"), boxes.at(contract.result, "dst")
    for at, (a, b) in enumerate(zip(contract.operand.dims, contract.result.dims, strict=True)):
        before, after = _local_offsets(a), _local_offsets(b)
        held, wanted = held_offset(a, contract.operand, sent), held_offset(b, contract.result, received)
        rows = np.stack([held, *boxes.src[:, at].T, wanted, *boxes.dst[:, at].T], axis=1)
        for own, start, extent, needed, begin, length in np.unique(rows, axis=0):
            require(extent == length, f"{contract.about}: a box of another shape at its other end")
            read, written = own + before[start : start + extent], needed + after[begin : begin + length]
            real = written < b.size
            same = np.array_equal(read[real], written[real])
            require(same, f"{contract.about}: a box of other elements, dim {at}")
    if filled:
        _check_filled(boxes, contract, received)


def _tie_touched_dims(boxes: Boxes, contract: StepContract) -> None:
    """Raises `Tied` for the named digits of dims that change, or that some box does not take whole."""
    dims = zip(contract.operand.dims, contract.result.dims, strict=True)
    touched = {at for at, (a, b) in enumerate(dims) if a != b}
    for at, size in enumerate(contract.tiles[0]):
        if any(np.any(side[:, at] != [0, size]) for side in (boxes.src, boxes.dst)):
            touched.add(at)
    if tied := frozenset(place for place in contract.names if place[0] in touched):
        raise Tied(tied)


def _local_offsets(dim: Dim) -> Ints:
    """What each local index adds to the global index of a dim."""
    offsets, low = np.zeros(1, np.int64), 1
    for radix, axis in reversed(dim.digits):
        if axis is None:
            offsets = (np.arange(radix)[:, None] * low + offsets[None]).reshape(-1)
        low *= radix
    return offsets


def _check_filled(boxes: Boxes, contract: StepContract, received: Ints) -> None:
    """Checks that every true element of every result lies in a box; devices with equal boxes are compared once."""
    mesh, dims = contract.result.mesh, contract.result.dims
    tables = [(held_offset(dim, contract.result, np.arange(mesh.size)), _local_offsets(dim)) for dim in dims]
    order = np.argsort(received, kind="stable")
    ends = np.searchsorted(received[order], np.arange(mesh.size + 1))
    seen: set[tuple[int, bytes]] = set()
    for device in range(mesh.size):
        own = boxes.dst[order[ends[device] : ends[device + 1]]]
        real = [local + held[device] < dim.size for (held, local), dim in zip(tables, dims, strict=True)]
        key = (len(own), own.tobytes() + b"".join(r.tobytes() for r in real))
        if key not in seen:
            seen.add(key)
            _check_tile(own, real, contract)


def _check_covered(arrived: Ints, passed: Ints, contract: StepContract) -> None:
    """Checks, on the grid of all ends of boxes, that what a device passes on lies in what has arrived."""
    both = np.concatenate([arrived, passed])
    edges = [np.unique(np.concatenate([both[:, i, 0], both[:, i].sum(axis=1)])) for i in range(both.shape[1])]
    require(math.prod(len(e) for e in edges) <= MOST_CELLS, f"{contract.about}: a grid of too many boxes")
    there = np.zeros([max(len(e) - 1, 0) for e in edges], bool)
    for boxes, value in ((arrived, True), (passed, None)):
        for box in boxes:
            cells = tuple(slice(*np.searchsorted(e, [s, s + n])) for e, (s, n) in zip(edges, box, strict=True))
            if value:
                there[cells] = True
            require(there[cells].all(), f"{contract.about}: a device passes on what it has not received")


def _check_tile(own: Ints, real: Sequence[Ints], contract: StepContract) -> None:
    """Checks one tile on the grid of all ends of its boxes: no cell with true elements is left out."""
    edges = [np.unique(np.concatenate([[0, len(r)], own[:, i, 0], own[:, i].sum(axis=1)])) for i, r in enumerate(real)]
    require(math.prod(len(e) for e in edges) <= MOST_CELLS, f"{contract.about}: a grid of too many boxes")
    missing = np.ones([max(len(e) - 1, 0) for e in edges], bool)
    for axis, (e, r) in enumerate(zip(edges, real, strict=True)):
        any_real = np.array([bool(r[a:b].any()) for a, b in itertools.pairwise(e)], bool)
        missing &= any_real.reshape([-1 if i == axis else 1 for i in range(len(edges))])
    for box in own:
        cells = tuple(slice(*np.searchsorted(e, [s, s + n])) for e, (s, n) in zip(edges, box, strict=True))
        missing[cells] = False
    require(not missing.any(), f"{contract.about}: elements that no box brings")
