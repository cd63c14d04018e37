"""Chains that a fragment could replace: where the data enters, which values it must yield, and the move between.

    %s = f32[8,64] fusion(...)                     source: the operand of the first collective
    %g = f32[64,64] all-gather(%s)
    %f = f32[64,8] fusion(%g, %id), calls=%body    use: %d inside of %f, the slice that each device takes
      %d = f32[64,8] dynamic-slice(%p0, ...)

The move is f32[{d0}8, 64] -> f32[64, {d0}8]; a plan for it, given %s, yields %d. What is found here is a proposal: the
rewritten module is traced again, and must take every element from where it came before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from reshard.doctor.chains import REDUCTIONS, Chain
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Unconvertible, Untraceable, find_conversion
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import Tracer, is_sum, summed_digits
from reshard.doctor.elements import LeafOrigin, first_copies
from reshard.doctor.infer_layouts import InferredMove, Pick, infer_layouts, infer_pick
from reshard.doctor.places import ArrayMove, Known
from reshard.doctor.shifts import Shift, infer_shift
from reshard.errors import ReshardError
from reshard.geometry.refine import prime_digits, refine
from reshard.hlo import Array, Collective, Source
from reshard.hlo.splice import Use
from reshard.plans.plan import Plan
from reshard.plans.rules.bounds import lower_bound
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

_FORMS = ("convert", "copy", "bitcast", "reshape", "transpose")

Dims = tuple[int, ...]
Pair = tuple[Layout, Layout]
Planner = Callable[[Pair], Plan | None]
"""Plans a move between two layouts; None if there is no plan."""


class Unfit(Exception):
    """Why a chain cannot be replaced."""


@dataclass(frozen=True)
class Replacement:
    """A value to make from `source`, an instruction of the chain's region, and the `uses` that it replaces.

    `leaf` is what the source yields, or the sum of that over devices if the chain begins with a reduction. `before` and
    `after` are the arrays of one device, with their memory layouts. With a `pick`, the move is that of a part of it.
    Either the `move` is known, or the `shift` that yields the value, whose data is moved as `dtype`.
    """

    source: str
    uses: tuple[Use, ...]
    values: tuple[HloValue, ...]
    leaf: HloValue
    before: Array
    after: Array
    move: InferredMove | None
    pick: Pick | None = None
    shift: Shift | None = None
    dtype: str = ""

    @property
    def is_summed(self) -> bool:
        """Whether the move adds up tiles."""
        return self.move is not None and bool(self.move.source.partial)


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

    tracer: Tracer
    layouts: Pair | None
    needed_bytes: int | None
    firsts: Numbers


class _Inferred(NamedTuple):
    """A move as the elements of a value show it, None if no two layouts do, and the tracer that met its leaves."""

    tracer: Tracer
    move: InferredMove | None


class ChainReader:
    """Reads what the chains of a module do; `mesh` is the program's, if it is known.

    The pass and the report ask the same reader: `replacements` says what a fragment has to yield, and `moves` what the
    arrays are that the chain moves. The elements of a value are followed once for both.
    """

    def __init__(self, flow: Flow, maps: IndexMaps, numbering: Numbering, mesh: Mesh | None) -> None:
        self.flow = flow
        self.maps = maps
        self.numbering = numbering
        self.mesh = mesh
        self._regions: dict[Scope, dict[HloValue, str]] = {}
        self._known: dict[tuple[object, ...], _Inferred] = {}

    def _inferred(
        self, leaves: frozenset[HloValue], value: HloValue, dtype: str, summed: Sequence[tuple[int, int]] = ()
    ) -> _Inferred:
        """The move from leaves to a value, in that dtype; of a sum over the digits `summed` of the device, if any."""
        key = leaves, value, dtype, tuple(summed)
        if key not in self._known:
            tracer = Tracer(self.maps, self.numbering, leaves)
            self._known[key] = _Inferred(tracer, infer_layouts(tracer, value, self.mesh, dtype, summed))
        return self._known[key]

    def replacements(self, chain: Chain) -> tuple[Replacement, ...]:
        """What has to be made for the chain's results; raises `Unfit` with the reason if that is not known."""
        source, leaf = self._summed(chain) if chain.reduces else self._moved(chain)
        before = leaf.array
        if before is None:
            raise Unfit(f"{source} is not an array")
        groups: dict[int, list[HloValue]] = {}
        for value in self._wanted(chain):
            groups.setdefault(self.numbering.of(value), []).append(value)
        if not groups:
            raise Unfit("nothing uses its results")
        return tuple(self._replacement(chain, source, leaf, before, values) for values in groups.values())

    def _replacement(
        self, chain: Chain, source: str, leaf: HloValue, before: Array, values: Sequence[HloValue]
    ) -> Replacement:
        value = values[0]
        after = value.array
        if after is None or value.path:
            raise Unfit(f"{value.name} is part of a tuple")
        if any(one.array != after for one in values):
            raise Unfit(f"{value.name} is used in several memory layouts")
        summed = self._summed_digits(leaf) if chain.reduces else []
        dtype = self._dtype(value, leaf, bool(summed))
        (tracer, move), pick = self._inferred(frozenset({leaf}), value, dtype, summed), None
        if move is None and not summed:
            move, pick = infer_pick(tracer, value, dtype) or (None, None)
        shift = infer_shift(tracer, value) if move is None and not summed else None
        if move is None and shift is None:
            raise Unfit(f"no two layouts describe how {value.name} comes from {source}")
        uses = tuple(use_of(chain.region, one) for one in values)
        return Replacement(source, uses, tuple(values), leaf, before, after, move, pick, shift, dtype)

    def _dtype(self, value: HloValue, leaf: HloValue, summed: bool) -> str:
        """The dtype to move: the narrowest on the way, or that of the sum."""
        try:
            one = find_conversion(self.maps, value, leaf)
        except Unconvertible as why:
            raise Unfit(str(why)) from None
        if summed and one.narrowest not in (one.before, one.after):
            raise Unfit(f"it rounds the sum to {one.narrowest} on the way")
        return one.before if summed else one.narrowest

    def _summed_digits(self, leaf: HloValue) -> list[tuple[int, int]]:
        try:
            return summed_digits(self.maps, leaf)
        except Untraceable as error:
            raise Unfit(str(error)) from None

    def _wanted(self, chain: Chain) -> Iterator[HloValue]:
        """The values to replace: each result or, if only parts of it are used, these parts."""
        for value, used in chain.results.items():
            if value.array is None:
                raise Unfit(f"{value.name} is not an array")
            whole = not used or any(
                one.array is not None and one.array.elements >= value.array.elements for one in used
            )
            yield from map(self._before_widening, (value,) if whole else used)

    def _before_widening(self, value: HloValue) -> HloValue:
        """The same elements in a narrower dtype, if the value is that converted."""
        while value.opcode == "convert":  # ends: each step goes back to an operand
            (before,) = self.flow.operands(value)
            if before.array is None or value.array is None or before.array.nbytes >= value.array.nbytes:
                break
            if self.maps.sources(before) is None or before.opcode in COLLECTIVES:
                break
            value = before
        return value

    def _moved(self, chain: Chain) -> tuple[str, HloValue]:
        """The source of a chain that only moves data, and what it yields."""
        if not all(map(_is_known, chain.collectives)):
            raise Unfit("it has a collective whose index map is not known")
        source = self._source(chain)
        return source, self.flow.origin(HloValue(chain.region, source))

    def _summed(self, chain: Chain) -> tuple[str, HloValue]:
        """The source of a chain that begins with a sum over devices, and the sum."""
        sums = [one for one in chain.collectives if one.kind in REDUCTIONS]
        if len(sums) != 1 or not all(map(_is_known, [one for one in chain.collectives if one not in sums])):
            raise Unfit("it has a collective whose index map is not known")
        leaf = HloValue(chain.region, sums[0].name)
        if sums[0].computation != chain.region.computation.name:
            raise Unfit(f"{leaf.name} runs inside another instruction")
        if leaf.opcode != "all-reduce" or not is_sum(self.flow, leaf):
            raise Unfit(f"{leaf.name} is not the sum of one array")
        return leaf.instruction.operands[0], leaf

    def _source(self, chain: Chain) -> str:
        """The instruction of the region that has the data before the chain's first collectives."""
        moved = set(chain.values)
        first: dict[int, str] = {}
        for collective in chain.collectives:
            if collective.computation != chain.region.computation.name:
                raise Unfit(f"{collective.name} runs inside another instruction")
            for name in chain.region.computation.by_name[collective.name].operands:
                origin = self.flow.origin(HloValue(chain.region, name))
                if origin not in moved:
                    first.setdefault(self.numbering.of(origin), name)
        if len(first) == 1:
            return self._narrower(chain.region, next(iter(first.values())))
        return self._stored_leaf(chain)

    def _narrower(self, region: Scope, name: str) -> str:
        """The instruction that has the same elements in a narrower dtype, before a conversion; else the one given."""
        value = self.flow.origin(HloValue(region, name))
        while value.array is not None and value.opcode in _FORMS:  # ends: each step goes back to an operand
            (before,) = self.flow.operands(value)
            if before.array is not None and before.array.nbytes < value.array.nbytes and before.opcode != "constant":
                return self._stored(region).get(before, name)
            value = before
        return name

    def _stored_leaf(self, chain: Chain) -> str:
        """The instruction of the region that yields the chain's only leaf."""
        if len({self.numbering.of(leaf) for leaf in chain.leaves}) != 1:
            raise Unfit(f"it joins {len(chain.leaves)} arrays")
        return self.stored_name(chain.region, *chain.leaves)

    def stored_name(self, region: Scope, *leaves: HloValue) -> str:
        """The instruction of a region that yields one of these values."""
        for value, name in self._stored(region).items():
            if value in leaves:
                return name
        raise Unfit("its source is made inside a fusion")

    def _stored(self, region: Scope) -> dict[HloValue, str]:
        """The arrays that the instructions of a region yield."""
        if region not in self._regions:
            known: dict[HloValue, str] = {}
            for instruction in region.computation.instructions:
                value = HloValue(region, instruction.name)
                if value.array is not None:
                    known.setdefault(self.flow.origin(value), instruction.name)
            self._regions[region] = known
        return self._regions[region]

    def moves(self, chain: Chain, where: Source, matcher: Matcher, planner: Planner | None) -> ChainMoves:
        """The moves of a chain, equal ones once; `matcher` has those that the program is known to need.

        Each has its plan, if a `planner` is given.
        """
        results: dict[int, HloValue] = {}
        for value in chain.results:
            results.setdefault(self.numbering.of(value), value)
        moves: dict[ArrayMove, int] = {}
        leaves: dict[int, LeafOrigin] = {}
        for value in results.values():
            origin, met = self._move(chain, value, where, matcher, planner)
            move, where = origin.move, origin.where
            for leaf in met:
                leaves[leaf] = _join_origins(leaves.get(leaf), origin)
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

    def _move(
        self, chain: Chain, value: HloValue, where: Source, matcher: Matcher, planner: Planner | None
    ) -> tuple[LeafOrigin, Sequence[int]]:
        """The move whose result is `value` with what is known of its origin, and the numbers of the leaves met."""
        dtype = _sent_dtype(chain)
        used = chain.results[value] or (value,)
        tracer, pair, needed, firsts = self._needed(chain, value, dtype)
        met = list(tracer.tiles or map(self.numbering.of, chain.leaves))
        received = sum(collective.received_bytes for collective in chain.collectives)
        forms = {one.array.dims for one in (value, *used) if one.array is not None}
        known = matcher.match(TracedMove(where, dtype, _dims_before(chain), forms, received, needed, pair))
        if known is not None:
            pair, where = (known.source, known.target), _at_line(where, known.where)
            needed = lower_bound(*pair)
        # The tile before the move, None if several arrays are moved together.
        tiles = list(tracer.tiles.values()) or [leaf.array for leaf in chain.leaves if leaf.array is not None]
        before, form = (replace(tiles[0], dtype=dtype, layout="") if len(tiles) == 1 else None), _used_form(value, used)
        after = replace(form.array or Array(dtype, ()), dtype=dtype, layout="")
        if pair is None:
            most = min(received, after.nbytes)
            move = ArrayMove(before, after, most if needed is None else needed, False)
            return LeafOrigin(firsts, move, where, False), met
        whole = known is not None or holds_whole_array(pair[0])
        plan = None if planner is None else planner(pair)
        move = ArrayMove(before, after, lower_bound(*pair), True, *pair, whole, plan)
        if known is not None and _is_numbered(known.source.mesh, tracer.devices):
            firsts = first_copies(known.source)
        return LeafOrigin(firsts, move, where, known is not None), met

    def _needed(self, chain: Chain, value: HloValue, dtype: str) -> _Needed:
        """What a result is a move between, and what it needs.

        If only part of a result is used, only that part is needed, and comparing whole layouts overestimates it.
        """
        if not _is_traceable(chain):
            tracer = Tracer(self.maps, self.numbering, chain.leaves)
            return _Needed(tracer, None, None, np.arange(tracer.devices))
        used = chain.results[value] or (value,)
        tracer, move = self._inferred(chain.leaves, _used_form(value, used), dtype)
        pair = None if move is None else (move.source, move.target)
        firsts = np.arange(tracer.devices) if move is None else move.firsts
        bound = None if pair is None else lower_bound(*pair)
        if pair is not None and any(_elements_of(form) >= _elements_of(value) for form in used):
            return _Needed(tracer, pair, bound, firsts)
        counted = _count_arriving(tracer, value, used, dtype)
        if counted is not None and counted == bound:
            return _Needed(tracer, pair, bound, firsts)
        return _Needed(
            tracer, None, min((count for count in (counted, bound) if count is not None), default=None), firsts
        )


