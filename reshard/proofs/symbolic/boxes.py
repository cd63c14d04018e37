"""Exchanges and permutes: finite lists of who sends what to whom, compared with both layouts.

An even exchange's boxes are read as spans of atoms. A box is right if every atom that a device holds on
either side has, on the other side, the span of one value that is the device's coordinate, and every atom
that is local on both sides the same span. An exchange between numerals that do not nest is compared index
by index, dim by dim: a table of places for each dim, never one of the whole array. Then every element of
every result must be reached by some box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reshard.lower.exchange import Transfer
from reshard.lower.program import Exchange, Permute
from reshard.proofs.symbolic.collectives import Frame, match
from reshard.proofs.symbolic.form import Atom
from reshard.proofs.symbolic.lists import Ints, array, coordinate, need, positions
from reshard.proofs.symbolic.verdicts import Tied
from reshard.types.layout import Dim, Layout
from reshard.types.rules.tile_view import TileView

MOST_PIECES = 1024
MOST_CELLS = 1 << 22


class Boxes(NamedTuple):
    """Boxes as arrays: who sends to whom, and (boxes, axes, start and extent) at both ends."""

    sender: Ints
    receiver: Ints
    src: Ints
    dst: Ints

    def at(self, layout: Layout, side: str) -> Ints:
        """The positions of the senders or the receivers."""
        return positions(layout.mesh, self.sender if side == "src" else self.receiver)


def exchange(step: Exchange, frame: Frame) -> None:
    """Compares an exchange's lists with both layouts."""
    need(frame.operand.partial == frame.result.partial, f"{frame.about}: summands change")
    for view, tile in ((step.send, frame.tiles[0]), (step.receive, frame.tiles[1])):
        need(view.tile == tile == view.padded, f"{frame.about}: a view of another tile")
        need(math.prod(view.digits) == math.prod(tile), f"{frame.about}: a view of other sizes")
    boxes = boxes_of(step)
    _check_kept(boxes, frame)
    if not step.staged:
        _check_runs(step, boxes)
    if frame.atoms is not None and frame.operand.even and frame.result.even:
        _check_atoms(step, boxes, frame)
    else:
        _check_tables(step, boxes, frame)


def permute(step: Permute, frame: Frame) -> None:
    """Every receiver gets the tile of a sender whose held digits spell before what its own spell after."""
    pairs = array(step.pairs, 2, "pairs")
    need(np.array_equal(np.sort(pairs[:, 1]), np.sort(np.array(frame.result.mesh.devices))), "not each receiver once")
    boxes = Boxes(pairs[:, 0], pairs[:, 1], pairs, pairs)
    _check_kept(boxes, frame)
    sent, received = boxes.at(frame.operand, "src"), boxes.at(frame.result, "dst")
    for a, b in zip(frame.operand.dims, frame.result.dims, strict=True):
        need(a.padded == b.padded, "tiles of other sizes")
        one, other = _spelled(a, frame.operand, sent), _spelled(b, frame.result, received)
        need([k for k, _ in one] == [k for k, _ in other], "tiles of other digits")
        need(all(np.array_equal(v, w) for (_, v), (_, w) in zip(one, other, strict=True)), "a sender of another tile")
    need(frame.tiles[0] == frame.tiles[1], "tiles of other shapes")


def boxes_of(step: Exchange) -> Boxes:
    """All boxes of an exchange, the local ones first."""
    transfers = [*step.local, *itertools.chain.from_iterable(step.rounds)]
    rows = [(t.sender, t.receiver) for t in transfers for _ in t.boxes]
    ends = array(rows, 2, "transfers")
    return Boxes(ends[:, 0], ends[:, 1], _spans(transfers, "src", step.send), _spans(transfers, "dst", step.receive))


def _spans(transfers: Sequence[Transfer], side: str, view: TileView) -> Ints:
    axes = len(view.digits)
    flat = [[x for span in getattr(box, side) for x in span] for t in transfers for box in t.boxes]
    if not axes:
        return np.zeros((len(flat), 0, 2), np.int64)
    found = array(flat, 2 * axes, "boxes").reshape(-1, axes, 2)
    ends = found.sum(axis=2)
    need(np.all(found[..., 0] >= 0) and np.all(ends <= np.array(view.digits)), "a box that reaches out of a tile")
    return found


def _check_runs(step: Exchange, boxes: Boxes) -> None:
    """Messages that no buffer stages are one box each, and one run of memory at both ends."""
    need(all(len(t.boxes) == 1 for turn in step.rounds for t in turn), "an unstaged message of several boxes")
    sent = boxes.sender != boxes.receiver
    for spans, view in ((boxes.src, step.send), (boxes.dst, step.receive)):
        extents, begun = spans[sent, :, 1], np.zeros(int(sent.sum()), bool)
        for axis, size in enumerate(view.digits):
            need(np.all(~begun | (extents[:, axis] == size)), "an unstaged message that is no run of memory")
            begun |= extents[:, axis] > 1


