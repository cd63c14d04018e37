"""Routes between layouts that have a common refinement: slice, move, gather.

A worked example: f32[{y}{x}2, 4] -> f32[{z}4, {y}2] on <x=2, y=2, z=2>. A digit and its holders, by row:

    digit     before   after
    dim 0, 2  y        z          the digit that y holds passes to z
    dim 0, 2  x        -          x is spent: nothing holds by it after
    dim 0, 2  -        -
    dim 1, 2  -        y          the chain  - -> y -> z  starts here; z is free: nothing holds by it before
    dim 1, 2  -        -

    step         holders, digit by digit   layout                received
                 y  x  -  -  -             f32[{y}{x}2, 4]
    slice        y  x  -  z  -             f32[{y}{x}2, {z}2]        0 B   the free z, until it is needed elsewhere
    permute      z  x  -  y  -             f32[{z}{x}2, {y}2]       16 B   y and z change digits: a permute cycle
    all_gather   z  -  -  y  -             f32[{z}4, {y}2]          16 B   the spent x

**Normal form** (Rink et al., arXiv 2112.01075, with any digits in between). Slice by the strides that only the target
uses, each at the local digit that starts its chain. Move all digits that change holders in one step. Gather the
strides that only the source uses, each from the digit that ends its chain. This meets the lower bound: slicing first
and gathering last make the tiles that move as small as they can be, and every message of the move is needed where it
goes. The move is an all-to-all if it consists of swaps, a permute if of permute cycles, an exchange if it mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from reshard.geometry.refine import RefinedDigit, Refinement, prime_digits
from reshard.plans.plan import StepSpec
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.synth.routes.route import Pair, Route, hold_digits
from reshard.synth.wires import Wires
from reshard.types.layout import Layout
from reshard.types.mesh import SubAxis, prime_places


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """The routes of fewest bytes; with a network those worth pricing on it.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2, y=2, z=2)
    >>> pair = Pair(Layout.parse("f32[{y}{x}2, 4]", mesh), Layout.parse("f32[{z}4, {y}2]", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['slice', 'permute', 'all_gather']
    """
    if pair.reduces or pair.refinement is None:
        return
    if pair.source == pair.target:
        yield ()
        return
    if links is not None:
        yield from _route_on_network(pair.source, pair.target, Wires.of(links, pair.source.mesh))
        return
    chains = Chains(pair, pair.refinement)
    # The normal form and the exchange, both at the lower bound, and routes that may save launches or memory.
    first, last = chains.sliced(), chains.ungathered()
    yield visit_states(chains, [first, last])
    if pair.refinement.swapped or pair.refinement.gathered:
        yield (StepSpec("exchange", chains.target),)
    if pair.refinement.swapped:
        # Two swaps of halves may receive what one exchange of two rounds does, in collectives of their own.
        yield visit_states(chains, [first, *chains.one_by_one(first, last), last])
        if borrowings := chains.borrowings():
            yield visit_states(chains, [chains.sliced(borrowings), chains.ungathered(borrowings)])
    if not pair.refinement.exact:
        # Padded layouts: between the normal form, which gathers the padding, and the exchange, which leaves it.
        #
        # f32[{x}{y}8/1021] -> f32[1021] on <x=12, y=12>: 122 of the 144 pieces of 8 have elements
        #
        #     normal form     1 launch      1144 elements received
        #     exchange        143 launches  1021
        #     both            12 launches   1029: x is gathered with 88 elements, some padding, then y exchanged
        #
        # The major strides are gathered, so that every device has a share of the elements before the exchange.
        chains = Chains(pair, pair.refinement, prime=True)
        first, last, end = chains.sliced(), chains.ungathered(), chains.end
        spent = sorted({s for s, e in zip(last, end, strict=True) if e is None and s is not None}, reverse=True)
        for count in range(1, len(spent)):
            opened = tuple(None if e is None and s in spent[:count] else s for s, e in zip(last, end, strict=True))
            yield (*visit_states(chains, [first, last, opened], end=opened), StepSpec("exchange", chains.target))


# The layouts on the way between two layouts that have a common refinement, as states of holders.
#
# A state says for each refined digit which device stride holds it, None for a local digit. From a state to the next a
# digit passes from one holder to another, so digits and strides form chains: the stride that holds digit 1 after holds
# digit 2 before, the one that holds digit 2 after holds digit 3 before, and so on.
#
#     slice           -  -> a                     a is free: nothing holds by a before
#     gather          a  -> -                     a is spent: nothing holds by a after
#     swap            -  -> a,  a -> -            the pair of an all-to-all
#     permute cycle   a  -> b,  b -> a            holders change among themselves
#                     a  -> b                     an open cycle: a is spent, b is free
#     chain           -  -> a,  a -> b,  b -> -   a swap with a piece of a cycle inside


State = tuple[int | None, ...]
"""The device stride that holds each digit, None for a local one."""


class Borrowing(NamedTuple):
    """A swap from digit `head` to digit `tail` that borrows the `free` stride of an open cycle for its local digit
    and leaves its held digit to the `spent` one."""

    head: int
    tail: int
    free: int
    spent: int


Borrowings = tuple[Borrowing, ...]


class Chains:
    """The refined digits of a pair, the chains that they form, and the layouts on the way.

    With `prime`, digits are cut to prime radices. Pairs with permute cycles always are, because a digit can take
    over only a holder of its own radix.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> pair = Pair(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}{y}]", mesh))
    >>> chains = Chains(pair, pair.refinement)
    >>> chains.start, chains.sliced(), chains.end
    ((2, None, None, None), (2, None, None, 1), (None, None, 2, 1))
    >>> str(chains.layout(chains.sliced()))
    'f32[{x}2, 2{y}]'
    """

    def __init__(self, pair: Pair, refinement: Refinement, prime: bool = False) -> None:
        self.source, self.target = pair.source, pair.target
        self.refinement = refinement
        cut = prime or bool(refinement.swapped)
        self.digits: tuple[RefinedDigit, ...] = prime_digits(refinement) if cut else refinement.digits
        self.start: State = tuple(d.src for d in self.digits)
        self.end: State = tuple(d.dst for d in self.digits)
        self._axes: dict[int, str] = {}
        self._layouts: dict[State, Layout] = {self.start: pair.source, self.end: pair.target}
        self._by_src = {d.src: i for i, d in enumerate(self.digits) if d.src is not None}
        self._by_dst = {d.dst: i for i, d in enumerate(self.digits) if d.dst is not None}

    def axis_of(self, stride: int) -> str:
        """The mesh axis that has a sub-axis of this stride."""
        if stride not in self._axes:
            self._axes[stride] = self.source.mesh.axis_at(stride)
        return self._axes[stride]

    def layout(self, state: State) -> Layout:
        """The layout in which the digits are held as in this state."""
        if state in self._layouts:
            return self._layouts[state]
        layout = hold_digits(self.source, list_held_digits(self.digits, state))
        self._layouts[state] = layout
        return layout

    def tail(self, at: int) -> int | None:
        """The free stride that ends the chain of digit `at`, None if the chain ends in a local digit."""
        stride = self.digits[at].dst
        while stride is not None and stride in self._by_src:
            stride = self.digits[self._by_src[stride]].dst
        return stride

    def head(self, at: int) -> int | None:
        """The spent stride that starts the chain of digit `at`, None if the chain starts with a local digit."""
        stride = self.digits[at].src
        while stride is not None and stride in self._by_dst:
            stride = self.digits[self._by_dst[stride]].src
        return stride

    def sliced(self, borrowings: Borrowings = ()) -> State:
        """After the first slice: the local digit at the head of each chain is held by the free stride at its tail."""
        free = {b.head: b.free for b in borrowings}
        return tuple(free.get(i) or self.tail(i) if d.src is None else d.src for i, d in enumerate(self.digits))

    def ungathered(self, borrowings: Borrowings = ()) -> State:
        """Before the last gather: the digit at the tail of each chain is held by the spent stride at its head."""
        spent = {b.tail: b.spent for b in borrowings}
        return tuple(spent.get(i) or self.head(i) if d.dst is None else d.dst for i, d in enumerate(self.digits))

    def open_cycles(self) -> list[tuple[int, int, int]]:
        """The spent stride at the head, the free one at the tail, and the radix of each open cycle."""
        return [
            (d.src, free, d.radix)
            for i, d in enumerate(self.digits)
            if d.src is not None and d.src not in self._by_dst and (free := self.tail(i)) is not None
        ]

    def borrowings(self) -> Borrowings:
        """Swaps, each with an open cycle of its radix whose two strides it can borrow.

            -  -> z,  z -> -   with   y -> w    becomes    w -> z,  z -> y   with   y -> w

        Then all digits are held, and one permute does what took an exchange of one round for each share.
        """
        open_cycles = self.open_cycles()
        borrowings: list[Borrowing] = []
        for head, digit in enumerate(self.digits):
            if digit.src is not None or digit.dst is None:
                continue
            # Follow the chain from its first local digit to its last one; if it ends in a free stride, it is no swap.
            tail = head
            while (stride := self.digits[tail].dst) is not None and stride in self._by_src:
                tail = self._by_src[stride]
            if stride is None:
                match = next((cycle for cycle in open_cycles if cycle[2] == digit.radix), None)
                if match is not None:
                    open_cycles.remove(match)
                    borrowings.append(Borrowing(head, tail, free=match[1], spent=match[0]))
        return tuple(borrowings)

    def detours(
        self, idle: Sequence[tuple[int, int]] = (), backward: bool = False, speeds: Mapping[str, float] | None = None
    ) -> Iterator[list[State]]:
        """Swaps that borrow `idle` strides, or the free ones of slices: a permute, then what these strides do.

            -  -> x,  x -> -   with   -  -> y    becomes    y -> x,  x -> y;   then   y -> -,  -  -> y
            -  -> x,  x -> -   with y idle       becomes    y -> x,  x -> y;   then   y -> -

        Of slices, that of the fastest stride lends it, by `speeds` of axes; a longer chain, of  -  -> z,  z -> y, is
        given z back. If x is slow, it is crossed once, not once for each share. Swaps for which nothing is left to
        borrow come after the permute, or with it in one exchange; then those borrow that come last, too, if the first
        ones did not do so `backward`. Few messages along y gather it, and slice again.
        """
        first, last = list(self.sliced()), list(self.ungathered())
        exchanged, moved, opened = list(first), list(last), list(last)
        slices = [i for i, d in enumerate(self.digits) if d.src is None and d.dst is not None and first[i] is not None]
        slices.sort(key=lambda at: 0 if speeds is None else -speeds[self.axis_of(first[at] or 0)])
        spare, left_out = list(idle), False
        for head, digit in list(enumerate(self.digits))[:: -1 if backward else 1]:
            if digit.src is not None or digit.dst not in self._by_src:
                continue
            chain = [head]
            while (taken := self.digits[chain[-1]].dst) in self._by_src:
                chain.append(self._by_src[taken])
            if taken is not None:
                continue
            lender = next((i for i in slices if self.digits[i].radix == digit.radix), None)
            free = next((each for each in spare if each[1] == digit.radix), None)
            if free is not None:
                spare.remove(free)
                stride = freed = free[0]
            elif lender is not None:
                slices.remove(lender)
                stride, freed = first[lender], self.digits[lender].dst
                first[lender] = exchanged[lender] = moved[lender] = opened[lender] = None
            else:
                left_out = True
                continue
            for at in chain:
                exchanged[at] = self.digits[at].dst
            first[head], exchanged[chain[-1]], moved[chain[-1]] = stride, stride, freed
        if moved != last:
            yield [tuple(first), tuple(exchanged), tuple(last)]
            yield [tuple(first), tuple(moved), tuple(last)]
            yield [tuple(first), tuple(moved)]
            if opened != last:
                yield [tuple(first), tuple(moved), tuple(opened), tuple(last)]
                yield [tuple(first), tuple(exchanged), tuple(moved), tuple(opened), tuple(last)]
            if left_out and not backward:
                yield from self.detours(idle, True, speeds)

    def swaps_alone(self, state: State, goal: State) -> State:
        """From `state`, only the swaps on the way to `goal`: what becomes local there does, and what becomes held
        there is held by the strides that this releases. Permute cycles are left for another step."""
        now = list(state)
        released: list[tuple[int | None, int]] = []
        for at, (before, after) in enumerate(zip(state, goal, strict=True)):
            if before is not None and after is None:
                now[at] = None
                released.append((before, self.digits[at].radix))
        for at, (before, after) in enumerate(zip(state, goal, strict=True)):
            if before is None and after is not None:
                match = next(r for r in released if r[1] == self.digits[at].radix)
                released.remove(match)
                now[at] = match[0]
        return tuple(now)

    def one_by_one(self, state: State, goal: State) -> Iterator[State]:
        """From `state`, all-to-alls that each move every chain on by one holder, until only local digits differ.

            -  -> a,  a -> b,  b -> -       first  a -> -,  -  -> a  along the chain, then  b -> -,  -  -> b

        Each round holds a digit by its final stride for good, so the loop ends.
        """
        now = list(state)
        while True:
            wanted = {stride: i for i, stride in enumerate(goal) if stride is not None and now[i] is None}
            held = {stride: i for i, stride in enumerate(now) if stride is not None}
            swaps = [(to, held[stride], stride) for stride, to in wanted.items() if stride in held]
            if not swaps:
                return
            for to, giver, stride in swaps:
                now[to], now[giver] = stride, None
            yield tuple(now)


def kind_between(before: State, after: State) -> str:
    """The kind of the one step between two different states.

    >>> [kind_between(*ends) for ends in (((None, 2), (1, 2)), ((1, 2), (None, 2)), ((None, 2), (2, None)))]
    ['slice', 'all_gather', 'all_to_all']
    >>> kind_between((1, 2), (2, 1)), kind_between((None, 2, 4), (2, None, 1))
    ('permute', 'exchange')
    """
    changes = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    released = {b for b, a in changes if a is None}
    taken = {a for b, a in changes if b is None}
    passed = any(a is not None and b is not None for b, a in changes)
    match bool(released), bool(taken), passed:
        case False, True, False if taken.isdisjoint(before):
            return "slice"
        case True, False, False:
            return "all_gather"
        case False, False, True:
            return "permute"
        case True, True, False if released == taken:
            return "all_to_all"
        case _:
            return "exchange"


def visit_states(chains: Chains, states: Sequence[State], end: State | None = None) -> Route:
    """The steps that visit these states in order, from source to target or to `end`: one collective to each."""
    path = pairwise([chains.start, *states, end or chains.end])
    return tuple(StepSpec(kind_between(*ends), chains.layout(ends[1])) for ends in path if ends[0] != ends[1])


# Routes for a network: each way between two layouts with its gathers and all-to-alls fused or staged by axis.
#
# The fewest bytes do not mean the least time:
#
# - a gather over a slow and a fast axis at once sends every peer's tile over the slow one; staged, slow axis first, one
#   tile crosses it and is passed on inside;
# - an all-to-all over many peers sends many small messages, a chain of all-to-alls fewer and larger ones;
# - a permute may cross a slow axis that a chain of all-to-alls avoids;
# - a small array is fastest gathered whole.


MOST_AXES = 4
"""Axes up to which every grouping is tried: eight of them for four axes. On more, all fused and all staged."""

_CALLS = 10
"""Messages over the slowest link in whose time two further collectives are called, at most: 27 us of InfiniBand."""


MOST_BYTES = 1 << 60
"""Of an array whose ways are timed together with those of others: on more, seconds lose their last digits."""


@lru_cache(maxsize=4096)
def _route_on_network(source: Layout, target: Layout, wires: Wires) -> tuple[Route, ...]:
    """The routes for a network, kept: routes over a permute, and those that finish a sum, have stretches in common."""
    pair = Pair(source, target)
    refinement = pair.refinement
    if refinement is None:
        return ()
    if wires.sizes is None or not refinement.exact:
        return tuple(list_staged(Chains(pair, refinement), wires))
    # Few of a class become layouts: what is slower in part is slower in all.
    every = refinement.digits
    bare = Layout(source.mesh, (), "f32", "sum" if source.partial else None, source.partial)
    routes: list[Route] = []
    for digits, states, _ in find_ways(tuple(digit[1:] for digit in every), bare, wires):
        if states is None:
            routes.append((StepSpec("exchange", target),))
        else:
            laid = tuple(digit._replace(dim=every[digit.dim].dim) for digit in digits)
            routes.append(visit_states(Chains(pair, replace(refinement, digits=laid)), states))
    return tuple(routes)


class TimedWay(NamedTuple):
    """The states to visit, None for one exchange, of these digits, which have numbers in place of their dims, and the
    seconds of the steps for a byte of the array."""

    digits: tuple[RefinedDigit, ...]
    states: tuple[State, ...] | None
    times: list[cost.StepTime]

    def list_steps(self) -> list[tuple[str, State]]:
        """The kind of each step, and who holds the digits after it."""
        start, end = (tuple(digit[at] for digit in self.digits) for at in (2, 3))
        if self.states is None:
            return [("exchange", end)]
        return [(kind_between(b, a), a) for b, a in pairwise([start, *self.states, end]) if b != a]


@lru_cache(maxsize=1 << 14)
def find_ways(digits: tuple[tuple[int, int | None, int | None], ...], bare: Layout, wires: Wires) -> list[TimedWay]:
    """The ways between even layouts of these digits, as (radix, before, after), that are fastest at some size for which
    the wires are. They are timed as states, whatever the dims and the size; `bare` has the mesh and the sums."""
    # In one order, so that few are searched.
    places = sorted(range(len(digits)), key=lambda at: [part or 0 for part in digits[at]])
    ways, lent, share = _time_ways(tuple(digits[at] for at in places), bare, wires.base)
    low, high = wires.sizes or (1.0, MOST_BYTES)
    ways = [*ways, *lent] if low * share >= least_lent(wires) else ways
    found: list[TimedWay] = []
    for way in (ways[at] for at in cost.pick_fastest([way.times for way in ways], low, high)):
        numbers = [places[digit.dim] for digit in way.digits]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        laid = tuple(way.digits[at]._replace(dim=numbers[at]) for at in order)
        states = None if way.states is None else tuple(tuple(state[at] for at in order) for state in way.states)
        found.append(TimedWay(laid, states, way.times))
    return found


@lru_cache(maxsize=4096)
def _time_ways(
    digits: tuple[tuple[int, int | None, int | None], ...], bare: Layout, wires: Wires
) -> tuple[list[TimedWay], list[TimedWay], float]:
    """The ways between even layouts of these digits, as (radix, before, after), that are fastest at some size; those
    that lend local digits, and the share of the array that these cut. `bare` has the mesh and the sums."""
    numbered = tuple(RefinedDigit(at, *digit) for at, digit in enumerate(digits))
    chains = Chains(Pair(bare, bare), Refinement(numbered, (), True, (), ()))
    found = [*_list_ways(chains, wires)]
    lent = [*_stage_paths(_list_splits(_lend_local(chains, wires), wires), wires)]
    known: dict[tuple[int, State, State], cost.StepTime | None] = {}
    ways = [TimedWay(c.digits, states, _time_states(c, states, wires, known)) for c, states in (*found, *lent)]
    lending = ways[len(found) :]
    del ways[len(found) :]
    if chains.start != chains.end:
        ways.append(TimedWay(chains.digits, None, _time_states(chains, (), wires, known, "exchange")))
    fastest = cost.pick_fastest([way.times for way in ways], 1.0, MOST_BYTES)
    return [ways[at] for at in fastest], lending, 1 / count_held(chains.digits, chains.sliced())


def list_held_digits(digits: Sequence[RefinedDigit], state: State) -> Iterator[tuple[int, int, int | None]]:
    """The dim, the radix and the holder of each digit in this state."""
    return ((digit.dim, digit.radix, stride) for digit, stride in zip(digits, state, strict=True))


def count_held(digits: Sequence[RefinedDigit], state: State) -> int:
    """The tiles of an array in this state."""
    return math.prod(digit.radix for digit, stride in zip(digits, state, strict=True) if stride is not None)


def _time_states(
    chains: Chains,
    states: Sequence[State],
    wires: Wires,
    known: dict[tuple[int, State, State], cost.StepTime | None],
    only: str | None = None,
) -> list[cost.StepTime]:
    """Predicted seconds, for a byte of the array, of the steps that visit these states in order, between even layouts;
    all of one kind if `only` that is given. `known` has those that were priced, None for slices."""
    times: list[cost.StepTime] = []
    for before, after in pairwise([chains.start, *states, chains.end]):
        key = id(chains), before, after
        if only or key not in known:
            kind = only or kind_between(before, after)
            known[key] = None
            if before != after and kind != "slice":
                changes = zip(chains.digits, before, after, strict=True)
                changed = tuple((digit.radix, b, a) for digit, b, a in changes if b != a)
                time = cost.time_change(kind, changed, chains.source.mesh, wires)
                known[key] = time.scaled(1 / count_held(chains.digits, before))
        if (time := known[key]) is not None:
            times.append(time)
    return times


def list_staged(chains: Chains, links: Links) -> Iterator[Route]:
    """Every way between the layouts, in every grouping of the axes, slowest first; each route once."""
    lent = chains.layout(chains.sliced()).tile_bytes * cost.list_scales(chains.source, links)[0] >= least_lent(links)
    yield from (visit_states(*way) for way in _list_ways(chains, links, lent))
    if chains.start != chains.end:
        yield (StepSpec("exchange", chains.target),)


_Path = tuple[Chains, list[State]]
"""States to visit on the way, of digits that may be cut further."""


def _list_ways(chains: Chains, links: Links, lent: bool = False) -> Iterator[tuple[Chains, tuple[State, ...]]]:
    """Every way, in every grouping of the axes; `lent`, local digits may be lent."""
    paths: list[_Path] = [(chains, states) for states in _list_paths(chains)]
    paths += _lend_local(chains, links) if lent else ()
    paths += _list_detours(chains, links)
    paths += _take_over(chains, links)
    paths += _wait_on_local(chains)
    yield from _stage_paths(_list_splits(paths, links), links)


def _list_splits(paths: Iterable[_Path], links: Links) -> list[_Path]:
    """The paths, and where some axes are slower than others, those with more inside of their all-to-alls."""
    every = list(paths)
    if len({link.bandwidth for link in links.values()}) > 1:
        every += [(digits, _split_swaps(digits, states, whole)) for digits, states in every for whole in (True, False)]
    return every


def _stage_paths(paths: Iterable[_Path], links: Links) -> Iterator[tuple[Chains, tuple[State, ...]]]:
    """The paths in every grouping of the axes, slowest first, each once."""
    slow_first = sorted(links, key=lambda axis: (links[axis].bandwidth, -links[axis].latency))
    groupings = list(_group_axes(slow_first))
    seen: set[tuple[State, ...]] = set()
    tried: set[tuple[tuple[State, State], ...]] = set()
    for digits, states in paths:
        path = tuple((b, a) for b, a in pairwise([digits.start, *states, digits.end]) if b != a)
        if path in tried:
            continue
        tried.add(path)
        # A gather or an all-to-all is done group by group, any other step at once. Axes along which none of them
        # moves anything make no difference to the groups.
        staged = [kind_between(*ends) in ("all_gather", "all_to_all") for ends in path]
        changes = (change for ends, cut in zip(path, staged, strict=True) if cut for change in zip(*ends, strict=True))
        moved = {digits.axis_of(s) for b, a in changes if b != a for s in (b, a) if s is not None}
        alike = dict.fromkeys(tuple(tuple(axis for axis in group if axis in moved) for group in g) for g in groupings)
        for groups in dict.fromkeys(tuple(group for group in each if group) for each in alike):
            steps = zip(path, staged, strict=True)
            stages = tuple(
                s
                for ends, cut in steps
                for s in (_stage_by_axis(digits, *ends, groups) if cut and len(groups) > 1 else ends[1:])
            )
            if stages not in seen:
                seen.add(stages)
                yield digits, stages


def _list_paths(chains: Chains) -> Iterator[list[State]]:
    """The states to visit: the normal form, and ways that open more, move less at once, or cross less."""
    first, last, end = chains.sliced(), chains.ungathered(), chains.end
    yield [first, last]
    if borrowings := chains.borrowings():
        yield [chains.sliced(borrowings), chains.ungathered(borrowings)]
    yield [first, chains.swaps_alone(first, last), last]
    yield [first, chains.swaps_alone(last, first), last]
    yield [first, *chains.one_by_one(first, last), last]
    # Slice only what the target holds at the same digit; gather first what is spent; or open all that changes.
    plain = tuple(
        d if s is None and d not in chains.start else s for s, d in zip(chains.start, chains.end, strict=True)
    )
    yield [plain, *chains.one_by_one(plain, last), last]
    opened = tuple(None if s is not None and s not in end else s for s in plain)
    yield [plain, opened, *chains.one_by_one(opened, end)]
    yield [plain, opened]
    yield [plain, tuple(s if s == d else None for s, d in zip(plain, end, strict=True))]


def _split_swaps(chains: Chains, states: list[State], whole: bool) -> list[State]:
    """The states with more inside of each all-to-all, for fewer messages: one in which what it takes apart is `whole`,
    a gather and a slice; or one after each swap."""
    split: list[State] = []
    for before, after in pairwise([chains.start, *states, chains.end]):
        if kind_between(before, after) == "all_to_all":
            if whole:
                split.append(tuple(None if b != a else b for b, a in zip(before, after, strict=True)))
            else:
                now = list(before)
                for at, stride in enumerate(after):
                    if stride is not None and before[at] is None:
                        now[at], now[before.index(stride)] = stride, None
                        split.append(tuple(now))
                split.pop()
        split.append(after)
    return split[:-1]


def _list_detours(chains: Chains, links: Links) -> Iterator[_Path]:
    """Swaps that borrow the strides of slices. Where some axes are slower than others, they also borrow idle strides,
    the fastest first, or none once what is spent is gathered."""
    prime = Chains(Pair(chains.source, chains.target), chains.refinement, prime=True)
    speeds = {axis: link.bandwidth for axis, link in links.items()}
    yield from ((prime, states) for states in prime.detours(speeds=speeds))
    if len({link.bandwidth for link in links.values()}) == 1 or not chains.refinement.exact:
        return
    mesh, after = chains.source.mesh, set(prime.end)
    fast_first = sorted(mesh.axes, key=lambda axis: links[axis].speed, reverse=True)
    every = [place for axis in fast_first for place in prime_places(mesh, SubAxis(axis, 1, mesh.axes[axis]))]
    summed = [mesh.span(axis) for axis in chains.source.partial]
    opened = tuple(d._replace(src=None) if d.dst is None and d.src not in after else d for d in prime.digits)
    for digits in dict.fromkeys((prime.digits, opened)):
        held = ((stride, stride * d.radix) for d in digits for stride in (d.src, d.dst) if stride is not None)
        used = [*summed, *held]
        idle = [(s, size) for s, size in every if not any(low < s * size and s < high for low, high in used)]
        start = tuple(digit.src for digit in digits)
        rest = Chains(Pair(chains.source, chains.target), replace(chains.refinement, digits=digits))
        yield from ((prime, [start, *states]) for states in rest.detours(idle, speeds=speeds))


def _take_over(chains: Chains, links: Links) -> Iterator[_Path]:
    """Spent strides of open cycles that take over the digits of slower ones, and are gathered in their place.

    y -> x,  dcn -> -     becomes    y -> x,  dcn -> y    in one permute;    then    y -> -
    """
    last = list(chains.ungathered())
    spent = [(stride, radix) for stride, _, radix in chains.open_cycles()]
    for at, digit in enumerate(chains.digits):
        if digit.dst is None and digit.src is not None and last[at] == digit.src:
            speed = links[chains.axis_of(digit.src)].speed
            faster = (s for s, radix in spent if radix == digit.radix and links[chains.axis_of(s)].speed > speed)
            if (stride := next(faster, None)) is not None:
                spent.remove((stride, digit.radix))
                last[at] = stride
    if tuple(last) != chains.ungathered():
        yield chains, [chains.sliced(), tuple(last)]


def _lend_local(chains: Chains, links: Links) -> Iterator[_Path]:
    """All-to-alls in place of permutes over a slow and a fast axis, if there are any, and the digits that they take.

    A local digit is lent, so that all devices send the same share over the slow axis a, here of 2:

    -    a  -> b,  b -> a       half of the devices send a whole tile over a, the others nothing
    -    -  -> b,  b -> -       the local digit goes where the one of b is; if that was sliced before, it is instead
    -    -  -> a,  a -> -       all devices send half a tile over a
    -    -  -> b,  b -> -       the local digit comes back; if b is gathered after, it is, and no other goes there
    """
    if len({link.bandwidth for link in links.values()}) == 1:
        return
    for digits, first, last in ((chains, chains.sliced(), chains.ungathered()), *_list_waits(chains)):
        yield from _lend_between(digits, first, last, links)


def _lend_between(chains: Chains, first: State, last: State, links: Links) -> Iterator[_Path]:
    """The way with local digits lent, if any are to be, from what is sliced to what is left to gather."""
    holding = {stride: at for at, stride in enumerate(first) if stride is not None}
    taking = {stride: at for at, stride in enumerate(last) if stride is not None}
    lent: list[int] = []
    for start in range(len(first)):
        cycle, after = [start], holding.get(last[start] or 0)
        while after is not None and after != start:
            cycle.append(after)
            after = holding.get(last[after] or 0)
        if after is None or min(cycle) < start:
            continue
        speeds = {at: links[chains.axis_of(first[at] or 0)].bandwidth for at in cycle}
        if min(speeds.values()) < max(speeds.values()):
            ends = chains.start, chains.end
            lent.append(max(cycle, key=lambda at: (speeds[at], -sum(first[at] in each for each in ends))))
    need = math.prod(chains.digits[at].radix for at in lent)
    # Where nothing waits.
    idle = [n for n, d in enumerate(chains.digits) if d.src is d.dst is first[n] is last[n] is None]
    local = [n for n in idle if chains.digits[n].dim not in chains.refinement.opaque]
    split = next((n for n in local if chains.digits[n].radix and chains.digits[n].radix % need == 0), None)
    if not lent or split is None:
        return
    radices = [chains.digits[at].radix for at in lent]
    local, more = chains.digits[split], len(lent)
    parts = [local._replace(radix=radix) for radix in (*radices, local.radix // need)]
    digits = (*chains.digits[:split], *parts, *chains.digits[split + 1 :])
    wider = Chains(Pair(chains.source, chains.target), replace(chains.refinement, digits=digits))
    before, after_all = ([*s[:split], *[None] * more, *s[split:]] for s in (first, last))
    opened = list(before)
    for number, digit in enumerate(lent):
        held, stride = digit + (more if digit > split else 0), first[digit]
        opened[split + number], opened[held] = stride, None
        if stride not in chains.start:
            before[split + number], before[held] = stride, None
        if stride not in chains.end:
            taken = taking[stride or 0]
            after_all[split + number], after_all[taken + (more if taken > split else 0)] = stride, None
    goal = tuple(after_all)
    yield wider, [tuple(before), tuple(opened), *wider.one_by_one(tuple(opened), goal), goal]


def _list_waits(chains: Chains) -> Iterator[tuple[Chains, State, State]]:
    """Where free and spent strides wait along local digits: the digits, cut for it, after the slices, and before the
    gathers. Those that swaps borrow do not wait."""
    before, after = set(chains.start), set(chains.end)
    passed = [d for d in chains.digits if d.src != d.dst and d.src is not None and d.dst is not None]
    # Along digits of no elements nothing can wait, and nothing needs to.
    if not chains.refinement.exact or not all(d.radix for d in chains.digits):
        return
    for borrowings, turns in dict.fromkeys((((), True), (chains.borrowings(), True), ((), False))):
        borrowed = {each for b in borrowings for each in (b.free, b.spent)}
        heads, tails = {b.head: b.free for b in borrowings}, {b.tail: b.spent for b in borrowings}
        free = [(d.radix, d.dst) for d in passed if d.dst not in before | borrowed]
        spent = [(d.radix, d.src) for d in passed if d.src not in after | borrowed]
        # A free and a spent stride of one radix take turns at one part.
        parts: list[tuple[int, int | None, int | None]] = []
        for radix, stride in free:
            turn = next((each for each in spent if turns and each[0] == radix), (radix, None))
            parts.append((radix, stride, turn[1]))
            spent = [each for each in spent if each != turn]
        parts += [(radix, None, stride) for radix, stride in spent]
        if not parts:
            continue
        digits: list[RefinedDigit] = []
        first: list[int | None] = []
        last: list[int | None] = []
        for at, digit in enumerate(chains.digits):
            left = digit.radix
            for part in list(parts) if digit.src is digit.dst is None else []:
                if left % part[0] == 0:
                    parts.remove(part)
                    left //= part[0]
                    digits.append(digit._replace(radix=part[0]))
                    first.append(part[1])
                    last.append(part[2])
            digits.append(digit._replace(radix=left))
            first.append(heads.get(at) or (digit.dst if digit.src is None and digit.dst not in before else digit.src))
            last.append(tails.get(at) or (digit.src if digit.dst is None and digit.src not in after else digit.dst))
        if not parts:
            wider = Chains(Pair(chains.source, chains.target), replace(chains.refinement, digits=tuple(digits)))
            yield wider, tuple(first), tuple(last)


def _wait_on_local(chains: Chains) -> Iterator[_Path]:
    """Ways on which strides wait along local digits: free ones until their own digits are left, spent ones after.

    For example f32[{x}2048, {y}256] -> f32[4096, {z}{y}128] on <x=2, y=2, z=2>:

        digit    dim 0: x -> -    dim 1: y -> z    - -> y    - -> -
        first    x                y                -         z         the tile is halved before anything is sent
        then     -                z                y         -         one exchange, which needs no gather
    """
    before, after = set(chains.start), set(chains.end)
    passed = [d for d in chains.digits if d.src != d.dst and d.src is not None and d.dst is not None]
    free = [(d.radix, d.dst) for d in passed if d.dst not in before]
    if not chains.refinement.exact or not all(d.radix for d in chains.digits):
        return
    if not free and all(d.src in after for d in passed):
        return
    # Along the digit that another chain starts with, a free stride leaves with what takes that digit.
    held = [d.dst if d.src is None and d.dst not in before else d.src for d in chains.digits]
    for radix, stride in free:
        heads = [n for n, d in enumerate(chains.digits) if d.radix == radix and held[n] is None and d.dst is not None]
        at = next((n for n in heads if chains.tail(n) != stride), None)
        if at is not None:
            held[at] = stride
    yield chains, [tuple(held)]
    yield chains, [tuple(held), tuple(None if stride not in after else stride for stride in held)]
    for wider, start, end in _list_waits(chains):
        yield wider, [start]
        yield wider, [start, end]
        yield wider, [wider.sliced(), end]
        for goal in dict.fromkeys((end, wider.ungathered())):
            yield wider, [start, *wider.one_by_one(start, goal), goal]
        yield wider, [start, tuple(s if s == e else None for s, e in zip(start, wider.end, strict=True))]
        opened = tuple(None if stride not in after else stride for stride in start)
        yield wider, [start, opened, *wider.one_by_one(opened, wider.end)]


def least_lent(links: Links) -> float:
    """The bytes of the smallest tiles whose digits are lent: each further step waits for its call, which links leave
    out, so that half a tile has to be worth several of them."""
    if not links:
        return math.inf
    slowest = min(links.values(), key=lambda link: link.speed)
    return 2 * _CALLS * slowest.latency * slowest.bandwidth


def _group_axes(axes: Sequence[str]) -> Iterator[list[list[str]]]:
    """The ways to cut the axes, in this order, into groups that are done at once."""
    if len(axes) > MOST_AXES:
        yield from ([list(axes)], [[a] for a in axes])
        return
    for mask in range(1 << max(0, len(axes) - 1)):
        groups = [[axes[0]]] if axes else []
        for at, axis in enumerate(axes[1:]):
            if mask >> at & 1:
                groups.append([axis])
            else:
                groups[-1].append(axis)
        yield groups


def _stage_by_axis(chains: Chains, before: State, after: State, groups: Sequence[Sequence[str]]) -> Iterator[State]:
    """The states of a gather or an all-to-all that is done group by group."""
    now = before
    for group in groups:
        along = {s for s in (*before, *after) if s is not None and chains.axis_of(s) in group}
        later = tuple(
            a if a != b and (a in along or b in along) else n for b, a, n in zip(before, after, now, strict=True)
        )
        if later not in (now, after):
            yield later
        now = later
    yield after
