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
budget times that taken off the bound. What is counted is what lives for certain, whichever copies are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """Edges of one flow whose readers may share copies: their columns among all layouts, and each one's share."""

    edges: list[int]
    columns: list[np.ndarray]
    shares: list[np.ndarray]
    readers: np.ndarray


class LabelBounds:
    """Bounds for a problem; `pass_costs` raises them, and `excess` says how much more each split takes at least."""

    def __init__(self, problem: Problem, tables: ChoiceTables, scale: float) -> None:
        self.problem, self.tables = problem, tables
        self.own = [group.seconds * scale for group in tables.groups]
        self.excess = [np.zeros(len(group.splits)) for group in tables.groups]
        self._edges: list[_Edge] = []
        self._shared: list[_Shared] = []
        self._scale = scale
        self._edge_of = [self._add_flow(flow) for flow in tables.flows]
        self.byte_prices: dict[int, float] = {}
        self._touching: list[list[tuple[int, int]]] = [[] for _ in tables.groups]
        for number, edge in enumerate(self._edges):
            for end in (0, 1):
                self._touching[edge.ends[end]].append((number, end))

    def _add_flow(self, flow: TensorFlow) -> list[int]:
        """Adds the edges of a flow; returns the edge of each reader, -1 for one of the writer's own group."""
        # Readers of one group in the same layouts pay once together.
        distinct = list({(reader.group, reader.layouts.tobytes()): reader for reader in flow.readers}.values())
        sources, source_of = np.unique(flow.layouts, return_inverse=True)
        every = np.unique(np.concatenate([reader.layouts for reader in distinct])) if distinct else np.zeros(0, int)
        times = self._scale * flow.times * len(flow.tensors)
        # Pairs that no reader has in common with its writer, as most of a node with itself, are never asked for.
        prices = np.array([self.tables.seconds.get((a, b), 0.0) for a in sources.tolist() for b in every.tolist()])
        whole = np.where(np.isinf(prices), FORBIDDEN, np.minimum(prices, 1e300) * times)
        whole = whole.reshape(len(sources), len(every))
        readers = sum((np.isin(every, reader.layouts).astype(int) for reader in distinct), np.zeros(len(every), int))
        edge_of: dict[tuple[int, bytes], int] = {}
        shared = _Shared([], [], [], np.maximum(readers, 1))
        for reader in distinct:
            targets, target_of = np.unique(reader.layouts, return_inverse=True)
            # Readers meet in the columns of all layouts in which any of them reads.
            columns = np.searchsorted(every, targets)
            share = whole[:, columns] / shared.readers[columns]
            if reader.group == flow.group:
                # An edge of a group with itself is a cost of its splits.
                self.own[flow.group] = self.own[flow.group] + share[source_of, target_of]
                continue
            starts = (_sort_classes(source_of), _sort_classes(target_of))
            shared.edges.append(len(self._edges))
            shared.columns.append(columns)
            shared.shares.append(share)
            self._edges.append(_Edge((flow.group, reader.group), (source_of, target_of), starts, share.copy()))
            edge_of[reader.group, reader.layouts.tobytes()] = shared.edges[-1]
        if len(shared.edges) > 1:
            self._shared.append(shared)
        return [edge_of.get((reader.group, reader.layouts.tobytes()), -1) for reader in flow.readers]

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
        """Offers what a reader's share of a price does not add to the bound to all readers of that copy."""
        for shared in self._shared:
            pool = np.zeros((len(shared.shares[0]), len(shared.readers)))
            for number, columns, share in zip(shared.edges, shared.columns, shared.shares, strict=True):
                costs = self._edges[number].costs
                # The least of a pair is part of the bound, and stays.
                spare = np.minimum(share, costs - costs.min())
                costs -= spare
                share -= spare
                pool[:, columns] += spare
            pool /= shared.readers
            for number, columns, share in zip(shared.edges, shared.columns, shared.shares, strict=True):
                self._edges[number].costs += pool[:, columns]
                share += pool[:, columns]

    def price_bytes(self, prices: Mapping[int, float]) -> None:
        """Sets what a byte costs at each position; others are free. Costs that were handed on stay where they are."""
        # Differences alone: all passes so far stay valid, as costs moved between groups and pairs, not away.
        for position in {*prices, *self.byte_prices}:
            change = prices.get(position, 0.0) - self.byte_prices.get(position, 0.0)
            if change:
                self._weigh_position(position, change)
        self.byte_prices = dict(prices)

    def _weigh_position(self, position: int, price: float) -> None:
        tile_bytes = self.tables.tile_bytes
        for flow, edges in zip(self.tables.flows, self._edge_of, strict=True):
            for tensor in flow.tensors:
                use, about = self.tables.uses[tensor], self.problem.tensors[tensor]
                if use is None or not about.born <= position <= max(about.dies, use.last):
                    continue
                own = about.born <= about.dies
                if own and (position == about.born or (flow.kept_by_program and position <= about.dies)):
                    self.own[flow.group] += price * tile_bytes[flow.layouts]
                    own = False
                # One reader alone is counted: of several, which might share a copy, one that reads here, or the last.
                here = [n for n, (*_, access) in enumerate(use.reads) if access.at == position]
                last = [n for n, (*_, access) in enumerate(use.reads) if access.last >= position]
                if not (here or (own and last)):
                    continue
                number = here[0] if here else last[-1]
                source, target = flow.layouts, flow.readers[number].layouts
                if edges[number] >= 0:
                    # As the edge has them; a group's own pairs are split by split.
                    source, target = np.unique(source)[:, None], np.unique(target)[None, :]
                before, after = tile_bytes[source].astype(float), tile_bytes[target].astype(float)
                # A tensor that is read here lies in the reader's layout; before, in that or its own.
                held = after if here else np.minimum(before, after)
                if not own:
                    # It is counted already, and only a copy comes on top.
                    held = np.where(source == target, 0.0, held)
                if edges[number] < 0:
                    self.own[flow.group] += price * held
                else:
                    self._edges[edges[number]].costs += price * held
        for group, own in zip(self.tables.groups, self.own, strict=True):
            for node in (self.problem.nodes[number] for number in group.nodes):
                if any(self.problem.tensors[node.writes[write].tensor].born == position for _, write in node.reuses):
                    reused = [list_reused(self.problem, node, split) for split in group.splits]
                    own -= price * np.array([sum(n for at, n in places if at == position) for places in reused], float)


def _sort_classes(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(classes, kind="stable")
    return order, np.flatnonzero(np.diff(classes[order], prepend=-1))
