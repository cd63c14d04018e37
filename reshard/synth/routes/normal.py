"""Routes between two layouts that have a common refinement, as moves still to be checked.

The atoms of the refinement and the device strides that hold them form chains: digit k1 passes
from its holder to the next one's, and so on.

    swap      None -> a -> None           the pair of an all-to-all
    slice     None -> a                   a is free before
    gather    a -> None                   a is free after
    twist     a -> b ... (-> a)           holders change among themselves: a permute

Normal form (Rink et al., arXiv 2112.01075, with intermediate types of any digits): slice by what
only the target holds, move all that differs in one step, gather what only the source holds. It
meets the lower bound: slicing and gathering commute with the move, and the move is one collective
unless swaps and twists mix; then it is an exchange, whose every message is needed where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from reshard.types.layout import Digit, Dim, Layout, fitted
from reshard.types.pair.refine import RefinedDigit, Refinement, prime_digits
from reshard.types.plan import StepSpec

State = tuple[int | None, ...]
"""Who holds each atom: a device stride, or None for local."""

Route = tuple[StepSpec, ...]


class Loan(NamedTuple):
    """A swap from digit `head` to digit `tail` that borrows a `free` stride and parks a `spent` one."""

    head: int
    tail: int
    free: int
    spent: int


Loans = tuple[Loan, ...]


class Atoms:
    """The atoms between two layouts, and the layouts on the way, as states of their holders."""

    def __init__(self, source: Layout, target: Layout, refinement: Refinement, prime: bool = False) -> None:
        self.source, self.target = source, target
        # Digits pass from chain to chain only where radices are equal, so twists are cut to primes.
        self.atoms: tuple[RefinedDigit, ...] = refinement.digits
        if prime or refinement.swapped:
            self.atoms = prime_digits(refinement)
        self.refinement = refinement
        self.start: State = tuple(a.src for a in self.atoms)
        self.end: State = tuple(a.dst for a in self.atoms)
        self._layouts: dict[State, Layout] = {self.start: source, self.end: target}
        self._by_src = {a.src: i for i, a in enumerate(self.atoms) if a.src is not None}
        self._by_dst = {a.dst: i for i, a in enumerate(self.atoms) if a.dst is not None}

    def layout(self, state: State) -> Layout:
        """The layout in which these atoms are held so."""
        found = self._layouts.get(state)
        if found is None:
            found = self._layouts[state] = self._build(state)
        return found

    def _build(self, state: State) -> Layout:
        mesh = self.source.mesh
        digits: list[list[Digit]] = [[] for _ in self.source.dims]
        for atom, stride in zip(self.atoms, state, strict=True):
            if stride is None:
                digits[atom.dim].append(Digit(atom.radix, None))
            else:
                digits[atom.dim] += [Digit(s.size, s) for s in mesh.sub_axes(stride, atom.radix)]
        dims: tuple[Dim, ...] = tuple(
            fitted(found, dim.size) for found, dim in zip(digits, self.source.dims, strict=True)
        )
        return Layout(mesh, dims, self.source.dtype, self.source.reduction, self.source.partial)

    def tail(self, at: int) -> int | None:
        """The free stride that ends the chain of atom `at`: held after, by nothing before."""
        stride = self.atoms[at].dst
        while stride is not None and stride in self._by_src:
            stride = self.atoms[self._by_src[stride]].dst
        return stride

    def head(self, at: int) -> int | None:
        """The stride that starts the chain of atom `at`: held before, by nothing after."""
        stride = self.atoms[at].src
        while stride is not None and stride in self._by_dst:
            stride = self.atoms[self._by_dst[stride]].src
        return stride

    def sliced(self, loans: Loans = ()) -> State:
        """After the first slice: each chain that ends in a free stride lends it to its local digit."""
        lent = {loan.head: loan.free for loan in loans}
        return tuple(lent.get(i) or self.tail(i) if a.src is None else a.src for i, a in enumerate(self.atoms))

    def ungathered(self, loans: Loans = ()) -> State:
        """Before the last gather: each chain that starts with a stride the target lacks parks it."""
        parked = {loan.tail: loan.spent for loan in loans}
        return tuple(parked.get(i) or self.head(i) if a.dst is None else a.dst for i, a in enumerate(self.atoms))

    def loans(self) -> Loans:
        """Swaps paired with twists between a spent and a free stride: a -> b lends b and parks a.

            None -> z -> None  with  y -> w     becomes    w -> z -> y  with  y -> w,

        all held, so one permute does what would be a round for every share of the swap.
        """
        swaps = [
            (i, end)
            for i, a in enumerate(self.atoms)
            if a.src is None and a.dst is not None and (end := self._last(i)) is not None
        ]
        twists = [
            (a.src, free, a.radix)
            for i, a in enumerate(self.atoms)
            if a.src is not None and a.src not in self._by_dst and (free := self.tail(i)) is not None
        ]
        found: list[Loan] = []
        for head, tail in swaps:
            match = next((t for t in twists if t[2] == self.atoms[head].radix), None)
            if match is not None:
                twists.remove(match)
                found.append(Loan(head, tail, match[1], match[0]))
        return tuple(found)

    def detour(self) -> list[State]:
        """Swaps done along the free strides of slices, by a permute before the all-to-all.

            None -> x -> None  with  None -> y     becomes    y -> x, x -> y;  then  y -> None, None -> y

        The swap's own axis, if it is slow, is crossed once instead of once for every share.
        """
        first, exchanged, last = list(self.sliced()), list(self.sliced()), list(self.ungathered())
        slices = [i for i, a in enumerate(self.atoms) if a.src is None and a.dst is not None and a.dst == first[i]]
        for head, a in enumerate(self.atoms):
            if a.src is not None or a.dst not in self._by_src or self.atoms[self._by_src[a.dst]].dst is not None:
                continue
            loan = next((i for i in slices if self.atoms[i].radix == a.radix), None)
            if loan is not None:
                slices.remove(loan)
                free = self.atoms[loan].dst
                first[head], first[loan] = free, None
                exchanged[head], exchanged[loan], exchanged[self._by_src[a.dst]] = a.dst, None, free
        return [tuple(first), tuple(exchanged), tuple(last)]

    def _last(self, at: int) -> int | None:
        """The digit that ends the chain of atom `at` and becomes local, if one does."""
        while (stride := self.atoms[at].dst) is not None:
            if stride not in self._by_src:
                return None
            at = self._by_src[stride]
        return at

    def untwisted(self, state: State, goal: State) -> State:
        """From `state`, the swaps of `goal` alone: digits that become local do, for others that are held."""
        now = list(state)
        for at, (before, after) in enumerate(zip(state, goal, strict=True)):
            if before is not None and after is None:
                now[at] = None
        freed = [(state[i], self.atoms[i].radix) for i in range(len(now)) if state[i] is not None and now[i] is None]
        for at, (before, after) in enumerate(zip(state, goal, strict=True)):
            if before is None and after is not None:
                match = next(f for f in freed if f[1] == self.atoms[at].radix)
                freed.remove(match)
                now[at] = match[0]
        return tuple(now)

    def chained(self, state: State, goal: State) -> Iterator[State]:
        """All-to-alls that pass every digit one holder down its chain, until only local ones differ."""
        now = list(state)
        while True:
            wanted = {g: i for i, g in enumerate(goal) if g is not None and now[i] is None}
            held = {s: i for i, s in enumerate(now) if s is not None}
            pairs = [(to, held[s], s) for s, to in wanted.items() if s in held]
            if not pairs:
                return
            for to, source, stride in pairs:
                now[to], now[source] = stride, None
            yield tuple(now)


def move(atoms: Atoms, before: State, after: State) -> StepSpec | None:
    """The one collective between two states, None if they are the same."""
    if before == after:
        return None
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    released = {b for b, a in pairs if a is None}
    taken = {a for b, a in pairs if b is None}
    twisted = any(a is not None and b is not None for b, a in pairs)
    layout = atoms.layout(after)
    if not released and not twisted and not taken & set(before):
        return StepSpec("slice", layout)
    if not taken and not twisted:
        return StepSpec("all_gather", layout)
    if twisted and not released and not taken:
        return StepSpec("permute", layout)
    if not twisted and released == taken:
        return StepSpec("all_to_all", layout)
    return StepSpec("exchange", layout)


def through(atoms: Atoms, states: Sequence[State]) -> Route:
    """The moves that visit these states in order, from the source to the target."""
    path = [atoms.start, *states, atoms.end]
    moves = (move(atoms, before, after) for before, after in pairwise(path))
    return tuple(m for m in moves if m is not None)


def normal(atoms: Atoms) -> Route:
    """slice ; move ; gather: the fewest bytes, and of those the fewest launches."""
    return through(atoms, [atoms.sliced(), atoms.ungathered()])


def direct(atoms: Atoms) -> Route:
    """One exchange from source to target: the fewest bytes and the least memory."""
    return (StepSpec("exchange", atoms.target),) if atoms.start != atoms.end else ()


def minimal(atoms: Atoms) -> Iterator[Route]:
    """Routes of fewest bytes, one of which has the fewest launches and the least memory."""
    yield normal(atoms)
    r = atoms.refinement
    if r.swapped or r.gathered:
        yield direct(atoms)
    if r.swapped:
        first, last = atoms.sliced(), atoms.ungathered()
        # Two swaps of halves move what one exchange of two rounds does.
        yield through(atoms, [first, *atoms.chained(first, last), last])
        if loans := atoms.loans():
            yield through(atoms, [atoms.sliced(loans), atoms.ungathered(loans)])


def priced(atoms: Atoms, slow_first: Sequence[str]) -> Iterator[Route]:
    """Routes worth pricing on a network, whose axes are given slowest first.

    Fewest bytes is not least time: a fused all-to-all sends more and smaller messages than one
    staged by axes, a permute may cross a slow axis that a chain of all-to-alls avoids, and a small
    array is fastest gathered whole. All of these, each with its collectives fused and staged.
    """
    seen: set[tuple[State, ...]] = set()
    for states in _paths(atoms):
        path = [atoms.start, *states, atoms.end]
        for groups in _partitions(slow_first):
            staged = tuple(s for before, after in pairwise(path) for s in _stages(atoms, before, after, groups))
            if staged not in seen:
                seen.add(staged)
                yield through(atoms, staged)
    yield direct(atoms)


def _paths(atoms: Atoms) -> Iterator[list[State]]:
    first, last, end = atoms.sliced(), atoms.ungathered(), atoms.end
    yield [first, last]
    if loans := atoms.loans():
        yield [atoms.sliced(loans), atoms.ungathered(loans)]
    yield atoms.detour()
    yield [first, atoms.untwisted(first, last), last]
    yield [first, atoms.untwisted(last, first), last]
    yield [first, *atoms.chained(first, last), last]
    plain = tuple(d if s is None and d not in atoms.start else s for s, d in zip(atoms.start, end, strict=True))
    yield [plain, *atoms.chained(plain, last), last]
    opened = tuple(None if s is not None and s not in end else s for s in plain)
    yield [plain, opened, *atoms.chained(opened, end)]
    yield [plain, tuple(s if s == d else None for s, d in zip(plain, end, strict=True))]


def _partitions(axes: Sequence[str]) -> Iterator[list[list[str]]]:
    """The ways to run over axes in this order, some of them together; at most eight are tried."""
    if len(axes) > 4:
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


def _stages(atoms: Atoms, before: State, after: State, groups: list[list[str]]) -> Iterator[State]:
    """The states of one gather or all-to-all done group by group; any other move in one go."""
    step = move(atoms, before, after)
    if step is None:
        return
    if step.kind in ("all_gather", "all_to_all"):
        mesh = atoms.source.mesh
        now = before
        for group in groups:
            strides = {s for s in (*before, *after) if s is not None and mesh.axis_at(s) in group}
            later = tuple(a if a != b and strides & {a, b} else n for b, a, n in zip(before, after, now, strict=True))
            if later not in (now, after):
                yield later
            now = later
    yield after