def _is_known(collective: Collective) -> bool:
    return collective.opcode.removesuffix("-start") in COLLECTIVES


def use_of(region: Scope, value: HloValue) -> Use:
    """The value as seen from the region: the instructions to enter, then its own."""
    path: list[str] = []
    scope = value.scope
    while scope is not region:  # ends: scopes are nested in their callers
        if scope.caller is None or not scope.opened:
            raise Unfit(f"{value.name} is used outside of its region")
        path.append(scope.caller.instruction.name)
        scope = scope.caller.scope
    return Use(tuple(reversed(path)), finishing_name(value))


def finishing_name(value: HloValue) -> str:
    """The instruction that yields the value: for the start of an asynchronous pair, its end."""
    if not value.instruction.opcode.endswith("-start"):
        return value.name
    users = value.scope.computation.users.get(value.name, ())
    ends = [user.name for user in users if user.opcode.endswith("-done")]
    if len(ends) != 1:
        raise Unfit(f"{value.name} has {len(ends)} ends")
    return ends[0]


def _join_origins(one: LeafOrigin | None, other: LeafOrigin) -> LeafOrigin:
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
    whole = [form for form in used if _elements_of(form) == _elements_of(value)]
    return min([value, *whole], key=lambda one: 0 if one.array is None else len(one.array.dims))


