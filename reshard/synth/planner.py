"""The planner: prices the routes, keeps those within the budget, returns the best plan, checked.

    routes        candidate steps                       the normal form, an exchange, over a permute, ...
    cost          their seconds on a network            the fastest few stay
    chain         each step checked by its typing rule  a plan: bytes, launches, live memory
    idle          ... and over axes that nothing uses   less time for more bytes
    budget        steps cut until they fit              or a `BudgetError`
    _best         the least of these                    seconds, bytes, launches, memory

Without a network the best plan has the fewest bytes on the busiest device, then the fewest launches, then the least
memory, where the messages of an exchange count as buffers even if it does not stage them. With a network it has the
least predicted seconds, then the same.

Seconds that differ in their last digits are equal: they are sums in different orders. Between uneven layouts and
without a network, bytes within `slack` of the fewest are equal, too: the padding that one all-gather carries along is
cheaper than the 511 messages of an exchange that leaves it out.

A source and a target on different devices have routes of their own (`routes.crossing`). Bytes then mean what the
busiest device sends or receives in all, and after that the sum over steps of what the busiest one of each does: the
steps run one after the other. A relay is tried only where no other route is within `slack` of the bound. Without a
network, no plan loads its busiest device more than a pull does, whatever the slack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from reshard.errors import BudgetError, PlanError, ReshardError, quoted
from reshard.geometry.remesh import common_mesh, mesh_of_used, one_set, remesh
from reshard.plans.memory import peaks
from reshard.plans.plan import Plan, Step, StepSpec, TreePlan, chain, device_kinds, flattened
from reshard.synth import cost, moves
from reshard.synth.batches import batches_of, in_order
from reshard.synth.budget import plan_tree_within, within
from reshard.synth.network import Links, Network
from reshard.synth.options import SLACK as SLACK
from reshard.synth.options import PlanOptions
from reshard.synth.options import bytes_of as bytes_of
from reshard.synth.options import network_of as network_of
from reshard.synth.routes import ROUTES, Pair, Route, crossing, idle
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.reductions import identity
from reshard.types.whole import check_deadline


def plan(
    source: Layout | Move,
    target: Layout | None = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    slack: float = SLACK,
) -> Plan:
    """The best checked plan from source to target, or of a `Move` with its view, its parts and its cast.

    `budget` is in bytes a device, or text such as "64MiB", and counts everything live during the move, source and
    target included; `network` is a `Network`, the name of a preset or a file, or None or "none" for none; `donate` lets
    the source be overwritten or freed once its data has moved. Where a layout is uneven and there is no network, plans
    whose bytes exceed the fewest by a share of at most `slack` count as equal in bytes; 0 is exact. Plans are cached,
    and equal arguments give equal plans in every process.

    The devices of source and target may differ. Then the best plan without a network is the one whose busiest device
    sends or receives the fewest bytes in all, then the one with the least sum of that over steps. Whatever the slack,
    these are never more than those of one exchange, in which every device asks holders for all that it lacks.

    Raises `PlanError` for layouts of different arrays, for a target that is a mean where the source is
    not, and for options of the wrong kind; `BudgetError`, with the smallest budget that works, if it cannot be met.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> p = plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    >>> [s.kind for s in p.steps], p.received_bytes, p.lower_bound_bytes
    (['all_to_all'], 1792, 1792)
    """
    return find_plan(source, target, PlanOptions.read(budget, network, donate, slack))


def find_plan(source: Layout | Move, target: Layout | None, options: PlanOptions) -> Plan:
    """`plan`, with options that were read before.

    >>> from reshard.types import Mesh
    >>> rows, whole = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> find_plan(Move(rows, whole), None, PlanOptions.read(donate=True)).peak_bytes
    80
    """
    before, after = _ends(source, target)
    # Slack is for uneven layouts without a network. What does not decide is left out, so that it makes no new entry of
    # the caches.
    exact = options.network is not None or (before.even and after.even and one_set(before.mesh, after.mesh))
    used = PlanOptions(options.budget, options.network, options.donate, 0.0 if exact else options.slack)
    if isinstance(source, Move) and not source.plain:
        return _plan_move(source, used)
    return _plan(before, after, used)


@lru_cache(maxsize=4096)
def _plan_move(move: Move, options: PlanOptions) -> Plan:
    """The best plan of a move with a view, a part or a cast, from those of its middle; see `moves`."""

    def between(source: Layout, target: Layout, limit: int | None) -> Plan:
        return _plan(source, target, options._replace(budget=limit))

    made, network = moves.plans(move, between, options), options.network
    if not one_set(move.source.mesh, move.target.mesh):
        return _best([cost.timed_across(plan, network) for plan in made], options.slack)
    links = None if network is None else network.links(move.source.mesh)
    return _best([cost.timed(plan, links) for plan in made], options.slack)


@lru_cache(maxsize=4096)
def _plan(source: Layout, target: Layout, options: PlanOptions) -> Plan:
    budget, network, donate, slack = options[:4]
    pair = Pair(*_on_one_mesh(source, target))
    _check_start(pair)
    if pair.crosses:
        plans = _plans_across(pair, options)
        plans = plans if budget is None else within(plans, budget, None)
        plans = _none_above_pull(plans) if network is None else plans
        return _best([cost.timed_across(plan, network) for plan in plans], slack)
    links = None if network is None else network.links(pair.source.mesh)
    routes: Sequence[Sequence[StepSpec]] = routes_of(pair, links)
    routes = _slim(pair, routes) if links is None else _timed_routes(pair, routes, links, pruned=budget is None)
    made: list[Plan] = []
    for route in routes:
        check_deadline()
        made.append(cost.timed(chain(pair.source, pair.target, route, donate), links))
        if budget is None and links is None and _settles(made[-1], slack):
            break
    return _best(made if budget is None else within(made, budget, links), slack)


def _plans_across(pair: Pair, options: PlanOptions) -> list[Plan]:
    """A plan for each route to other devices; relays only if no other route is within the slack of the bound."""
    slack = options.slack if options.network is None else SLACK
    routes = dict.fromkeys(crossing.routes(pair, options.network))
    plans = [chain(pair.source, pair.target, route, options.donate) for route in routes]
    if not any(_within(_busiest(plan), plan.endpoint_bound_bytes, slack) for plan in plans):
        plans += [chain(pair.source, pair.target, route, options.donate) for route in crossing.relays(pair)]
    return plans


def _none_above_pull(plans: Sequence[Plan]) -> Sequence[Plan]:
    """The plans whose busiest device sends or receives no more than if every device of the target pulls what it lacks.

    `slack` saves launches among these only.
    """
    most = min((_busiest(plan) for plan in plans if _pulls(plan)), default=None)
    return plans if most is None else [plan for plan in plans if _busiest(plan) <= most]


def _pulls(plan: Plan) -> bool:
    """Whether devices receive from holders only: no relay, and nothing is sent after the crossing."""
    kinds = [one_set(step.operand.mesh, step.result.mesh) for step in plan.steps]
    crossed = kinds.index(False)
    return not plan.steps[crossed].mode.relay and not any(step.sent_bytes for step in plan.steps[crossed + 1 :])


def routes_of(pair: Pair, links: Links | None) -> list[Route]:
    """All routes between layouts on one set of devices, each once."""
    every: dict[Route, None] = {}
    for routes in ROUTES:
        for route in routes(pair, links):
            check_deadline()
            every[route] = None
    return list(every)


def _timed_routes(
    pair: Pair, routes: Sequence[Sequence[StepSpec]], links: Links, pruned: bool
) -> Sequence[Sequence[StepSpec]]:
    """The fastest routes, those over idle axes too; all those that any budget may need, if they are not `pruned`."""
    known: cost.Known = {}
    fastest = cost.fastest(routes, pair.source, links, known)
    least = cost.route_seconds(fastest[0], pair.source, links, known)
    over = list(idle.routes(pair, links, least)) if least else []
    return cost.fastest([*fastest, *over], pair.source, links, known) if pruned else [*routes, *over]


def _slim(pair: Pair, routes: Sequence[Sequence[StepSpec]]) -> Sequence[Sequence[StepSpec]]:
    """The routes whose tiles are never larger than the larger of source and target; all routes, if there are none."""
    most = max(pair.source.tile_bytes, pair.target.tile_bytes)
    return [route for route in routes if all(step.result.tile_bytes <= most for step in route)] or routes


def _settles(plan: Plan, slack: float) -> bool:
    """Whether a plan for uneven layouts is good enough to skip the costly statistics of the exchange that rivals it."""
    even = plan.source.even and plan.target.even
    return not even and plan.launches <= 1 and _within(plan.received_bytes, plan.lower_bound_bytes, slack)


def _best(plans: Sequence[Plan], slack: float) -> Plan:
    """The plan of least seconds, then of fewest bytes, then the first by `_preference`."""
    least = min(_seconds(plan) for plan in plans)
    plans = [plan for plan in plans if cost.as_fast(_seconds(plan), least)]
    for figure in _FIGURES:
        fewest = min(figure(plan) for plan in plans)
        plans = [plan for plan in plans if _within(figure(plan), fewest, slack)]
    return min(plans, key=_preference)


def _busiest(plan: Plan) -> int:
    """What the busiest device receives; to other devices, what it sends or receives."""
    return max(plan.sent_bytes, plan.received_bytes) if plan.crosses else plan.received_bytes


def _in_turn(plan: Plan) -> int:
    """What the busiest devices of the steps to other devices send or receive, one step after the other."""
    return plan.endpoint_bytes if plan.crosses else 0


_FIGURES = (_busiest, _in_turn)
"""The bytes that decide, the first before the second."""


def _within(received: int, fewest: int, slack: float) -> bool:
    return received - fewest <= fewest * slack


def _seconds(plan: Plan) -> float:
    return 0.0 if plan.seconds is None else plan.seconds


def _preference(plan: Plan) -> tuple[int, int, int, int]:
    """What decides between equal bytes, in this order; the last entry prefers a collective to an exchange of boxes."""
    exchanges = sum(step.kind == "exchange" and step.mode.view is None for step in plan.steps)
    return (plan.launches, _memory(plan), plan.received_bytes, exchanges)


def _memory(plan: Plan) -> int:
    """The peak if messages have buffers of their own, as XLA's have: an exchange ties with XLA's own collectives."""
    return max([plan.peak_bytes, *(step.live_bytes + _message(step) for step in plan.steps)])


def _message(step: Step) -> int:
    """The bytes of a message that an exchange has no scratch for."""
    staged = step.kind != "exchange" or step.mode.in_place or step.mode.view is not None or step.cost.scratch > 0
    return 0 if staged or not step.launches else -(-step.received_bytes // step.launches)


def _ends(source: object, target: object) -> tuple[Layout, Layout]:
    """The source and the target of a request; refuses other objects, and layouts of different arrays."""
    if isinstance(source, Move):
        if target is not None:
            raise PlanError(f"a move has its target; give {source} alone, or two layouts")
        return source.source, source.target
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            jax = hasattr(layout, "spec") and hasattr(layout, "mesh")
            advice = "Layout.from_jax(sharding, shape, dtype)" if jax else "Layout.parse(text, mesh)"
            raise PlanError(
                f"the {name} {quoted(layout)} is a {type(layout).__name__}, not a Layout; read it with {advice}"
            )
    _check_arrays(cast(Layout, source), cast(Layout, target))
    return cast(Layout, source), cast(Layout, target)


def _check_arrays(source: Layout, target: Layout) -> None:
    if source.shape != target.shape:
        raise PlanError(
            f"source {source} has global shape {source.shape}, target {target} has {target.shape}; a "
            f"redistribution keeps the array, so give both the same global shape, or a Move with a view"
        )
    if source.dtype != target.dtype:
        raise PlanError(
            f"source {source} is {source.dtype}, target {target} is {target.dtype}; a redistribution keeps the "
            f"dtype, so cast before or after it, or give Move(source, target, cast=True)"
        )


def _on_one_mesh(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts respelled on one mesh if one can express them, else as they are, for an exchange."""
    if source.mesh == target.mesh:
        pair = (source, target)
    else:
        shared = common_mesh(source.mesh, target.mesh) or mesh_of_used(source, target)
        pair = next(
            (
                (s, t)
                for mesh in (source.mesh, target.mesh, shared)
                if mesh is not None
                and (s := remesh(source, mesh)) is not None
                and (t := remesh(target, mesh)) is not None
            ),
            (source, target),
        )
    return pair


