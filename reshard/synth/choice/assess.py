"""What an assignment takes: the moves that it makes, their seconds and bytes, and what a device holds meanwhile.

Where a tensor is read in another layout than it is written in, it is moved. Reads in one layout share a copy, which is
*kept* from the first to the last of them; reads that make their own copy *anew* drop it at once:

    position     0         1            2            3
                 w made    w gathered   w gathered   w updated, where it lies
    kept                   move         |
    anew                   move, drop   move, drop

What a device holds at a position is every tile that lives there, and whatever else a move that begins there needs. A
tensor lives until it is read or moved for the last time, and longer only where the program itself keeps it: until
`Tensor.dies`. A copy that is smaller than the tensor, as of a sum that is finished, is made right after it, when what
the tensor was made of may be gone; a larger one, as of a parameter that is gathered, right before it is first read. A
tensor that dies before it is born takes no memory, unless it is fused into its readers and moved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.prices import MovePrice, MovePrices
from reshard.synth.choice.problem import Access, Assignment, Node, Problem, Split, access_layout
from reshard.types import dtypes
from reshard.types.layout import Layout


@dataclass(frozen=True)
class PlacedMove:
    """A move of an assignment: of which tensor, for which reads (a node, and the number of its read), how often, and
    from which position to which its copy lives; `kept` unless a read makes it anew, `joined` as its tensor is."""

    tensor: int
    source: Layout
    target: Layout
    reads: tuple[tuple[int, int], ...]
    times: int
    at: int
    until: int
    kept: bool = True
    joined: int = 1

    @property
    def ends(self) -> tuple[Layout, Layout, int]:
        """What its price depends on."""
        return self.source, self.target, self.joined


class TensorUse(NamedTuple):
    """Who writes a tensor, (node, number of the write, access), and who reads it, likewise, in order of position."""

    write: tuple[int, int, Access]
    reads: tuple[tuple[int, int, Access], ...]
    last: int
    """The position of the last need of any read."""
    kept_by_program: bool
    """Whether it lives longer than its reads need it."""

    @property
    def asks_what_to_keep(self) -> bool:
        """Whether it matters which reads keep their copies: if there are several, or one in a loop around which the
        tensor is made. Otherwise the only copy is a kept one."""
        return len(self.reads) > 1 or any(access.held is not None for *_, access in self.reads)


def list_uses(problem: Problem) -> list[TensorUse | None]:
    """The uses of each tensor; None for one that no node writes."""
    writes: dict[int, tuple[int, int, Access]] = {}
    reads: defaultdict[int, list[tuple[int, int, Access]]] = defaultdict(list)
    for number, node in enumerate(problem.nodes):
        for index, access in enumerate(node.writes):
            writes[access.tensor] = (number, index, access)
        for index, access in enumerate(node.reads):
            reads[access.tensor].append((number, index, access))
    uses: list[TensorUse | None] = []
    for number, tensor in enumerate(problem.tensors):
        ordered = tuple(sorted(reads[number], key=lambda read: (read[2].first, read[0], read[1])))
        last = max((access.last for *_, access in ordered), default=tensor.born)
        uses.append(TensorUse(writes[number], ordered, last, tensor.dies > last) if number in writes else None)
    return uses


def is_made_early(use: TensorUse, source: Layout, target: Layout) -> bool:
    """Whether a kept copy is made right after its tensor is: where it is smaller, and the tensor can go."""
    return target.tile_bytes < source.tile_bytes and not use.kept_by_program


def list_placed_moves(
    problem: Problem, splits: Sequence[Split], anew: Iterable[tuple[int, int]]
) -> tuple[PlacedMove, ...]:
    """The moves of an assignment, tensor by tensor; one that several reads share once, and none that moves nothing."""
    apart = frozenset(anew)
    moves: list[PlacedMove] = []
    for number, use in enumerate(list_uses(problem)):
        if use is None:
            continue
        writer, _, write = use.write
        joined = problem.tensors[number].joined
        source = access_layout(problem, problem.nodes[writer], write, splits[writer])
        shared: defaultdict[Layout, list[tuple[int, int, Access]]] = defaultdict(list)
        for node, index, access in use.reads:
            target = access_layout(problem, problem.nodes[node], access, splits[node])
            # Reads of what is there already move nothing, whether kept or anew.
            if target == source:
                continue
            # Anew inside a loop, it moves in every trip; kept, as often as the tensor is written.
            if (node, index) in apart and use.asks_what_to_keep:
                who = ((node, index),)
                at = access.at - 1
                moves.append(PlacedMove(number, source, target, who, access.times, at, access.at, False, joined))
            else:
                shared[target].append((node, index, access))
        for target, reads in shared.items():
            # For example, a gradient that is a sum of all devices would otherwise stay whole until its update.
            early = is_made_early(use, source, target)
            at = problem.tensors[number].born + 1 if early else min(access.first for *_, access in reads)
            until = max(access.last for *_, access in reads)
            who = tuple((node, index) for node, index, _ in reads)
            moves.append(PlacedMove(number, source, target, who, write.times, at, until, joined=joined))
    return tuple(moves)


def measure_memory(
    problem: Problem, splits: Sequence[Split], moves: Sequence[PlacedMove], priced: Sequence[MovePrice]
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that a device holds at each position, and beside them what each move needs while it runs."""
    # Changes at the positions where something begins to live, or has ceased to, sum to what lives.
    length = 3 + max((max(tensor.born, tensor.dies) for tensor in problem.tensors), default=0)
    length = max([length, *(2 + access.last for node in problem.nodes for access in node.reads)])
    change = np.zeros(length, np.int64)

    def hold(first: int, last: int, nbytes: int) -> None:
        change[first] += nbytes
        change[last + 1] -= nbytes

    # Tensors are needed until the last move from them begins, those made anew in a loop until it ends.
    needed = [tensor.born for tensor in problem.tensors]
    moved = {read for move in moves for read in move.reads}
    for node, reader in enumerate(problem.nodes):
        for index, access in enumerate(reader.reads):
            if (node, index) not in moved:
                needed[access.tensor] = max(needed[access.tensor], access.last)
    beside = np.zeros(len(moves), np.int64)
    for number, (move, price) in enumerate(zip(moves, priced, strict=True)):
        hold(move.at, move.until, problem.tensors[move.tensor].count_held(move.target))
        beside[number] = max(0, price.peak_bytes - move.source.tile_bytes - move.target.tile_bytes)
        node, index = move.reads[0]
        last = move.at if move.kept else problem.nodes[node].reads[index].last
        # Whoever moves it again in every trip of a loop needs the tensor until the loop ends.
        needed[move.tensor] = max(needed[move.tensor], last)
    sources = {move.tensor for move, price in zip(moves, priced, strict=True) if price.received_bytes}
    for number, (use, tensor) in enumerate(zip(list_uses(problem), problem.tensors, strict=True)):
        if use is not None and (tensor.dies >= tensor.born or (tensor.fused and number in sources)):
            node = use.write[0]
            layout = access_layout(problem, problem.nodes[node], use.write[2], splits[node])
            hold(tensor.born, tensor.dies if use.kept_by_program else needed[number], tensor.count_held(layout))
    for node, split in zip(problem.nodes, splits, strict=True):
        for position, nbytes in list_reused(problem, node, split):
            hold(position, position, -nbytes)
    return np.cumsum(change)[:-1], beside


