"""Exchanges and permutes: finite lists of who sends what to whom, compared with both layouts.

    f32[{x}4, 16] -> f32[16, {x}4] on <x=4>, the box from device 1 to device 2

            local rows   local columns   global rows   global columns
    src     0 to 3       8 to 11         4 to 7        8 to 11
    dst     4 to 7       0 to 3          4 to 7        8 to 11

The blocks of messages are loops over flat tiles; here they are read as boxes, spans of digits, by code of this module
alone: runtimes read them by code of the lowering, and a fault there must not be proved right. A box of an even exchange
is right if every digit that a device holds on one side has, on the other side, the span of one value that is the
device's coordinate, and every digit that is local on both sides has the same span on both. An exchange between numerals
that do not nest is compared index by index, dim by dim: with a table of places for each dim, never one for the whole
array. Finally, every element of every result must be in a box.

Exchanges in place are replayed instead: see the end of this module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, Transfer
from reshard.lower.exchange_rounds import Place as SlotPlace
from reshard.lower.program import AllGather, Permute
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.contract import (
    Ints,
    StepContract,
    coordinate_along,
    count_values,
    find_positions,
    list_indices,
    match_digits,
    offset_of_held,
    pair_digits,
    read_rows,
    require,
)
from reshard.proofs.symbolic.form import FormDigit, Place, Tied
from reshard.types.layout import Dim, Layout

MOST_PIECES = 1 << 15
"""More pieces of one share are not compared with each other."""

MOST_CELLS = 1 << 22
"""A tile that its boxes cut into more cells is not compared, nor are blocks of more boxes."""


def broken_message_rule(step: object) -> str | None:
    """Which rule of messages an instruction breaks, whatever its layouts: None if it breaks none.

    What no run on one machine shows: a device that is busy twice in a round, a copy that would have to cross a wire
    unseen, a second tile for one device, a gathered tile that falls into blocks, a message that needs a buffer and has
    none.
    """
    if isinstance(step, AllGather):
        return "a gathered tile is sent in blocks" if step.send.blocks else None
    if isinstance(step, Permute):
        turns = [[(pair[0], pair[1]) for pair in step.pairs]]
    elif isinstance(step, Exchange | ExchangeInPlace):
        turns = [[(t.sender, t.receiver) for t in turn] for turn in step.rounds]
    else:
        return None
    for number, turn in enumerate(turns, 1):
        for end, does in enumerate(("sends", "receives")):
            devices = {pair[end] for pair in turn}
            if len(devices) < len(turn):
                return f"in round {number}, a device {does} more than one message"
    if isinstance(step, Exchange):
        if len(set(step.receivers)) < len(step.receivers):
            return "a device is listed twice among the receivers"
        if any(t.sender != t.receiver for t in step.local):
            return "a local copy goes to another device"
        if any(t.relayed for t in step.local):
            return "a local copy passes on what has yet to arrive"
        if not step.staged and not all(map(_is_one_run, itertools.chain.from_iterable(step.rounds))):
            return "a message without a buffer is not one run of memory at both ends"
    return None


def _is_one_run(t: Transfer) -> bool:
    """Whether a message stays on its device, or is one block of neighbours at both ends."""
    if t.sender == t.receiver:
        return True
    below = 1
    for extent, *strides in reversed(t.blocks[0].axes if t.blocks else ()):
        if extent != 1 and strides != [below, below]:
            return False
        below *= extent
    return len(t.blocks) == 1


# ---- boxes ---------------------------------------------------------------------------------------


class Boxes(NamedTuple):
    """Boxes as arrays: the numbers of their messages, their senders and receivers, and (boxes, axes, start and extent)
    at both ends.
    """

    message: Ints
    sender: Ints
    receiver: Ints
    src: Ints
    dst: Ints


def boxes_of(step: Exchange, *, relayed: bool = False) -> Boxes:
    """The boxes of an exchange, of its local copies too; or of the messages that pass on what has arrived.

    >>> from reshard.geometry.blocks import Axis, Block
    >>> from reshard.lower.exchange_rounds import Transfer
    >>> whole, rows = TileView((12,), (12,), (12,), (0,), ()), TileView((3, 8), (3, 8), (3, 8), (0, 1), ())
    >>> block = Block(0, 4, (Axis(2, 6, 8), Axis(2, 1, 1)))
    >>> boxes_of(Exchange(whole, rows, (0,), (Transfer(0, 0, (block,)),), (), True)).dst.tolist()
    [[[0, 1], [4, 2]], [[1, 1], [4, 2]]]
    """
    views = step.receive if relayed else step.send, step.receive
    # Most blocks differ in where they start only: their loops are read once, and what is left is done by arrays.
    alike: dict[tuple[tuple[int, int, int], ...], list[tuple[int, ...]]] = {}
    transfers = [t for turn in (step.local, *step.rounds) for t in turn if t.relayed == relayed]
    for number, t in enumerate(transfers):
        for block in t.blocks:
            alike.setdefault(block.axes, []).append((number, t.sender, t.receiver, block.src, block.dst))
    read = [_read_blocks(axes, read_rows(rows, 5, "blocks"), views) for axes, rows in alike.items()]
    if not read:
        read = [_read_blocks((), np.zeros((0, 5), np.int64), views)]
    ends, src, dst = (np.concatenate(each) for each in zip(*read, strict=True))
    return Boxes(ends[:, 0], ends[:, 1], ends[:, 2], src, dst)


def _read_blocks(
    loops: Sequence[tuple[int, int, int]], rows: Ints, views: tuple[TileView, TileView]
) -> tuple[Ints, Ints, Ints]:
    """Blocks of the same loops as boxes: (message, sender, receiver), and their spans at both ends.

    A loop is a span of a digit if it steps over what the loops inside of it take of that digit, at both ends. Any
    other, such as one that leaves rows out, is listed value by value.
    """
    units = [[math.prod(view.digits[at + 1 :]) for at in range(len(view.digits))] for view in views]
    extents = [[1] * len(view.digits) for view in views]
    inner = [len(own) for own in units]
    for extent, *steps in reversed(loops):
        if extent == 1:
            continue
        if extent == 0:
            rows = rows[:0]
            continue
        at = [
            next((n for n, unit in enumerate(own) if unit <= step and view.digits[n] > 1), len(own))
            for own, view, step in zip(units, views, steps, strict=True)
        ]
        # Boxes have one order at both ends, so loops must not come in another one: they would be read as transposed.
        ordered = all(n < len(own) and n <= last for n, own, last in zip(at, units, inner, strict=True))
        require(extent > 0 and ordered, f"a loop of steps {steps} that is not a slice of {[v.digits for v in views]}")
        if all(own[n] * size[n] == step for own, size, n, step in zip(units, extents, at, steps, strict=True)):
            for size, n in zip(extents, at, strict=True):
                size[n] *= extent
            inner = at
        else:
            require(len(rows) * extent <= MOST_CELLS, "too many boxes to compare")
            rows = (rows[:, None] + np.arange(extent)[:, None] * np.array([0, 0, 0, *steps])).reshape(-1, 5)
    spans: list[Ints] = []
    for offset, own, size, view in zip(rows[:, 3:].T, units, extents, views, strict=True):
        start = offset[:, None] // np.array(own, np.int64)
        start[:, 1:] %= np.array(
            view.digits[1:], np.int64
        )  # What is outside of the tile is outside of its first digit.
        inside = np.all((start >= 0) & (start + size <= np.array(view.digits))) and (own or not offset.any())
        require(inside, "a box that reaches out of a tile")
        spans.append(np.stack([start, np.broadcast_to(np.array(size, np.int64), start.shape)], axis=2))
    return rows[:, :3], spans[0], spans[1]


def spans_of_loops(
    loops: Sequence[tuple[int, int, int]], before: Sequence[FormDigit], after: Sequence[FormDigit]
) -> tuple[dict[Place, tuple[int, int]], dict[Place, tuple[int, int]]]:
    """What the loops of a block that starts at 0 take of each local digit of both tiles: (start, extent)."""
    views: list[TileView] = []
    for local in (before, after):
        digits = tuple(a.radix for a in local)
        views.append(TileView(digits, digits, digits, tuple(range(len(digits))), ()))
    _, *ends = _read_blocks(loops, np.zeros((1, 5), np.int64), (views[0], views[1]))
    require(all(len(spans) == 1 for spans in ends), "a block of several boxes")
    src, dst = (
        {a.place: (int(start), int(extent)) for a, (start, extent) in zip(local, spans[0].tolist(), strict=True)}
        for local, spans in zip((before, after), ends, strict=True)
    )
    return src, dst


# ---- exchanges -----------------------------------------------------------------------------------


def check_exchange(step: Exchange, contract: StepContract) -> None:
    """Compares an exchange's lists with both layouts."""
    about = contract.about
    require(contract.operand.partial_as(contract.result), f"{about}: summands change")
    require(not step.fills and not step.viewed, f"{about}: an exchange for a view, and there is none")
    for view, tile in ((step.send, contract.tiles[0]), (step.receive, contract.tiles[1])):
        require(view.tile == tile == view.padded, f"{about}: a view of another tile")
        require(math.prod(view.digits) == math.prod(tile), f"{about}: a view of other sizes")
    if step.relays:
        _check_relay(step, contract)
        return
    boxes = boxes_of(step)
    _check_summands(boxes, contract)
    if contract.digits is not None and contract.operand.even and contract.result.even:
        # Every receiver gets every piece of every share.
        dst = check_messages(step, boxes, contract)
        staying = [a for a in contract.after if a.src is None]
        arriving = [a for a in contract.after if a.src is not None]
        key = find_positions(contract.result.mesh, boxes.receiver)
        for a in arriving:
            require(np.all(dst[a.place][:, 1] == 1), "a box of several shares")
            key = key * a.radix + dst[a.place][:, 0]
        spans = np.concatenate([np.zeros((len(key), 2), np.int64), *(dst[a.place] for a in staying)], axis=1)
        pieces, which = np.unique(spans, axis=0, return_inverse=True)
        _check_pieces(pieces[:, 2:].reshape(len(pieces), len(staying), 2), [a.radix for a in staying], contract.about)
        wanted = contract.result.mesh.size * count_values(arriving) * len(pieces)
        arrived = len(np.unique(key * max(len(pieces), 1) + which.ravel()))
        require(arrived == wanted > 0, f"{contract.about}: of {wanted} pieces {arrived} arrive")
    else:
        contract = contract.between_parts()
        _check_tables(step, boxes, contract)
        _check_filled(boxes.receiver, boxes.dst, contract)


