"""Which change of a program's shardings would save bytes: looked for by the model of `synth.choice`, and compiled.

The program is StableHLO. Its user's shardings are read by line (`stablehlo_pass.user_shardings`), and each can be
removed or replaced. For the model they are splits that are fixed, and all others are chosen as is best for them:

    costs        how much less the program takes if this sharding alone is free, or all that may be at fault together
    instead      the split that the model chooses in its place; or none, which leaves it to the compiler
    measured     the few that cost most, each compiled; the best is made, and the others are measured again with it

Constraints of one line are one candidate: unrolled layers, or the passes of a gradient over one line. Arguments and
results are the caller's as well: those unlike others of their shape come with the constraints, the rest after these.
Compilers do worse than the model. Where they receive far more, what is unlike its siblings is tried as these are, and
arguments with their axes at other dims.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from reshard import hlo
from reshard.doctor.advice import REMOVED, Advice, Change, Figures, measure_noise
from reshard.errors import ProgramError, ReshardError, join_first, quoted
from reshard.jax.layout_choice.graph import build_graph
from reshard.jax.layout_choice.op_rules import read_op_rules
from reshard.jax.layout_choice.trace_step import read_step_program
from reshard.jax.stablehlo_pass.module_pass import name_main, read_stablehlo
from reshard.jax.stablehlo_pass.shardy import make_compilable, read_meshes
from reshard.jax.stablehlo_pass.user_shardings import (
    CONSTRAINTS,
    IN,
    OUT,
    Key,
    Spec,
    UserSharding,
    edit_shardings,
    format_spec,
    read_shardings,
    read_tags,
    share_donations,
    tag_sites,
)
from reshard.jax.xla_pass.fragments import print_module
from reshard.synth.choice.assess import HELD_PART
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.milp import choose_splits
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Access, Assignment
from reshard.synth.choice.splits import allow_splits
from reshard.synth.network import Network
from reshard.types.whole import whole

log = logging.getLogger(__name__)
COMPILES, SECONDS = 150, 600.0
"""How many programs a search compiles at most, and for how long it goes on."""
_SOLVE_SECONDS, _GAP = 10.0, 2e-3
_LEAST = 0.01  # A change gains at least this share of what the program receives or holds.
_TRADED = 0.15  # What gains on one side and loses on the other gains at least this.
_CLEAR = 0.15  # What gains less may not be what is at fault.
_WORSE = 2.5  # A program that receives so many times what the model says has something that the model cannot see.
_SLIGHT = 0.04  # What costs less than this part of all that could be gained is not looked at.
_GROUPS, _SIBLINGS = 6, 12  # So many groups of shardings and so many changes are compiled at once.
_RATE = 1e9  # bytes a second; any rate would do, as seconds are shares
Group = tuple[UserSharding, ...]
Edits = Mapping[Key, Spec | None]


class TriedProgram(NamedTuple):
    """A compiled program's figures, its floating-point operations, which replicated work adds to, and the bytes that
    these read and write."""

    figures: Figures
    flops: float
    touched_bytes: float

    @property
    def held_bytes(self) -> float:
        """The peak; arguments and results count half as much again, as they are held between runs, too."""
        return self.figures.peak_bytes + (self.figures.peak_bytes - self.figures.temp_bytes) / 2


class Candidate(NamedTuple):
    """One change: these shardings become `after`; None removes them."""

    sites: Group
    after: Spec | None

    @property
    def edits(self) -> dict[Key, Spec | None]:
        """What it changes, for `AdviceSearch.measure`."""
        return {site.key: self.after for site in self.sites}

    @property
    def kind(self) -> str:
        """That of its shardings; an argument and its result count as an argument."""
        return self.sites[0].kind


class AdviceSearch:
    """A program and what was measured of it; `compile_it` compiles a module."""

    def __init__(self, text: bytes, compile_it: Callable[[Any], Any], compiles: int, seconds: float) -> None:
        self.text, self.compile_it, self.compiles, self.seconds = text, compile_it, compiles, seconds
        self.tried = self.failed = 0
        self.stopped = ""
        self.known: dict[frozenset[tuple[Key, Spec | None]], TriedProgram | None] = {}
        self.started = time.monotonic()
        module = self.read_module()
        self.axes = {name: dict(mesh.axes) for name, mesh in read_meshes(module).items()}
        listed = read_shardings(module)
        self.derived = {one.key: None for one in listed if one.derived}
        self.sites = [one for one in listed if not one.derived and one.shape]
        self.meshes = {one.key: one.mesh or next(iter(self.axes), "") for one in listed}
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

    def gain_together(self, chosen: Sequence[Candidate]) -> float:
        """By how much several changes lower the cost."""
        return self.cost(self.first) - self.cost(self.measure(_join(chosen)) or self.first)

    def gain(self, before: TriedProgram, after: TriedProgram | None, kind: str, noise: float = 0.0) -> float:
        """By how much a change of such a sharding lowers the cost; 0 if it should not be made."""
        if after is None or max(a - b for a, b in zip(before.figures, after.figures, strict=True)) <= noise:
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
        counted = executable.cost_analysis()
        flops, touched = (float(counted.get(name, 0.0)) for name in ("flops", "bytes accessed"))
    except Exception:  # Not every backend counts them.
        flops = touched = 0.0
    return TriedProgram(Figures(received, temp, temp + int(ends)), flops, touched)


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
    suspects, usual = _group_sites(search)
    model: ShardingModel | None = None
    try:
        model = ShardingModel(search)
    except Exception:  # A model only says where to look first: a program that it cannot read is searched all the same.
        log.debug("no model of the program", exc_info=True)
    chosen = _take_best(search, [], _propose_by_model(search, model, suspects), most)
    if search.gain_together(chosen) < _CLEAR:
        chosen = _take_best(search, [], [*chosen, *_propose_by_siblings(search, suspects)], most)
    elif _misses(search, model, chosen):
        chosen = _take_best(search, chosen, _propose_by_siblings(search, suspects), most)
    ends = _propose_by_model(search, model, usual, chosen, _CLEAR)
    ends += _propose_by_siblings(search, usual) if _misses(search, model, chosen) else []
    chosen = _take_best(search, chosen, ends, most)
    changes: list[Change] = []
    for at, one in enumerate(chosen):
        after = search.measure(_join(chosen[: at + 1])) or search.first
        changes.append(_describe(one, after.figures))
    return Advice(tuple(changes), search.first.figures, search.tried, search.failed, search.stopped)


# ---- what may be at fault --------------------------------------------------------------------------


def _group_sites(search: AdviceSearch) -> tuple[list[Group], list[Group]]:
    """The shardings that are changed together, those least like others of their rank first; and apart from these the
    arguments and results that are like most others of their shape."""
    alike: Counter[tuple[bool, int, Spec | None]] = Counter()
    shares: dict[tuple[int, ...], Counter[Spec | None]] = defaultdict(Counter)
    for kind, _, shape, spec in {(one.kind, one.line, one.shape, one.spec) for one in search.sites}:
        alike[kind == CONSTRAINTS, len(shape), spec] += 1
        shares[shape][spec] += kind != CONSTRAINTS and spec is not None
    suspects: dict[tuple[object, ...], list[UserSharding]] = defaultdict(list)
    usual: dict[tuple[object, ...], list[UserSharding]] = defaultdict(list)
    for one in search.sites:
        counts = shares[one.shape]
        if one.kind == CONSTRAINTS:
            suspects[one.line, one.spec, len(one.shape)].append(one)
        elif one.spec is not None and all(counts[each] < counts[one.spec] for each in counts if each != one.spec):
            usual[one.shape, one.spec].append(one)
        elif one.spec is not None:
            # By the last key of its path an argument is known in each layer, and so is the result that it becomes.
            suspects[*re.findall(r"\[[^\]]*\]|\.\w+", one.line)[-1:], one.shape, one.spec].append(one)
    groups = sorted(
        map(tuple, suspects.values()),
        key=lambda group: alike[group[0].kind == CONSTRAINTS, len(group[0].shape), group[0].spec],
    )
    return groups, list(map(tuple, usual.values()))


class ShardingModel:
    """The program as a `Problem` of `synth.choice`, in which each of the user's shardings is fixed or free.

    Its costs are shares of what the program receives, holds and computes, as those of `AdviceSearch.cost` are.
    """

    def __init__(self, search: AdviceSearch) -> None:
        module = search.read_module()
        tag_sites(module)
        step = read_step_program(module.operation.get_asm(enable_debug_info=True))
        symbol, _ = Counter(search.meshes.values()).most_common(1)[0]
        mesh = read_meshes(module)[symbol]
        given, returned = (
            {at: value.given for at, value in enumerate(values) if value.given is not None}
            for values in (step.arguments, step.results)
        )
        graph = build_graph(step, read_op_rules(step), mesh, given, returned)
        self.views: dict[Key, list[tuple[int, Access]]] = defaultdict(list)
        for kind, views in zip((IN, OUT), graph.ends, strict=True):
            for at, view in enumerate(views):
                self.views[kind, at] += [] if view is None else [view]
        for at, key in read_tags(step.ops).items():
            # A function that is called twice has each of its constraints twice.
            view = graph.views[at][1][0] if at in graph.views else None
            self.views[key] += [] if view is None else [view]
        received, held, work = search.scales
        # Where all that the program receives takes one second, its arithmetic takes half of one, as do the bytes that
        # it reads and writes, which stand for temporaries; a byte of arguments takes what it adds to the bytes held.
        self.unit = received / _RATE
        memory = max(search.first.touched_bytes, 1.0) / (0.5 * self.unit)
        self.speed = DeviceSpeed("shares", {"f32": work / (0.5 * self.unit)}, memory)
        scale = 1.5 * self.unit / held * memory / HELD_PART
        nodes = tuple(replace(node, held_bytes=scale * node.held_bytes) for node in graph.problem.nodes)
        self.problem = replace(graph.problem, nodes=nodes)
        self.prices = MovePrices(mesh, Network.uniform(0.0, _RATE))
        self.known: dict[frozenset[Key], Assignment] = {}
        self.solve(())

    def solve(self, free: Iterable[Key]) -> Assignment:
        """The best choice of everything that the user did not give, and of the shardings that are free."""
        keys = frozenset(free)
        if keys not in self.known:
            opened = dict.fromkeys(node for key in keys for node, _ in self.views[key])
            problem = allow_splits(self.problem, opened)
            self.known[keys] = choose_splits(problem, self.prices, self.speed, time_limit=_SOLVE_SECONDS, gap=_GAP)
        return self.known[keys]

    def cost(self, groups: Iterable[Group]) -> float:
        """What the program takes with these shardings free."""
        return self.solve(site.key for group in groups for site in group).seconds / self.unit

    def spell(self, chosen: Assignment, key: Key) -> Spec | None:
        """How an assignment splits an array of the user's; None if the model does not know it."""
        for node, access in self.views[key]:
            return tuple(tuple(name for factor in dim for name in chosen.splits[node][factor]) for dim in access.dims)
        return None


