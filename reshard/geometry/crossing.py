"""An exchange between two sets of devices: who sends what to whom, and its figures.

    f32[6] on <x=4>, four holders of one tile, -> f32[6] on <d=3>, three other devices

    requests   6       6       6        18 elements are wanted of 4 holders, at best 5 of the busiest
    whole      0: 6    1: 6    2: 6     taken, since each receiver has to receive 6 anyway

    f32[{x}6] on <x=2, y=4> -> f32[{e}4] on <d=3, e=3>, where nobody has to receive more than 4

    requests   4       2              4       2              4              2        18 of the tile x = 0, shares of 5
    shares     0: 4    0: 1, 1: 1     1: 4    2: 2           2: 3, 3: 1     3: 2

Each device asks for what it lacks of every source tile, and the holders of a tile share the elements that are asked of
them evenly: no other choice of senders loads the busiest device less. Where whole requests, dealt evenly, load nobody
more than somebody must be loaded anyway, they stay whole: fewer messages. Otherwise each holder gets one contiguous
share of the queue of requests. A device holds one tile, so two devices exchange at most one message.

Even layouts that nest have closed forms, if no device is in both sets or no tile has two holders.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.dealing import Queue, tile_queues
from reshard.geometry.exchange_stats import (
    count_kept,
    count_lacked,
    count_overlaps,
    dim_shares,
    largest_sent,
    tile_elements,
)
from reshard.geometry.message import Tile, piece_columns, tile_of, tile_sizes, tiles
from reshard.geometry.overlap import fullest_piece
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import disjoint
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.whole import MOST, check_deadline


class Crossing(NamedTuple):
    """The figures of an exchange between two sets of devices, in elements, for the busiest device.

    `message` is the largest message; `cut` says whether requests are divided among holders.
    """

    received: int
    sent: int
    rounds: int
    message: int
    cut: bool


@lru_cache(maxsize=1024)
def crossing_figures(operand: Layout, result: Layout) -> Crossing:
    """The figures of the exchange.

    >>> source = Layout.parse("f32[{x}8]", Mesh(x=2))
    >>> crossing_figures(source, Layout.parse("f32[16]", Mesh({"d": 3}, device_ids=[5, 6, 7])))
    Crossing(received=16, sent=24, rounds=3, message=8, cut=False)
    """
    if 0 in operand.shape:
        return Crossing(0, 0, 0, 0, False)
    if disjoint(operand.mesh, result.mesh):
        refinement = _refine_pairs(operand, result)
        if refinement is not None and refinement.exact:
            return _even_figures(operand, result, refinement)
    return (
        _figures_of_single_holders(operand, result)
        if _count_copies(operand) == 1
        else _figures_of_shares(operand, result)
    )


@lru_cache(maxsize=1024)
def least_received_across(source: Layout, target: Layout) -> int:
    """The elements that the busiest device of the target lacks.

    >>> least_received_across(Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh(x=3)))
    16
    """
    if disjoint(source.mesh, target.mesh):
        return _fullest_tile(target)
    return max(count_lacked(source, target).values(), default=0)


@lru_cache(maxsize=1024)
def fewest_through(source: Layout, target: Layout) -> int:
    """Elements that the busiest device sends or receives in every move: what a tile's holders must send at least once.

    An element of a tile must leave its holders if some device lacks it. The holders share this at best evenly.

    >>> fewest_through(Layout.parse("f32[{x}12]", Mesh(x=1)), Layout.parse("f32[{d}4]", Mesh(d=3)))
    8
    """
    received = least_received_across(source, target)
    if disjoint(source.mesh, target.mesh):
        return max(received, -(-_fullest_tile(source) // _count_copies(source)))
    return max(received, *(-(-elements // len(holders)) for holders, elements in list_leaving(source, target)))


def list_leaving(source: Layout, target: Layout) -> Iterator[tuple[Sequence[int], int]]:
    """For each tile of the source, its holders, and the elements of it that some device of the target lacks.

    >>> list(list_leaving(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[4]", Mesh(d=1))))
    [((0,), 0), ((1,), 2)]
    """
    stays = _count_staying(source, target)
    if _count_copies(source) == 1:
        for device, size in zip(source.mesh.devices, tile_elements(source), strict=True):
            yield (device,), size - stays.get(device, 0)
        return
    size_of = tile_sizes(source)
    for tile, devices in holders_of(source).items():
        yield devices, size_of(tile) - sum(stays.get(device, 0) for device in devices)


def _count_staying(source: Layout, target: Layout) -> Mapping[int, int]:
    """By a holder of a source tile, elements of it that no device lacks: all that need them hold that tile."""
    own = count_kept(source, target)
    if _count_copies(target) == 1:
        return own
    alike: dict[int, int] = {}
    for devices in holders_of(target).values():
        if all(device in own for device in devices) and len({tile_of(source, device) for device in devices}) == 1:
            alike[devices[0]] = own[devices[0]]
    return alike


def count_sent_across(operand: Layout, result: Layout) -> Mapping[int, int]:
    """The elements that each device sends.

    >>> source, target = Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh(x=3))
    >>> sorted(count_sent_across(source, target).items())
    [(0, 16), (1, 16)]
    """
    if _count_copies(operand) > 1:
        return _share_out(operand, result).sent
    own, copies = count_kept(operand, result), _count_copies(result)
    each = zip(operand.mesh.devices, tile_elements(operand), strict=True)
    return {device: copies * size - own.get(device, 0) for device, size in each}


# ---- figures ---------------------------------------------------------------------------------------


def _refine_pairs(operand: Layout, result: Layout) -> Refinement | None:
    """The common refinement of the numerals, on a mesh of all pairs of devices; holders of the two never coincide."""
    size = operand.mesh.size * result.mesh.size
    if size > MOST:
        return None
    axes = {
        f"{name}{at}": n
        for name, mesh in (("s", operand.mesh), ("t", result.mesh))
        for at, n in enumerate(mesh.axes.values())
    }
    pairs = Mesh(axes)
    return refine(_rename_axes(operand, pairs, "s"), _rename_axes(result, pairs, "t"))


def _rename_axes(layout: Layout, mesh: Mesh, name: str) -> Layout:
    names = {axis: f"{name}{at}" for at, axis in enumerate(layout.mesh.axes)}

    def renamed(digit: Digit) -> Digit:
        axis = digit.axis
        return digit if axis is None else Digit(digit.radix, SubAxis(names[axis.axis], axis.pre, axis.size))

    return Layout(mesh, tuple(Dim(tuple(map(renamed, dim.digits)), dim.size) for dim in layout.dims), layout.dtype)


def _even_figures(operand: Layout, result: Layout, r: Refinement) -> Crossing:
    """Every tile has as many holders and as many requests, all of one size."""
    # How many devices ask for a part of each source tile, where all tiles are alike.
    demand, received = (math.prod(digit.radix for digit in r.sliced) * _count_copies(result)), r.pieces * r.common
    queue = Queue(range(demand), range(0, (demand + 1) * r.common, r.common))
    holders = _count_copies(operand)
    shares = queue.figures(holders, max(received, -(-demand * r.common // holders)))
    rounds = max(*shares.sends, r.pieces * (1 + max(shares.extra.values(), default=0)))
    return Crossing(received, max(shares.sent), rounds, shares.message, bool(shares.extra))


def _figures_of_single_holders(operand: Layout, result: Layout) -> Crossing:
    """Each tile has one holder, who sends all that is wanted but what it needs itself."""
    dims = [count_overlaps(s, t) for s, t in zip(operand.dims, result.dims, strict=True)]
    copies, received = _count_copies(result), least_received_across(operand, result)
    largest = math.prod(dim.largest for dim in dims)
    if disjoint(operand.mesh, result.mesh):
        sends = copies * math.prod(max(dim.of_source) for dim in dims)
        rounds = max(sends, math.prod(max(dim.of_target) for dim in dims))
        return Crossing(received, copies * _fullest_tile(operand), rounds, largest, False)
    own = count_kept(operand, result)
    sends = [copies * count for count in _multiply_by_piece(operand, [dim.of_source for dim in dims])]
    receives = _multiply_by_piece(result, [dim.of_target for dim in dims])
    for counts, mesh in (sends, operand.mesh), (receives, result.mesh):
        for device in own:
            counts[mesh.position(device)] -= 1
    message = largest if copies > 1 else _largest_crossing_message(operand, result)
    sent = max(count_sent_across(operand, result).values())
    return Crossing(received, sent, max(*sends, *receives), message, False)


def _figures_of_shares(operand: Layout, result: Layout) -> Crossing:
    """Holders share the requests for each tile."""
    shares, own = _share_out(operand, result), count_kept(operand, result)
    dims = zip(operand.dims, result.dims, strict=True)
    receives = _multiply_by_piece(result, [count_overlaps(s, t).of_target for s, t in dims])
    for at, device in enumerate(result.mesh.devices):
        receives[at] += shares.extra[at] - (device in own)
    received, sent = least_received_across(operand, result), max(shares.sent.values())
    return Crossing(received, sent, max(shares.sends, *receives), shares.message, bool(shares.extra))


class _SharedOut(NamedTuple):
    """The elements that each device sends, the most messages that one sends, the largest message, and by position, the
    messages that devices receive because their requests are cut."""

    sent: Mapping[int, int]
    sends: int
    message: int
    extra: Counter[int]


@lru_cache(maxsize=64)
def _share_out(operand: Layout, result: Layout) -> _SharedOut:
    """What the holders of all tiles send, queue by queue."""
    queues, limit = tile_queues(operand, result), pull_limit(operand, result)
    own, place = count_kept(operand, result), result.mesh.position
    sent, extra, sends, message = dict[int, int](), Counter[int](), 0, 0
    for tile, devices in holders_of(operand).items():
        check_deadline()
        queue = queues.of(tile).without(place(device) for device in devices if device in own)
        figures = queue.figures(len(devices), limit)
        sent.update(zip(devices, figures.sent, strict=True))
        extra.update(figures.extra)
        sends, message = max(sends, *figures.sends), max(message, figures.message)
    return _SharedOut(sent, sends, message, extra)


def _multiply_by_piece(layout: Layout, by_piece: Sequence[Sequence[int]]) -> list[int]:
    """For each position, the product of what its pieces have."""
    counts = [1] * layout.mesh.size
    for each, column in zip(by_piece, piece_columns(layout), strict=True):
        counts = [count * each[number] for count, number in zip(counts, column, strict=True)]
    return counts


def _largest_crossing_message(operand: Layout, result: Layout) -> int:
    """The most elements that a target tile, wanted by one device, shares with a source tile that this does not hold."""
    dims = [dim_shares(s, t) for s, t in zip(operand.dims, result.dims, strict=True)]
    here, most = _set_of_devices(operand.mesh), 0
    for device, tile in tiles(result).items():
        wanted = tuple(dim[q] for dim, q in zip(dims, tile, strict=True))
        largest = math.prod(dim.largest for dim in wanted)
        if largest > most:
            most = max(most, largest_sent(tile_of(operand, device), wanted) if device in here else largest)
    return most


@lru_cache(maxsize=256)
def pull_limit(operand: Layout, result: Layout) -> int:
    """Elements that the busiest device sends or receives at least if every device asks holders for all that it lacks.

    >>> pull_limit(Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh({"d": 3}, device_ids=[5, 6, 7])))
    24
    """
    copies, holders, received = _count_copies(result), _count_copies(operand), least_received_across(operand, result)
    if disjoint(operand.mesh, result.mesh):
        return max(received, -(-copies * _fullest_tile(operand) // holders))
    own, size_of = count_kept(operand, result), tile_sizes(operand)
    wanted = (
        copies * size_of(tile) - sum(own.get(device, 0) for device in devices)
        for tile, devices in holders_of(operand).items()
    )
    return max(received, *(-(-count // holders) for count in wanted))


@lru_cache(maxsize=64)
def holders_of(layout: Layout) -> Mapping[Tile, list[int]]:
    """The devices that hold each tile."""
    holders: dict[Tile, list[int]] = {}
    for device, tile in tiles(layout).items():
        holders.setdefault(tile, []).append(device)
    return holders


@lru_cache(maxsize=64)
def _set_of_devices(mesh: Mesh) -> frozenset[int]:
    return frozenset(mesh.devices)


def _count_copies(layout: Layout) -> int:
    """How many devices have the same tile."""
    return layout.mesh.size // math.prod(axis.size for axis in layout.held)


def _fullest_tile(layout: Layout) -> int:
    """The elements of the fullest tile."""
    return math.prod(fullest_piece(dim) for dim in layout.dims)
