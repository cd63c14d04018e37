"""Who sends what to whom when indices are seen through a view that no common units fit.

    view "(three h) -> three h", three=3, h=4, on <x=2, y=2>: f32[{x}6] -> f32[3, {y}2]

    source piece 1 has indices 6 to 11   = three 1, h 2-3 and three 2, h 0-3
    target piece 0 wants h 0-1           it shares three 2, h 0-1 with that: a box of 1 x 2

A run of neighbouring indices is a few boxes of atoms (`view_boxes`). The boxes of both sides are cut with each other,
atom by atom, so that the work depends on pieces and runs and not on elements.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from reshard.geometry.overlap import piece
from reshard.geometry.pieces import count, largest
from reshard.geometry.view_boxes import BoxIndex, SideBox, StridedBox, common_box, dim_boxes
from reshard.types.layout import Layout
from reshard.types.view import Groups, View
from reshard.types.whole import check_deadline


@dataclass(frozen=True)
class ViewMessage:
    """What one device sends to another: any combination of a box of each factor."""

    sender: int
    receiver: int
    factors: tuple[tuple[StridedBox, ...], ...]

    @cached_property
    def elements(self) -> int:
        """Elements in the message."""
        return math.prod(sum(box.elements for box in boxes) for boxes in self.factors)

    @property
    def boxes(self) -> Iterator[StridedBox]:
        """The boxes one by one."""
        for each in itertools.product(*self.factors):
            yield _joined(each)

    @property
    def one_run(self) -> bool:
        """Whether the message can be sent and received where it lies."""
        return all(len(boxes) == 1 for boxes in self.factors) and next(self.boxes).one_run


class ViewStats(NamedTuple):
    """The most elements that a device receives and that one sends, the rounds, the elements of the largest message, and
    whether messages need buffers."""

    received: int
    sent: int
    rounds: int
    message: int
    staged: bool


@lru_cache(maxsize=256)
def view_messages(operand: Layout, result: Layout, view: View) -> tuple[ViewMessage, ...]:
    """Every message, local copies included; the sender of these is the receiver.

    >>> from reshard.types import Mesh
    >>> view = View.identity((4,))
    >>> mesh = Mesh(x=2)
    >>> both = view_messages(Layout.parse("f32[{x}2]", mesh), Layout.parse("f32[4]", mesh), view)
    >>> [(message.sender, message.receiver, message.elements) for message in both]
    [(0, 0, 2), (0, 1, 2), (1, 1, 2), (1, 0, 2)]
    """
    factors = [_Factor(operand, result, view, dims) for dims in _factors(view)]
    home = {device: _tile(operand, device) for device in operand.mesh.devices}
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, tile in home.items():
        holders.setdefault(tile, []).append(device)
    requests: dict[tuple[int, ...], list[tuple[int, tuple[tuple[StridedBox, ...], ...]]]] = {}
    rank = len(operand.dims)
    for device in result.mesh.devices:
        check_deadline()
        wanted = _tile(result, device)
        parts = [factor.wanted(wanted) for factor in factors]
        for owners in itertools.product(*(part.items() for part in parts)):
            by_dim = dict(pair for owner, _ in owners for pair in owner)
            source = (*(by_dim[at] for at in range(rank)), *home.get(device, ())[rank:])
            requests.setdefault(source, []).append((device, tuple(boxes for _, boxes in owners)))
    messages: list[ViewMessage] = []
    for tile, wants in requests.items():
        messages += _dealt(holders[tile], wants)
    return tuple(messages)


@lru_cache(maxsize=256)
def view_stats(operand: Layout, result: Layout, view: View, chunk: int | None = None) -> ViewStats:
    """The figures of the exchange, with messages of at most `chunk` elements.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> view_stats(Layout.parse("f32[{x}2]", mesh), Layout.parse("f32[4]", mesh), View.identity((4,)))
    ViewStats(received=2, sent=2, rounds=1, message=2, staged=False)
    """
    crossing = [m for m in view_messages(operand, result, view) if m.sender != m.receiver and m.elements]
    received, sent = by_device(operand, result, view)
    cap = chunk_cap(crossing, chunk)
    most = max((message.elements for message in crossing), default=0)
    if cap is not None:
        most = max(largest(box.extents, cap) for message in crossing for box in message.boxes)
    staged = most > 1 and (cap is not None or not all(message.one_run for message in crossing))
    return ViewStats(
        max(received.values(), default=0), max(sent.values(), default=0), _rounds(crossing, cap), most, staged
    )


def chunk_cap(crossing: Sequence[ViewMessage], chunk: int | None) -> int | None:
    """The most elements of a message; None if all are within the chunk as they are."""
    most = max((message.elements for message in crossing), default=0)
    return None if chunk is None or chunk >= most else chunk


def _rounds(crossing: Sequence[ViewMessage], cap: int | None) -> int:
    """The most messages that a device sends or receives."""
    sends, receipts = Counter[int](), Counter[int]()
    for message in crossing:
        number = 1 if cap is None else sum(count(box.extents, cap) for box in message.boxes)
        sends[message.sender] += number
        receipts[message.receiver] += number
    return max((*sends.values(), *receipts.values()), default=0)


def by_device(operand: Layout, result: Layout, view: View) -> tuple[Counter[int], Counter[int]]:
    """The elements that each device receives, and those that each sends.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> by_device(Layout.parse("f32[{x}2]", mesh), Layout.parse("f32[4]", mesh), View.identity((4,)))
    (Counter({1: 2, 0: 2}), Counter({0: 2, 1: 2}))
    """
    received, sent = Counter[int](), Counter[int]()
    for message in view_messages(operand, result, view):
        if message.sender != message.receiver:
            received[message.receiver] += message.elements
            sent[message.sender] += message.elements
    return received, sent


def _dealt(
    holders: Sequence[int], wants: Sequence[tuple[int, tuple[tuple[StridedBox, ...], ...]]]
) -> Iterator[ViewMessage]:
    """The requests for one tile: holders copy, the others are dealt evenly among the holders."""
    own = set(holders)
    away = [want for want in wants if want[0] not in own]
    yield from (ViewMessage(device, device, boxes) for device, boxes in wants if device in own)
    yield from (ViewMessage(holders[n * len(holders) // len(away)], *want) for n, want in enumerate(away))


def _tile(layout: Layout, device: int) -> tuple[int, ...]:
    """The number of the device's piece in each dim, then its coordinates along the partial sub-axes."""
    position = layout.mesh.position(device)
    pieces = (piece(dim, layout.mesh, position) for dim in layout.dims)
    return (*pieces, *layout.mesh.coordinates(position, layout.partial))


