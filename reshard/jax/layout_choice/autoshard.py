"""`autoshard`: which shardings a step should have, by the cost of real plans, and the program that moves as planned.

    step      traced once, as `jax.jit` traces it                                     layout_choice.trace_step
    choice    a `Problem` of `synth.choice`, solved under the budget                  layout_choice.graph
    program   all of it on tiles, the collectives of plans in between                 layout_choice.emit
    compiled  its bytes and its peak are the compiler's, and so are those of what     layout_choice.search
              an expert would write, and of the user's own shardings

Of what was compiled and fits the budget, what was chosen is returned, unless another program is faster by both counts
of its work, the compiled module's and the model's, or moves less and is hardly slower; collectives are timed as
compiled in either count.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from reshard.errors import BudgetError, LayoutError, MeshError, PlanError, ProgramError, name_arguments, quoted
from reshard.jax.layout_choice.compiled_figures import ExecutableFigures
from reshard.jax.layout_choice.explain import MOST_LISTED, Explanation, explain_choice, show_explanation
from reshard.jax.layout_choice.fixed_specs import read_fixed
from reshard.jax.layout_choice.graph import build_graph
from reshard.jax.layout_choice.op_rules import read_op_rules
from reshard.jax.layout_choice.search import CHOSEN, LayoutSearch, TriedLayouts, measure_time
from reshard.jax.layout_choice.trace_step import StepValue, TracedStep, read_step_program, trace_step
from reshard.jax.layout_choice.wrap_module import place_value, wrap_module
from reshard.jax.program_report import checked_function, devices_for
from reshard.jax.request import options_on
from reshard.jax.stablehlo_pass.shardy import MANUAL
from reshard.lower.to_stablehlo import Module
from reshard.runtime.platform_network import find_calibration
from reshard.show import terminal
from reshard.synth.choice.device_speed import SPEEDS, DeviceSpeed
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment
from reshard.synth.choice.trade_off import TradeOff, solve_trade_off
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.types.mesh import Mesh
from reshard.types.notation.jax_sharding import parse_spec
from reshard.types.units import bytes_text, counted, listed, seconds_text
from reshard.types.whole import whole

COMPARE = ("none", "best", "all")
_FIGURES = ("received", "peak", "moves", "work", "total")
_LESS = 0.95  # A remark names a program that receives or holds less than this part of what is returned.
_FEWER = 0.99  # And one that moves less than this part, and takes longer.
_MOVED_AS = {"bfloat16": "float32", "float8_e4m3fn": "float16", "float8_e5m2": "float16"}  # by XLA on CPU
_GUESSED = 1.05  # The error of modelled work: a program that moves less may be slower by this factor.
_CLOSE = 0.99  # A choice may be as far from the best by itself; nearer ones are as fast.
ASSUMED = Network.uniform(1e-6, 1e10)
"""The network of devices whose links nobody measured, named or knows."""


@dataclass(frozen=True, eq=False)
class LayoutChoice:
    """The shardings that `autoshard` chose for a step, its program, and what it was compared with.

    `tried` has all programs in the order of the report, `best` is the one that is returned. `network_assumed` says
    whether no network was named, measured or known. `search` has what they are made and judged by.
    """

    search: LayoutSearch = field(repr=False)
    network: Network
    network_assumed: bool
    tried: tuple[TriedLayouts, ...]
    best: TriedLayouts

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments, as `jax.jit` takes them; of a program from a file, a tuple."""
        return self._place(self.best.in_specs, self.search.step.arguments, self.search.step.in_tree)

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results, as `jax.jit` takes them; None where they are left to the compiler."""
        return self._place(self.best.out_specs, self.search.step.results, self.search.step.out_tree)

    def _place(self, specs: Sequence[PartitionSpec | None], values: Sequence[StepValue], tree: Any) -> Any:
        placed = tuple(place_value(self.search.jax_mesh, *pair) for pair in zip(specs, values, strict=True))
        return placed if tree is None else jax.tree.unflatten(tree, placed)

    def jit(self) -> Any:
        """The step as a function like that of `jax.jit`, which takes and returns arrays in the shardings chosen."""
        return wrap_module(self.module(), self.search.step, self.search.jax_mesh)

    def module(self) -> Module:
        """The program as a StableHLO module."""
        assert self.best.module is not None  # Only what was compiled is returned.
        return self.best.module

    @property
    def received_bytes(self) -> int:
        """What a device receives in a run of the compiled program."""
        return self._figures.received_bytes

    @property
    def peak_bytes(self) -> int:
        """What a device holds at most in the compiled program."""
        return self._figures.peak_bytes

    @property
    def seconds(self) -> float:
        """The modelled seconds of the compiled program: its work and its collectives."""
        return self._figures.seconds

    @property
    def gap(self) -> float:
        """By how much the model's seconds of what is returned may exceed the best ones: 0.01 for one percent."""
        first = self.tried[0].planned
        if first is None:
            return 0.0
        # What is planned for an expert's shardings is the best of a few: the bound is that of all.
        planned = self.best.planned if self.best.emitted and self.best.planned else first
        return replace(planned, bound_seconds=first.bound_seconds).gap

    @property
    def _figures(self) -> ExecutableFigures:
        assert self.best.compiled is not None
        return self.best.compiled

    @cached_property
    def explanation(self) -> Explanation | None:
        """What was chosen and why, in words; None where the user's own program is returned, of which the model says
        nothing."""
        planned, problem = self.best.planned, self.search.graph.problem
        if planned is None:
            return None
        step, numbers = self.search.step, self.search.graph.arguments
        named = [(value.name, at) for value, at in zip(step.arguments, numbers, strict=True) if at >= 0]
        # Of one that is as fast there is nothing to tell. What the model thinks of experts, not what was compiled of
        # them: the moves of both are told by one model.
        slower = [(each.name, each.planned) for each in self.tried if each.planned and each is not self.best]
        slower = [one for one in slower if one[1].seconds > 1.001 * planned.seconds]
        rival = min(slower, key=lambda one: one[1].seconds, default=None)
        larger: list[tuple[int, Assignment]] = []
        # Who has a budget asks what more of it would buy; without one there is nothing to buy.
        if self.search.budget is not None:
            doubled = 2 * self.search.budget
            # Corrected as the choice was: the model by itself may have no room for what the compiler has.
            unseen = self._figures.peak_bytes - planned.peak_bytes
            with self.search.limit_search("solve", 1.0) as seconds:
                found = self.search.splits.find_within(doubled, unseen, seconds=seconds)
            if found is not None:  # Nothing may be found in what is left of the time.
                larger.append((doubled, found))
        state = {numbers[at] for at in step.carried.values()}
        return explain_choice(problem, planned, named, self.search.prices, self.search.speed, rival, larger, state)

    def trade_off(self, budgets: Sequence[int] = ()) -> TradeOff:
        """What is chosen under each budget, by default from the least possible one up: a picture in a notebook."""
        others = {each.name: each.planned for each in self.tried[1:] if each.planned is not None}
        return solve_trade_off(self.search.splits, budgets, others, self.search.budget)

    def to_json(self, indent: int | None = None) -> str:
        """All figures, the shardings by path, and the explanation."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        values = [*self.search.step.arguments, *self.search.step.results]
        specs = [*self.best.in_specs, *self.best.out_specs]
        spelled = [{"name": v.name, "spec": None if s is None else str(s)} for v, s in zip(values, specs, strict=True)]
        count = len(self.search.step.arguments)
        return {
            "mesh": dict(self.search.jax_mesh.shape),
            "network": self.network.name,
            "network_assumed": self.network_assumed,
            "budget_bytes": self.search.budget,
            "returned": self.best.name,
            "received_bytes": self.received_bytes,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "gap": self.gap,
            "arguments": spelled[:count],
            "results": spelled[count:],
            "programs": list(map(_describe_program, self.tried)),
            "remarks": list(self.remarks),
            "explanation": None if self.explanation is None else self.explanation.to_dict(),
            "seconds_spent": dict(self.search.spent),
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else is to be known, in sentences: what others need less of, and how good the choice is."""
        said: list[str] = []
        ours, mine = self._figures, self.best.planned
        made = [(each.name, each.compiled) for each in self.tried if each is not self.best and each.compiled]
        # Like is compared with like, first what is known: an expert's program that was compiled fits its own peak.
        small = [(name, each.peak_bytes, ours.peak_bytes) for name, each in made]
        if not any(least < _LESS * most for _, least, most in small) and mine is not None:
            plans = [(each.name, each.planned) for each in self.tried if each.planned and not each.compiled]
            small = [(f"{name}, by the model,", each.peak_bytes, mine.peak_bytes) for name, each in plans]
        name, least, most = min(small, key=lambda one: one[1], default=("", 0, 0))
        if least < _LESS * most:
            holds = f"holds {bytes_text(least)} where what is returned holds {bytes_text(most)}"
            said.append(f"{name} {holds}: budget={least} asks for no more than that")
        slower = [(name, each, more) for name, each in made if (more := each.seconds - self.seconds) > 0]
        for figure, verb, spell in (
            ("received_bytes", "receives", bytes_text),
            ("move_seconds", "moves for", seconds_text),
        ):
            name, other, more = min(slower, key=lambda one: getattr(one[1], figure), default=("", ours, 0.0))
            few, many = (getattr(one, figure) for one in (other, ours))
            if few >= _FEWER * many:
                continue
            moves = other.move_seconds - ours.move_seconds
            parts = ((moves, f"its {counted(other.launches, 'move')}"), (more - moves, "its work"))
            why = listed([f"{seconds_text(by)} more for {what}" for by, what in parts if by > 0])
            moved = f"{verb} {spell(few)} where what is returned {verb} {spell(many)}"
            said.append(f"{name} {moved}, but takes {seconds_text(more)} longer: {why}")
            break
        if any(each.planned and not each.emitted for each in self.tried):
            # Between the arguments of an expert the model is free, and XLA's propagation may move ten times as much.
            every = any(each.compiled is None and not each.why for each in self.tried)
            what = "of others, planned is the best that can be done with such arguments, and compiled what XLA makes"
            said.append(f"{what} of them" + ("; compare='all' compiles each" if every else ""))
        if self.gap > 5e-4:  # Of a choice that was made for memory alone, the bound says nothing.
            most = f"takes at most {self.gap:.1%} longer than the best choice, by the model"
            said.append(f"what was chosen {most if self.gap < 10 else 'may be far from the best: no bound is known'}")
        specs = (*self.best.in_specs, *self.best.out_specs)
        whole = not any(entry for spec in specs for entry in spec or ())
        if whole and self.best.emitted and not ours.received_bytes:
            # Small steps on fast devices: right, but not what people expect who have given eight.
            work = seconds_text(self.seconds - ours.move_seconds)
            said.append(f"no argument is split: all work takes {work}, and moves would cost more than splitting saves")
        if mine is not None and not self.best.emitted:
            said.append(f"the moves that are told are a plan's: what moves in {self.best.name}, XLA decided")
        if any(op.name == MANUAL for op in self.search.step.ops):
            said.append("what a shard_map of the step computes and moves by itself is compiled, and not planned")
        if self.search.graph.unknown_trips:
            said.append("loops whose trips depend on data count as one trip")
        return tuple(said)

    def report(self) -> str:
        """What was compared, what is returned, and why, as text."""
        return terminal.print_plain(lambda out: show_choice(out, self))

    def __str__(self) -> str:
        return self.report()


