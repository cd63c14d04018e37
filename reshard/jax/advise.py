"""Which change of a program's shardings would save bytes: a search that compiles the program with each change.

The program is StableHLO. Its user's shardings are read by line (`stablehlo_pass.user_shardings`), and each can be
removed or replaced. What is tried:

    constraints    removed; with the sharding that other arrays of the shape or the rank have; over the axes that the
                   program's data is on, in the first dim; with an axis at another dim, or without it
    arguments,     the same, and a result like the argument that it updates; only changes that make nothing worse, and
    results        only where they gain clearly more than a change of a constraint
    operations     a constraint after one that has none, once nothing else is left

Constraints of one line are one candidate: unrolled layers, or the passes of a gradient over one line. The best change
is made, the others are measured again with it, and so on. In the end, changes without which the rest gains as much
are left out.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard import hlo
from reshard.doctor.advice import REMOVED, Advice, Change, Figures
from reshard.errors import ProgramError, ReshardError, quoted
from reshard.jax.stablehlo_pass.module_pass import name_main, read_stablehlo
from reshard.jax.stablehlo_pass.shardy import make_compilable, read_meshes
from reshard.jax.stablehlo_pass.user_shardings import (
    CONSTRAINTS,
    IN,
    OPERATION,
    OUT,
    Key,
    Spec,
    UserSharding,
    edit_shardings,
    format_spec,
    read_operations,
    read_shardings,
    share_donations,
)
from reshard.jax.xla_pass.fragments import print_module
from reshard.types.whole import whole

COMPILES, SECONDS = 150, 600.0
"""How many programs a search compiles at most, and for how long it goes on."""
_LEAST = 0.01  # A change gains at least this share of what the program receives or holds.
_CLOSE = 0.97  # Gains this close are equal: what is least like its siblings is then changed.
_TRADED = 0.15  # What gains on one side and loses on the other gains at least this.
ODD = "odd ends"
Edits = Mapping[Key, Spec | None]


class TriedProgram(NamedTuple):
    """A compiled program's figures, and its floating-point operations, which replicated work adds to."""

    figures: Figures
    flops: float

    @property
    def held_bytes(self) -> float:
        """The peak; arguments and results count half as much again, as they are held between runs, too."""
        return self.figures.peak_bytes + (self.figures.peak_bytes - self.figures.temp_bytes) / 2


class Candidate(NamedTuple):
    """One change: these shardings become `after`; `prior` is how unlike its siblings what they have is.

    Those of one `stage` of the search are listed by what they gain, after those of the stages before.
    """

    sites: tuple[UserSharding, ...]
    after: Spec | None
    prior: float
    stage: str

    @property
    def edits(self) -> dict[Key, Spec | None]:
        """What it changes, for `AdviceSearch.measure`."""
        return {site.key: self.after for site in self.sites}

    @property
    def kind(self) -> str:
        """That of its shardings; an argument and its result count as an argument."""
        return self.sites[0].kind

    @property
    def weight(self) -> float:
        """What its gain counts for where it is compared with others.

        Who made a mistake meant to split an array and did it unlike the rest. To split it no more at all may gain
        something too, but is seldom what is wanted, and less so of what is like the rest.
        """
        before, after = (sum(map(len, spec or ())) for spec in (self.sites[0].spec, self.after))
        less = self.after is not None and after < before
        apart = 1.0 if self.stage in (CONSTRAINTS, ODD) else 0.2  # What is not at fault is left for little.
        return apart * (0.3 if less and not after else 0.6 if less else 1.0) * (0.7 + 0.3 * min(self.prior, 1.0))


