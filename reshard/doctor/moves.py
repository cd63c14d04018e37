"""The arrays that a chain moves: their layouts, the bytes that the move needs, and the plan of `reshard` for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from reshard.doctor.chains import Chain
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Untraceable
from reshard.doctor.dataflow.numbering import Numbering
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import Tracer
from reshard.doctor.elements import LeafOrigin, first_copies
from reshard.doctor.infer_layouts import infer_layouts
from reshard.doctor.matching import Dims, Matcher, Pair, TracedMove
from reshard.doctor.places import ArrayMove
from reshard.errors import ReshardError
from reshard.hlo import Array, Source
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan
from reshard.types.rules.bounds import lower_bound


class ChainMoves(NamedTuple):
    """The moves of a chain, and its origin: the user's own line, if one of the moves is a known one.

    `leaves` says what is known of the arrays before the chain, by their numbers. `counted_bytes` are the bytes that
    arrive and are used in all moves together, None if that was not counted.
    """

    moves: tuple[ArrayMove, ...]
    where: Source
    leaves: Mapping[int, LeafOrigin]
    counted_bytes: int | None = None


class _Needed(NamedTuple):
    """The layouts that a result is a move between, and the bytes that some device must receive; None if unknown.

    `firsts` is the first device, for each, that has a copy of its tile, as far as the trace shows.
    """

    layouts: Pair | None
    needed_bytes: int | None
    firsts: Numbers


class Mover:
    """Reads the moves of the chains of a module; `mesh` is the user's, if it is known."""

    def __init__(
        self, maps: IndexMaps, numbering: Numbering, matcher: Matcher, mesh: Mesh | None, network: Network | None
    ) -> None:
        self.maps = maps
        self.numbering = numbering
        self.matcher = matcher
        self.mesh = mesh
        self.network = network

    def read(self, chain: Chain, where: Source, planned: bool) -> ChainMoves:
        """The moves of a chain, equal ones once; with plans if `planned`."""
        results: dict[int, HloValue] = {}
        for value in chain.results:
            results.setdefault(self.numbering.of(value), value)
        moves: dict[ArrayMove, int] = {}
        leaves: dict[int, LeafOrigin] = {}
        for value in results.values():
            tracer = Tracer(self.maps, self.numbering, chain.leaves)
            origin = self._move(chain, tracer, value, where, planned)
            move, where = origin.move, origin.where
            for leaf in tracer.tiles or map(self.numbering.of, chain.leaves):
                leaves[leaf] = _joined(leaves.get(leaf), origin)
            moves[move] = moves.get(move, 0) + 1
        alike = tuple(replace(move, arrays=count) for move, count in moves.items())
        return ChainMoves(alike, where, leaves, self._counted(chain, list(results.values())))

    def _counted(self, chain: Chain, results: Sequence[HloValue]) -> int | None:
        """The bytes that arrive and are used in several results, an element that is in more than one counted once."""
        if len(results) < 2 or not _is_traceable(chain):
            return None
        used = [form for value in results for form in chain.results[value] or (value,)]
        try:
            count = Tracer(self.maps, self.numbering, chain.leaves).arriving(used)
        except Untraceable:
            return None
        return None if count is None else Array(_sent_dtype(chain), (count,)).nbytes

    def _move(self, chain: Chain, tracer: Tracer, value: HloValue, where: Source, planned: bool) -> LeafOrigin:
        """The move whose result is `value`, and what is known of its origin."""
        dtype = _sent_dtype(chain)
        used = chain.results[value] or (value,)
        pair, needed, firsts = self._needed(chain, tracer, value, dtype)
        received = sum(collective.received_bytes for collective in chain.collectives)
        forms = {one.array.dims for one in (value, *used) if one.array is not None}
        known = self.matcher.match(TracedMove(where, dtype, _dims_before(chain), forms, received, needed, pair))
        if known is not None:
            pair, where = (known.source, known.target), _at_line(where, known.where)
            needed = lower_bound(*pair)
        before, form = _tile_before(tracer, chain, dtype), _used_form(value, used)
        after = replace(form.array or Array(dtype, ()), dtype=dtype, layout="")
        if pair is None:
            most = min(received, after.nbytes)
            move = ArrayMove(before, after, most if needed is None else needed, False)
            return LeafOrigin(firsts, move, where, False)
        whole = known is not None or holds_whole_array(pair[0])
        plan = self._plan(pair) if planned else None
        move = ArrayMove(before, after, lower_bound(*pair), True, *pair, whole, plan)
        if known is not None and _is_numbered(known.source.mesh, tracer.devices):
            firsts = first_copies(known.source)
        return LeafOrigin(firsts, move, where, known is not None)

    def _needed(self, chain: Chain, tracer: Tracer, value: HloValue, dtype: str) -> _Needed:
        """What a result is a move between, and what it needs.

        If only part of a result is used, only that part is needed, and comparing whole layouts overestimates it.
        """
        if not _is_traceable(chain):
            return _Needed(None, None, np.arange(tracer.devices))
        used = chain.results[value] or (value,)
        move = infer_layouts(tracer, _used_form(value, used), self.mesh, dtype)
        pair = None if move is None else (move.source, move.target)
        firsts = np.arange(tracer.devices) if move is None else move.firsts
        bound = None if pair is None else lower_bound(*pair)
        if pair is not None and any(_elements(form) >= _elements(value) for form in used):
            return _Needed(pair, bound, firsts)
        counted = _count_arriving(tracer, value, used, dtype)
        if counted is not None and counted == bound:
            return _Needed(pair, bound, firsts)
        return _Needed(None, min((count for count in (counted, bound) if count is not None), default=None), firsts)

    def _plan(self, pair: Pair) -> Plan | None:
        try:
            return best_plan(*pair, network=self.network)
        except ReshardError:
            return None