def show_choice(out: Console, choice: LayoutChoice) -> None:
    """Prints what was compared, what is returned, and why."""
    budget = "no budget" if choice.search.budget is None else f"a budget of {bytes_text(choice.search.budget)}"
    assumed = " (assumed: name one, or measure it with reshard calibrate)" if choice.network_assumed else ""
    axes = ", ".join(f"{name}={size}" for name, size in choice.search.jax_mesh.shape.items())
    terminal.print_paragraph(out, f"shardings on <{axes}>, network {choice.network.name}{assumed}, {budget}")
    out.print()
    # By what and whose the figures are; experts that are only planned share a row where their figures are equal.
    named: dict[tuple[str, ...], list[str]] = {}
    for each in choice.tried:
        told = _describe_program(each)
        for how in [how for how in ("planned", "compiled") if how in told]:
            moves, total = told[how]["move_seconds"], told[how]["seconds"]
            cells = [bytes_text(told[how][key]) for key in ("received_bytes", "peak_bytes")]
            cells += map(seconds_text, (moves, total - moves, total))
            cells.append("returned" if how == "compiled" and each is choice.best else "")
            named.setdefault((how, each.name if each.compiled else "", *cells), []).append(each.name)
    table = terminal.make_table("", " ", *_FIGURES, "  ", right=_FIGURES)
    for (how, _, *cells), names in named.items():
        table.add_row(", ".join(names), how, *cells)
    terminal.print_table(out, table)
    if failed := [(each.name, each.why) for each in choice.tried if each.why]:
        out.print()
        terminal.print_facts(out, failed)
    for remark in choice.remarks:
        out.print()
        terminal.print_paragraph(out, remark)
    if choice.explanation is not None:
        out.print()
        show_explanation(out, choice.explanation)
        if any(len(group.names) > MOST_LISTED for group in choice.explanation.groups):
            terminal.print_paragraph(out, "to_dict()['arguments'] has the spec of every argument")


