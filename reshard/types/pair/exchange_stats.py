"""An exchange of boxes in figures, part by part, without listing its messages.

Dims that share no device coordinates are independent: a device's share of an array is the product
of its shares of such parts. So each part is tallied over its own coordinates only, and the figures
of the whole come from the few distinct values that the parts take. 1,024 x 1,024 devices that split
two dims each 1,024 ways cost 2,048 steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.pair.overlap import fullest, piece, shares


class Part(NamedTuple):
    """Some dims of both layouts, and the device coordinates that they use.

    `factors` are the (stride, size) factors of those coordinates, major first; None stands for
    every device by itself, where the coordinates do not nest or the meshes differ.
    """

    before: tuple[Dim, ...]
    after: tuple[Dim, ...]
    meshes: tuple[Mesh, Mesh]
    plane: tuple[SubAxis, ...]
    factors: tuple[tuple[int, int], ...] | None

    @property
    def numbers(self) -> int:
        """How many devices differ in these coordinates."""
        return self.meshes[0].size if self.factors is None else math.prod(size for _, size in self.factors)

    def device(self, number: int) -> int:
        """One device for each coordinate."""
        if self.factors is None:
            return self.meshes[0].devices[number]
        position = 0
        for stride, size in reversed(self.factors):
            number, value = divmod(number, size)
            position += stride * value
        return position


class ExchangeStats(NamedTuple):
    """The distinct values that a part takes.

    `tiles` has one (elements needed, of them held, source pieces needed, of them held) per kind of
    device, `pieces` one (requests, of them by holders, holders) per kind of source piece.
    """

    tiles: frozenset[tuple[int, int, int, int]]
    pieces: frozenset[tuple[int, int, int]]
    largest: int
    largest_sent: int


@lru_cache(maxsize=1024)
def fewest_received(source: Layout, target: Layout) -> int:
    """max over devices of |T_d minus S_d|, in true elements: what the worst device must receive."""
    found = parts(source, target)
    if any(_misses_all(part) for part in found):
        return math.prod(fullest(dim) for dim in target.dims)
    kinds = itertools.product(*(_stats(part).tiles for part in found))
    return max(math.prod(k[0] for k in kind) - math.prod(k[1] for k in kind) for kind in kinds)


@lru_cache(maxsize=1024)
def rounds(operand: Layout, result: Layout) -> int:
    """The largest number of messages that a device sends or receives, one per piece that it lacks."""
    stats = [_stats(part) for part in parts(operand, result)]
    lacks = (
        math.prod(k[2] for k in kind) - math.prod(k[3] for k in kind)
        for kind in itertools.product(*(t.tiles for t in stats))
    )
    sends = (
        -(-(math.prod(k[0] for k in kind) - math.prod(k[1] for k in kind)) // math.prod(k[2] for k in kind))
        for kind in itertools.product(*(t.pieces for t in stats))
    )
    return max(*lacks, *sends, 0)


@lru_cache(maxsize=1024)
def largest_message(operand: Layout, result: Layout) -> int:
    """Elements of the largest message: the largest share in every part, not all of them a device's own."""
    stats = [_stats(part) for part in parts(operand, result)]
    every = [t.largest for t in stats]
    return max(
        (t.largest_sent * math.prod(every[:at] + every[at + 1 :]) for at, t in enumerate(stats)),
        default=0,
    )


def shortest_run(operand: Layout, result: Layout) -> int:
    """The fewest neighbouring elements that a message takes from one tile to the other."""
    if not operand.dims:
        return 1
    last = shares(operand.dims[-1], result.dims[-1])
    return min((run.length for by in last for runs in by.values() for run in runs), default=1)


