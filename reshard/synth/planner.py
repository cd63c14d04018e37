"""The planner: prices the routes, keeps those within the budget, returns the best plan, checked.

    routes        candidate steps                       the normal form, an exchange, over a permute, ...
    cost          their seconds on a network            the fastest few stay
    chain         each step checked by its typing rule  a plan: bytes, launches, live memory
    idle          ... and over axes that nothing uses   less time for more bytes
    budget        steps cut until they fit              or a `BudgetError`
    choose_plan  the least of these                    seconds, bytes, launches, memory

Without a network the best plan has the fewest bytes on the busiest device, then the fewest launches, then the least
memory, where the messages of an exchange count as buffers even if it does not stage them. With a network it has the
least predicted seconds, then the same.

Seconds that differ in their last digits are equal: they are sums in different orders. Between uneven layouts or two
sets of devices, and without a network, bytes within `slack` of the fewest are equal, too: the padding that one
all-gather carries along is cheaper than the 511 messages of an exchange that leaves it out. The slack is counted once,
from the fewest bytes of all routes: no plan has more than (1 + slack) of these.

A source and a target on different devices have routes of their own (`routes.crossing`). Bytes then mean what the
busiest device sends or receives in all, and after that the sum over steps of what the busiest one of each does, with
the same slack: the steps run one after the other. A relay is tried only where it may have fewer bytes than what is
chosen without it allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

from reshard.errors import NamedErrors, PlanError, StepError, name_arguments, quoted
from reshard.geometry.detect import LayoutLike, as_layouts
from reshard.geometry.holders import count_copies
from reshard.geometry.remesh import common_mesh, disjoint, mesh_of_used, one_set, remesh
from reshard.plans.pipeline import Pipeline, plan_part
from reshard.plans.plan import (
    Batch,
    LiveArrays,
    Plan,
    StepSpec,
    TreePlan,
    chain,
    device_kinds,
    flatten_tree,
    list_lanes,
)
from reshard.plans.rules.step_mode import StepMode
from reshard.synth import cost, moves
from reshard.synth.budget import fit_plans
from reshard.synth.move_classes import check_start, list_timed_routes
from reshard.synth.network import Network
from reshard.synth.options import SLACK, PlanOptions
from reshard.synth.routes import Pair, Route, crossing, list_routes
from reshard.synth.tree_batches import fit_batches, group_plans, sort_batches
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, MeshLike
from reshard.types.move import Move
from reshard.types.whole import check_deadline


@name_arguments
def plan(
    source: LayoutLike | Move,
    target: LayoutLike | None = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    slack: float = SLACK,
    *,
    mesh: MeshLike | None = None,
    have: LayoutLike | None = None,
    changed: object = None,
) -> Plan:
    """The best checked plan from source to target, or of a `Move` with its view, its parts and its cast.

    Source and target are layouts in any form that `reshard.as_layout` reads: text, what JAX and torch say of an array,
    or the array itself. What one of them leaves out, the other one says, or `mesh`.

    `budget` is in bytes a device, or text such as "64MiB", and counts everything live during the move, source and
    target included; `network` is a `Network`, the name of a preset or a file, or None or "none" for none; `donate` lets
    the source be overwritten or freed once its data has moved. Where a layout is uneven or the devices differ, and
    there is no network, plans whose bytes exceed the fewest of all routes by a share of at most `slack` count as equal
    in bytes, and the fewest launches decide; 0 is exact. Plans are cached, and equal arguments give equal plans in
    every process.

    The devices of source and target may differ. Then the best plan without a network is the one whose busiest device
    sends or receives the fewest bytes in all, then the one with the least sum of that over steps.

    `have` is a layout in which devices of the target hold the array already, and `changed` says which elements have
    changed since: boxes, rows or a mask (`IndexSet.read`). Then only the difference moves, in one exchange; see `Move`.

    Raises `PlanError` for layouts of different arrays, for a target that is a mean where the source is
    not, and for options of the wrong kind; `BudgetError`, with the smallest budget that works, if it cannot be met.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> p = plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    >>> [s.kind for s in p.steps], p.received_bytes, p.lower_bound_bytes
    (['all_to_all'], 1792, 1792)
    >>> plan("f32[{x}4, 8]", "P(None, 'x')", mesh=Mesh(x=4)).launches
    1
    """
    if (type(source) is not Layout or type(target) is not Layout) and not isinstance(source, Move):
        # First: swapped arguments would otherwise be reported as a wrong budget.
        source, target = _check_ends(source, target, mesh)
    options = PlanOptions.read(budget, network, donate, slack)
    if have is None and changed is None:
        return find_plan(source, target, options)
    if isinstance(source, Move):
        raise PlanError(
            f"have= and changed= are of the move: give Move(..., have=, changed=), not {source} beside them"
        )
    held = None if have is None else as_layouts(target, have)[1]
    return find_plan(Move(*_check_ends(source, target), have=held, changed=changed), None, options)


def find_plan(source: Layout | Move, target: Layout | None, options: PlanOptions) -> Plan:
    """`plan`, with options that were read before."""
    before, after = _check_ends(source, target)
    # Slack is for uneven layouts without a network; what decides nothing here makes no new entry of the caches.
    network = options.network
    viewed = isinstance(source, Move) and not source.plain
    exact = network is not None or (before.even and after.even and one_set(before.mesh, after.mesh) and not viewed)
    used = PlanOptions(options.budget, network, options.donate, 0.0 if exact else options.slack)
    if isinstance(source, Move) and viewed:
        return _plan_view_move(source, used)
    return _plan_layouts(before, after, used)


FEW_SENDERS = 4
"""Sets of senders: the arrays of fewer take few launches on their own."""


def _find_gathering(flat: Mapping[str, Any]) -> frozenset[str]:
    """The moves of a tree that relays serve which gather: many arrays, with senders of their own, to what replicates.

    Each by itself takes as many launches as its senders have receivers, at best, and others than the next one. Such
    relays send along the same few pairs whatever the senders, and receive no more.
    """
    found: dict[str, Mesh] = {}
    for name, leaf in flat.items():
        ends = list(cast("Sequence[object]", leaf)) if isinstance(leaf, tuple | list) else [cast("object", leaf)]
        move = ends[0] if ends else None
        if isinstance(move, Move):
            source, target, held = move.source, move.target, move.holding is not None
        else:
            source, target, held = move, ends[-1] if ends else None, False
        if isinstance(source, Layout) and isinstance(target, Layout) and not held and may_gather(source, target):
            found[name] = source.mesh
    return frozenset(found) if len({*found.values()}) >= FEW_SENDERS else frozenset()


def may_gather(source: Layout, target: Layout) -> bool:
    """Whether a relay to other devices may gather: each tile of the source has one holder, and several devices need the
    same one of the target.

    >>> from reshard.types import Layout, Mesh
    >>> rows, server = Layout.parse("f32[{x}4]", Mesh(x=3)), Mesh(rep=2, tp=2)
    >>> [may_gather(rows, Layout.parse(text, server)) for text in ("f32[{tp}6]", "f32[{rep}{tp}3]")]
    [True, False]
    """
    if source.mesh is target.mesh:
        return False
    partial = source.partial or target.partial
    return not (partial or count_copies(source) > 1 or count_copies(target) == 1) and not one_set(
        source.mesh, target.mesh
    )


def _plan_gathering(source: Layout, target: Layout, options: PlanOptions) -> Plan:
    """The plan between two layouts that is a relay which gathers, where one may; else the best one."""
    if not may_gather(source, target) or options.budget is not None:
        return _plan_layouts(source, target, options)
    spec = StepSpec("exchange", target, StepMode(relay=True, gathers=True))
    return cost.time_on_network(chain(source, target, [spec], options.donate), options.network)


@lru_cache(maxsize=4096)
def _plan_gathering_move(move: Move, options: PlanOptions) -> Plan:
    """The plan of a move through a view whose exchange is a relay that gathers."""
    if move.plain:
        return _plan_gathering(move.source, move.target, options)
    made = moves.plan_candidates(move, _plan_gathering, options, gathers=True)
    return choose_plan([cost.time_on_network(plan, options.network) for plan in made], options.slack)


@lru_cache(maxsize=4096)
def _plan_view_move(move: Move, options: PlanOptions) -> Plan:
    """The best plan of a move with a view, a part or a cast, from those of its middle; see `moves`."""
    made, network, slack = moves.plan_candidates(move, _plan_layouts, options), options.network, options.slack
    fewest = 0
    least = min(map(_busiest_bytes, made))
    if slack and len({*map(_busiest_bytes, made)}) > 1 and least > made[0].endpoint_bound_bytes:
        # The plans of the middle may have spent the slack already.
        exact = moves.plan_candidates(move, _plan_layouts, options._replace(slack=0.0))
        fewest = min(map(_busiest_bytes, exact))
    # Steps in the middle may be spelled on another mesh of the same devices, whose axes have links of their own.
    return choose_plan([cost.time_on_network(plan, network) for plan in made], slack, fewest)


@lru_cache(maxsize=4096)
def _plan_layouts(source: Layout, target: Layout, options: PlanOptions) -> Plan:
    """The best plan between two layouts of one array, whose options say what decides (see `find_plan`)."""
    pair = Pair(*_spell_on_one_mesh(source, target))
    check_start(pair)
    if pair.crosses:
        # To other devices; relays only where one may load the busiest device less.
        budget, network, donate, slack = options[:4]

        def plan_routes(routes: Iterable[Route]) -> list[Plan]:
            return [chain(pair.source, pair.target, route, donate) for route in routes]

        def fit_and_time(plans: Sequence[Plan]) -> list[Plan]:
            fitting = plans if budget is None else fit_plans(plans, budget, None)
            return [cost.time_on_network(plan, network) for plan in fitting]

        plans = plan_routes(dict.fromkeys(crossing.routes(pair, network)))
        bound, fewest = plans[0].endpoint_bound_bytes, min(map(_busiest_bytes, plans))
        if _is_within(fewest, bound, slack if network is None else SLACK):
            fitting = fit_and_time(plans)
            chosen = choose_plan(fitting, slack, bound)
            # With fewest bytes above the bound, more is within their slack, unless a relay has fewer yet.
            if network is not None or fewest == bound or chosen is choose_plan(fitting, slack):
                return chosen
        relays = plan_routes(crossing.list_relays(pair.source, pair.target))
        return choose_plan(fit_and_time([*plans, *relays]), slack)
    budget, network, donate, slack = options[:4]
    links = None if network is None else network.links(pair.source.mesh)
    routes: Sequence[Route]
    if links is None:
        # Only routes whose tiles are never larger than those at the ends, if there are any: others need more memory
        # than the larger of the two, and would be tried for their launches alone.
        routes, most = list_routes(pair, None), max(pair.source.tile_bytes, pair.target.tile_bytes)
        routes = [route for route in routes if all(step.result.tile_bytes <= most for step in route)] or routes
    else:
        # Under a budget a slower route may be the one that fits, so that none is left out.
        routes = list_timed_routes(pair, links, every=budget is not None)
    made, bound = list[Plan](), 0
    for route in routes:
        check_deadline()
        plan = chain(pair.source, pair.target, route, donate)
        made.append(plan if links is None else cost.time_plan(plan, links))
        few = plan.launches <= 1 and budget is None and links is None and not (pair.source.even and pair.target.even)
        if few and _is_within(plan.received_bytes, plan.lower_bound_bytes, slack):
            bound = plan.lower_bound_bytes
            break  # Good enough to skip the costly statistics of the exchange that rivals it.
    if crossing.relays_pieces(pair.source, pair.target):
        endpoint_bound = made[0].endpoint_bound_bytes
        if not _is_within(min(map(_busiest_bytes, made)), endpoint_bound, slack if links is None else SLACK):
            relays = (
                chain(pair.source, pair.target, each, donate) for each in crossing.list_relays(pair.source, pair.target)
            )
            made += relays if links is None else (cost.time_plan(plan, links) for plan in relays)
    return choose_plan(made if budget is None else fit_plans(made, budget, links), slack, bound)


def choose_plan(plans: Sequence[Plan], slack: float, bound: int = 0) -> Plan:
    """The plan of least seconds, then of fewest bytes, then of fewest launches, then of least memory.

    Bytes within the slack of the fewest count as equal. Where others may have fewer than all of these, the slack is
    counted from a `bound` of theirs, if some plan is within it: so no plan has more than (1 + slack) of the fewest.
    """
    if any(plan.seconds for plan in plans):
        least = min(plan.seconds or 0.0 for plan in plans)
        plans = [plan for plan in plans if cost.is_as_fast(plan.seconds or 0.0, least)]
    fewest = min(map(_busiest_bytes, plans))
    fewest = bound if bound and _is_within(fewest, bound, slack) else fewest
    plans = [plan for plan in plans if _is_within(_busiest_bytes(plan), fewest, slack)]
    if _loads_senders(plans[0]):  # The steps run one after the other, so the busiest devices of each add up.
        fewest = min(plan.endpoint_bytes for plan in plans)
        plans = [plan for plan in plans if _is_within(plan.endpoint_bytes, fewest, slack)]

    def preference(plan: Plan) -> tuple[int, int, int, int]:
        memory, exchanges = plan.peak_bytes, 0
        for step in plan.steps:
            if step.kind == "exchange" and step.mode.view is None:
                exchanges += 1
                if step.launches and not step.mode.in_place and not step.cost.scratch:
                    # Messages that are not staged have no scratch here, but XLA has buffers for them: counted so, an
                    # exchange ties with XLA's own collectives, which are then preferred.
                    memory = max(memory, step.live_bytes - (-step.received_bytes // step.launches))
        return plan.launches, memory, plan.received_bytes, exchanges

    return min(plans, key=preference)


def _busiest_bytes(plan: Plan) -> int:
    """What the busiest device receives; to other devices, through a view, or of pieces of any size, what it sends or
    receives."""
    return max(plan.sent_bytes, plan.received_bytes) if _loads_senders(plan) else plan.received_bytes


def _loads_senders(plan: Plan) -> bool:
    """Whether some devices may have to send more than any one receives: those that have the part which is wanted."""
    held = plan.view is not None or plan.holding is not None
    return held or plan.crosses or crossing.relays_pieces(plan.source, plan.target)


def _is_within(figure: int, fewest: int, slack: float) -> bool:
    return figure - fewest <= fewest * slack


def _check_ends(source: Any, target: Any, mesh: MeshLike | None = None) -> tuple[Layout, Layout]:
    """The source and the target of a request as layouts; refuses what says none, and layouts of different arrays."""
    if isinstance(source, Move):
        if target is not None:
            raise PlanError(f"a move has its target; give {source} alone, or two layouts")
        return source.source, source.target
    for name, given in (("source", source), ("target", target)):
        if isinstance(given, Layout):
            continue
        ends = cast("list[Any]", given if isinstance(given, tuple | list) else [])
        is_tree = isinstance(given, Mapping) or any(isinstance(each, Layout | Move) for each in ends)
        if is_tree or given is None:
            shown = cast("object", given)
            raise PlanError(
                f"the {name} {quoted(shown)} is a {type(shown).__name__}, not a Layout; write plan(source, target), or "
                f"plan_tree({{name: (source, target)}}) for many arrays"
            )
    before, after = as_layouts(source, target, mesh)
    if before.shape != after.shape:
        raise PlanError(
            f"source {before} has global shape {before.shape}, target {after} has {after.shape}; a "
            f"redistribution keeps the array, so give both the same global shape, or a Move with a view"
        )
    if before.dtype != after.dtype:
        raise PlanError(
            f"source {before} is {before.dtype}, target {after} is {after.dtype}; a redistribution keeps the "
            f"dtype, so cast before or after it, or give Move(source, target, cast=True)"
        )
    return before, after


def _spell_on_one_mesh(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts respelled on one mesh if one can express them, else as they are, for an exchange."""
    if source.mesh == target.mesh:
        return source, target
    shared = common_mesh(source.mesh, target.mesh) or mesh_of_used(source, target)
    for mesh in (source.mesh, target.mesh, shared):
        if mesh is not None and (s := remesh(source, mesh)) is not None and (t := remesh(target, mesh)) is not None:
            return s, t
    return source, target


