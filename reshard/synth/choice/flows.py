"""A problem as tables: groups of nodes that are split alike, and flows of tensors from one group to others.

For example, two layers whose weights are tied, on an axis of 2 devices:

    group        splits                     nodes
    products     (x,), (), rows or nothing  layer 1, layer 2
    weights      likewise                   w1, w2
    flow         w1 and w2, weights -> products: one table of prices, counted twice
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from reshard.errors import PlanError
from reshard.synth.choice.assess import TensorUse, list_uses, time_node
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Access, Problem, Split, access_layout
from reshard.synth.choice.splits import list_orders, list_splits
from reshard.types.layout import Layout

ALIKE_FROM = 2_000
"""Beyond so many pairs, moves that are alike have one price."""

COUNTED_PAIRS = 500
"""Of so many pairs that are left each has its own price again."""

ReadKey: TypeAlias = tuple[int, int]
"""A group, and the number of a read of each of its nodes: what is kept or made anew alike."""


@dataclass(frozen=True)
class TiedNodes:
    """Nodes that are split alike, the splits that they may have, and the seconds of all of them in each."""

    nodes: tuple[int, ...]
    splits: tuple[Split, ...]
    seconds: np.ndarray


@dataclass(frozen=True)
class FlowReader:
    """A read of a flow: by which group, as the number of which of its reads, in which layout for each of its splits."""

    group: int
    key: ReadKey
    layouts: np.ndarray
    times: int
    held: bool


@dataclass(frozen=True)
class TensorFlow:
    """Tensors that are written and read alike by the same groups; `layouts` for each split of the writer."""

    tensors: tuple[int, ...]
    group: int
    layouts: np.ndarray
    times: int
    kept_by_program: bool
    readers: tuple[FlowReader, ...]
    padded: bool = False


@dataclass(frozen=True)
class ChoiceTables:
    """Groups and flows of a problem, the distinct layouts, and of each pair that a flow may need its price."""

    groups: tuple[TiedNodes, ...]
    group_of: tuple[int, ...]
    flows: tuple[TensorFlow, ...]
    uses: tuple[TensorUse | None, ...]
    layouts: tuple[Layout, ...]
    tile_bytes: np.ndarray
    seconds: dict[tuple[int, int], float]
    prices: MovePrices
    ends: tuple[tuple[Layout, int], ...]
    """Each layout with how many tensors sums in it are joined with."""

    def beside(self, pair: tuple[int, int]) -> int:
        """Bytes that a move needs while it runs, beside source and target: few moves are asked for it."""
        source, target = pair
        [price] = self.prices.price_pairs([(self.layouts[source], self.layouts[target], 1)])
        return max(0, price.peak_bytes - int(self.tile_bytes[source]) - int(self.tile_bytes[target]))

    def receives(self, pair: tuple[int, int]) -> bool:
        """Whether a device receives anything in a move."""
        [price] = self.prices.price_pairs([(self.layouts[pair[0]], self.layouts[pair[1]], 1)])
        return price.received_bytes > 0


def tabulate_problem(problem: Problem, prices: MovePrices, speed: DeviceSpeed) -> ChoiceTables:
    """The tables of a problem. Raises `PlanError` for nodes without any split that all who are tied have in common."""
    groups, group_of = _group_nodes(problem, speed)
    numbers: dict[tuple[Layout, int], int] = {}
    known: dict[object, np.ndarray] = {}

    def number_layouts(number: int, access: Access) -> np.ndarray:
        # Repeated layers read alike: one table serves all whose factors are as large.
        node, tensor = problem.nodes[number], problem.tensors[access.tensor]
        group = group_of[number]
        told = tensor.shape, tensor.dtype, tensor.joined
        alike = (group, told, node.sizes, access.dims, access.sums, access.reduction)
        if alike not in known:
            layouts = (access_layout(problem, node, access, split) for split in groups[group].splits)
            listed = [end_of_move(layout, tensor.joined) for layout in layouts]
            known[alike] = np.array([numbers.setdefault(end, len(numbers)) for end in listed], np.int64)
        return known[alike]

    uses = tuple(list_uses(problem))
    merged: defaultdict[object, list[int]] = defaultdict(list)
    flows: dict[object, TensorFlow] = {}
    for tensor, use in enumerate(uses):
        if use is None:
            continue
        writer, _, write = use.write
        readers = tuple(
            FlowReader(
                group_of[node], (group_of[node], index), number_layouts(node, access), access.times, bool(access.held)
            )
            for node, index, access in use.reads
        )
        layouts = number_layouts(writer, write)
        alike = (
            (group_of[writer], id(layouts), write.times, use.kept_by_program, problem.tensors[tensor].padded),
            tuple((reader.key, id(reader.layouts), reader.times, reader.held) for reader in readers),
        )
        # Flows that agree in all that costs depend on are one, as often as there are tensors.
        merged[alike].append(tensor)
        padded = problem.tensors[tensor].padded
        flows[alike] = TensorFlow((), group_of[writer], layouts, write.times, use.kept_by_program, readers, padded)
    joined = tuple(replace(flow, tensors=tuple(merged[alike])) for alike, flow in flows.items())
    ends = tuple(numbers)
    seconds = _time_moves(joined, ends, prices, ALIKE_FROM)
    if seconds is None:
        seconds = _estimate_moves(joined, ends, prices)
    listed = tuple(layout for layout, _ in ends)
    tile_bytes = np.array([layout.tile_bytes for layout in listed], np.int64)
    return ChoiceTables(groups, group_of, joined, uses, listed, tile_bytes, seconds, prices, ends)


def end_of_move(layout: Layout, joined: int) -> tuple[Layout, int]:
    """A layout of a tensor with what its price depends on besides: only sums are joined."""
    return layout, joined if layout.partial else 1


def _time_moves(
    flows: Sequence[TensorFlow], ends: Sequence[tuple[Layout, int]], prices: MovePrices, exact: int
) -> dict[tuple[int, int], float] | None:
    """The seconds of each move that a flow may need; None if these are more than `exact`."""
    pairs: dict[tuple[int, int], None] = {}
    for flow in flows:
        for reader in flow.readers:
            pairs.update(dict.fromkeys(list_layout_pairs(flow, reader)))
            if len(pairs) > exact:
                return None
    priced = prices.price_pairs((ends[a][0], ends[b][0], ends[a][1]) for a, b in pairs)
    return {pair: price.seconds for pair, price in zip(pairs, priced, strict=True)}


def _estimate_moves(
    flows: Sequence[TensorFlow], ends: Sequence[tuple[Layout, int]], prices: MovePrices
) -> dict[tuple[int, int], float]:
    """Roughly the seconds of each move: programs on three axes have half a million, in a few dozen tables."""

    def list_distinct(numbers: np.ndarray) -> tuple[int, ...]:
        return tuple(dict.fromkeys(numbers.tolist()))

    tables = {
        (list_distinct(flow.layouts), list_distinct(each.layouts)): None for flow in flows for each in flow.readers
    }
    found: dict[tuple[int, int], float] = {}
    for sources, targets in tables:
        table = prices.estimate_seconds([ends[a][0] for a in sources], [ends[b][0] for b in targets])
        rows: list[list[float]] = table.tolist()
        for source, row in zip(sources, rows, strict=True):
            (before, joined), afters = ends[source], [ends[target][0] for target in targets]
            if joined > 1:
                saved = [prices.count_joined(before, after, joined) for after in afters]
                row = [seconds - less for seconds, less in zip(row, saved, strict=True)]
            found |= dict(zip(((source, target) for target in targets), row, strict=True))
    return found


def restrict_splits(tables: ChoiceTables, kept: Sequence[np.ndarray]) -> ChoiceTables:
    """The tables with some splits of each group only, those whose numbers are given."""
    groups = tuple(
        replace(group, splits=tuple(group.splits[int(n)] for n in numbers), seconds=group.seconds[numbers])
        for group, numbers in zip(tables.groups, kept, strict=True)
    )
    # Equal tables stay the same object, by which readers in equal layouts are known.
    known: dict[tuple[int, int], np.ndarray] = {}

    def pick(group: int, layouts: np.ndarray) -> np.ndarray:
        return known.setdefault((group, id(layouts)), layouts[kept[group]])

    flows = tuple(
        replace(
            flow,
            layouts=pick(flow.group, flow.layouts),
            readers=tuple(replace(reader, layouts=pick(reader.group, reader.layouts)) for reader in flow.readers),
        )
        for flow in tables.flows
    )
    # What was estimated among all is counted among few.
    seconds = _time_moves(flows, tables.ends, tables.prices, COUNTED_PAIRS) or tables.seconds
    return replace(tables, groups=groups, flows=flows, seconds=seconds)


def list_layout_pairs(flow: TensorFlow, reader: FlowReader) -> list[tuple[int, int]]:
    """The pairs of different layouts in which a tensor may be written and read."""
    if reader.group == flow.group:
        # A node that reads what it writes itself, as a softmax its maximum: one split says both layouts.
        pairs = dict.fromkeys(zip(flow.layouts.tolist(), reader.layouts.tolist(), strict=True))
    else:
        targets = dict.fromkeys(reader.layouts.tolist())
        pairs = {(source, target): None for source in dict.fromkeys(flow.layouts.tolist()) for target in targets}
    return [(source, target) for source, target in pairs if source != target]


def _group_nodes(problem: Problem, speed: DeviceSpeed) -> tuple[tuple[TiedNodes, ...], tuple[int, ...]]:
    orders = list_orders(problem)
    members: dict[object, list[int]] = {}
    for number, node in enumerate(problem.nodes):
        members.setdefault(node.tie or number, []).append(number)
    groups: list[TiedNodes] = []
    group_of = [0] * len(problem.nodes)
    for numbers in members.values():
        nodes = [problem.nodes[number] for number in numbers]
        # Nodes that differ in nothing that a split depends on are listed once.
        distinct = {(node.sizes, node.splittable, node.only): node for node in nodes}.values()
        # In the order of the first, so that the same problem always gives the same choice.
        first, *others = [list_splits(node, problem.mesh, orders) for node in distinct]
        allowed = [set(splits) for splits in others]
        common = tuple(split for split in first if all(split in splits for splits in allowed))
        if not common:
            names = ", ".join(node.name for node in nodes[:3])
            raise PlanError(f"no split is allowed for {names}; allow one, or untie them")
        # Layers of equal work are timed once and counted.
        work = [(node.flops, node.touched, node.held_bytes, node.times, node.sizes) for node in nodes]
        seconds = np.zeros(len(common))
        for alike, node in dict(zip(work, nodes, strict=True)).items():
            many = work.count(alike)
            seconds += many * np.array([time_node(problem, node, split, speed) for split in common])
        for number in numbers:
            group_of[number] = len(groups)
        groups.append(TiedNodes(tuple(numbers), common, seconds))
    return tuple(groups), tuple(group_of)