def parts(operand: Layout, result: Layout) -> list[Part]:
    """The independent parts of a move; one of everything where coordinates do not nest."""
    meshes = (operand.mesh, result.mesh)
    whole = Part(operand.dims, result.dims, meshes, operand.partial, None)
    dims = list(zip(operand.dims, result.dims, strict=True))
    if operand.mesh != result.mesh or operand.mesh.device_ids is not None:
        return [whole]
    found: list[Part] = []
    for spans, members in _independent([_spans(operand.mesh, pair) for pair in dims]):
        ends = sorted({end for span in spans for end in span})
        if any(high % low for low, high in itertools.pairwise(ends)):
            return [whole]
        factors = tuple((low, high // low) for low, high in itertools.pairwise(ends) if _overlap([(low, high)], spans))
        before, after = zip(*(dims[at] for at in members), strict=True)
        found.append(Part(before, after, meshes, (), factors[::-1]))
    return found


def _spans(mesh: Mesh, dims: Sequence[Dim]) -> list[tuple[int, int]]:
    """The (stride, stride * size) spans of the sub-axes that hold digits of these dims."""
    held = (d.axis for dim in dims for d in dim.digits if d.axis is not None)
    return [(mesh.stride(axis), mesh.stride(axis) * axis.size) for axis in held]


def _independent(spans: list[list[tuple[int, int]]]) -> list[tuple[list[tuple[int, int]], list[int]]]:
    """Dims grouped until no two groups' spans overlap; every join leaves one group less."""
    groups = [(own, [at]) for at, own in enumerate(spans)]
    at = 0
    while at < len(groups):
        mine = groups[at][0]
        other = next((o for o in range(at + 1, len(groups)) if _overlap(mine, groups[o][0])), None)
        if other is None:
            at += 1
            continue
        theirs, members = groups.pop(other)
        groups[at] = (mine + theirs, groups[at][1] + members)
    return groups


def _overlap(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    return any(low < end and start < high for low, high in a for start, end in b)


def _misses_all(part: Part) -> bool:
    """Whether some device's target tile is full and shares nothing with its source tile.

    Devices are visited far apart, so that one is met early where there are many.
    """
    most = math.prod(fullest(dim) for dim in part.after)
    step = next(s for s in itertools.count(int(part.numbers * 0.618) | 1) if math.gcd(s, part.numbers) == 1)
    for number in range(part.numbers):
        home, wants = _pieces(part, part.device(number * step % part.numbers))
        wanted = [shares(s, t)[q] for s, t, q in zip(part.before, part.after, wants, strict=False)]
        if math.prod(sum(r.length for runs in by.values() for r in runs) for by in wanted) < most or not most:
            continue
        if any(p not in by for p, by in zip(home, wanted, strict=False)):
            return True
    return False


@lru_cache(maxsize=1024)
def _stats(part: Part) -> ExchangeStats:
    kinds = Counter(_pieces(part, part.device(number)) for number in range(part.numbers))
    wants: Counter[Pieces] = Counter()
    holders: Counter[Pieces] = Counter()
    for (home, wanted), count in kinds.items():
        holders[home] += count
        wants[wanted] += count
    sizes = {wanted: _sizes(part, wanted) for wanted in wants}
    requests: Counter[Pieces] = Counter()
    for wanted, count in wants.items():
        for source in sizes[wanted]:
            requests[source] += count
    kept: Counter[Pieces] = Counter()
    tiles: set[tuple[int, int, int, int]] = set()
    sent = 0
    totals = {wanted: (sum(by.values()), max(by.values(), default=0)) for wanted, by in sizes.items()}
    for (home, wanted), count in kinds.items():
        by = sizes[wanted]
        own = by.get(home)
        kept[home] += count if own is not None else 0
        tiles.add((totals[wanted][0], own or 0, len(by), int(own is not None)))
        if totals[wanted][1] > sent:
            sent = max(sent, *(size for source, size in by.items() if source != home), 0)
    pieces = {(count, kept[source], holders[source]) for source, count in requests.items()}
    largest = max((most for _, most in totals.values()), default=0)
    return ExchangeStats(frozenset(tiles), frozenset(pieces), largest, sent)


Pieces = tuple[int, ...]
"""One piece of every dim of a part, and which summand of a partial array."""


def _pieces(part: Part, device: int) -> tuple[Pieces, Pieces]:
    """The pieces that a device holds before, and after."""
    old, new = part.meshes
    p, q = old.position(device), new.position(device)
    plane = old.coordinates(p, part.plane)
    home = (*(piece(dim, old, p) for dim in part.before), *plane)
    return home, (*(piece(dim, new, q) for dim in part.after), *plane)


def _sizes(part: Part, wanted: Pieces) -> dict[Pieces, int]:
    """The source pieces that a target tile overlaps, with the elements that they share."""
    by_dim = [
        [(p, sum(run.length for run in runs)) for p, runs in shares(s, t)[q].items()]
        for s, t, q in zip(part.before, part.after, wanted, strict=False)
    ]
    plane = wanted[len(part.after) :]
    return {
        (*(p for p, _ in owners), *plane): math.prod(size for _, size in owners)
        for owners in itertools.product(*by_dim)
    }