# `plan_tree`: many arrays planned as one, in few launches and within one budget.
#
# planner        each array on its own; equal moves once
# batches        arrays whose steps share launches, in the order in which the peak is lowest; where that does not fit,
#                arrays are cut, and batches made smaller


@name_arguments
def plan_tree(
    moves: Mapping[str, Any] | Sequence[Any],
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    slack: float = SLACK,
    *,
    mesh: MeshLike | None = None,
    sources: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
) -> TreePlan:
    """The plans of many arrays, in batches that share launches.

    `moves` is a dict, list or tuple, nested or not, of (source, target) pairs, in any form that `plan` takes; a move's
    name is the path to it, such as "layers.0.w". `budget` bounds what lives on a device at any time: all
    sources, all targets and all buffers. A batch has as many arrays as its buffers allow: 32 MiB on a device, or a
    sixteenth of all sources and targets. The other options are those of `plan`, for every array. Equal trees give equal
    plans in every process.

    `sources` and `targets` say, by the names of moves, which array a move reads and which one it fills, where that is
    not one of its own name. Moves may read one array, and fill parts of one that do not overlap: such an array is
    counted once. A target is made new if its parts cover it, and else given by whoever runs the plan. A source that is
    donated is freed after the last move that reads it.

    Raises the errors of `plan`, with the move's name, and `BudgetError`, with the smallest budget that works.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> ends = {"w": ("f32[{x}4, 8]", "f32[16, 8]"), "b": ("f32[{x}2]", "f32[8]")}
    >>> tree = plan_tree({name: tuple(Layout.parse(end, mesh) for end in pair) for name, pair in ends.items()})
    >>> tree.launches, [batch.names for batch in tree.batches]
    (1, [('w', 'b')])
    >>> half, both = (Layout.parse(text, mesh) for text in ("f32[{x}4]", "f32[2, {x}4]"))
    >>> parts = {name: Move(half, both, into={0: at}) for at, name in enumerate("ab")}
    >>> tree = plan_tree(parts, targets=dict.fromkeys("ab", "both"))
    >>> tree.targets, tree.filled, tree.peak_bytes
    (('both', 'both'), (), 64)
    """
    if isinstance(budget, Layout | Mapping):
        raise PlanError("plan_tree takes sources and targets together: {name: (source, target)}, or a list of pairs")
    read = flatten_tree(moves, pairs=True)
    for name, leaf in read.items():
        ends = cast("list[Any]", leaf if isinstance(leaf, tuple | list) else [])
        if len(ends) == 2 and not all(isinstance(end, Layout) for end in ends):
            with NamedErrors(name):
                read[name] = _check_ends(ends[0], ends[1], mesh)
    return find_tree_plan(read, PlanOptions.read(budget, network, donate, slack), sources, targets)


