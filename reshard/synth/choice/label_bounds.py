"""A lower bound on the seconds of every choice, and what each split adds to it, without a linear program.

The sum that is minimized is a function of single groups, what their work takes, and of pairs, what moves between them
take. Costs go back and forth between the two without changing the sum, until what is cheapest in each part alone adds
up to as much as possible: sequential tree-reweighted message passing (Kolmogorov 2006, 2015). In one pass each group

    collects      from each pair the least that a split of it costs there, whatever the other end does
    hands on      what it has then, in equal parts, to the pairs with groups that come later

and the next pass goes the other way round. After collecting, the bound plus what a split costs more than the group's
cheapest is a bound on every choice with that split. Programs are nearly trees: the bound often is the best choice.

Readers of one tensor in one layout share its copy: the price is divided among them, and what does not raise one's
share of the bound is offered to the others.

Bytes have a price, too, where a budget binds: what a device holds at a position, times its price, is added, and the
budget times that taken off the bound. What is counted is paid for certain, whichever copies are kept. For example, `w`
is read twice, a copy costs 5, and its bytes at the position between, 3:

    one copy, kept           5 + 3        of 2, readers before and after the position pay once together: 5 - 3
    two copies, made anew    5 + 5        of 3, once on either side
    counted                  2 + 3 + 3
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.synth.choice.assess import list_reused
from reshard.synth.choice.flows import ChoiceTables, TensorFlow
from reshard.synth.choice.problem import Problem

FORBIDDEN = 1e9
"""Units of cost for what no plan does, far above any choice: infinities would cancel to no number."""


@dataclass
class _Edge:
    """What moves from one group to another cost: by the distinct layouts at both ends, less what the groups took."""

    ends: tuple[int, int]
    classes: tuple[np.ndarray, np.ndarray]
    """Of each split of an end the number of its layout."""
    starts: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    """Splits sorted by layout, and where each layout begins among them."""
    costs: np.ndarray


@dataclass
class _Shared:
    """What is paid once if any reader asks for it: the edges of the readers, for each column of an edge that asks the
    column of the pool, and the part of the price that lies with the edge now."""

    edges: list[int]
    asking: list[np.ndarray]
    columns: list[np.ndarray]
    shares: list[np.ndarray]
    readers: np.ndarray


class _FlowEdge(NamedTuple):
    """The readers of one group in the same layouts: their edge, -1 if they are the writer's own group, the columns of
    their layouts among all that are read, and which of these each split has."""

    edge: int
    columns: np.ndarray
    target_of: np.ndarray


@dataclass
class _FlowCosts:
    """What a flow costs now: seconds for each pair of layouts, and where they and the prices of bytes lie."""

    sources: np.ndarray
    source_of: np.ndarray
    every: np.ndarray
    readers: list[_FlowEdge]
    reader_of: list[int]
    seconds: np.ndarray
    own: np.ndarray
    shared: list[_Shared]


class _Life(NamedTuple):
    """Where in the life of a tensor bytes have a price, position after position, and its reads among them.

    `begins` says where it is born, `certain` where it lives whoever reads it, `fades` where only for its reads; of each
    read, the positions before it and until its end are counted, once for as long as a kept copy is needed and once for
    a copy of its own.
    """

    prices: tuple[float, ...]
    begins: tuple[bool, ...]
    certain: tuple[bool, ...]
    fades: tuple[bool, ...]
    spans: tuple[tuple[int, int], ...]
    near: tuple[tuple[int, int], ...]


class LabelBounds:
    """Bounds for a problem; `pass_costs` raises them, and `excess` says how much more each split takes at least."""

    def __init__(self, problem: Problem, tables: ChoiceTables, scale: float) -> None:
        self.problem, self.tables = problem, tables
        self.own = [group.seconds * scale for group in tables.groups]
        self.excess = [np.zeros(len(group.splits)) for group in tables.groups]
        self._edges: list[_Edge] = []
        self.byte_prices: dict[int, float] = {}
        self._scale = scale
        self._costs = [self._add_flow(flow) for flow in tables.flows]
        for flow, costs in zip(tables.flows, self._costs, strict=True):
            self._charge_flow(flow, costs)
        self._touching: list[list[tuple[int, int]]] = [[] for _ in tables.groups]
        for number, edge in enumerate(self._edges):
            for end in (0, 1):
                self._touching[edge.ends[end]].append((number, end))

    def _add_flow(self, flow: TensorFlow) -> _FlowCosts:
        """Adds the edges of a flow, without costs."""
        # Readers of one group in the same layouts pay once together.
        keys = [(reader.group, reader.layouts.tobytes()) for reader in flow.readers]
        distinct = dict(zip(keys, flow.readers, strict=True))
        places = {key: number for number, key in enumerate(distinct)}
        sources, source_of = np.unique(flow.layouts, return_inverse=True)
        every = np.unique(np.concatenate([reader.layouts for reader in flow.readers] or [np.zeros(0, int)]))
        # Pairs that no reader has in common with its writer, as most of a node with itself, are never asked for.
        prices = np.array([self.tables.seconds.get((a, b), 0.0) for a in sources.tolist() for b in every.tolist()])
        seconds = np.where(np.isinf(prices), FORBIDDEN, np.minimum(prices, 1e300) * self._scale * flow.times)
        readers: list[_FlowEdge] = []
        for reader in distinct.values():
            targets, target_of = np.unique(reader.layouts, return_inverse=True)
            # Readers meet in the columns of all layouts in which any of them reads. An edge of a group with itself is a
            # cost of its splits.
            columns, edge = np.searchsorted(every, targets), -1
            if reader.group != flow.group:
                edge = len(self._edges)
                starts = (_sort_classes(source_of), _sort_classes(target_of))
                nothing = np.zeros((len(sources), len(targets)))
                self._edges.append(_Edge((flow.group, reader.group), (source_of, target_of), starts, nothing))
            readers.append(_FlowEdge(edge, columns, target_of))
        seconds = seconds.reshape(len(sources), len(every))
        own = np.zeros(len(flow.layouts))
        return _FlowCosts(sources, source_of, every, readers, [places[key] for key in keys], seconds, own, [])

    def bound(self) -> float:
        """A lower bound on the cost of every choice."""
        return sum(float(own.min()) for own in self.own) + sum(float(edge.costs.min()) for edge in self._edges)

    def pass_costs(self, backward: bool) -> None:
        """One pass over all groups; afterwards `excess` has what each split costs at least above the bound before."""
        order = range(len(self.own))
        for group in reversed(order) if backward else order:
            own = self.own[group]
            later: list[tuple[_Edge, int]] = []
            # Both earlier and later pairs give: those passed on lately, and what the last pass left there.
            for number, end in self._touching[group]:
                edge = self._edges[number]
                least = edge.costs.min(axis=1 - end)
                edge.costs -= least[:, None] if end == 0 else least[None, :]
                own += least[edge.classes[end]]
                if (edge.ends[1 - end] < group) == backward:
                    later.append((edge, end))
            # All that is known of this group lies with it now, before it is handed on.
            self.excess[group] = own - own.min()
            if not later:
                continue
            # The larger of both numbers: of a chain each pass then hands on everything, and of a star its share.
            part = 1.0 / max(len(later), len(self._touching[group]) - len(later))
            given = own * part
            for edge, end in later:
                order_of, starts = edge.starts[end]
                # Splits that lead to the same layout can hand on only what all of them have.
                least = np.minimum.reduceat(given[order_of], starts)
                edge.costs += least[:, None] if end == 0 else least[None, :]
                own -= least[edge.classes[end]]

    def decode_labels(self) -> list[int]:
        """A split for each group, given those before it: what a pass backward has left is what later ones take."""
        chosen: list[int] = []
        for group, own in enumerate(self.own):
            cost = own.copy()
            for number, end in self._touching[group]:
                edge = self._edges[number]
                other = edge.ends[1 - end]
                table = edge.costs if end == 0 else edge.costs.T
                known = other < group
                here = table[:, edge.classes[1 - end][chosen[other]]] if known else table.min(axis=1)
                cost += here[edge.classes[end]]
            chosen.append(int(cost.argmin()))
        return chosen

    def share_prices(self) -> None:
        """Offers what a reader's share of a price does not add to the bound to all readers who may ask for the same."""
        for shared in (each for costs in self._costs for each in costs.shared if len(each.edges) > 1):
            pool = np.zeros((len(shared.shares[0]), len(shared.readers)))
            each = list(zip(shared.edges, shared.asking, shared.columns, shared.shares, strict=True))
            for number, asking, columns, share in each:
                costs = self._edges[number].costs
                # The least of a pair is part of the bound, and stays.
                spare = np.minimum(share, costs[:, asking] - costs.min())
                if len(shared.readers) == 1:
                    spare = np.broadcast_to(spare.min(axis=1, keepdims=True), spare.shape)
                    pool[:, 0] += spare[:, 0]
                else:
                    pool[:, columns] += spare
                costs[:, asking] -= spare
                share -= spare
            pool /= shared.readers
            for number, asking, columns, share in each:
                self._edges[number].costs[:, asking] += pool[:, columns]
                share += pool[:, columns]

    def price_bytes(self, prices: Mapping[int, float]) -> None:
        """Sets what a byte costs at each position; others are free. Costs that were handed on stay where they are."""
        # Differences alone: all passes so far stay valid, as costs moved between groups and pairs, not away.
        before, self.byte_prices = self.byte_prices, {position: price for position, price in prices.items() if price}
        changed = {p for p in {*before, *prices} if before.get(p, 0.0) != prices.get(p, 0.0)}
        for flow, costs in zip(self.tables.flows, self._costs, strict=True):
            if any(self._lives_at(tensor, position) for tensor in flow.tensors for position in changed):
                self._charge_flow(flow, costs)
        for position in changed:
            self._credit_reuses(position, prices.get(position, 0.0) - before.get(position, 0.0))

    def _lives_at(self, tensor: int, position: int) -> bool:
        use, about = self.tables.uses[tensor], self.problem.tensors[tensor]
        return use is not None and about.born <= position <= max(about.dies, use.last)

    def _charge_flow(self, flow: TensorFlow, costs: _FlowCosts) -> None:
        """Takes back what a flow costs, and charges what it costs at the present prices."""
        self.own[flow.group] = self.own[flow.group] - costs.own
        for shared in costs.shared:
            for number, asking, share in zip(shared.edges, shared.asking, shared.shares, strict=True):
                self._edges[number].costs[:, asking] -= share
        written = np.zeros(len(costs.sources))
        asked: dict[frozenset[int], np.ndarray] = {}
        needed: dict[frozenset[int], float] = {}
        for life, many in Counter(self._describe_life(tensor) for tensor in flow.tensors).items():
            self._charge_life(flow, costs, life, many, written, asked, needed)
        costs.own, costs.shared = written[costs.source_of], []
        for readers, amounts in asked.items():
            self._share_out(costs, [(reader, None) for reader in sorted(readers)], amounts)
        for readers, price in needed.items():
            self._charge_need(costs, readers, price)
        self.own[flow.group] = self.own[flow.group] + costs.own

    def _describe_life(self, tensor: int) -> _Life:
        use, about = self.tables.uses[tensor], self.problem.tensors[tensor]
        assert use is not None  # it is of a flow
        at = [position for position in sorted(self.byte_prices) if self._lives_at(tensor, position)]
        lives, begins = about.born <= about.dies, tuple(p == about.born for p in at)
        certain = tuple(lives and (p == about.born or (use.kept_by_program and p <= about.dies)) for p in at)
        fades = tuple(lives and p > about.born and not use.kept_by_program for p in at)

        def span(first: int, last: int) -> tuple[int, int]:
            return bisect_left(at, first), bisect_right(at, last)

        accesses = [access for *_, access in use.reads]
        spans = tuple(span(access.first, access.last) for access in accesses)
        near = tuple(span(access.at - 1, access.at) for access in accesses)
        return _Life(tuple(self.byte_prices[p] for p in at), begins, certain, fades, spans, near)

    def _charge_life(
        self,
        flow: TensorFlow,
        costs: _FlowCosts,
        life: _Life,
        many: int,
        written: np.ndarray,
        asked: dict[frozenset[int], np.ndarray],
        needed: dict[frozenset[int], float],
    ) -> None:
        """Adds what so many tensors cost for certain: by the layout written, by sets of readers of which one that reads
        in a layout pays, and by sets of which one that needs the tensor pays a byte's price."""

        def ask(readers: Iterable[int], amounts: np.ndarray) -> None:
            key = frozenset(costs.reader_of[read] for read in readers)
            if key and amounts.any():
                asked[key] = asked.get(key, 0.0) + many * amounts

        before = self.tables.tile_bytes[costs.sources].astype(float)[:, None]
        after = np.where(costs.sources[:, None] == costs.every, 0.0, self.tables.tile_bytes[costs.every].astype(float))
        early = (after < before) & (not flow.kept_by_program)
        reads = range(len(life.spans))
        # Where a tensor lives for its reads alone, each of them holds the smaller of it and its copy (`needed`): what
        # counts is what a copy holds beyond. One that is smaller may be left out for the tensor that others need.
        beyond = np.maximum(after - before, 0.0) if any(life.fades) else np.where(early, 0.0, after)
        # To make a copy again costs no less than it does once.
        once = costs.seconds * min([1.0, *(reader.times / max(1, flow.times) for reader in flow.readers)])
        ranked = sorted(range(len(life.prices)), key=lambda at: -life.prices[at])
        kept = [np.minimum(once, price * beyond) for price in life.prices]
        spans = list(life.spans)
        # Who keeps a copy throughout a loop holds it at other positions than its own, too, or pays in every trip.
        spare: dict[int, np.ndarray] = {}
        for read, reader in enumerate(flow.readers):
            first, last = spans[read]
            trips = reader.times / max(1, flow.times)
            if not reader.held or trips < last - first + 1:
                spans[read] = life.near[read]
                continue
            beside = [at for at in range(first, last) if not life.near[read][0] <= at < life.near[read][1]]
            if beside:
                dearer = once * (trips - 1) - sum(kept[at] for at in beside)
                spare[read] = np.maximum(dearer, 0.0) / len(beside)
        # Between a read before a position and one after it a copy is kept there, or made twice. So of the part of its
        # price that bytes are worth at some positions, the dearest, readers pay once between any two of these.
        for level in range(len(ranked) + 1):
            upper = costs.seconds if level == 0 else kept[ranked[level - 1]]
            amounts = upper - kept[ranked[level]] if level < len(ranked) else upper
            cuts = [-1, *sorted(ranked[:level]), len(ranked)]
            for low, high in itertools.pairwise(cuts):
                ask([read for read in reads if spans[read][0] <= high and spans[read][1] > low], amounts)
        for at, price in enumerate(life.prices):
            if life.certain[at]:
                written += many * price * before[:, 0]
            here = [read for read in reads if life.near[read][0] <= at < life.near[read][1]]
            over = [read for read in spare if spans[read][0] <= at < spans[read][1] and read not in here]
            whole = life.certain[at] or not life.fades[at]
            # A smaller copy is made right after its tensor is.
            there = np.where(early, 0.0, after) if life.begins[at] else after
            copy = np.maximum(price * (there if whole else beyond) - kept[at], 0.0)
            shared = np.min([copy, *(spare[read] for read in over)], axis=0) if over else 0.0 * copy
            ask([*here, *over], shared)
            ask(here, copy - shared)
            if whole and len(reads) == 1 and not here and life.spans[0][1] > at and not flow.readers[0].held:
                # The only copy is made before, if it is smaller.
                ask([0], np.where(early, price * there, 0.0))
            if life.fades[at]:
                key = frozenset(costs.reader_of[read] for read in reads if life.spans[read][1] > at)
                needed[key] = needed.get(key, 0.0) + many * price

    def _charge_need(self, costs: _FlowCosts, readers: frozenset[int], price: float) -> None:
        """Charges that a tensor, or a smaller copy that is read, lives: the most that any of some readers asks for."""
        before, after = (self.tables.tile_bytes[each].astype(float) for each in (costs.sources, costs.every))
        others = [number for number in sorted(readers) if costs.readers[number].edge >= 0]
        if not others:
            for number in sorted(readers)[:1]:  # of the writer's own group
                read = after[costs.readers[number].columns][costs.readers[number].target_of]
                costs.own = costs.own + price * np.minimum(before[costs.source_of], read)
            return
        # What each of them asks for in any layout is certain; beyond that, step by step of what tiles may take.
        least = np.minimum(before, max(after[costs.readers[number].columns].min() for number in others))
        costs.own = costs.own + price * least[costs.source_of]
        lower = 0.0
        for step in np.unique([*before, *after]).tolist():
            amounts = np.where(before >= step, price * np.maximum(0.0, step - np.maximum(lower, least)), 0.0)
            lower = step
            if not amounts.any():
                continue
            asking = [(number, np.flatnonzero(after[costs.readers[number].columns] >= step)) for number in others]
            self._share_out(costs, [(n, columns) for n, columns in asking if len(columns)], amounts[:, None])

    def _share_out(
        self, costs: _FlowCosts, readers: Sequence[tuple[int, np.ndarray | None]], amounts: np.ndarray
    ) -> None:
        """Divides amounts among the readers who may ask for them: by the layout that each reads, or if columns of it
        are given, as soon as it reads any of these."""
        columns = [costs.readers[number].columns if asking is None else np.zeros(1, int) for number, asking in readers]
        shared = _Shared([], [], [], [], np.zeros(amounts.shape[1]))
        for each in columns:
            shared.readers[each] += 1
        shared.readers = np.maximum(shared.readers, 1)
        for (number, asking), each in zip(readers, columns, strict=True):
            share = amounts[:, each] / shared.readers[each]
            reader = costs.readers[number]
            if reader.edge < 0:
                costs.own = costs.own + share[costs.source_of, reader.target_of]
                continue
            asking = np.arange(len(reader.columns)) if asking is None else asking
            share = np.repeat(share, len(asking), axis=1) if len(each) == 1 else share
            shared.edges.append(reader.edge)
            shared.asking.append(asking)
            shared.columns.append(np.broadcast_to(each, asking.shape))
            shared.shares.append(share)
            self._edges[reader.edge].costs[:, asking] += share
        costs.shared.append(shared)

    def _credit_reuses(self, position: int, price: float) -> None:
        """Takes off what nodes that write over what they read hold only once at a position."""
        for group, own in zip(self.tables.groups, self.own, strict=True):
            for node in (self.problem.nodes[number] for number in group.nodes):
                if any(self.problem.tensors[node.writes[write].tensor].born == position for _, write in node.reuses):
                    reused = [list_reused(self.problem, node, split) for split in group.splits]
                    own -= price * np.array([sum(n for at, n in places if at == position) for places in reused], float)


def _sort_classes(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(classes, kind="stable")
    return order, np.flatnonzero(np.diff(classes[order], prepend=-1))