def _elements_of(value: HloValue) -> int:
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


def _at_line(where: Source, line: str) -> Source:
    """The origin moved to another line, `file:line`; unchanged if that is not one."""
    file, _, number = line.rpartition(":")
    if not file or not number.isdigit():
        return where
    same = (file, int(number)) == (where.file, where.line)
    return replace(where, file=file, line=int(number), function=where.function if same else None, exact=True)


# Matches a traced move with one of the moves that the program is known to need.
#
# XLA may reshape, convert or transpose the data, and gives it the line of a neighbouring instruction. So a known move
# fits if its tiles, its lower bound and the digits that change holders agree; lines and shapes decide between several.


class TracedMove(NamedTuple):
    """A move as the HLO has it: its origin, the dtype it sends, the dims of its tiles, and its layouts if known.

    The tiles have several forms each: padded, reshaped, and as used. `needed_bytes` is None if the move could not be
    traced.
    """

    where: Source
    dtype: str
    before: Collection[Dims]
    after: Collection[Dims]
    received_bytes: int
    needed_bytes: int | None
    layouts: Pair | None


class Matcher:
    """The known moves, and how often each has been matched."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known = [move for move in known if move.source != move.target]
        self.matched: Counter[int] = Counter()

    def match(self, traced: TracedMove) -> Known | None:
        """The known move that fits a traced one, with its layouts in the dtype that is sent; None if there is none.

        Moves of the same line come first, then those next to it. Otherwise the match must be unambiguous: every move
        that fits is of one line.
        """
        fits = [at for at, move in enumerate(self.known) if _fits_move(move, traced)]
        candidates = self._nearest(fits, f"{traced.where.file}:{traced.where.line}")
        if not candidates:
            return None
        at = min(candidates, key=lambda at: (-_rate_likeness(self.known[at], traced), self.matched[at], at))
        self.matched[at] += 1
        return _as_sent(self.known[at], traced.dtype)

    def _nearest(self, fits: Sequence[int], line: str) -> Sequence[int]:
        same = [at for at in fits if self.known[at].where == line]
        near = [at for at in fits if line in self.known[at].near]
        if same or near:
            return same or near
        return fits if len({self.known[at].where for at in fits}) == 1 else []


def _fits_move(move: Known, traced: TracedMove) -> bool:
    before, after = (math.prod(layout.tile_shape) for layout in (move.source, move.target))
    if before not in map(math.prod, traced.before) or after not in map(math.prod, traced.after):
        return False
    try:
        sent = _as_sent(move, traced.dtype)
        bound = lower_bound(sent.source, sent.target)
    except ReshardError:
        return False
    if bound > traced.received_bytes or traced.needed_bytes not in (None, bound):
        return False
    return _rate_likeness(move, traced) > 0 and _moves_same_digits(move, traced)


def _moves_same_digits(move: Known, traced: TracedMove) -> bool:
    """Whether the same digits change holders, in any order: XLA may transpose arrays on the way."""
    moved, expected = _moved_digits(traced.layouts), _moved_digits((move.source, move.target))
    return moved is None or expected is None or sorted(moved) == sorted(expected)


def _rate_likeness(move: Known, traced: TracedMove) -> int:
    """How well the tiles' dims and the order of the digits fit a move, rather than its reverse."""
    before, after = (_drop_ones(layout.tile_shape) for layout in (move.source, move.target))
    tiles = (before in map(_drop_ones, traced.before)) + (after in map(_drop_ones, traced.after))
    moved = _moved_digits(traced.layouts)
    return 2 * tiles + (moved is not None and moved == _moved_digits((move.source, move.target)))