def find_tree_plan(
    moves: Mapping[str, Any] | Sequence[Any],
    options: PlanOptions,
    sources: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
    beside: int = 0,
) -> TreePlan:
    """`plan_tree`, with options that were read before. Where the tree is one of several, `beside` is what all of them
    have on a device: the buffers of a batch are a share of that."""
    flat, free = flatten_tree(moves), options._replace(budget=None)
    reads, fills = _name_arrays(flat, sources, "sources"), _name_arrays(flat, targets, "targets")
    readers = Counter(reads)
    shared = {name for name, source in zip(flat, reads, strict=True) if readers[source] > 1} if sources else set[str]()
    gathering = _find_gathering(flat)

    def plan_move(name: str, leaf: Any, options: PlanOptions) -> Plan:
        if not options.donate or name not in shared:
            return _plan_leaf(name, leaf, options, name in gathering and options.budget is None)
        # No move may write over what another one reads; the tree frees it, after the last of them.
        kept = _plan_leaf(name, leaf, options._replace(donate=False), name in gathering and options.budget is None)
        specs, times = [step.spec for step in kept.steps], [step.seconds for step in kept.steps]
        return chain(kept.source, kept.target, specs, True, times, kept.view)

    plans: dict[str, Plan] = {}
    for name, leaf in flat.items():
        plans[name] = plan_move(name, leaf, free)
        list_lanes(plans[name])  # Now, while the figures of its steps are at hand.
    # Whether arrays have one layout each, and parts do not overlap, is checked before anything is asked of them.
    alone = tuple(Batch((name,), (plan,)) for name, plan in plans.items()) if sources or targets else ()
    arrays = TreePlan(tuple(flat), alone, reads, fills).arrays if alone else LiveArrays(tuple(flat), [*plans.values()])
    kinds = device_kinds(plans.values())
    batches = sort_batches(group_plans(plans, options.network, max(beside, arrays.tile_bytes)), kinds, arrays)
    tree = TreePlan(tuple(flat), tuple(batches), reads, fills)
    if options.budget is not None and tree.peak_bytes > options.budget:

        def replan(name: str, room: int) -> Plan:
            return plan_move(name, flat[name], options._replace(budget=room))

        batches = fit_batches(plans, replan, kinds, options, arrays)
        tree = TreePlan(tuple(flat), tuple(batches), reads, fills)
    return tree


