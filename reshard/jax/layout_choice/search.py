"""The programs of a step that are compiled: what was chosen, again under a correction if it exceeds the budget, and
what experts write.

    budget 100
    without it   model 180, compiled 120     with what was fused there, and its order, the model says 117
    within 97    model 96, compiled 105      104, by the order of this program
    within 99    model 93, compiled 95       it fits
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec

from reshard import hlo
from reshard.errors import LayoutError, ReshardError, shortened
from reshard.jax.layout_choice.compiled_figures import ExecutableFigures, measure_executable
from reshard.jax.layout_choice.emit import emit_step
from reshard.jax.layout_choice.experts import OWN, Expert, list_experts, write_expert
from reshard.jax.layout_choice.fixed_specs import FixedSpecs
from reshard.jax.layout_choice.graph import StepGraph, build_graph, list_splits_of_spec
from reshard.jax.layout_choice.liveness import RunOrder, order_as_compiled
from reshard.jax.layout_choice.op_rules import OpRule
from reshard.jax.layout_choice.trace_step import TracedStep
from reshard.jax.program_report import compile_module, hush_compiler
from reshard.jax.xla_pass.fragments import print_module
from reshard.lower.to_stablehlo import Module
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.milp import SplitSearch, choose_splits
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Split
from reshard.synth.choice.splits import allow_splits
from reshard.synth.cost import Links
from reshard.types.mesh import Mesh
from reshard.types.units import listed

log = logging.getLogger(__name__)
CHOSEN = "chosen"
_CORRECTIONS = 3
_COMPILES = 2 + _CORRECTIONS  # Of what is chosen: the first, after each correction, and what holds least.
_PEAK_ERROR = 1.25  # What is expected to hold this much more than another program does not hold less.
_EXPERT_SECONDS, _EXPERT_GAP = 5.0, 0.02


@dataclass(frozen=True, eq=False)
class TriedLayouts:
    """A program of the step that was considered: specs by the numbers of arguments and results, and figures.

    A spec of None is left to the compiler. `planned` is what the model says; of an expert's program, with the best that
    it can have inside. If `emitted`, the program is that. `compiled` is None for what was not compiled, and `why` says
    why. `order` is what the compiler made of a chosen program that exceeds the budget.
    """

    name: str
    in_specs: tuple[PartitionSpec | None, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    planned: Assignment | None
    module: Module | None = field(default=None, repr=False)
    compiled: ExecutableFigures | None = None
    order: RunOrder | None = field(default=None, repr=False)
    why: str = ""
    emitted: bool = False


@dataclass(frozen=True, eq=False)
class LayoutSearch:
    """A step with all that programs of it are made and judged by; `spent` adds up the seconds of each stage."""

    step: TracedStep
    jax_mesh: JaxMesh
    mesh: Mesh
    rules: Mapping[int, OpRule]
    graph: StepGraph
    fixed: FixedSpecs
    prices: MovePrices
    links: Links
    speed: DeviceSpeed
    budget: int | None
    time_limit: float
    spent: dict[str, float]
    searched: list[float] = field(default_factory=list[float])
    """The CPU seconds of each search so far, which `time_limit` bounds together."""

    @contextmanager
    def limit_search(self, stage: str, share: float = 0.5) -> Generator[float]:
        """Counts a search, and yields the CPU seconds that it may take: a share of those that are left."""
        started = time.process_time()
        try:
            with measure_time(self.spent, stage):
                yield max(0.0, share * (self.time_limit - sum(self.searched)))
        finally:
            self.searched.append(time.process_time() - started)

    @cached_property
    def splits(self) -> SplitSearch:
        """The search of the model, which knows at each budget what was found for those before."""
        return SplitSearch(self.graph.problem, self.prices, self.speed, self.time_limit)

    def compile_chosen(self) -> TriedLayouts:
        """What the model chooses, if it fits the budget as compiled: nothing is faster. Else what it chooses within the
        budget, corrected by what the last program was found to hold; where that leads to nothing that fits, the choices
        that are expected to hold least, up to `_COMPILES` programs in all. Of those that do not fit, the smallest."""
        # Accounts of memory, the nearest to what was compiled first, with what the compiler needs beyond each.
        accounts, tries = [(self.graph, self.splits, 0)], list[tuple[int, TriedLayouts]]()
        for _ in range(_CORRECTIONS + 1):
            chosen = None
            for graph, splits, unseen in accounts:
                with self.limit_search("solve") as seconds:
                    found = splits.find_within(self.budget if tries else None, unseen, seconds=seconds)
                if found is not None:
                    chosen = self.graph.renumber(found, graph)
                    break
            if chosen is None:  # Nothing fits, or nothing was found in time.
                break
            tried = self.compile_assignment(chosen)
            if self.fits(tried):
                return tried
            # Compilers fuse what the model holds in memory, and hold what it does not know of. As the budget is
            # exceeded by what is compiled, this very choice exceeds it from now on.
            compiled = 0 if tried.compiled is None else tried.compiled.peak_bytes
            tries.append((compiled, tried))
            told = self.splits.offer(chosen.splits, chosen.anew)
            accounts = [(self.graph, self.splits, compiled - told.peak_bytes)]
            if tried.order is not None:
                given = self.fixed.arguments, self.fixed.results
                learned = build_graph(self.step, self.rules, self.mesh, *given, tried.order)
                same = learned.renumber(chosen, self.graph)
                search = SplitSearch(learned.problem, self.prices, self.speed, self.time_limit)
                # Buffers of moves are not told apart in a compiled program. Where they matter most the first guess may
                # be as good.
                again = search.offer(same.splits, same.anew)
                accounts.append((learned, search, compiled - again.peak_bytes))
                accounts.sort(key=lambda account: abs(account[2]))
            log.debug("%s exceeds the budget %s, the model by %d", tried.compiled, self.budget, accounts[0][2])
        # What the compiler needs beyond the model differs by program, so these may fit though no account has any hope;
        # and the least by one account need not be that by another.
        small: list[tuple[int, Assignment]] = []
        for graph, splits, unseen in accounts:
            with self.limit_search("solve") as seconds:
                splits.find_smallest(seconds=seconds)
            found = splits.list_smallest(_COMPILES)
            small += [(each.peak_bytes + unseen, self.graph.renumber(each, graph)) for each in found]
        known = {(each.planned.splits, each.planned.anew) for _, each in tries if each.planned is not None}
        for expected, each in sorted(small, key=lambda one: one[0]):
            if len(tries) >= _COMPILES or (tries and expected > _PEAK_ERROR * min(peak for peak, _ in tries)):
                break
            if (each.splits, each.anew) in known:
                continue
            known.add((each.splits, each.anew))
            tried = self.compile_assignment(each)
            log.debug("%d expected, %s", expected, tried.compiled)
            tries.append((0 if tried.compiled is None else tried.compiled.peak_bytes, tried))
            if self.fits(tried):
                break
        # A refusal names the least that was compiled, which the least by the model need not be.
        return min(tries, key=lambda each: each[0])[1]

    def fits(self, tried: TriedLayouts) -> bool:
        """Whether it was compiled, and keeps to the budget."""
        return tried.compiled is not None and (self.budget is None or tried.compiled.peak_bytes <= self.budget)

    def compile_assignment(self, chosen: Assignment) -> TriedLayouts:
        """The program of an assignment, emitted and compiled."""
        layouts = self.graph.spell_layouts(chosen)
        in_specs, out_specs = (
            tuple(layout.to_jax(self.jax_mesh).spec for layout in each) for each in (layouts.arguments, layouts.results)
        )
        with measure_time(self.spent, "emit"):
            module = emit_step(self.step, layouts, self.prices)
        return self.compile_program(TriedLayouts(CHOSEN, in_specs, out_specs, chosen, module, emitted=True))

    def compile_program(self, tried: TriedLayouts) -> TriedLayouts:
        """The same with the compiler's figures."""
        assert tried.module is not None
        with measure_time(self.spent, "compile"), hush_compiler():
            executable: Any = compile_module(list(self.jax_mesh.devices.flat), tried.module, fast=True)
        tried = replace(tried, compiled=measure_executable(executable, self.mesh, self.links, self.speed))
        if not self.fits(tried) and tried.emitted and tried.planned is not None:
            layouts = self.graph.spell_layouts(tried.planned)
            try:
                module = hlo.parse(print_module(executable.hlo_modules()[0]))
                return replace(tried, order=order_as_compiled(self.graph.flow, module, layouts))
            except ReshardError as error:  # The figures are there: what they are made of is only told better.
                log.debug("%s", error)
        return tried

    def try_experts(self, every: bool, chosen: TriedLayouts) -> list[TriedLayouts]:
        """The programs that experts write, by the model; the best of them compiled, or every one, or where the user's
        own shardings are among them those, too. Where the model finds some faster than what was chosen, or that does
        not fit, those that it has room for are also emitted as planned, the fastest first, until one fits."""
        tried: list[TriedLayouts] = []
        experts = list_experts(self.step, self.rules, self.mesh, self.fixed.arguments, self.fixed.results)
        for left, expert in zip(range(len(experts), 0, -1), experts, strict=True):
            row = TriedLayouts(expert.name, expert.in_shardings, expert.out_shardings, None)
            try:
                if strange := sorted(expert.axes - set(self.mesh.axes)):
                    raise LayoutError(f"is over {listed(strange)}, and mesh {self.mesh} has no such axes")
                with self.limit_search("experts", 1 / left) as seconds:
                    planned = self._plan_expert(expert, seconds)
                row = replace(row, planned=planned)
                # The search then knows this choice, and returns none that is slower within any budget that it fits.
                self.splits.offer(planned.splits, planned.anew)
                with measure_time(self.spent, "experts"):
                    row = replace(row, module=write_expert(self.step, expert, self.mesh))
            except ReshardError as error:
                row = replace(row, why=shortened(str(error), 80))
            tried.append(row)
        ranked = sorted(tried, key=lambda each: float("inf") if each.planned is None else each.planned.seconds)
        wanted = {each.name for each in (ranked if every else ranked[:1])} | {OWN}
        if chosen.planned is not None:
            # Who moves as little by the model may move less as compiled: first of all who splits least, as XLA joins
            # the sums of gradients that all devices need whole, and nothing else.
            most = 1.001 * chosen.planned.move_seconds
            light = [each for each in ranked if each.planned is not None and each.planned.move_seconds <= most]
            light.sort(key=lambda each: sum(axes is not None for spec in each.in_specs for axes in spec or ()))
            wanted |= {each.name for each in light[:1]}
        for at, each in enumerate(tried):
            if each.name not in wanted or each.module is None:
                continue
            try:
                tried[at] = self.compile_program(each)
            except Exception as error:  # XLA's errors have no class of their own, and nobody asked for this program.
                tried[at] = replace(each, why=f"does not compile: {shortened(str(error), 80)}")
        most = math.inf if chosen.planned is None or not self.fits(chosen) else chosen.planned.seconds
        for each in ranked:
            planned = each.planned
            if planned is None or planned.seconds >= most or planned.peak_bytes > (self.budget or math.inf):
                continue
            # Its arguments lie as an expert has them, all else as is best for that: a choice among fewer.
            emitted = self.compile_assignment(planned)
            tried.append(replace(emitted, name=f"{each.name}, emitted"))
            if self.fits(emitted):
                break
        return tried

    def _plan_expert(self, expert: Expert, seconds: float) -> Assignment:
        """What the model says of an expert's shardings, with the best in between: a choice of ours, of a few."""
        nodes, allowed = self.graph.problem.nodes, dict[int, tuple[Split, ...] | None]()
        given = {view[0] for view in self.graph.ends[0] if view is not None}
        for side, specs in enumerate((expert.in_shardings, expert.out_shardings)):
            for view, spec in zip(self.graph.ends[side], specs, strict=True):
                # A result that is an argument's next value lies as the argument does.
                if view is None or spec is None or (side and view[0] in given):
                    continue
                node = nodes[view[0]]
                if (
                    node.only is None
                    and view[0] not in allowed
                    and (only := list_splits_of_spec(spec, node.sizes, self.mesh))
                ):
                    allowed[view[0]] = only
        # Many are ranked and one is compiled, for which the first digits are enough.
        limit = min(seconds, _EXPERT_SECONDS)
        problem = allow_splits(self.graph.problem, allowed)
        return choose_splits(problem, self.prices, self.speed, time_limit=limit, gap=_EXPERT_GAP)


@contextmanager
def measure_time(spent: dict[str, float], stage: str) -> Generator[None]:
    """Adds the seconds that its body takes to a stage."""
    started = time.perf_counter()
    try:
        yield
    finally:
        spent[stage] = spent.get(stage, 0.0) + time.perf_counter() - started
