"""The elements of a dim that two tiles share, as blocks of local indices.

    {x}3/10 against {y}5, on <x=4, y=2>

    source piece            0: 0-2   1: 3-5        2: 6-8   3: 9
    target piece            0: 0-4            1: 5-9
    shares of target 0      piece 0: 0-2, piece 1: 3-4
    shares of target 1      piece 1: 5, piece 2: 6-8, piece 3: 9

Every element lies in one piece of the source and one of the target. Both numerals are walked down together, digit by
digit: a held digit splits a range of global indices into ranges of different pieces. Two local digits repeat what is
below them, so together they repeat themselves after the least common multiple of what one value of each covers:

    4000{x}5 against 5000{y}4, on <x=2, y=2>     periods of 10 and of 8 elements: after 40, all is as it was

One period is walked, and its runs are repeated. The time grows with the runs in a period, not with the array. Where one
piece meets thousands that lie alike in it, the first of these is walked (`Alike`).

Pieces of any size have no digits to walk down: the runs of both sides are merged in the order of the indices
(`Meeting`), in time that grows with the runs that meet.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from reshard.errors import LayoutError
from reshard.geometry.blocks import Axis, Block, Factor, Product, scale_blocks
from reshard.types.dims import tabulate_pieces
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.pieces import Pieces, loaded_numpy

# What two pieces share of one dim are blocks of local indices whose last axis is a run; the axes before repeat it.
#
#     4{x}3 against 2{x}6, on <x=2>     pieces 0 share 0-2 and 12-14: two runs of 3
#
#     source tile   0 1 2 6 7 8 12 13 14 18 19 20       local indices 0-2 and 6-8
#     target tile   0 1 2 3 4 5 12 13 14 15 16 17       local indices 0-2 and 6-8
#     block         Block(src=0, dst=0, axes=(Axis(2, 6, 6), Axis(3, 1, 1)))
#
# Numerals repeat themselves, so a million runs are a few blocks, and what is computed from these takes no longer for a
# long array than for a short one.


@lru_cache(maxsize=4096)
def _run_axes(length: int) -> tuple[Axis, ...]:
    return (Axis(length, 1, 1),)  # Blocks that are alike share their axes, which are most of what a message takes.


def list_runs(blocks: Iterable[Block]) -> list[Block]:
    """The runs of some blocks of one dim, one by one, in the order of both tiles.

    >>> [(run.src, run.dst) for run in list_runs([Block(0, 0, (Axis(2, 100, 10), Axis(3, 5, 2), Axis(2, 1, 1)))])]
    [(0, 0), (5, 2), (10, 4), (100, 10), (105, 12), (110, 14)]
    """
    runs: list[Block] = []
    for block in blocks:
        starts = [(block.src, block.dst)]
        for times, src, dst in block.axes[:-1]:
            starts = [(at + n * src, to + n * dst) for at, to in starts for n in range(times)]
        runs += [Block(at, to, block.axes[-1:]) for at, to in starts]
    return sorted(runs)


def append_block(blocks: list[Block], more: Block) -> None:
    """Adds a block that lies behind all others; its first run is merged with their last if it continues that.

    >>> blocks = [Block(0, 0, (Axis(3, 5, 5), Axis(2, 1, 1)))]
    >>> append_block(blocks, Block(12, 12, (Axis(1, 1, 1),)))
    >>> [(each.src, each.extents) for each in blocks]
    [(0, (2, 2)), (10, (3,))]
    """
    last = _last_run(blocks[-1]) if blocks else None
    if last is None or not _continues(last, more.src, more.dst):
        blocks.append(more)
        return
    earlier = _without_last(blocks.pop())
    joint = Block(last.src, last.dst, _run_axes(last.axes[0].extent + more.axes[-1].extent))
    blocks += [*earlier, joint, *_without_first(more)]


def repeat_blocks(blocks: list[Block], repeat: Axis) -> list[Block]:
    """The blocks of one period, repeated over many; the first run comes first in them, and the last run last.

    Where the last run of a period continues in the next, the two are merged:

    >>> period = [Block(0, 0, (Axis(1, 1, 1),)), Block(3, 3, (Axis(2, 1, 1),))]
    >>> [(each.src, each.extents) for each in repeat_blocks(period, Axis(4, 5, 5))]
    [(0, (1,)), (3, (3, 3)), (18, (2,))]
    """
    times, src, dst = repeat
    first, last = blocks[0], _last_run(blocks[-1])
    if not _continues(last, first.src + src, first.dst + dst):
        return [_repeat_block(each, repeat) for each in blocks]
    length = first.axes[-1].extent
    if len(blocks) == len(first.axes) == 1:
        return [Block(first.src, first.dst, _run_axes(length * times))]
    # The first run and the last of all stay alone; in between, the last of a period is joined to the next one's first.
    inner = [*_without_first(first), *blocks[1:]]
    inner[-1:] = _without_last(inner[-1])
    joint = Block(last.src, last.dst, _run_axes(last.axes[0].extent + length))
    start = Block(first.src, first.dst, _run_axes(length))
    end = Block(last.src + (times - 1) * src, last.dst + (times - 1) * dst, last.axes)
    between = [_repeat_block(each, repeat) for each in inner]
    return [start, *between, _repeat_block(joint, Axis(times - 1, src, dst)), end]


def _repeat_block(block: Block, repeat: Axis) -> Block:
    """A block repeated; two repeats that are one are merged."""
    times, src, dst = repeat
    if times == 1:
        return block
    axes = block.axes
    if len(axes) > 1 and (axes[0].extent * axes[0].src, axes[0].extent * axes[0].dst) == (src, dst):
        return Block(block.src, block.dst, (Axis(axes[0].extent * times, *axes[0][1:]), *axes[1:]))
    return Block(block.src, block.dst, (repeat, *axes))


def _last_run(block: Block) -> Block:
    src, dst, axes = block
    for times, step, stride in axes[:-1]:
        src, dst = src + (times - 1) * step, dst + (times - 1) * stride
    return Block(src, dst, axes[-1:])


def _continues(run: Block, src: int, dst: int) -> bool:
    """Whether what starts at these local indices comes right after a run in both tiles."""
    length = run.axes[0].extent
    return (run.src + length, run.dst + length) == (src, dst)


def _without_first(block: Block) -> list[Block]:
    """All runs of a block but the first one, ascending."""
    rest: list[Block] = []
    for at, (times, src, dst) in enumerate(block.axes[:-1]):
        later = Block(block.src + src, block.dst + dst, block.axes[at + 1 :])
        rest.insert(0, _repeat_block(later, Axis(times - 1, src, dst)))
    return rest


def _without_last(block: Block) -> list[Block]:
    """All runs of a block but the last one, ascending."""
    rest: list[Block] = []
    first_src, first_dst = block.src, block.dst
    for at, (times, src, dst) in enumerate(block.axes[:-1]):
        earlier = Block(first_src, first_dst, block.axes[at + 1 :])
        rest.append(_repeat_block(earlier, Axis(times - 1, src, dst)))
        first_src, first_dst = first_src + (times - 1) * src, first_dst + (times - 1) * dst
    return rest


Shares = dict[int, tuple[Block, ...]]
"""What one target piece shares with each source piece that it overlaps."""


@lru_cache(maxsize=256)
def shares(source: Dim, target: Dim) -> tuple[Shares, ...]:
    """For each piece of the target, the source pieces that it overlaps, with the blocks in common.

    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> {p: [(each.src, each.dst, each.elements) for each in blocks] for p, blocks in shares(before, after)[1].items()}
    {0: [(2, 0, 1)], 1: [(0, 1, 1)]}
    """
    pieces = math.prod(radix for radix, axis in target.digits if axis is not None)
    by_target: tuple[Shares, ...] = tuple({} for _ in range(pieces))
    for (p, q, _), runs in _walk_common(source, target, None, None).items():
        by_target[q][p] = tuple(runs)
    return by_target


@lru_cache(maxsize=1024)
def piece_runs(dim: Dim) -> Sequence[Sequence[tuple[int, int, int]]]:
    """For each piece of a dim, its runs as (index in the array, local index, length), in order.

    >>> from reshard.types.mesh import Mesh
    >>> piece_runs(Layout.parse("f32[2{x}3/11]", Mesh(x=2)).dims[0])
    (((0, 0, 3), (6, 3, 3)), ((3, 0, 3), (9, 3, 2)))
    """
    whole = Dim((Digit(dim.size, None),), dim.size)
    each = (list_runs(by.get(0, ())) for by in shares(whole, dim))
    return tuple(tuple((run.src, run.dst, run.axes[-1].extent) for run in runs) for runs in each)


class Repeat(NamedTuple):
    """`times` pieces whose numbers are `number` apart, and what one piece shares with them `src` and `dst` apart."""

    times: int
    number: int
    src: int
    dst: int


class Alike(NamedTuple):
    """Pieces that lie alike in the tile of one piece: the number of the first, what it shares, and where the others
    are, outermost `repeats` first.
    """

    number: int
    repeats: tuple[Repeat, ...]
    blocks: Factor


@lru_cache(maxsize=64)
def list_alike(source: Dim, target: Dim, number: int, *, given: bool) -> tuple[Alike, ...]:
    """What one piece of the target shares with pieces of the source, each of which is in one of these; or, `given`, one
    piece of the source with those of the target.

    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=4)).dims for text in ("f32[{x}2]", "f32[8]"))
    >>> list_alike(before, after, 0, given=False)
    (Alike(number=0, repeats=(Repeat(times=4, number=1, src=0, dst=2),), blocks=(Block(src=0, dst=0, axes=(Axis(extent=2, src=1, dst=1),)),)),)
    """  # noqa: E501
    one, other = (number, None) if given else (None, number)
    alike: list[Alike] = []
    for joins in (True, False):
        common = _walk_common(source, target, one, other, joins)
        alike = [Alike(q if given else p, repeats, tuple(runs)) for (p, q, repeats), runs in common.items()]
        listed = [piece for each in alike for piece, _, _ in list_repeated(each)] if len(alike) > 1 else []
        # Heads and tails of periods may reach pieces that are in others, too: then each is listed by itself.
        if len(set(listed)) == len(listed):
            break
    return tuple(alike)


def list_repeated(alike: Alike) -> list[tuple[int, int, int]]:
    """The pieces that lie alike: the number of each, and how far from the first one's its part is on both sides."""
    listed = [(alike.number, 0, 0)]
    for count, number, src, dst in alike.repeats:
        listed = [(p + n * number, at + n * src, to + n * dst) for p, at, to in listed for n in range(count)]
    return listed