class _Dims(NamedTuple):
    """Dims of both sides, by number, and the atoms that they and no other dims have."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    atoms: tuple[int, ...]


def _factors(view: View) -> list[_Dims]:
    """The dims of both sides in groups that share no atoms."""
    groups = [({("s", at)}, set(dim)) for at, dim in enumerate(view.source)]
    for at, dim in enumerate(view.target):
        dims, atoms = {("t", at)}, set(dim)
        for other in [group for group in groups if group[1] & atoms]:
            groups.remove(other)
            dims, atoms = dims | other[0], atoms | other[1]
        groups.append((dims, atoms))
    return [_Dims(_of_side("s", dims), _of_side("t", dims), tuple(sorted(atoms))) for dims, atoms in groups]


def _of_side(which: str, dims: Iterable[tuple[str, int]]) -> tuple[int, ...]:
    return tuple(sorted(at for side, at in dims if side == which))


class _Factor:
    """What the pieces of some dims share, worked out once for each combination of pieces."""

    def __init__(self, operand: Layout, result: Layout, view: View, dims: _Dims) -> None:
        self._dims = dims
        taken = [(a.taken.start if a.taken else 0, a.source_size) for a in view.atoms]
        into = [(a.into.start if a.into else 0, a.target_size) for a in view.atoms]
        self._sizes = [view.atoms[at].size for at in dims.atoms]
        self._source = self._side(operand, view, view.source, dims.source, taken)
        self._target = self._side(result, view, view.target, dims.target, into)
        self._near = BoxIndex([(p, box) for p, boxes in self._source.items() for box in boxes], self._sizes)
        self._shared: dict[tuple[int, ...], Mapping[tuple[tuple[int, int], ...], tuple[StridedBox, ...]]] = {}

    def wanted(self, tile: Sequence[int]) -> Mapping[tuple[tuple[int, int], ...], tuple[StridedBox, ...]]:
        """The source's pieces that overlap a target tile's, as (dim, piece) pairs, with the boxes in common."""
        pieces = tuple(tile[at] for at in self._dims.target)
        if pieces not in self._shared:
            self._shared[pieces] = self._overlaps(self._target[pieces])
        return self._shared[pieces]

    def _overlaps(self, boxes: Sequence[SideBox]) -> dict[tuple[tuple[int, int], ...], tuple[StridedBox, ...]]:
        overlaps: dict[tuple[int, ...], list[StridedBox]] = {}
        for b in boxes:
            for pieces, a in self._near.candidates(b):
                common = common_box(a, b)
                if common is not None:
                    overlaps.setdefault(pieces, []).append(common)
        return {tuple(zip(self._dims.source, p, strict=True)): tuple(overlaps[p]) for p in sorted(overlaps)}

    def _side(
        self, layout: Layout, view: View, groups: Groups, dims: Sequence[int], parts: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, ...], list[SideBox]]:
        """The boxes of every combination of pieces of a side's dims."""
        number = {atom: n for n, atom in enumerate(self._dims.atoms)}
        each: list[list[list[SideBox]]] = []
        for at in dims:
            tile_stride = math.prod(layout.tile_shape[at + 1 :])
            windows = [(parts[atom][0], view.atoms[atom].size, parts[atom][1]) for atom in groups[at]]
            own = [number[atom] for atom in groups[at]]
            each.append([[self._spread(b, own, tile_stride) for b in p] for p in dim_boxes(layout.dims[at], windows)])
        combined: dict[tuple[int, ...], list[SideBox]] = {}
        for pieces in itertools.product(*(range(len(dim)) for dim in each)):
            lists = (dim[p] for dim, p in zip(each, pieces, strict=True))
            combined[pieces] = [self._product(boxes) for boxes in itertools.product(*lists)]
        return combined

    def _spread(self, box: SideBox, own: Sequence[int], tile_stride: int) -> SideBox:
        """A dim's box over all atoms of the factor: the other dims' atoms are whole here."""
        low, high, strides = [0] * len(self._sizes), list(self._sizes), [0] * len(self._sizes)
        for n, at in enumerate(own):
            low[at], high[at], strides[at] = box.low[n], box.high[n], box.strides[n] * tile_stride
        return SideBox(tuple(low), tuple(high), box.place * tile_stride, tuple(strides))

    def _product(self, boxes: Sequence[SideBox]) -> SideBox:
        """The box in which every dim has one of these: each restricts the atoms of its own dim."""
        low = tuple(max((box.low[at] for box in boxes), default=0) for at in range(len(self._sizes)))
        high = tuple(min((box.high[at] for box in boxes), default=size) for at, size in enumerate(self._sizes))
        strides = tuple(sum(box.strides[at] for box in boxes) for at in range(len(self._sizes)))
        return SideBox(low, high, sum(box.place for box in boxes), strides)


def _joined(boxes: Sequence[StridedBox]) -> StridedBox:
    """One box of the atoms of all factors."""
    return StridedBox(
        sum(box.src for box in boxes),
        sum(box.dst for box in boxes),
        tuple(extent for box in boxes for extent in box.extents),
        tuple(stride for box in boxes for stride in box.src_strides),
        tuple(stride for box in boxes for stride in box.dst_strides),
    )