def _check_kept(boxes: Boxes, frame: Frame) -> None:
    """A summand goes to a device that holds the same one of the sums."""
    sent, received = boxes.at(frame.operand, "src"), boxes.at(frame.result, "dst")
    for (s, n), (t, _) in zip(frame.partial(frame.operand), frame.partial(frame.result), strict=True):
        need(np.array_equal(coordinate(sent, s, n), coordinate(received, t, n)), "a summand of another device")


def _spelled(dim: Dim, layout: Layout, at: Ints) -> list[tuple[tuple[int, int], Ints]]:
    """The numbers that runs of held digits spell, by the place and the radix of the local digit after them."""
    found: list[tuple[tuple[int, int], Ints]] = []
    low, value, place = 1, np.zeros_like(at), 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            value, place = value + coordinate(at, layout.mesh.stride(axis), radix) * place, place * radix
        elif radix > 1:
            found.append(((low, radix), value))
            value, place = np.zeros_like(at), 1
        low *= radix
    return [*found, ((low, 1), value)]


# ---- boxes of atoms ------------------------------------------------------------------------------


def _check_atoms(step: Exchange, boxes: Boxes, frame: Frame) -> None:
    src = _by_atom(boxes.src, match(step.send.digits, frame.before))
    dst = _by_atom(boxes.dst, match(step.receive.digits, frame.after))
    _untie(frame, src, dst)
    sent, received = boxes.at(frame.operand, "src"), boxes.at(frame.result, "dst")
    for a in frame.nested:
        if a.place in frame.part:
            continue
        before = _one(coordinate(sent, a.src, a.radix)) if a.src is not None else src[a.place]
        after = _one(coordinate(received, a.dst, a.radix)) if a.dst is not None else dst[a.place]
        need(np.array_equal(before, after), f"{frame.about}: a box of other elements, dim {a.dim}")
    _check_reached(boxes, frame, dst)


def _one(value: Ints) -> Ints:
    return np.stack([value, np.ones_like(value)], axis=1)


def _by_atom(spans: Ints, axes: list[list[Atom]]) -> dict[tuple[int, int], Ints]:
    """Each axis's spans as spans of its atoms: one value of the leading ones, a run of one, the rest whole."""
    found: dict[tuple[int, int], Ints] = {}
    for axis, atoms in enumerate(axes):
        start, extent = spans[:, axis, 0], spans[:, axis, 1]
        for a in reversed(atoms):
            whole = (start % a.radix == 0) & (extent % a.radix == 0)
            need(np.all(whole | (start % a.radix + extent <= a.radix)), "a box that is no span of digits")
            found[a.place] = np.stack([np.where(whole, 0, start % a.radix), np.where(whole, a.radix, extent)], axis=1)
            start, extent = start // a.radix, np.where(whole, extent // a.radix, 1)
        need(np.all(extent == 1) and np.all(start == 0), "a box that is no span of digits")
    return found


def _untie(frame: Frame, *sides: dict[tuple[int, int], Ints]) -> None:
    """Digits that boxes cut keep their sizes."""
    named = [a for a in frame.nested if a.name is not None and a.place not in frame.part]
    cut = [a.place for a in named if any(np.any(side[a.place][:, 1] != a.radix) for side in sides)]
    if cut:
        raise Tied(frozenset(cut))


def _check_reached(boxes: Boxes, frame: Frame, dst: dict[tuple[int, int], Ints]) -> None:
    """Every receiver gets every share, and of each share every piece; the pieces are the whole share."""
    stay = [a for a in frame.after if a.src is None]
    come = [a for a in frame.after if a.src is not None]
    key = boxes.at(frame.result, "dst")
    for a in come:
        need(np.all(dst[a.place][:, 1] == 1), "a box of several shares")
        key = key * a.radix + dst[a.place][:, 0]
    spans = np.concatenate([np.zeros((len(key), 2), np.int64), *(dst[a.place] for a in stay)], axis=1)
    pieces, which = np.unique(spans, axis=0, return_inverse=True)
    _check_pieces(pieces[:, 2:].reshape(len(pieces), len(stay), 2), [a.radix for a in stay])
    wanted = frame.result.mesh.size * math.prod(a.radix for a in come) * len(pieces)
    found = len(np.unique(key * max(len(pieces), 1) + which.ravel()))
    need(found == wanted > 0, f"{frame.about}: of {wanted} pieces {found} arrive")