# ---- the search ------------------------------------------------------------------------------------


def _propose_by_model(
    search: AdviceSearch,
    model: ShardingModel | None,
    groups: Sequence[Group],
    chosen: Sequence[Candidate] = (),
    least: float = _LEAST,
) -> list[Candidate]:
    """The changes of those that cost at least so much by the model, beside what is chosen already."""
    before = [one.sites for one in chosen]
    if model is None or (gain := model.cost(before) - model.cost([*before, *groups])) < least:
        return []
    given, least = model.cost(before), max(least, _SLIGHT * gain)
    alone = {group: given - model.cost([*before, group]) for group in groups if not search.spent}
    free = {group: [group] for group in alone if alone[group] > least}
    if given - model.cost([*before, *free]) < gain / 2:
        # Of two that force the same move none gains alone. All are freed, and as many as cost nothing then put back.
        left = list(groups)
        for group in sorted(groups, key=lambda group: alone.get(group, 0.0)):
            rest = [other for other in left if other is not group]
            if group not in free and not search.spent and given - model.cost([*before, *rest]) > gain - least:
                left = rest
        free |= {group: left for group in left if group not in free}
    candidates: list[Candidate] = []
    for group in sorted(free, key=lambda group: -alone.get(group, 0.0))[:_GROUPS]:
        splits = model.solve(site.key for each in (*before, *free[group]) for site in each)
        # One line may constrain arrays of several shapes, each of which is split otherwise.
        instead: dict[Spec | None, list[UserSharding]] = defaultdict(list)
        for site in group:
            instead[model.spell(splits, site.key)].append(site)
        candidates += _propose_by_siblings(search, [group])
        candidates += [Candidate(tuple(s), spec) for spec, s in instead.items() if spec not in (None, group[0].spec)]
    return list(dict.fromkeys(candidates))