def _list_shares(source: Dim, target: Dim, number: int, given: bool) -> Shares:
    alike = list_alike(source, target, number, given=given)
    listed = ((piece, at, to, each.blocks) for each in alike for piece, at, to in list_repeated(each))
    return {piece: tuple([Block(b.src + at, b.dst + to, b.axes) for b in blocks]) for piece, at, to, blocks in listed}


@lru_cache(maxsize=64)
def shares_of(source: Dim, target: Dim, number: int) -> Shares:
    """`shares(source, target)[number]`: what one piece of the target shares, without working out the others."""
    return _list_shares(source, target, number, given=False)


@lru_cache(maxsize=64)
def shares_from(source: Dim, target: Dim, number: int) -> Shares:
    """What one piece of the source shares with each piece of the target, without working out the others.

    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> {q: [(each.src, each.dst, each.elements) for each in both] for q, both in shares_from(before, after, 1).items()}
    {1: [(0, 1, 1)], 2: [(1, 0, 2)]}
    """
    return _list_shares(source, target, number, given=True)


class SharedDims(NamedTuple):
    """Some dims of both layouts, by number, and what a target piece of these shares with each source piece of them."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    wanted: Callable[[tuple[int, ...]], Mapping[tuple[int, ...], Factor]]


def list_owners(shared: Sequence[SharedDims], tile: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Product]]:
    """The source tiles that a target tile takes elements from, with what it shares with each."""
    dims = [dim for each in shared for dim in each.source]
    in_order = [dims.index(dim) for dim in range(len(dims))]
    wanted = [each.wanted(tuple([tile[at] for at in each.target])).items() for each in shared]
    for owners in itertools.product(*wanted):
        numbers = [number for pieces, _ in owners for number in pieces]
        yield tuple([numbers[at] for at in in_order]), tuple([factor for _, factor in owners])


def shared_dims(operand: Layout, result: Layout) -> list[SharedDims]:
    """What the tiles of two layouts of one array share, dim by dim."""
    shared: list[SharedDims] = []
    for at, (s, t) in enumerate(zip(operand.dims, result.dims, strict=True)):
        steps = math.prod(operand.tile_shape[at + 1 :]), math.prod(result.tile_shape[at + 1 :])
        shared.append(SharedDims((at,), (at,), _scale_shares(s, t, *steps).__getitem__))
    return shared


@lru_cache(maxsize=256)
def _scale_shares(
    source: Dim, target: Dim, src: int, dst: int
) -> Mapping[tuple[int, ...], Mapping[tuple[int, ...], Factor]]:
    """`shares` in flat tiles, in which neighbours along the dim are `src` and `dst` apart."""
    return {
        (q,): {(p,): scale_blocks(blocks, src, dst) for p, blocks in by.items()}
        for q, by in enumerate(shares(source, target))
    }


def _walk_common(source: Dim, target: Dim, p: int | None, q: int | None, joins: bool = False) -> _Common:
    """What the pieces of source and target share; only those of source piece `p`, or of target piece `q`, if given.

    If it `joins`, pieces that lie alike are one entry.
    """
    common: _Common = {}
    if source.pieces is not None or target.pieces is not None:
        if (p is None) != (q is None) and (found := _find_meetings(source, target, p, q)) is not None:
            return found
        meetings: dict[tuple[int, int], list[list[int]]] = {}
        for at, to, src, dst, length in _list_meetings(source, target, p, q):
            runs = meetings.setdefault((at, to), [])
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (src, dst):
                runs[-1][2] += length
            else:
                runs.append([src, dst, length])
        for (at, to), runs in meetings.items():
            common[at, to, ()] = [Block(src, dst, _run_axes(length)) for src, dst, length in runs]
        return common
    _NumeralWalk(dim_levels(source), dim_levels(target), p, q, joins).down(_TOP, _TOP, 0, source.size, common)
    return common


# Pieces of any size.
#
#     {x}(3,5,0,2) against {y}5      index            0-2      3-4      5-7      8-9
#                                    source piece     0: 0-2   1: 0-1   1: 2-4   3: 0-1
#                                    target piece     0: 0-2   0: 3-4   1: 0-2   1: 3-4
#
# A numeral becomes a table, too: where the other side has no digits, nothing repeats itself.


class Meeting(NamedTuple):
    """Neighbouring indices of a dim that one piece of each side has, with where they start in both tiles."""

    source: int
    target: int
    src: int
    dst: int
    length: int


def _list_meetings(source: Dim, target: Dim, p: int | None, q: int | None) -> Iterator[Meeting]:
    """The runs of both sides that meet, in the order of the indices; only those of source piece `p`, or target `q`."""
    one, other = tabulate_pieces(source), tabulate_pieces(target)
    if p is not None or q is not None:
        # The few runs of the given piece are looked up among those of the other side.
        mine, others = (one, other) if p is not None else (other, one)
        number = cast("int", q if p is None else p)
        for start, local, length in mine.runs_of(number):
            at = bisect_right(others.starts, start) - 1
            end = start + length
            while at < len(others.starts) and (begin := others.starts[at]) < end:
                low, high = max(start, begin), min(end, begin + others.lengths[at])
                here, there, piece = local + low - start, others.locals[at] + low - begin, others.numbers[at]
                if p is None:
                    yield Meeting(piece, number, there, here, high - low)
                elif q is None or piece == q:
                    yield Meeting(number, piece, here, there, high - low)
                at += 1
        return
    runs = [zip(of.numbers, of.locals, of.lengths, strict=True) for of in (one, other)]
    a, b, src, dst, left, rest = 0, 0, 0, 0, 0, 0
    while True:
        if not left:
            if (run := next(runs[0], None)) is None:
                return
            a, src, left = run
        if not rest:
            b, dst, rest = next(runs[1])
        length = min(left, rest)
        yield Meeting(a, b, src, dst, length)
        src, dst, left, rest = src + length, dst + length, left - length, rest - length


_MANY_RUNS = 256  # Runs of a piece from which numpy's calls take less than a step for each.


def _find_meetings(source: Dim, target: Dim, p: int | None, q: int | None) -> _Common | None:
    """What one piece shares with those of the other side, by numpy; None for a piece of few runs."""
    one, other = tabulate_pieces(source), tabulate_pieces(target)
    mine, others, number = (one, other, p) if p is not None else (other, one, q)
    runs = mine.list_runs(cast("int", number))
    if len(runs) < _MANY_RUNS or (np := loaded_numpy(len(others.lengths))) is None:
        return None
    starts, locals_, lengths = (np.asarray(column)[runs] for column in (mine.starts, mine.locals, mine.lengths))
    begins, numbers = np.asarray(others.starts), np.asarray(others.numbers)
    first = np.searchsorted(begins, starts, "right") - 1
    counts = np.searchsorted(begins, starts + lengths, "left") - first
    # Each run as often as it meets one of the other side, and which that is.
    at = np.repeat(np.arange(len(runs)), counts)
    to = np.arange(len(at)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    low = np.maximum(starts[at], begins[to])
    length = np.minimum(starts[at] + lengths[at], begins[to] + np.asarray(others.lengths)[to]) - low
    here, there = locals_[at] + low - starts[at], np.asarray(others.locals)[to] + low - begins[to]
    pieces, firsts, piece = np.unique(numbers[to], return_index=True, return_inverse=True)
    order = np.argsort(piece, kind="stable")
    here, there, length, piece = here[order], there[order], length[order], piece[order]
    goes_on = np.diff(piece, prepend=-1) == 0
    for column in (here, there):
        goes_on[1:] &= column[:-1] + length[:-1] == column[1:]
    begun = np.flatnonzero(~goes_on)
    length = np.add.reduceat(length, begun)
    ends = (here, there) if p is not None else (there, here)
    columns = [column[begun].tolist() for column in ends]
    blocks = [Block(src, dst, _run_axes(run)) for src, dst, run in zip(*columns, length.tolist(), strict=True)]
    cuts = np.searchsorted(piece[begun], np.arange(len(pieces) + 1)).tolist()
    common: _Common = {}
    for each in np.argsort(firsts).tolist():
        met = int(pieces[each])
        pair = (p, met) if p is not None else (met, cast("int", q))
        common[*pair, ()] = blocks[cuts[each] : cuts[each + 1]]
    return common


def _list_windows(one: Pieces, other: Pieces, np: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """All runs that meet, as arrays: the run of each side, the first index, and the length; some windows of the dim."""
    starts, others = np.asarray(one.starts), np.asarray(other.starts)
    dense = starts if len(starts) > len(others) else others
    for low, high in itertools.pairwise((*dense[::_WINDOW].tolist(), one.size)):
        parts: list[Any] = []
        firsts: list[int] = []
        for of in (starts, others):
            first, last = int(np.searchsorted(of, low, "right")) - 1, int(np.searchsorted(of, high))
            firsts.append(first)
            parts.append(np.maximum(of[first:last], low))
        edges = np.concatenate(parts)
        order = np.argsort(edges, kind="stable")  # Which merges two ascending lists.
        edges, of_one = edges[order], order < len(parts[0])
        lengths = np.diff(edges, append=high)
        real = lengths > 0  # Where both sides start at one index, the later of the two edges.
        a, b = firsts[0] + np.cumsum(of_one) - 1, firsts[1] + np.cumsum(~of_one) - 1
        yield a[real], b[real], edges[real], lengths[real]


_WINDOW = 1 << 19
"""Runs of a table that are merged with another's at once, so that memory stays bounded."""