@dataclass
class AdviceSearch:
    """A program and what was measured of it; `compile_it` compiles a module."""

    text: bytes
    compile_it: Callable[[Any], Any]
    compiles: int
    seconds: float
    tried: int = 0
    failed: int = 0
    stopped: str = ""
    known: dict[frozenset[tuple[Key, Spec | None]], TriedProgram | None] = field(
        default_factory=dict[frozenset[tuple[Key, "Spec | None"]], "TriedProgram | None"]
    )
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        module = self.read_module()
        self.axes = {name: dict(mesh.axes) for name, mesh in read_meshes(module).items()}
        listed = read_shardings(module)
        self.derived = {one.key: None for one in listed if one.derived}
        self.sites = [one for one in listed if not one.derived and one.shape]
        self.operations = read_operations(module)
        self.meshes = {one.key: one.mesh or next(iter(self.axes), "") for one in (*listed, *self.operations)}
        first = self.measure({})
        if first is None:
            raise ProgramError("the program does not compile from its StableHLO, so no change of it can be measured")
        self.first = first
        figures = first.figures
        # Where next to nothing is received or held, shares of it say nothing.
        self.scales = (
            max(figures.received_bytes, figures.peak_bytes // 50, 1),
            max(figures.temp_bytes, figures.peak_bytes // 20, 1),
            max(first.flops, 1.0),
        )

    def read_module(self) -> Any:
        module = read_stablehlo(zlib.decompress(self.text).decode())
        name_main(module)
        make_compilable(module)
        share_donations(module)
        return module

    @property
    def spent(self) -> bool:
        """Whether a limit is reached; then `stopped` says which."""
        if self.tried >= self.compiles:
            self.stopped = f"{self.compiles} compiles"
        elif time.monotonic() - self.started > self.seconds:
            self.stopped = f"{self.seconds:g} s"
        return bool(self.stopped)

    def measure(self, edits: Edits) -> TriedProgram | None:
        """The program with these edits as compiled; None if it does not compile.

        With any edit, explicit types follow from what is left of the user's own.
        """
        every = {**self.derived, **edits} if edits else {}
        key = frozenset(every.items())
        if key not in self.known:
            self.tried += 1
            try:
                module = self.read_module()
                edit_shardings(module, every, self.meshes)
                self.known[key] = _read_figures(self.compile_it(module))
            except Exception:  # Whatever a try raises, the program itself is as it was: only the try has failed.
                self.failed += 1
                self.known[key] = None
        return self.known[key]

    def cost(self, measured: TriedProgram) -> float:
        """Bytes received and held and operations, each as a share of the program's own."""
        received, held, work = self.scales
        figures = measured.figures
        return figures.received_bytes / received + measured.held_bytes / held + 0.5 * measured.flops / work

    def gain(self, before: TriedProgram, after: TriedProgram | None, kind: str) -> float:
        """By how much a change of such a sharding lowers the cost; 0 if it should not be made."""
        if after is None:
            return 0.0
        received, held, _ = self.scales
        rises = (
            (after.figures.received_bytes - before.figures.received_bytes) / received,
            (after.held_bytes - before.held_bytes) / held,
        )
        gain = self.cost(before) - self.cost(after)
        # Less of one for more of the other is a choice of the user's, unless it is much less for little more.
        traded = min(rises) > -_LEAST or kind in (IN, OUT) or gain < max(_TRADED, *rises)
        if max(rises) > _LEAST and traded:
            return 0.0
        return gain if min(rises) < -_LEAST / 2 else 0.0


def _read_figures(executable: Any) -> TriedProgram:
    received = hlo.traffic(hlo.parse(print_module(executable.hlo_modules()[0]))).received_bytes
    memory = executable.get_compiled_memory_stats()
    temp = int(memory.temp_size_in_bytes)
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    try:
        flops = float(executable.cost_analysis().get("flops", 0.0))
    except Exception:  # Not every backend counts them.
        flops = 0.0
    return TriedProgram(Figures(received, temp, temp + int(ends)), flops)


def advise(
    text: bytes,
    compile_it: Callable[[Any], Any],
    limit: int = 8,
    *,
    compiles: int = COMPILES,
    seconds: float = SECONDS,
) -> Advice:
    """The changes of a program's shardings that save bytes, at most `limit` of them.

    `text` is the program's StableHLO with locations, compressed by zlib; `compile_it` compiles a module. The search
    ends after `compiles` compiled programs or `seconds`.
    """
    most, tries = whole(limit, 1), whole(compiles, 1)
    if most is None:
        raise ReshardError(f"limit {quoted(limit)}: give the most changes, a whole number from 1 up")
    if tries is None:
        raise ReshardError(f"compiles {quoted(compiles)}: give the most programs to compile, a whole number from 1 up")
    number: Any = seconds
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise ReshardError(f"seconds {quoted(seconds)}: give a time above 0")
    search = AdviceSearch(text, compile_it, tries, float(seconds))
    constraints = _propose(search, _group_constraints(search), CONSTRAINTS)
    odd, others = _propose_ends(search)
    chosen = _search_greedily(search, [], constraints, most)
    # An argument or a result is the caller's as well. It comes first only where it is unlike those beside it, and
    # where changing it alone gains more than all that can be done inside.
    if alone := _search_greedily(search, [], odd, most):
        gained, inside = (search.gain(search.first, search.measure(_join(each)), OUT) for each in (alone, chosen))
        if gained > inside:
            chosen = _search_greedily(search, alone, constraints, most)
    chosen = _search_greedily(search, chosen, odd, most)
    chosen = _search_greedily(search, chosen, others, most)
    if not chosen:
        chosen = _search_greedily(search, chosen, _propose_additions(search), 2)
    return _measure_chosen(search, _drop_needless(search, chosen)[:most])


# ---- what may be changed into what -----------------------------------------------------------------


def _fits(search: AdviceSearch, spec: Spec, shape: Sequence[int], mesh: str) -> bool:
    """Whether every dim splits evenly over its axes, and no axis stands twice."""
    sizes = search.axes.get(mesh, {})
    names = [axis for axes in spec for axis in axes]
    if len(spec) != len(shape) or len(set(names)) < len(names) or any(name not in sizes for name in names):
        return False
    for size, axes in zip(shape, spec, strict=True):
        for axis in axes:
            if size % sizes[axis]:
                return False
            size //= sizes[axis]
    return True


def _find_data_axes(search: AdviceSearch) -> tuple[str, ...]:
    """The axes that the program's data is on: what the first dim of most constraints and arguments is split over."""
    counts: Counter[tuple[str, ...]] = Counter()
    for _, spec in {(one.line, one.spec) for one in search.sites if one.spec and one.kind != OUT}:
        if spec and spec[0] and "?" not in spec[0]:
            counts[spec[0]] += 1
    constrained = Counter(
        one.spec[0] for one in search.sites if one.kind == CONSTRAINTS and one.spec and one.spec[0] not in ((), ("?",))
    )
    counts.update(constrained)
    return counts.most_common(1)[0][0] if counts else ()


def _list_alternatives(search: AdviceSearch, site: UserSharding) -> list[Spec]:
    """The shardings to try in the place of one, the likeliest first."""
    shape, own, rank = site.shape, site.spec, len(site.shape)
    alike: Counter[Spec] = Counter()
    for one in {(each.line, each.spec, each.shape) for each in search.sites}:
        if one[1] is not None and len(one[2]) == rank:
            alike[one[1]] += 100 if one[2] == shape else 1
    listed = [spec for spec, _ in alike.most_common()]
    data = _find_data_axes(search)
    others = tuple(axis for axis in search.axes.get(site.mesh or next(iter(search.axes), ""), {}) if axis not in data)
    nothing: Spec = ((),) * rank
    expert: list[Spec] = []
    if data and site.kind in (CONSTRAINTS, OPERATION):
        expert.append((data, *nothing[1:]))
        if rank > 1:
            expert += [(data, *nothing[1:-1], others[:1])] if others else []
        if rank > 2:  # A loop's or a microbatch's dim comes first.
            expert.append(((), data, *nothing[2:]))
    moved: list[Spec] = []
    for at, axes in enumerate(own or ()):
        if axes and "?" not in axes:
            rest = (*(own or ())[:at], (), *(own or ())[at + 1 :])
            moved += [(*rest[:to], axes, *rest[to + 1 :]) for to in range(rank) if to != at and not rest[to]]
            moved.append(rest)
    every = dict.fromkeys([*listed[:4], *expert, *moved, *listed[4:8]])
    mesh = search.meshes[site.key]
    return [spec for spec in every if spec != own and _fits(search, spec, shape, mesh)]


def _rate_oddness(search: AdviceSearch, group: Sequence[UserSharding]) -> float:
    """How unlike those of other arrays of its rank a sharding is, from 0 to 1; arrays of its shape count most."""
    site = group[0]
    weights: Counter[Spec | None] = Counter()
    for _, spec, shape in {(one.line, one.spec, one.shape) for one in search.sites if one.kind == site.kind}:
        if len(shape) == len(site.shape) and spec is not None:
            weights[spec] += 3 if shape == site.shape else 1
    total = sum(weights.values())
    odd = 1 - weights[site.spec] / total if total else 0.5
    data = _find_data_axes(search)
    if site.kind == CONSTRAINTS and site.spec is not None and data and site.spec[0] != data:
        odd += 0.25
    return odd


def _group_constraints(search: AdviceSearch) -> list[tuple[UserSharding, ...]]:
    """The constraints that are changed together: those of one line, sharding and shape; of one line with one sharding;
    and, of several lines, those of one odd sharding and shape."""
    sites = [one for one in search.sites if one.kind == CONSTRAINTS]
    groups: dict[tuple[object, ...], list[UserSharding]] = defaultdict(list)
    for one in sites:
        groups[one.line, one.spec, one.shape].append(one)
        groups[one.line, one.spec].append(one)
        groups[one.spec, one.shape, "lines"].append(one)
    unique = {tuple(one.key for one in group): tuple(group) for group in groups.values()}
    return list(unique.values())


def _propose(search: AdviceSearch, groups: Iterable[Sequence[UserSharding]], stage: str) -> list[list[Candidate]]:
    """The changes of each group, in rounds: the likeliest of every group, then the next, and so on."""
    removable = stage == CONSTRAINTS
    rounds: dict[int, list[Candidate]] = defaultdict(list)
    for group in groups:
        odd, site = _rate_oddness(search, group), max(group, key=lambda one: one.nbytes)
        lines = len({one.line for one in group}) if removable else 1  # Arguments have names instead.
        if lines > 1 and (odd < 0.5 or lines > 4):
            continue  # One line is a smaller change than several.
        odd -= 0.3 * (lines > 1)
        specs: list[Spec | None] = [None] if removable else []
        specs += _list_alternatives(search, site) if len({len(one.shape) for one in group}) == 1 else []
        specs = [
            spec
            for spec in specs
            if spec is None or all(_fits(search, spec, one.shape, search.meshes[one.key]) for one in group)
        ]
        for at, spec in enumerate(specs[: 2 if lines > 1 else 6]):
            rounds[min(at // 2, 2) + 3 * (lines > 1)].append(Candidate(tuple(group), spec, odd, stage))
    return [sorted(rounds[at], key=lambda one: -one.prior) for at in sorted(rounds)]


# ---- the search ------------------------------------------------------------------------------------


def _join(chosen: Iterable[Candidate]) -> dict[Key, Spec | None]:
    """The edits of several changes."""
    return {key: spec for one in chosen for key, spec in one.edits.items()}


def _search_greedily(
    search: AdviceSearch, chosen: list[Candidate], rounds: Sequence[Sequence[Candidate]], most: int
) -> list[Candidate]:
    """Takes the best change of a round, then the next best with it, until none gains; then goes on to the next round.

    A gain rarely grows by another change, so what gained most before is measured first, and what gained less than the
    best of these is not. In the end the first round is tried once more: of two constraints that force the same move
    only both together may save it.
    """
    gains: dict[Candidate, float] = {}
    indifferent: Counter[tuple[Key, ...]] = Counter()
    count = len(chosen)
    for number, candidates in enumerate([*rounds, *rounds[:1]]):
        last = number == len(rounds)
        if last and len(chosen) == count:
            break
        before = search.measure(_join(chosen)) or search.first
        for one in candidates:
            if search.spent or set(one.edits) & set(_join(chosen)):
                continue
            if indifferent[tuple(one.edits)] >= 2 and not last:
                continue  # Two other shardings changed nothing here.
            after = search.measure({**_join(chosen), **one.edits})
            gains[one] = one.weight * search.gain(before, after, one.kind)
            same = after is None or abs(search.cost(before) - search.cost(after)) < _LEAST / 4
            indifferent[tuple(one.edits)] += same
        while len(chosen) < most and (taken := _take_best(search, chosen, gains)):
            chosen = [*chosen, *_split_lines(taken)]
    return _refine(search, chosen, count, [one for each in rounds for one in each])


def _take_best(search: AdviceSearch, chosen: Sequence[Candidate], gains: dict[Candidate, float]) -> Candidate | None:
    """The change that gains most with those chosen, of those that gained before; None if none does."""
    edits = _join(chosen)
    before = search.measure(edits) or search.first
    left = sorted((one for one in gains if gains[one] >= _LEAST), key=lambda one: -gains[one])
    best = 0.0
    now: dict[Candidate, float] = {}
    for one in left:
        if set(one.edits) & set(edits) or gains[one] < _CLOSE * best:
            continue
        if search.spent and frozenset({**search.derived, **edits, **one.edits}.items()) not in search.known:
            continue
        now[one] = one.weight * search.gain(before, search.measure({**edits, **one.edits}), one.kind)
        best = max(best, now[one])
    gains |= now
    close = [one for one, gain in now.items() if gain >= max(_CLOSE * best, _LEAST)]
    return max(close, key=lambda one: (one.prior, now[one]), default=None)


def _refine(search: AdviceSearch, chosen: list[Candidate], start: int, every: Sequence[Candidate]) -> list[Candidate]:
    """The changes, each with the best of the shardings that can be tried at its place, with the others."""
    for at in range(start, len(chosen)):
        one = chosen[at]
        for other in every:
            if other.sites != one.sites or other.after == one.after or search.spent:
                continue
            tried = [*chosen[:at], other, *chosen[at + 1 :]]
            before = search.measure(_join(chosen))
            if before is not None and search.gain(before, search.measure(_join(tried)), one.kind) > 2 * _LEAST:
                chosen = tried
    return chosen


def _split_lines(candidate: Candidate) -> list[Candidate]:
    """A change of several lines as one for each."""
    lines: dict[str, list[UserSharding]] = defaultdict(list)
    for site in candidate.sites:
        lines[site.line].append(site)
    if candidate.kind in (IN, OUT):
        return [candidate]
    return [candidate._replace(sites=tuple(group)) for group in lines.values()]


def _propose_ends(search: AdviceSearch) -> tuple[list[list[Candidate]], list[list[Candidate]]]:
    """Changes of arguments and results: of one, of those that differ by a number in their name, of an argument
    together with the result that takes its place, and of all that are split alike. Those of ends that are unlike others
    of their shape come first, apart from the rest."""
    least = search.first.figures.peak_bytes / 200
    ends = [one for one in search.sites if one.kind in (IN, OUT) and one.spec is not None]
    names = {one.key: re.sub(r"\d+", "*", one.line) for one in ends}
    total = Counter((one.kind, names[one.key], one.shape, one.spec) for one in ends)
    shares: dict[tuple[int, ...], Counter[Spec | None]] = defaultdict(Counter)
    groups: dict[tuple[object, ...], list[UserSharding]] = defaultdict(list)
    for one in ends:
        shares[one.shape][one.spec] += 1
        if one.nbytes * total[one.kind, names[one.key], one.shape, one.spec] >= least:
            groups[one.kind, names[one.key], one.shape, one.spec].append(one)
            groups[one.shape, one.spec].append(one)
            # The last key of a path, by which an argument and its result are known.
            groups[(*re.findall(r"\[[^\]]*\]|\.\w+", names[one.key])[-1:], one.shape, one.spec)].append(one)
    unique = list({tuple(one.key for one in group): tuple(group) for group in groups.values()}.values())

    usual = {
        (shape, spec)
        for shape, counts in shares.items()
        for spec, count in counts.items()
        if all(other == spec or less < count for other, less in counts.items())
    }
    odd, others = (
        [one for one in unique if ((one[0].shape, one[0].spec) in usual) is is_usual] for is_usual in (False, True)
    )
    free = [Candidate(group, None, 0.0, ODD) for group in odd if all(one.kind == OUT for one in group)]
    return [*_propose(search, odd, ODD), free], _propose(search, others, "ends")[:1]


def _propose_additions(search: AdviceSearch) -> list[list[Candidate]]:
    """Constraints after operations that have none, on the largest arrays of the program."""
    groups: dict[tuple[object, ...], list[UserSharding]] = defaultdict(list)
    for one in search.operations:
        groups[one.line, one.shape].append(one)
    least = search.first.figures.peak_bytes / 50
    large = sorted(groups.values(), key=lambda group: -group[0].nbytes)[:8]
    return [
        [
            Candidate(tuple(group), spec, 0.0, OPERATION)
            for group in large
            if group[0].nbytes >= least
            for spec in _list_alternatives(search, group[0])[:3]
        ]
    ]


def _drop_needless(search: AdviceSearch, chosen: list[Candidate]) -> list[Candidate]:
    """The changes without which the others gain less; the last ones are asked first."""
    for one in reversed(chosen) if len(chosen) > 1 else ():
        rest = [other for other in chosen if other is not one]
        whole_cost, without = search.measure(_join(chosen)), search.measure(_join(rest))
        if whole_cost and without and search.cost(without) - search.cost(whole_cost) < _LEAST / 2:
            chosen = rest
    return chosen


def _measure_chosen(search: AdviceSearch, chosen: Sequence[Candidate]) -> Advice:
    """The changes in the order of the search's stages, of each stage the one that gains most first."""
    edits: dict[Key, Spec | None] = {}
    changes: list[Change] = []
    left, before = list(chosen), search.first
    while left:
        alike = [one for one in left if one.stage == left[0].stage]
        measured = [(search.measure({**edits, **one.edits}), one) for one in alike]
        gains = [
            (float("-inf") if after is None else one.weight * (search.cost(before) - search.cost(after)), -at)
            for at, (after, one) in enumerate(measured)
        ]
        after, one = measured[-max(gains)[1]]
        before = after or before
        left.remove(one)
        edits |= one.edits
        changes.append(_describe(one, before.figures))
    return Advice(tuple(changes), search.first.figures, search.tried, search.failed, search.stopped)


def _describe(candidate: Candidate, figures: Figures) -> Change:
    """The change in words."""
    sites, after = candidate.sites, REMOVED if candidate.after is None else format_spec(candidate.after)
    before = "" if candidate.kind == OPERATION else format_spec(sites[0].spec)
    names = list(dict.fromkeys(site.line for site in sites))
    line = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    what = " and ".join(dict.fromkeys(site.what for site in sites))
    return Change(line, what, candidate.kind, before, after, *figures)