def _check_pieces(pieces: Ints, radices: Sequence[int]) -> None:
    """Pieces that overlap nowhere and have all elements together."""
    need(np.prod(pieces[..., 1], axis=1).sum() == math.prod(radices), "the pieces of a share are not all of it")
    need(len(pieces) <= MOST_PIECES, f"{len(pieces)} pieces of a share")
    low, high = pieces[..., 0], pieces.sum(axis=2)
    meet = np.all((low[:, None] < high[None]) & (low[None] < high[:, None]), axis=2)
    need(meet.sum() == len(pieces), "two pieces of a share overlap")


# ---- boxes of runs -------------------------------------------------------------------------------


def _check_tables(step: Exchange, boxes: Boxes, frame: Frame) -> None:
    need(step.send.digits == frame.tiles[0] and step.receive.digits == frame.tiles[1], "boxes of other axes than dims")
    need(not frame.part, f"{frame.about}: parts of an exchange of uneven boxes")
    _untie_dims(boxes, frame)
    sent, received = boxes.at(frame.operand, "src"), boxes.at(frame.result, "dst")
    for at, (a, b) in enumerate(zip(frame.operand.dims, frame.result.dims, strict=True)):
        one, other = _places(a, frame.operand, sent), _places(b, frame.result, received)
        rows = np.stack([one[0], boxes.src[:, at, 0], boxes.src[:, at, 1], other[0], *boxes.dst[:, at].T], axis=1)
        for held, start, extent, wanted, begin, length in np.unique(rows, axis=0):
            need(extent == length, f"{frame.about}: a box of another shape at its other end")
            into = wanted + other[1][begin : begin + length]
            real = into < b.size
            need(
                np.array_equal((held + one[1][start : start + extent])[real], into[real]),
                f"{frame.about}: a box of other elements, dim {at}",
            )
    _check_filled(boxes, frame, received)


def _untie_dims(boxes: Boxes, frame: Frame) -> None:
    """Dims keep their sizes, but for those that are the same at both ends and whole in every box."""
    touched = {at for at, (a, b) in enumerate(zip(frame.operand.dims, frame.result.dims, strict=True)) if a != b}
    for at, size in enumerate(frame.tiles[0]):
        if any(np.any(side[:, at] != [0, size]) for side in (boxes.src, boxes.dst)):
            touched.add(at)
    if tied := frozenset(place for place in frame.names if place[0] in touched):
        raise Tied(tied)


def _places(dim: Dim, layout: Layout, at: Ints) -> tuple[Ints, Ints]:
    """What a device's held digits add to a dim's index, and what each local index adds."""
    held, local, low = np.zeros_like(at), np.zeros(1, np.int64), 1
    for radix, axis in reversed(dim.digits):
        if axis is None:
            local = (np.arange(radix)[:, None] * low + local[None]).reshape(-1)
        else:
            held = held + coordinate(at, layout.mesh.stride(axis), radix) * low
        low *= radix
    return held, local


def _check_filled(boxes: Boxes, frame: Frame, received: Ints) -> None:
    """Every true element of every result lies in some box; devices with the same boxes are looked at once."""
    mesh = frame.result.mesh
    every = np.arange(mesh.size)
    tables = [_places(dim, frame.result, every) for dim in frame.result.dims]
    order = np.argsort(received, kind="stable")
    ends = np.searchsorted(received[order], np.arange(mesh.size + 1))
    seen: set[bytes] = set()
    for device in range(mesh.size):
        own = boxes.dst[order[ends[device] : ends[device + 1]]]
        real = [local + held[device] < dim.size for (held, local), dim in zip(tables, frame.result.dims, strict=True)]
        key = own.tobytes() + b"".join(r.tobytes() for r in real)
        if key not in seen:
            seen.add(key)
            _check_tile(own, real, frame)


def _check_tile(own: Ints, real: Sequence[Ints], frame: Frame) -> None:
    """One tile, on the grid of all ends of its boxes."""
    edges = [np.unique(np.concatenate([[0, len(r)], own[:, i, 0], own[:, i].sum(axis=1)])) for i, r in enumerate(real)]
    need(math.prod(len(e) for e in edges) <= MOST_CELLS, f"{frame.about}: a grid of too many boxes")
    wanted = np.ones([max(len(e) - 1, 0) for e in edges], bool)
    for axis, (e, r) in enumerate(zip(edges, real, strict=True)):
        any_real = np.array([bool(r[a:b].any()) for a, b in itertools.pairwise(e)], bool)
        wanted &= any_real.reshape([-1 if i == axis else 1 for i in range(len(edges))])
    for box in own:
        cells = tuple(slice(*np.searchsorted(e, [s, s + n])) for e, (s, n) in zip(edges, box, strict=True))
        wanted[cells] = False
    need(not wanted.any(), f"{frame.about}: elements that no box brings")