def check_view_exchange(step: object, about: str, tiles: tuple[tuple[int, ...], ...], *, fills: bool) -> None:
    """Checks what an exchange through a view says beside its blocks: runtimes other than numpy's go by that."""
    require(isinstance(step, Exchange) and step.viewed and step.fills == fills, f"{about}: another kind of exchange")
    if isinstance(step, Exchange):
        for view, tile in zip((step.send, step.receive), tiles, strict=True):
            plain = view.tile == view.padded == view.digits == tile and view.dims == tuple(range(len(tile)))
            require(plain and not view.blocks, f"{about}: a view of another tile")
        check_turns(step, about)


def check_permute(step: Permute, contract: StepContract) -> None:
    """Checks that every receiver gets a tile whose held digits, at the sender, spell what the receiver's own spell."""
    require(contract.operand.partial_as(contract.result), f"{contract.about}: summands change")
    pairs = read_rows(step.pairs, 2, "pairs")
    once = np.array_equal(np.sort(pairs[:, 1]), np.sort(np.array(contract.result.mesh.devices)))
    require(once, "the pairs do not have each receiver once")
    whole = Boxes(pairs[:, 0], pairs[:, 0], pairs[:, 1], pairs, pairs)
    _check_summands(whole, contract)
    sent, received = _end_positions(whole, contract)
    for a, b in zip(contract.operand.dims, contract.result.dims, strict=True):
        require(a.padded == b.padded, "tiles of other sizes")
        one, other = _held_numbers(a, contract.operand, sent), _held_numbers(b, contract.result, received)
        require([k for k, _ in one] == [k for k, _ in other], "tiles of other digits")
        same = all(np.array_equal(v, w) for (_, v), (_, w) in zip(one, other, strict=True))
        require(same, "a sender of another tile")
    require(contract.tiles[0] == contract.tiles[1], "tiles of other shapes")