@name_arguments
def autoshard(
    f: Callable[..., Any],
    mesh: JaxMesh,
    *shapes: Any,
    budget: int | str | None = None,
    network: Network | str | None = None,
    fixed: Mapping[str, PartitionSpec | NamedSharding | None] | None = None,
    donate: int | Sequence[int] = (),
    compare: str = "best",
    speed: DeviceSpeed | str | None = None,
    time_limit: float = 60.0,
) -> LayoutChoice:
    """Chooses the shardings of a step: of its arguments, its results, and all values in between.

    `f` is any function that `jax.jit` takes, and `shapes` are its arguments, as arrays or `jax.ShapeDtypeStruct`s;
    shardings that they have are compared with what is chosen, as `your own`. `mesh` is a `jax.sharding.Mesh`, whose
    devices need not exist here. `budget` is what a device may hold at most while the step runs. `network` is that of
    `reshard.plan`, and `speed` a `DeviceSpeed` or the name of one. `fixed` maps paths of arguments and results to the
    specs that stay: `{"params/w1": P("x"), "result/0": None}`; see `layout_choice.fixed_specs`. `donate` has the
    numbers of the arguments that are donated. `compare` says which programs of experts are compiled beside the chosen
    one: "none", the "best" by the model, or "all". `time_limit` has the CPU seconds for the choice, all searches
    together; compiles and the first prices of moves come on top. What is found by then is returned.

    Raises `BudgetError` if nothing that was compiled fits the budget; its `smallest` is the least that was compiled, no
    proven least.
    """
    if not isinstance(mesh, JaxMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError(
            f"mesh {quoted(mesh)} is a {type(mesh).__name__}; give a jax.sharding.Mesh, as of jax.make_mesh"
        )
    positions = (donate,) if isinstance(donate, int) else tuple(donate)
    if unknown := [each for each in positions if whole(each, 0, len(shapes) - 1) is None]:
        raise ProgramError(
            f"donate {quoted(unknown[0])} is the number of no argument: there are {len(shapes)}, from 0 up"
        )
    spent: dict[str, float] = {}
    with measure_time(spent, "trace"):
        platform = mesh.devices.flat[0].platform
        step = trace_step(checked_function(f), shapes, donate=positions, platform=platform)
    return choose_layouts(
        step, mesh, budget=budget, network=network, fixed=fixed, compare=compare, speed=speed,
        time_limit=time_limit, spent=spent,
    )  # fmt: skip


def autoshard_program(
    program: str | bytes,
    axes: Mesh,
    *,
    fixed: Sequence[str] = (),
    budget: int | str | None = None,
    network: Network | str | None = None,
    compare: str = "best",
    platform: str = "cpu",
    topology: str | None = None,
) -> LayoutChoice:
    """Chooses the shardings of a StableHLO program, MLIR text or a portable artifact, on a mesh with these axes.

    The devices are those of a platform, or of a `topology` that need not exist here, as for `report_program`. `fixed`
    has texts of a path and a spec, `params/w1=P('x')`.
    """
    specs: dict[str, PartitionSpec] = {}
    for text in fixed:
        path, equals, spec = text.partition("=")
        if not equals:
            raise LayoutError(f"fixed {quoted(text)}: give a path and a spec, params/w1=P('x')")
        specs[path] = PartitionSpec(*parse_spec(spec).dims)
    step = read_step_program(program, platform=platform)
    # Devices of a topology exist only for the compiler, which is all that figures need.
    devices = devices_for(axes.size, platform, topology)
    mesh = JaxMesh(np.array(devices).reshape(tuple(axes.axes.values())), tuple(axes.axes))
    return choose_layouts(step, mesh, budget=budget, network=network, fixed=specs, compare=compare)


def choose_layouts(
    step: TracedStep,
    mesh: JaxMesh,
    *,
    budget: int | str | None = None,
    network: Network | str | None = None,
    fixed: object = None,
    compare: str = "best",
    speed: DeviceSpeed | str | None = None,
    time_limit: float = 60.0,
    spent: dict[str, float] | None = None,
) -> LayoutChoice:
    """What `autoshard` does with a step that is traced already, or that comes from a file."""
    if compare not in COMPARE:
        raise PlanError(f"compare={quoted(compare)} is none of {', '.join(map(repr, COMPARE))}")
    spent = {} if spent is None else spent
    ours = Mesh(dict(mesh.shape))
    options = options_on(list(mesh.devices.flat), PlanOptions.read(budget, network))
    wires = options.network or ASSUMED
    if not isinstance(speed, DeviceSpeed):
        # Who names the network of other devices than those at hand means their speed, too.
        measured = None if speed else find_calibration(str(mesh.devices.flat[0].device_kind))
        own = measured.speed if measured is not None and measured.network == wires else None
        speed = own or DeviceSpeed.preset(speed or (wires.name if wires.name in SPEEDS else "cpu"))
    kept = read_fixed(fixed, step, ours)
    with measure_time(spent, "rules"):
        rules = read_op_rules(step)
    with measure_time(spent, "graph"):
        graph = build_graph(step, rules, ours, kept.arguments, kept.results)
    # Devices are numbered by their place in the mesh, as in the compiled program: their ids say nothing here.
    moved_as = _MOVED_AS if step.platform == "cpu" else None
    prices = MovePrices(ours, wires, moved_as, strided=step.platform == "tpu", copy_rate=speed.memory_bytes_per_second)
    search = LayoutSearch(
        step, mesh, ours, rules, graph, kept, prices, wires.links(ours), speed, options.budget, time_limit, spent
    )
    tried = [search.compile_chosen()]
    if compare != "none":
        tried += search.try_experts(compare == "all", tried[0])
    compiled = [(each, each.compiled) for each in tried if each.compiled is not None]
    fitting = [pair for pair in compiled if search.fits(pair[0])]
    if not fitting:
        smallest = min(figures.peak_bytes for _, figures in compiled)
        raise BudgetError(
            f"no layouts of this step that were compiled fit {bytes_text(options.budget or 0)} a device; the smallest "
            f"budget that works is {smallest} ({bytes_text(smallest)}): give it, donate arguments that the step "
            f"replaces, or take a larger mesh",
            smallest,
        )
    best = _pick_best(fitting)
    return LayoutChoice(search, wires, options.network is None, tuple(tried), best)


def _pick_best(fitting: Sequence[tuple[TriedLayouts, ExecutableFigures]]) -> TriedLayouts:
    """What was chosen, unless others are faster by both counts of work, that of the compiled module and the model's,
    and not only just: then the fastest of these. Where one moves less than that and takes hardly longer, it is returned
    instead: moves are known, and work is guessed.

    What a module shows of work differs by what the compiler fused, and the model's count is of the best that a
    compiler could make of an expert's shardings.
    """

    def sum_both(each: TriedLayouts, figures: ExecutableFigures) -> tuple[float, float]:
        # The user's own may have no figures of the model; then those of the compiler are all there is.
        work = 0.0 if each.planned is None else each.planned.seconds - each.planned.move_seconds
        return figures.seconds, figures.move_seconds + work

    chosen = sum_both(*fitting[0])
    faster = [
        pair
        for pair in fitting
        if all(a <= b for a, b in zip(sum_both(*pair), chosen, strict=True))
        and sum(sum_both(*pair)) < _CLOSE * sum(chosen)
    ]
    # Where what was chosen is not among them, it does not fit.
    candidates = (faster or fitting[:1]) if fitting[0][0].name == CHOSEN else fitting
    fastest, ours = min(candidates, key=lambda pair: pair[1].seconds)
    less = [
        (each, figures)
        for each, figures in fitting
        if 1.001 * figures.move_seconds < ours.move_seconds
        and figures.received_bytes < 1.001 * ours.received_bytes
        and figures.seconds < _GUESSED * ours.seconds
    ]
    return min(less, key=lambda pair: pair[1].seconds, default=(fastest, ours))[0]


def _describe_program(tried: TriedLayouts) -> dict[str, Any]:
    """A program's row as data."""
    described: dict[str, Any] = {"name": tried.name, "why": tried.why}
    if tried.planned is not None:
        keys = ("received_bytes", "peak_bytes", "seconds", "move_seconds")
        described["planned"] = {key: getattr(tried.planned, key) for key in keys}
    if tried.compiled is not None:
        described["compiled"] = asdict(tried.compiled) | {"seconds": tried.compiled.seconds}
    return described