def list_reused(problem: Problem, node: Node, split: Split) -> list[tuple[int, int]]:
    """Where a node writes over what it reads: positions, and the bytes that are counted twice there."""
    reused: list[tuple[int, int]] = []
    taken: set[tuple[str, int]] = set()
    for read, write in node.reuses:
        source, target = node.reads[read], node.writes[write]
        born = problem.tensors[target.tensor].born
        dies = problem.tensors[source.tensor].dies
        # Only what is read for the last time by the very operation that writes can be written over, in no later trip.
        if source.held is not None or not (dies == source.at == born) or {("read", read), ("write", write)} & taken:
            continue
        before, after = (
            problem.tensors[access.tensor].count_held(access_layout(problem, node, access, split))
            for access in (source, target)
        )
        # Compilers let a result take an operand's place only if they are equally large.
        if before == after:
            taken |= {("read", read), ("write", write)}
            reused.append((born, after))
    return reused


HELD_PART = 0.01
"""A byte that a node holds counts as this part of the time in which it is read from memory."""


def time_node(problem: Problem, node: Node, split: Split, speed: DeviceSpeed) -> float:
    """The seconds of all runs of a node on one device. Axes of a factor of size 0 divide no work."""
    if not node.flops and not node.touched and not node.held_bytes:
        return 0.0

    def count_parts(factors: Iterable[int]) -> int:
        # A set, since a split that is given may name an axis for several factors, which it divides once each.
        axes = {name for factor in factors if node.sizes[factor] for name in split[factor]}
        return math.prod(problem.mesh.axes[name] for name in axes)

    parts = count_parts(range(len(split)))
    held = HELD_PART * node.held_bytes / parts / speed.memory_bytes_per_second
    if not node.flops and not node.touched:
        return held
    touched = sum(nbytes / count_parts(factors) for factors, nbytes in node.touched)
    first = next(iter((*node.reads, *node.writes)), None)
    # Rates have HLO's names, as compiled programs do.
    dtype = dtypes.short(dtypes.canonical(problem.tensors[first.tensor].dtype)) if first else ""
    return held + node.times * speed.work_seconds(node.flops / parts, touched, dtype)


def assess_splits(
    problem: Problem,
    splits: Sequence[Split],
    anew: Iterable[tuple[int, int]],
    prices: MovePrices,
    speed: DeviceSpeed,
    bound_seconds: float = 0.0,
) -> Assignment:
    """An assignment with its figures; `bound_seconds`, which takes a solver, as given."""
    anew = frozenset(anew)
    # One move after the other: at a position, only one of them needs more than the tiles that live there.
    moves = list_placed_moves(problem, splits, anew)
    priced = prices.price_pairs(move.ends for move in moves)
    move_seconds = sum(move.times * price.seconds for move, price in zip(moves, priced, strict=True))
    received = sum(move.times * price.received_bytes for move, price in zip(moves, priced, strict=True))
    work = sum(time_node(problem, node, split, speed) for node, split in zip(problem.nodes, splits, strict=True))
    live, beside = measure_memory(problem, splits, moves, priced)
    peaks = live.copy()
    for move, more in zip(moves, beside.tolist(), strict=True):
        peaks[move.at] = max(peaks[move.at], live[move.at] + more)
    peak = int(peaks.max(initial=0))
    return Assignment(tuple(splits), anew, work + move_seconds, move_seconds, received, peak, bound_seconds)