def _name_arrays(moves: Mapping[str, Any], given: object, what: str) -> tuple[str, ...]:
    """The array that each move reads, or fills: the one that is given for it, else one of its own name."""
    if given is None:
        return tuple(moves)
    if not isinstance(given, Mapping):
        raise PlanError(f"{what} {quoted(given)}: give a dict of move names and names of arrays")
    named = cast("Mapping[str, str]", given)
    wrong = [name for name, array in named.items() if name not in moves or not isinstance(array, str)]  # pyright: ignore
    if wrong:
        raise PlanError(f"{what}: {quoted(wrong[:4])} are not moves of the tree, or their arrays' names are not text")
    return tuple(named.get(name, name) for name in moves)


def _plan_leaf(name: str, leaf: Any, options: PlanOptions, gathers: bool) -> Plan:
    """The plan of one array, which may be a relay that `gathers`; its errors name it."""
    ends = cast("list[Any]", leaf) if isinstance(leaf, tuple | list) else [leaf]
    if isinstance(leaf, Layout):
        raise PlanError(f"{name}: the layout {leaf} has no target; give a (source, target) pair of layouts")
    if len(ends) != 2 and not (len(ends) == 1 and isinstance(leaf, Move)):
        raise PlanError(
            f"{name}: {quoted(cast('object', leaf))} is not a move; give a (source, target) pair of layouts"
        )
    with NamedErrors(name):
        source, target = ends[0], ends[1] if len(ends) == 2 else None
        if not gathers:
            return find_plan(source, target, options)
        before, after = _check_ends(source, target)
        return _plan_gathering_move(source if isinstance(source, Move) else Move(before, after), options)