def _held_numbers(dim: Dim, layout: Layout, at: Ints) -> list[tuple[Place, Ints]]:
    """The numbers that runs of held digits spell, by the place and the radix of the local digit above each run."""
    numbers: list[tuple[Place, Ints]] = []
    low, value, weight = 1, np.zeros_like(at), 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            value, weight = value + coordinate_along(at, layout.mesh.stride(axis), radix) * weight, weight * radix
        elif radix > 1:
            numbers.append(((low, radix), value))
            value, weight = np.zeros_like(at), 1
        low *= radix
    return [*numbers, ((low, 1), value)]


def _end_positions(boxes: Boxes, contract: StepContract) -> tuple[Ints, Ints]:
    """The positions of the senders, and of the receivers."""
    operand, result = contract.operand.mesh, contract.result.mesh
    return find_positions(operand, boxes.sender), find_positions(result, boxes.receiver)


def _check_summands(boxes: Boxes, contract: StepContract) -> None:
    """Checks that a summand goes to a device that keeps the same summand of the sum."""
    sent, received = _end_positions(boxes, contract)
    pairs = zip(contract.partial(contract.operand), contract.partial(contract.result), strict=True)
    for before, after in pairs:
        same = np.array_equal(coordinate_along(sent, *before), coordinate_along(received, *after))
        require(same, "a summand of another device")


