"""Which operations of a step are split alike: clusters of cheap ones, whose factors are one.

    y = x * broadcast(g)            factors  i, j of x * .;  j of the broadcast
    h = y + b                       the same i and j: one cluster, of factors i and j

An operation joins the cluster of what it reads, if it is cheap, each dim of the value falls into factors of the same
sizes on both sides, and what may be split there may be split here. It never makes two factors of one operation one.
It does not join along what makes things smaller or larger (what a reduction writes, what a broadcast reads): there a
move costs little, and a small value that many large ones share would tie them together.

Sums of partial sums are clusters of their own, `d1 + d2 + d3` for example, where at least two of the terms may be
partial: they read and write partial sums, so that one reduction is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.jax.layout_choice.op_rules import OpRule
from reshard.jax.layout_choice.step_flow import RETURN, Loop, StepFlow, name_operations
from reshard.jax.layout_choice.trace_step import PRODUCTS
from reshard.types import dtypes
from reshard.types.mesh import Mesh

MOST_APART = 300  # operations of a cluster that may be nodes of their own
SMALL_PART = 8  # A cluster is folded into one whose values are so many times larger.

# What takes long or moves elements about is a node by itself: there the layouts of operands are worth a choice.
HEAVY = name_operations(
    "dot_general convolution gather scatter sort fft cholesky triangular_solve custom_call reduce_window "
    "select_and_scatter rng rng_bit_generator optimization_barrier while case if return"
) | {"chlo.top_k", "chlo.ragged_dot", "func.return", "sdy.manual_computation", "sdy.sharding_constraint"}


@dataclass(frozen=True)
class Cluster:
    """Operations that are split alike, in program order, and the number of each of their factors in the cluster.

    `sums` are the operands (operation, number) that are partial sums over the cluster's linear factor, if it has one;
    what the cluster writes is partial over it, too.
    """

    ops: tuple[int, ...]
    sizes: tuple[int, ...]
    splittable: frozenset[int]
    factors: Mapping[int, tuple[int, ...]]
    sums: frozenset[tuple[int, int]] = frozenset()


class _Factors:
    """Factors of all operations, some of which have become one; those of one operation never do."""

    def __init__(self, mesh: Mesh) -> None:
        self.axes = [size for size in mesh.axes.values() if size > 1]
        self.parent: list[int] = []
        self.sizes: list[int] = []
        self.free: list[bool] = []
        self.apart: list[set[int]] = []

    def add(self, rule: OpRule) -> tuple[int, ...]:
        start = len(self.parent)
        made = range(start, start + len(rule.sizes))
        for at, size in zip(made, rule.sizes, strict=True):
            self.parent.append(at)
            self.sizes.append(size)
            self.free.append(at - start in rule.splittable and any(size % axis == 0 for axis in self.axes))
            self.apart.append({other for other in made if other != at})
        return tuple(made)

    def find(self, at: int) -> int:
        while self.parent[at] != at:
            self.parent[at] = self.parent[self.parent[at]]
            at = self.parent[at]
        return at

    def unite(self, pairs: list[tuple[int, int]]) -> bool:
        """Makes the factors of each pair one; False, and nothing is done, if they cannot all be."""
        group: dict[int, set[int]] = {}
        joined: list[tuple[int, int]] = []
        for a, b in pairs:
            a, b = self.find(a), self.find(b)
            left, right = group.get(a, {a}), group.get(b, {b})
            if left is right or a == b:
                continue
            if self.sizes[a] != self.sizes[b] or self.free[a] != self.free[b]:
                return False
            if any(not self.apart[x].isdisjoint(right) for x in left):
                return False
            both = left | right
            # All pairs are checked before any is united.
            group.update(dict.fromkeys(both, both))
            joined.append((a, b))
        for a, b in joined:
            a, b = self.find(a), self.find(b)
            if a == b:
                continue
            self.parent[b] = a
            # What was apart from either is apart from both.
            for other in self.apart[b]:
                self.apart[other].discard(b)
                self.apart[other].add(a)
            self.apart[a] |= self.apart[b]
        return True


@dataclass(frozen=True)
class Summand:
    """A linear operation: the last operation of the sum that it is in, and which of its operands are partial."""

    last: int
    operands: frozenset[int]


def find_clusters(flow: StepFlow, rules: Mapping[int, OpRule], mesh: Mesh, free: frozenset[int]) -> list[Cluster]:
    """All operations with a rule in clusters, in order of their first operations.

    `free` are values that cost nothing in any layout, and so tie nobody.
    """
    sums = find_started_sums(flow, rules, free)
    apart = set[int]()
    while True:
        found = _Clusters(flow, rules, mesh)
        for at in sorted(rules):
            if flow.ops[at].name not in HEAVY and at not in apart:
                found.place(at, sums, free)
        found.fold_small(sums)
        # Once more without what ties too much, which then is left apart.
        tied = found.list_tied_states() - apart
        if not tied:
            break
        apart |= tied
    made: list[Cluster] = []
    for ops in sorted(map(sorted, found.members.values())):
        numbers: dict[int, int] = {}
        views: dict[int, tuple[int, ...]] = {}
        for at in ops:
            roots = [found.factors.find(factor) for factor in found.own[at]]
            views[at] = tuple(numbers.setdefault(each, len(numbers)) for each in roots)
        sizes = tuple(found.factors.sizes[each] for each in numbers)
        splittable = frozenset(at for each, at in numbers.items() if found.factors.free[each])
        partial = [(at, place) for at in ops if at in sums for place in sums[at].operands]
        inner = {result for at in ops for result in flow.ops[at].results}
        outer = frozenset((at, place) for at, place in partial if flow.ops[at].operands[place] not in inner)
        made.append(Cluster(tuple(ops), sizes, splittable, views, outer))
    return made


class _Clusters:
    """Clusters as they grow: the operations of each, and the reads that go from one to another."""

    def __init__(self, flow: StepFlow, rules: Mapping[int, OpRule], mesh: Mesh) -> None:
        self.flow, self.rules = flow, rules
        self.factors = _Factors(mesh)
        self.own = {at: self.factors.add(rule) for at, rule in sorted(rules.items())}
        self.parent = {at: at for at in rules}
        self.members = {at: [at] for at in rules}
        self.links: dict[int, dict[int, list[tuple[int, int]]]] = {at: {} for at in rules}

    def find(self, at: int) -> int:
        while self.parent[at] != at:
            self.parent[at] = self.parent[self.parent[at]]
            at = self.parent[at]
        return at

    def place(self, at: int, sums: Mapping[int, Summand], free: frozenset[int]) -> None:
        """Joins an operation, which is in no cluster yet, with those of what it reads."""
        op, strong = self.flow.ops[at], list[int]()
        for place, operand in enumerate(op.operands):
            value = self.flow.values[operand]
            writer = value.maker
            if operand in free or writer not in self.rules or self.flow.ops[writer].name in HEAVY:
                continue
            # Partial sums go together with their own kind, scalars only as such.
            both = [sums[each].last if each in sums else -1 for each in (at, writer)]
            if self.flow.ops[writer].inside != op.inside or both[0] != both[1] or (both[0] < 0 and not value.shape):
                continue
            edges = self.links[at].setdefault(self.find(writer), [])
            edges.append((at, place))
            self.links[self.find(writer)][at] = edges
            # A reduction's result, what a broadcast repeats, and what is rounded for several readers are small: a place
            # for a move, where clusters end.
            maker = self.flow.ops[writer]
            shrinks = maker.name == "stablehlo.reduce"
            if maker.name == "stablehlo.convert" and len(self.flow.readers[operand]) > 1:
                shrinks = dtypes.bits(value.dtype) < dtypes.bits(self.flow.values[maker.operands[0]].dtype)
            made = self.flow.values[op.results[0]].elements if op.results else 0
            grows = op.name == "stablehlo.broadcast_in_dim" and made > value.elements
            if at in sums or not (shrinks or grows):
                strong.append(writer)
        # Only now: a join must see all that the operation reads of a cluster.
        for writer in strong:
            if self.find(writer) != self.find(at):
                self._join(self.find(writer), self.find(at))

    def list_tied_states(self) -> set[int]:
        """The operations of clusters that tie what the step takes or returns to what goes into products.

        Muon, for example, multiplies a momentum by itself: it may lie in one layout as a state, and in another from
        before the first product to after the last. Inside one cluster nothing would move in between.
        """
        flow, tied = self.flow, set[int]()
        for ops in self.members.values():
            values = {value for op in ops for value in flow.ops[op].results}
            readers = {reader for value in values for reader, _ in flow.readers[value]}
            feeds = any(flow.ops[reader].name in PRODUCTS for reader in readers)
            taken = any(
                value in flow.arguments and flow.values[value].shape for op in ops for value in flow.ops[op].operands
            )
            returned = not values.isdisjoint(flow.returned)
            if feeds and taken and returned and 1 < len(ops) <= MOST_APART:
                tied.update(ops)
        return tied

    def fold_small(self, sums: Mapping[int, Summand]) -> None:
        """Joins clusters of small values with those that they serve: the means and maxima of a norm or a softmax.

        What one decides of them costs little, and each would be one more to decide about. What a step or a loop
        returns, such as the scale of a norm as it is trained, stays apart.
        """
        most = {
            at: max(self.flow.values[value].elements for op in ops for value in self.flow.ops[op].results)
            for at, ops in self.members.items()
        }
        # The smallest first, so that what serves a small one may go on to a larger one with it.
        for at in sorted(self.links, key=lambda each: most[each]):
            if at not in self.links:  # It has been joined with a smaller one.
                continue
            served = [other for other in self.links[at] if most[other] >= SMALL_PART * most[at]]
            values = [value for op in self.members[at] for value in self.flow.ops[op].results]
            readers = {self.flow.ops[reader].name for value in values for reader, _ in self.flow.readers[value]}
            if served and at not in sums and readers.isdisjoint(RETURN):
                # To where most of its reads come from or go to.
                self._join(max(served, key=lambda other: (len(self.links[at][other]), -other)), at)

    def _join(self, a: int, b: int) -> None:
        """Makes two clusters one, if all values between them are in one layout then."""
        pairs: list[tuple[int, int]] = []
        for reader, place in self.links[a][b]:
            found = self._pair_factors(reader, place)
            if found is None:
                return
            pairs += found
        if not self.factors.unite(pairs):
            return
        # The smaller one moves, so that each operation moves a few times only.
        if len(self.links[a]) + len(self.members[a]) < len(self.links[b]) + len(self.members[b]):
            a, b = b, a
        self.parent[b] = a
        self.members[a] += self.members.pop(b)
        for other, edges in self.links.pop(b).items():
            del self.links[other][b]
            if other != a:
                edges = self.links[a].get(other, []) + edges
                self.links[a][other] = self.links[other][a] = edges

    def _pair_factors(self, reader: int, place: int) -> list[tuple[int, int]] | None:
        """The factors of a value where it is written and where it is read; None if they do not correspond."""
        operand = self.flow.ops[reader].operands[place]
        writer = self.flow.values[operand].maker
        written = self.rules[writer].results[self.flow.ops[writer].results.index(operand)]
        pairs: list[tuple[int, int]] = []
        for one, other in zip(written, self.rules[reader].operands[place], strict=True):
            a, b = [self.own[writer][f] for f in one], [self.own[reader][f] for f in other]
            if len(a) == len(b):
                pairs += zip(a, b, strict=True)
            # Dims that nobody can split are alike, however they fall into factors.
            elif any(self.factors.free[self.factors.find(f)] for f in (*a, *b)):
                return None
        return pairs


def find_started_sums(flow: StepFlow, rules: Mapping[int, OpRule], free: frozenset[int]) -> dict[int, Summand]:
    """The operations that add up partial sums.

    Terms are what operations write whose split makes their results sums, and what a loop carries and only adds to.
    Whoever is between two of them must have no other reader, who would need it whole.
    """
    terms: dict[int, int] = {}
    for at, rule in rules.items():
        if rule.reduced & rule.splittable and rule.reduction == "sum":
            terms.update(dict.fromkeys(flow.ops[at].results, 1))
    for loop in flow.loops:
        terms.update(dict.fromkeys(find_accumulators(flow, loop), 1))
    inner: dict[int, tuple[list[int], frozenset[int]]] = {}
    for at in sorted(rules):
        op, rule = flow.ops[at], rules[at]
        if op.name in HEAVY or len(op.results) != 1 or op.results[0] in terms:
            continue
        linked = [p for p, operand in enumerate(op.operands) if operand in terms and len(flow.readers[operand]) == 1]
        # What is whole among the operands becomes a sum, of which one device keeps the data: nothing moves for that.
        for partial in rule.linear:
            if linked and partial.issuperset(linked) and not any(op.operands[p] in free for p in partial):
                terms[op.results[0]] = sum(terms[op.operands[p]] for p in linked)
                inner[at] = [flow.values[op.operands[p]].maker for p in linked], partial
                break
    found: dict[int, Summand] = {}

    def mark(at: int, last: int) -> None:
        makers, partial = inner[at]
        found[at] = Summand(last, partial)
        for each in makers:
            if each in inner:
                mark(each, last)

    # From the last on. Operations after the last addition gain nothing.
    for at in sorted(inner, reverse=True):
        if at not in found and len(inner[at][0]) > 1:
            mark(at, at)
    return found


def find_accumulators(flow: StepFlow, loop: Loop) -> list[int]:
    """What a loop carries and only adds to, inside; it may be partial until the loop is over."""
    found: list[int] = []
    for argument, returned in zip(loop.arguments, loop.returned, strict=True):
        maker = flow.values[returned].maker
        if maker < 0 or flow.ops[maker].name != "stablehlo.add" or not flow.values[argument].shape:
            continue
        readers = flow.readers[argument], flow.readers[returned]
        if argument in flow.ops[maker].operands and all(len(each) == 1 for each in readers):
            found.append(argument)
    return found