class MeetingPieces(NamedTuple):
    """The pairs of pieces that share indices, in columns: ascending by target, then by source; and how many indices."""

    source: Any
    target: Any
    elements: Any


@lru_cache(maxsize=16)
def tally_meetings(source: Dim, target: Dim) -> MeetingPieces | None:
    """What pieces of two dims share, as numpy's arrays; None for dims of digits, short tables and without numpy.

    >>> from reshard.types.mesh import Mesh
    >>> tally_meetings(*(Layout.parse(text, Mesh(x=4)).dims[0] for text in ("f32[{x}2]", "f32[8]")))
    """
    if source.pieces is None and target.pieces is None:
        return None
    one, other = tabulate_pieces(source), tabulate_pieces(target)
    if (np := loaded_numpy(len(one.lengths) + len(other.lengths))) is None:
        return None
    cells, counts = one.count * other.count, None
    keys, elements = [np.empty(0, "q")], [np.empty(0, "q")]
    for a, b, _, lengths in _list_windows(one, other, np):
        key = np.asarray(other.numbers)[b] * one.count + np.asarray(one.numbers)[a]
        if cells <= 4 * _WINDOW and one.size < 1 << 53:  # It adds up doubles.
            more = np.bincount(key, lengths, cells)
            counts = more if counts is None else counts + more
        else:
            order = np.argsort(key, kind="stable")
            first = np.flatnonzero(np.diff(key[order], prepend=-1))
            keys.append(key[order][first])
            elements.append(np.add.reduceat(lengths[order], first))
    if counts is not None:
        pairs = np.flatnonzero(counts)
        return MeetingPieces(pairs % one.count, pairs // one.count, counts[pairs].astype("q"))
    pairs, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    total = np.zeros(len(pairs), "q")
    np.add.at(total, inverse, np.concatenate(elements))
    return MeetingPieces(pairs % one.count, pairs // one.count, total)


@lru_cache(maxsize=64)
def _count_meetings(source: Dim, target: Dim) -> tuple[dict[int, int], ...]:
    """For each piece of the target, how many indices it shares with source pieces."""
    if (pairs := tally_meetings(source, target)) is not None:
        ends = pairs.target.searchsorted(range(tabulate_pieces(target).count + 1)).tolist()
        both = pairs.source.tolist(), pairs.elements.tolist()
        return tuple(dict(zip(*(of[low:high] for of in both), strict=True)) for low, high in itertools.pairwise(ends))
    counts: tuple[dict[int, int], ...] = tuple({} for _ in range(tabulate_pieces(target).count))
    for p, q, _, _, length in _list_meetings(source, target, None, None):
        counts[q][p] = counts[q].get(p, 0) + length
    return counts


@lru_cache(maxsize=64)
def _find_shortest_meeting(source: Dim, target: Dim) -> int:
    """The fewest indices that are neighbours in both tiles of two pieces."""
    shortest = source.size
    # Where the last run that two pieces share ends in their tiles, and its length: the next one may continue it.
    ends: dict[tuple[int, int], tuple[int, int, int]] = {}
    for p, q, src, dst, length in _list_meetings(source, target, None, None):
        end, stop, run = ends.get((p, q), (src, dst, 0))
        if (end, stop) != (src, dst):
            if run == 1:
                return 1
            shortest, run = min(shortest, run), 0
        ends[p, q] = src + length, dst + length, run + length
    return min([shortest, *(run for _, _, run in ends.values())])


def contiguous_extent(dim: Dim) -> int | None:
    """How many indices a piece of a dim covers if all of its pieces are contiguous and as long, else None."""
    if dim.pieces is not None:
        return None
    above = dim_levels(dim)[:-1]
    return None if any(not level.held for level in above) else dim_levels(dim)[-1].radix


def fullest_piece(dim: Dim) -> int:
    """The most elements that a piece of a dim has."""
    return max(piece_sizes(dim))


@lru_cache(maxsize=256)
def piece_sizes(dim: Dim) -> Mapping[int, int]:
    """How many pieces of a dim have how many elements, from the digits: a million pieces take no longer than two.

    >>> from reshard.types.mesh import Mesh
    >>> dict(piece_sizes(Layout.parse("f32[{x}3/2999990]", Mesh(x=1_000_000)).dims[0]))
    {3: 999996, 2: 1, 0: 3}
    """
    return Counter(dim.pieces.sizes) if dim.pieces is not None else _count_sizes(dim_levels(dim), dim.size)


def _count_sizes(levels: Sequence[Level], left: int) -> Counter[int]:
    """How many pieces of the numeral of these levels have how many of its first `left` indices.

    At most one value of a digit is cut: those before it are full, those after it are empty.
    """
    pieces = math.prod(level.radix for level in levels if level.held)
    if not levels or left == 0:
        return Counter({min(left, 1): pieces})
    level, below = levels[0], levels[1:]
    full = min(level.radix, left // level.block)
    rest = left - full * level.block if full < level.radix else 0
    if not level.held:
        return Counter({full * level.share + size: count for size, count in _count_sizes(below, rest).items()})
    tile = math.prod(each.radix for each in below if not each.held)
    each = pieces // level.radix
    sizes = Counter({tile: full * each})
    if full < level.radix:
        sizes += _count_sizes(below, rest)
        sizes[0] += (level.radix - full - 1) * each
    return +sizes


@lru_cache(maxsize=256)
def piece_extents(dim: Dim) -> Sequence[int]:
    """How many elements each piece of a dim has, by its number."""
    return dim.pieces.sizes if dim.pieces is not None else _list_extents(dim_levels(dim), dim.size)


def _list_extents(levels: Sequence[Level], left: int) -> list[int]:
    """How many of its first `left` indices each piece of the numeral of these levels has; see `_count_sizes`."""
    if not levels or left == 0:
        return [min(left, 1)] * math.prod(level.radix for level in levels if level.held)
    level, below = levels[0], levels[1:]
    full = min(level.radix, left // level.block)
    rest = _list_extents(below, left - full * level.block if full < level.radix else 0)
    if not level.held:
        return [full * level.share + extent for extent in rest]
    tile = math.prod(each.radix for each in below if not each.held)
    after = level.radix - full - 1
    return [tile] * (full * len(rest)) + (rest + [0] * (after * len(rest)) if full < level.radix else [])


class Level(NamedTuple):
    """A digit, or neighbouring held digits as one. A value of it covers `block` global indices.

    `share` is what the value is worth in the number of the piece if the digit is held, else in local indices.
    """

    radix: int
    held: bool
    block: int
    share: int


class _Node(NamedTuple):
    """Where a walk stands: values are chosen above `level`; the rest starts at global index `start`, in tile `piece`
    at index `local`.
    """

    level: int
    start: int
    piece: int
    local: int


_TOP = _Node(0, 0, 0, 0)

_Common = dict[tuple[int, int, tuple[Repeat, ...]], list[Block]]
"""What a source and a target piece share, ascending, and so do those of the repeats: each side's that is not given."""


@lru_cache(maxsize=1024)
def dim_levels(dim: Dim) -> tuple[Level, ...]:
    """The digits of a dim, major first; the last level is local and its values are single elements."""
    if dim.pieces is not None:
        raise LayoutError(f"a dim in pieces {dim.pieces:} is no numeral, whose digits could be read one by one")
    levels = [Level(1, False, 1, 1)]
    block, pieces, local = 1, 1, 1
    for radix, axis in reversed(dim.digits):
        if axis is None:
            level = Level(radix, False, block, local)
            local *= radix
        else:
            level = Level(radix, True, block, pieces)
            pieces *= radix
        block *= radix
        if radix == 1:
            continue
        if level.held == levels[-1].held:
            below = levels.pop()
            level = Level(below.radix * radix, below.held, below.block, below.share)
        levels.append(level)
    return tuple(reversed(levels))


class _NumeralWalk:
    """Both numerals, walked down together; only to source piece `p`, or to target piece `q`, if given."""

    def __init__(
        self, source: Sequence[Level], target: Sequence[Level], p: int | None, q: int | None, joins: bool
    ) -> None:
        self._source, self._target, self._p, self._q, self._joins = source, target, p, q, joins
        self._leaves = len(source) - 1, len(target) - 1

    def down(self, s: _Node, t: _Node, low: int, high: int, common: _Common) -> None:
        """Adds what the rests of two numerals share of the global indices from `low` to `high`."""
        a, b = self._source[s.level], self._target[t.level]
        if a.held or b.held:
            # A given piece of the target narrows the range first.
            self._split(a.held and not (b.held and self._q is not None), s, t, low, high, common)
        elif (s.level, t.level) == self._leaves:
            if low < high:
                run = Block(s.local + low - s.start, t.local + low - t.start, _run_axes(high - low))
                append_block(common.setdefault((s.piece, t.piece, ()), []), run)
        else:
            # Down the coarser digit, so that the finer one can repeat itself below it.
            coarser, period = a.block > b.block, math.lcm(a.block, b.block)
            count = (high - low) // period
            if count > 1:
                one: _Common = {}
                self._split(coarser, s, t, low, low + period, one)
                repeat = Axis(count, period // a.block * a.share, period // b.block * b.share)
                for pieces, runs in one.items():
                    into = common.setdefault(pieces, [])
                    for block in repeat_blocks(runs, repeat):
                        append_block(into, block)
                low += count * period
            self._split(coarser, s, t, low, high, common)

    def _split(self, at_source: bool, s: _Node, t: _Node, low: int, high: int, common: _Common) -> None:
        """Goes down one side's digit: its values that occur from `low` to `high`, each with the part that it covers."""
        level, node, wanted = (self._source[s.level], s, self._p) if at_source else (self._target[t.level], t, self._q)
        radix, held, block, share = level
        depth, origin, number, local = node
        if held and wanted is not None:
            at = origin + wanted // share % radix * block
            low, high = max(low, at), min(high, at + block)
        # Where the other side repeats itself under each value of a digit whose pieces are all wanted, they lie alike.
        other = self._target[t.level] if at_source else self._source[s.level]
        joins = self._joins and held and wanted is None and not other.held and block % other.block == 0
        apart = block // other.block * other.share
        value = (low - origin) // block
        while low < high:
            start = origin + value * block
            end = min(start + block, high)
            if held:
                child = _Node(depth + 1, start, number + value * share, local)
            else:
                child = _Node(depth + 1, start, number, local + value * share)
            count = (high - start) // block if joins and low == start else 0
            into: _Common = {} if count > 1 else common
            if at_source:
                self.down(child, t, low, end, into)
            else:
                self.down(s, child, low, end, into)
            if count > 1:
                repeat = Repeat(count, share, 0, apart) if at_source else Repeat(count, share, apart, 0)
                for (p, q, repeats), blocks in into.items():
                    for each in blocks:
                        append_block(common.setdefault((p, q, (repeat, *repeats)), []), each)
                value, end = value + count - 1, start + count * block
            low, value = end, value + 1


# How many indices of a dim two pieces share, counted without the runs that they share.
#
#     15{x}5{y}3/n against 16{y}7{x}2/n       blocks of 3 and of 2 indices
#
#     index            0  1  2  3  4  5 | 6  7 ...
#     source piece     0  0  0  1  1  1 | 2  2        one number a block, in a list
#     target piece     0  0  1  1  2  2 | 3  3
#
# Both lists are made by repeating shorter ones, and the pieces at each start of a block are looked up in them: a few
# operations on whole lists, instead of a walk down both numerals. Where the numerals repeat themselves often, the walk
# has fewer steps than there are blocks, and is taken (`shares`).


_FASTER = 8
"""Counting this many blocks takes about as long as one step of a walk."""


@lru_cache(maxsize=256)
def shared_elements(source: Dim, target: Dim) -> tuple[dict[int, int], ...]:
    """For each piece of the target, how many indices it shares with each source piece that it overlaps.

    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> shared_elements(before, after)
    ({0: 2}, {0: 1, 1: 1}, {1: 2})
    """
    if source.pieces is not None or target.pieces is not None:
        return _count_meetings(source, target)
    one, other = dim_levels(source), dim_levels(target)
    # After a period, at most the whole dim, the pieces of both sides repeat themselves.
    period = max(source.size, 1)
    if not (one[0].held or other[0].held or len(one) == 1 or len(other) == 1):
        period = min(math.lcm(one[0].block, other[0].block), period)
    blocks = period // max(1, one[-1].radix) + period // max(1, other[-1].radix)
    if not source.size or _count_steps(one, other, source.size) * _FASTER < blocks:
        return tuple(
            {p: sum([block.elements for block in blocks]) for p, blocks in by_source.items()}
            for by_source in shares(source, target)
        )
    counts: list[dict[int, int]] = [{} for _ in range(math.prod(level.radix for level in other if level.held))]
    a, b = one[-1].radix, other[-1].radix
    # The first `size` indices occur `times` times: a period as often as it fits, and the rest.
    for size, times in (period, source.size // period), (source.size % period, 1):
        if not size:
            continue
        starts = sorted([*range(0, size, a), *range(b, size, b)])
        of_source, of_target = _number_blocks(one, -(-size // a)), _number_blocks(other, -(-size // b))
        sources, targets = [of_source[at // a] for at in starts], [of_target[at // b] for at in starts]
        for p, q, start, end in zip(sources, targets, starts, [*starts[1:], size], strict=True):
            if start < end:
                by_source = counts[q]
                by_source[p] = by_source.get(p, 0) + (end - start) * times
    return tuple(counts)


def _number_blocks(of: Sequence[Level], blocks: int) -> list[int]:
    """The piece that has each of the first blocks, which are as long as the last digit."""
    numbers = [0]
    for level in reversed(of[:-1]):
        values = min(level.radix, -(-blocks // len(numbers)))
        if level.held:
            numbers = [number + value * level.share for value in range(values) for number in numbers]
        else:
            numbers *= values
    return numbers[:blocks]


def _count_steps(source: Sequence[Level], target: Sequence[Level], size: int) -> int:
    """About how many steps `shares` takes, without taking them: as it goes down, but in one range a level."""
    a, b = source[0], target[0]
    if not (a.held or b.held):
        if len(source) == len(target) == 1:
            return 1
        period = math.lcm(a.block, b.block)
        if size >= 2 * period:
            rest = size % period
            return _count_steps(source, target, period) + (_count_steps(source, target, rest) if rest else 0)
    at_source = a.held if a.held or b.held else a.block > b.block
    block = (a if at_source else b).block
    below = (source[1:], target) if at_source else (source, target[1:])
    return -(-size // block) * _count_steps(*below, min(size, block))


# The shortest run of neighbouring indices that two pieces of a dim share, from the ends of blocks.
#
#     15{x}5{y}3/n against 16{y}7{x}2/n       blocks of 3 and of 2 indices
#
#     index       0  1  2  3  4  5  6  7 ...
#     ends        |     |  |  |     |         runs of 2, 1, 1 and 2 in each period of 6
#
# A run ends where a block of either side ends: at the least, the greatest common divisor of the blocks apart.


@lru_cache(maxsize=1024)
def shortest_shared(source: Dim, target: Dim) -> int:
    """The fewest indices that are neighbours in both of two pieces which share them, 1 if there are none.

    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}9]", "f32[{y}6]"))
    >>> shortest_shared(before, after)
    3
    """
    if not source.size:
        return 1
    if source.pieces is not None or target.pieces is not None:
        return _find_shortest_meeting(source, target)
    small, big = sorted((dim_levels(source)[-1].radix, dim_levels(target)[-1].radix))
    last = max((source.size - 1) // small * small, (source.size - 1) // big * big)
    tail, inner = source.size - last, _least_gap(small, big, last)
    if contiguous_extent(source) is not None or contiguous_extent(target) is not None:
        return min(tail, inner)
    # Pieces that have several blocks may continue behind the end of a block, where a block of both sides ends. The
    # first run does not, nor does one between ends of one side only; where blocks differ, one of these is as short.
    together = math.lcm(small, big)
    if last < together or (small < big and (inner <= tail or last % together)):
        return min(tail, inner)
    return min(each.axes[-1].extent for by in shares(source, target) for blocks in by.values() for each in blocks)


def _least_gap(small: int, big: int, last: int) -> int:
    """The least distance of two different numbers up to `last` that are multiples of either number."""
    if last >= math.lcm(small, big):
        return math.gcd(small, big)
    if last < small:
        return small
    apart = [(number % small, number) for number in range(big, last + 1, big)]
    below = min((rest for rest, _ in apart if rest), default=small)
    return min(below, small - max((rest for rest, number in apart if number - rest + small <= last), default=0))