def _joined(one: LeafOrigin | None, other: LeafOrigin) -> LeafOrigin:
    """What two moves of an array say of it together: the first that the program names, else the copies of both."""
    if one is None or (other.named and not one.named):
        return other
    return one if one.named else one._replace(firsts=other.firsts[one.firsts])


def _is_numbered(mesh: Mesh, devices: int) -> bool:
    """Whether the positions of a mesh are the numbers of the module's devices."""
    return mesh.size == devices and mesh.device_ids is None


def holds_whole_array(layout: Layout) -> bool:
    """Whether every mesh axis holds a digit: else, devices along the others may hold other parts of a larger array."""
    return math.prod(axis.size for axis in layout.held) == layout.mesh.size


def _count_arriving(tracer: Tracer, value: HloValue, used: Sequence[HloValue], dtype: str) -> int | None:
    """The bytes that arrive and are used, counted element by element; None if untraceable or too many."""
    try:
        counts = [tracer.arriving([value]), tracer.arriving(used)]
    except Untraceable:
        return None
    known = [count for count in counts if count is not None]
    return Array(dtype, (min(known),)).nbytes if known else None


def _used_form(value: HloValue, used: Sequence[HloValue]) -> HloValue:
    """The form with the fewest dims in which all of a result is used: most likely the user's own shape."""
    whole = [form for form in used if _elements(form) == _elements(value)]
    return min([value, *whole], key=lambda one: 0 if one.array is None else len(one.array.dims))


def _elements(value: HloValue) -> int:
    return 0 if value.array is None else value.array.elements


def _sent_dtype(chain: Chain) -> str:
    """The dtype that is sent, the widest of several."""
    arrays = [array for collective in chain.collectives for array in collective.results]
    return max(arrays, key=lambda array: array.nbytes / max(1, array.elements)).dtype


def _is_traceable(chain: Chain) -> bool:
    """Whether the text says where every element goes, which it does not for receives between slices."""
    return all(collective.opcode.removesuffix("-start") in COLLECTIVES for collective in chain.collectives)


def _dims_before(chain: Chain) -> set[Dims]:
    """The dims of the tile before the collectives; only its size if it is split into several operands."""
    leaves = {leaf.array.dims for leaf in chain.leaves if leaf.array is not None}
    operands = [collective.operands for collective in chain.collectives]
    whole = {
        arrays[0].dims if len(arrays) == 1 else (sum(a.elements for a in arrays),) for arrays in operands if arrays
    }
    return leaves | whole


def _tile_before(tracer: Tracer, chain: Chain, dtype: str) -> Array | None:
    """The tile before the move, None if several arrays are moved together."""
    tiles = list(tracer.tiles.values()) or [leaf.array for leaf in chain.leaves if leaf.array is not None]
    return replace(tiles[0], dtype=dtype, layout="") if len(tiles) == 1 else None


def _at_line(where: Source, line: str) -> Source:
    """The origin moved to another line, `file:line`; unchanged if that is not one."""
    file, _, number = line.rpartition(":")
    if not file or not number.isdigit():
        return where
    same = (file, int(number)) == (where.file, where.line)
    return replace(where, file=file, line=int(number), function=where.function if same else None, exact=True)