def _misses(search: AdviceSearch, model: ShardingModel | None, chosen: Sequence[Candidate]) -> bool:
    """Whether the compiled program with these changes receives far more than it would have to, by the model."""
    measured = search.measure(_join(chosen)) or search.first
    return model is None or measured.figures.received_bytes > _WORSE * model.solve(_join(chosen)).received_bytes


def _propose_by_siblings(search: AdviceSearch, groups: Sequence[Group]) -> list[Candidate]:
    """Changes without any model: removed, or with the sharding that most arrays of the shape or the rank have, or, of
    an argument, with the axes of a dim at another one."""
    candidates: list[Candidate] = []
    for group in groups:
        own, shape = group[0].spec or (), group[0].shape
        sizes, counts = search.axes.get(search.meshes[group[0].key], {}), Counter[Spec]()
        for other in search.sites:
            if other.spec not in (None, own):
                counts[other.spec] += 100 if other.shape == shape else 1
        for at, to in itertools.permutations(range(len(own)), 2):
            if own[at] and not own[to]:
                moved = tuple(own[at] if dim == to else () if dim == at else own[dim] for dim in range(len(own)))
                counts[moved] += 0
        for spec in list(counts):
            pieces = [math.prod(sizes.get(axis, 0) for axis in axes) for axes in spec]
            fits = [each and not size % each for one in group for size, each in zip(one.shape, pieces, strict=False)]
            # No dim is open, and each splits evenly.
            if len(spec) != len(shape) or not all(fits):
                del counts[spec]
        # An argument without any sharding would be split as the compiler likes.
        removable = all(site.kind != IN for site in group)
        candidates += [Candidate(group, None)] if removable else []
        candidates += [Candidate(group, spec) for spec, _ in counts.most_common(1 if removable else 2)]
    return candidates[:_SIBLINGS]