def _check_relay(step: Exchange, contract: StepContract) -> None:
    """Compares a relay: first what is sent out of the operand, then what is passed on out of tiles of the result.

    What a device passes on has arrived before, and goes to the same place of the same tile of another device.
    """
    about, mesh = contract.about, contract.result.mesh
    check_turns(step, about)
    single = all(t.elements <= 1 for t in itertools.chain.from_iterable(step.rounds))
    require(step.staged or single, f"{about}: a relay without buffers")
    first, passed = boxes_of(step), boxes_of(step, relayed=True)
    _check_summands(first, contract)
    _check_tables(step, first, contract)
    require(np.array_equal(passed.src, passed.dst), f"{about}: an element is passed on to another place")
    giver, taker = find_positions(mesh, passed.sender), find_positions(mesh, passed.receiver)
    for dim in contract.result.dims:
        same = np.array_equal(offset_of_held(dim, contract.result, giver), offset_of_held(dim, contract.result, taker))
        require(same, f"{about}: an element is passed on to another tile")
    for factor in contract.partial(contract.result):
        same = np.array_equal(coordinate_along(giver, *factor), coordinate_along(taker, *factor))
        require(same, f"{about}: an element is passed on to another summand")
    received = find_positions(mesh, first.receiver)
    for device in np.unique(giver):
        arrived, given = first.dst[received == device], passed.src[giver == device]
        both = np.concatenate([arrived, given])
        edges = [np.unique(np.concatenate([both[:, i, 0], both[:, i].sum(axis=1)])) for i in range(both.shape[1])]
        missing = _cells_of(given, edges, about) & ~_cells_of(arrived, edges, about)
        require(not missing.any(), f"{about}: a device passes on what it has not received")
    receivers, filled = (np.concatenate([first[at], passed[at]]) for at in (2, 4))
    _check_filled(receivers, filled, contract)


def check_turns(step: Exchange, about: str) -> None:
    """Checks that devices pass on nothing before everything has arrived, and the same in all rounds of a gather."""
    turns = [any(t.relayed for t in turn) for turn in step.rounds]
    mixed = any(t.relayed != later for turn, later in zip(step.rounds, turns, strict=True) for t in turn)
    require(turns == sorted(turns) and not mixed, f"{about}: elements are passed on before all have arrived")
    require(step.gathers in (0, sum(turns)), f"{about}: a gather of some of the rounds in which elements are passed on")
    gathered = [t for turn in step.rounds[len(step.rounds) - step.gathers :] for t in turn]
    given = {t.sender: t.blocks for t in gathered if t.blocks}
    others = {(t.sender, t.receiver) for t in gathered}
    require(
        all(t.blocks == given.get(t.sender, ()) for t in gathered) and len(others) == len(gathered),
        f"{about}: a device passes on unlike parts to the others of its group",
    )