# Plans of few messages, whose programs are short. A compiler is given the two devices of every message of a permute,
# and of every round of an exchange: 32 kB of text a round on 1,024 devices. The groups of an all-to-all are a line.


def message_count(plan: Plan) -> int:
    """How many messages the permutes and exchanges of a plan list, all devices together."""
    rounds = sum(step.launches for step in plan.steps if step.kind in ("exchange", "permute"))
    return rounds * plan.source.mesh.size


def short_plans(source: Layout, target: Layout, messages: int, options: PlanOptions) -> list[Plan]:
    """The plans on one set of devices that list at most this many `messages`, within the budget of the options.

    Steps are not cut to fit the budget, which would make more messages, and no tile on the way is larger than those at
    the ends. There may be no such plan.
    """
    pair, links = Pair(source, target), None if options.network is None else options.network.links(source.mesh)
    most = max(source.tile_bytes, target.tile_bytes)
    made = (cost.time_plan(chain(source, target, route, options.donate), links) for route in list_routes(pair, links))
    return [
        plan
        for plan in made
        if message_count(plan) <= messages
        and (options.budget is None or plan.peak_bytes <= options.budget)
        and all(step.result.tile_bytes <= most for step in plan.steps)
    ]


# Pipelines to other devices: how many parts, and what their schedule takes.
#
#     a   a part crosses                               the senders' busiest device, or the receivers'
#     r   what a receiver takes in of that             counted beside the gather, as if they had one link
#     b   a part is gathered on the target's devices
#
#     a  +  (parts - 1) max(a, r + b)  +  b
#
# The first part crosses alone, and the last one is gathered alone. Between, a part crosses while the one before is
# gathered. A receiver takes in both, and no less than the sum of both is charged to it: links of their own would be
# faster.

