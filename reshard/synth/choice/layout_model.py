"""A problem as a mixed-integer linear program.

    variables                                                      rows
    x[group, split]      0 or 1                                    one split for each group
    e[a, l]              a tensor is written in a, read in l       the sum over l is x of what writes in a, and
                                                                   the sum over a is x of what reads in l
    m[flow, a, l]        it is moved from a to l                   at least e of each reader: paid once

Given whole x, the rest follows, so that only x need be whole. Each pair (a, l) costs what its plan takes.

Memory enters position by position. What lives at one depends on which copies are kept, so that of the tensors that live
there, and that several read, the program says more, with the readers in order of position:

    y[read]              0 or 1: the read moves its own copy
    n[reader, a, l]      that copy: at most e, and 0 unless y
    u[reader, a, l]      the kept copy is made for this reader, the first: e - n of any is at most the u until then
    O[position, a]       the tensor itself still lives: a later reader reads it as it is, or moves it
    C[position, l]       the kept copy lives: it is made by now, and somebody reads it later
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from reshard.synth.choice.assess import list_reused
from reshard.synth.choice.flows import ChoiceTables, FlowReader, ReadKey, TensorFlow
from reshard.synth.choice.linear_program import LinearProgram
from reshard.synth.choice.problem import Problem, Split

Pair: TypeAlias = tuple[int, int]
"""Numbers of the layouts in which a tensor is written and read."""

Sums: TypeAlias = dict[Pair, list[int]]
"""For each pair the variables whose sum says whether it is the one that is chosen."""

Weights: TypeAlias = defaultdict[int, float]
"""A sum of variables with coefficients."""


class MemoryRow(NamedTuple):
    """That a device holds at most the budget at a position, and if a tensor is given, with what its move there needs.

    `how` is "late" or "anew" for the kept or own copy of the reader `which`, "late" for both if they are made at one
    position, and "early" for the copy in layout `which`.
    """

    position: int
    tensor: int = -1
    how: str = ""
    which: int = -1


@dataclass(frozen=True)
class _Reads:
    """Of each reader of a flow the pairs, its own copies, and the kept copies made for it; the copies made early."""

    pairs: list[Sums]
    anew: list[Sums]
    late: list[Sums]
    early: Sums


class _Place(NamedTuple):
    """Where a position is in the life of a tensor: how many positions after its birth, up to 2; whether it lives there
    whoever reads it, or for its reads alone, and that only if it is moved; and of each read whether its own copy is
    there, it is over, needs a kept copy there or later, and later."""

    age: int
    whole: bool
    fades: bool
    if_moved: bool
    reads: tuple[tuple[bool, bool, bool, bool], ...]


class LayoutModel:
    """The program of a problem, with rows for the memory at some positions, each with a margin that it leaves free.

    It minimizes seconds, times `scale`. Where `overshoot` is given, a choice may exceed the budget, and pays that for
    each `unit` of bytes; with a scale and a budget of 0 it holds as few bytes as can be.
    """

    def __init__(
        self,
        problem: Problem,
        tables: ChoiceTables,
        rows: Mapping[MemoryRow, float],
        budget: int,
        scale: float,
        unit: int = 1,
        overshoot: float | None = None,
    ) -> None:
        self.problem, self.tables, self.scale = problem, tables, scale
        self.program = LinearProgram()
        self._grids: dict[object, np.ndarray] = {}
        self._reads: dict[int, _Reads] = {}
        self._anew: dict[ReadKey, int] = {}
        self._weighed: dict[tuple[int, _Place], Weights] = {}
        self._moved: dict[int, dict[int, int]] = {}
        self._tile_bytes = [float(nbytes) for nbytes in tables.tile_bytes.tolist()]
        self.columns = [
            np.array([self.program.add_column(seconds * self.scale, whole=True) for seconds in group.seconds.tolist()])
            for group in tables.groups
        ]
        for columns in self.columns:
            self.program.add_row(dict.fromkeys(columns.tolist(), 1.0), 1.0, 1.0)
        # What no memory row speaks of keeps all its copies, which is never slower.
        detailed = self._list_detailed({row.position for row in rows})
        for number, flow in enumerate(tables.flows):
            pairs = [self._sum_pairs(flow, reader) for reader in flow.readers]
            if number in detailed:
                self._reads[number] = self._follow_copies(flow, pairs)
            else:
                self._price_pairs(flow, pairs)
                # The only copy of a tensor that is read once is made for that read, or at birth.
                self._reads[number] = _Reads(pairs, [{} for _ in pairs], pairs, pairs[0] if pairs else {})
        beyond = None if overshoot is None else self.program.add_column(overshoot, np.inf)
        self.row_numbers: list[int] = []
        for row, margin in rows.items():
            # Bytes as they are, up to 1e11, would drown the solver's tolerances of 1e-6.
            weights = {column: weight / unit for column, weight in self._weigh_row(row).items()}
            if beyond is not None:
                weights[beyond] = -1.0
            self.row_numbers.append(self.program.add_row(weights, -np.inf, (budget - margin) / unit))

    def read_splits(self, values: np.ndarray) -> tuple[tuple[Split, ...], frozenset[tuple[int, int]]]:
        """The split of each node, and the reads that make their own copies."""
        chosen = [
            group.splits[int(np.argmax(values[columns]))]
            for group, columns in zip(self.tables.groups, self.columns, strict=True)
        ]
        apart = {key for key, column in self._anew.items() if values[column] > 0.5}
        anew = {
            (node, index)
            for use in self.tables.uses
            if use is not None and use.asks_what_to_keep
            for node, index, _ in use.reads
            if (self.tables.group_of[node], index) in apart
        }
        return tuple(chosen[group] for group in self.tables.group_of), frozenset(anew)

    def list_kept(self, values: np.ndarray) -> list[int]:
        """The variables of reads that do not make any part of their own copy."""
        return [column for column in self._anew.values() if values[column] < 1e-6]

    def _list_detailed(self, positions: Iterable[int]) -> set[int]:
        """The flows of which rows at these positions ask which copies are kept."""
        if not positions:
            return set()
        flows = self.tables.flows
        uses = [self.tables.uses[flow.tensors[0]] for flow in flows]
        # Tensors of a flow have equal uses, so that the first speaks for all.
        asks = [use is not None and use.asks_what_to_keep for use in uses]
        found = {
            number
            for number, flow in enumerate(flows)
            if asks[number] and any(self._lives_at(tensor, p) for tensor in flow.tensors for p in positions)
        }
        # A read that is made anew is so in all tied nodes, hence in all flows that they read.
        while True:
            keys = {reader.key for number in found for reader in flows[number].readers}
            more = {
                number
                for number, flow in enumerate(flows)
                if asks[number] and number not in found and any(reader.key in keys for reader in flow.readers)
            }
            if not more:
                return found
            found |= more

    def _lives_at(self, tensor: int, position: int) -> bool:
        use, about = self.tables.uses[tensor], self.problem.tensors[tensor]
        return use is not None and about.born <= position <= max(about.dies, use.last)

    def _sum_pairs(self, flow: TensorFlow, reader: FlowReader) -> Sums:
        """The sums of variables that say in which pair of layouts a flow is written and read."""
        writer, columns = self.columns[flow.group], self.columns[reader.group]
        found: Sums = {}
        if flow.group == reader.group:
            for column, pair in zip(writer.tolist(), zip(flow.layouts, reader.layouts, strict=True), strict=True):
                found.setdefault((int(pair[0]), int(pair[1])), []).append(column)
            return found
        # Many splits write a tensor in the same layout: pairs of layouts are far fewer than pairs of splits.
        sources, source_of = _number_distinct(flow.layouts)
        targets, target_of = _number_distinct(reader.layouts)
        # With one layout at one end, the other end's variables say it all.
        if len(targets) == 1:
            return {(source, targets[0]): writer[source_of == i].tolist() for i, source in enumerate(sources)}
        if len(sources) == 1:
            return {(sources[0], target): columns[target_of == i].tolist() for i, target in enumerate(targets)}
        # Two tensors that the same groups write and read in as many layouts, split for split, share these variables.
        alike = (flow.group, source_of.tobytes(), reader.group, target_of.tobytes())
        grid = self._grids.get(alike)
        if grid is None:
            new = [self.program.add_column() for _ in range(len(sources) * len(targets))]
            grid = self._grids[alike] = np.array(new).reshape(len(sources), len(targets))
            for table, ends, of in ((grid, writer, source_of), (grid.T, columns, target_of)):
                for number, entries in enumerate(table.tolist()):
                    whole = ends[of == number].tolist()
                    self.program.add_row(dict.fromkeys(entries, 1.0) | dict.fromkeys(whole, -1.0), 0.0, 0.0)
        return {(a, b): [int(grid[i, k])] for i, a in enumerate(sources) for k, b in enumerate(targets)}

    def _cost(self, pair: Pair, times: int) -> float:
        # A move that no plan makes takes forever: whoever prices it forbids its variables.
        return self.tables.seconds[pair] * self.scale * times if self.scale else 0.0

    def _price_pairs(self, flow: TensorFlow, pairs: list[Sums]) -> None:
        """What each reader's pairs cost, those of several once, if all of them keep their copies."""
        # Readers of the same group in the same layouts have the very same variables.
        owners: defaultdict[Pair, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
        for sums in pairs:
            for pair, columns in sums.items():
                if pair[0] != pair[1]:
                    owners[pair][tuple(columns)] = columns
        for pair, sharing in owners.items():
            if self.tables.seconds[pair] == np.inf:
                self._forbid(column for columns in sharing.values() for column in columns)
                continue
            cost = self._cost(pair, flow.times * len(flow.tensors))
            # Only what several may share needs a variable of its own that is paid once.
            if cost and len(sharing) == 1:
                for column in next(iter(sharing.values())):
                    self.program.costs[column] += cost
            elif cost:
                paid = self.program.add_column(cost)
                for columns in sharing.values():
                    self.program.add_row({paid: 1.0} | dict.fromkeys(columns, -1.0), 0.0)

    def _forbid(self, columns: Iterable[int]) -> None:
        for column in columns:
            self.program.upper[column] = 0.0

    def _follow_copies(self, flow: TensorFlow, pairs: list[Sums]) -> _Reads:
        """What each reader's pairs cost, whichever copies are kept, and for whom they are made."""
        many, tile_bytes = len(flow.tensors), self.tables.tile_bytes
        reads = _Reads(pairs, [{} for _ in pairs], [{} for _ in pairs], {})
        until: defaultdict[Pair, list[int]] = defaultdict(list)
        for reader, sums, anew, late in zip(flow.readers, pairs, reads.anew, reads.late, strict=True):
            apart = self._anew.get(reader.key)
            if apart is None:
                apart = self._anew[reader.key] = self.program.add_column(whole=True)
            moved = {pair: columns for pair, columns in sums.items() if pair[0] != pair[1]}
            own: dict[int, float] = {}
            kept: Weights = defaultdict(float)
            for pair, columns in moved.items():
                if self.tables.seconds[pair] == np.inf:
                    self._forbid(columns)
                    continue
                copy = self.program.add_column(self._cost(pair, reader.times * many))
                anew[pair] = [copy]
                own[copy] = 1.0
                # What is kept of a pair: e - n.
                remains = dict.fromkeys(columns, 1.0) | {copy: -1.0}
                for column, weight in remains.items():
                    kept[column] += weight
                self.program.add_row(remains, 0.0, np.inf)
                cost = self._cost(pair, flow.times * many)
                # A copy that shrinks is made right after birth whoever reads it, so that its start is no question.
                if tile_bytes[pair[1]] < tile_bytes[pair[0]] and not flow.kept_by_program:
                    if pair not in reads.early:
                        reads.early[pair] = [self.program.add_column(cost)]
                    self.program.add_row({reads.early[pair][0]: -1.0} | remains, -np.inf, 0.0)
                    continue
                made = self.program.add_column(cost)
                late[pair] = [made]
                self.program.add_row({made: -1.0} | remains, 0.0, np.inf)
                until[pair].append(made)
                # Made once, for this reader or one before: were it free to be made again, it would live nowhere.
                self.program.add_row(dict.fromkeys(until[pair], -1.0) | remains, -np.inf, 0.0)
            # Neither half: without these two rows a fraction of a copy would be kept and the rest made anew.
            self.program.add_row({apart: -1.0} | own, -np.inf, 0.0)
            kept[apart] += 1.0
            self.program.add_row(kept, -np.inf, 1.0)
        for makers in until.values():
            self.program.add_row(dict.fromkeys(makers, 1.0), 0.0, 1.0)
        return reads

    def _weigh_row(self, row: MemoryRow) -> Weights:
        """The bytes that a device holds at a position, as a sum of variables."""
        held: Weights = defaultdict(float)
        position, tables = row.position, self.tables
        for number, flow in enumerate(tables.flows):
            # Of repeated layers, most tensors of a flow are in one place: before or after the same uses.
            for place, many in Counter(self._find_place(tensor, position) for tensor in flow.tensors).items():
                if place is None:
                    continue
                # Rows at other positions say the same of a place, with the same variables.
                if (number, place) not in self._weighed:
                    self._weighed[number, place] = self._weigh_place(number, place)
                for column, weight in self._weighed[number, place].items():
                    held[column] += many * weight
            if row.tensor in flow.tensors:
                # Moves at one position run one after the other: each has a row of its own.
                for pair, columns in self._list_moves(self._reads[number], row):
                    _add_weights(held, columns, tables.beside(pair))
        for group, columns in zip(tables.groups, self.columns, strict=True):
            for node in (self.problem.nodes[number] for number in group.nodes):
                if any(self.problem.tensors[node.writes[write].tensor].born == position for _, write in node.reuses):
                    for column, split in zip(columns.tolist(), group.splits, strict=True):
                        held[column] -= sum(n for at, n in list_reused(self.problem, node, split) if at == position)
        return held

    def _list_moves(self, reads: _Reads, row: MemoryRow) -> list[tuple[Pair, list[int]]]:
        """The moves of which at most one runs where a row is, in which pairs, and the variables that say so."""
        use, tile_bytes = self.tables.uses[row.tensor], self.tables.tile_bytes
        assert use is not None  # it moves
        # Of a tensor that is read once, any pair may be one that is made at birth, or one that is made for the read.
        copies = reads.early if row.how == "early" else reads.late[row.which]
        born = {p for p in copies if tile_bytes[p[1]] < tile_bytes[p[0]] and not use.kept_by_program}
        if row.how == "early":
            return [(pair, columns) for pair, columns in copies.items() if pair[1] == row.which and pair in born]
        _, _, access = use.reads[row.which]
        late = [(pair, columns) for pair, columns in copies.items() if pair not in born]
        anew = list(reads.anew[row.which].items())
        # One copy is made for a read, to be kept or not: apart, a part of each would need a part of the room.
        moves = [*late, *anew] if access.first == access.at - 1 else anew if row.how == "anew" else late
        return [(pair, columns) for pair, columns in moves if pair[0] != pair[1]]

    def _find_place(self, tensor: int, position: int) -> _Place | None:
        use, about = self.tables.uses[tensor], self.problem.tensors[tensor]
        if use is None or not self._lives_at(tensor, position):
            return None
        # In its first position a tensor lives in any case, beside a copy that is made at once.
        lives = about.fused or about.born <= about.dies
        whole = lives and (position == about.born or (use.kept_by_program and position <= about.dies))
        # Later it lives for its reads, unless it lies in another's memory, or the program keeps it anyway.
        fades = lives and about.born < position and not use.kept_by_program
        accesses = (access for *_, access in use.reads)
        reads = tuple(
            (a.at - 1 <= position <= a.at, a.last < position, a.first >= position, a.first > position) for a in accesses
        )
        return _Place(min(2, position - about.born), whole, fades, about.fused, reads)

    def _weigh_place(self, of: int, place: _Place) -> Weights:
        """The bytes of a tensor of a flow, and of its copies, in a place of its life."""
        flow, reads = self.tables.flows[of], self._reads[of]
        held: Weights = defaultdict(float)
        tile_bytes, held_bytes = self.tables.tile_bytes, self._count_held(flow)
        moved = self._find_moved(of) if place.if_moved else None
        if place.whole:
            written = zip(self.columns[flow.group].tolist(), flow.layouts.tolist(), strict=True)
            for column, layout in written if moved is None else zip(moved.values(), moved, strict=True):
                held[column] += held_bytes[layout]
        itself: list[dict[int, Weights]] = []
        copies: list[dict[int, Weights]] = []
        made = {
            pair for late, (*_, ahead, _) in zip(reads.late, place.reads, strict=True) if not ahead for pair in late
        }
        for number, (here, over, ahead, _) in enumerate(place.reads):
            if here:
                for pair, columns in reads.anew[number].items():
                    _add_weights(held, columns, held_bytes[pair[1]])
            # Reads that are over need nothing any more.
            if over:
                continue
            needs: dict[int, Weights] = defaultdict(lambda: defaultdict(float))
            keeps: dict[int, Weights] = defaultdict(lambda: defaultdict(float))
            for pair, columns in reads.pairs[number].items():
                source, target = pair
                if source == target:
                    _add_weights(needs[source], columns, 1.0)
                    continue
                anew, late = reads.anew[number].get(pair, ()), reads.late[number].get(pair, ())
                early = tile_bytes[target] < tile_bytes[source] and not flow.kept_by_program
                if early and place.age == 0:
                    continue
                _add_weights(keeps[target], columns, 1.0)
                _add_weights(keeps[target], anew, -1.0)
                if place.age == 1 if early else ahead and pair not in made:
                    # Nobody has made a copy before, whether this reader makes its own or not.
                    _add_weights(needs[source], columns, 1.0)
                else:
                    _add_weights(needs[source], anew, 1.0)
                    _add_weights(needs[source], late if ahead and not early else (), 1.0)
                # The kept copy is there unless it is made later, for this reader or one before it: those after it would
                # let relaxations make a part of it for them, and hold less than any choice.
                for other in range(0 if early else number + 1):
                    if place.reads[other][-1]:
                        _add_weights(keeps[target], reads.late[other].get(pair, ()), -1.0)
            itself.append(needs)
            copies.append(keeps)
        if place.fades:
            self._hold_any(held, flow, itself, moved)
        self._hold_any(held, flow, copies)
        return held

    def _count_held(self, flow: TensorFlow) -> list[float]:
        """The bytes that a tile of a flow's tensors takes in each layout."""
        tensor = self.problem.tensors[flow.tensors[0]]
        return [float(tensor.count_held(layout)) for layout in self.tables.layouts] if flow.padded else self._tile_bytes

    def _find_moved(self, of: int) -> dict[int, int]:
        """For each layout the variable that says whether a flow is moved from it, and not only sliced."""
        if of in self._moved:
            return self._moved[of]
        found = self._moved[of] = dict[int, int]()
        for sums in self._reads[of].pairs:
            moves: defaultdict[int, Weights] = defaultdict(lambda: defaultdict(float))
            for pair, columns in sums.items():
                if pair[0] != pair[1] and self.tables.receives(pair):
                    _add_weights(moves[pair[0]], columns, 1.0)
            for source, weights in moves.items():
                if source not in found:
                    found[source] = self.program.add_column()
                self.program.add_row({found[source]: -1.0} | weights, -np.inf, 0.0)
        return found

    def _hold_any(
        self,
        held: Weights,
        flow: TensorFlow,
        readers: list[dict[int, Weights]],
        moved: Mapping[int, int] | None = None,
    ) -> None:
        """Adds the tile of each layout that any reader needs, and if told from which it is moved, of these alone."""
        held_bytes = self._count_held(flow)
        needed: defaultdict[int, list[Weights]] = defaultdict(list)
        for reader in readers:
            for layout, weights in reader.items():
                terms: Weights = defaultdict(float, {column: value for column, value in weights.items() if value})
                if terms:
                    needed[layout].append(terms)
        for layout, asked in needed.items():
            nbytes = held_bytes[layout]
            if moved is not None and layout not in moved:
                continue
            # What one reader alone may need lives just when it does; of several, any.
            if len(asked) == 1 and moved is None:
                for column, weight in asked[0].items():
                    held[column] += nbytes * weight
                continue
            lives = self.program.add_column()
            held[lives] += nbytes
            for weights in asked:
                if moved is not None:
                    # Where the tensor is not written in this layout, neither is it moved from it, nor read in it.
                    written = self.columns[flow.group][flow.layouts == layout].tolist()
                    _add_weights(weights, written, -1.0)
                    _add_weights(weights, [moved[layout]], 1.0)
                self.program.add_row({lives: -1.0} | weights, -np.inf, 0.0)


def _add_weights(weights: Weights, columns: Iterable[int], value: float) -> None:
    for column in columns:
        weights[column] += value


def _number_distinct(layouts: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The distinct numbers, in order of appearance, and for each entry the place of its own among them."""
    places: dict[int, int] = {}
    places_of = np.array([places.setdefault(layout, len(places)) for layout in layouts.tolist()], np.int64)
    return list(places), places_of


def scale_seconds(tables: ChoiceTables) -> float:
    """A factor that brings the seconds of a typical choice to about a thousand, far above the solver's tolerances."""
    total = sum(float(group.seconds.mean()) for group in tables.groups)
    prices = [seconds for seconds in tables.seconds.values() if seconds < np.inf]
    total += len(tables.flows) * sum(prices) / max(1, len(prices))
    return 1e3 / total if total > 0 else 1.0
