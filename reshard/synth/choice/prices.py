"""What moves cost: the seconds, the bytes and the memory of the plan from one layout to another, for many pairs.

A choice of layouts asks for the prices of thousands of moves, most of which are of few classes (`move_classes`): the
routes of each are searched once, and their seconds and bytes are known functions of the array's size. What has no class
is planned one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from reshard.errors import PlanError, quoted
from reshard.geometry.refine import refine
from reshard.plans.plan import Plan
from reshard.plans.step import Step
from reshard.synth.move_classes import ClassedMove, find_classes
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import find_plan
from reshard.synth.routes import Pair
from reshard.types import dtypes
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh


@dataclass(frozen=True)
class MovePrice:
    """What the plan from one layout to another takes: predicted seconds, and bytes that the busiest device receives.

    `peak` is the bytes that it holds at most, source and target included, or finds them: few moves are asked for it.
    """

    seconds: float
    received_bytes: int
    peak: int | Callable[[], int]

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes that a device holds at most, source and target included."""
        return self.peak if isinstance(self.peak, int) else self.peak()


class MovePrices:
    """The prices of moves between layouts on a mesh, whose axes have the links of a network. `moved_as` has the dtypes
    that a compiler moves as wider ones; `strided` says that devices gather and scatter along any one dim without
    packing it, as TPUs do. What receives nothing is a copy of the target's tile, with so many bytes read and written
    in a second.

    >>> mesh = Mesh(x=4, y=2)
    >>> prices = MovePrices(mesh, "h100")
    >>> rows, whole = (Layout.parse(text, mesh) for text in ("f32[{x}256, 512]", "f32[1024, 512]"))
    >>> price = prices.price(rows, whole)
    >>> price.received_bytes, price.seconds == prices.plan(rows, whole).seconds
    (1572864, True)
    """

    def __init__(
        self,
        mesh: Mesh,
        network: Network | str,
        moved_as: Mapping[str, str] | None = None,
        *,
        strided: bool = False,
        copy_rate: float = math.inf,
    ) -> None:
        self.mesh, self._moved_as, self._strided, self._copy_rate = mesh, moved_as or {}, strided, copy_rate
        self._options = PlanOptions.read(network=network)
        if self._options.network is None:
            raise PlanError(
                f"network {quoted(network)}: moves are priced in seconds; give a network, such as 'tpu-v5p'"
            )
        self._classes = find_classes(mesh, self._options.network.links(mesh))
        self._prices: dict[tuple[Layout, Layout], MovePrice] = {}
        # The bytes that a move packs and those of its array, by the move's class and how its digits lie in dims.
        self._packed: dict[object, tuple[int, int]] = {}
        # Classes of moves by number, each a set of what is held, and the number of each; a move of each that is seen.
        self._numbers: dict[frozenset[object], int] = {frozenset(): 0}
        self._seen: dict[object, ClassedMove | None] = {}

    def price(self, source: Layout, target: Layout, joined: int = 1) -> MovePrice:
        """The price of one move; of none, if source and target are equal, its memory alone. An all-reduce that is
        `joined` with others pays its part of what one of them waits."""
        known = self._prices.get((source, target))
        if known is None:
            known = self._price_class(*self._widen(source, target))
            if source != target and not known.received_bytes:
                known = replace(known, seconds=known.seconds + self._time_copy(target))
            self._prices[source, target] = known
        saved = self.count_joined(source, target, joined)
        return replace(known, seconds=known.seconds - saved) if saved else known

    def count_joined(self, source: Layout, target: Layout, joined: int) -> float:
        """The seconds that an all-reduce does not wait, since it is one with others; 0 for another move."""
        if joined < 2 or not source.partial or target.partial or source.dims != target.dims:
            return 0.0
        return (1 - 1 / joined) * self.price(replace(source, dims=()), replace(target, dims=())).seconds

    def _time_copy(self, target: Layout) -> float:
        return 2 * target.tile_bytes / self._copy_rate

    def _time_packing(self, packed: int) -> float:
        """A TPU packs in two passes, into the order of the blocks and into tiles of 8 x 128 elements."""
        return 4 * packed / self._copy_rate if self._strided else 0.0

    def price_pairs(self, pairs: Iterable[tuple[Layout, Layout, int]]) -> list[MovePrice]:
        """The price of each move, in their order: source, target, and how many it is joined with, itself included."""
        return [self.price(*pair) for pair in pairs]

    def estimate_seconds(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Roughly the seconds of the move from each source to each target, all of one array.

        Moves are of one *class* if the same digits are held before and after, whatever their dims. Each takes what the
        first that is seen would at its size. Of Llama's moves on <x=2, y=2, z=2>, 98% take just that.
        """
        names: list[frozenset[object]] = list(self._numbers)

        def number_class(held: frozenset[object]) -> int:
            if held not in self._numbers:
                self._numbers[held] = len(names)
                names.append(held)
            return self._numbers[held]

        # Dim by dim, and sums last, the class so far and what this dim adds to it: few pairs of them are distinct.
        columns: list[tuple[list[object], list[object]]] = [
            ([one.dims[dim] for one in sources], [one.dims[dim] for one in targets])
            for dim in range(len(sources[0].dims))
        ]
        columns.append(([(e.partial, e.reduction) for e in sources], [(e.partial, e.reduction) for e in targets]))
        classes = np.zeros((len(sources), len(targets)), np.int64)
        for befores, afters in columns:
            before, after = ({each: at for at, each in enumerate(dict.fromkeys(ends))} for ends in (befores, afters))
            met = np.array([[number_class(self._meet_ends(b, a)) for a in after] for b in before], np.int64)
            added = met[np.ix_([before[each] for each in befores], [after[each] for each in afters])]
            many = len(names)
            distinct, place = np.unique(classes * many + added, return_inverse=True)
            pairs: list[int] = distinct.tolist()
            joined = [number_class(names[both // many] | names[both % many]) for both in pairs]
            classes = np.array(joined, np.int64)[place].reshape(classes.shape)
        found, first, place = np.unique(classes, return_index=True, return_inverse=True)
        seen: list[tuple[int, int]] = np.stack([found, first], axis=1).tolist()
        wide = len(targets)
        seconds = [self._estimate_class(number, sources[at // wide], targets[at % wide]) for number, at in seen]
        return np.array(seconds)[place].reshape(classes.shape)

    def _meet_ends(self, before: object, after: object) -> frozenset[object]:
        """What a dim in both layouts, or the sums of both, add to the class of a move."""
        if not (isinstance(before, Dim) and isinstance(after, Dim)):
            return frozenset(() if before == after == ((), None) else ((before, after),))
        # Digits that do not nest have no refinement, and are a class of their own.
        refined = refine(*(Layout(self.mesh, (dim,), "f32", None, ()) for dim in (before, after)))
        if refined is None or not refined.exact:
            return frozenset(((before, after),))
        return frozenset(each[1:] for each in refined.digits if each.radix > 1 and (each.src, each.dst) != (None, None))

    def _widen(self, source: Layout, target: Layout) -> tuple[Layout, Layout]:
        wide = self._moved_as.get(source.dtype)
        return (source, target) if wide is None else (replace(source, dtype=wide), replace(target, dtype=wide))

    def _estimate_class(self, number: int, source: Layout, target: Layout) -> float:
        # Every layout of a class is where it is, if one is: what stays is no copy.
        if source == target:
            return 0.0
        source, target = self._widen(source, target)
        nbytes = math.prod(source.shape) * dtypes.bits(source.dtype) // 8
        # Operations of sums alone tell dtypes apart.
        key = number, self._classes.count_stretch(nbytes), source.dtype if source.partial or target.partial else ""
        if key not in self._seen:
            self._seen[key] = self._classes.read_move(Pair(source, target))
        move = self._seen[key]
        if move is None:
            return self.price(source, target).seconds
        routes = self._classes.find_routes(move)
        seconds, fastest = routes.list_fastest(nbytes, move.local)
        if not fastest:
            return self.price(source, target).seconds
        moves = bool(routes.count_received(fastest, nbytes))
        packing = self._time_packing(self._count_packed(move._replace(nbytes=nbytes), fastest))
        return seconds + packing + (0.0 if moves else self._time_copy(target))

    def plan(self, source: Layout, target: Layout) -> Plan:
        """The plan that the price of a move is of."""
        return find_plan(source, target, self._options)

    def _count_peak(self, plan: Plan) -> int:
        """The bytes that a plan holds at most where it may gather and scatter without packing."""
        packed = (0 if self._strided and not _packs_along_dims(step) else step.cost.scratch for step in plan.steps)
        lives = (s.live_bytes - s.cost.scratch + more for s, more in zip(plan.steps, packed, strict=True))
        return max(lives, default=0) or plan.peak_bytes

    def _price_class(self, source: Layout, target: Layout) -> MovePrice:
        pair = Pair(source, target)
        move = self._classes.read_move(pair)
        if move is not None:
            routes = self._classes.find_routes(move)
            seconds, fastest = routes.list_fastest(move.nbytes, move.local)
            if fastest:
                seconds += self._time_packing(self._count_packed(move, fastest))
                received = routes.count_received(fastest, move.nbytes)
                return MovePrice(seconds, received, lambda: self._count_peak(self.plan(source, target)))
        plan = self.plan(source, target)
        seconds = (plan.seconds or 0.0) + self._time_packing(_count_packed(plan))
        return MovePrice(seconds, plan.received_bytes, self._count_peak(plan))

    def _count_packed(self, move: ClassedMove, fastest: tuple[int, ...]) -> int:
        """The bytes that a move packs, scaled from the first one seen whose digits lie in dims as its own do."""
        if not self._strided or math.isinf(self._copy_rate):
            return 0
        digits = tuple(
            (digit.dim, digit.radix if digit.src or digit.dst else 0, digit.src, digit.dst)
            for digit in move.refinement.digits
            if digit.radix > 1
        )
        sums = tuple((end.partial, end.reduction) for end in (move.pair.source, move.pair.target))
        key = digits, sums, move.kind.dtype, self._classes.count_stretch(move.nbytes), fastest
        if key not in self._packed:
            self._packed[key] = _count_packed(self.plan(move.pair.source, move.pair.target)), move.nbytes
        packed, nbytes = self._packed[key]
        return packed * move.nbytes // nbytes


def _packs_along_dims(step: Step) -> bool:
    """Whether a step packs even where it gathers and scatters along any one dim."""
    ends = zip(step.operand.dims, step.result.dims, strict=True)
    return step.kind not in ("all_gather", "reduce_scatter") or sum(a != b for a, b in ends) > 1


def _count_packed(plan: Plan) -> int:
    """The bytes that the steps of a plan pack, other than along one dim."""
    return sum(step.cost.scratch for step in plan.steps if _packs_along_dims(step))