# ---- boxes of digits -----------------------------------------------------------------------------


def check_messages(step: Exchange, boxes: Boxes, contract: StepContract) -> Mapping[Place, Ints]:
    """Digit by digit, both ends of every box of an even exchange have the same span; returns those of the receivers.

    Whether all messages are there is not looked at.
    """
    src = _by_digit(boxes.src, match_digits(step.send.digits, contract.before))
    dst = _by_digit(boxes.dst, match_digits(step.receive.digits, contract.after))
    named = [a for a in contract.nested if a.name is not None and a.place not in contract.part]
    cut = [a.place for a in named if any(np.any(side[a.place][:, 1] != a.radix) for side in (src, dst))]
    if cut:  # Boxes cut digits whose sizes were to vary.
        raise Tied(frozenset(cut))
    sent, received = _end_positions(boxes, contract)
    for a in contract.nested:
        if a.place in contract.part:
            continue
        ends: list[Ints] = []
        for spans, stride, at in ((src, a.src, sent), (dst, a.dst, received)):
            if stride is None:
                ends.append(spans[a.place])
            else:  # One value, the device's coordinate.
                value = coordinate_along(at, stride, a.radix)
                ends.append(np.stack([value, np.ones_like(value)], axis=1))
        require(np.array_equal(ends[0], ends[1]), f"{contract.about}: a box of other elements, dim {a.dim}")
    return dst


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


def _check_pieces(pieces: Ints, radices: Sequence[int], about: str) -> None:
    """Checks that pieces do not overlap and together have all elements of a share."""
    elements = np.prod(pieces[..., 1], axis=1).sum()
    require(elements == math.prod(radices), "the pieces of a share are not all of it")
    require(len(pieces) <= MOST_PIECES, f"a share in {len(pieces)} pieces, too many to compare")
    edges = [np.unique([0, r, *pieces[:, i, 0], *pieces[:, i].sum(axis=1)]) for i, r in enumerate(radices)]
    require(_cells_of(pieces, edges, about).all(), "two pieces of a share overlap")


# ---- boxes of runs -------------------------------------------------------------------------------


def _check_tables(step: Exchange, boxes: Boxes, contract: StepContract) -> None:
    """Index by index, dim by dim: both ends of every box have the same elements."""
    about = contract.about
    by_dim = step.send.digits == contract.tiles[0] and step.receive.digits == contract.tiles[1]
    require(by_dim, "boxes of other axes than dims")
    dims = list(zip(contract.operand.dims, contract.result.dims, strict=True))
    # The sizes of dims that change, or that some box does not take whole, cannot vary.
    touched = {at for at, (a, b) in enumerate(dims) if a != b}
    for at, size in enumerate(contract.tiles[0]):
        if any(np.any(side[:, at] != [0, size]) for side in (boxes.src, boxes.dst)):
            touched.add(at)
    if tied := frozenset(place for place in contract.names if place[0] in touched):
        raise Tied(tied)
    sent, received = _end_positions(boxes, contract)
    for at, (a, b) in enumerate(dims):
        held, wanted = offset_of_held(a, contract.operand, sent), offset_of_held(b, contract.result, received)
        rows = np.stack([held, *boxes.src[:, at].T, wanted, *boxes.dst[:, at].T], axis=1)
        ends = dict[int, Ints](), dict[int, Ints]()
        for own, start, extent, needed, begin, length in np.unique(rows, axis=0).tolist():
            require(extent == length, f"{about}: a box of another shape at its other end")
            for side, (dim, offset) in zip(ends, ((a, own), (b, needed)), strict=True):
                if offset not in side:
                    side[offset] = list_indices(dim, int(offset))
            read, written = ends[0][own][start : start + extent], ends[1][needed][begin : begin + length]
            real = written < b.size
            require(np.array_equal(read[real], written[real]), f"{about}: a box of other elements, dim {at}")