def _check_start(pair: Pair) -> None:
    """Refuses targets that no values can fill: all summands but one are zeros, or what stands for them."""
    source, target = pair.source, pair.target
    if pair.starts and identity(target.dtype, str(target.reduction)) is None:
        raise PlanError(
            f"target {target} is partial where source {source} is not (mesh {target.mesh}), but no value of "
            f"{target.dtype} leaves a {target.reduction} as it is, so nothing can fill the other summands; give a "
            f"target that is a sum, or one that is not partial"
        )


# `plan_tree`: many arrays planned as one, in few launches and within one budget.
#
# planner        each array on its own; equal moves once
# batches        arrays whose steps share launches, in the order in which the peak is lowest
# tree_budget    where that does not fit: arrays are cut, and batches made smaller


def plan_tree(
    moves: Mapping[str, Any] | Sequence[Any],
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    slack: float = SLACK,
) -> TreePlan:
    """The plans of many arrays, in batches that share launches.

    `moves` is a dict, list or tuple, nested or not, of (source, target) pairs, or of what `plan` takes in their place;
    an array's name is the path to it, such as "layers.0.w". `budget` bounds what lives on a device at any time: all
    sources, all targets and all buffers. The other options are those of `plan`, for every array. Equal trees give equal
    plans in every process.

    Raises the errors of `plan`, with the array's name, and `BudgetError`, with the smallest budget that works.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> ends = {"w": ("f32[{x}4, 8]", "f32[16, 8]"), "b": ("f32[{x}2]", "f32[8]")}
    >>> tree = plan_tree({name: tuple(Layout.parse(end, mesh) for end in pair) for name, pair in ends.items()})
    >>> tree.launches, [batch.names for batch in tree.batches]
    (1, [('w', 'b')])
    """
    return find_tree_plan(moves, PlanOptions.read(budget, network, donate, slack))


