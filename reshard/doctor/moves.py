"""The arrays that a chain moves: their layouts, what has to be received for it, and what reshard would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.doctor.chains import Chain
from reshard.doctor.flow import Value
from reshard.doctor.index_maps import COLLECTIVES, Movement, Untraceable
from reshard.doctor.infer_layouts import layouts
from reshard.doctor.matching import Dims, Matcher, Pair, Traced
from reshard.doctor.numbering import Numbering
from reshard.doctor.report.model import Move
from reshard.doctor.trace import Tracer
from reshard.errors import ReshardError
from reshard.hlo import Array, Source
from reshard.synth import Network
from reshard.synth import plan as best_plan
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan
from reshard.types.rules.bounds import lower_bound


class Found(NamedTuple):
    """What a chain moves, and the user's line, a better one than the HLO's where the move is a known one."""

    moves: tuple[Move, ...]
    where: Source


class Mover:
    """Reads moves off the chains of a module; `mesh` has the names of its axes, if they are known."""

    def __init__(
        self, movement: Movement, numbering: Numbering, matcher: Matcher, mesh: Mesh | None, network: Network | None
    ) -> None:
        self.movement = movement
        self.numbering = numbering
        self.matcher = matcher
        self.mesh = mesh
        self.network = network

    def read(self, chain: Chain, where: Source, planned: bool) -> Found:
        """The moves of a chain, with plans if these are wanted; equal ones once."""
        results: dict[int, Value] = {}
        for value in chain.results:
            results.setdefault(self.numbering.of(value), value)
        moves: list[Move] = []
        for value in results.values():
            move, where = self._move(chain, value, where, planned)
            if move not in moves:
                moves.append(move)
        return Found(tuple(moves), where)

    def _move(self, chain: Chain, value: Value, where: Source, planned: bool) -> tuple[Move, Source]:
        tracer, dtype = Tracer(self.movement, self.numbering, chain.leaves), _sent_as(chain)
        used = chain.results[value] or (value,)
        pair, needed = self._needed(chain, tracer, value, dtype)
        received = sum(collective.received_bytes for collective in chain.collectives)
        forms = {one.array.dims for one in (value, *used) if one.array is not None}
        known = self.matcher.match(Traced(where, dtype, _before(chain), forms, received, needed, pair))
        if known is not None:
            pair, where = (known.source, known.target), _at(where, known.where)
            needed = lower_bound(*pair)
        before, form = _tile(tracer, chain, dtype), _form(value, used)
        after = replace(form.array or Array(dtype, ()), dtype=dtype, layout="")
        if pair is None:
            most = min(received, after.nbytes)
            return Move(before, after, most if needed is None else needed, False), where
        whole = known is not None or math.prod(axis.size for axis in pair[0].held) == pair[0].mesh.size
        plan = self._plan(pair) if planned else None
        return Move(before, after, lower_bound(*pair), True, *pair, whole, plan), where

    def _needed(self, chain: Chain, tracer: Tracer, value: Value, dtype: str) -> tuple[Pair | None, int | None]:
        """The layouts that a result is a move between, and the bytes that it needs; None where that is not known.

        Of a result that is not used as a whole, only what is used is needed: then the layouts say too much.
        """
        if not _traceable(chain):
            return None, None
        used = chain.results[value] or (value,)
        pair = layouts(tracer, _form(value, used), self.mesh, dtype)
        if pair is not None and any(_elements(end) >= _elements(value) for end in used):
            return pair, lower_bound(*pair)
        counted = _counted(tracer, value, used, dtype)
        bound = None if pair is None else lower_bound(*pair)
        if counted is not None and counted == bound:
            return pair, bound
        return None, min((count for count in (counted, bound) if count is not None), default=None)

    def _plan(self, pair: tuple[Layout, Layout]) -> Plan | None:
        try:
            return best_plan(*pair, network=self.network)
        except ReshardError:
            return None


def _counted(tracer: Tracer, value: Value, used: Sequence[Value], dtype: str) -> int | None:
    """The bytes that arrive and are used, element by element; None where that is not known, or too many."""
    try:
        counts = [tracer.arriving([value]), tracer.arriving(used)]
    except Untraceable:
        return None
    known = [count for count in counts if count is not None]
    return Array(dtype, (min(known),)).nbytes if known else None


def _form(value: Value, ends: Sequence[Value]) -> Value:
    """The form in which a result is used, if all of it is: the user's own shape, most likely."""
    whole = [end for end in ends if _elements(end) == _elements(value)]
    return min([value, *whole], key=lambda one: 0 if one.array is None else len(one.array.dims))


def _elements(value: Value) -> int:
    return 0 if value.array is None else value.array.elements


def _sent_as(chain: Chain) -> str:
    """The element type that is sent, the widest of several."""
    arrays = [array for collective in chain.collectives for array in collective.results]
    return max(arrays, key=lambda array: array.nbytes / max(1, array.elements)).dtype


def _traceable(chain: Chain) -> bool:
    """Whether it is spelled in collectives that say where elements go; not in receives between slices."""
    return all(collective.opcode.removesuffix("-start") in COLLECTIVES for collective in chain.collectives)


def _before(chain: Chain) -> set[Dims]:
    """The dims that the tile has before the collectives; of one cut into several operands, its size."""
    leaves = {leaf.array.dims for leaf in chain.leaves if leaf.array is not None}
    operands = [collective.operands for collective in chain.collectives]
    whole = {
        arrays[0].dims if len(arrays) == 1 else (sum(a.elements for a in arrays),) for arrays in operands if arrays
    }
    return leaves | whole


def _tile(tracer: Tracer, chain: Chain, dtype: str) -> Array | None:
    """The tile before, if it is of one array."""
    tiles = list(tracer.tiles.values()) or [leaf.array for leaf in chain.leaves if leaf.array is not None]
    return replace(tiles[0], dtype=dtype, layout="") if len(tiles) == 1 else None


def _at(where: Source, line: str) -> Source:
    """The origin on another line, `file:line`, if that is one."""
    file, _, number = line.rpartition(":")
    if not file or not number.isdigit():
        return where
    same = (file, int(number)) == (where.file, where.line)
    return replace(where, file=file, line=int(number), function=where.function if same else None, exact=True)