def _check_filled(receivers: Ints, boxes: Ints, contract: StepContract) -> None:
    """Checks that every true element of every result lies in a box; devices with equal boxes are compared once."""
    mesh, dims = contract.result.mesh, contract.result.dims
    received = find_positions(mesh, receivers)
    tables = [offset_of_held(dim, contract.result, np.arange(mesh.size)) for dim in dims]
    order = np.argsort(received, kind="stable")
    ends = np.searchsorted(received[order], np.arange(mesh.size + 1))
    seen: set[tuple[int, bytes]] = set()
    for device in range(mesh.size):
        own = boxes[order[ends[device] : ends[device + 1]]]
        real = [list_indices(dim, int(held[device])) < dim.size for held, dim in zip(tables, dims, strict=True)]
        key = (len(own), own.tobytes() + b"".join(r.tobytes() for r in real))
        if key in seen:
            continue
        seen.add(key)
        # One tile on the grid of all ends of its boxes: no cell with true elements is left out.
        edges = [np.unique([0, len(r), *own[:, i, 0], *own[:, i].sum(axis=1)]) for i, r in enumerate(real)]
        missing = ~_cells_of(own, edges, contract.about)
        for axis, (e, r) in enumerate(zip(edges, real, strict=True)):
            any_real = np.array([bool(r[a:b].any()) for a, b in itertools.pairwise(e)], bool)
            missing &= any_real.reshape([-1 if i == axis else 1 for i in range(len(edges))])
        require(not missing.any(), f"{contract.about}: elements that no box brings")


def _cells_of(boxes: Ints, edges: Sequence[Ints], about: str) -> np.ndarray:
    """Which cells of the grid between the edges of each dim lie in some box."""
    require(math.prod(len(e) for e in edges) <= MOST_CELLS, f"{about}: a grid of too many boxes")
    cells = np.zeros([max(len(e) - 1, 0) for e in edges], bool)
    for box in boxes:
        cells[tuple(slice(*np.searchsorted(e, [s, s + n])) for e, (s, n) in zip(edges, box, strict=True))] = True
    return cells


# Exchanges in place: which share lies in which slot of which device, round by round, as arrays.
#
# A share is a device and a place in its tile: one value of each digit that moves. A round sends pieces of slots. As in
# the numpy runtime, all of them are read before any is written. At the end, every slot that is unpacked must contain
# the share that the result's layout puts there, and every place must be unpacked.
#
#     f32[{x}3] -> f32[3{x}] on <x=3>, 3 slots of one element; the numbers are global indices
#
#                             device 0    device 1    device 2
#     tiles before            0 1 2       3 4 5       6 7 8
#     packed                  0 2 1       4 3 5       8 7 6
#     round 1 sends slot 1    0 3 1       4 7 5       8 2 6       from device d + 1 to device d
#     round 2 sends slot 2    0 3 6       4 7 1       8 2 5       from device d + 2 to device d
#     unpacked                0 3 6       1 4 7       2 5 8       what the result means


_NOTHING = -1
_NO_SLOT = "a slot that does not exist"