def _take_best(
    search: AdviceSearch, chosen: Sequence[Candidate], candidates: Sequence[Candidate], most: int
) -> list[Candidate]:
    """What is chosen, and the best change with it, then the next best, until none gains; those without which the others
    gain as much are left out.

    A gain rarely grows by another change, so what gained most before is measured first, and what gained less than the
    best of these is not.
    """
    chosen = list(chosen)
    gains = dict.fromkeys(candidates, math.inf)
    while len(chosen) < most:
        edits, best = _join(chosen), (_LEAST, None)
        before = search.measure(edits) or search.first
        alone = search.measure(_join(chosen[:1])) or search.first
        noise = measure_noise(search.first.figures, alone.figures)
        for one in sorted(gains, key=lambda one: -gains[one]):
            if gains[one] <= best[0] or set(one.edits) & set(edits) or search.spent:
                continue
            gains[one] = search.gain(before, search.measure({**edits, **one.edits}), one.kind, noise)
            best = max(best, (gains[one], one), key=lambda pair: pair[0])
        if best[1] is None:
            break
        chosen.append(best[1])
    for one in reversed(chosen[1:]):
        rest = [other for other in chosen if other is not one]
        if search.gain_together(chosen) - search.gain_together(rest) < _LEAST / 2:
            chosen = rest
    return chosen


def _join(chosen: Iterable[Candidate]) -> dict[Key, Spec | None]:
    """The edits of several changes."""
    return {key: spec for one in chosen for key, spec in one.edits.items()}


def _describe(candidate: Candidate, figures: Figures) -> Change:
    """The change in words."""
    sites, after = candidate.sites, REMOVED if candidate.after is None else format_spec(candidate.after)
    before = format_spec(sites[0].spec)
    names = list(dict.fromkeys(site.line for site in sites))
    line = join_first(names, 6)
    what = " and ".join(dict.fromkeys(site.what for site in sites))
    return Change(line, what, candidate.kind, before, after, *figures)