def find_tree_plan(moves: Mapping[str, Any] | Sequence[Any], options: PlanOptions) -> TreePlan:
    """`plan_tree`, with options that were read before.

    >>> find_tree_plan({}, PlanOptions()).launches
    0
    """
    flat, free = flattened(moves), options._replace(budget=None)
    plans = {name: _planned(name, leaf, free) for name, leaf in flat.items()}
    kinds = device_kinds(plans.values())
    batches = in_order(batches_of(plans, options.network), kinds)
    if options.budget is not None and max(peaks([batch.footprint(kinds) for batch in batches])) > options.budget:

        def replan(name: str, room: int) -> Plan:
            return _planned(name, flat[name], options._replace(budget=room))

        batches = plan_tree_within(plans, replan, kinds, options)
    return TreePlan(tuple(flat), tuple(batches))


def _planned(name: str, leaf: Any, options: PlanOptions) -> Plan:
    """The plan of one array; its errors name it."""
    ends = cast("list[Any]", leaf) if isinstance(leaf, tuple | list) else [leaf]
    if isinstance(leaf, Layout):
        raise PlanError(f"{name}: the layout {leaf} has no target; give a (source, target) pair of layouts")
    if not 1 <= len(ends) <= 2:
        raise PlanError(f"{name}: {quoted(ends)} is not a move; give a (source, target) pair of layouts")
    try:
        return find_plan(ends[0], ends[1] if len(ends) == 2 else None, options)
    except BudgetError:
        raise
    except ReshardError as error:
        raise type(error)(f"{name}: {error}") from None