def check_exchange_in_place(step: ExchangeInPlace, contract: StepContract) -> None:
    """Compares the contents of all slots with both layouts."""
    about = contract.about
    even = contract.operand.even and contract.result.even
    require(even and not contract.part, f"{about}: in place, but not even or in parts")
    require(contract.operand.partial_as(contract.result), f"{about}: summands change")
    # A slot is one share: the digits that stay, in the same order on both sides.
    staying = [[a for a in local if a.src is None and a.dst is None] for local in (contract.before, contract.after)]
    pair_digits(*staying)
    require(step.slot == count_values(staying[0]), f"{about}: a slot of another size than a share")
    for view, tile in ((step.send, contract.tiles[0]), (step.receive, contract.tiles[1])):
        require(view.tile == tile == view.padded, f"{about}: a view of another tile")
    lengths = {t.length for transfers in step.rounds for t in transfers}
    require(step.staged or lengths <= {1}, f"{about}: unstaged messages of several elements")
    *_, slots = replay_slots(step, contract)
    moving = [a for a in contract.before if a.dst is not None]
    arriving = [a for a in contract.after if a.src is not None]
    rows = _slot_rows(step.unpack, step.receive, contract.after, arriving, contract.result)
    places = count_values(arriving)
    at, slot, place = rows.T
    require(np.all((slot >= 0) & (slot < step.slots)), _NO_SLOT)
    every = len(np.unique(at * places + place)) == contract.result.mesh.size * places
    require(every, "a place that is not unpacked")
    content = slots[at, slot]
    whole = np.all((content == content[:, :1]) & (content != _NOTHING))
    require(whole, f"{about}: a slot of several shares")
    share, sender = np.divmod(content[:, 0], contract.operand.mesh.size)

    def digit(number: Ints, a: FormDigit, digits: Sequence[FormDigit]) -> Ints:
        """One digit of a place's number, which all the digits spell."""
        first = [one.place for one in digits].index(a.place)
        return number // count_values(digits[first + 1 :]) % a.radix

    for a in contract.nested:
        if (a.src, a.dst) != (None, None):
            before = digit(share, a, moving) if a.src is None else coordinate_along(sender, a.src, a.radix)
            after = digit(place, a, arriving) if a.dst is None else coordinate_along(at, a.dst, a.radix)
            require(np.array_equal(before, after), f"{about}: a slot holds another share, dim {a.dim}")
    for factor in contract.partial(contract.operand):
        same = np.array_equal(coordinate_along(sender, *factor), coordinate_along(at, *factor))
        require(same, f"{about}: another summand")


def replay_slots(step: ExchangeInPlace, contract: StepContract) -> Iterator[Ints]:
    """The share in every piece of every slot, after packing and after each round: device position + size * place.

    Raises `Tied` if slots are sent in pieces, which fixes the sizes.
    """
    spans = {(t.start, t.length) for transfers in step.rounds for t in transfers}
    inside = all(start >= 0 and start + n <= step.slot for start, n in spans)
    require(inside, f"{contract.about}: a piece that reaches out of its slot")
    if spans - {(0, step.slot)} and contract.names:
        raise Tied(contract.names)
    ends = np.array(sorted({0, step.slot} | {end for start, n in spans for end in (start, start + n)}), np.int64)
    mesh = contract.operand.mesh
    moving = [a for a in contract.before if a.dst is not None]
    slots = np.full((mesh.size, step.slots, len(ends) - 1), _NOTHING, np.int64)
    at, slot, place = _slot_rows(step.pack, step.send, contract.before, moving, contract.operand).T
    require(np.all((slot >= 0) & (slot < step.slots)), _NO_SLOT)
    slots[at, slot] = (at + mesh.size * place)[:, None]
    yield slots
    for transfers in step.rounds:
        rows = read_rows(transfers, 6, "transfers")
        sender, receiver = find_positions(mesh, rows[:, 0]), find_positions(mesh, rows[:, 1])
        require(np.all((rows[:, 2:4] >= 0) & (rows[:, 2:4] < step.slots)), _NO_SLOT)
        sent = slots[sender, rows[:, 2]]  # Read in full before anything is written.
        start, stop = rows[:, 4, None], (rows[:, 4] + rows[:, 5])[:, None]
        message, piece = np.nonzero((start <= ends[None, :-1]) & (ends[None, 1:] <= stop))
        slots[receiver[message], rows[message, 3], piece] = sent[message, piece]
        yield slots


def _slot_rows(
    places: Mapping[int, Sequence[tuple[int, SlotPlace]]],
    view: TileView,
    local: Sequence[FormDigit],
    moving: Sequence[FormDigit],
    layout: Layout,
) -> Ints:
    """(device position, slot, number of the place) for every entry of `pack` or `unpack`.

    A place is numbered by the values of the digits that move; the view takes the other digits whole.
    """
    require(set(places) == set(layout.mesh.devices), "not every device has places")
    axes = match_digits(view.digits, local)
    known: dict[SlotPlace, int] = {}
    for place in {place for listed in places.values() for _, place in listed}:
        require(len(place) == len(axes), "a place of other digits")
        values: dict[Place, int] = {}
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
        known[place] = number
    rows = read_rows([(d, slot, known[place]) for d, own in places.items() for slot, place in own], 3, "places")
    rows[:, 0] = find_positions(layout.mesh, rows[:, 0])
    return rows
