"""The layouts on the way between two layouts that have a common refinement, as states of holders.

A state says for each refined digit which device stride holds it, None for a local digit. From a state to the next a
digit passes from one holder to another, so digits and strides form chains: the stride that holds digit 1 after holds
digit 2 before, the one that holds digit 2 after holds digit 3 before, and so on.

    slice           -  -> a                     a is free: nothing holds by a before
    gather          a  -> -                     a is spent: nothing holds by a after
    swap            -  -> a,  a -> -            the pair of an all-to-all
    permute cycle   a  -> b,  b -> a            holders change among themselves
                    a  -> b                     an open cycle: a is spent, b is free
    chain           -  -> a,  a -> b,  b -> -   a swap with a piece of a cycle inside
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from reshard.geometry.refine import RefinedDigit, Refinement, prime_digits
from reshard.plans.plan import StepSpec
from reshard.synth.routes.route import Pair, Route
from reshard.types.layout import Digit, Layout, fit_digits

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
        self.digits: tuple[RefinedDigit, ...] = refinement.digits
        if prime or refinement.swapped:
            self.digits = prime_digits(refinement)
        self.start: State = tuple(d.src for d in self.digits)
        self.end: State = tuple(d.dst for d in self.digits)
        self._layouts: dict[State, Layout] = {self.start: pair.source, self.end: pair.target}
        self._by_src = {d.src: i for i, d in enumerate(self.digits) if d.src is not None}
        self._by_dst = {d.dst: i for i, d in enumerate(self.digits) if d.dst is not None}

    def layout(self, state: State) -> Layout:
        """The layout in which the digits are held as in this state."""
        if state in self._layouts:
            return self._layouts[state]
        mesh = self.source.mesh
        digits: list[list[Digit]] = [[] for _ in self.source.dims]
        for digit, stride in zip(self.digits, state, strict=True):
            if stride is None:
                digits[digit.dim].append(Digit(digit.radix, None))
            else:
                # A stride may span several axes of the mesh, of which each holds its part of the digit.
                digits[digit.dim] += [Digit(s.size, s) for s in mesh.sub_axes(stride, digit.radix)]
        dims = tuple(fit_digits(ds, dim.size) for ds, dim in zip(digits, self.source.dims, strict=True))
        layout = Layout(mesh, dims, self.source.dtype, self.source.reduction, self.source.partial)
        self._layouts[state] = layout
        return layout

    # ---- chains --------------------------------------------------------------------------------------

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

    # ---- states of the normal form -------------------------------------------------------------------

    def sliced(self, borrowings: Borrowings = ()) -> State:
        """After the first slice: the local digit at the head of each chain is held by the free stride at its tail."""
        free = {b.head: b.free for b in borrowings}
        return tuple(free.get(i) or self.tail(i) if d.src is None else d.src for i, d in enumerate(self.digits))

    def ungathered(self, borrowings: Borrowings = ()) -> State:
        """Before the last gather: the digit at the tail of each chain is held by the spent stride at its head."""
        spent = {b.tail: b.spent for b in borrowings}
        return tuple(spent.get(i) or self.head(i) if d.dst is None else d.dst for i, d in enumerate(self.digits))

    def borrowings(self) -> Borrowings:
        """Swaps, each with an open cycle of its radix whose two strides it can borrow.

            -  -> z,  z -> -   with   y -> w    becomes    w -> z,  z -> y   with   y -> w

        Then all digits are held, and one permute does what took an exchange of one round for each share.
        """
        open_cycles = [
            (d.src, free, d.radix)
            for i, d in enumerate(self.digits)
            if d.src is not None and d.src not in self._by_dst and (free := self.tail(i)) is not None
        ]
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

    # ---- states of other routes ----------------------------------------------------------------------

    def detour(self) -> list[State]:
        """Swaps that borrow the free strides of slices: a permute, then an all-to-all along these strides.

            -  -> x,  x -> -   with   -  -> y    becomes    y -> x,  x -> y;   then   y -> -,  -  -> y

        If x is slow, it is crossed once, not once for each share.
        """
        first, exchanged, last = list(self.sliced()), list(self.sliced()), list(self.ungathered())
        slices = [i for i, d in enumerate(self.digits) if d.src is None and d.dst is not None and d.dst == first[i]]
        for head, digit in enumerate(self.digits):
            if digit.src is not None or digit.dst not in self._by_src:
                continue
            tail = self._by_src[digit.dst]
            if self.digits[tail].dst is not None:
                continue
            lender = next((i for i in slices if self.digits[i].radix == digit.radix), None)
            if lender is not None:
                slices.remove(lender)
                free = self.digits[lender].dst
                first[head], first[lender] = free, None
                exchanged[head], exchanged[lender], exchanged[tail] = digit.dst, None, free
        return [tuple(first), tuple(exchanged), tuple(last)]

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


def visit_states(chains: Chains, states: Sequence[State]) -> Route:
    """The steps that visit these states in order, from source to target: one collective from each to the next."""
    path = pairwise([chains.start, *states, chains.end])
    return tuple(StepSpec(kind_between(*ends), chains.layout(ends[1])) for ends in path if ends[0] != ends[1])