MOST_PARTS = 16
"""The most parts: more gain at most a sixteenth of the shorter step."""


def overlapped(source: Layout, target: Layout, network: Network) -> Pipeline | None:
    """The pipeline of least predicted seconds from one set of devices to another, None if there is none.

    There is one where no device is in both sets, and the target gathers what it replicates or turns what it gets.

    >>> from reshard.types import Mesh
    >>> trainer, server = Mesh(fsdp=16), Mesh({"tp": 8, "rep": 16}, device_ids=range(16, 144))
    >>> weights, served = Layout.parse("f32[{fsdp}8, 128]", trainer), Layout.parse("f32[128, {tp}16]", server)
    >>> pipeline = overlapped(weights, served, Network("wires", inner=(0.0, 1e9), domain=128))
    >>> pipeline.parts, round(pipeline.seconds * 1e9 / pipeline.plan.endpoint_bound_bytes, 3)
    (16, 1.027)
    """
    if not disjoint(source.mesh, target.mesh) or source.partial or target.partial:
        return None
    every: list[Pipeline] = []
    for route in dict.fromkeys(crossing.routes(Pair(source, target), network)):
        if len(route) > 1:
            one = chain(source, target, route)
            for parts in range(2, MOST_PARTS + 1):
                with suppress(PlanError, StepError):  # It does not split so.
                    every.append(Pipeline(one, parts, predict_pipeline(plan_part(one, parts), parts, network)))
    return min(every, key=lambda each: (float(f"{each.seconds:.9g}"), each.launches, each.peak_bytes), default=None)


def predict_pipeline(each: Plan, parts: int, network: Network) -> float:
    """Predicted seconds of a plan in parts, of which `each` is that of one."""
    first, *later = cost.time_on_network(each, network).steps
    crosses, gathers = first.seconds or 0.0, sum(step.seconds or 0.0 for step in later)
    taken = first.received_bytes / network.crossing.bandwidth
    return crosses + (parts - 1) * max(crosses, taken + gathers) + gathers