def _moved_digits(pair: Pair | None) -> list[tuple[int, int, int]] | None:
    """The digits that change holders, major to minor: radix, and strides of the holders (0 for none)."""
    refinement = None if pair is None else refine(*pair)
    if refinement is None:
        return None
    return [
        (digit.radix, digit.src or 0, digit.dst or 0) for digit in prime_digits(refinement) if digit.src != digit.dst
    ]


def _drop_ones(dims: Dims) -> Dims:
    return tuple(size for size in dims if size != 1)


def _as_sent(move: Known, dtype: str) -> Known:
    """The move in another dtype: XLA may convert before it sends."""
    return move._replace(source=replace(move.source, dtype=dtype), target=replace(move.target, dtype=dtype))


# Chains that surely receive no more than is needed, seen without inferring layouts.
#
# Most collectives of a large program are such, as the gathers of weights in FSDP: one collective, whose result is used
# as it is. Inferring the layouts of each would take most of the time of the pass.


_NEEDED_FORMS = ("copy", "bitcast", "reshape", "transpose")
_MOVES = ("all_gather", "all_to_all")


def is_needed(chain: Chain, flow: Flow) -> bool:
    """Whether one collective makes the whole of what is used, from data of the same dtype.

    Where the data has another dtype before or after, a plan could move that, so layouts have to say.
    """
    if len(chain.collectives) != 1 or chain.collectives[0].kind not in _MOVES or len(chain.leaves) != 1:
        return False
    made = next((one for one in chain.values if one.name == chain.collectives[0].name), None)
    if made is None or made.array is None or not chain.results or _is_converted(made, flow):
        return False
    used = [form for value, forms in chain.results.items() for form in forms or (value,)]
    return _have_dtype(chain.values, made.array.dtype) and _are_as_large(used, made.array.elements)


def _is_converted(made: HloValue, flow: Flow) -> bool:
    """Whether a conversion makes what the collective takes."""
    operands = flow.operands(made)
    while len(operands) == 1 and operands[0].opcode in _NEEDED_FORMS:  # ends: each step goes back to an operand
        operands = flow.operands(operands[0])
    return len(operands) != 1 or operands[0].opcode == "convert"


def _have_dtype(values: Iterable[HloValue], dtype: str) -> bool:
    return all(value.array is not None and value.array.dtype == dtype for value in values)


def _are_as_large(values: Iterable[HloValue], elements: int) -> bool:
    return all(value.array is not None and value.array.elements >= elements for value in values)
